"""Folding the changes of a unit for MERGE INTO: the file that it writes, and what it reads of the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from subscriber.protocol.messages import Column, Relation
from subscriber.sinks.spark.landing.zone import unique_path, write_file
from subscriber.sinks.spark.merge.row_matching import MissingRows
from subscriber.sinks.spark.merge.units import deleted_flag, merge_unit
from subscriber.sinks.spark.merge.work_unit import FoldedFile, Unit, UnitFile, UnitResult
from subscriber.sinks.spark.schema.evolution import Stretch
from subscriber.sinks.spark.schema.table_schema import TableSchema
from tests.support.lakes import storage

COLUMNS = (Column("id", 20, -1, True), Column("v", 25, -1, False), Column("_gone", 25, -1, False))
SCHEMA = TableSchema.of_relation(Relation(5, "public", "t", "d", COLUMNS))


def write(path: Path, directory: str, schema: pa.Schema, rows: list[dict[str, Any]]) -> str:
    (path / directory).mkdir(exist_ok=True)
    found = unique_path(directory)
    write_file(storage(path), found, schema, pa.Table.from_pylist(rows, schema=schema).to_batches())
    return found


def fold(path: Path, *changes: tuple[str, int, str | None, list[str] | None]) -> UnitResult:
    """Fold changes of a table with the keys 1 to 3: operation, key, value, and columns that were not sent."""
    base = write(path, "t", SCHEMA.current, [{"id": number, "v": f"old {number}", "_gone": "no"} for number in (1, 2, 3)])
    meta = {"_lsn": 200, "_xid": 1, "_moved": False}
    rows = [{**meta, "_seq": n, "_op": op, "id": id_, "v": v, "_un": un} for n, (op, id_, v, un) in enumerate(changes)]
    landed = write(path, "landing", SCHEMA.landing, rows)
    (path / "round").mkdir()
    stretches = (Stretch((landed,), SCHEMA, ()),)
    return merge_unit(
        storage(path),
        Unit(directory="t", schema=SCHEMA, base=(UnitFile(base.removeprefix("t/")),), stretches=stretches, after=100, folded_into="round"),
    )


def test_one_row_for_each_key_with_values_of_the_table(tmp_path: Path) -> None:
    changes = [
        ("u", 1, "a", None),
        ("u", 1, None, ["v"]),
        ("u", 2, None, ["v"]),
        ("d", 3, None, None),
        ("i", 9, "b", None),
        ("u", 7, "c", None),
    ]
    result = fold(tmp_path, *changes)
    assert (result.files, result.missing) == ([], MissingRows(updates=1))
    assert result.folded is not None
    assert (result.folded.rows, result.folded.keys, result.folded.known) == (4, (1, 9), False)
    flag = deleted_flag(SCHEMA)
    assert flag == "_gone_"
    rows = pq.read_table(tmp_path / result.folded.path).select(["id", "v", flag]).to_pylist()
    found = {(row["id"], None if row[flag] else row["v"], row[flag]) for row in rows}
    assert found == {(1, "a", False), (2, "old 2", False), (3, None, True), (9, "b", False)}


def test_no_file_if_no_change_finds_its_row(tmp_path: Path) -> None:
    result = fold(tmp_path, ("u", 7, "c", None))
    assert (result.folded, result.missing) == (FoldedFile(), MissingRows(updates=1))
    assert not list((tmp_path / "round").iterdir())
