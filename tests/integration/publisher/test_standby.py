"""A hot standby as the publisher, and as the target."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import pytest

from subscriber import TargetError, check, transactions
from subscriber.testing.server import EmbeddedServer
from subscriber.walreceiver.transaction_outcome import is_dropped
from tests.support.database import WAIT_SECONDS, Database, ServerAddress
from tests.support.replica import QUICK, subscription_of
from tests.support.standby import standby_of

STREAMED = """
BEGIN; INSERT INTO t SELECT generate_series(1, 3000); SAVEPOINT s; INSERT INTO t VALUES (-1); RELEASE s;
SAVEPOINT gone; INSERT INTO t SELECT generate_series(3001, 6000); ROLLBACK TO gone; COMMIT
"""


async def test_standby(make_server: Callable[..., EmbeddedServer], publisher18_db: Database) -> None:
    primary = make_server(18)
    primary.createdb("pub")
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(contextlib.closing(Database(ServerAddress(primary.dsn(), 18), "pub")))
        first.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR ALL TABLES")
        standby = stack.enter_context(standby_of(primary))
        copy = stack.enter_context(contextlib.closing(Database(ServerAddress(standby.dsn(), 18), "pub")))
        await follow_streamed_transaction(first, copy)
        await ask_for_dropped_tables(first, copy)
        await refuse_as_target(publisher18_db, copy)


async def follow_streamed_transaction(first: Database, copy: Database) -> None:
    """With a temporary slot nothing can be received again. The bug was that the stream ended, because a standby says no outcome."""
    stream = transactions(copy.conninfo(), publications=["pub"], settings=QUICK)
    async with asyncio.timeout(WAIT_SECONDS):
        opening = asyncio.create_task(stream.__aenter__())
        while not opening.done():
            first.execute("SELECT pg_log_standby_snapshot()")
            await asyncio.wait({opening}, timeout=0.05)
        opening.result()
        try:
            first.execute(STREAMED)
            rows = [change async for change in await anext(aiter(stream))]
        finally:
            await stream.__aexit__(None, None, None)
    assert len(rows) == 3001


async def ask_for_dropped_tables(first: Database, copy: Database) -> None:
    arguments = {
        "system_identifier": first.value("SELECT system_identifier::text FROM pg_control_system()"),
        "timeline": 1,
        "application_name": "test",
    }
    seen = "SELECT count(*) FROM pg_class WHERE relname = 'brief'"
    with first.connect() as session:
        session.execute("BEGIN; CREATE TABLE brief (); INSERT INTO t VALUES (-2)")
        row = session.execute("SELECT 'brief'::regclass::oid::int8, pg_current_xact_id()::text::int8").fetchone()
        assert row is not None
        first.execute("INSERT INTO t VALUES (-3)")
        copy.wait("SELECT count(*) FROM t WHERE id = -3", 1)
        assert not await is_dropped(copy.dsn, row[0], [row[1]], **arguments)
        session.execute("COMMIT")
    copy.wait(seen, 1)
    assert not await is_dropped(copy.dsn, row[0], [row[1]], **arguments)
    first.execute("DROP TABLE brief")
    copy.wait(seen, 0)
    assert await is_dropped(copy.dsn, row[0], [row[1]], **arguments)


async def refuse_as_target(publisher: Database, copy: Database) -> None:
    publisher.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR TABLE t")
    message = "the target is in recovery: it accepts no changes"
    found = await check("x", connection=publisher.conninfo(), publications=["pub"], target=copy.dsn)
    ((said, hint),) = [(finding.message, finding.hint) for finding in found if finding.severity == "error"]
    assert said == message
    assert "target_session_attrs=read-write" in hint
    with pytest.raises(TargetError, match=message) as caught:
        await subscription_of(publisher, copy).run()
    assert caught.value.hint == hint
