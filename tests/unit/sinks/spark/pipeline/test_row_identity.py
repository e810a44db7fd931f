"""A replica identity that was altered: rows are found by it, or the applier stops and says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest
from deltalake import DeltaTable

from subscriber.interfaces import TableEntry, TableName, TableState
from subscriber.protocol.messages import Column, Delete, Insert, Message, Relation, Truncate, TruncateOption, Update
from subscriber.sinks.spark.catalog.snapshots import read_snapshot
from subscriber.sinks.spark.merge.row_matching import MissingRows
from subscriber.sinks.spark.pipeline.applier import Applier, ApplierSettings
from subscriber.sinks.spark.pipeline.engines.local_engine import LocalEngine
from subscriber.sinks.spark.schema.arrow_types import arrow_type, parse_type, widened
from subscriber.sinks.spark.schema.table_schema import LakeColumn, TableSchema
from subscriber.sinks.spark.schema.type_changes import keeps_values
from subscriber.sinks.spark.tables.delta import LakeDelta
from tests.support.examples import some_and_others
from tests.unit.sinks.spark.pipeline.test_applier import all_rounds, applier, stop_of, storage
from tests.unit.sinks.spark.pipeline.test_rounds import KEYED, copy, land, relation, rows, start
from tests.unit.sinks.spark.stream import TABLE, begun, make, row

pytestmark = pytest.mark.slow

UNKEYED = relation("n", ("note", 25, False))
NUMBERED = relation("d", ("note", 25, False), ("id", 20, True))
RENAMED = relation("d", ("pk", 23, True), ("note", 25, False))
CAME_LATER = r'column "{}" of table "public.t", which identifies the rows, was added later'


@pytest.mark.parametrize("change", [Update(5, None, None, row("a2", "1")), Delete(5, row(None, "2"), None)])
@pytest.mark.parametrize("rounds", [1, 2])
async def test_a_new_key_that_rows_from_before_lack_is_told(tmp_path: Path, change: Message, rounds: int) -> None:
    sink, work = await start(tmp_path, UNKEYED, Insert(5, row("a")), Insert(5, row("b")))
    if rounds == 2:
        # inserted rows are not affected
        await land(sink, 300, NUMBERED, Insert(5, row("c", "3")))
        all_rounds(work)
        work = applier(tmp_path)
    snapshot = read_snapshot(storage(tmp_path))
    await land(sink, 400, NUMBERED, change)
    await sink.close()
    assert "copy it again" in stop_of(work, CAME_LATER.format("id"))
    now = read_snapshot(storage(tmp_path))
    assert snapshot is not None
    assert now is not None
    assert now.stopped[TABLE].last == snapshot.tables[TABLE]


async def test_a_renamed_key_is_told(tmp_path: Path) -> None:
    sink, work = await start(tmp_path, KEYED, Insert(5, row("1", "a")))
    await land(sink, 300, RENAMED, Update(5, None, None, row("1", "b")))
    await sink.close()
    stop_of(work, CAME_LATER.format("pk"))


async def test_key_added_during_a_round_is_reported(tmp_path: Path) -> None:
    sink, work = await start(tmp_path, UNKEYED, Truncate(TruncateOption(0), (5,)))
    await land(sink, 300, UNKEYED, Insert(5, row("a")), NUMBERED, Delete(5, row(None, "1"), None))
    await sink.close()
    stop_of(work, CAME_LATER.format("id"))


@pytest.mark.parametrize("emptied", ["before", "with it", "after"])
async def test_a_new_key_of_a_table_whose_rows_went_is_a_key(tmp_path: Path, emptied: str) -> None:
    sink, work = await start(tmp_path, UNKEYED, Insert(5, row("a")))
    truncate = Truncate(TruncateOption(0), (5,))
    if emptied == "after":
        await land(sink, 300, NUMBERED, Insert(5, row("b", "1")), Delete(5, row(None, "1"), None), truncate)
    else:
        await land(sink, 300, UNKEYED, truncate)
        if emptied == "before":
            all_rounds(work)
    for end in (400, 500):
        first = str(end)
        await land(sink, end, NUMBERED, Insert(5, row("x", first)), Update(5, None, None, row("y", first)), Insert(5, row("z", "1")))
        all_rounds(work)
        work = applier(tmp_path)
    await sink.close()
    assert rows(tmp_path, ("id", "note")) == [(1, "z"), (400, "y"), (500, "y")]
    assert work.missing == MissingRows()


async def test_a_new_key_that_all_rows_have_by_now_is_a_key(tmp_path: Path) -> None:
    """The lake receives the values: nullable at first, and filled before it becomes the key."""
    sink, work = await start(tmp_path, KEYED, Insert(5, row("1", "a")), Insert(5, row("2", "b")))
    filled = relation("d", ("id", 23, True), ("note", 25, False), ("at", 1114, False))
    noon = "2024-01-02 12:00:00"
    await land(sink, 300, filled, Update(5, None, None, row("1", "a", "infinity")), Update(5, None, None, row("2", "b", noon)))
    all_rounds(work)
    indexed = relation("i", ("id", 23, False), ("note", 25, False), ("at", 1114, True))
    await land(sink, 400, indexed, Update(5, None, None, row("1", "c", "infinity")), Delete(5, row(None, None, noon), None))
    await sink.close()
    all_rounds(applier(tmp_path))
    assert rows(tmp_path) == [(1, "c")]


# --- types

Declaration = tuple[int, int]
RETYPED = r'column "value" of table "public.t", which identifies the rows, changed its type'


def number(precision: int, scale: int) -> Declaration:
    return 1700, (precision << 16) + scale + 4


def typed(identity: Literal["d", "f"], declared: Declaration, *, key: bool = True) -> Relation:
    return Relation(5, "public", "t", identity, (Column("id", 23, -1, identity == "f"), Column("value", *declared, key)))


LOST = [
    # as PostgreSQL 16 casts them
    ((1700, -1), number(10, 2), "1.5", "1.50"),
    ((1042, 8), (25, -1), "ab  ", "ab"),
    ((25, -1), (1042, 8), "ab", "ab  "),
    ((1184, -1), (25, -1), "2024-01-02 03:04:05+00", "2024-01-02 04:04:05+01"),
    ((1114, -1), (1114, 0), "2024-01-02 03:04:05.6", "2024-01-02 03:04:06"),
    (number(10, 2), number(10, 1), "1.25", "1.3"),
    ((701, -1), (700, -1), "0.1", "0.1"),
    ((1114, -1), (1184, -1), "2024-01-02 03:04:05", "2024-01-02 02:04:05+00"),
    ((114, -1), (3802, -1), '{"a":1}', '{"a": 1}'),
]
KEPT = [
    (number(10, 2), (1700, -1), "1.50", "1.50"),
    (number(10, 2), number(12, 3), "1.50", "1.500"),
    ((1043, 14), (1043, 24), "ab", "ab"),
    ((1043, 14), (25, -1), "ab", "ab"),
    ((25, -1), (1043, -1), "ab", "ab"),
    ((1114, 0), (1114, -1), "2024-01-02 03:04:05", "2024-01-02 03:04:05"),
    ((21, -1), (20, -1), "1", "1"),
    ((700, -1), (701, -1), "0.1", "0.10000000149011612"),
    ((2950, -1), (25, -1), "00000000-0000-0000-0000-000000000001", "00000000-0000-0000-0000-000000000001"),
    ((1007, -1), (1016, -1), "{1,2}", "{1,2}"),
    # what the narrower type could not hold
    (number(10, 2), (1700, -1), "NaN", "NaN"),
    (number(10, 2), (25, -1), "NaN", "NaN"),
    (number(10, 2), number(12, 3), "NaN", "NaN"),
    ((1231, number(10, 2)[1]), (1231, -1), "{NaN,1.50}", "{NaN,1.50}"),
    ((1114, -1), (25, -1), "infinity", "infinity"),
    ((1082, -1), (1114, -1), "infinity", "infinity"),
    ((1082, -1), (1114, -1), "0044-03-15 BC", "0044-03-15 00:00:00 BC"),
]


def _changed(identity: Literal["d", "f"], new: str) -> Message:
    return Delete(5, None, row("1", new)) if identity == "f" else Delete(5, row(None, new), None)


@pytest.mark.parametrize(("before", "after", "old", "new"), LOST)
@some_and_others(
    ["identity", "when"],
    [("d", "one round"), ("f", "another round"), ("f", "after others")],
    [("f", "one round"), ("d", "another round"), ("d", "after others")],
)
async def test_values_that_a_new_type_may_have_changed_are_told(
    tmp_path: Path, before: Declaration, after: Declaration, old: str, new: str, identity: Literal["d", "f"], when: str
) -> None:
    sink, work = await start(tmp_path, typed("d", (23, -1)), Truncate(TruncateOption(0), (5,)))
    await land(sink, 300, typed(identity, before), Insert(5, row("1", old)))
    if when != "one round":
        all_rounds(work)
    if when == "after others":
        await land(sink, 400, typed(identity, after), Insert(5, row("2", None if identity == "f" else new)))
        all_rounds(applier(tmp_path))
    await land(sink, 500, typed(identity, after), _changed(identity, new))
    await sink.close()
    assert "copy it again" in stop_of(applier(tmp_path), RETYPED)


@pytest.mark.parametrize(("before", "after", "old", "new"), KEPT)
@some_and_others(["identity", "rounds"], [("d", 2), ("f", 1)], [("d", 1), ("f", 2)])
async def test_values_that_a_new_type_keeps_are_found(
    tmp_path: Path, before: Declaration, after: Declaration, old: str, new: str, identity: Literal["d", "f"], rounds: int
) -> None:
    sink, work = await start(
        tmp_path, typed(identity, before), Insert(5, row("1", old)) if rounds == 2 else Truncate(TruncateOption(0), (5,))
    )
    if rounds == 1:
        await land(sink, 250, Insert(5, row("1", old)))
    await land(sink, 300, typed(identity, after), _changed(identity, new))
    await sink.close()
    all_rounds(work)
    assert rows(tmp_path, ("id",)) == []
    assert work.missing == MissingRows()


PLAIN = Relation(5, "public", "t", "d", (Column("id", 23, -1, True), Column("value", 1114, -1, False)))
ZONED = Relation(5, "public", "t", "d", (Column("id", 23, -1, True), Column("value", 1184, -1, False)))
WHOLE = Relation(5, "public", "t", "f", (Column("id", 23, -1, True), Column("value", 1184, -1, True)))


@pytest.mark.parametrize("truncated", [None, "before", "with it"])
@pytest.mark.parametrize("rounds", [1, 2])
async def test_a_column_in_doubt_that_is_part_of_the_identity_later_is_told(tmp_path: Path, truncated: str | None, rounds: int) -> None:
    sink, work = await start(tmp_path, PLAIN, Insert(5, row("1", "2024-01-02 03:04:05")))
    later = "2024-01-02 03:04:05+00"
    # a column that is not a key is not affected
    await land(sink, 300, ZONED, Insert(5, row("2", later)), Update(5, None, None, row("2", later)), Delete(5, row("2", None), None))
    if rounds == 2:
        all_rounds(work)
        work = applier(tmp_path)
    if truncated is not None:
        await land(sink, 400, Truncate(TruncateOption(0), (5,)), Insert(5, row("1", "2024-01-02 02:04:05+00")))
        if truncated == "before":
            all_rounds(work)
            work = applier(tmp_path)
    await land(sink, 500, WHOLE, Delete(5, None, row("1", "2024-01-02 02:04:05+00")))
    await sink.close()
    if truncated is None:
        stop_of(work, RETYPED)
    else:
        all_rounds(work)
        assert rows(tmp_path, ("id",)) == []
        assert work.missing == MissingRows()


async def test_a_killed_round_that_comes_again_is_judged_by_what_was_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Back and forth between two types, which only one way leaves the values: a document that is ahead of its table is not believed."""
    sink, work = await start(tmp_path, typed("d", number(10, 2)), Insert(5, row("1", "1.50")))
    for end, digits in ((300, 3), (400, 3), (500, 3)):
        value = f"{end}." + "1" * digits
        await land(sink, end, typed("d", number(12, digits)), Insert(5, row(str(end), value)), Delete(5, row(None, value), None))

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(LakeDelta, "commit", killed)
        with pytest.raises(KeyboardInterrupt):
            work.run_round()
    document = tmp_path / "tables/public/t/_declared.json"
    assert len(json.loads(document.read_bytes())["document"]["declared"]) == 2
    await sink.close()
    all_rounds(Applier(storage(tmp_path), LocalEngine(storage(tmp_path)), ApplierSettings(round_bytes=1)))
    assert rows(tmp_path, ("id",)) == [(1,)]
    work = applier(tmp_path)
    work.run_round()
    assert work.missing == MissingRows()


