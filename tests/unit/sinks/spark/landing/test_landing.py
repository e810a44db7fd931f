"""The landing zone through the sink: what is landed, what a crash leaves, what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import threading
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from subscriber.errors import (
    DataLossError,
    ProtocolError,
    RelationError,
    TargetError,
    TargetUnavailable,
)
from subscriber.interfaces import TableEntry, TableName, TableState
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import (
    Column,
    CommitPrepared,
    Delete,
    Insert,
    Message,
    Relation,
    RollbackPrepared,
    Truncate,
    TruncateOption,
    Update,
)
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.files.storage import PendingFile, Storage
from subscriber.sinks.spark.landing.prepared_transactions import PreparedTransactions
from subscriber.sinks.spark.landing.zone import LandingZone, OpenBatch
from subscriber.transaction.model import PreparedTransaction
from tests.unit.sinks.spark.stream import RELATION, START, TABLE, batch, begun, landed, make, row, transaction

EVERYTHING: tuple[Message, ...] = (
    RELATION,
    Insert(5, row("1", "one", "2024-01-01")),
    Update(5, None, None, row("1", "unchanged", "infinity")),
    Update(5, row("1", None, None), None, row("2", "unchanged", "2024-01-03")),
    Truncate(TruncateOption(0), (5,)),
    Delete(5, row("2", None, None), None),
)


async def test_each_kind_of_change_becomes_rows(tmp_path: Path) -> None:
    sink = await begun(make(tmp_path))
    await sink.apply(batch(transaction(200, *EVERYTHING, xid=77)))
    await sink.advance(Lsn(200))
    rows = landed(tmp_path)
    assert [(found["_op"], found["_seq"], found["id"], found["note"], found["_moved"], found["_un"]) for found in rows] == [
        ("i", 0, 1, "one", False, None),
        ("u", 1, 1, None, False, ["note"]),
        ("d", 2, 1, None, False, None),
        ("u", 3, 2, None, True, ["note"]),
        ("t", 4, None, None, False, None),
        ("d", 5, 2, None, False, None),
    ]
    assert {found["_lsn"] for found in rows} == {200}
    assert {found["_xid"] for found in rows} == {77}
    assert rows[0]["day"] == date(2024, 1, 1)
    assert rows[1]["day"] is None
    assert json.loads(rows[1]["_special"]) == {"day": "infinity"}
    assert (sink.statistics.inserts, sink.statistics.updates, sink.statistics.deletes, sink.statistics.truncates) == (1, 2, 1, 1)
    await sink.close()


async def test_under_replica_identity_full_an_update_is_the_old_row_and_the_whole_new_one(tmp_path: Path) -> None:
    full = Relation(5, "public", "t", "f", tuple(Column(column.name, column.type_oid, -1, True) for column in RELATION.columns))
    sink = await begun(make(tmp_path))
    await sink.apply(batch(transaction(200, full, Update(5, None, row("1", "long", None), row("1", "unchanged", "2024-01-01")))))
    await sink.close()
    assert [(found["_op"], found["note"], found["day"], found["_un"]) for found in landed(tmp_path)] == [
        ("d", "long", None, None),
        ("u", "long", date(2024, 1, 1), None),
    ]


async def test_what_was_gathered_is_landed_in_time_and_reported(tmp_path: Path) -> None:
    durable: list[int] = []
    sink = await begun(make(tmp_path, "?batch_delay=50ms"), durable)
    await sink.apply(batch(transaction(200, RELATION, Insert(5, row("1", None, None)))))
    async with asyncio.timeout(20):
        while 200 not in durable:
            await asyncio.sleep(0.01)
    assert len(landed(tmp_path)) == 1
    await sink.close()


async def test_a_transaction_that_comes_again_is_dropped_but_its_relations_count(tmp_path: Path) -> None:
    first = transaction(200, RELATION, Insert(5, row("1", None, None)))
    sink = await begun(make(tmp_path))
    await sink.apply(batch(first))
    await sink.close()
    sink = await make(tmp_path).open("replica", lambda _: None)
    state = sink.state
    assert state.position is not None
    assert state.position.lsn == 200
    await sink.apply(batch(first, transaction(300, Insert(5, row("2", None, None)))))
    await sink.close()
    assert [found["id"] for found in landed(tmp_path)] == [1, 2]


async def test_a_table_that_changes_begins_a_new_file_with_its_new_columns(tmp_path: Path) -> None:
    wider = Relation(5, "public", "t", "d", (*RELATION.columns, Column("more", 20, -1, False)))
    sink = await begun(make(tmp_path))
    await sink.apply(
        batch(
            transaction(200, RELATION, Insert(5, row("1", None, None))),
            transaction(300, wider, Insert(5, row("2", None, None, "9"))),
        )
    )
    await sink.close()
    assert [(found["id"], found.get("more")) for found in landed(tmp_path)] == [(1, None), (2, 9)]


async def test_tables_that_are_gated_or_unknown_are_left_out(tmp_path: Path) -> None:
    other = Relation(6, "public", "other", "d", RELATION.columns)
    sink = await begun(make(tmp_path))
    await sink.apply(batch(transaction(200, other, Insert(6, row("1", None, None)))))
    await sink.advance(Lsn(250))
    await sink.close()
    assert landed(tmp_path) == []
    state = (await make(tmp_path).open("replica", lambda _: None)).state
    assert state.position is not None
    assert state.position.lsn == 250


async def test_a_transaction_that_is_refused_leaves_those_before_it(tmp_path: Path) -> None:
    sink = await begun(make(tmp_path))
    await sink.apply(batch(transaction(200, RELATION, Insert(5, row("1", None, None)))))
    for _ in range(2):
        with pytest.raises(ProtocolError, match="no relation map entry"):
            await sink.apply(batch(transaction(300, Insert(5, row("2", None, None)), Insert(9, row("2", None, None)))))
    await sink.apply(batch(transaction(400, Insert(5, row("3", None, None)))))
    await sink.close()
    assert [(found["id"], found["_lsn"]) for found in landed(tmp_path)] == [(1, 200), (3, 400)]


async def test_changes_are_counted_once_although_they_are_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: an attempt that failed was counted too."""

    def fail(*_: object) -> None:
        raise TargetUnavailable("the disk is full")

    everything, refused = transaction(200, *EVERYTHING), transaction(300, Insert(5, row("3", None, None)), Insert(9, row("3", None, None)))
    prepared = PreparedTransaction(transaction(400, Insert(5, row("4", None, None))), "gid")
    source = make(tmp_path)
    sink = await begun(source)
    with monkeypatch.context() as patched:
        patched.setattr(LandingZone, "land", fail)
        await sink.apply(batch(everything))
        with pytest.raises(TargetUnavailable):
            await sink.advance(Lsn(200))
    await sink.close()
    sink = await source.open("replica", lambda _: None)
    with pytest.raises(ProtocolError):
        await sink.apply(batch(everything, refused))
    await sink.advance(Lsn(300))
    with monkeypatch.context() as patched:
        patched.setattr(PreparedTransactions, "prepare", fail)
        with pytest.raises(TargetUnavailable):
            await sink.prepare(prepared, lambda *_: True)
    await sink.close()
    sink = await source.open("replica", lambda _: None)
    await sink.apply(batch(everything))
    await sink.prepare(prepared, lambda *_: True)
    await sink.close()
    found = sink.statistics
    assert (found.transactions, found.inserts, found.updates, found.deletes, found.truncates) == (2, 2, 2, 1, 1)


