"""One writer: nothing of an earlier one is written once a later one has opened the subscription, also where its lock was lost unnoticed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from subscriber.catalog.store import writer_key
from subscriber.config import Settings, SubscriptionOptions
from subscriber.errors import SubscriptionInUse, TargetError
from subscriber.interfaces import CopyFormat, OpenedSink, Position, TableEntry, TableState
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.sqlalchemy.copy.sqlalchemy_table_sink import SqlAlchemyTableSink
from subscriber.sinks.sqlalchemy.opened_sqlalchemy_sink import OpenedSqlAlchemySink
from subscriber.sinks.sqlalchemy.session.locks import Locks
from subscriber.sinks.sqlalchemy.sink import SqlAlchemySink
from subscriber.testing.compliance import ComplianceTarget
from subscriber.testing.compliance.feed import START, SYSTEM, Feed
from subscriber.testing.compliance.sample_messages import Table
from tests.sinks.targets import MariaDBTarget, SqliteTarget
from tests.support.database import WAIT_SECONDS

T = Table("t", "*id int4", "v")


@pytest.fixture(params=["sqlite", "mariadb"])
def target(request: pytest.FixtureRequest) -> ComplianceTarget:
    if request.param == "sqlite":
        directory: Path = request.getfixturevalue("tmp_path")
        return SqliteTarget(directory / "replica.db")
    return MariaDBTarget(request.getfixturevalue("mariadb_db"))


async def _lose_lock(opened: object) -> None:
    """As when a server forgets a session whose client does not know yet: another process may take the lock."""
    assert isinstance(opened, OpenedSqlAlchemySink)
    await opened._locks.release(writer_key(opened.state.oid))


async def test_a_writer_that_lost_its_lock(target: ComplianceTarget) -> None:
    feed = Feed(target)
    await feed.open()
    await feed.create(T)
    await feed.apply(T.relation, T.insert(1, "a"))
    earlier = feed.opened
    table = earlier.open_table(T.name)
    await _lose_lock(earlier)
    feed.sink = target.new_sink()
    await feed.open()
    written = feed.transaction(T.relation, T.insert(2, "written by the later one"))
    try:
        for late in (
            earlier.apply(feed.batch(feed.transaction(T.insert(3, "of the earlier one")))),
            earlier.advance(feed.next_lsn()),
            earlier.set_position(Position("slot", SYSTEM, 1, Lsn(START + 0x90000))),
            earlier.set_ready({T.name: START}),
            earlier.add_tables([T.name], TableEntry(TableState.INIT)),
            table.begin(),
        ):
            with pytest.raises(SubscriptionInUse):
                await late
        await feed.give(written)
        await feed.expect(T, (1, "a"), (2, "written by the later one"))
        assert await feed.opened.tables() == {T.name: TableEntry(TableState.READY)}
    finally:
        await table.close()
        await earlier.close()
        assert await feed.position() == written.end_lsn
        await feed.close()


async def test_a_transaction_under_way_is_waited_for(target: ComplianceTarget) -> None:
    """A later writer reads the position only when nothing of the earlier one can be committed any more."""
    feed = Feed(target)
    await feed.open()
    await feed.create(T)
    earlier = feed.opened
    assert isinstance(earlier, OpenedSqlAlchemySink)
    later = target.new_sink()
    transaction = feed.transaction(T.relation, T.insert(1, "late"))
    opening: asyncio.Task[OpenedSink] | None = None
    held = asyncio.Event()
    opening_began = asyncio.Event()

    async def finish(_connection: object) -> None:
        # all changes are made, the position and the COMMIT are still to come
        nonlocal opening
        await _release_only(earlier)
        opening = asyncio.create_task(later.open(feed.name, lambda _: None))
        opening_began.set()
        # only time gives a writer that does not wait the chance to be opened: a wait for SQLite's lock cannot be observed
        await asyncio.wait({opening}, timeout=1)
        assert not opening.done(), "it was opened beside a transaction of the earlier writer"
        held.set()

    try:
        await earlier._applier.apply_all([transaction], feed.gate, earlier._applier.relations, finish)
        assert held.is_set()
        assert opening is not None
        position = (await opening).state.position
        assert position is not None
        assert position.lsn == transaction.end_lsn
    finally:
        if opening is not None:
            await (await opening).close()
        await earlier.close()
    await feed.expect(T, (1, "late"))


async def _release_only(opened: OpenedSqlAlchemySink) -> None:
    """Give the lock back past the session, which is in the middle of a transaction."""
    key = writer_key(opened.state.oid)
    match opened._database.dialect_name:
        case "sqlite":
            await opened._locks.release(key)
        case _:
            await opened.session.connection.exec_driver_sql("SELECT RELEASE_ALL_LOCKS()")


async def test_two_at_once(target: ComplianceTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Feed(target)
    await feed.open()
    other = target.new_sink()
    monkeypatch.setattr(Locks.take, "__defaults__", (0.3,))
    try:
        with pytest.raises(SubscriptionInUse, match=r'subscription "\w+" is active for PID \d+'):
            await other.open(feed.name, lambda _: None)
        await feed.create(T)
        await feed.apply(T.relation, T.insert(1, "a"))
    finally:
        await feed.close()


async def test_table_synchronization_resumes_when_the_sink_is_opened_again(target: ComplianceTarget) -> None:
    feed = Feed(target)
    await feed.open()
    await feed.begin(TableState.INIT, T)
    table = feed.opened.open_table(T.name)

    async def rows() -> object:
        yield b"1\ta\n"
        await feed.opened.close()
        await feed.open()
        yield b"2\tb\n"

    try:
        await table.begin()
        await table.start_copy()
        await table.describe(T.published)
        await table.copy(["id", "v"], CopyFormat.TEXT, rows())  # type: ignore[arg-type]
        await table.finish_copy(Position("sync", SYSTEM, 1, START))
        await feed.expect(T, (1, "a"), (2, "b"))
    finally:
        await table.close()
        await feed.close()


async def test_a_cancelled_close_of_a_table_closes_all_sessions(target: ComplianceTarget) -> None:
    feed = Feed(target)
    await feed.open()
    await feed.begin(TableState.INIT, T)
    table = feed.opened.open_table(T.name)
    assert isinstance(table, SqlAlchemyTableSink)
    try:
        await table.begin()
        await table.start_copy()
        await table.compared(3)
        connections = [session.connection for session in table._database.sessions() if session is not feed.opened.session]  # type: ignore[attr-defined]
        assert len(connections) >= 4
        closing = asyncio.create_task(table.close())
        while table._comparing:
            await asyncio.sleep(0)
        # it waits for the first session now
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
    finally:
        await feed.close()
    async with asyncio.timeout(WAIT_SECONDS):
        while not all(connection.closed for connection in connections):
            await asyncio.sleep(0.01)


async def test_changes_before_the_first_position(tmp_path: Path) -> None:
    sink = SqlAlchemySink(f"sqlite:///{tmp_path / 'replica.db'}", options=SubscriptionOptions(), settings=Settings())
    assert not await sink.exists("s")
    assert not (tmp_path / "replica.db").exists()
    opened = await sink.open("s", lambda _: None)
    with pytest.raises(TargetError, match="has no position"):
        await opened.apply(Feed(SqliteTarget(tmp_path / "replica.db")).batch())
    await opened.close()
    await opened.close()
    assert await sink.exists("s")
