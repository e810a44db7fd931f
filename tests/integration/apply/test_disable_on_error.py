"""``disable_on_error``: everything that is an ERROR of a native worker, compared with a native subscription."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from subscriber import SubscriptionOptions, alter_subscription, drop_subscription
from subscriber.testing.server import EmbeddedServer
from tests.support.database import Database, ServerAddress
from tests.support.managed import create, launched
from tests.support.replica import QUICK

Break = Callable[[Database, Database], contextlib.AbstractContextManager[None]]
"""Makes the error of (publisher, target) happen; at its end it is mended."""

SUBSCRIPTION = "SELECT {0} FROM {1}.pg_subscription WHERE '{1}' = 'subscriber' OR subname LIKE '%' || current_database()"
TABLE = "CREATE TABLE t (id int PRIMARY KEY)"


@contextlib.contextmanager
def lost_connection(publisher: Database, _: Database) -> Iterator[None]:
    publisher.execute("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE database = current_database() AND active")
    yield


@contextlib.contextmanager
def missing_publication(publisher: Database, _: Database) -> Iterator[None]:
    publisher.execute("DROP PUBLICATION pub; INSERT INTO t VALUES (2)")
    yield


@contextlib.contextmanager
def canceled_statement(publisher: Database, target: Database) -> Iterator[None]:
    with contextlib.closing(target.connect()) as other:
        other.execute("BEGIN")
        other.execute("SELECT FROM t WHERE id = 1 FOR UPDATE")
        publisher.execute("DELETE FROM t WHERE id = 1")
        blocked = f"FROM pg_stat_activity WHERE {other.info.backend_pid} = ANY (pg_blocking_pids(pid))"
        target.wait(f"SELECT count(*)::int {blocked}", 1)
        target.execute(f"SELECT pg_cancel_backend(pid) {blocked}")
        yield


@contextlib.asynccontextmanager
async def native(publisher: Database, target: Database) -> AsyncIterator[str]:
    """A subscription of PostgreSQL's; yields the schema of its catalog."""
    name = f"native_{target.name}"
    target.execute(f"CREATE SUBSCRIPTION {name} CONNECTION '{publisher.conninfo()}' PUBLICATION pub WITH (disable_on_error = true)")
    try:
        yield "pg_catalog"
    finally:
        target.execute(f"DROP SUBSCRIPTION {name}")


@contextlib.asynccontextmanager
async def ours(publisher: Database, target: Database) -> AsyncIterator[str]:
    """A subscription of this program, with a launcher."""
    name = await create(publisher, target, options=SubscriptionOptions(disable_on_error=True))
    async with launched(target):
        yield "subscriber"
    await drop_subscription(name, target=target.dsn, settings=QUICK)


def disabled(publisher: Database, target: Database, schema: str, breaks: Break) -> None:
    with breaks(publisher, target):
        target.wait(SUBSCRIPTION.format("subenabled", schema), False)


async def enable(target: Database, schema: str) -> None:
    name = target.value(SUBSCRIPTION.format("subname", schema))
    if schema == "pg_catalog":
        target.execute(f"ALTER SUBSCRIPTION {name} ENABLE")
        return
    async with alter_subscription(name, target=target.dsn, settings=QUICK) as subscription:
        await subscription.enable()


@pytest.mark.parametrize("side", [pytest.param(native, marks=pytest.mark.endurance), ours])
@pytest.mark.parametrize("breaks", [lost_connection, canceled_statement])
async def test_errors(
    publisher18_db: Database,
    target_db: Database,
    side: Callable[[Database, Database], contextlib.AbstractAsyncContextManager[str]],
    breaks: Break,
) -> None:
    for database in (publisher18_db, target_db):
        database.execute(TABLE)
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t")
    async with side(publisher18_db, target_db) as schema:
        publisher18_db.execute("INSERT INTO t VALUES (1)")
        await asyncio.to_thread(target_db.wait, "SELECT count(*)::int FROM t WHERE id = 1", 1)
        await asyncio.to_thread(disabled, publisher18_db, target_db, schema, breaks)
        publisher18_db.execute("INSERT INTO t VALUES (3)")
        # it resumes where it was
        await enable(target_db, schema)
        await asyncio.to_thread(target_db.wait, "SELECT count(*)::int FROM t WHERE id = 3", 1)


@pytest.mark.parametrize("side", [pytest.param(native, marks=pytest.mark.endurance), ours])
async def test_missing_publication(
    publisher16_db: Database,
    target_db: Database,
    side: Callable[[Database, Database], contextlib.AbstractAsyncContextManager[str]],
) -> None:
    """The publisher reports it in the stream (18 only warns). It looks as of the change: enabling does not help."""
    for database in (publisher16_db, target_db):
        database.execute(TABLE)
    publisher16_db.execute("CREATE PUBLICATION pub FOR TABLE t")
    async with side(publisher16_db, target_db) as schema:
        publisher16_db.execute("INSERT INTO t VALUES (1)")
        await asyncio.to_thread(target_db.wait, "SELECT count(*)::int FROM t WHERE id = 1", 1)
        await asyncio.to_thread(disabled, publisher16_db, target_db, schema, missing_publication)


def arrives(server: EmbeddedServer, number: int) -> None:
    """The row is there; each time with another session, as the server was away."""
    with contextlib.closing(Database(ServerAddress(server.dsn(), 18), "postgres")) as target:
        target.wait(f"SELECT count(*)::int FROM t WHERE id = {number}", 1)


async def test_a_server_that_is_away_is_none(make_server: Callable[..., EmbeddedServer]) -> None:
    """A publisher that cannot be reached before changes come, and a target that stops."""
    publishing, receiving = make_server(), make_server()
    with contextlib.ExitStack() as stack:
        publisher, target = (
            stack.enter_context(contextlib.closing(Database(ServerAddress(server.dsn(), 18), "postgres")))
            for server in (publishing, receiving)
        )
        for database in (publisher, target):
            database.execute(TABLE)
        publisher.execute("CREATE PUBLICATION pub FOR TABLE t")
        name = await create(publisher, target, "away", options=SubscriptionOptions(disable_on_error=True))
        await asyncio.to_thread(publishing.stop, "immediate")
        async with launched(target):
            failed = "SELECT last_error IS NOT NULL FROM subscriber.subscription_stats"
            await asyncio.to_thread(target.wait, failed, True)
            await asyncio.to_thread(publishing.start)
            again = stack.enter_context(contextlib.closing(Database(publisher.server, "postgres")))
            again.execute("INSERT INTO t VALUES (1)")
            await asyncio.to_thread(arrives, receiving, 1)
            await asyncio.to_thread(receiving.stop, "immediate")
            await asyncio.to_thread(receiving.start)
            again.execute("INSERT INTO t VALUES (2)")
            await asyncio.to_thread(arrives, receiving, 2)
        target = stack.enter_context(contextlib.closing(Database(target.server, "postgres")))
        assert target.value(SUBSCRIPTION.format("subenabled", "subscriber"))
        await drop_subscription(name, target=target.dsn, settings=QUICK)
