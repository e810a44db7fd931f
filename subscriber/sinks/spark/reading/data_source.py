"""``spark.readStream.format("postgres_changes")``: the changes of one table of a lake as a source of Structured Streaming, or of a batch.

Offsets are LSNs: ``{"lsn": "16/B374D848"}`` includes all transactions that end there or before. A query that restarts from its checkpoint
resumes after that LSN, whether its changes are in the landing zone or already in the change log.

================  =====================  =============================================================================
option            value or default
================  =====================  =============================================================================
``path``          the lake               the subscription's target, or its directory
``table``         ``schema.table``
``startingLsn``   ``earliest``           an LSN: transactions that end after it; ``earliest``: from the initial copy;
                                         ``latest``: changes from now on (streams only)
``endingLsn``     the newest LSN         for a batch: transactions up to this LSN
================  =====================  =============================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from subscriber.errors import ConfigurationError
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.reading.change_feed import Changes, Piece
from subscriber.sinks.spark.reading.options import arrow_schema, table_options

__all__ = ["PostgresChanges"]

_OPTIONS = ("path", "table", "startingLsn", "endingLsn")


class PostgresChanges(DataSource):
    """The data source, see the module."""

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
        return _BatchReader(changes, arrow_schema(schema), start, min(end, latest))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        if self.options.get("endingLsn") is not None:
            raise ConfigurationError("endingLsn is an option of batch queries, not of streams", hint="omit it, or use spark.read")
        changes = self._changes()
        latest = self.options.get("startingLsn", "").lower() == "latest"
        return _StreamReader(
            changes, arrow_schema(schema), None if latest else self._start('"earliest", "latest", or an LSN as in 16/B374D848')
        )

    def _changes(self) -> Changes:
        path, table = table_options(self.name(), self.options, _OPTIONS)
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
    piece: Piece


class _BatchReader(DataSourceReader):
    def __init__(self, changes: Changes, schema: pa.Schema, start: Lsn, end: Lsn) -> None:
        self._changes = changes
        self._schema = schema
        self._start = start
        self._end = end

    def partitions(self) -> Sequence[InputPartition]:
        return [_Partition(piece) for piece in self._changes.pieces(self._start, self._end)]

    def read(self, partition: InputPartition | None) -> Iterator[Any]:
        if partition is None:
            # pyspark does this for a list without partitions
            return iter(())
        assert isinstance(partition, _Partition)
        return self._changes.read(partition.piece, self._schema)


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
        return self._changes.read(partition.piece, self._schema)

    def commit(self, end: dict[str, str]) -> None:
        """Do nothing: changes that were read remain where they are."""
