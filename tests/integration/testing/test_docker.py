"""docker/'s configuration, init scripts, command lines and health check on real servers, without an engine.

A server of the version that the run is for (see tests/support/versions.py) is set up as its container would be, and then runs what
compose.yaml says, with the hosts' names replaced.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from psycopg import pq

from subscriber.testing.binaries import reachable_binaries, server_user
from subscriber.testing.server import EmbeddedServer

DOCKER = Path(__file__).parents[3] / "docker"
PASSWORD = "pass word'$x"  # the init scripts must quote it
TARGET_PASSWORD = "of the target"
WAIT_SECONDS = 60.0


pytestmark = pytest.mark.publisher(min=14, lacks="service of its own in compose.yaml")


def _settings(text: str) -> dict[str, str]:
    """What the files set, less where a container listens and keeps its pg_hba.conf."""
    pairs = (line.split("=", 1) for line in text.splitlines() if line.strip() and not line.startswith("#"))
    found = {name.strip(): value.strip().strip("'") for name, value in pairs}
    return {name: value for name, value in found.items() if name not in {"listen_addresses", "hba_file"}}


def _run_init_script(server: EmbeddedServer, script: Path, dbname: str, password: str) -> None:
    """As the image's entry point does: over the socket, stopping at the first error."""
    psql = reachable_binaries(18, server_user()) / "psql"
    subprocess.run(
        [psql, "-v", "ON_ERROR_STOP=1", "--no-password", "--no-psqlrc", "--quiet", "--dbname", dbname, "-f", script],
        env={
            "PATH": os.environ["PATH"],
            "PGHOST": str(server.socket_directory),
            "PGPORT": str(server.port),
            "PGUSER": server.user,
            "SUBSCRIBER_PASSWORD": password,
        },
        check=True,
        timeout=60,
    )


@pytest.fixture(scope="module")
def publisher(publisher_version: int) -> Iterator[EmbeddedServer]:
    """Set up as a compose publisher of its version."""
    with EmbeddedServer.create(publisher_version, settings=_settings((DOCKER / "publisher" / "postgresql.conf").read_text())) as server:
        (server.data_directory / "pg_hba.conf").write_text((DOCKER / "publisher" / "pg_hba.conf").read_text())
        server.restart()
        server.createdb("app")
        _run_init_script(server, DOCKER / "publisher" / "init.sql", "app", PASSWORD)
        yield server


@pytest.fixture(scope="module")
def target() -> Iterator[EmbeddedServer]:
    """Set up as the compose target."""
    _, *options = _compose()["services"]["target"]["command"]
    settings = dict(word.split("=", 1) for word in options if word != "-c")
    with EmbeddedServer.create(18, settings=settings) as server:
        _run_init_script(server, DOCKER / "target" / "init.sql", "postgres", TARGET_PASSWORD)
        yield server


def _compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    return found


