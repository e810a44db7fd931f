"""The fast path gives the rows that change by change would have given; and the settings of this sink: added and ignored columns."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from subscriber.config import SchemaChange, Settings, SubscriptionOptions
from subscriber.errors import ApplyError, RelationError, TargetUnavailable
from subscriber.interfaces import CopyFormat, Position, TableEntry, TableState
from subscriber.protocol.messages import Message
from subscriber.sinks.sqlalchemy.apply.applier import Applier
from subscriber.sinks.sqlalchemy.apply.bulk import Bulk, BulkTables
from subscriber.sinks.sqlalchemy.sink import SqlAlchemySink
from subscriber.testing.compliance import ComplianceTarget
from subscriber.testing.compliance.feed import START, SYSTEM, Feed
from subscriber.testing.compliance.sample_messages import UNSENT, Table
from tests.sinks.targets import MariaDBTarget, SqliteTarget
from tests.support.examples import seeds, some_and_others
from tests.support.mariadb_database import MariaDatabase

T = Table("t", "*id int4", "v", "w")
U = Table("u", "*a int4", "*b", "v", relation_id=2)
V = Table("v", "*id int4", "v", "w", relation_id=3)


@pytest.fixture(params=["sqlite", "mariadb"])
def target(request: pytest.FixtureRequest) -> ComplianceTarget:
    if request.param == "sqlite":
        directory: Path = request.getfixturevalue("tmp_path")
        return SqliteTarget(directory / "replica.db")
    return MariaDBTarget(request.getfixturevalue("mariadb_db"))


class Publisher:
    """Makes changes that are possible there: keys are unique. Now and then one is of a row that the target lacks."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._keys: dict[Table, set[tuple[object, ...]]] = {T: set(), U: set()}

    def changes(self, count: int) -> list[Message]:
        return [self._change() for _ in range(count)]

    def _key(self, table: Table) -> tuple[object, ...]:
        number = self._random.randrange(40)
        return (number,) if table is T else (number % 7, f"b{number // 7}")

    def _change(self) -> Message:
        choose = self._random
        table = choose.choice((T, T, U))
        keys = self._keys[table]
        rest: list[Any] = [choose.choice((f"v{choose.random()}", None, "ä")) for _ in range(2 if table is T else 1)]
        key = self._key(table)
        if key not in keys and choose.random() < 0.9:
            keys.add(key)
            return table.insert(*key, *rest)
        pads = [None] * len(rest)
        if choose.random() < 0.3:
            keys.discard(key)
            return table.delete(*key, *pads)
        new = self._key(table)
        if new in keys or key not in keys or choose.random() < 0.7:
            sent = [UNSENT if choose.random() < 0.2 else value for value in rest]
            return table.update(*key, *sent)
        keys.remove(key)
        keys.add(new)
        return table.update(*new, *rest, old=(*key, *pads))


