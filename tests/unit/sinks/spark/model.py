"""A publisher in a dictionary: random transactions over some tables, as messages, and the rows that must come of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from subscriber.interfaces import TableName
from subscriber.protocol.messages import Column, Delete, Insert, Message, Relation, Truncate, TruncateOption, TupleData, Update
from subscriber.sinks.spark.catalog.snapshots import Snapshot
from subscriber.transaction.model import Transaction
from tests.support.delta_tables import delta_rows
from tests.unit.sinks.spark.stream import row, transaction

Values = tuple[str | None, ...]

KEYED = Relation(5, "public", "keyed", "d", (Column("id", 23, -1, True), Column("big", 25, -1, False), Column("day", 1082, -1, False)))
PAIRS = Relation(
    6,
    "public",
    "pairs",
    "d",
    (Column("name", 25, -1, True), Column("n", 20, -1, True), Column("big", 25, -1, False), Column("v", 23, -1, False)),
)
FULL = Relation(7, "public", "full", "f", (Column("a", 25, -1, True), Column("b", 701, -1, True)))
LOG = Relation(8, "public", "log", "d", (Column("what", 25, -1, False), Column("at", 1184, -1, False)))
RELATIONS = (KEYED, PAIRS, FULL, LOG)
NAMES = tuple(TableName(relation.namespace, relation.name) for relation in RELATIONS)


def _tuple(values: Values, sent: Callable[[int], bool] = lambda _: True) -> TupleData:
    return row(*(value if sent(position) or value is None else "unchanged" for position, value in enumerate(values)))


def _key(relation: Relation, values: Values) -> TupleData:
    return row(*(value if column.key else None for column, value in zip(relation.columns, values, strict=True)))


class Publisher:
    """See the module. Rows are tuples of texts; tables with a key are dictionaries, the others are bags."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.keyed: dict[str, dict[Values, Values]] = {"keyed": {}, "pairs": {}}
        self.bags: dict[str, Counter[Values]] = {"full": Counter(), "log": Counter()}
        self.end = 100
        self.described: set[int] = set()
        self.pairs_of_rows = 0  # updates that are two rows of the change log

    def forget_described(self) -> None:
        """A new stream: relations are described again."""
        self.described.clear()

    def _fresh(self, relation: Relation, key: Values) -> Values:
        r = self.random
        if relation is KEYED:
            return (*key, r.choice([None, "x" * 50 + str(r.random())]), r.choice([None, "2024-05-06", "infinity", "0044-03-15 BC"]))
        return (*key, r.choice([None, "y" * 50 + str(r.random())]), str(r.randrange(100)))

    def _some_key(self, relation: Relation) -> Values:
        r = self.random
        if relation is KEYED:
            return (str(r.randrange(60) - 20),)
        return (r.choice(["a", "ä", "Z", "b b", "😀"]), str(r.randrange(8)))

    def _keyed_change(self, relation: Relation) -> Message | None:
        r, rows = self.random, self.keyed[relation.name]
        count = sum(column.key for column in relation.columns)
        big = count
        key = self._some_key(relation)
        old = rows.get(key)
        if old is None:
            rows[key] = self._fresh(relation, key)
            return Insert(relation.relation_id, _tuple(rows[key]))
        kind = r.random()
        if kind < 0.25:
            del rows[key]
            return Delete(relation.relation_id, _key(relation, old), None)
        unchanged = r.random() < 0.5
        if kind < 0.5:
            target = self._some_key(relation)
            if target in rows:
                return None
            del rows[key]
            new = self._fresh(relation, target)
        else:
            target, new = key, self._fresh(relation, key)
        if unchanged:
            new = (*new[:big], old[big], *new[big + 1 :])
        rows[target] = new
        self.pairs_of_rows += target != key
        return Update(
            relation.relation_id, _key(relation, old) if target != key else None, None, _tuple(new, lambda p: not (unchanged and p == big))
        )

    def _bag_change(self, relation: Relation) -> Message:
        r, bag = self.random, self.bags[relation.name]
        if relation is LOG:
            values: Values = (r.choice(["in", "out", None]), r.choice(["2024-01-01 00:00:00+00", "-infinity", None]))
            bag[values] += 1
            return Insert(8, _tuple(values))
        values = (r.choice(["p", "q", None]), r.choice(["1.5", "NaN", "-0.25", None]))
        present = sorted(bag.elements(), key=repr)
        if present and r.random() < 0.3:
            old = r.choice(present)
            bag -= Counter([old])
            self.bags["full"] = bag
            return Delete(7, None, _tuple(old))
        if present and r.random() < 0.4:
            old = r.choice(present)
            bag -= Counter([old])
            bag[values] += 1
            self.bags["full"] = bag
            self.pairs_of_rows += 1
            return Update(7, None, _tuple(old), _tuple(values))
        bag[values] += 1
        return Insert(7, _tuple(values))

    def transaction(self, size: int) -> Transaction:
        """One, over any of the tables."""
        messages: list[Message] = []
        while len(messages) < size:
            relation = self.random.choice(RELATIONS)
            if relation.relation_id not in self.described:
                messages.append(relation)
                self.described.add(relation.relation_id)
            if self.random.random() < 0.01:
                messages.append(Truncate(TruncateOption(0), (relation.relation_id,)))
                self.keyed.get(relation.name, {}).clear()
                self.bags.get(relation.name, Counter()).clear()
                continue
            change = self._keyed_change(relation) if relation.name in self.keyed else self._bag_change(relation)
            if change is not None:
                messages.append(change)
        self.end += 10
        return transaction(self.end, *messages)

    def rows(self) -> dict[str, Counter[Values]]:
        """What each table holds."""
        return {
            **{name: Counter(rows.values()) for name, rows in self.keyed.items()},
            **{name: Counter(bag) for name, bag in self.bags.items()},
        }


def read(path: Path, snapshot: Snapshot) -> dict[str, Counter[Values]]:
    """The tables at a snapshot, as a plain Delta reader has them."""
    import json

    found: dict[str, Counter[Values]] = {}
    for name, table in snapshot.tables.items():
        rows = delta_rows(DeltaTable(str(path / table.path), version=table.version))
        relation = next(relation for relation in RELATIONS if relation.name == name.name)
        found[name.name] = Counter()
        for item in rows:
            special = json.loads(item["_special"] or "{}")
            found[name.name][tuple(special.get(column.name, text_of(item[column.name])) for column in relation.columns)] += 1
    return found


def text_of(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, float):
        return "NaN" if value != value else str(value)
    text = str(value)
    return text.removesuffix(":00") if text.endswith("+00:00") else text
