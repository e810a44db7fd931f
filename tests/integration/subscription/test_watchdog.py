"""An attempt without progress is restarted, and one that waits for a lock is not: the log names the session that holds it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from subscriber import Settings, Subscription, SubscriptionOptions
from subscriber.interfaces import Batch
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.postgres.copy.postgres_table_sink import PostgresTableSink
from subscriber.sinks.postgres.opened_postgres_sink import OpenedPostgresSink
from subscriber.sinks.postgres.sink import PostgresSink
from subscriber.sinks.sqlalchemy.copy.sqlalchemy_table_sink import SqlAlchemyTableSink
from subscriber.sinks.sqlalchemy.opened_sqlalchemy_sink import OpenedSqlAlchemySink
from subscriber.sinks.sqlalchemy.sink import SqlAlchemySink
from subscriber.testing.server import EmbeddedServer
from subscriber.waits import awaiting
from subscriber.walreceiver.connection import WalReceiverConnection
from subscriber.walreceiver.session import Session
from tests.integration.subscription.test_lost_sessions import behind_proxy
from tests.support.database import WAIT_SECONDS, Database
from tests.support.program import running
from tests.support.proxy import proxy_of
from tests.support.replica import QUICK, at_work
from tests.support.row_gates import open_transaction
from tests.support.sqlalchemy_targets import ALL, OtherTarget, Replica, write_locked
from tests.support.standby import standby_of

MakeServer = Callable[..., EmbeddedServer]
SETTINGS = replace(QUICK, watchdog_timeout=1.0, wal_receiver_timeout=4.0, create_tables=None)


class Stuck:
    """Mixed into a sink: the first transaction that is applied stands still."""

    stuck = False

    async def stand_still(self) -> None:
        if not self.stuck:
            self.stuck = True
            await asyncio.Event().wait()

    async def before_apply(self) -> None:
        await self.stand_still()

    def made_to_stick(self, opened: OpenedPostgresSink | OpenedSqlAlchemySink) -> None:
        apply = opened.apply

        async def apply_late(batch: Batch) -> None:
            await self.before_apply()
            await apply(batch)

        opened.__dict__["apply"] = apply_late


class StuckPostgres(Stuck, PostgresSink):
    async def open(self, name: str, on_durable: Callable[[Lsn], None]) -> OpenedPostgresSink:
        opened = await super().open(name, on_durable)
        self.made_to_stick(opened)
        return opened


class StuckSqlAlchemy(Stuck, SqlAlchemySink):
    async def open(self, name: str, on_durable: Callable[[Lsn], None]) -> OpenedSqlAlchemySink:
        opened = await super().open(name, on_durable)
        self.made_to_stick(opened)
        return opened


@pytest.mark.parametrize("other_target", ["native", "sqlite", pytest.param("mariadb", marks=pytest.mark.endurance)], indirect=True)
async def test_attempt_without_progress_is_ended(other_replica: Replica, caplog: pytest.LogCaptureFixture) -> None:
    pair, target, publisher = other_replica, other_replica.target, other_replica.publisher
    native = target.kind == "native"
    settings = replace(SETTINGS, create_tables=None if native else True)
    made = StuckPostgres if native else StuckSqlAlchemy
    sink = made(target.url, options=SubscriptionOptions(), settings=settings)
    subscription = Subscription(
        pair.name, connection=publisher.dsn, publications=["pub"], target=sink, options=SubscriptionOptions(), settings=settings
    )
    async with at_work(subscription):
        publisher.execute("INSERT INTO t VALUES (2000, 'copied or followed')")
        await subscription.wait_for(publisher.current_lsn(), WAIT_SECONDS)
        publisher.execute("INSERT INTO t VALUES (2001, 'followed')")
        await subscription.wait_for(publisher.current_lsn(), WAIT_SECONDS)
    assert sink.stuck
    assert "no progress for" in caplog.text
    pair.same()


class _Silent:
    """A session with a publisher that does nothing."""

    async def is_working(self) -> bool:
        return False


class AsksPostgres(StuckPostgres):
    ready = False

    async def before_apply(self) -> None:
        if self.ready:
            with awaiting(_Silent()):
                await self.stand_still()


@pytest.mark.parametrize("other_target", ["native"], indirect=True)
async def test_attempt_that_waits_for_the_publisher(other_replica: Replica, caplog: pytest.LogCaptureFixture) -> None:
    """The next attempt began where this one had begun, before what the slot had been told, and ended with a DataLossError."""
    pair, publisher = other_replica, other_replica.publisher
    sink = AsksPostgres(pair.target.url, options=SubscriptionOptions(), settings=SETTINGS)
    subscription = Subscription(pair.name, connection=publisher.dsn, publications=["pub"], target=sink, settings=SETTINGS)
    async with at_work(subscription):
        await subscription.wait_for(publisher.current_lsn(), WAIT_SECONDS)
        publisher.execute("INSERT INTO t VALUES (2000, 'followed')")
        await subscription.wait_for(publisher.current_lsn(), WAIT_SECONDS)
        sink.ready = True
        publisher.execute("INSERT INTO t VALUES (2001, 'followed')")
        await subscription.wait_for(publisher.current_lsn(), WAIT_SECONDS)
    assert "the publisher does not answer" in caplog.text
    pair.same()


async def _follows(pair: Replica, connection: str, settings: Settings) -> None:
    """A run that copies the table, and follows."""
    subscription = Subscription(pair.name, connection=connection, publications=["pub"], target=pair.target.url, settings=settings)
    async with at_work(subscription):
        await subscription.wait_for(pair.publisher.current_lsn(), WAIT_SECONDS)
    pair.same()


@pytest.mark.parametrize(
    ("other_target", "table_sink"),
    [("native", PostgresTableSink), ("sqlite", SqlAlchemyTableSink), ("mariadb", SqlAlchemyTableSink)],
    indirect=["other_target"],
)
async def test_table_synchronization_without_progress_is_ended(
    other_replica: Replica, table_sink: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug was that it hung for ever."""
    stuck, start_copy = Stuck(), table_sink.start_copy

    async def stands_still(self: Any) -> None:
        await stuck.stand_still()
        await start_copy(self)

    monkeypatch.setattr(table_sink, "start_copy", stands_still)
    create = None if other_replica.target.kind == "native" else True
    await _follows(other_replica, other_replica.publisher.dsn, replace(SETTINGS, create_tables=create))
    assert stuck.stuck
    assert 'synchronization of table "public.t" failed' in caplog.text
    assert "no progress for" in caplog.text