async def test_a_copied_table_that_is_altered_before_its_first_change_is_told(tmp_path: Path) -> None:
    sink = await begun(make(tmp_path), tables=())
    table = TableName("public", "t")
    await sink.add_tables([table], TableEntry(TableState.INIT))
    await copy(sink, table, b"1\tab\n", 150)
    work = applier(tmp_path)
    altered = Relation(5, "public", "t", "f", (Column("id", 23, -1, True), Column("note", 1042, 8, True)))
    await land(sink, 200, altered, Delete(5, None, row("1", "ab  ")))
    await sink.close()
    stop_of(work, r'column "note" of table "public.t", which identifies the rows, changed its type')


async def test_manifests_without_declarations_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to_json = TableSchema.to_json

    def as_before(schema: TableSchema) -> dict[str, object]:
        document = to_json(schema)
        return {**document, "columns": [column[:4] for column in document["columns"]]}

    with monkeypatch.context() as patched:
        patched.setattr(TableSchema, "to_json", as_before)
        sink, _ = await start(tmp_path, typed("d", (25, -1)), Insert(5, row("1", "ab")), Insert(5, row("2", "cd")))
        (tmp_path / "tables/public/t/_declared.json").unlink()
        await land(sink, 300, typed("d", (25, -1)), Delete(5, row(None, "ab"), None))
    await land(sink, 400, typed("d", (25, -1)), Delete(5, row(None, "cd"), None), Insert(5, row("3", "ef")))
    all_rounds(applier(tmp_path))
    assert rows(tmp_path, ("id",)) == [(3,)]
    # and from now on they are known
    await land(sink, 500, typed("d", (1042, 8)), Delete(5, row(None, "ef  "), None))
    await sink.close()
    stop_of(applier(tmp_path), RETYPED)


