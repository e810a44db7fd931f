"""What is applied: changes of one table as a landing zone has them.

``RECENT``: 60 % insert, 30 % update, 10 % delete, all of them recent keys. ``RANDOM``: 10 % insert, 80 % update, 10 % delete, of any key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from subscriber.interfaces import TableName
from subscriber.protocol.messages import Column, Relation
from subscriber.sinks.spark.schema.table_schema import TableSchema

__all__ = ["RANDOM", "RECENT", "SCHEMA", "TABLE", "Changes", "Mix", "write_for_script"]

TABLE: Final = TableName("public", "t")
RELATION: Final = Relation(
    5,
    "public",
    "t",
    "d",
    (
        Column("id", 20, -1, True),
        Column("name", 25, -1, False),
        Column("amount", 1700, ((18 << 16) | 2) + 4, False),
        Column("at", 1184, -1, False),
        Column("doc", 3802, -1, False),
        Column("flag", 16, -1, False),
    ),
)
SCHEMA: Final = TableSchema.of_relation(RELATION)


class Mix(NamedTuple):
    """Tenths of inserts and deletes, and how many of the newest keys are updated and deleted; None: all of them."""

    inserts: int
    deletes: int
    recent: int | None


RECENT: Final = Mix(6, 1, 50_000)
RANDOM: Final = Mix(1, 1, None)
_STEP: Final = 7919
"""A prime: its multiples visit all deleted keys in an order that looks random."""
_DELETED: Final = 10
"""Every tenth key is deleted some day, and never updated: whoever meets an update of a row that is gone may differ in what to do."""


class Changes:
    """Makes them, the same for everybody.

    Args:
        seed: of the choice of keys.
        mix: of changes.

    Attributes:
        end: LSN of the last transaction.
    """

    def __init__(self, seed: int = 1, mix: Mix = RECENT) -> None:
        self._mix = mix
        self._based = 0
        self._random = np.random.default_rng(seed)
        self._next = 1
        self._deleted = _DELETED
        self.end = 1_000_000

    def base(self, rows: int) -> pa.Table:
        """The rows that are there first, as inserts."""
        ids = np.arange(self._next, self._next + rows)
        self._next += rows
        self._based = self._next
        return self._rows(np.full(rows, "i"), ids)

    def batch(self, count: int) -> pa.Table:
        """So many changes."""
        inserts = count * self._mix.inserts // 10
        deleted = self._deletes(count * self._mix.deletes // 10)
        since = 1 if self._mix.recent is None else max(self._next - self._mix.recent, 1)
        updated = self._random.integers(since, self._next, count - inserts - count * self._mix.deletes // 10)
        updated = np.where(updated % _DELETED == 0, updated + 1, updated)
        updated = np.minimum(updated, self._next - 1 - (self._next - 1) % _DELETED - 1)
        ids = np.arange(self._next, self._next + inserts)
        self._next += inserts
        ops = np.concatenate([np.full(inserts, "i"), np.full(len(updated), "u"), np.full(len(deleted), "d")])
        return self._rows(ops, np.concatenate([ids, updated, deleted]))

    def _deletes(self, count: int) -> Any:
        if self._mix.recent is None:
            # each key once, in an order that looks random; none after all are deleted
            keys = (self._based - 1) // _DELETED
            first = (self._deleted - _DELETED) // _DELETED
            numbers = np.arange(first, min(first + count, keys))
            self._deleted += _DELETED * len(numbers)
            step = _STEP if keys % _STEP else _STEP + 8  # 7927 is the next prime
            return _DELETED * (1 + numbers * step % max(keys, 1))
        since = max(self._next - self._mix.recent, 1)
        self._deleted = max(self._deleted, since + _DELETED - since % _DELETED)
        deleted = self._deleted + _DELETED * np.arange(count)
        deleted = deleted[deleted < self._next]
        self._deleted += _DELETED * len(deleted)
        return deleted

    def _rows(self, ops: Any, ids: Any) -> pa.Table:
        count = len(ids)
        transactions = np.arange(count) // 10
        lsns = self.end + 100 * (transactions + 1)
        self.end = int(lsns[-1])
        numbers = self._random.integers(0, 100_000_000, count, dtype=np.int32)
        gone = ops == "d"
        names = [f"name {number}" for number in numbers.tolist()]
        documents = [f'{{"n": {number}, "tag": "t{number % 100}", "text": "some text {number}"}}' for number in numbers.tolist()]
        moments = 1_700_000_000_000_000 + numbers.astype(np.int64) * 1000

        def column(values: Any, type_: pa.DataType) -> pa.Array:
            return pa.array(values, type_, mask=gone)

        columns = [
            pa.array(ops, pa.string()),
            pa.array(lsns, pa.int64()),
            pa.array(np.arange(count) % 10, pa.int64()),
            pa.array(transactions, pa.int64()),
            pa.array(np.full(count, moments[0]), pa.timestamp("us", "UTC")),
            pa.array(np.full(count, False), pa.bool_()),
            pa.nulls(count, pa.list_(pa.string())),
            pa.nulls(count, pa.string()),
            pa.array(ids, pa.int64()),
            column(names, pa.string()),
            pa.array(numbers, pa.int32(), mask=gone).cast(pa.decimal128(12, 2)).cast(pa.decimal128(18, 2)),
            column(moments, pa.timestamp("us", "UTC")),
            column(documents, pa.string()),
            column(numbers % 2 == 0, pa.bool_()),
        ]
        return pa.Table.from_arrays(columns, schema=SCHEMA.landing)


def write_for_script(directory: Path, rows: pa.Table, end: int) -> None:
    """The same file where a stream of Spark looks for it."""
    written = directory / f".{end}.parquet"
    pq.write_table(rows, written, compression="zstd", use_dictionary=["_op"])
    written.rename(directory / f"{end:020d}.parquet")
