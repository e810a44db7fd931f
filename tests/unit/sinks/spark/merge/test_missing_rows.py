"""Changes of missing rows, as where a table began without a copy: skipped and counted, in any combination."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from deltalake import DeltaTable

from subscriber.interfaces import CopyFormat, Position, PublishedTable, TableEntry, TableName, TableState
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Column, Delete, Insert, Message, Relation, Update
from subscriber.sinks.spark.merge.row_matching import MissingRows
from subscriber.sinks.spark.pipeline.applier import Applier, ApplierSettings
from tests.support.examples import seeds
from tests.unit.sinks.spark.pipeline.test_applier import all_rounds, applier
from tests.unit.sinks.spark.stream import batch, begun, make, row, transaction

_KEYED = Relation(5, "public", "t", "d", (Column("id", 23, -1, True), Column("big", 25, -1, False), Column("v", 23, -1, False)))
_FULL = Relation(6, "public", "f", "f", (Column("a", 23, -1, True), Column("b", 25, -1, True)))
_PUBLISHED = PublishedTable(
    name=TableName("public", "t"),
    relation_id=5,
    kind="r",
    columns=("id", "big", "v"),
    key_columns=("id",),
    replica_identity="d",
    column_types=(23, 25, 23),
    column_modifiers=(-1, -1, -1),
)
_KEYS = 12


class _Target:
    """What PostgreSQL's apply worker would do, a change at a time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.rows: dict[str, tuple[str | None, str | None]] = {}
        self.bag: Counter[tuple[str | None, str | None]] = Counter()
        self.missing = MissingRows()

    def _values(self) -> tuple[str, str]:
        return f"text {self.random.random()}", str(self.random.randrange(100))

    def keyed(self) -> Message | None:
        r = self.random
        key = str(r.randrange(_KEYS))
        kind = r.random()
        there = self.rows.get(key)
        if kind < 0.25:
            if there is not None:
                return None
            self.rows[key] = self._values()
            return Insert(5, row(key, *self.rows[key]))
        if kind < 0.45:
            self.missing.deletes += there is None
            self.rows.pop(key, None)
            return Delete(5, row(key, None, None), None)
        moved = str(r.randrange(_KEYS)) if kind > 0.7 else key
        if moved != key and (moved in self.rows):
            return None
        big, v = self._values()
        unsent = r.random() < 0.5
        if there is None:
            self.missing.updates += 1
        else:
            del self.rows[key]
            self.rows[moved] = (there[0] if unsent else big, v)
        return Update(5, row(key, None, None) if moved != key else None, None, row(moved, "unchanged" if unsent else big, v))

    def full(self) -> Message:
        r = self.random
        values, old = ((str(r.randrange(3)), r.choice([None, "x"])) for _ in range(2))
        kind = r.random()
        if kind < 0.4:
            self.bag[values] += 1
            return Insert(6, row(*values))
        there = self.bag[old] > 0
        if there:
            self.bag[old] -= 1
        if kind < 0.65:
            self.missing.deletes += not there
            return Delete(6, None, row(*old))
        self.missing.updates += not there
        self.bag[values] += there
        return Update(6, None, row(*old), row(*values))


@pytest.mark.slow
@seeds(1, 2)
async def test_any_changes_of_rows_there_or_not_are_those_of_one_after_the_other(tmp_path: Path, seed: int) -> None:
    target = _Target(seed)
    sink = await begun(make(tmp_path), tables=[TableName("public", "t"), TableName("public", "f")])
    work = applier(tmp_path, ApplierSettings(target_rows=4, log_files=10))
    end = 100
    for number in range(15):
        for _ in range(target.random.randrange(1, 4)):
            made = [target.keyed() if target.random.random() < 0.6 else target.full() for _ in range(target.random.randrange(1, 12))]
            end += 10
            described = [_KEYED, _FULL] if end == 110 else []
            await sink.apply(batch(transaction(end, *described, *(change for change in made if change is not None))))
            await sink.advance(Lsn(end))
        all_rounds(work)
        assert _keyed_rows(tmp_path) == {(int(key), big, int(v or 0)) for key, (big, v) in target.rows.items()}, number
        assert _bag(tmp_path) == +Counter({(int(a or 0), b): count for (a, b), count in target.bag.items()}), number
        assert work.missing == target.missing, number
    await sink.close()


