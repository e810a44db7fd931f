"""What a target knows of its subscriptions, for whoever may look. Changes nothing, makes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import Table, inspect, select
from sqlalchemy.ext.asyncio import AsyncConnection

from subscriber.abc import TableName, WorkerActivity, WorkerDetails
from subscriber.catalog import Definition, Observation, TableObservation
from subscriber.errors import TargetError
from subscriber.sinks.sqlalchemy.catalog import definition
from subscriber.sinks.sqlalchemy.catalog_types import Unknown
from subscriber.sinks.sqlalchemy.engine import Database
from subscriber.sinks.sqlalchemy.integrity import known_table_entry, understood_row
from subscriber.sinks.sqlalchemy.locks import Locks, writer_key
from subscriber.sinks.sqlalchemy.tables import COUNTERS, VERSION, CatalogTables

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
    running = await _running(database, [row["oid"] for row in subscriptions if not isinstance(row["oid"], Unknown)])
    return [
        _observation(
            tables,
            definition(tables, row, positions.get(row["oid"]), claimed=False),
            {relid: worker for (oid, relid), worker in workers.items() if oid == row["oid"] and oid in running},
            [entry for entry in entries if entry["srsubid"] == row["oid"]],
            stats.get(row["oid"], {}),
            details=workers.get((row["oid"], 0), {}).get("details"),
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


def _observation(
    tables: CatalogTables, defined: Definition, workers: Mapping[int, Row], entries: Sequence[Row], stats: Row, *, details: str | None
) -> Observation:
    apply = workers.get(0)
    # what workers tell is written anew within a second; counters stay
    stats, error = understood_row(tables.subscription_stats, stats)
    if error is not None:
        defined = replace(defined, problem=defined.problem or str(error), remedy=defined.remedy or error.hint)
    known = list[TableObservation]()
    for entry in entries:
        try:
            known.append(_table(tables.pg_subscription_rel, entry, workers.get(entry["srrelid"])))
        except TargetError as error:
            defined = replace(defined, problem=defined.problem or str(error), remedy=defined.remedy or error.hint)
    return Observation(
        definition=defined,
        pid=_told(apply["pid"]) if apply else None,
        worker=_activity(apply, None) if apply else None,
        tables=tuple(sorted(known, key=lambda found: found.table)),
        counters={name: stats[name] for name in COUNTERS if name in stats},
        stats_reset=_time(stats.get("stats_reset")),
        last_error=stats.get("last_error"),
        last_error_time=_time(stats.get("last_error_time")),
        details=WorkerDetails.from_json(details),
        by_command_line=defined.conninfo is None,
    )


def _table(table: Table, row: Row, worker: Row | None) -> TableObservation:
    name = TableName(row["srnspname"], row["srrelname"])
    entry = known_table_entry(table, row["srsubstate"], row["srsublsn"])
    _, error = understood_row(table, row)
    if error is not None:
        raise error
    return TableObservation(
        table=name,
        entry=entry,
        worker=_activity(worker, name) if worker else None,
        retry=WorkerDetails.from_json(worker["details"]).retry if worker else None,
    )


def _activity(row: Row, table: TableName | None) -> WorkerActivity:
    return WorkerActivity(
        table=table,
        received=_told(row["received_lsn"]),
        latest_end=_told(row["latest_end_lsn"]),
        sent_at=_told(row["last_msg_send_time"]),
        received_at=_told(row["last_msg_receipt_time"]),
        reported_at=_told(row["latest_end_time"]),
        applied=_told(row["applied_lsn"]),
        flushed=_told(row["flushed_lsn"]),
        transactions=_told(row["transactions"]) or 0,
        changes=_told(row["changes"]) or 0,
        transactions_per_second=_told(row["transactions_per_second"]) or 0.0,
        changes_per_second=_told(row["changes_per_second"]) or 0.0,
        copied_rows=_told(row["copied_rows"]) or 0,
        estimated_rows=_told(row["estimated_rows"]),
        details=row["details"],
    )


def _told(value: Any) -> Any:
    # what is senseless here is written anew within a second
    return None if isinstance(value, Unknown) else value


def _time(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