async def test_nothing_can_be_stored_past_what_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenBatch, "roll_back", lambda *_: False)  # as when rows of it were written already
    sink = await begun(make(tmp_path))
    await sink.apply(batch(transaction(200, RELATION, Insert(5, row("1", None, None)))))
    with pytest.raises(ProtocolError):
        await sink.apply(batch(transaction(300, Insert(9, row("2", None, None)))))
    with pytest.raises(TargetUnavailable):
        await sink.advance(Lsn(300))
    await sink.close()
    sink = await make(tmp_path).open("replica", lambda _: None)
    state = sink.state
    assert state.position == START
    assert landed(tmp_path) == []
    await sink.close()


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("kind", [TargetError, ZeroDivisionError])
async def test_failed_landing_by_the_timer_is_not_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception], waits: bool
) -> None:
    """After any error: the bug was that the next call, or one that waited already, stored a position after what was gathered."""
    begun_to_land, go, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

    def land(*_: object, **__: object) -> None:
        loop.call_soon_threadsafe(begun_to_land.set)
        assert go.wait(30)
        raise kind("of no use")

    durable: list[int] = []
    sink = await begun(make(tmp_path, "?batch_delay=1ms"), durable)
    with monkeypatch.context() as patched:
        patched.setattr(LandingZone, "land", land)
        await sink.apply(batch(transaction(200, RELATION, Insert(5, row("1", None, None)))))
        async with asyncio.timeout(30):
            await begun_to_land.wait()
            next_call = asyncio.create_task(sink.advance(Lsn(300)))
            if not waits:
                next_call.cancel()
            await asyncio.sleep(0)
            go.set()
            await asyncio.wait([next_call, *(() if waits else sink._usable._tasks[:1])])
    with pytest.raises(TargetError):
        await (next_call if waits else sink.advance(Lsn(300)))
    with contextlib.nullcontext() if kind is TargetError else pytest.raises(ZeroDivisionError):
        await sink.close()
    assert max(durable, default=0) <= 100
    sink = await make(tmp_path).open("replica", lambda _: None)
    state = sink.state
    assert state.position == START
    await sink.close()