@dataclass
class Container:
    """What compose.yaml runs as subscription<version>, on this machine."""

    publisher: EmbeddedServer
    target: EmbeddedServer
    directory: Path

    def _translated(self, words: list[str]) -> list[str]:
        version = self.publisher.version
        hosts = {
            f"host=publisher{version} ": f"host={self.publisher.host} port={self.publisher.port} ",
            "@target/": f"@{self.target.host}:{self.target.port}/",
        }
        for old, new in hosts.items():
            words = [word.replace(old, new) for word in words]
        return words

    @property
    def _service(self) -> dict[str, Any]:
        found: dict[str, Any] = _compose()["services"][f"subscription{self.publisher.version}"]
        return found

    @property
    def _environment(self) -> dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        passwords = {"SUBSCRIBER_PUBLISHER_PASSWORD": PASSWORD, "SUBSCRIBER_TARGET_PASSWORD": TARGET_PASSWORD}
        return {**environment, **passwords, "TMPDIR": str(self.directory)}

    def start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", "subscriber", *self._translated(self._service["command"])], env=self._environment)

    def health(self) -> tuple[int, str]:
        """Status and output of the health check."""
        _, _, _, *arguments = self._service["healthcheck"]["test"]
        done = subprocess.run(
            [sys.executable, DOCKER / "healthcheck.py", *self._translated(arguments)],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
        assert done.stderr == ""
        return done.returncode, done.stdout.strip()

    def until_it_replicates(self) -> None:
        """Wait for the state that the health check asks for: each check is a program, and would take the time of the one that starts."""
        deadline = time.monotonic() + WAIT_SECONDS
        name = f"from{self.publisher.version}"
        with psycopg.connect(self.publisher.dsn("app")) as source, psycopg.connect(self.target.dsn(name), autocommit=True) as copy:
            tables = "SELECT count(*) FROM subscriber.pg_subscription_rel WHERE srsubstate = 'r'"
            slot = "SELECT count(*) FROM pg_replication_slots WHERE active"
            while True:
                with contextlib.suppress(psycopg.errors.UndefinedTable):
                    if copy.execute(tables).fetchone() == (2,) and source.execute(slot).fetchone() == (1,):
                        return
                assert time.monotonic() < deadline, f"not within {WAIT_SECONDS:g} s"
                time.sleep(0.05)

    def subscriber_dsn(self, server: EmbeddedServer, dbname: str) -> str:
        return server.dsn(dbname, user="subscriber", password=PASSWORD)


@pytest.mark.matrix
def test_publisher_has_the_settings(publisher: EmbeddedServer) -> None:
    with psycopg.connect(publisher.dsn("app")) as session:
        for name, expected in _settings((DOCKER / "publisher" / "postgresql.conf").read_text()).items():
            assert session.execute("SELECT current_setting(%s)", (name,)).fetchone() == (expected,)
        rules = session.execute("SELECT count(*) FROM pg_hba_file_rules WHERE error IS NOT NULL").fetchone()
        assert rules == (0,)


@pytest.mark.parametrize("replication", ["database", "true"])
def test_replication_is_allowed_with_scram_only(publisher: EmbeddedServer, replication: str) -> None:
    dsn = publisher.dsn("app", user="subscriber", password=PASSWORD, replication=replication)
    session = pq.PGconn.connect(dsn.encode())
    assert session.status == pq.ConnStatus.OK
    assert session.used_password
    assert session.exec_(b"IDENTIFY_SYSTEM").status == pq.ExecStatus.TUPLES_OK
    session.finish()
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(publisher.dsn("app", user="subscriber", password="wrong", replication=replication))


def test_roles_are_no_superusers(publisher: EmbeddedServer, target: EmbeddedServer) -> None:
    for server in (publisher, target):
        with psycopg.connect(server.dsn()) as session:
            found = session.execute("SELECT rolsuper, rolcreaterole, rolcreatedb FROM pg_roles WHERE rolname = 'subscriber'").fetchone()
            assert found == (False, False, False)


def test_container_is_healthy_when_and_only_when_it_replicates(publisher: EmbeddedServer, target: EmbeddedServer, tmp_path: Path) -> None:
    container = Container(publisher, target, tmp_path)
    name = f"from{publisher.version}"
    assert container.health() == (1, "the target has no catalog yet")
    process = container.start()
    try:
        container.until_it_replicates()
        assert container.health() == (0, "")
        assert process.poll() is None
        with psycopg.connect(publisher.dsn("app"), autocommit=True) as source, psycopg.connect(target.dsn(name), autocommit=True) as copy:
            total = "SELECT count(*), sum(balance) FROM accounts"
            assert copy.execute(total).fetchone() == source.execute(total).fetchone()
            source.execute("INSERT INTO transfers (from_account, to_account, amount) VALUES (1, 2, 3)")
            deadline = time.monotonic() + WAIT_SECONDS
            while copy.execute("SELECT from_account, to_account, amount FROM transfers").fetchall() != [(1, 2, 3)]:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            copy.execute("UPDATE subscriber.pg_subscription_rel SET srsubstate = 'd' WHERE srrelid = 'transfers'::regclass")
            assert container.health() == (1, f'1 of 2 tables of subscription "{name}" are not ready yet')
            copy.execute("UPDATE subscriber.pg_subscription_rel SET srsubstate = 'r'")
            assert container.health() == (0, "")
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_SECONDS) == 0
    finally:
        process.kill()
        process.wait()
    assert container.health() == (1, f'replication slot "{name}" is not active')
    publisher.stop()
    try:
        assert container.health() == (1, "the publisher cannot be reached")
    finally:
        publisher.start()
    with psycopg.connect(publisher.dsn("app"), autocommit=True) as source:
        source.execute("SELECT pg_drop_replication_slot(%s)", (name,))
    assert container.health() == (1, f'the publisher has no replication slot "{name}"')
