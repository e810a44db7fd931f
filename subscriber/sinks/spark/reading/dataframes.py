"""Reads a lake with Spark: DataFrames of one published snapshot, with the Delta jar or without it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from subscriber.abc import TableName
from subscriber.errors import ConfigurationError, TargetError
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.catalog.snapshots import Snapshot, Snapshots, read_snapshot
from subscriber.sinks.spark.files.location import Location, escape_glob
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.schema.table_schema import SPECIAL
from subscriber.sinks.spark.session.spark_session import has_delta
from subscriber.sinks.spark.tables.delta import LakeDelta

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["SnapshotRows", "read_table", "snapshot_of"]


def snapshot_of(target: str, as_of_lsn: Lsn | str | None = None) -> Snapshot:
    """The newest published snapshot, or the last one at or before an LSN.

    Args:
        target: the subscription's target, or the lake's directory.
        as_of_lsn: an LSN, as text in the form of ``pg_lsn`` or as an object.

    Raises:
        ConfigurationError: the URL or the LSN is invalid.
        TargetError: there is no such snapshot.
    """
    storage = Storage.open(Location.of(target))
    if as_of_lsn is None:
        found = read_snapshot(storage)
    else:
        try:
            lsn = as_of_lsn if isinstance(as_of_lsn, Lsn) else Lsn.parse(as_of_lsn)
        except ValueError as error:
            raise ConfigurationError(str(error), hint="as in 16/B374D848") from None
        found = Snapshots(storage).as_of_lsn(lsn)
    if found is None:
        when = "" if as_of_lsn is None else f" at or before {as_of_lsn}"
        raise TargetError(f"the lake in {storage.place} has no published snapshot{when}", hint="start the applier: subscriber spark-apply")
    return found


def read_table(
    spark: SparkSession, target: str, table: str, as_of_lsn: Lsn | str | None = None, *, snapshot: Snapshot | None = None
) -> DataFrame:
    """A table's rows as of a snapshot.

    Args:
        spark: a session that can access the lake.
        target: the subscription's target, or the lake's directory.
        table: ``schema.table``.
        as_of_lsn: see :func:`snapshot_of`.
        snapshot: a result of :func:`snapshot_of`, to read several tables at one moment.

    Raises:
        ConfigurationError: the URL or the LSN is invalid.
        TargetError: the snapshot does not exist, or does not have the table.
    """
    found = snapshot if snapshot is not None else snapshot_of(target, as_of_lsn)
    namespace, dot, name = table.partition(".")
    where = found.tables.get(TableName(namespace, name)) if dot else None
    stop = found.stopped.get(TableName(namespace, name))
    if stop is not None:
        raise TargetError(
            f'table "{table}" is not in the snapshot at {found.lsn}: {stop.error}', hint="read a snapshot from before that, with as_of_lsn"
        )
    if where is None:
        raise TargetError(
            f'table "{table}" is not in the snapshot at {found.lsn}',
            hint="check that the name has the form schema.table, and that the table is part of the subscription and synchronized",
        )
    delta = LakeDelta(Storage.open(Location.of(target)), where.path)
    try:
        opened = DeltaTable(delta.uri, version=where.version)
    except DeltaError as error:
        raise TargetError(
            f'table "{table}" has no version {where.version} any more', hint="its log was removed; read a newer snapshot"
        ) from error
    if has_delta(spark):
        return spark.read.format("delta").option("versionAsOf", where.version).load(delta.uri)
    from pyspark.sql.types import StructType  # noqa: PLC0415 -- an extra

    schema = StructType.fromJson(json.loads(opened.schema().to_json()))
    # not the paths from Delta's library, which are URL-encoded
    files = [escape_glob(f"{delta.uri}/{path}") for path in delta.files_at(where.version)]
    # independent of the calendar that the session assumes for files without Spark's mark
    reader = spark.read.schema(schema)
    return reader.parquet(*files, datetimeRebaseMode="CORRECTED") if files else spark.createDataFrame([], schema)


_ROWS: Final = 10_000
_VIEW: Final = "subscriber_snapshot"


class SnapshotRows:
    """Rows of the tables of one snapshot, for comparing a lake with its publisher. All methods block.

    Args:
        spark: a session that can access the lake.
        target: the subscription's target.
        snapshot: the snapshot.
    """

    def __init__(self, spark: SparkSession, target: str, snapshot: Snapshot) -> None:
        self._spark = spark
        self._target = target
        self._snapshot = snapshot

    def columns(self, table: TableName) -> list[str]:
        """The columns of a table. Empty if the snapshot has no such table."""
        if table not in self._snapshot.tables:
            return []
        return list(read_table(self._spark, self._target, str(table), snapshot=self._snapshot).columns)

    def batches(self, table: TableName, columns: Sequence[str]) -> Iterator[list[list[Any]]]:
        """All rows, in batches. A value that its column cannot hold is given as text."""
        read_table(self._spark, self._target, str(table), snapshot=self._snapshot).createOrReplaceTempView(_VIEW)
        names = ", ".join(f"`{name.replace('`', '``')}`" for name in [*columns, SPECIAL])
        query = f"SELECT {names} FROM {_VIEW}"  # noqa: S608 -- names, quoted
        for batch in self._spark.sql(query).toArrow().to_batches(max_chunksize=_ROWS):
            yield [_row(row, columns) for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)]


def _row(row: tuple[Any, ...], columns: Sequence[str]) -> list[Any]:
    *values, special = row
    if not special:
        return values
    kept = json.loads(special)
    return [kept.get(column, value) for column, value in zip(columns, values, strict=True)]
