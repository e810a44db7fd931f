"""A table whose key or types were altered: rows are found by their values, or the table is copied again."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from subscriber.errors import RelationError
from subscriber.interfaces import TableEntry, TableState
from subscriber.protocol.messages import Column, Delete, Insert, Message, Relation, Truncate, TruncateOption, Update
from subscriber.sinks.spark.merge.row_matching import MissingRows
from subscriber.sinks.spark.schema.type_changes import keeps_texts
from tests.support.examples import some_and_others
from tests.unit.sinks.spark.pipeline.test_applier import all_rounds, applier
from tests.unit.sinks.spark.pipeline.test_rounds import KEYED, copy, land, relation, rows, start
from tests.unit.sinks.spark.stream import TABLE, begun, make, row

pytestmark = pytest.mark.slow


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


Declaration = tuple[int, int]


def number(precision: int, scale: int) -> Declaration:
    return 1700, (precision << 16) + (scale & 0x7FF) + 4


def typed(identity: Literal["d", "f"], declared: Declaration, *, key: bool = True) -> Relation:
    return Relation(5, "public", "t", identity, (Column("id", 23, -1, identity == "f"), Column("value", *declared, key)))


LOST = [
    # as PostgreSQL 16 casts them
    ((700, -1), (701, -1), "0.1", "0.10000000149011612"),
    ((1082, -1), (1114, -1), "2024-01-02", "2024-01-02 00:00:00"),
    (number(10, 2), number(12, 3), "1.50", "1.500"),
    ((23, -1), number(10, 2), "1", "1.00"),
    ((23, -1), number(5, -2), "123", "100"),
    (number(5, -1), number(5, -2), "1210", "1200"),
    ((1700, -1), (23, -1), "1.5", "2"),
    ((25, -1), (1043, 9), "ab   ", "ab  "),
    ((1043, 24), (1043, 14), "ab", "ab"),
    ((16_500, -1), (25, -1), "a", "a"),
    ((20, -1), (701, -1), "1", "1"),
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
    ((1043, 14), (1043, 24), "ab", "ab"),
    ((1043, 14), (25, -1), "ab", "ab"),
    ((25, -1), (1043, -1), "ab", "ab"),
    ((1114, 0), (1114, -1), "2024-01-02 03:04:05", "2024-01-02 03:04:05"),
    ((21, -1), (20, -1), "1", "1"),
    ((23, -1), number(50, 0), "1", "1"),
    (number(10, 0), (23, -1), "1", "1"),
    (number(5, -2), (23, -1), "1200", "1200"),
    ((701, -1), (25, -1), "1e-07", "1e-07"),
    ((1082, -1), (25, -1), "0044-03-15 BC", "0044-03-15 BC"),
    ((2950, -1), (25, -1), "00000000-0000-0000-0000-000000000001", "00000000-0000-0000-0000-000000000001"),
    ((1007, -1), (1016, -1), "{1,2}", "{1,2}"),
    # what the narrower type could not hold
    (number(10, 2), (1700, -1), "NaN", "NaN"),
    (number(10, 2), (25, -1), "NaN", "NaN"),
    ((1231, number(10, 2)[1]), (1231, -1), "{NaN,1.50}", "{NaN,1.50}"),
    ((1114, -1), (25, -1), "infinity", "infinity"),
]


def _changed(identity: Literal["d", "f"], new: str) -> Message:
    return Delete(5, None, row("1", new)) if identity == "f" else Delete(5, row(None, new), None)


@pytest.mark.parametrize(("before", "after", "old", "new"), LOST)
def test_values_that_a_new_type_may_have_changed_are_not_taken_for_unchanged(
    before: Declaration, after: Declaration, old: str, new: str
) -> None:
    assert not keeps_texts(*before, *after), f"{old} may be {new} now"


@pytest.mark.parametrize(("before", "after", "old", "new"), KEPT)
@some_and_others(["identity", "rounds"], [("d", 2), ("f", 1)], [("d", 1), ("f", 2)])
async def test_values_that_a_new_type_keeps_are_found(
    tmp_path: Path, before: Declaration, after: Declaration, old: str, new: str, identity: Literal["d", "f"], rounds: int
) -> None:
    assert keeps_texts(*before, *after)
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


def altered(identity: Literal["d", "f"], *columns: Column) -> Relation:
    return Relation(5, "public", "t", identity, (Column("id", 23, -1, True), *columns))


@pytest.mark.parametrize(
    ("policy", "identity", "again"), [("copy", "d", True), ("copy", "f", True), ("park", "d", False), ("null", "f", True)]
)
async def test_table_whose_values_a_new_type_may_have_changed_is_copied_again(
    tmp_path: Path, policy: str, identity: Literal["d", "f"], again: bool
) -> None:
    """The bug was that existing rows kept what they had, and that the table was stopped at the first change that needed them."""
    sink = await begun(make(tmp_path, f"?on_schema_gap={policy}"), tables=())
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    await copy(sink, TABLE, b"1\tab\n", 150)
    changed = altered(identity, Column("note", 1042, 8, identity == "f"))
    with pytest.raises(RelationError, match="has other columns than its copy") as raised:
        await land(sink, 200, changed, Insert(5, row("2", "ab  ")))
    missing = raised.value.missing_columns
    assert missing is not None
    assert (missing.columns, missing.retyped) == ((), (("note", 1042, 8),))
    assert await sink.take_columns(missing, None) == (TableEntry(TableState.INIT) if again else None)
    told = sink.lake.table(TABLE).gap
    await sink.close()
    if not again:
        assert told is not None
        assert 'the type of column "note" has changed, and the values that earlier rows got are not sent' in told


async def test_table_whose_values_a_new_type_keeps_continues(tmp_path: Path) -> None:
    sink = await begun(make(tmp_path), tables=())
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    await copy(sink, TABLE, b"1\tab\n", 150)
    for end, oid in ((200, 1043), (300, 25)):
        changed = altered("f", Column("note", oid, -1, True))
        with pytest.raises(RelationError) as raised:
            await land(sink, end, changed, Update(5, None, row("1", "ab"), row("1", "ab")))
        assert raised.value.missing_columns is not None
        assert await sink.take_columns(raised.value.missing_columns, None) is None
        await land(sink, end, changed, Update(5, None, row("1", "ab"), row("1", "ab")))
    await land(sink, 400, altered("f", Column("note", 25, -1, True)), Delete(5, None, row("1", "ab")), Insert(5, row("2", "x")))
    await sink.close()
    work = applier(tmp_path)
    all_rounds(work)
    assert rows(tmp_path) == [(2, "x")]
    assert work.missing == MissingRows()
