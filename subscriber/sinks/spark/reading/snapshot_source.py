"""``spark.read.format("postgres_snapshot")``: a table of a lake as of one published snapshot.

=================  =======================  ===========================================================================
option             value or default
=================  =======================  ===========================================================================
``path``           the lake                 the subscription's target, or its directory
``table``          ``schema.table``
``asOfLsn``        the newest snapshot      the last snapshot at or before an LSN
``asOfTimestamp``  the newest snapshot      the last snapshot that was published at or before a time (ISO 8601)
=================  =======================  ===========================================================================

A DataFrame has the snapshot that was found when it was loaded, each time it is used. Load the DataFrames that you join with the same
``asOfLsn``, because a snapshot may be published between two loads. :func:`subscriber.spark.snapshot` does that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.reading.options import arrow_schema, table_options
from subscriber.sinks.spark.reading.snapshot import find_snapshot, find_table
from subscriber.sinks.spark.reading.table_files import PinnedTable
from subscriber.sinks.spark.tables.deletion_vectors import DeletionVector

__all__ = ["PostgresSnapshot"]

_OPTIONS = ("path", "table", "asOfLsn", "asOfTimestamp")


class PostgresSnapshot(DataSource):
    """The data source, see the module. Spark makes one object for a DataFrame, and asks it for the schema first."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self._found: tuple[str, int, Lsn | None] | None = None
        """Directory, version and LSN of the table. They stay as they were first found."""

    @classmethod
    def name(cls) -> str:
        return "postgres_snapshot"

    def _table(self) -> PinnedTable:
        path, table = table_options(self.name(), self.options, _OPTIONS)
        storage = Storage.open(Location.of(path))
        if self._found is None:
            found = find_snapshot(storage, self.options.get("asOfLsn"), self.options.get("asOfTimestamp"))
            where = find_table(found, str(table))
            self._found = where.path, where.version, where.applied
        return PinnedTable(storage, *self._found)

    def schema(self) -> StructType:
        """The columns of the table in the snapshot."""
        return from_arrow_schema(self._table().schema, prefer_timestamp_ntz=True)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Reads the version that :meth:`schema` found."""
        path, _ = table_options(self.name(), self.options, _OPTIONS)
        self._table()
        assert self._found is not None
        return _Reader(path, *self._found, arrow_schema(schema))


@dataclass
class _Partition(InputPartition):
    path: str
    vector: DeletionVector | None


class _Reader(DataSourceReader):
    def __init__(self, path: str, directory: str, version: int, applied: Lsn | None, schema: pa.Schema) -> None:
        self._place = path, directory, version, applied
        self._schema = schema

    def _table(self) -> PinnedTable:
        path, directory, version, applied = self._place
        return PinnedTable(Storage.open(Location.of(path)), directory, version, applied)

    def partitions(self) -> Sequence[InputPartition]:
        return [_Partition(file.path, file.vector) for file in self._table().files()]

    def read(self, partition: InputPartition | None) -> Iterator[Any]:
        if partition is None:
            # pyspark does this for a list without partitions
            return iter(())
        assert isinstance(partition, _Partition)
        return self._table().read(partition.path, partition.vector, self._schema)
