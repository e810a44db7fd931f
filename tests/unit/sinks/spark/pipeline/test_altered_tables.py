"""A table that is altered again and again amid its changes: however they are snapshot into rounds, the lake has the publisher's rows."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal

import pytest
from deltalake import DeltaTable

from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Column, Delete, Insert, Message, Relation, Truncate, TruncateOption, TupleData, Update
from subscriber.sinks.spark.merge.row_matching import MissingRows
from subscriber.sinks.spark.pipeline.applier import Applier, ApplierSettings
from subscriber.sinks.spark.pipeline.engines.local_engine import LocalEngine
from tests.support.examples import seeds
from tests.unit.sinks.spark.pipeline.test_applier import all_rounds, storage
from tests.unit.sinks.spark.stream import batch, begun, make, row, transaction

pytestmark = pytest.mark.slow

_EXTRAS = ("e0", "e1", "e2")
Values = dict[str, str | None]


class _Table:
    """The publisher's rows."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.columns = ["id", "code"]
        self.identity: Literal["d", "n", "f", "i"] = "d"
        self.rows: list[Values] = []
        self.numbers = 0
        self.types = {"code": 25}

    def alter(self) -> Relation:
        r = self.random
        kind = r.random()
        absent = [name for name in _EXTRAS if name not in self.columns]
        present = [name for name in self.columns if name in _EXTRAS]
        if kind < 0.35:
            self.identity = r.choice(["d", "f", "i", "n"])
        elif kind < 0.7 and absent:
            name = r.choice(absent)
            self.columns.insert(r.randrange(1, len(self.columns) + 1), name)
            for values in self.rows:
                values[name] = None
        elif kind < 0.8:
            # of these casts values stay what they are
            name = r.choice(self.columns)
            self.types[name] = {23: 20, 20: 25, 25: 1043}.get(self.types.get(name, 23), 25)
        elif present:
            name = r.choice(present)
            self.columns.remove(name)
            for values in self.rows:
                del values[name]
        return self.relation()

    def relation(self) -> Relation:
        return Relation(
            5, "public", "t", self.identity, tuple(Column(name, self.types.get(name, 23), -1, self._is_key(name)) for name in self.columns)
        )

    def _is_key(self, name: str) -> bool:
        return self.identity == "f" or (self.identity, name) in {("d", "id"), ("i", "code")}

    def change(self) -> Message:
        r = self.random
        kind = r.random()
        if kind < 0.02:
            self.rows = []
            return Truncate(TruncateOption(0), (5,))
        if kind < 0.4 or not self.rows or self.identity == "n":
            self.rows.append(self._fresh())
            return Insert(5, self._tuple(self.rows[-1]))
        place = r.randrange(len(self.rows))
        old = dict(self.rows[place])
        if kind < 0.55:
            del self.rows[place]
            return Delete(5, *self._old(old))
        new = self._fresh()
        if r.random() < 0.7:
            new["id"], new["code"] = old["id"], old["code"]
        moved = self.identity == "f" or any(self._is_key(name) and new[name] != old[name] for name in new)
        self.rows[place] = new
        return Update(5, *(self._old(old) if moved else (None, None)), self._tuple(new))

    def _fresh(self) -> Values:
        self.numbers += 1
        values: Values = {"id": str(self.numbers), "code": f"c{self.numbers}"}
        return {name: values.get(name) or self.random.choice([None, "5", "6"]) for name in self.columns}

    def _tuple(self, values: Values) -> TupleData:
        return row(*(values[name] for name in self.columns))

    def _old(self, values: Values) -> tuple[TupleData | None, TupleData | None]:
        if self.identity == "f":
            return None, self._tuple(values)
        return row(*(values[name] if self._is_key(name) else None for name in self.columns)), None

    def expected(self) -> list[tuple[str | None, ...]]:
        names = ("id", "code", *_EXTRAS)
        return sorted((tuple(values.get(name) for name in names) for values in self.rows), key=repr)


def _found(path: Path) -> list[tuple[str | None, ...]]:
    items = DeltaTable(str(path / "tables/public/t")).to_pyarrow_table().to_pylist()
    names = ("id", "code", *_EXTRAS)
    rows = (tuple(None if item.get(name) is None else str(item[name]) for name in names) for item in items)
    return sorted(rows, key=repr)


@seeds(1, 3)
async def test_whatever_is_altered_amid_changes_the_rows_are_the_publishers(tmp_path: Path, seed: int) -> None:
    table = _Table(seed)
    dice = random.Random(seed)
    sink = await begun(make(tmp_path))
    end = 200
    describe = [table.relation()]
    for _ in range(5):
        for _ in range(dice.randrange(1, 5)):
            messages: list[Message] = [*describe]
            describe = []
            for _ in range(dice.randrange(1, 25)):
                messages.append(table.change())
                if dice.random() < 0.15:
                    # the lake learns of it with the next change
                    messages += [table.alter(), table.change()]
            await sink.apply(batch(transaction(end, *messages)))
            if dice.random() < 0.7:
                await sink.advance(Lsn(end))
            end += 10
        await sink.advance(Lsn(end - 10))
        # applied now, and snapshot in many ways
        settings = ApplierSettings(target_rows=dice.choice([4, 1000]), round_bytes=dice.choice([1, 10**9]), log_files=5)
        work = Applier(storage(tmp_path), LocalEngine(storage(tmp_path)), settings)
        all_rounds(work)
        work.tidy(now=dice.random() < 0.5)
        assert _found(tmp_path) == table.expected()
        assert work.missing == MissingRows()
    await sink.close()
