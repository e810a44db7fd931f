"""Servers that run and do not accept connections yet: even a first attempt waits for them, without an error."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psycopg
import pytest

from subscriber import Launcher, Subscription, TargetUnavailable, drop_subscription
from subscriber.errors import CANNOT_CONNECT_NOW, SubscriberError
from subscriber.testing.binaries import server_user
from subscriber.testing.server import EmbeddedServer
from tests.support.database import WAIT_SECONDS, Database, ServerAddress
from tests.support.managed import create, launched, same
from tests.support.observation import eventually, until
from tests.support.replica import QUICK, replica, subscription_of

ROWS = "SELECT id FROM t ORDER BY id"


class StartingServer:
    """A server that can be kept from coming up: it waits for a file from its archive."""

    def __init__(self, make_server: Callable[..., EmbeddedServer], version: int) -> None:
        # no moment in which it can be read and not written
        self._server = make_server(version, hot_standby="off")
        self._go = self._server.base / "go"
        # bounded: it stays closed if the test fails
        self._command = f"i=0; while [ ! -e {self._go} ] && [ $i -lt 600 ]; do i=$((i+1)); sleep 0.1; done; false"
        self.address = ServerAddress(self._server.dsn(), version)
        with psycopg.connect(self._server.dsn(), autocommit=True) as session:
            session.execute(psycopg.sql.SQL("ALTER SYSTEM SET restore_command = {}").format(self._command))

    @contextlib.asynccontextmanager
    async def coming_up(self) -> AsyncIterator[None]:
        """It stops and starts to come up while the block lasts; it is up afterwards."""
        await asyncio.to_thread(self._server.stop)
        signal: Path = self._server.data_directory / "recovery.signal"
        signal.touch()
        server_user().own(signal)
        self._go.unlink(missing_ok=True)
        starting = asyncio.create_task(asyncio.to_thread(self._server.start))
        try:
            await until(self._is_starting, "the server is starting up")
            yield
        finally:
            self._go.touch()
            await starting
            # it recovers for a moment longer
            await until(lambda: self._said() is None, "the server is up")

    def _is_starting(self) -> bool:
        said = self._said()
        assert said is not None, "it takes connections"
        return "the database system is starting up" in said

    def _said(self) -> str | None:
        try:
            psycopg.connect(self._server.dsn()).close()
        except psycopg.OperationalError as error:
            return str(error)
        return None


@pytest.fixture
def starting_server(make_server: Callable[..., EmbeddedServer]) -> StartingServer:
    return StartingServer(make_server, 18)


def is_starting_up(error: SubscriberError | None) -> bool:
    return error is not None and error.sqlstate == CANNOT_CONNECT_NOW and error.hint == "wait until it accepts connections"


async def waits(subscription: Subscription, running: asyncio.Task[None], kind: type[SubscriberError], others: str) -> None:
    """It has reached the server, and keeps retrying."""
    await until(lambda: running.done() or is_starting_up(subscription.status.last_error), "the run has tried")
    assert not running.done()
    error = subscription.status.last_error
    assert isinstance(error, kind)
    assert others in str(error)


async def test_target(starting_server: StartingServer, publisher18_db: Database, caplog: pytest.LogCaptureFixture) -> None:
    publisher = publisher18_db
    with contextlib.closing(Database(starting_server.address, "postgres")) as target:
        for database in (publisher, target):
            database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    publisher.execute("CREATE PUBLICATION pub FOR TABLE t; INSERT INTO t VALUES (1)")
    text = "the database system is starting up"
    async with _database(starting_server) as target, replica(publisher, target) as found:
        assert await found.same(ROWS) == [(1,)]
        async with starting_server.coming_up():
            publisher.execute("INSERT INTO t VALUES (2)")
            await waits(found.subscription, found.running, TargetUnavailable, text)
        await found.caught_up()
        async with _database(starting_server) as again:
            assert again.fetch(ROWS) == [(1,), (2,)]
    # a first attempt too
    async with starting_server.coming_up():
        publisher.execute("INSERT INTO t VALUES (3)")
        subscription = subscription_of(publisher, target)
        running = asyncio.create_task(subscription.run())
        await waits(subscription, running, TargetUnavailable, text)
    await subscription.wait_for(publisher.current_lsn(), WAIT_SECONDS)
    subscription.stop()
    await running
    async with _database(starting_server) as again:
        assert again.fetch(ROWS) == [(1,), (2,), (3,)]
        await drop_subscription(subscription.name, target=again.dsn, connection=publisher.conninfo())
    await _launcher_waits(starting_server, publisher, caplog)


@contextlib.asynccontextmanager
async def _database(starting_server: StartingServer) -> AsyncIterator[Database]:
    with contextlib.closing(Database(starting_server.address, "postgres")) as target:
        yield target


async def _launcher_waits(starting_server: StartingServer, publisher: Database, caplog: pytest.LogCaptureFixture) -> None:
    async with _database(starting_server) as target:
        target.execute("TRUNCATE t")
        name = await create(publisher, target)
    async with starting_server.coming_up():
        launcher = Launcher(target.dsn, settings=QUICK)
        running = asyncio.create_task(launcher.run())
        await until(
            lambda: running.done() or "could not open the target's catalog: could not connect to the target" in caplog.text, "it has tried"
        )
        assert not running.done()
        # it can be ended during that time
        ended = Launcher(target.dsn, settings=QUICK)
        ending = asyncio.create_task(ended.run())
        await until(lambda: caplog.text.count("could not open the target's catalog") > 1, "the other has tried")
        ended.stop()
        await asyncio.wait_for(ending, WAIT_SECONDS)
    async with _database(starting_server) as target:
        assert await same(publisher, target, name, ROWS) == [(1,), (2,), (3,)]
        launcher.stop()
        await asyncio.wait_for(running, WAIT_SECONDS)
        await drop_subscription(name, target=target.dsn, settings=QUICK)


async def test_publisher(starting_server: StartingServer, target_db: Database, caplog: pytest.LogCaptureFixture) -> None:
    async with _database(starting_server) as publisher:
        for database in (publisher, target_db):
            database.execute("CREATE TABLE t (id int PRIMARY KEY)")
        publisher.execute("CREATE PUBLICATION pub FOR TABLE t; INSERT INTO t VALUES (1)")
        name = await create(publisher, target_db, "sub")
    said = re.compile("could not connect to the publisher: .*the database system is starting up.*hint: wait until it accepts connections")
    async with launched(target_db):
        async with _database(starting_server) as publisher:
            await same(publisher, target_db, name, ROWS)
        await eventually(target_db, "SELECT srsubstate::text FROM subscriber.pg_subscription_rel", "r")
        async with starting_server.coming_up():
            await until(lambda: said.search(caplog.text) is not None, "the worker has tried")
        async with _database(starting_server) as publisher:
            publisher.execute("INSERT INTO t VALUES (2)")
            assert await same(publisher, target_db, name, ROWS) == [(1,), (2,)]
        assert "ERROR" not in {record.levelname for record in caplog.records}
    await drop_subscription(name, target=target_db.dsn, settings=QUICK)
