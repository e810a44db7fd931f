"""Several tables that are copied through one session of the publisher: each goes from INIT straight to SYNCDONE.

A table's rows are in the directory of its next copy. No document names this directory until the catalog says SYNCDONE and the copy's
generation, in one change. After a crash before that, the table is still in INIT, and its next copy replaces the files.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from subscriber import crash_points
from subscriber.abc import CopyFormat, PublishedTable, TableEntry, TableName, TableState
from subscriber.errors import TargetError, TargetUnavailable
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.catalog.lake import Lake, LakeTable, copy_directory
from subscriber.sinks.spark.copy.copied_rows import store_copy
from subscriber.sinks.spark.copy.copy_document import TableCopy, write_copy
from subscriber.sinks.spark.files.file_lock import FileLock
from subscriber.sinks.spark.landing.manifest import LandedFile
from subscriber.sinks.spark.schema.table_schema import TableSchema
from subscriber.threads import run_in_thread

__all__ = ["SparkTableGroup"]


@dataclass(frozen=True, slots=True)
class _Copied:
    """A table whose rows wait for :meth:`SparkTableGroup.finish`: as it will be in the catalog, with its file."""

    name: TableName
    before: LakeTable
    after: LakeTable
    schema: TableSchema
    file: LandedFile
    started: float


class SparkTableGroup:
    """A :class:`subscriber.abc.TableGroup`.

    Args:
        lake: the lake.
        lock: the writer's lock, which is held until :meth:`close`.
        catalog: serializes changes of the catalog.
        is_current: whether the sink is still open.
    """

    def __init__(self, lake: Lake, lock: FileLock, catalog: asyncio.Lock, is_current: Callable[[], bool]) -> None:
        self._lake = lake
        self._lock = lock
        self._catalog = catalog
        self._is_current = is_current
        self._locked = False
        self._copied: _Copied | None = None

    @property
    def usable(self) -> bool:
        return self._locked and self._lake.is_certain and self._is_current()

    async def begin(self, tables: Sequence[TableName]) -> Mapping[TableName, int]:
        self._lock.take()
        self._locked = True
        known = self._lake.state.tables
        return {name: known[name].id for name in tables if name in known and known[name].entry.state is TableState.INIT}

    async def copy(self, table: PublishedTable, copy_format: CopyFormat, data: AsyncIterator[bytes]) -> None:
        storage, started = self._lake.storage, time.time()
        before = self._lake.table(table.name)
        after = replace(before, generation=before.generation + 1, position=None)
        schema, directory = TableSchema.of_published(table), copy_directory(after)
        await run_in_thread(lambda: storage.make_directory(directory))
        path = f"{directory}/part-00000.parquet"
        file = await store_copy(storage, path, before.id, schema, columns=table.columns, copy_format=copy_format, data=data)
        self._copied = _Copied(table.name, before, after, schema, file, started)

    async def finish(self, lsn: Lsn) -> None:
        copied, self._copied = self._copied, None
        if copied is None:
            raise TargetError("no table was copied that could be finished")
        storage, directory = self._lake.storage, copy_directory(copied.after)
        copy = TableCopy(lsn, copied.schema, (copied.file,), started=copied.started)
        await run_in_thread(lambda: write_copy(storage, directory, copy))
        crash_points.reached("landing.copy_stored")
        after = replace(copied.after, entry=TableEntry(TableState.SYNCDONE, lsn))
        async with self._catalog:
            if not self.usable:
                # the catalog could not be written for a table of another group, for example
                raise TargetUnavailable(f'the copy of table "{copied.name}" was not finished')
            if self._lake.state.tables.get(copied.name) != copied.before:
                raise TargetError(f'table "{copied.name}" is not in state INIT any more')
            await run_in_thread(lambda: self._lake.change(tables={**self._lake.state.tables, copied.name: after}))

    async def roll_back(self) -> None:
        """Forget the table's rows. Idempotent."""
        self._copied = None

    async def close(self) -> None:
        self._copied = None
        if self._locked:
            self._locked = False
            self._lock.give_back()
