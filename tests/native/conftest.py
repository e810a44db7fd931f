"""Databases for the comparisons with native subscriptions, on servers that live as long as the worker process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from subscriber.testing.server import EmbeddedServer
from tests.conftest import Servers
from tests.native.native import Nodes
from tests.support.database import Database, ServerAddress, fresh_database

# the kind of process in front of each line of the log tells native's workers from our sessions
_SETTINGS = {"log_line_prefix": "%m [%p] %b ", "wal_retrieve_retry_interval": "200ms"}


def target_server_of(servers: Servers, version: int) -> EmbeddedServer:
    """The server of this version that holds targets, native's and ours."""
    server = servers.get("target", version)
    with contextlib.closing(Database(ServerAddress(server.dsn(), version), "postgres")) as database:
        if database.value("SHOW log_line_prefix") != _SETTINGS["log_line_prefix"]:
            for name, value in _SETTINGS.items():
                database.execute(f"ALTER SYSTEM SET {name} = '{value}'")
            database.execute("SELECT pg_reload_conf()")
            database.wait("SHOW wal_retrieve_retry_interval", _SETTINGS["wal_retrieve_retry_interval"])
    return server


@contextlib.contextmanager
def _nodes(servers: Servers, publisher: Database, native_version: int) -> Iterator[Nodes]:
    native, ours = target_server_of(servers, native_version), target_server_of(servers, 18)
    with (
        fresh_database(ServerAddress(native.dsn(), native_version), "nat") as native_db,
        fresh_database(ServerAddress(ours.dsn(), 18), "tgt") as our_db,
    ):
        yield Nodes(publisher, native_db, our_db, native)


@pytest.fixture
def nodes(servers: Servers, publisher_db: Database) -> Iterator[Nodes]:
    """A publisher of each version, native's target on 18."""
    with _nodes(servers, publisher_db, 18) as found:
        yield found


@pytest.fixture
def nodes18(servers: Servers, publisher18_db: Database) -> Iterator[Nodes]:
    """Publisher and native's target on 18."""
    with _nodes(servers, publisher18_db, 18) as found:
        yield found


@pytest.fixture
def nodes_native16(servers: Servers, publisher_db: Database) -> Iterator[Nodes]:
    """A publisher of each version, native's target on 16: 18's apply worker dies of a stray STREAM ABORT."""
    with _nodes(servers, publisher_db, 16) as found:
        yield found
