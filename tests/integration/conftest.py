"""Fixtures of the tests on live servers. The servers and databases themselves are in tests/conftest.py."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from subscriber.testing.binaries import server_user
from subscriber.testing.server import EmbeddedServer
from tests.conftest import Servers
from tests.support.database import Database, ServerAddress, fresh_database
from tests.support.disk import Disk
from tests.support.sqlalchemy_targets import OtherTarget, Replica, native_target, replica_of, sqlite_target


@pytest.fixture
def make_server() -> Iterator[Callable[..., EmbeddedServer]]:
    """``EmbeddedServer.create`` for servers of this test alone, with settings of their own or to be stopped and killed."""
    made: list[EmbeddedServer] = []

    def create(version: int = 18, **settings: str) -> EmbeddedServer:
        server = EmbeddedServer.create(version, settings=settings)
        made.append(server)
        return server

    yield create
    for server in made:
        server.remove()


@pytest.fixture
def tls_server(make_server: Callable[..., EmbeddedServer], publisher_version: int) -> EmbeddedServer:
    """A publisher that speaks TLS, with ``server.crt`` in its data directory, and never sends a keepalive unasked."""
    server = make_server(publisher_version, wal_sender_timeout="0")
    with psycopg.connect(server.dsn(), autocommit=True) as session:
        if session.execute("SHOW ssl_library").fetchone() == ("",):
            pytest.skip(f"this build of PostgreSQL {publisher_version} has no TLS")
        certificate, key = server.data_directory / "server.crt", server.data_directory / "server.key"
        request = ["openssl", "req", "-new", "-x509", "-days", "2", "-nodes", "-subj", "/CN=localhost"]
        request += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(certificate), "-keyout", str(key)]
        subprocess.run(request, check=True, capture_output=True)
        for path in (certificate, key):
            path.chmod(0o600)
            server_user().own(path)
        session.execute("ALTER SYSTEM SET ssl = on")
    server.restart()
    return server


@pytest.fixture
def make_disk(scratch: Path) -> Iterator[Callable[[int], Disk]]:
    """Makes one of so many megabytes; the test is skipped where that is not allowed."""
    with ExitStack() as unmounting:

        def make(megabytes: int) -> Disk:
            path = scratch / "disk"
            path.mkdir(mode=0o755)
            done = subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=0755", "tmpfs", path], capture_output=True, text=True, check=False
            )
            if done.returncode != 0:
                pytest.skip(f"no file system can be mounted: {' '.join(done.stderr.split())}")
            unmounting.callback(lambda: subprocess.run(["umount", "--lazy", path], check=True))
            return Disk(path)

        yield make


@pytest.fixture
def any_target_db(servers: Servers, target_version: int) -> Iterator[Database]:
    """An empty target database of the version that the run is for (see tests/support/versions.py)."""
    with fresh_database(ServerAddress(servers.get("target", target_version).dsn(), target_version), "tgt") as database:
        yield database


@pytest.fixture
def sqlite_file(tmp_path: Path) -> OtherTarget:
    """A SQLite file that is not there yet."""
    return sqlite_target(tmp_path / "replica.db")


@pytest.fixture(params=["sqlite", "mariadb"])
def other_target(request: pytest.FixtureRequest) -> OtherTarget:
    """An empty database of each kind that the SQLAlchemy sink is tested with; if asked for, one of PostgreSQL's own sink with table t."""
    match request.param:
        case "sqlite":
            found: OtherTarget = request.getfixturevalue("sqlite_file")
            return found
        case "mariadb":
            database = request.getfixturevalue("mariadb_db")
            return OtherTarget("mariadb", database.url, database.fetch, database.execute)
        case _:
            return native_target(request.getfixturevalue("target_db"))


@pytest.fixture
def other_replica(publisher18_db: Database, other_target: OtherTarget) -> Replica:
    """A publisher, and a target of each kind."""
    return replica_of(publisher18_db, other_target)


@pytest.fixture
def sqlite_replica(publisher18_db: Database, sqlite_file: OtherTarget) -> Replica:
    """A publisher, and a SQLite file that is not there yet."""
    return replica_of(publisher18_db, sqlite_file)


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Where the demo makes its servers: one that the user who runs them can reach, too."""
    directory = Path(tempfile.mkdtemp(prefix="demo-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of three megabytes; the test is skipped where that is not allowed."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("tmpfs cannot be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)