async def test_what_lies_beside_a_tables_files_is_not_swept(tmp_path: Path) -> None:
    sink, work = await start(tmp_path, KEYED, Insert(5, row("1", "a")))
    await sink.close()
    assert work._tables.of(TableName("public", "t"), next(iter(sink.lake.state.tables.values()))).unneeded(0) == []
    assert (tmp_path / "tables/public/t/_declared.json").exists()
    DeltaTable(str(tmp_path / "tables/public/t")).vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False, full=True)
    assert (tmp_path / "tables/public/t/_declared.json").exists()


def test_the_same_declaration_keeps_values_and_an_unknown_one_is_taken_for_it() -> None:
    def column(declared: tuple[int, int] | None, type_: str) -> LakeColumn:
        return LakeColumn("a", "a", parse_type(type_), key=True, declared=declared)

    for oid in (1042, 1184, 16_500, 1231, 1186):
        one = LakeColumn("a", "a", arrow_type(oid, -1), key=True, declared=(oid, -1))
        assert keeps_values(one, one, one.type)
    assert keeps_values(column(None, "string"), column((1042, 8), "string"), parse_type("string"))
    assert not keeps_values(column(None, "timestamp"), column((1184, -1), "timestamptz"), parse_type("string"))


def test_digits_of_text_differ_from_digits_of_numbers() -> None:
    def kept(before: Declaration, after: Declaration, lake: str | None = None) -> bool:
        columns = [LakeColumn("a", "a", arrow_type(*declared), key=True, declared=declared) for declared in (before, after)]
        type_ = widened(columns[0].type, columns[1].type) if lake is None else parse_type(lake)
        return keeps_values(columns[0], columns[1], type_)

    assert kept((23, -1), number(12, 2))
    assert not kept((23, -1), number(50, 2))
    assert kept((23, -1), number(50, 0))
    assert not kept(number(10, 2), number(12, 3), "string")
    assert kept(number(10, 0), (23, -1))
    assert not kept(number(10, 2), (23, -1))
    assert not kept((700, -1), (701, -1), "string")
    assert not kept((20, -1), (701, -1))
    assert not kept((25, -1), (1043, 9))
    assert not kept((1043, 24), (1043, 14))
    assert not kept((16_500, -1), (25, -1))
