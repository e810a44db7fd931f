"""The embedded servers themselves: they come up, obey, survive a kill, and go away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from subscriber.errors import ConfigurationError
from subscriber.testing import binaries, shared_memory
from subscriber.testing.server import EmbeddedServer, EmbeddedServerError
from tests.support.database import Database

MakeServer = Callable[..., EmbeddedServer]


@pytest.mark.matrix
def test_publisher_is_ready_for_logical_replication(publisher_db: Database) -> None:
    assert publisher_db.value("SHOW wal_level") == "logical"
    assert int(publisher_db.value("SHOW server_version_num")) // 10000 == publisher_db.version
    assert int(publisher_db.value("SHOW max_prepared_transactions")) > 0


def test_password_is_asked_for_over_tcp(publisher18_db: Database) -> None:
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        publisher18_db.connect(password="not this one")


def test_rows_survive(make_server: MakeServer, publisher_version: int) -> None:
    server = make_server(publisher_version)
    with psycopg.connect(server.dsn()) as connection:
        connection.execute("CREATE TABLE t (a int)")
    for number, end in enumerate(("stop", "kill", "restart")):
        with psycopg.connect(server.dsn()) as connection:
            connection.execute("INSERT INTO t VALUES (%s)", (number,))
        getattr(server, end)()
        assert server.running == (end == "restart")
        server.start()
        with psycopg.connect(server.dsn()) as connection:
            assert connection.execute("SELECT a FROM t ORDER BY a").fetchall() == [(row,) for row in range(number + 1)]


def test_kill_leaves_no_backend(make_server: MakeServer) -> None:
    server = make_server()
    with psycopg.connect(server.dsn()) as connection:
        backend = connection.info.backend_pid
        server.kill()
        deadline = time.monotonic() + 10
        while _runs(backend):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_settings_and_database_options(make_server: MakeServer) -> None:
    server = make_server(18, wal_level="replica", application_name="it's")
    url = server.createdb('na"me', encoding="LATIN1", template="template0")
    with psycopg.connect(url) as connection:
        shown = connection.execute("SELECT current_database(), current_setting('server_encoding'), current_setting('wal_level')").fetchone()
    assert shown == ('na"me', "LATIN1", "replica")


def test_start_that_fails_tells_the_log() -> None:
    with pytest.raises(EmbeddedServerError) as caught:
        EmbeddedServer.create(18, settings={"shared_buffers": "1 parsec"})
    assert "shared_buffers" in caught.value.one_line()


def test_unknown_version_is_named() -> None:
    with pytest.raises(ConfigurationError, match="no PostgreSQL 7 server programs") as caught:
        EmbeddedServer.create(7)
    assert "SUBSCRIBER_PG7_BINDIR" in str(caught.value.hint)


def test_context_manager_removes_everything() -> None:
    with EmbeddedServer.create(18) as server:
        assert server.data_directory.is_dir()
    assert not server.base.exists()


@pytest.mark.skipif(not Path("/proc/sysvipc/shm").exists(), reason="no list of System V segments here")
@pytest.mark.parametrize("end", ["stop", "kill", "remove"])
def test_no_shared_memory_is_left(make_server: MakeServer, publisher_version: int, end: str) -> None:
    def segments() -> set[tuple[int, int]]:
        lines = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
        return {(int(line.split()[0]), int(line.split()[1])) for line in lines}

    server = make_server(publisher_version)
    mine = shared_memory.segment(server.data_directory / "postmaster.pid")
    assert mine in segments()
    with psycopg.connect(server.dsn()) as connection:
        assert "/dev/shm/PostgreSQL." not in Path(f"/proc/{connection.info.backend_pid}/maps").read_text()
    getattr(server, end)()
    server.remove()
    assert mine not in segments()


def test_server_does_not_outlive_a_killed_owner() -> None:
    program = (
        "import sys; from subscriber.testing.server import EmbeddedServer; s = EmbeddedServer.create(18);"
        "print(s.base, (s.data_directory / 'postmaster.pid').read_text().split()[0], flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        base, pid = owner.stdout.readline().split()
        owner.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while Path(base).exists() or _runs(int(pid)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs servers as somebody else")
def test_programs_below_a_private_directory_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_server: MakeServer) -> None:
    install = binaries.find_binaries(18).parent
    package = install.parent
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    subprocess.run(["cp", "-r", package, f"{package}.libs", private], check=True)
    monkeypatch.setattr(binaries, "_wheel_directories", lambda: [private / package.name / install.name / "bin"])
    server = make_server(18)
    copied = server.bindir.parents[2]
    try:
        with psycopg.connect(server.dsn()) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)
        assert not server.bindir.is_relative_to(private)
        assert copied.stat().st_uid == 0
        assert not copied.stat().st_mode & 0o022
    finally:
        server.remove()
        subprocess.run(["rm", "-r", copied], check=True)
