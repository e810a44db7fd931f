"""Fixtures of the tests on live servers. The servers and databases themselves are in tests/conftest.py."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator

import psycopg
import pytest

from subscriber.testing.binaries import server_user
from subscriber.testing.server import EmbeddedServer
from tests.conftest import Servers
from tests.database import Database, ServerAddress, fresh_database


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
    """A publisher that speaks TLS, with ``server.crt`` in its data directory, and never sends a keepalive by itself."""
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
def any_target_db(servers: Servers, target_version: int) -> Iterator[Database]:
    """An empty target database of the version that the run is for (see tests/versions.py)."""
    with fresh_database(ServerAddress(servers.get("target", target_version).dsn(), target_version), "tgt") as database:
        yield database
