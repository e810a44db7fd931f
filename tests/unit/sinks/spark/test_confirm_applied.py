"""With ``confirm=applied`` the position is the applier's: landed changes are sent again, and skipped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from subscriber.apply.tables.table_state import TableStates
from subscriber.interfaces import Batch, CopyFormat, Position, PublishedTable, TableEntry, TableName, TableState
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import CommitPrepared, Insert, RollbackPrepared
from subscriber.sinks.spark.landing.prepared_transactions import PreparedTransactions
from subscriber.sinks.spark.opened_spark_sink import OpenedSparkSink
from subscriber.subscription.run.run_state import RunState
from subscriber.transaction.feedback import FlushTracker
from subscriber.transaction.model import PreparedTransaction, Transaction
from tests.unit.sinks.spark.pipeline.test_applier import all_rounds, applier, storage
from tests.unit.sinks.spark.pipeline.test_rounds import KEYED, relation, rows
from tests.unit.sinks.spark.stream import TABLE, batch, begun, make, row, transaction

OTHER = TableName("public", "u")
OTHERS = relation("d", ("id", 23, True), ("note", 25, False), number=6, name="u")
COPIED = PublishedTable(
    name=OTHER,
    relation_id=6,
    kind="r",
    columns=("id", "note"),
    key_columns=("id",),
    replica_identity="d",
    column_types=(23, 25),
    column_modifiers=(-1, -1),
)


async def _stream(sink: OpenedSparkSink, states: TableStates, sent: Transaction) -> None:
    """As the apply worker does."""
    assert await states.hand(sent.end_lsn, lambda: False)
    await sink.apply(Batch((sent,), states.gate))
    await sink._usable.land()


def _of_both() -> Transaction:
    return transaction(400, KEYED, Insert(5, row("2", "b")), OTHERS, Insert(6, row("2", "streamed")))


@pytest.mark.slow
@pytest.mark.parametrize("confirm", ["landed", "applied"])
async def test_a_table_that_catches_up_is_not_handed_over_below_what_was_landed_without_it(tmp_path: Path, confirm: str) -> None:
    parameters = f"?batch_delay=1h&confirm={confirm}"
    sink, work = await begun(make(tmp_path, parameters)), applier(tmp_path)
    states = TableStates()
    await sink.add_tables([OTHER], TableEntry(TableState.INIT))
    states.load(await sink.tables(), Lsn(100))
    await _stream(sink, states, transaction(200, KEYED, Insert(5, row("1", "a"))))
    all_rounds(work)
    copying = sink.open_table(OTHER)
    await copying.begin()
    await copying.start_copy()
    await copying.describe(COPIED)

    async def lines() -> AsyncIterator[bytes]:
        yield b"1\tcopied\n"

    await copying.copy(["id", "note"], CopyFormat.TEXT, lines())
    await copying.finish_copy(Position("sync", "7", 1, Lsn(250)))
    states.set(OTHER, TableEntry(TableState.FINISHEDCOPY))
    await _stream(sink, states, _of_both())
    # the applier is behind, and the process ends
    await copying.close()
    await sink.close()

    sink = await make(tmp_path, parameters).open("replica", lambda _: None)
    state = sink.state
    assert state.position is not None
    assert (state.position.lsn, state.taken) == (200 if confirm == "applied" else 400, 400)
    states = TableStates()
    states.load(await sink.tables(), max(state.position.lsn, state.taken))
    copying = sink.open_table(OTHER)
    assert (await copying.begin()).state is TableState.FINISHEDCOPY
    assert not states.try_handover(OTHER, (await copying.position()).lsn)
    await copying.apply(Batch((_of_both(),), lambda sent, _: sent.name == "u"))
    assert states.try_handover(OTHER, Lsn(400))
    await copying.finish_sync(Lsn(400))
    states.complete_handover(OTHER)
    await copying.close()
    if confirm == "applied":
        await _stream(sink, states, _of_both())
    await _stream(sink, states, transaction(500, KEYED, Insert(5, row("3", "c")), OTHERS, Insert(6, row("3", "later"))))
    await sink.close()
    all_rounds(work)
    assert rows(tmp_path, name="u") == [(1, "copied"), (2, "streamed"), (3, "later")]
    assert rows(tmp_path, name=TABLE.name) == [(1, "a"), (2, "b"), (3, "c")]


async def _until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not what():
            await asyncio.sleep(0.01)


async def test_what_was_applied_before_it_comes_again_counts_once_it_has_come(tmp_path: Path) -> None:
    """The bug was that the sink's watcher ended at the first look behind a restart, without a word."""
    parameters = "?batch_delay=1h&confirm=applied"
    sink, work = await begun(make(tmp_path, parameters)), applier(tmp_path)
    sent = [transaction(end, KEYED, Insert(5, row(str(end), "a"))) for end in (200, 300, 400)]
    for one in sent[:2]:
        await sink.apply(batch(one))
        await sink._usable.land()
    await sink.close()

    running = RunState()
    sink = await make(tmp_path, parameters).open("replica", running.durable)
    state = sink.state
    assert state.position is not None
    assert state.position.lsn == 100
    # it looks before there is a stream
    looked = asyncio.Event()
    sink._usable.applied = _told(sink._usable.applied, looked)  # type: ignore[method-assign]
    async with asyncio.timeout(20):
        await looked.wait()
    tracker = running.tracker = FlushTracker(state.position.lsn)
    # and is applied further before any of it comes
    all_rounds(work)
    looked.clear()
    async with asyncio.timeout(20):
        await looked.wait()
    assert tracker.flushed == 100
    for one in sent:
        tracker.pend(one.end_lsn)
        await sink.apply(batch(one))
        await sink._usable.land()
        if one.end_lsn <= 300:
            await _until(lambda: tracker.flushed == one.end_lsn)  # noqa: B023
    assert not tracker.idle
    all_rounds(work)
    await _until(lambda: tracker.idle)
    assert tracker.flushed == 400
    await sink.close()


