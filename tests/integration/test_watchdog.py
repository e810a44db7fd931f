"""An attempt that stands still is made again, and one that waits for a lock is not: the log tells who holds it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import replace

import pytest

from subscriber import Subscription, SubscriptionOptions
from subscriber.abc import Batch
from subscriber.sinks.postgres.sink import PostgresSink
from subscriber.sinks.sqlalchemy.sink import SqlAlchemySink
from tests.database import WAIT_SECONDS, Database
from tests.integration.program import running
from tests.integration.replica import QUICK
from tests.integration.sqlalchemy_targets import ALL, OtherTarget, Replica, write_locked

SETTINGS = replace(QUICK, watchdog_timeout=1.0, create_tables=None)


class Stuck:
    """Mixed into a sink: its first call stands still."""

    stuck = False

    async def stand_still(self) -> None:
        if not self.stuck:
            self.stuck = True
            await asyncio.Event().wait()


class StuckPostgres(Stuck, PostgresSink):
    async def apply(self, batch: Batch) -> None:
        await self.stand_still()
        await super().apply(batch)


class StuckSqlAlchemy(Stuck, SqlAlchemySink):
    async def apply(self, batch: Batch) -> None:
        await self.stand_still()
        await super().apply(batch)


@pytest.mark.parametrize("other_target", ["native", "sqlite", "mariadb"], indirect=True)
async def test_an_attempt_that_stands_still(other_replica: Replica, caplog: pytest.LogCaptureFixture) -> None:
    pair, target, publisher = other_replica, other_replica.target, other_replica.publisher
    native = target.kind == "native"
    settings = replace(SETTINGS, create_tables=None if native else True)
    made = StuckPostgres if native else StuckSqlAlchemy
    sink = made(target.url, options=SubscriptionOptions(), settings=settings)
    subscription = Subscription(
        pair.name, connection=publisher.dsn, publications=["pub"], target=sink, options=SubscriptionOptions(), settings=settings
    )
    task = asyncio.create_task(subscription.run())
    try:
        publisher.execute("INSERT INTO t VALUES (2000, 'copied or followed')")
        await subscription.wait_for(publisher.current_lsn(), WAIT_SECONDS)
        publisher.execute("INSERT INTO t VALUES (2001, 'followed')")
        await subscription.wait_for(publisher.current_lsn(), WAIT_SECONDS)
        subscription.stop()
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert sink.stuck
    assert "no progress for" in caplog.text
    pair.same()


@contextlib.contextmanager
def row_locked(target: OtherTarget, request: pytest.FixtureRequest) -> Iterator[str]:
    """Somebody else keeps a row locked; gives how the log names him."""
    if target.path is not None:
        with write_locked(target.path):
            yield "another program has the file"
        return
    session = request.getfixturevalue("mariadb_db" if target.kind == "mariadb" else "target_db").connect()
    with contextlib.closing(session), session.cursor() as cursor:
        cursor.execute("SELECT connection_id()" if target.kind == "mariadb" else "SELECT pg_backend_pid()")
        number = cursor.fetchall()[0][0]
        cursor.execute("BEGIN")
        cursor.execute("SELECT * FROM t WHERE id = 1 FOR UPDATE")
        yield f"session with id {number} (" if target.kind == "mariadb" else f"PID {number} ("
        cursor.execute("ROLLBACK")


@pytest.mark.parametrize("other_target", ["native", "postgresql", "sqlite", "mariadb"], indirect=True)
def test_a_lock_of_another_program_is_logged(other_replica: Replica, request: pytest.FixtureRequest) -> None:
    pair = other_replica
    with running(*pair.arguments("-c", "watchdog_timeout=1s")) as program:
        pair.target.follows()
        with row_locked(pair.target, request) as holder:
            pair.publisher.execute("UPDATE t SET v = 'changed' WHERE id = 1")
            program.says(holder)
            program.says("this has lasted for")
        pair.target.wait(ALL, pair.publisher.fetch(ALL))
        # a lock is a known reason
        assert "no progress for" not in program.errors
        assert "changed" not in program.errors


async def test_target_that_does_not_tell_what_it_does(target_db: Database) -> None:
    """Without track_activities nothing is known of its sessions: they count as busy."""
    target_db.execute("DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET track_activities = off', current_database()); END $$")
    sink = PostgresSink(target_db.dsn, options=SubscriptionOptions(), settings=SETTINGS)
    await sink.open("silent", lambda _: None)
    try:
        assert (await sink.activity()).idle == 0
    finally:
        await sink.close()
