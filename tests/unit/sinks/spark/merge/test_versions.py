"""Versions of rows: whatever changes a history table gets, and however they are divided, it has one version for each commit of a row."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from subscriber.interfaces import TableName
from subscriber.sinks.spark.merge.versions import changed_versions, history_schema
from subscriber.sinks.spark.schema.table_schema import LakeColumn, TableSchema

COLUMNS = (("id", pa.int32()), ("big", pa.string()), ("n", pa.int32()))
Row = tuple[Any, ...]


def schema_of(kind: str) -> TableSchema:
    keys = {"keyed": {"id"}, "full": {"id", "big", "n"}, "bare": set[str]()}[kind]
    columns = tuple(LakeColumn(name, name, type_, name in keys) for name, type_ in COLUMNS)
    return TableSchema(TableName("public", "t"), "f" if kind == "full" else "d", columns)


@dataclass
class Table:
    """A table on a publisher: its changes as rows of the log, and what it had after each commit."""

    kind: str
    dice: random.Random
    rows: list[Row] = field(default_factory=list)
    log: list[dict[str, Any]] = field(default_factory=list)
    states: dict[int, Counter[Row]] = field(default_factory=dict)
    puts: dict[int, Counter[Row]] = field(default_factory=dict)
    """The rows that each commit inserted or updated, and left."""
    lsn: int = 100
    deletes: bool = True

    def _write(self, op: str, values: Row | None, *, moved: bool = False, unsent: list[str] | None = None) -> None:
        named = dict(zip(("id", "big", "n"), values or (None, None, None), strict=True))
        named |= dict.fromkeys(unsent or ())
        if op == "d" and self.kind == "keyed":
            named |= {"big": None, "n": None}
        seq = sum(item["_lsn"] == self.lsn for item in self.log)
        stamp = {"_op": op, "_lsn": self.lsn, "_seq": seq, "_xid": 1, "_ts": datetime.fromtimestamp(self.lsn, UTC), "_moved": moved}
        self.log.append({**stamp, "_un": unsent or None, "_special": None, **named})

    def commit(self) -> None:
        self.lsn += 10
        put: list[Row] = []
        for _ in range(self.dice.choice([1, 2, 6, 12])):
            self._change(put)
        self.states[self.lsn] = Counter(self.rows)
        self.puts[self.lsn] = Counter(put)

    def _change(self, put: list[Row]) -> None:
        dice = self.dice
        key = dice.randrange(4)
        old = next((one for one in self.rows if one[0] == key), None)
        new = (key, dice.choice("xyz") * 9, dice.randrange(2 if self.kind == "full" else 99))
        kind = dice.random() if self.deletes else dice.uniform(0.1, 1)
        if kind < 0.03:
            self.rows.clear()
            put.clear()
            self._write("t", None)
        elif old is None or (self.kind != "keyed" and kind < 0.4) or self.kind == "bare":
            self._put(new, put)
            self._write("i", new)
        elif kind < 0.55 and self.deletes:
            self._drop(old, put)
            self._write("d", old)
        else:
            unsent = ["big"] if dice.random() < 0.6 and self.kind == "keyed" else None
            if dice.random() < 0.4:
                new = (dice.randrange(4, 7), *new[1:])
            if any(one[0] == new[0] for one in self.rows if one is not old) and self.kind == "keyed":
                return
            new = (new[0], old[1], new[2]) if unsent else new
            self._drop(old, put)
            self._put(new, put)
            if new[0] != key or self.kind == "full":
                self._write("d", old)
                self._write("u", new, moved=True, unsent=unsent)
            else:
                self._write("u", new, unsent=unsent)

    def _put(self, row: Row, put: list[Row]) -> None:
        self.rows.append(row)
        put.append(row)

    def _drop(self, row: Row, put: list[Row]) -> None:
        self.rows.remove(row)
        if row in put:
            put.remove(row)


def history_of(table: Table, dice: random.Random) -> list[dict[str, Any]]:
    schema = schema_of(table.kind)
    columns = pa.schema([one.with_nullable(True) for one in schema.landing])
    rows = history_schema(schema).empty_table()
    lsns = sorted({item["_lsn"] for item in table.log})
    while lsns:
        count = dice.choice([1, 3, len(lsns)])
        taken, lsns = set(lsns[:count]), lsns[count:]
        changes = pa.Table.from_pylist([item for item in table.log if item["_lsn"] in taken], schema=columns)
        rows = changed_versions(rows, changes, schema)
        rows = rows.take(pa.array(dice.sample(range(rows.num_rows), rows.num_rows), pa.int64()))  # files may have them in any order
    found: list[dict[str, Any]] = rows.to_pylist()
    return found


def values_of(item: dict[str, Any]) -> Row:
    return tuple(item[name] for name, _ in COLUMNS)


@pytest.mark.parametrize("kind", ["keyed", "full", "bare"])
@pytest.mark.parametrize("seed", range(12))
def test_versions_are_the_rows_of_every_commit(kind: str, seed: int) -> None:
    dice = random.Random(f"{kind} {seed}")
    table = Table(kind, dice)
    for _ in range(12):
        table.commit()
    found = history_of(table, dice)
    for lsn, state in table.states.items():
        there = [item for item in found if item["_lsn"] <= lsn and (item["_end_lsn"] is None or lsn < item["_end_lsn"])]
        assert Counter(map(values_of, there)) == state, lsn
    for lsn, put in table.puts.items():
        begun = Counter(values_of(item) for item in found if item["_lsn"] == lsn)
        # of equal rows of a table without a key, it does not matter which one a commit deletes: one that it inserted, or an older one
        assert begun == put if kind == "keyed" else begun <= put, lsn
    for item in found:
        assert item["_valid_from"] == datetime.fromtimestamp(item["_lsn"], UTC)
        assert item["_valid_to"] == (datetime.fromtimestamp(item["_end_lsn"], UTC) if item["_end_lsn"] is not None else None)
        assert item["_is_current"] == (item["_valid_to"] is None)


@pytest.mark.parametrize("seed", range(25))
def test_last_versions_have_the_last_row_that_a_commit_left_of_each_key(seed: int) -> None:
    """The query of ``docs/howto/lake-history.md`` for deleted rows."""
    dice = random.Random(seed)
    table = Table("keyed", dice)
    for _ in range(12):
        table.commit()
    expected: dict[int, tuple[Row, bool, int]] = {}
    for lsn, state in table.states.items():
        there = {one[0]: one for one in state}
        gone = [key for key, (_, deleted, _) in expected.items() if key not in there and not deleted]
        expected |= {key: (expected[key][0], True, lsn) for key in gone}
        expected |= {one[0]: (one, False, lsn) for one in table.puts[lsn]}
    last = {item["id"]: item for item in sorted(history_of(table, dice), key=lambda item: item["_lsn"])}
    found = {key: (values_of(item), not item["_is_current"], item["_end_lsn"] or item["_lsn"]) for key, item in last.items()}
    assert found == expected
