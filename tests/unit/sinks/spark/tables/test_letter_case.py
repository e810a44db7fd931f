"""Columns that Delta's readers tell apart by letter case only, as they are added and dropped: each is one field, which never changes."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from subscriber.interfaces import TableEntry, TableState
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Delete, Insert, Relation, Update
from subscriber.sinks.spark.pipeline.applier import Applier, ApplierSettings
from subscriber.sinks.spark.pipeline.engines.local_engine import LocalEngine
from subscriber.sinks.spark.reading.change_feed import Changes
from subscriber.sinks.spark.schema.table_schema import TableSchema, altered_name
from subscriber.sinks.spark.tables.column_mapping import resolve_fields
from tests.support.examples import some_and_others
from tests.unit.sinks.spark.pipeline.test_applier import all_rounds, applier, storage
from tests.unit.sinks.spark.pipeline.test_rounds import KEYED, copy, land, relation, start
from tests.unit.sinks.spark.stream import TABLE, begun, make, row

pytestmark = pytest.mark.slow

HISTORIES: list[list[tuple[str, ...]]] = [
    [("A", "a"), ("A",)],
    [("A", "a"), ("a",)],
    [("A",), ("A", "a")],
    [("a",), ("a", "A"), ("A",), ("A", "a")],
    [("A",), ("a",), ("A",)],
    [("createdAt",), ("createdat",)],
    [("Ab", "aB"), ("aB",), ("aB", "ab"), ("ab", "AB")],
    [("A", "a b"), ("A", "a", "a b", "A b"), ("a", "a b", "A B")],
    [("_Op",), ("_Op", "_op"), ("_op",)],
    [("kıl",), ("kıl", "kil"), ("kil",)],
    [("ſ", "s", "µ", "μ"), ("s", "μ"), ("İ", "i", "ſ", "µ")],
]


def described(*names: str, full: bool = False) -> Relation:
    return relation("f" if full else "d", ("id", 23, True), *((name, 1082, full) for name in names))


def day(number: int, name: str) -> str:
    """Some beyond what a date column holds: reported by the name of their field."""
    return "infinity" if (number + len(name)) % 3 == 0 else f"2024-01-{number % 28 + 1:02d}"


def _one(schema: Any, *names: str) -> dict[str, str]:
    """Fields of columns in a table that has these fields."""
    [found] = resolve_fields([field.name for field in schema], [TableSchema.of_relation(described(*names))])
    return {column.name: column.field for column in found.columns}


@some_and_others(["full", "rounds"], [(False, "each"), (True, "one")], [(False, "one"), (True, "each")])
@pytest.mark.parametrize("history", HISTORIES)
async def test_each_column_has_its_own_values(tmp_path: Path, history: list[tuple[str, ...]], full: bool, rounds: str) -> None:
    sink = await begun(make(tmp_path))
    work = Applier(storage(tmp_path), LocalEngine(storage(tmp_path)), ApplierSettings(log_files=0))
    expected: dict[int, dict[str, str]] = {}
    for number, names in enumerate(history):
        values = {name: day(number, name) for name in names}
        expected = {id_: {name: text for name, text in old.items() if name in names} for id_, old in expected.items()}
        expected[number] = values
        changes: list[Any] = [described(*names, full=full), Insert(5, row(str(number), *values.values()))]
        if number and set(names) == set(history[0]):
            whole = row("0", *(expected[0].get(name) for name in names))
            again = {name: day(number + 1, name) for name in names}
            changes.append(Update(5, None, whole if full else None, row("0", *again.values())))
            expected[0] = again
        await land(sink, 200 + 10 * number, *changes)
        if rounds == "each":
            all_rounds(work)
            work.tidy(now=True)
    await sink.close()
    all_rounds(work)
    work.tidy(now=True)
    for place in ("tables", "log"):
        table = DeltaTable(str(tmp_path / place / "public/t"))
        fields = [field.name for field in table.schema().fields]
        assert len({field.lower() for field in fields}) == len(fields)
    table = DeltaTable(str(tmp_path / "tables/public/t"))
    every = list(dict.fromkeys(name for names in history for name in names))
    of_name = {name: _one(table.schema().fields, name)[name] for name in every}
    assert len({*of_name.values()}) == len(every)
    found = {}
    for item in table.to_pyarrow_table().to_pylist():
        special = json.loads(item["_special"] or "{}")
        held = {field: special.get(field) or item[field] for field in of_name.values()}
        shown = {name: held[field] if name in history[-1] else item[field] for name, field in of_name.items()}
        found[item["id"]] = {name: str(value) for name, value in shown.items() if value is not None}
    assert found == expected
    assert work.missing.updates == 0


def test_a_name_of_its_own_is_not_altered() -> None:
    assert _one([], "createdAt", "id2", "X") == {"id": "id", "createdAt": "createdAt", "id2": "id2", "X": "X"}
    for history in HISTORIES:
        schemas = [TableSchema.of_relation(described(*names)) for names in history]
        for before, now in pairwise(resolve_fields([], schemas)):
            old, new = ({column.name: column.field for column in one.columns} for one in (before, now))
            assert all(new[name] == field for name, field in old.items() if name in new)


async def test_a_value_that_was_not_sent_is_of_its_own_column(tmp_path: Path) -> None:
    first = relation("d", ("id", 23, True), ("A", 25, False))
    both = relation("d", ("id", 23, True), ("A", 25, False), ("a", 25, False))
    sink, work = await start(tmp_path, first, Insert(5, row("1", "big")))
    await land(sink, 300, both, Update(5, None, None, row("1", "unchanged", "small")), Insert(5, row("2", "B", "b")))
    all_rounds(work)
    await land(sink, 400, Update(5, None, None, row("1", "bigger", "unchanged")), Delete(5, row("2", None, None), None))
    await sink.close()
    all_rounds(work)
    work.tidy(now=True)
    found = DeltaTable(str(tmp_path / "tables/public/t")).to_pyarrow_table().to_pylist()
    assert [(item["id"], item["A"], item[altered_name("a")]) for item in found] == [(1, "bigger", "small")]
    logged = DeltaTable(str(tmp_path / "log/public/t")).to_pyarrow_table().to_pylist()
    assert [item["_un"] for item in logged if item["_un"]] == [["A"], [altered_name("a")]]
    assert not (tmp_path / "round").exists()


async def test_changes_are_read_under_the_logs_names_before_they_are_in_it(tmp_path: Path) -> None:
    sink, work = await start(tmp_path, relation("d", ("id", 23, True), ("A", 25, False)), Insert(5, row("1", "big")))
    changes = Changes(storage(tmp_path), TABLE)

    def read(schema: Any) -> list[tuple[Any, ...]]:
        pieces = changes.pieces(Lsn(0), changes.latest())
        rows = [item for piece in pieces for batch in changes.read(piece, schema) for item in batch.to_pylist()]
        return [(item["id"], item["A"], item.get(altered_name("a"))) for item in rows]

    both = relation("d", ("id", 23, True), ("A", 25, False), ("a", 25, False))
    await land(sink, 300, both, Insert(5, row("2", "B", "b")))
    await sink.close()
    wanted = [(1, "big", None), (2, "B", "b")]
    assert read(changes.schema()) == wanted
    all_rounds(work)
    work.tidy(now=True)
    assert read(changes.schema()) == wanted


async def test_a_table_that_stopped_at_such_a_column_can_leave(tmp_path: Path) -> None:
    sink, _ = await start(tmp_path, relation("d", ("id", 23, True), ("A", 25, False)), Insert(5, row("1", "big")))
    await land(sink, 300, relation("d", ("id", 23, True), ("a", 25, False)), Insert(5, row("2", "small")))
    await sink.remove_table(TABLE)
    all_rounds(applier(tmp_path))
    await sink.add_tables([TABLE], TableEntry(TableState.READY))
    await sink.close()
    all_rounds(applier(tmp_path))
    found = DeltaTable(str(tmp_path / "tables/public/t")).to_pyarrow_table().to_pylist()
    assert sorted((item["id"], item[altered_name("a")]) for item in found) == [(1, None), (2, "small")]


async def test_copied_rows_are_in_the_log_under_its_names(tmp_path: Path) -> None:
    sink, work = await start(tmp_path, relation("d", ("id", 23, True), ("Note", 25, False)), Insert(5, row("1", "former")))
    work.tidy(now=True)
    await sink.remove_table(TABLE)
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    await copy(sink, TABLE, b"1\ta\n", 250)
    await land(sink, 300, KEYED, Insert(5, row("2", "b")))
    await sink.close()
    all_rounds(work)
    work.tidy(now=True)
    found = DeltaTable(str(tmp_path / "tables/public/t")).to_pyarrow_table().to_pylist()
    assert sorted((item["id"], item["note"]) for item in found) == [(1, "a"), (2, "b")]
    logged = DeltaTable(str(tmp_path / "log/public/t")).to_pyarrow_table().to_pylist()
    assert sorted(((item["_op"], item["id"], item["Note"], item[altered_name("note")]) for item in logged), key=repr) == [
        ("c", 1, None, "a"),
        ("i", 1, "former", None),
        ("i", 2, None, "b"),
        ("t", None, None, None),  # the copy replaces earlier rows
    ]
