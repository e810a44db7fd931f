"""Fixtures for pytest (``pip install 'pg-subscriber[pytest]'``); pytest finds them by itself.

They work with pytest-asyncio in both modes, with anyio on asyncio, and with pytest-xdist. None of them is a coroutine, so none of these
plugins has to be configured for them. What a test starts in its event loop ends with the test.

This module imports nothing but pytest before a fixture is used, and does nothing in runs that use none of its fixtures.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from subscriber.sinks.memory import MemoryTarget
    from subscriber.testing.containers import PostgresContainers
    from subscriber.testing.fake_publisher import FakePublisher
    from subscriber.testing.fixtures.postgres import PostgresPublisher, PublisherServer
    from subscriber.testing.fixtures.subscriptions import Started, SubscriptionFactory


@pytest.fixture(scope="session")
def postgres_publisher_version() -> int:
    """The major version of the embedded PostgreSQL publisher: 18. Override it in conftest.py for another one."""
    return 18


@pytest.fixture(scope="session")
def postgres_publisher_schema() -> str:
    """SQL that the databases of postgres_publisher start with: none. Override it in conftest.py: CREATE TABLE, CREATE PUBLICATION."""
    return ""


@pytest.fixture(scope="session")
def _subscriber_server(postgres_publisher_version: int, postgres_publisher_schema: str) -> Iterator[PublisherServer]:
    """The server of postgres_publisher, with the template of its databases."""
    from subscriber.testing.fixtures.postgres import PublisherServer  # noqa: PLC0415 -- only if it is used

    with PublisherServer(postgres_publisher_version, postgres_publisher_schema) as server:
        yield server


@pytest.fixture
def _subscriber_started(request: pytest.FixtureRequest) -> Iterator[Started]:
    """What the test starts in its event loop. It ends here, or with the loop."""
    from subscriber.testing.fixtures.subscriptions import Started  # noqa: PLC0415 -- only if it is used

    started = Started(request.node.addfinalizer)
    yield started
    started.end()


@pytest.fixture
def postgres_publisher(_subscriber_server: PublisherServer) -> Iterator[PostgresPublisher]:
    """A database of its own for the test, on a real PostgreSQL server that can publish.

    The server is embedded and starts once per session (per process of pytest-xdist). If SUBSCRIBER_TEST_DSN is set, it is that server, for
    example the one of docker/compose.yaml. The database is a copy of a template with postgres_publisher_schema. It is dropped with its
    slots. See subscriber.testing.fixtures.PostgresPublisher: dsn, execute(), fetch(), connect(), current_lsn().
    """
    with _subscriber_server.database() as database:
        yield database


@pytest.fixture
def memory_target() -> MemoryTarget:
    """An empty target in memory: rows("schema.table") returns its rows as Python objects."""
    from subscriber.sinks.memory import MemoryTarget  # noqa: PLC0415 -- only if it is used

    return MemoryTarget()


@pytest.fixture
def fake_publisher(_subscriber_started: Started) -> FakePublisher:
    """A publisher inside the test process, without PostgreSQL: create_table(), create_publication(), transaction().

    It listens from the first call of the fixture subscription with it, or inside ``async with fake_publisher``. At the end of the test it
    checks what subscribers have reported to it.
    """
    from subscriber.testing.fake_publisher import FakePublisher  # noqa: PLC0415 -- only if it is used

    return _subscriber_started.watch(FakePublisher())


@pytest.fixture
def subscription(_subscriber_started: Started, memory_target: MemoryTarget) -> SubscriptionFactory:
    """A function that starts a subscription, and returns when its tables are copied.

    ``replica = await subscription(publisher, "publication")``
    The publisher is fake_publisher, postgres_publisher or a connection string. The target is memory_target unless ``target`` is given.
    ``await replica.caught_up()`` waits for everything that is committed on the publisher now. ``await replica.assert_equal()`` compares the
    published rows with the target's. Also: options, settings, name. It ends with the test.
    """
    from subscriber.testing.fixtures.subscriptions import SubscriptionFactory  # noqa: PLC0415 -- only if it is used

    return SubscriptionFactory(_subscriber_started, memory_target)


@pytest.fixture(scope="session")
def _subscriber_containers() -> Iterator[PostgresContainers]:
    """The containers of postgres_container."""
    from subscriber.testing.containers import PostgresContainers  # noqa: PLC0415 -- only if it is used

    with PostgresContainers() as containers:
        yield containers


@pytest.fixture
def postgres_container(_subscriber_containers: PostgresContainers) -> Iterator[Callable[..., str]]:
    """A function that creates a database in a PostgreSQL container, and returns its URL: ``postgres_container(version, settings)``.

    A container is started for each version (default: 18) and settings of the server, when it is first asked for, and stays until the end of
    the session. ``wal_level`` is logical. The database is dropped after the test, with its slots. Without Docker or Podman, or without
    ``pg-subscriber[containers]``, the test is skipped.
    """
    from subscriber.testing.containers import EngineUnavailable  # noqa: PLC0415 -- only if it is used

    with contextlib.ExitStack() as databases:

        def database(version: int = 18, settings: Mapping[str, str] | None = None) -> str:
            try:
                server = _subscriber_containers.get(version, settings)
            except EngineUnavailable as error:
                pytest.skip(error.one_line())
            return databases.enter_context(server.database())

        yield database
