"""Settings of the user: create tables, follow new columns of the publisher."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Literal

from subscriber.config import Settings
from subscriber.errors import ApplyError, RelationError
from subscriber.interfaces import CopyFormat, Position, TableEntry, TableSink, TableState
from subscriber.protocol.lsn import Lsn
from subscriber.testing.compliance.assertions import demand, equal, refused
from subscriber.testing.compliance.feed import START, SYSTEM, Feed
from subscriber.testing.compliance.sample_messages import UNSENT, Table
from subscriber.testing.compliance.scenarios import Scenarios

__all__ = ["scenarios"]

scenarios = Scenarios("settings")

_AT = Position("a_sync_slot", SYSTEM, 1, Lsn(START + 0x10))
_NARROW = Table("t", "*id int4", "v")
_WIDE = Table("t", "*id int4", "v", "more", "n int4")


async def _lines(*rows: Sequence[object]) -> AsyncIterator[bytes]:
    """Rows in COPY's text format."""
    for row in rows:
        yield "\t".join("\\N" if value is None else str(value) for value in row).encode() + b"\n"


async def _copying(feed: Feed, table: Table) -> TableSink:
    """Begin the synchronization of an existing table, up to the copy."""
    await feed.describe(table)
    await feed.opened.add_tables([table.name], TableEntry(TableState.INIT))
    sink = feed.opened.open_table(table.name)
    await sink.begin()
    await sink.start_copy()
    await sink.describe(table.published)
    return sink


async def _copied(feed: Feed, table: Table, *rows: Sequence[object]) -> None:
    sink = await _copying(feed, table)
    await sink.copy([column.name for column in table.sent], CopyFormat.TEXT, _lines(*rows))
    await sink.finish_copy(_AT)
    await sink.close()


# --- create_tables


@scenarios.needing("settings")
async def tables_are_created(feed: Feed) -> None:
    """A missing table is created as published: columns, key, NOT NULL. An existing one is not changed."""
    t, there = Table("t", "*id int4", "!v", "n int4", relation_id=1), Table("there", "*id int4", "v", "+mine int4=7", relation_id=2)
    await feed.target.create_table(there)
    await feed.reopen_with(Settings(create_tables=True))
    await feed.describe(t, there)
    for table in (t, there):
        await feed.opened.add_tables([table.name], TableEntry(TableState.READY))
    done = await feed.apply(t.relation, there.relation, t.insert(1, "a", None), t.insert(2, "b", 5), there.insert(1, "x"))
    for change, sqlstate in ((t.insert(1, "b", 1), "23505"), (t.insert(3, None, 1), "23502")):
        with refused(ApplyError, "a row that a created table rejects", sqlstate=sqlstate):
            await feed.apply(change)
    equal(await feed.position(), done.end_lsn, "the stored position")
    await feed.apply(t.relation, t.update(1, "c", 9), t.delete(2, None, None))
    await feed.expect(t, (1, "c", 9))
    await feed.expect(there, (1, "x", 7))
    await feed.describe(t, there)
    await feed.expect(t, (1, "c", 9))


@scenarios.needing("settings")
async def tables_without_a_key_are_created(feed: Feed) -> None:
    """REPLICA IDENTITY FULL without a key: the table may contain duplicates."""
    f = Table("f", "a int4", "b", full=True)
    await feed.reopen_with(Settings(create_tables=True))
    await feed.describe(f)
    await feed.opened.add_tables([f.name], TableEntry(TableState.READY))
    await feed.apply(f.relation, f.insert(1, "x"), f.insert(1, "x"), f.insert(None, None))
    await feed.apply(f.update(2, "y", old=(1, "x")), f.delete(None, None))
    await feed.expect(f, (1, "x"), (2, "y"))


@scenarios.needing("settings")
async def tables_are_not_created(feed: Feed) -> None:
    """Without the setting, a missing table is an error and nothing is created."""
    await feed.reopen_with(Settings(create_tables=False))
    await feed.describe(_NARROW)
    equal(list(await feed.opened.add_tables([_NARROW.name], TableEntry(TableState.INIT))), [_NARROW.name], "the tables that were not added")
    equal(await feed.opened.tables(), {}, "the subscription's tables")


# --- schema_change


