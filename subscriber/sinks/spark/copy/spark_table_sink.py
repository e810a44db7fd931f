"""One table's synchronization, in its own directory: its copy, and its own batches until the apply worker takes over.

Copied rows are in files like landed ones, with the operation ``c``. ``copy.json`` names these files and makes them valid. The catalog says
FINISHEDCOPY only after it is written. The next :meth:`SparkTableSink.begin` removes a copy that was not finished. Each copy has a new
directory, so that rows of different copies are never mixed.

After the copy, the position is the end of the last manifest, or ``position.json`` if that is further. A transaction without a row of the
table leaves no manifest, but is acknowledged like all others, and the table's slot must never be ahead of the position stored here.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from subscriber import crash_points
from subscriber.errors import TargetError
from subscriber.interfaces import (
    ApplyStatistics,
    Batch,
    CopyFormat,
    Position,
    PublishedTable,
    TableEntry,
    TableName,
    TableState,
)
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Relation
from subscriber.sinks.spark.catalog.lake import Lake, copy_directory
from subscriber.sinks.spark.copy.copied_rows import TableCopy, read_copy, store_copy, write_copy
from subscriber.sinks.spark.files.documents import read_document, write_document
from subscriber.sinks.spark.files.file_lock import FileLock
from subscriber.sinks.spark.landing.manifest import LandedFile
from subscriber.sinks.spark.landing.writer import LandingWriter
from subscriber.sinks.spark.landing.zone import LandingZone
from subscriber.sinks.spark.schema.table_schema import TableSchema, published_columns
from subscriber.threads import run_in_thread

__all__ = ["SparkTableSink"]

_POSITION_DOCUMENT: Final = "position.json"


class SparkTableSink:
    """A :class:`subscriber.interfaces.TableSink`. It holds the writer's lock during the synchronization.

    The lake is asked for each time, because it changes when the sink is opened again.
    """

    def __init__(
        self,
        table: TableName,
        lake: Callable[[], Lake],
        lock: FileLock,
        catalog: asyncio.Lock,
        statistics: ApplyStatistics,
    ) -> None:
        self._table = table
        self._lake = lake
        self._lock = lock
        self._catalog = catalog
        self._statistics = statistics
        self._locked = False
        self._schema: TableSchema | None = None
        self._columns: tuple[tuple[str, int, int], ...] = ()
        self._numbers: Iterator[int] = itertools.count()
        self._files: list[LandedFile] = []
        self._started = 0.0
        self._lander: LandingWriter | None = None

    @property
    def relation_id(self) -> int:
        return self._lake().table(self._table).id

    async def begin(self) -> TableEntry:
        """Undo a copy that was not finished, and return the stored entry."""
        if not self._locked:
            self._lock.take()
            self._locked = True
        self._lander = None
        lake = self._lake()
        async with self._catalog:
            await run_in_thread(lake.settle)
        table = lake.table(self._table)
        if table.entry.state is TableState.DATASYNC:
            await run_in_thread(lambda: lake.storage.remove_directory(copy_directory(table)))
            await self._change(entry=TableEntry(TableState.INIT))
        return lake.table(self._table).entry

    async def _change(self, **changes: object) -> None:
        async with self._catalog:
            await run_in_thread(lambda: self._lake().change_table(self._table, **changes))

    @property
    def _directory(self) -> str:
        return copy_directory(self._lake().table(self._table))

    async def start_copy(self) -> None:
        """Store DATASYNC, and make a new directory."""
        table = self._lake().table(self._table)
        if table.entry.state is not TableState.INIT:
            raise TargetError(f'table "{self._table}" is already copied, or is being copied', hint="report this")
        generation = table.generation + 1
        await self._change(entry=TableEntry(TableState.DATASYNC), generation=generation, position=None)
        self._files, self._schema, self._numbers = [], None, itertools.count()
        self._started = time.time()
        storage, directory = self._lake().storage, self._directory
        await run_in_thread(lambda: storage.make_directory(directory))

    async def describe(self, table: PublishedTable) -> None:
        """Store the description of the copied columns."""
        self._schema, self._columns = TableSchema.of_published(table), published_columns(table)

    async def copy(self, columns: Sequence[str], copy_format: CopyFormat, data: AsyncIterator[bytes]) -> None:
        """Store the rows of one COPY stream as one file.

        Raises:
            TargetError: it cannot be written, or a text is not UTF-8.
            ProtocolError: the data is not valid COPY data.
        """
        if self._schema is None:
            raise TargetError(f'table "{self._table}" was not described as it is copied', hint="report this")
        path = f"{self._directory}/part-{next(self._numbers):05d}.parquet"
        self._files.append(
            await store_copy(
                self._lake().storage, path, self.relation_id, self._schema, columns=columns, copy_format=copy_format, data=data
            )
        )

    async def finish_copy(self, position: Position) -> None:
        storage, directory = self._lake().storage, self._directory
        assert self._schema is not None
        files = tuple(sorted(self._files, key=lambda file: file.path))
        copy = TableCopy(position.lsn, self._schema, files, self._started)
        await run_in_thread(lambda: write_copy(storage, directory, copy))
        crash_points.reached("landing.copy_stored")
        await self._change(entry=TableEntry(TableState.FINISHEDCOPY), position=position, columns=self._columns, gap=None)

    async def position(self) -> Position:
        lake = self._lake()
        position = lake.table(self._table).position
        if position is None or read_copy(lake.storage, self._directory) is None:
            raise TargetError(
                f'the copy of table "{self._table}" is missing in the lake', hint="remove the table from the publication and add it again"
            )
        zone = LandingZone(lake.storage, self._directory, position.lsn)
        await run_in_thread(zone.recover)
        moved = await run_in_thread(lambda: read_document(lake.storage, f"{self._directory}/{_POSITION_DOCUMENT}"))
        lsn = zone.last if moved is None else max(zone.last, Lsn.parse(moved["lsn"]))
        self._lander = LandingWriter(zone, self._table_id, self._statistics, lsn)
        return replace(position, lsn=lsn)

    def _table_id(self, relation: Relation) -> int | None:
        return self.relation_id if TableName(relation.namespace, relation.name) == self._table else None

    async def apply(self, batch: Batch) -> None:
        """Land the table's part of a batch. If it has none, store only the position. Durable on return."""
        if self._lander is None:
            await self.position()
        lander = self._lander
        assert lander is not None
        before = lander.position
        await lander.take(batch)
        await lander.land()
        if lander.position > max(before, lander.zone.last):
            storage, name = self._lake().storage, f"{self._directory}/{_POSITION_DOCUMENT}"
            await run_in_thread(lambda: write_document(storage, name, {"lsn": str(lander.position)}))
        lander.count()

    async def finish_sync(self, lsn: Lsn) -> None:
        await self._change(entry=TableEntry(TableState.SYNCDONE, lsn), position=None)

    async def close(self) -> None:
        if self._locked:
            self._locked = False
            self._lock.give_back()
