"""The rows of one version of a Delta table, file by file, as it is in a snapshot. Deletion vectors and column mapping are applied."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable
from pyroaring import BitMap

from subscriber.errors import TargetError
from subscriber.sinks.spark.catalog.snapshots import SnapshotTable
from subscriber.sinks.spark.files.file_errors import arrow_errors
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.merge.parquet import conformed
from subscriber.sinks.spark.tables.deletion_vectors import DeletionVector, read_vector
from subscriber.sinks.spark.tables.delta_reader import DeltaReader
from subscriber.sinks.spark.tables.lake_columns import lake_schema
from subscriber.sinks.spark.tables.table_features import PHYSICAL_NAME
from subscriber.sinks.spark.tables.table_log import TableFile

__all__ = ["PinnedTable", "with_held_values"]


class PinnedTable:
    """A table in a snapshot."""

    def __init__(self, storage: Storage, table: SnapshotTable) -> None:
        self._storage = storage
        self._delta = DeltaReader(storage, table.path)
        self._table = table
        self._opened: DeltaTable | None = None
        self.uri = self._delta.uri

    def open(self) -> DeltaTable:
        """The table as of its version."""
        if self._opened is None:
            try:
                self._opened = self._delta.at(self._table.version)
            except TargetError as error:
                raise TargetError(
                    f"Delta table {self.uri} has no version {self._table.version} any more",
                    hint="its log was removed; read a newer snapshot",
                ) from error
            # after the log: it is written before a log begins again
            begins = self._delta.begins()
            if begins is not None and self._table.applied < begins:
                self._opened = None
                raise TargetError(
                    f"Delta table {self.uri} was removed or damaged, and began again at {begins}", hint="read a newer snapshot"
                )
        return self._opened

    @property
    def schema(self) -> pa.Schema:
        """The columns, in the lake's Arrow types."""
        return lake_schema(self.open())

    def physical(self) -> dict[str, str]:
        """The names of columns in the files, where they have another name there."""
        stored = {field.name: str(field.metadata.get(PHYSICAL_NAME, field.name)) for field in self.open().schema().fields}
        return {name: physical for name, physical in stored.items() if name != physical}

    def files(self) -> list[TableFile]:
        """The files of the table."""
        self.open()
        return [*self._delta.files_at(self._table.version).values()]

    def deleted(self, vector: DeletionVector) -> BitMap:
        """The positions of the rows that a vector deletes."""
        return read_vector(self._storage, self._delta.directory, vector)

    def read(self, path: str, vector: DeletionVector | None, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Read the rows of a file, with these columns."""
        deleted = self.deleted(vector) if vector is not None else None
        path, names, start = f"{self._delta.directory}/{path}", {new: old for old, new in self.physical().items()}, 0
        with arrow_errors(self._storage.what(path)), self._storage.parquet(path) as opened:
            for batch in opened.iter_batches():
                rows = pa.Table.from_batches([batch.rename_columns([names.get(name, name) for name in batch.schema.names])])
                end = start + batch.num_rows
                if deleted is not None and deleted.range_cardinality(start, end):
                    rows = rows.filter(pa.array([row not in deleted for row in range(start, end)], pa.bool_()))
                start = end
                with arrow_errors(self._storage.what(path)):  # not an error of the file
                    found = conformed(rows, schema).combine_chunks().to_batches()
                yield from found


def with_held_values(row: tuple[Any, ...], fields: Sequence[str]) -> list[Any]:
    """A row without its last value, which is ``_special``: the values that its columns cannot hold are texts."""
    *values, special = row
    if not special:
        return values
    held = json.loads(special)
    return [held.get(field, value) for field, value in zip(fields, values, strict=False)]