async def test_prepared_transactions_wait_apart_and_land_as_of_their_commit(tmp_path: Path) -> None:
    sink = await begun(make(tmp_path))
    await sink.prepare(PreparedTransaction(transaction(200, RELATION, Insert(5, row("1", "p", None)), xid=8), "gid"), lambda *_: True)
    await sink.prepare(PreparedTransaction(transaction(210, Insert(5, row("9", "r", None)), xid=9), "no"), lambda *_: True)
    assert landed(tmp_path) == []
    await sink.close()
    sink = await make(tmp_path).open("replica", lambda _: None)
    state = sink.state
    assert state.position is not None
    assert state.position.lsn == 210
    await sink.rollback_prepared(RollbackPrepared(0, Lsn(210), Lsn(250), 0, 0, 9, "no"))
    committed = CommitPrepared(0, Lsn(295), Lsn(300), 5_000_000, 8, "gid")
    await sink.commit_prepared(committed)
    await sink.commit_prepared(committed)
    await sink.close()
    assert [(found["id"], found["_lsn"], found["_ts"].isoformat()) for found in landed(tmp_path)] == [(1, 300, "2000-01-01T00:00:05+00:00")]
    assert list((tmp_path / "prepared").iterdir()) == []


@pytest.mark.parametrize(("killed", "left"), [("add", ["gid"]), ("forget", [])])
async def test_a_kill_amid_a_commit_leaves_nothing_prepared_that_is_landed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: str, left: list[str]
) -> None:
    class Killed(BaseException):
        pass

    def kill(*_: object, **__: object) -> None:
        raise Killed

    sink = await begun(make(tmp_path))
    await sink.prepare(PreparedTransaction(transaction(200, RELATION, Insert(5, row("1", "p", None)), xid=8), "gid"), lambda *_: True)
    committed = CommitPrepared(0, Lsn(295), Lsn(300), 5_000_000, 8, "gid")
    with monkeypatch.context() as patched:
        patched.setattr(LandingZone if killed == "add" else PreparedTransactions, killed, kill)
        with pytest.raises(Killed):
            await sink.commit_prepared(committed)
    await sink.close()
    sink = await make(tmp_path).open("replica", lambda _: None)
    state = sink.state
    assert state.position is not None
    assert state.position.lsn == (200 if left else 300)
    assert PreparedTransactions(Storage.open(Location(path=str(tmp_path)))).gids() == left
    if left:
        await sink.commit_prepared(committed)
    await sink.close()
    assert [(found["id"], found["_lsn"]) for found in landed(tmp_path)] == [(1, 300)]
    assert list((tmp_path / "prepared").iterdir()) == []


