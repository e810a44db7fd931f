"""What is applied: changes of one table as a landing zone has them. 60 % insert, 30 % update, 10 % delete, all of them recent keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from subscriber.abc import TableName
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Column, Relation
from subscriber.sinks.spark.landing.manifest import LandedFile
from subscriber.sinks.spark.landing.zone import LandingZone, ParquetFile
from subscriber.sinks.spark.schema.table_schema import TableSchema

__all__ = ["SCHEMA", "TABLE", "Changes", "land", "write_for_script"]

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

_RECENT: Final = 50_000
"""So many of the newest keys are updated and deleted, however many rows there are."""
_DELETED: Final = 10
"""Every tenth key is deleted some day, and never updated: whoever meets an update of a row that is gone may differ in what to do."""


class Changes:
    """Makes them, the same for everybody.

    Args:
        seed: of the choice of keys.

    Attributes:
        end: LSN of the last transaction.
    """

    def __init__(self, seed: int = 1) -> None:
        self._random = np.random.default_rng(seed)
        self._next = 1
        self._deleted = _DELETED
        self.end = 1_000_000

    def base(self, rows: int) -> pa.Table:
        """The rows that are there first, as inserts."""
        ids = np.arange(self._next, self._next + rows)
        self._next += rows
        return self._rows(np.full(rows, "i"), ids)

    def batch(self, count: int) -> pa.Table:
        """So many changes, of recent keys."""
        inserts, deletes = count * 6 // 10, count // 10
        since = max(self._next - _RECENT, 1)
        updated = self._random.integers(since, self._next, count - inserts - deletes)
        updated = np.where(updated % _DELETED == 0, updated + 1, updated)
        updated = np.minimum(updated, self._next - 1 - (self._next - 1) % _DELETED - 1)
        self._deleted = max(self._deleted, since + _DELETED - since % _DELETED)
        deleted = self._deleted + _DELETED * np.arange(deletes)
        deleted = deleted[deleted < self._next]
        self._deleted += _DELETED * len(deleted)
        ids = np.arange(self._next, self._next + inserts)
        self._next += inserts
        ops = np.concatenate([np.full(inserts, "i"), np.full(len(updated), "u"), np.full(len(deleted), "d")])
        return self._rows(ops, np.concatenate([ids, updated, deleted]))

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


def land(zone: LandingZone, storage: Any, table_id: int, rows: pa.Table, end: int) -> None:
    """As the subscriber does: file, fsync, manifest, fsync."""
    path = f"{zone.directory}/{end:020d}-{table_id}-0.parquet"
    file = ParquetFile(storage, path, SCHEMA.landing)
    for part in rows.combine_chunks().to_batches():
        file.write(part)
    size = file.commit()
    landed = LandedFile(table_id=table_id, path=path, rows=rows.num_rows, size=size, schema=SCHEMA)
    zone.add([landed], zone.last, Lsn(end), transactions=rows.num_rows // 10, commit_time=0)


def write_for_script(directory: Path, rows: pa.Table, end: int) -> None:
    """The same file where a stream of Spark looks for it."""
    written = directory / f".{end}.parquet"
    pq.write_table(rows, written, compression="zstd", use_dictionary=["_op"])
    written.rename(directory / f"{end:020d}.parquet")
