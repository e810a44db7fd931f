"""Where the spool's files are, who may read them, and what removes those of a killed process."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
import tempfile
from itertools import count
from pathlib import Path

import pytest

from subscriber.apply.receiving.spool import SpoolDirectory
from subscriber.errors import SpoolError
from tests.unit.apply.test_spool import KEY, RECORDS, files, read


async def test_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        async with SpoolDirectory(str(tmp_path / "a" / "b"), KEY) as spool:
            await spool.append(1, RECORDS)
            assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
            assert stat.S_IMODE(spool.directory.stat().st_mode) == 0o700
            assert stat.S_IMODE(files(spool.directory)[0].stat().st_mode) == 0o600
    finally:
        os.umask(before)


async def test_close_removes_the_directory(tmp_path: Path) -> None:
    spool = SpoolDirectory(str(tmp_path), KEY)
    await spool.open()
    await spool.append(1, RECORDS)
    part = spool.reader(1)
    await spool.append(2, RECORDS)
    await spool.close()
    assert files(tmp_path) == []
    await spool.close()
    await part.discard()
    await spool.discard(2)


async def test_different_keys_have_different_directories(tmp_path: Path) -> None:
    async with SpoolDirectory(str(tmp_path), "a") as one, SpoolDirectory(str(tmp_path), "../b") as other:
        assert one.directory != other.directory
        assert one.directory.parent == other.directory.parent == tmp_path
        await one.append(1, [b"one"])
        await other.append(1, [b"other"])
        assert await read(one.reader(1)) == [b"one"]
        assert await read(other.reader(1)) == [b"other"]


async def test_default_is_below_the_temporary_directory_of_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    async with SpoolDirectory(None, KEY) as spool:
        assert spool.directory.parent == tmp_path / f"subscriber-{os.geteuid()}"


async def test_tmpdir_variable_is_used_even_if_it_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would silently take /tmp instead, which in a container is neither the volume nor large."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "file"))
    with pytest.raises(SpoolError, match="could not create spool directory") as raised:
        await SpoolDirectory(None, KEY).open()
    assert str(tmp_path / "file") in str(raised.value)


async def test_no_temporary_directory_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", fail)
    with pytest.raises(SpoolError, match="no directory for temporary files") as raised:
        SpoolDirectory(None, KEY)
    assert raised.value.hint is not None
    assert "TMPDIR" in raised.value.hint


async def test_symbolic_link_in_the_place_of_the_default_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / f"subscriber-{os.geteuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SpoolError, match="is not private"):
        await SpoolDirectory(None, KEY).open()
    assert files(tmp_path / "elsewhere") == []


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777, 0o702])
@pytest.mark.parametrize("which", ["base", "own"])
async def test_directory_that_others_may_write_to_is_refused(tmp_path: Path, mode: int, which: str) -> None:
    spool = SpoolDirectory(str(tmp_path / "base"), KEY)
    path = tmp_path / "base" if which == "base" else spool.directory
    path.mkdir(parents=True)
    path.chmod(mode)
    with pytest.raises(SpoolError, match="is not private") as caught:
        await spool.open()
    assert str(path) in str(caught.value)
    assert caught.value.hint is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
@pytest.mark.parametrize("which", ["base", "own"])
async def test_directory_of_another_user_is_rejected(tmp_path: Path, which: str) -> None:
    spool = SpoolDirectory(str(tmp_path / "base"), KEY)
    path = tmp_path / "base" if which == "base" else spool.directory
    path.mkdir(parents=True, mode=0o700)
    os.chown(path, 12345, -1)
    with pytest.raises(SpoolError, match="is not private"):
        await spool.open()


async def test_base_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "base").write_text("")
    with pytest.raises(SpoolError, match="could not create spool directory") as caught:
        await SpoolDirectory(str(tmp_path / "base"), KEY).open()
    assert str(tmp_path / "base") in str(caught.value)


_KILLED = """
import asyncio, os, signal, sys
from subscriber.apply.receiving.spool import SpoolDirectory

async def main():
    spool = SpoolDirectory(sys.argv[1], sys.argv[2])
    await spool.open()
    await spool.append(1, [b"left behind"] * 1000)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def test_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    killed = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", _KILLED, str(tmp_path), KEY], check=False)
    assert killed.returncode == -9
    spool = SpoolDirectory(str(tmp_path), KEY)
    assert len(files(spool.directory)) == 1
    async with SpoolDirectory(str(tmp_path), "another"):
        assert len(files(spool.directory)) == 1, "another key's are not touched"
    async with spool:
        assert files(spool.directory) == []
        await spool.append(1, RECORDS)
        assert await read(spool.reader(1)) == RECORDS


_PROBES = """
import asyncio, os, sys
from subscriber.apply.receiving.spool import SpoolDirectory

base, left = sys.argv[1], int(sys.argv[2])

def count(event, arguments):
    global left
    if event in {"open", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"} and str(arguments[0]).startswith(base):
        left -= 1
        if left == 0:
            os._exit(9)

sys.addaudithook(count)
asyncio.run(SpoolDirectory.probe(base))
"""


async def test_a_process_killed_while_it_probes_leaves_nothing(tmp_path: Path) -> None:
    base = tmp_path / "base"
    for number in count(1):
        ended = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", _PROBES, str(base), str(number)], check=False)
        assert not base.exists() or files(base) == []
        if ended.returncode != 9:
            assert (ended.returncode, number > 1) == (0, True)
            break


async def test_sweep_removes_files_that_will_not_be_opened(tmp_path: Path) -> None:
    spool = SpoolDirectory(str(tmp_path / "base"), KEY)
    await spool.sweep()
    assert not (tmp_path / "base").exists(), "there was nothing to remove"
    await spool.open()
    await spool.append(1, RECORDS)
    await SpoolDirectory(str(tmp_path / "base"), "another").sweep()
    assert len(files(spool.directory)) == 1
    await SpoolDirectory(str(tmp_path / "base"), KEY).sweep()
    assert files(tmp_path / "base") == []