async def test_commit_of_a_prepared_transaction_that_lacks_memory_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug was a bare MemoryError, which ended the program."""

    def fail(*_: object, **__: object) -> None:
        raise pa.ArrowMemoryError("malloc of size 64 failed")

    sink = await begun(make(tmp_path))
    await sink.prepare(PreparedTransaction(transaction(200, RELATION, Insert(5, row("1", "p", None)), xid=8), "gid"), lambda *_: True)
    committed = CommitPrepared(0, Lsn(295), Lsn(300), 5_000_000, 8, "gid")
    with monkeypatch.context() as patched:
        patched.setattr(pq.ParquetFile, "iter_batches", fail)
        with pytest.raises(TargetError, match=r"prepared/8-.*: there is not enough memory"):
            await sink.commit_prepared(committed)
    await sink.close()
    sink = await make(tmp_path).open("replica", lambda _: None)
    await sink.commit_prepared(committed)
    await sink.close()
    assert [(found["id"], found["_lsn"]) for found in landed(tmp_path)] == [(1, 300)]


async def test_a_commit_of_what_was_never_prepared_is_a_loss(tmp_path: Path) -> None:
    sink = await begun(make(tmp_path))
    with pytest.raises(DataLossError, match="never received its PREPARE"):
        await sink.commit_prepared(CommitPrepared(0, Lsn(295), Lsn(300), 0, 8, "gid"))
    # the worker decides whether it is one: before 18 a publisher sends no PREPARE of a transaction without changes
    await sink.advance(Lsn(300))
    await sink.apply(batch(transaction(400, RELATION, Insert(5, row("1", None, None)))))
    await sink.close()
    assert [(found["id"], found["_lsn"]) for found in landed(tmp_path)] == [(1, 400)]


async def test_a_cancelled_close_unlocks_the_lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = await begun(make(tmp_path))
    began, may_end = threading.Event(), threading.Event()

    def stop() -> None:
        began.set()
        assert may_end.wait(20)

    monkeypatch.setattr(sink._sessions.applier, "stop", stop)
    closing = asyncio.create_task(sink.close())
    assert await asyncio.to_thread(began.wait, 20)
    closing.cancel()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    again = await begun(make(tmp_path))
    await again.close()


async def test_an_update_of_a_table_without_identity_is_refused(tmp_path: Path) -> None:
    keyless = Relation(5, "public", "t", "d", tuple(Column(column.name, column.type_oid, -1, False) for column in RELATION.columns))
    sink = await begun(make(tmp_path))
    with pytest.raises(RelationError, match=r'replica identity of table "public\.t"'):
        await sink.apply(batch(transaction(200, keyless, Insert(5, row("1", None, None)), Update(5, None, None, row("1", "x", None)))))
    await sink.close()
    assert landed(tmp_path) == []


async def test_reported_position_never_decreases(tmp_path: Path) -> None:
    durable: list[int] = []
    sink = await begun(make(tmp_path), durable)
    await sink.advance(Lsn(300))
    await sink.advance(Lsn(250))
    await sink.close()
    assert durable == sorted(durable)
    assert durable[-1] == 300


# --- crashes


class Crashed(BaseException):
    """The process has ended: nothing is written, renamed or removed any more."""


class Crash:
    """Ends the process at its n-th step on the disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
        self.left = steps
        for owner, name in (
            (os, "fsync"),
            (Path, "rename"),
            (Storage, "delete"),
            (Storage, "create"),
            (PendingFile, "commit"),
            (Storage, "write"),
        ):
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))
        discard = PendingFile.discard
        monkeypatch.setattr(PendingFile, "discard", lambda pending: discard(pending) if self.left > 0 else None)
        unlink = Path.unlink
        monkeypatch.setattr(Path, "unlink", lambda path, missing_ok=False: unlink(path, missing_ok=missing_ok) if self.left > 0 else None)

    def _counted(self, original: Callable[..., object]) -> Callable[..., object]:
        def step(*arguments: object, **named: object) -> object:
            self.left -= 1
            if self.left <= 0:
                raise Crashed
            return original(*arguments, **named)

        return step


