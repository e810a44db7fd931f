"""The data sources ``postgres_changes`` and ``postgres_snapshot`` of Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_type
from pyspark.sql.types import StructType

from subscriber.errors import ConfigurationError
from subscriber.interfaces import TableName
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.sinks.spark.catalog.snapshots import SnapshotTable
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.reading.change_feed import Changes
from subscriber.sinks.spark.reading.snapshot import find_snapshot, find_table
from subscriber.sinks.spark.reading.table_files import PinnedTable
from subscriber.sinks.spark.tables.deletion_vectors import DeletionVector

__all__ = ["PostgresChanges", "PostgresSnapshot"]

_CHANGES_OPTIONS = ("path", "table", "startingLsn", "endingLsn")
_SNAPSHOT_OPTIONS = ("path", "table", "asOfLsn", "asOfTimestamp")
_Place = tuple[str, SnapshotTable]
"""The lake, and the table in its snapshot."""


class PostgresChanges(DataSource):
    """``spark.readStream.format("postgres_changes")``: the changes of a table of a lake as a source of Structured Streaming, or of a batch.

    Offsets are LSNs: ``{"lsn": "16/B374D848"}`` includes all transactions that end there or before. A query that restarts from its
    checkpoint resumes after that LSN, whether its changes are in the landing zone or already in the change log. ``docs/howto/lake-read.md``
    lists the options.
    """

    @classmethod
    def name(cls) -> str:
        return "postgres_changes"

    def schema(self) -> StructType:
        """The current schema of the changes. A query keeps it until it restarts."""
        return from_arrow_schema(self._changes().schema(), prefer_timestamp_ntz=True)

    def reader(self, schema: StructType) -> DataSourceReader:
        changes = self._changes()
        start = self._start('"earliest", or an LSN as in 16/B374D848; "latest" is for streams')
        latest = changes.latest()
        end = self._lsn("endingLsn", latest, "an LSN as in 16/B374D848; without this option the end is the newest one")
        return _Reader(partial(changes.pieces, start, min(end, latest)), partial(changes.read, schema=_arrow_schema(schema)))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        if self.options.get("endingLsn") is not None:
            raise ConfigurationError("endingLsn is an option of batch queries, not of streams", hint="omit it, or use spark.read")
        changes = self._changes()
        latest = self.options.get("startingLsn", "").lower() == "latest"
        return _StreamReader(
            changes, _arrow_schema(schema), None if latest else self._start('"earliest", "latest", or an LSN as in 16/B374D848')
        )

    def _changes(self) -> Changes:
        path, table = _table_options(self.name(), self.options, _CHANGES_OPTIONS)
        return Changes(Storage.open(Location.of(path)), table)

    def _start(self, allowed: str) -> Lsn:
        earliest = self.options.get("startingLsn", "").lower() == "earliest"
        return INVALID_LSN if earliest else self._lsn("startingLsn", INVALID_LSN, allowed)

    def _lsn(self, option: str, default: Lsn, allowed: str) -> Lsn:
        text = self.options.get(option)
        if text is None:
            return default
        try:
            return Lsn.parse(text)
        except ValueError:
            # Spark shows no hint
            raise ConfigurationError(f'{option}: "{text}" is not valid: it is {allowed}', hint="as in 16/B374D848") from None


@dataclass
class _Partition(InputPartition):
    part: Any


class _Reader(DataSourceReader):
    """Reads by two functions, which find the parts of what a query reads, and read the rows of one."""

    def __init__(self, parts: Callable[[], Sequence[Any]], rows: Callable[[Any], Iterator[pa.RecordBatch]]) -> None:
        self._parts = parts
        self._rows = rows

    def partitions(self) -> Sequence[InputPartition]:
        return [_Partition(part) for part in self._parts()]

    def read(self, partition: InputPartition | None) -> Iterator[Any]:
        if partition is None:
            # pyspark does this for a list without partitions
            return iter(())
        assert isinstance(partition, _Partition)
        return self._rows(partition.part)


class _StreamReader(DataSourceStreamReader):
    """``start`` is where a new query begins. None: at the end."""

    def __init__(self, changes: Changes, schema: pa.Schema, start: Lsn | None) -> None:
        self._changes = changes
        self._schema = schema
        self._start = start

    def initialOffset(self) -> dict[str, str]:
        return {"lsn": str(self._changes.latest() if self._start is None else self._start)}

    def latestOffset(self, start: Any = None, limit: Any = None) -> dict[str, str]:
        latest = self._changes.latest()
        return {"lsn": str(latest if self._start is None else max(latest, self._start))}

    def partitions(self, start: dict[str, str], end: dict[str, str]) -> Sequence[InputPartition]:
        return [_Partition(piece) for piece in self._changes.pieces(Lsn.parse(start["lsn"]), Lsn.parse(end["lsn"]))]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, _Partition)
        return self._changes.read(partition.part, self._schema)

    def commit(self, end: dict[str, str]) -> None:
        """Do nothing: changes that were read remain where they are."""


class PostgresSnapshot(DataSource):
    """``spark.read.format("postgres_snapshot")``: a table of a lake as of one published snapshot. For options see :class:`PostgresChanges`.

    A DataFrame has the snapshot that was found when it was loaded, each time it is used. Load the DataFrames that you join with the same
    ``asOfLsn``, because a snapshot may be published between two loads. :func:`subscriber.spark.snapshot` does that.

    Spark makes one object for a DataFrame, and asks it for the schema first.
    """

    @classmethod
    def name(cls) -> str:
        return "postgres_snapshot"

    @cached_property
    def _place(self) -> _Place:
        path, table = _table_options(self.name(), self.options, _SNAPSHOT_OPTIONS)
        storage = Storage.open(Location.of(path))
        found = find_snapshot(storage, self.options.get("asOfLsn"), self.options.get("asOfTimestamp"))
        return path, find_table(found, str(table))

    def schema(self) -> StructType:
        """The columns of the table in the snapshot."""
        return from_arrow_schema(_pinned(self._place).schema, prefer_timestamp_ntz=True)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Reads the version that :meth:`schema` found."""
        return _Reader(partial(_files, self._place), partial(_rows, self._place, _arrow_schema(schema)))