@seeds(1, 3)
async def test_fast_path_as_exact_path(target: ComplianceTarget, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Feed(target)
    await feed.open()
    await feed.create(T, U)
    once = Applier._once
    paths: list[bool] = []
    forced: list[bool] = []

    async def noted(self: Applier, *arguments: Any, exact: bool) -> None:
        exact = forced[0] or exact
        paths.append(exact)
        await once(self, *arguments, exact=exact)

    monkeypatch.setattr(Applier, "_once", noted)
    found, counted = [], []
    for exact in (False, True):
        forced[:] = [exact]
        publisher = Publisher(seed)
        before = _counters(feed)
        await feed.give(
            feed.transaction(T.relation, U.relation, *publisher.changes(200)),
            feed.transaction(*publisher.changes(100)),
            feed.transaction(*publisher.changes(1)),
        )
        await feed.give(feed.transaction(*publisher.changes(150)))
        found.append([sorted(await target.rows(table), key=repr) for table in (T, U)])
        counted.append([after - old for after, old in zip(_counters(feed), before, strict=True)])
        await target.clear(T)
        await target.clear(U)
    await feed.close()
    assert found[0] == found[1]
    assert len(found[0][0]) > 10
    assert counted[0] == counted[1]
    assert counted[0][3] > 0, "some rows were missing"
    # MariaDB cannot always tell how many changes of one row found it missing: then the batch is repeated, one change at a time
    assert paths.count(False) == 2
    assert paths[-2:] == [True, True]
    assert len(paths) == 4 or isinstance(target, MariaDBTarget)


async def test_long_runs_of_changes(target: ComplianceTarget) -> None:
    """More than a statement of many rows, or a list of keys, holds; some of a row that is missing, or changed before."""
    feed = Feed(target)
    await feed.open()
    await feed.create(T, U)
    keys = [number * 7919 % 2003 for number in range(1, 2003)]
    await feed.apply(T.relation, U.relation, *(T.insert(key, f"v{key}", None) for key in keys), *(U.insert(key, "b", "c") for key in keys))
    changes = [T.update(key, None, f"w{key}") for key in [*keys, 5000, *range(-20, 0)]]
    await feed.give(feed.transaction(*changes), feed.transaction(*(T.delete(key, None, None) for key in (*range(1, 1001), 5000))))
    await feed.expect(T, *((key, None, f"w{key}") for key in range(1001, 2003)))
    found = feed.sink.statistics
    assert (found.inserts, found.updates, found.deletes) == (4004, 2002, 1000)
    assert (found.confl_update_missing, found.confl_delete_missing) == (21, 1)
    await feed.apply(*(T.update(key, value, UNSENT) for key in range(1001, 2003) for value in ("first", "last")))
    await feed.expect(T, *((key, "last", f"w{key}") for key in range(1001, 2003)))
    await feed.expect(U, *((key, "b", "c") for key in range(1, 2003)))
    await feed.close()


@pytest.mark.parametrize("key", [("*id int4", "b"), ("*id int4", "*b")])
async def test_null_where_the_target_has_a_key(target: ComplianceTarget, key: tuple[str, str]) -> None:
    """With REPLICA IDENTITY FULL the publisher may have rows that the target cannot: their changes find nothing, the others do."""
    table = Table("f", *key, "v", full=True)
    feed = Feed(target)
    await feed.open()
    await feed.create(table)
    keys = [number * 7 % 41 for number in range(1, 41)]
    await feed.apply(table.relation, *(table.insert(key, f"b{key}", "old") for key in keys))
    await feed.apply(
        *(table.update(key, f"b{key}", "new", old=(key, f"b{key}", "old")) for key in keys[:20]),
        table.update(None, "b1", "new", old=(None, "b1", "old")),
        *(table.update(key, f"b{key}", "new", old=(key, f"b{key}", "old")) for key in keys[20:]),
    )
    await feed.expect(table, *((key, f"b{key}", "new") for key in range(1, 41)))
    await feed.apply(
        *(table.delete(key, f"b{key}", "new") for key in keys[:20]),
        table.delete(None, "b1", "new"),
        *(table.delete(key, f"b{key}", "new") for key in keys[20:30]),
    )
    await feed.expect(table, *((key, f"b{key}", "new") for key in sorted(keys[30:])))
    found = feed.sink.statistics
    assert (found.confl_update_missing, found.confl_delete_missing) == (1, 1)
    await feed.close()


def _counters(feed: Feed) -> list[int]:
    found = feed.sink.statistics
    return [
        found.inserts,
        found.updates,
        found.deletes,
        found.confl_update_missing,
        found.confl_delete_missing,
        found.confl_insert_exists,
        found.transactions,
        sum(found.table_bytes.values()),
    ]


# --- settings


def _sink(target: ComplianceTarget, settings: Settings) -> SqlAlchemySink:
    sink = target.new_sink()
    assert isinstance(sink, SqlAlchemySink)
    return SqlAlchemySink(sink._target, options=SubscriptionOptions(), settings=settings)


async def _feed(target: ComplianceTarget, settings: Settings) -> Feed:
    feed = Feed(target)
    feed.sink = _sink(target, settings)
    await feed.open()
    return feed


WIDER = Table("t", "*id int4", "v", "w", "added int4", "also")


@pytest.mark.parametrize("change", ["add", "ignore", "error"])
async def test_a_column_that_is_new_at_the_publisher(target: ComplianceTarget, change: SchemaChange) -> None:
    asked: list[tuple[str, str, tuple[str, ...]]] = []

    def callback(schema: str, table: str, columns: tuple[str, ...]) -> SchemaChange:
        asked.append((schema, table, columns))
        return change

    feed = await _feed(target, Settings(schema_change=callback))
    await feed.create(T)
    done = await feed.apply(T.relation, T.insert(1, "a", "b"))
    batch = (
        feed.transaction(T.insert(2, "a", "b")),
        feed.transaction(WIDER.relation, WIDER.insert(3, "a", "b", 7, "c"), WIDER.update(1, "a", "B", 8, None)),
    )
    if change == "error":
        with pytest.raises(RelationError, match='is missing replicated columns: "added", "also"'):
            await feed.give(*batch)
        await feed.expect(T, (1, "a", "b"), (2, "a", "b"))
        assert done.end_lsn < await feed.position() == batch[0].end_lsn
    else:
        await feed.give(*batch)
        if change == "add":
            await feed.expect(WIDER, (1, "a", "B", 8, None), (2, "a", "b", None, None), (3, "a", "b", 7, "c"))
        else:
            await feed.expect(T, (1, "a", "B"), (2, "a", "b"), (3, "a", "b"))
    assert set(asked) == {("public", "t", ("added", "also"))}
    await feed.close()


async def _copied(feed: Feed, table: Table, *lines: bytes) -> None:
    """The table's synchronization, as far as the copy."""

    async def data() -> AsyncIterator[bytes]:
        for line in lines:
            yield line

    sink = feed.opened.open_table(table.name)
    try:
        assert await sink.begin() == TableEntry(TableState.INIT)
        await sink.start_copy()
        await sink.describe(table.published)
        await sink.copy([column.name for column in table.columns], CopyFormat.TEXT, data())
        await sink.finish_copy(Position("slot", SYSTEM, 1, START))
    finally:
        await sink.close()


@some_and_others(
    ["change", "occupied"], [("add", False), ("ignore", True), ("error", False)], [("add", True), ("ignore", False), ("error", True)]
)
async def test_a_column_that_is_new_at_the_publisher_is_copied(target: ComplianceTarget, change: SchemaChange, *, occupied: bool) -> None:
    """The bug was that a table without the column could never be copied: the setting was asked for changes only."""
    feed = await _feed(target, Settings(schema_change=lambda *_: change))
    await feed.begin(TableState.INIT, T)
    await feed.describe(WIDER)
    if occupied:
        await target.insert(T, [("1", "mine", "mine")])
    lines = b"2\ta\tb\t7\tc\n", b"3\ta\tb\t\\N\t\\N\n"
    before = [(1, "mine", "mine")] if occupied else []
    if change == "error":
        with pytest.raises(RelationError, match='is missing replicated columns: "added", "also"'):
            await _copied(feed, WIDER, *lines)
        await feed.expect(T, *before)
    else:
        await _copied(feed, WIDER, *lines)
        if change == "add":
            await feed.expect(WIDER, *((*row, None, None) for row in before), (2, "a", "b", 7, "c"), (3, "a", "b", None, None))
        else:
            await feed.expect(T, *before, (2, "a", "b"), (3, "a", "b"))
    await feed.close()


async def test_triggers_of_the_target_see_changes_in_order(tmp_path: Path) -> None:
    target = SqliteTarget(tmp_path / "replica.db")
    feed = Feed(target)
    await feed.open()
    await feed.create(T, U)
    with sqlite3.connect(tmp_path / "replica.db") as connection:
        connection.executescript(
            "CREATE TABLE log (n INTEGER PRIMARY KEY, what TEXT);"
            "CREATE TRIGGER i AFTER INSERT ON t BEGIN INSERT INTO log (what) SELECT 'i' || new.id || ' ' || count(*) FROM u; END;"
            "CREATE TRIGGER d AFTER DELETE ON t BEGIN INSERT INTO log (what) SELECT 'd' || old.id || ' ' || count(*) FROM u; END;"
        )
    connection.close()
    changes: list[Message] = [
        T.insert(1, "a", "b"),
        U.insert(1, "x", "y"),
        T.insert(2, "a", "b"),
        T.delete(1, None, None),
        T.insert(3, "a", "b"),
    ]
    await feed.apply(T.relation, U.relation, *changes)
    await feed.close()
    connection = sqlite3.connect(tmp_path / "replica.db")
    assert [what for (what,) in connection.execute("SELECT what FROM log ORDER BY n")] == ["i1 0", "i2 1", "d1 1", "i3 1"]
    connection.close()


async def test_without_temporary_tables(mariadb_db: MariaDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user that may not make them: updates go one by one."""
    mariadb_db.execute("CREATE USER IF NOT EXISTS plain@'%' IDENTIFIED BY 'secret'")
    mariadb_db.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE, CREATE, DROP, INDEX, ALTER ON `{mariadb_db.name}`.* TO plain@'%'")
    target = MariaDBTarget(mariadb_db)
    server = mariadb_db.server
    feed = Feed(target)
    url = f"mariadb://plain:secret@{server.host}:{server.port}/{mariadb_db.name}"
    feed.sink = SqlAlchemySink(url, options=SubscriptionOptions(), settings=Settings())
    await feed.open()
    await feed.create(T)
    await feed.apply(T.relation, *(T.insert(key, "a", "b") for key in range(50)))
    await feed.apply(*(T.update(key, "c", UNSENT) for key in range(51)))
    await feed.apply(*(T.delete(key, None, None) for key in range(1, 51)))
    await feed.expect(T, (0, "c", "b"))
    assert feed.sink.statistics.confl_update_missing == 1
    assert feed.sink.statistics.confl_delete_missing == 1
    await feed.close()


async def test_a_deadlock_while_a_temporary_table_is_made(mariadb_db: MariaDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server rolls the transaction back, and with it what was done before: nothing of it may be taken for done."""
    target = MariaDBTarget(mariadb_db)
    feed = Feed(target)
    await feed.open()
    await feed.create(T, V)
    keys = range(20)
    first = await feed.apply(V.relation, T.relation, *(table.insert(key, "old", "old") for key in keys for table in (V, T)))
    make = BulkTables._table
    other = mariadb_db.connect()
    with other.cursor() as cursor:
        cursor.execute("SELECT connection_id()")
        ((session,),) = cursor.fetchall()
    waiting: list[asyncio.Future[int]] = []

    def lock_both() -> int:
        with other.cursor() as cursor:
            return cursor.execute("LOCK TABLES t WRITE, v WRITE")

    async def made(self: BulkTables, connection: AsyncConnection, how: Bulk) -> str | None:
        if "`t`" in how.make or " t AS t" in how.make:
            # v is changed; the other session has t, and waits for v
            waiting.append(asyncio.get_running_loop().run_in_executor(None, lock_both))
            state = f"SELECT count(*) FROM information_schema.processlist WHERE id = {session} AND state LIKE 'Waiting for table %'"
            await asyncio.to_thread(mariadb_db.wait, state, 1)
        return await make(self, connection, how)

    monkeypatch.setattr(BulkTables, "_table", made)
    changes = [table.update(key, "new", UNSENT) for table in (V, T) for key in keys]
    try:
        with pytest.raises(TargetUnavailable, match="deadlock detected"):
            await feed.apply(*changes)
        assert len(waiting) == 1
        await waiting[0]
    finally:
        other.close()
    monkeypatch.undo()
    assert await feed.position() == first.end_lsn
    await feed.expect(V, *((key, "old", "old") for key in keys))
    await feed.apply(V.relation, T.relation, *changes)
    await feed.expect(V, *((key, "new", "old") for key in keys))
    await feed.expect(T, *((key, "new", "old") for key in keys))
    await feed.close()


async def test_values_that_the_driver_cannot_pass(tmp_path: Path) -> None:
    target = SqliteTarget(tmp_path / "replica.db")
    feed = Feed(target)
    await feed.open()
    await feed.create(T)
    done = await feed.apply(T.relation, T.insert(1, "a", "b"))
    with pytest.raises(ApplyError) as caught:
        await feed.apply(T.insert(2, b"\xff\xfe secret", "b"))
    assert "secret" not in caught.value.one_line()
    assert 'relation "public.t" column "v"' in caught.value.one_line()
    assert await feed.position() == done.end_lsn
    assert await feed.opened.tables() == {T.name: TableEntry(TableState.READY)}
    await feed.close()
