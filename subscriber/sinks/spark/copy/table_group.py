"""Several tables that are copied through one session of the publisher: each goes from INIT straight to SYNCDONE.

A table's rows are in the directory of a new copy. The catalog has the copy's generation before the first row is copied, so no two copies
have the same one, even if an error hides that SYNCDONE was stored and the applier has read it. Before SYNCDONE nothing reads the directory.

The catalog is one document with all tables. It is written once for many tables, or it would take longer than the copies.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from subscriber import crash_points
from subscriber.errors import TargetError, TargetUnavailable
from subscriber.interfaces import CopyFormat, PublishedTable, TableEntry, TableName, TableState
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.catalog.lake import Lake, LakeState, LakeTable, copy_directory, with_tables
from subscriber.sinks.spark.copy.copied_rows import TableCopy, store_copy, write_copy
from subscriber.sinks.spark.files.file_lock import FileLock
from subscriber.sinks.spark.landing.manifest import LandedFile
from subscriber.sinks.spark.schema.table_schema import TableSchema, published_columns
from subscriber.threads import run_in_thread

__all__ = ["SparkTableGroup"]

_AT_ONCE: Final = 50
"""The apply worker waits while their states are stored. And a table that changes meanwhile must be copied alone."""


@dataclass(frozen=True, slots=True)
class _Copied:
    """A table whose rows wait for :meth:`SparkTableGroup.finish`: as it is in the catalog, with its file."""

    begun: LakeTable
    schema: TableSchema
    columns: tuple[tuple[str, int, int], ...]
    file: LandedFile
    started: float


class SparkTableGroup:
    """A :class:`subscriber.interfaces.TableGroup`. It holds the writer's lock until :meth:`close`."""

    def __init__(self, lake: Lake, lock: FileLock, catalog: asyncio.Lock, is_current: Callable[[], bool]) -> None:
        self.at_once = _AT_ONCE
        self._lake = lake
        self._lock = lock
        self._catalog = catalog
        self._is_current = is_current
        self._locked = False
        self._is_uncertain = False
        self._copied: dict[TableName, _Copied] = {}

    @property
    def usable(self) -> bool:
        return self._locked and not self._is_uncertain and self._is_current()

    async def begin(self, tables: Sequence[TableName]) -> Mapping[TableName, int]:
        self._lock.take()
        self._locked = True
        begun: dict[TableName, LakeTable] = {}

        def begin(state: LakeState) -> LakeState:
            known = {name: state.tables[name] for name in tables if name in state.tables}
            begun.update(
                {
                    name: replace(table, generation=table.generation + 1)
                    for name, table in known.items()
                    if table.entry.state is TableState.INIT
                }
            )
            return with_tables(state, begun)

        async with self._catalog:
            if not self.usable:
                raise TargetUnavailable("the lake was closed", hint="it is retried")
            await run_in_thread(lambda: self._lake.change(begin))
        return {name: table.id for name, table in begun.items()}

    async def copy(self, table: PublishedTable, copy_format: CopyFormat, data: AsyncIterator[bytes]) -> None:
        storage, started = self._lake.storage, time.time()
        begun = self._lake.table(table.name)
        schema, directory = TableSchema.of_published(table), copy_directory(begun)
        await run_in_thread(lambda: storage.make_directory(directory))
        path = f"{directory}/part-00000.parquet"
        file = await store_copy(storage, path, begun.id, schema, columns=table.columns, copy_format=copy_format, data=data)
        self._copied[table.name] = _Copied(begun, schema, published_columns(table), file, started)

    async def finish(self, tables: Mapping[TableName, Lsn]) -> None:
        copied = {name: self._copied.pop(name) for name in tables}

        def store() -> None:
            for name, each in copied.items():
                copy = TableCopy(tables[name], each.schema, (each.file,), each.started)
                write_copy(self._lake.storage, copy_directory(each.begun), copy)

        await run_in_thread(store)
        crash_points.reached("landing.copy_stored")

        def finish(state: LakeState) -> LakeState:
            for name, each in copied.items():
                if state.tables.get(name) != each.begun:
                    raise TargetError(f'table "{name}" is not in state INIT any more')
            done = {
                name: replace(each.begun, entry=TableEntry(TableState.SYNCDONE, tables[name]), columns=each.columns)
                for name, each in copied.items()
            }
            return with_tables(state, done)

        async with self._catalog:
            if not self.usable:
                raise TargetUnavailable("the lake was closed", hint="it is retried")
            try:
                await run_in_thread(lambda: self._lake.change(finish))
            finally:
                self._is_uncertain = not self._lake.is_certain

    async def roll_back(self, table: TableName) -> None:
        """Forget the table's rows. Idempotent."""
        self._copied.pop(table, None)

    async def close(self) -> None:
        self._copied.clear()
        if self._locked:
            self._locked = False
            self._lock.give_back()
