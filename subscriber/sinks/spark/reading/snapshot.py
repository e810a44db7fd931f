"""Reads a lake with Spark: DataFrames of one published snapshot, with the Delta jar or without it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from subscriber.errors import ConfigurationError, TargetError
from subscriber.interfaces import TableName
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.catalog.snapshots import Snapshot, Snapshots, SnapshotTable
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.reading.parquet_files import lake_files
from subscriber.sinks.spark.reading.table_files import PinnedTable
from subscriber.sinks.spark.session.object_stores import hadoop_uri
from subscriber.sinks.spark.session.spark_session import has_delta

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["LakeSnapshot", "find_snapshot", "find_table", "snapshot"]


def find_snapshot(storage: Storage, as_of_lsn: Lsn | str | None = None, as_of_timestamp: datetime | str | None = None) -> Snapshot:
    """The newest published snapshot, or the last one at or before an LSN or a time. Raises as :func:`snapshot`."""
    if as_of_lsn is not None and as_of_timestamp is not None:
        raise ConfigurationError("a snapshot is as of an LSN or as of a time, not both", hint="omit one of them")
    snapshots, when = Snapshots(storage), ""
    if as_of_lsn is not None:
        lsn = as_of_lsn if isinstance(as_of_lsn, Lsn) else _parsed_lsn(as_of_lsn)
        found, when = snapshots.last(lambda one: one.lsn <= lsn), f" at or before {lsn}"
    elif as_of_timestamp is not None:
        time = as_of_timestamp if isinstance(as_of_timestamp, datetime) else _parsed_time(as_of_timestamp)
        time = time if time.tzinfo is not None else time.replace(tzinfo=UTC)
        found, when = snapshots.last(lambda one: one.published <= time), f" at or before {time.isoformat()}"
    else:
        found = snapshots.newest()
    if found is None:
        hint = "start the applier: subscriber spark-apply" if not when else "read a later one: earlier ones are no longer stored"
        raise TargetError(f"the lake in {storage.place} has no published snapshot{when}", hint=hint)
    return found


def _parsed_lsn(text: str) -> Lsn:
    try:
        return Lsn.parse(text)
    except ValueError as error:
        raise ConfigurationError(str(error), hint="as in 16/B374D848") from None


def _parsed_time(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise ConfigurationError("the time is not in the form of ISO 8601", hint="as in 2026-11-24T10:00:00Z") from None


def find_table(found: Snapshot, table: str) -> SnapshotTable:
    """A table in a snapshot, by ``schema.table``. If the snapshot does not have it, raise TargetError."""
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
    return where


def snapshot(
    spark: SparkSession, target: str, *, as_of_lsn: Lsn | str | None = None, as_of_timestamp: datetime | str | None = None
) -> LakeSnapshot:
    """Open a published snapshot of a lake: the newest one, or the last one at or before an LSN or a time.

    Args:
        spark: a session that can access the lake.
        target: the subscription's target, or the lake's directory.
        as_of_lsn: an LSN, as text in the form of ``pg_lsn`` or as an object.
        as_of_timestamp: when the snapshot was published, at the latest; a text is in the form of ISO 8601, in UTC if it has no time zone.

    Raises:
        ConfigurationError: an argument is invalid.
        TargetError: there is no such snapshot.
    """
    return LakeSnapshot(spark, target, find_snapshot(Storage.open(Location.of(target)), as_of_lsn, as_of_timestamp))


class LakeSnapshot:
    """A published snapshot: all tables as of one LSN. DataFrames of one object can be joined: they show the same transactions.

    Made by :func:`snapshot`.
    """

    def __init__(self, spark: SparkSession, target: str, found: Snapshot) -> None:
        self._spark = spark
        self._target = target
        self._found = found

    @property
    def lsn(self) -> Lsn:
        """All transactions that ended up to here are in the tables. As ``asOfLsn``, it gives the same rows."""
        return self._found.lsn

    @property
    def published(self) -> datetime | None:
        """When the snapshot was published."""
        return self._found.published

    @property
    def tables(self) -> list[str]:
        """The tables in the snapshot, as ``schema.table``."""
        return sorted(map(str, self._found.tables))

    def table(self, name: str) -> DataFrame:
        """The rows of a table, ``schema.table``.

        Raises:
            TargetError: the snapshot does not have the table, or its version is no longer stored.
        """
        where = find_table(self._found, name)
        pinned = PinnedTable(Storage.open(Location.of(self._target)), where)
        opened = pinned.open()
        if has_delta(self._spark):
            return self._spark.read.format("delta").option("versionAsOf", where.version).load(hadoop_uri(pinned.uri))
        return lake_files(self._spark, pinned, json.loads(opened.schema().to_json()))