async def test_a_crash_at_any_step_leaves_the_batch_before_or_after_it(tmp_path: Path) -> None:
    first, second = (
        transaction(200, RELATION, Insert(5, row("1", None, None))),
        transaction(300, RELATION, Insert(5, row("2", None, None)), Insert(5, row("3", None, None))),
    )
    seen: set[int] = set()
    for steps in range(1, 100):
        place = tmp_path / str(steps)
        sink = await begun(make(place))
        await sink.apply(batch(first))
        await sink.advance(Lsn(200))
        with pytest.MonkeyPatch.context() as monkeypatch:
            crash = Crash(monkeypatch, steps)
            crashed = False
            try:
                await sink.apply(batch(second))
                await sink.advance(Lsn(300))
            except Crashed:
                crashed = True
            crash.left = 10**9
        for task in sink._stream._tasks:
            task.cancel()
        descriptor = sink._sessions.lock._descriptor
        assert descriptor is not None
        os.close(descriptor)
        sink = await make(place).open("replica", lambda _: None)
        state = sink.state
        assert state.position is not None
        seen.add(int(state.position.lsn))
        assert [found["id"] for found in landed(place)] == ([1] if state.position.lsn == 200 else [1, 2, 3])
        assert not [file for file in (place / "landing").iterdir() if ".tmp-" in file.name]
        await sink.apply(batch(first, second))
        await sink.close()
        assert [found["id"] for found in landed(place)] == [1, 2, 3]
        named = {file["path"] for name in (place / "landing").glob("*.json") for file in json.loads(name.read_text())["document"]["files"]}
        assert named == {f"landing/{file.name}" for file in (place / "landing").glob("*.parquet")}
        if not crashed:
            break
    else:
        raise AssertionError("it never came to its end")
    assert seen == {200, 300}


async def test_what_a_crash_left_in_memory_is_durable_before_it_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = PreparedTransaction(transaction(300, Insert(5, row("2", "p", None)), xid=8), "gid")
    sink = await begun(make(tmp_path))
    await sink.apply(batch(transaction(200, RELATION, Insert(5, row("1", None, None)))))
    await sink.prepare(prepared, lambda *_: True)
    await sink.close()
    synced: list[str] = []
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    sink = await make(tmp_path).open("replica", lambda _: None)
    assert {str(tmp_path), str(tmp_path / "landing")} <= set(synced)
    synced.clear()
    await sink.prepare(prepared, lambda *_: True)
    (directory,) = (tmp_path / "prepared").iterdir()
    assert {str(tmp_path), str(directory.parent), str(directory)} <= set(synced)
    await sink.close()


async def test_tables_keep_their_numbers(tmp_path: Path) -> None:
    sink = await begun(make(tmp_path), tables=[TABLE, TableName("public", "u")])
    numbers = {name: sink.open_table(name).relation_id for name in await sink.tables()}
    await sink.remove_table(TABLE)
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    assert {name: sink.open_table(name).relation_id for name in await sink.tables()} == numbers
    await sink.add_tables([TableName("public", "v")], TableEntry(TableState.INIT))
    assert sink.open_table(TableName("public", "v")).relation_id not in numbers.values()
    await sink.close()
    shutil.rmtree(tmp_path)