def _pinned(place: _Place) -> PinnedTable:
    path, table = place
    return PinnedTable(Storage.open(Location.of(path)), table)


def _files(place: _Place) -> list[tuple[str, DeletionVector | None]]:
    return [(file.path, file.vector) for file in _pinned(place).files()]


def _rows(place: _Place, schema: pa.Schema, file: tuple[str, DeletionVector | None]) -> Iterator[pa.RecordBatch]:
    return _pinned(place).read(*file, schema)


def _table_options(source: str, options: Mapping[str, str], names: Sequence[str]) -> tuple[str, TableName]:
    """The options ``path`` and ``table``. If one is not valid, or not among those that the data source knows, raise ConfigurationError."""
    known = {name.lower() for name in names}
    for name in options:
        if name.lower() not in known:
            raise ConfigurationError(f'unrecognized option of {source}: "{name}"', hint=f"one of {', '.join(names)}")
    path, text = options.get("path"), options.get("table")
    if path is None or not text:
        raise ConfigurationError(f"{source} needs options path and table", hint='.option("table", "public.orders").load(path)')
    namespace, _, table = text.partition(".")
    if not (namespace and table):
        # Spark shows no hint
        raise ConfigurationError(f'option table of {source}: "{text}" does not have the form schema.table', hint="as in public.orders")
    return path, TableName(namespace, table)


def _arrow_schema(schema: StructType) -> pa.Schema:
    """The Arrow types in which Spark takes rows."""
    return pa.schema([pa.field(field.name, to_arrow_type(field.dataType, timestamp_utc=True)) for field in schema.fields])