def _rows(path: Path, name: str) -> list[dict[str, object]]:
    table = path / "tables/public" / name
    return DeltaTable(str(table)).to_pyarrow_table().to_pylist() if table.exists() else []


def _keyed_rows(path: Path) -> set[tuple[object, ...]]:
    return {(item["id"], item["big"], item["v"]) for item in _rows(path, "t")}


def _bag(path: Path) -> Counter[tuple[object, ...]]:
    return Counter((item["a"], item["b"]) for item in _rows(path, "f"))


async def test_a_table_that_is_removed_and_comes_back_keeps_its_rows(tmp_path: Path) -> None:
    name = TableName("public", "t")
    sink = await begun(make(tmp_path))
    await sink.apply(batch(transaction(200, _KEYED, Insert(5, row("1", "a", "1")))))
    await sink.remove_table(name)  # nothing was applied yet
    work: Applier = applier(tmp_path)
    snapshot = all_rounds(work)
    assert name not in snapshot.tables
    assert _keyed_rows(tmp_path) == {(1, "a", 1)}
    await sink.add_tables([name], TableEntry(TableState.READY))
    await sink.apply(batch(transaction(300, Insert(5, row("2", "b", "2")), Update(5, None, None, row("1", "unchanged", "7")))))
    await sink.close()
    assert name in all_rounds(work).tables
    work.tidy(now=True)
    assert _keyed_rows(tmp_path) == {(1, "a", 7), (2, "b", 2)}
    log = DeltaTable(str(tmp_path / "log/public/t")).to_pyarrow_table(columns=["_lsn", "_op"]).to_pylist()
    assert sorted((item["_lsn"], item["_op"]) for item in log) == [(200, "i"), (300, "i"), (300, "u")]


async def test_a_table_that_comes_back_with_a_copy_is_that_and_its_log_is_whole(tmp_path: Path) -> None:
    name = TableName("public", "t")
    sink = await begun(make(tmp_path))
    work: Applier = applier(tmp_path)
    await sink.apply(batch(transaction(200, _KEYED, Insert(5, row("1", "a", "1")))))
    await sink.advance(Lsn(200))
    all_rounds(work)
    work.tidy(now=True)
    await sink.apply(batch(transaction(300, Insert(5, row("2", "a", "1")))))
    await sink.remove_table(name)
    await sink.add_tables([name], TableEntry(TableState.INIT))
    copying = sink.open_table(name)
    await copying.begin()
    await copying.start_copy()
    work.tidy(now=True)  # the snapshot that is published has the table as it was

    async def lines() -> AsyncIterator[bytes]:
        yield b"7\tcopied\t7\n"

    await copying.describe(_PUBLISHED)
    await copying.copy(["id", "big", "v"], CopyFormat.TEXT, lines())
    assert name not in all_rounds(work).tables
    work.tidy(now=True)
    await copying.finish_copy(Position("sync", "7", 1, Lsn(400)))
    await copying.finish_sync(Lsn(400))
    await copying.close()
    await sink.apply(batch(transaction(500, _KEYED, Insert(5, row("8", "b", "8")))))
    await sink.close()
    assert name in all_rounds(work).tables
    for _ in range(2):
        work.tidy(now=True)
    assert _keyed_rows(tmp_path) == {(7, "copied", 7), (8, "b", 8)}
    log = DeltaTable(str(tmp_path / "log/public/t")).to_pyarrow_table(columns=["_lsn", "_op", "id"]).to_pylist()
    found = sorted((item["_lsn"], item["_op"], item["id"]) for item in log)
    # the copy replaces the rows from before
    assert found == [(200, "i", 1), (300, "i", 2), (400, "c", 7), (400, "t", None), (500, "i", 8)]