@pytest.mark.parametrize("other_target", ["native"], indirect=True)
async def test_publisher_that_is_mute(other_replica: Replica, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that waits for a transaction is waited for. An answer that a firewall has swallowed is not."""
    pair, publisher = other_replica, other_replica.publisher
    found = re.search(r"@([^:/]+):(\d+)/", publisher.dsn)
    assert found is not None
    begun, locked, start_copy = asyncio.Event(), asyncio.Event(), PostgresTableSink.start_copy

    async def waits(self: PostgresTableSink) -> None:
        begun.set()
        await locked.wait()
        await start_copy(self)

    monkeypatch.setattr(PostgresTableSink, "start_copy", waits)
    with proxy_of(found[1], int(found[2])) as proxy:
        dsn = publisher.dsn.replace(f":{found[2]}/", f":{proxy.port}/")
        follows = asyncio.create_task(_follows(pair, dsn, SETTINGS))
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await begun.wait()
            with open_transaction(publisher, "CREATE TABLE unrelated ()") as release:
                locked.set()
                async with asyncio.timeout(WAIT_SECONDS):
                    while caplog.text.count("its creation waits for the end of transactions") < 2:
                        await asyncio.sleep(0.05)
                assert "does not answer" not in caplog.text
                proxy.freeze()
                release()
            # the frozen walsender of the main slot would keep that in use for a minute
            publisher.fetch("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active")
            await follows
        finally:
            follows.cancel()
            await asyncio.gather(follows, return_exceptions=True)
    assert "the publisher does not answer: nothing was received for" in caplog.text
    assert "no progress for" not in caplog.text


async def test_slot_of_a_standby_that_waits_for_wal(make_server: MakeServer) -> None:
    """It waits until the primary writes some: it was given up each time, as if the standby did not answer."""
    primary = make_server(18)
    with psycopg.connect(primary.dsn(), autocommit=True) as session:
        session.execute("CREATE DATABASE pub")
    with standby_of(primary) as standby:
        connection = await WalReceiverConnection.connect(standby.dsn("pub"), application_name="test")
        creating = asyncio.create_task(connection.create_slot("s", snapshot="export", temporary=True))
        try:
            with psycopg.connect(standby.dsn("pub"), autocommit=True) as session:
                waits = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'test' AND wait_event ILIKE 'WalSenderWaitForWal'"
                async with asyncio.timeout(WAIT_SECONDS):
                    while session.execute(waits).fetchone() != (1,):
                        await asyncio.sleep(0.05)
            assert await connection.is_working()
        finally:
            creating.cancel()
            await asyncio.gather(creating, return_exceptions=True)
            await connection.close()


@pytest.mark.parametrize("copied", [True, False], ids=["copied", "followed"])
@pytest.mark.parametrize("other_target", ["native"], indirect=True)
async def test_row_that_takes_long_to_send(other_replica: Replica, caplog: pytest.LogCaptureFixture, copied: bool) -> None:
    """What is sent to the target is progress, also of a single row. The bug was that it was given up and sent again, for ever."""
    pair, publisher = other_replica, other_replica.publisher
    row = "INSERT INTO t VALUES (2000, repeat('0123456789abcdef', 1536 * 1024))"
    if copied:
        publisher.execute(row)
    with behind_proxy(pair.target, pause=0.015) as (target, _):
        subscription = Subscription(pair.name, connection=publisher.dsn, publications=["pub"], target=target, settings=SETTINGS)
        async with at_work(subscription):
            await subscription.wait_for(publisher.current_lsn(), WAIT_SECONDS)
            if not copied:
                publisher.execute(row)
                await subscription.wait_for(publisher.current_lsn(), WAIT_SECONDS)
    assert "no progress for" not in caplog.text
    pair.same()


@contextlib.contextmanager
def row_locked(target: OtherTarget, request: pytest.FixtureRequest) -> Iterator[str]:
    """Another session keeps a row locked; yields how the log names it."""
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


@pytest.mark.parametrize("other_target", ["native", "sqlite", "mariadb"], indirect=True)
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


@pytest.mark.parametrize("other_target", ["native"], indirect=True)
async def test_session_that_looks_and_that_a_firewall_has_forgotten(other_target: OtherTarget) -> None:
    """The next look is through another one: else all that takes long would be given up, as if the target did not answer."""
    with behind_proxy(other_target) as (url, proxy):
        sink = PostgresSink(url, options=SubscriptionOptions(), settings=SETTINGS)
        opened = await sink.open("forgotten", lambda _: None)
        try:
            await sink.activity()
            proxy.freeze()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(sink.activity(), 1)
            assert (await asyncio.wait_for(sink.activity(), WAIT_SECONDS)).idle >= 0
        finally:
            # so that the end waits for no frozen session
            proxy.close()
            await opened.close()


async def test_turns_of_sqlite(sqlite_file: OtherTarget) -> None:
    """The apply worker waits while a table's transaction is long, as one that moves rows from a staging table: it was given up."""
    sink = SqlAlchemySink(sqlite_file.url, options=SubscriptionOptions(), settings=replace(SETTINGS, create_tables=True))
    opened = await sink.open("turns", lambda _: None)
    try:
        assert (await sink.activity()).idle == math.inf
        table = await sink._shared.database.connect()
        async with table.transaction():
            found = await sink.activity()
        await table.close()
        assert (found.idle, found.tables_idle) == (0, 0)
    finally:
        await opened.close()


@pytest.mark.parametrize("other_target", ["native"], indirect=True)
async def test_servers_behind_a_pooler(other_target: OtherTarget) -> None:
    """The PIDs that it gives are no session's: nothing is known of these, and they count as busy. What took long was given up."""
    with behind_proxy(other_target, pools=True) as (url, _):
        sink = PostgresSink(url, options=SubscriptionOptions(), settings=SETTINGS)
        opened = await sink.open("pooled", lambda _: None)
        session = await Session.connect(url, application_name="test")
        try:
            assert (await sink.activity()).idle == 0
            assert await session.is_working()
        finally:
            await session.close()
            await opened.close()


async def test_target_that_does_not_tell_what_it_does(target_db: Database) -> None:
    """Without track_activities nothing is known of its sessions: they count as busy."""
    target_db.execute("DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET track_activities = off', current_database()); END $$")
    sink = PostgresSink(target_db.dsn, options=SubscriptionOptions(), settings=SETTINGS)
    opened = await sink.open("silent", lambda _: None)
    try:
        assert (await sink.activity()).idle == 0
    finally:
        await opened.close()