def _told(look: Callable[[], Awaitable[Lsn]], looked: asyncio.Event) -> Callable[[], Coroutine[Any, Any, Lsn]]:
    async def found() -> Lsn:
        lsn = await look()
        asyncio.get_running_loop().call_soon(looked.set)
        return lsn

    return found


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("killed", [True, False])
async def test_what_is_prepared_again_though_it_is_over_does_not_stay(tmp_path: Path, end: str, killed: bool) -> None:
    parameters = "?batch_delay=1h&confirm=applied"
    sink, work = await begun(make(tmp_path, parameters)), applier(tmp_path)
    prepared = PreparedTransactions(storage(tmp_path))

    async def ended() -> None:
        if end == "commit":
            await sink.commit_prepared(CommitPrepared(0, Lsn(295), Lsn(300), 0, 8, "gid"))
        else:
            await sink.rollback_prepared(RollbackPrepared(0, Lsn(200), Lsn(300), 0, 0, 8, "gid"))

    async def prepare() -> None:
        sent = transaction(200, KEYED, Insert(5, row("2", "p")), xid=8)
        await sink.prepare(PreparedTransaction(sent, "gid"), lambda *_: True)

    await sink.apply(batch(transaction(150, KEYED, Insert(5, row("1", "a")))))
    await prepare()
    assert prepared.gids() == ["gid"]
    await ended()
    assert prepared.gids() == []
    await sink.close()
    # nothing is applied: all of it comes again; and the process ends amid it
    sink = await make(tmp_path, parameters).open("replica", lambda _: None)
    state = sink.state
    assert state.position is not None
    assert state.position.lsn == 100
    await prepare()
    assert (prepared.gids(), prepared.xids()) == ([], frozenset())
    if killed:
        await sink.close()
        all_rounds(work)
        # its end does not come again
        sink = await make(tmp_path, parameters).open("replica", lambda _: None)
        state = sink.state
        assert state.position is not None
        assert state.position.lsn == 300
    else:
        await ended()
        assert list((tmp_path / "prepared").iterdir()) != []
        all_rounds(work)
        await _until(lambda: not list((tmp_path / "prepared").iterdir()))
    assert list((tmp_path / "prepared").iterdir()) == []
    await sink.close()
    assert rows(tmp_path) == [(1, "a"), (2, "p")][: 2 if end == "commit" else 1]
