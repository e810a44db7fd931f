"""A lake that a benchmark lands changes in, as the subscriber does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from subscriber.config import Settings, SubscriptionOptions
from subscriber.interfaces import Position, TableEntry, TableName, TableState
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.catalog.lake import LANDING, Lake
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.landing.manifest import EPOCH_OFFSET, BatchTransactions, LandedFile
from subscriber.sinks.spark.landing.zone import LandingZone, ParquetFile
from subscriber.sinks.spark.sink import SparkSink
from tests.benchmark.spark.changes import SCHEMA, TABLE

__all__ = ["LandedLake"]


class LandedLake:
    """A lake with tables of the same columns, which begin empty.

    Args:
        path: of the lake, which is created.
        tables: their number.

    Attributes:
        location, storage: of the lake.
        names: of the tables.
        landed_bytes: size of the files that were landed.
    """

    def __init__(self, path: Path, tables: int = 1) -> None:
        self.path = path
        self.location = Location.parse(f"spark://{path}")
        self.names = [TABLE, *(TableName("public", f"t{number}") for number in range(1, tables))]
        asyncio.run(self._make())
        self.storage = Storage.open(self.location)
        lake = Lake.find(self.storage)
        assert lake is not None
        self._ids = [lake.table(name).id for name in self.names]
        self._zone = LandingZone(self.storage, LANDING)
        self._zone.recover()
        self.landed_bytes = 0

    async def _make(self) -> None:
        sink = SparkSink(f"spark://{self.path}", options=SubscriptionOptions(), settings=Settings())
        opened = await sink.open("bench", lambda _: None)
        await opened.begin_slot("bench", ["pub"], opened.state.two_phase)
        await opened.set_position(Position("bench", "1", 1, Lsn(100)))
        await opened.add_tables(self.names, TableEntry(TableState.READY))
        await opened.close()

    def land(self, rows: Sequence[pa_Table], end: int, *, committed: tuple[float, float] | None = None) -> None:
        """Land a batch: rows for each of the first tables. File, fsync, manifest, fsync.

        Args:
            rows: by table.
            end: its last LSN.
            committed: when its first and last transaction were committed, in seconds since 1970.
        """
        files = []
        for table_id, one in zip(self._ids, rows, strict=False):
            path = f"{LANDING}/{end:020d}-{table_id}-0.parquet"
            file = ParquetFile(self.storage, path, SCHEMA.landing)
            for part in one.combine_chunks().to_batches():
                file.write(part)
            files.append(LandedFile(table_id=table_id, path=path, rows=one.num_rows, size=file.commit(), schema=SCHEMA))
        self.landed_bytes += sum(file.size for file in files)
        first, last = (None, None) if committed is None else (int((moment - EPOCH_OFFSET) * 1e6) for moment in committed)
        count = sum(one.num_rows for one in rows) // 10
        told = BatchTransactions(transactions=count, commit_time=last, first_commit_time=last if first is None else first)
        self._zone.add(files, self._zone.last, Lsn(end), told)


pa_Table = Any
"""A table of pyarrow, which has no types."""
