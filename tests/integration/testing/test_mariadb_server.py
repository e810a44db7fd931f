"""The embedded MariaDB: its own place, its own user, nothing left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pymysql
import pytest

from subscriber.errors import ConfigurationError
from subscriber.testing import mariadb_binaries
from subscriber.testing.mariadb import EmbeddedMariaDB
from subscriber.testing.mariadb_binaries import find_mariadb, install_mariadb
from subscriber.testing.ports import EmbeddedServerError
from tests.support.mariadb_database import MariaDatabase


def test_committed_rows_survive_a_kill(make_mariadb: Callable[..., EmbeddedMariaDB]) -> None:
    server = make_mariadb(max_connections="17")
    url = server.create_database("Größe `of` it")
    assert url.startswith(f"mariadb://subscriber:{server.password}@127.0.0.1:{server.port}/")
    database = MariaDatabase(server, "Größe `of` it")
    assert database.value("SELECT @@max_connections") == 17
    database.execute("CREATE TABLE t (id int PRIMARY KEY) ENGINE=InnoDB")
    port = server.port
    for number in range(3):
        database.execute(f"INSERT INTO t VALUES ({number})")
        server.kill()
        assert not server.running
        with pytest.raises(pymysql.err.OperationalError):
            database.connect()
        server.start()
        assert server.port == port
    server.restart()
    assert database.fetch("SELECT id FROM t ORDER BY id") == [(0,), (1,), (2,)]
    database.close()
    with pytest.raises(EmbeddedServerError, match=r"MariaDB refused to create a database: .*exists"):
        server.create_database("Größe `of` it")
    server.remove()
    assert not server.base.exists()
    with pytest.raises(EmbeddedServerError, match="MariaDB is not running"):
        _ = server.pid


def test_a_password_is_needed(mariadb: EmbeddedMariaDB) -> None:
    for user in (mariadb.user, "root"):
        with pytest.raises(pymysql.err.OperationalError, match="Access denied"):
            pymysql.connect(host=mariadb.host, port=mariadb.port, user=user, password="guessed")


def test_an_option_that_there_is_not(make_mariadb: Callable[..., EmbeddedMariaDB]) -> None:
    with pytest.raises(EmbeddedServerError, match="MariaDB did not start") as caught:
        make_mariadb(no_such_option="1")
    assert "no-such-option" in caught.value.one_line()


def test_ends_with_the_process_that_started_it() -> None:
    program = (
        "import sys; from subscriber.testing.mariadb import EmbeddedMariaDB; server = EmbeddedMariaDB.create(); "
        "print(server.pid, server.base, flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid, base = process.stdout.readline().split()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 30
    while Path(base).exists() or Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_no_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user who cannot install packages gets one line with the packages and the variables."""
    monkeypatch.setattr(mariadb_binaries, "_DIRECTORIES", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(mariadb_binaries.BINDIR_VARIABLE, raising=False)
    with pytest.raises(ConfigurationError, match="no MariaDB server programs were found") as caught:
        find_mariadb()
    assert "apt-get install mariadb-server-core mariadb-client-core" in caught.value.one_line()
    assert mariadb_binaries.WITHOUT_VARIABLE in caught.value.one_line()
    # no apt on that PATH either
    with pytest.raises(ConfigurationError, match="no MariaDB server programs were found"):
        install_mariadb()


def test_doing_without(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(mariadb_binaries.WITHOUT_VARIABLE, "1")
    assert mariadb_binaries.main() == 0
    assert "are skipped" in capsys.readouterr().out
    monkeypatch.setenv(mariadb_binaries.WITHOUT_VARIABLE, "0")
    assert not mariadb_binaries.is_done_without()
