"""The SQLAlchemy sink is stopped at every instant at which the database could tell the difference: before every statement, and before and
after every commit. A successor finds exactly the rows of the position it reads, resumes, and ends at the same rows as without the
stop.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.engine.default import DefaultDialect

from subscriber.interfaces import CopyFormat, Position, TableEntry, TableState
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import CommitPrepared, RollbackPrepared
from subscriber.sinks.sqlalchemy.apply import prepared_transactions
from subscriber.sinks.sqlalchemy.catalog_tables import TABLES
from subscriber.sinks.sqlalchemy.copy import sqlalchemy_table_sink
from subscriber.sinks.sqlalchemy.opened_sqlalchemy_sink import OpenedSqlAlchemySink
from subscriber.testing.compliance import ComplianceTarget
from subscriber.testing.compliance.feed import START, SYSTEM, Feed
from subscriber.testing.compliance.sample_messages import Table
from subscriber.transaction.model import PreparedTransaction, Transaction
from tests.sinks.targets import MariaDBTarget, SqliteTarget

T: Final = Table("t", "*id int4", "v")
Rows = dict[int, str | None]

EVERY: Final = "EVERY_INSTANT" in os.environ
STEPS: Final = [
    ("sqlite", 1 if EVERY else 17),
    *(pytest.param(kind, step, marks=pytest.mark.endurance) for kind, step in (("sqlite", 5), ("mariadb", 13))),
]
"""All instants take minutes: EVERY_INSTANT=1. The steps are such that other ones are met each time."""


class Stopped(BaseException):
    """As if the process had been killed here: nothing above takes it for an error."""


class Instants:
    """Counts what is done to databases, and stops at one of them."""

    def __init__(self) -> None:
        self.count = 0
        self.stop_at = 0

    def executing(self, connection: Connection, *_: object) -> None:
        # not SQLAlchemy's own queries at a connection: none of the sink's work is under way
        if "subscriber_begin" in connection.get_execution_options():
            self.passed()

    def passed(self) -> None:
        self.count += 1
        if self.count == self.stop_at:
            raise Stopped


@pytest.fixture
def instants(monkeypatch: pytest.MonkeyPatch) -> Iterator[Instants]:
    found = Instants()
    commit = DefaultDialect.do_commit

    def do_commit(dialect: DefaultDialect, connection: Any) -> None:
        found.passed()
        commit(dialect, connection)  # type: ignore[no-untyped-call]
        found.passed()

    monkeypatch.setattr(DefaultDialect, "do_commit", do_commit)
    event.listen(Engine, "before_cursor_execute", found.executing)
    yield found
    event.remove(Engine, "before_cursor_execute", found.executing)


class History:
    """What a publisher sends, and the rows at each position."""

    def __init__(self, feed: Feed) -> None:
        self.events: list[tuple[Lsn, Callable[[OpenedSqlAlchemySink], Awaitable[None]]]] = []
        self.rows: dict[Lsn, Rows] = {START: {}}
        self._feed = feed
        self._now: Rows = {}

    def _add(self, lsn: Lsn, give: Callable[[OpenedSqlAlchemySink], Awaitable[None]]) -> None:
        self.events.append((lsn, give))
        self.rows[lsn] = dict(self._now)

    def batch(self, *transactions: Transaction, **changes: str | None) -> None:
        batch = self._feed.batch(*transactions)
        for transaction in transactions[:-1]:
            # without its own position: they arrive together
            self.rows.pop(transaction.end_lsn, None)
        self._set(changes)
        self._add(transactions[-1].end_lsn, lambda sink: sink.apply(batch))

    def _set(self, changes: dict[str, str | None]) -> None:
        for name, value in changes.items():
            key = int(name[1:])
            if value is None:
                self._now.pop(key, None)
            else:
                self._now[key] = value

    def prepare(self, transaction: Transaction) -> None:
        prepared = PreparedTransaction(transaction, f"gid {transaction.xid}")
        self._add(transaction.end_lsn, lambda sink: sink.prepare(prepared, self._feed.gate))

    def commit(self, transaction: Transaction, **changes: str | None) -> None:
        lsn = self._feed.next_lsn()
        message = CommitPrepared(0, lsn, Lsn(lsn + 0x30), 0, transaction.xid, f"gid {transaction.xid}")
        self._set(changes)
        self._add(message.end_lsn, lambda sink: sink.commit_prepared(message))

    def roll_back(self, transaction: Transaction) -> None:
        lsn = self._feed.next_lsn()
        message = RollbackPrepared(0, transaction.end_lsn, Lsn(lsn + 0x30), 0, 0, transaction.xid, f"gid {transaction.xid}")
        self._add(message.rollback_end_lsn, lambda sink: sink.rollback_prepared(message))

    def advance(self) -> None:
        lsn = self._feed.next_lsn()
        self._add(lsn, lambda sink: sink.advance(lsn))


def _history(feed: Feed) -> History:
    made = History(feed)
    inserts = [T.insert(key, "a") for key in range(1, 20)]
    made.batch(
        feed.transaction(T.relation, *inserts),
        feed.transaction(*(T.update(key, "b") for key in range(1, 19)), T.delete(19, None), T.update(30, "c", old=(18, None))),
        **{f"k{key}": "b" for key in range(1, 18)},
        k30="c",
    )
    large = feed.transaction(T.relation, *(T.insert(key, "x" * 400) for key in range(40, 46)), T.delete(1, None))
    given_up = feed.transaction(T.relation, T.delete(2, None))
    made.prepare(large)
    made.prepare(given_up)
    made.advance()
    made.batch(feed.transaction(T.relation, T.insert(50, "d")), k50="d")
    made.commit(large, k1=None, **{f"k{key}": "x" * 400 for key in range(40, 46)})
    made.roll_back(given_up)
    # a missing row, and a spooled one
    made.batch(feed.transaction(T.relation, T.update(99, "nobody"), T.delete(50, None), T.insert(51, "e"), spilled=2), k50=None, k51="e")
    return made


def _target(kind: str, request: pytest.FixtureRequest) -> Callable[[], ComplianceTarget]:
    if kind == "sqlite":
        directory: Path = request.getfixturevalue("tmp_path")
        numbers = iter(range(1_000_000))
        return lambda: SqliteTarget(directory / f"replica{next(numbers)}.db")
    return lambda: MariaDBTarget(request.getfixturevalue("mariadb_db"))


async def _live(history: History, target: ComplianceTarget) -> None:
    """One process: it looks at where it is, and does the rest."""
    durable: list[Lsn] = []
    sink = await target.new_sink().open("instants", durable.append)
    assert isinstance(sink, OpenedSqlAlchemySink)
    try:
        state = sink.state
        if state.position is None:
            await sink.set_position(Position("slot", SYSTEM, 1, START))
            await sink.describe_tables([T.published])
            await sink.add_tables([T.name], TableEntry(TableState.READY))
        else:
            await sink.describe_tables([T.published])
            if not await sink.tables():
                await sink.add_tables([T.name], TableEntry(TableState.READY))
        position = START if state.position is None else state.position.lsn
        assert await _rows(target) == history.rows[position], f"the rows at {position}"
        for lsn, give in history.events:
            if lsn > position:
                await give(sink)
                assert durable[-1] == lsn
    finally:
        await sink.close()


async def _rows(target: ComplianceTarget) -> Rows:
    return {int(str(key)): value if value is None else str(value) for key, value in await target.rows(T)}


@pytest.mark.timeout(900 if EVERY else 120)
@pytest.mark.parametrize(("kind", "step"), STEPS)
async def test_stopped_while_applying(kind: str, step: int, request: pytest.FixtureRequest, instants: Instants, monkeypatch: Any) -> None:
    # several chunks, several commits
    monkeypatch.setattr(prepared_transactions, "_CHUNK", 512)
    monkeypatch.setattr(prepared_transactions, "_PER_COMMIT", 1024)
    make = _target(kind, request)
    target = make()
    await target.create_table(T)
    history = _history(Feed(target))
    await _live(history, target)
    assert await _rows(target) == history.rows[history.events[-1][0]]
    total = instants.count
    assert total > 80, total
    for number in range(1, total + 1, step):
        target = await _anew(kind, make, target)
        instants.count, instants.stop_at = 0, number
        with contextlib.suppress(Stopped):
            await _live(history, target)
        instants.stop_at = 0
        await _live(history, target)
        assert await _rows(target) == history.rows[history.events[-1][0]], f"stopped at instant {number}"


async def _anew(kind: str, make: Callable[[], ComplianceTarget], before: ComplianceTarget) -> ComplianceTarget:
    """An empty target, and no subscription."""
    if kind == "sqlite":
        made = make()
        await made.create_table(T)
        return made
    await before.clear(T)
    sink = before.new_sink()
    database = sink._shared.database  # type: ignore[attr-defined]
    async with database.writing() as connection:
        for table in TABLES.values():
            await connection.execute(table.delete())
    await database.close()
    return before


# --- a table's synchronization


async def _copied(rows: Sequence[tuple[int, str]]) -> AsyncIterator[bytes]:
    for key, value in rows:
        yield f"{key}\t{value}\n".encode()


_SNAPSHOT: Final = [(key, f"copied {key}") for key in range(1, 8)]
_AT: Final = Position("sync", SYSTEM, 1, Lsn(START + 0x10))


async def _synchronize(feed: Feed, later: Transaction, before: Rows) -> None:
    """One process: all that is left to do for the table."""
    copied = before | dict(_SNAPSHOT)
    try:
        await feed.open()
        await feed.describe(T)
        if not await feed.opened.tables():
            await feed.opened.add_tables([T.name], TableEntry(TableState.INIT))
        table = feed.opened.open_table(T.name)
        try:
            entry = await table.begin()
            if entry.state is TableState.INIT:
                assert await _rows(feed.target) == before, "nothing of an unfinished copy is left"
                await table.start_copy()
                await table.describe(T.published)
                await table.copy(["id", "v"], CopyFormat.TEXT, _copied(_SNAPSHOT))
                await table.finish_copy(_AT)
                entry = TableEntry(TableState.FINISHEDCOPY)
            if entry.state is TableState.FINISHEDCOPY:
                position = (await table.position()).lsn
                assert await _rows(feed.target) == (copied if position == _AT.lsn else copied | {8: "later"})
                await table.apply(feed.batch(later))
                await table.finish_sync(later.end_lsn)
            assert await _rows(feed.target) == copied | {8: "later"}
        finally:
            await table.close()
        assert await feed.opened.tables() == {T.name: TableEntry(TableState.SYNCDONE, later.end_lsn)}
    finally:
        await feed.close()


@pytest.mark.timeout(900 if EVERY else 120)
@pytest.mark.parametrize("occupied", [False, True], ids=["direct", "staged"])
@pytest.mark.parametrize(("kind", "step"), STEPS)
async def test_stopped_while_synchronizing(
    kind: str, step: int, occupied: bool, request: pytest.FixtureRequest, instants: Instants, monkeypatch: Any
) -> None:
    monkeypatch.setattr(sqlalchemy_table_sink, "_PIECE_ROWS", 3)
    make = _target(kind, request)
    target = make()
    await target.create_table(T)
    before: Rows = {100: "there before"} if occupied else {}

    async def fill() -> None:
        await target.insert(T, [(str(key), value) for key, value in before.items()])

    await fill()
    feed = Feed(target)
    later = feed.transaction(T.relation, T.insert(8, "later"))
    await _synchronize(feed, later, before)
    total = instants.count
    assert total > 40, total
    for number in range(1, total + 1, step):
        target = await _anew(kind, make, target)
        await fill()
        instants.count, instants.stop_at = 0, number
        with contextlib.suppress(Stopped):
            await _synchronize(Feed(target), later, before)
        instants.stop_at = 0
        await _synchronize(Feed(target), later, before)