@scenarios.needing("settings")
async def new_columns_are_an_error(feed: Feed) -> None:
    """The default. Once the columns exist, the sink resumes."""
    await feed.reopen_with(Settings(create_tables=False))
    await feed.create(_NARROW)
    done = await feed.apply(_NARROW.relation, _NARROW.insert(1, "a"))
    made = feed.transaction(_WIDE.relation, _WIDE.insert(2, "b", "c", 3))
    with refused(RelationError, "a row with columns that the target lacks") as caught:
        await feed.give(made)
    text = caught.error.one_line()
    demand("public.t" in text and '"more"' in text and '"n"' in text, f"the error names neither relation nor columns: {text}")
    equal(await feed.position(), done.end_lsn, "the stored position")
    await feed.reopen_with(Settings(create_tables=False, schema_change="add"))
    await feed.give(made)
    await feed.expect(_WIDE, (1, "a", None, None), (2, "b", "c", 3))


@scenarios.needing("settings")
async def new_columns_are_added(feed: Feed) -> None:
    """In the middle of a transaction, after changes of the old table. Existing rows have NULL."""
    await feed.reopen_with(Settings(create_tables=False, schema_change="add"))
    await feed.create(_NARROW)
    await feed.apply(
        _NARROW.relation,
        _NARROW.insert(1, "a"),
        _NARROW.insert(2, "b"),
        _WIDE.relation,
        _WIDE.insert(3, "c", "d", 4),
        _WIDE.update(1, "e", "f", 5),
    )
    await feed.apply(_WIDE.update(2, UNSENT, "g", None), _WIDE.delete(3, None, None, None))
    await feed.expect(_WIDE, (1, "e", "f", 5), (2, "b", "g", None))
    equal(feed.sink.statistics.transactions, 2, "transactions counted")


@scenarios.needing("settings")
async def new_columns_are_added_for_a_copy(feed: Feed) -> None:
    """New columns are added before the initial copy."""
    await feed.reopen_with(Settings(create_tables=False, schema_change="add"))
    await feed.target.create_table(_NARROW)
    await _copied(feed, _WIDE, (1, "a", "b", 2), (2, None, None, None))
    await feed.expect(_WIDE, (1, "a", "b", 2), (2, None, None, None))


@scenarios.needing("settings")
async def new_columns_are_ignored(feed: Feed) -> None:
    """The new columns of rows are ignored, and the table is not changed."""
    await feed.reopen_with(Settings(create_tables=False, schema_change="ignore"))
    await feed.target.create_table(_NARROW)
    await _copied(feed, _WIDE, (1, "a", "b", 2), (2, None, None, None))
    await feed.take_over(_WIDE)
    await feed.apply(_WIDE.relation, _WIDE.insert(3, "c", "d", 4), _WIDE.update(1, "e", "f", 5), _WIDE.delete(2, None, None, None))
    await feed.expect(_NARROW, (1, "e"), (3, "c"))


@scenarios.needing("settings")
async def callback_decides_about_new_columns(feed: Feed) -> None:
    """A callback decides for each table."""
    asked: list[tuple[str, str, tuple[str, ...]]] = []

    def decide(schema: str, table: str, columns: tuple[str, ...]) -> Literal["error", "add", "ignore"]:
        asked.append((schema, table, columns))
        return "add" if table == "t" else "ignore" if table == "u" else "error"

    narrow = [Table(name, "*id int4", "v", relation_id=number) for number, name in enumerate("tuv", 1)]
    wide = [Table(name, "*id int4", "v", "more", "n int4", relation_id=number) for number, name in enumerate("tuv", 1)]
    await feed.reopen_with(Settings(create_tables=False, schema_change=decide))
    await feed.create(*narrow)
    done = await feed.apply(*(table.relation for table in wide), wide[0].insert(1, "a", "b", 2), wide[1].insert(1, "a", "b", 2))
    with refused(RelationError, "a column that the function rejects") as caught:
        await feed.apply(wide[2].insert(1, "a", "b", 2))
    demand("public.v" in caught.error.one_line(), f"the error does not name the relation: {caught.error.one_line()}")
    equal(set(asked), {("public", name, ("more", "n")) for name in "tuv"}, "what the function was asked")
    equal(await feed.position(), done.end_lsn, "the stored position")
    await feed.expect(wide[0], (1, "a", "b", 2))
    await feed.expect(narrow[1], (1, "a"))
    await feed.expect(narrow[2])
