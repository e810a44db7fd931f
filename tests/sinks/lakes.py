"""The lake as a target of the compliance suite: landed by its sink, applied by an engine, read by delta-rs at the snapshot."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from subscriber.config import Settings, SubscriptionOptions
from subscriber.interfaces import Sink, TableName
from subscriber.sinks.spark.catalog.lake import Lake
from subscriber.sinks.spark.catalog.snapshots import read_snapshot
from subscriber.sinks.spark.files.location import Location, table_directory
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.pipeline.applier import Applier, ApplierSettings
from subscriber.sinks.spark.pipeline.engines.engine import Engine
from subscriber.sinks.spark.schema.table_schema import TableSchema
from subscriber.sinks.spark.sink import SparkSink
from subscriber.sinks.spark.tables.column_mapping import resolve_fields
from subscriber.testing.compliance import Row, Table, Traits
from tests.support.delta_tables import delta_rows

__all__ = ["LakeTarget"]


class LakeTarget:
    """A directory, and an applier that works whenever the lake is read.

    Args:
        path: empty, or not there.
        engine: makes the engine for a lake.
    """

    traits = Traits(
        given_tables=False,
        constraints=False,
        shared_tables=False,
        several_subscriptions=False,
        binary=False,
        counts_missing=False,
        copies_visible=False,
    )

    def __init__(self, path: Path, engine: Callable[[Storage], Engine]) -> None:
        self._path = path
        self._storage = Storage.open(Location(path=str(path)))
        # a few rows a file, so that tables have several
        self._applier = Applier(self._storage, engine(self._storage), ApplierSettings(target_rows=400, log_files=5))

    def new_sink(self) -> Sink:
        return SparkSink(f"spark://{self._path}?batch_delay=0&on_schema_gap=null", options=SubscriptionOptions(), settings=Settings())

    async def create_table(self, table: Table) -> None:
        """A lake makes its tables itself."""

    async def rows(self, table: Table) -> list[Row]:
        return await asyncio.to_thread(self._rows, table)

    def _rows(self, table: Table) -> list[Row]:
        while self._applier.run_round() is not None:
            self._applier.tidy()
        snapshot = read_snapshot(self._storage)
        lake = Lake.find(self._storage)
        assert snapshot is not None
        assert lake is not None
        if (found := snapshot.tables.get(table.name)) is not None:
            opened = DeltaTable(str(self._path / found.path), version=found.version)
        elif (directory := self._left(lake, table.name)) is not None:
            opened = DeltaTable(str(directory))
        else:
            return []
        [known] = resolve_fields([field.name for field in opened.schema().fields], [TableSchema.of_published(table.published)])
        fields = {column.name: column.field for column in known.columns}
        names = [fields.get(column.name, column.name) for column in table.columns]
        return [_row(item, names) for item in delta_rows(opened)]

    def _left(self, lake: Lake, name: TableName) -> Path | None:
        """A table that is not of the snapshot has the rows that it had."""
        known = lake.state.removed.get(name)
        if known is None or known.until is None:
            return None
        directory = self._path / table_directory("tables", name, known.id)
        return directory if directory.exists() else None

    async def insert(self, table: Table, rows: Sequence[Row]) -> None:
        raise NotImplementedError("the capability is not declared")

    async def clear(self, table: Table) -> None:
        raise NotImplementedError("the capability is not declared")


def _row(item: dict[str, Any], names: Sequence[str]) -> Row:
    special = json.loads(item["_special"] or "{}")
    return tuple(special.get(name, item.get(name)) for name in names)
