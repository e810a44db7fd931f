"""What a target knows of its subscriptions, for whoever may look. Changes nothing, makes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import Table, inspect, select
from sqlalchemy.ext.asyncio import AsyncConnection

from subscriber.abc import TableName, WorkerActivity
from subscriber.catalog import Definition, Observation, TableObservation
from subscriber.errors import TargetError
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.sqlalchemy.catalog import definition
from subscriber.sinks.sqlalchemy.engine import Database
from subscriber.sinks.sqlalchemy.integrity import known_table_entry
from subscriber.sinks.sqlalchemy.locks import Locks, writer_key
from subscriber.sinks.sqlalchemy.tables import COUNTERS, VERSION, CatalogTables, Unknown

__all__ = ["observe"]

_APPLICATION: Final = "subscriber status"

Row = Mapping[str, Any]


async def observe(target: str) -> Sequence[Observation]:
    """Everything, by name; nothing if there is no catalog.

    Raises:
        ConfigurationError: the target's text is no URL of SQLAlchemy's, or its driver is not installed.
        TargetUnavailable: it cannot be reached.
        TargetError: no such file, no privilege, or a catalog that is not this program's.
    """
    database = Database(target, _APPLICATION, create=False)
    try:
        return await _observe(database)
    finally:
        await database.close()


async def _observe(database: Database) -> Sequence[Observation]:
    tables = database.tables
    async with database.reading() as connection:
        if not await connection.run_sync(lambda sync: inspect(sync).has_table(tables.version.name, schema=tables.schema)):
            return []
        await _require_version(connection, tables.version)
        subscriptions = await _rows(connection, tables.pg_subscription)
        positions = {row["srsubid"]: row["remote_lsn"] for row in await _rows(connection, tables.position) if row["srrelid"] == 0}
        stats = {row["subid"]: row for row in await _rows(connection, tables.subscription_stats)}
        entries = await _rows(connection, tables.pg_subscription_rel)
        workers = {(row["subid"], row["relid"]): row for row in await _rows(connection, tables.worker)}
    running = await _running(database, [row["oid"] for row in subscriptions])
    return [
        _observation(
            tables,
            definition(tables, row, positions.get(row["oid"]), claimed=False),
            {relid: worker for (oid, relid), worker in workers.items() if oid == row["oid"] and oid in running},
            [entry for entry in entries if entry["srsubid"] == row["oid"]],
            stats.get(row["oid"], {}),
        )
        for row in sorted(subscriptions, key=lambda row: str(row["subname"]))
    ]


async def _rows(connection: AsyncConnection, table: Table) -> Sequence[Row]:
    return [dict(row) for row in (await connection.execute(select(table))).mappings()]


async def _require_version(connection: AsyncConnection, table: Table) -> None:
    version = (await connection.execute(select(table.c.version))).scalar()
    if version is None:
        raise TargetError(f'table "{table.name}" of the target is empty', hint="restore it from a backup")
    if version != VERSION:
        raise TargetError(
            f"the catalog in the target has version {version}, this program knows version {VERSION}",
            hint="run or alter a subscription with this program once, which takes it forward"
            if version < VERSION
            else "use the version of pg-subscriber that made it, or a later one",
        )


async def _running(database: Database, oids: Sequence[int]) -> frozenset[int]:
    """Whose writer's lock is held: what workers told is of worth only then."""
    locks = Locks(database)
    try:
        return frozenset([oid for oid in oids if await locks.held(writer_key(oid))])
    finally:
        await locks.close()


def _observation(tables: CatalogTables, defined: Definition, workers: Mapping[int, Row], entries: Sequence[Row], stats: Row) -> Observation:
    apply = workers.get(0)
    known = list[TableObservation]()
    for entry in entries:
        try:
            known.append(_table(tables.pg_subscription_rel, entry, workers.get(entry["srrelid"])))
        except TargetError as error:
            defined = replace(defined, problem=defined.problem or str(error), remedy=defined.remedy or error.hint)
    return Observation(
        definition=defined,
        pid=apply["pid"] if apply else None,
        worker=_activity(apply, None) if apply else None,
        tables=tuple(sorted(known, key=lambda found: found.table)),
        counters={name: stats[name] for name in COUNTERS if name in stats},
        stats_reset=_time(stats.get("stats_reset")),
        last_error=stats.get("last_error"),
        last_error_time=_time(stats.get("last_error_time")),
    )


def _table(table: Table, row: Row, worker: Row | None) -> TableObservation:
    name = TableName(row["srnspname"], row["srrelname"])
    return TableObservation(
        table=name,
        entry=known_table_entry(table, row["srsubstate"], row["srsublsn"]),
        worker=_activity(worker, name) if worker else None,
    )


def _activity(row: Row, table: TableName | None) -> WorkerActivity:
    return WorkerActivity(
        table=table,
        received=_lsn(row["received_lsn"]),
        latest_end=_lsn(row["latest_end_lsn"]),
        sent_at=row["last_msg_send_time"],
        received_at=row["last_msg_receipt_time"],
        reported_at=row["latest_end_time"],
        applied=_lsn(row["applied_lsn"]),
        flushed=_lsn(row["flushed_lsn"]),
        transactions=row["transactions"],
        changes=row["changes"],
        transactions_per_second=row["transactions_per_second"],
        changes_per_second=row["changes_per_second"],
        copied_rows=row["copied_rows"],
        estimated_rows=row["estimated_rows"],
    )


def _lsn(value: Lsn | Unknown | None) -> Lsn | None:
    # what is senseless here is written anew within a second
    return value if isinstance(value, Lsn) else None


def _time(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
