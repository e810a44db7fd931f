"""Fixtures of the tests on live servers. The servers and databases themselves are in tests/conftest.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

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


@pytest.fixture(params=[18, 16])
def any_target_db(servers: Servers, request: pytest.FixtureRequest) -> Iterator[Database]:
    """An empty target database, once on 18 and once on 16."""
    with fresh_database(ServerAddress(servers.get("target", request.param).dsn(), request.param), "tgt") as database:
        yield database
