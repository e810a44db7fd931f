"""What a PostgreSQL target knows of its subscriptions, for whoever may look. Changes nothing, makes nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

import asyncpg

from subscriber.abc import TableEntry, TableName, WorkerActivity, WorkerDetails
from subscriber.catalog import Observation, TableObservation
from subscriber.errors import TargetError
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.postgres.catalog import VERSION
from subscriber.sinks.postgres.definitions import DEFINITION_COLUMNS, definition
from subscriber.sinks.postgres.integrity import catalog_version, known_table_state
from subscriber.sinks.postgres.reading import CatalogReader
from subscriber.sinks.postgres.target import Target

__all__ = ["observe"]

_APPLICATION: Final = "subscriber status"

_MAY_SEE: Final = "SELECT pg_catalog.has_column_privilege('subscriber.pg_subscription', 'subconninfo', 'SELECT') AS granted"

_SUBSCRIPTIONS: Final = f"""
SELECT {DEFINITION_COLUMNS}, p.remote_lsn::text AS position, to_jsonb(t) AS stats, t.stats_reset, t.last_error_time
FROM subscriber.pg_subscription s
LEFT JOIN subscriber."position" p ON p.srsubid = s.oid AND p.srrelid = 0
LEFT JOIN subscriber.subscription_stats t ON t.subid = s.oid
ORDER BY s.subname
"""  # noqa: S608 (constants)

_CONNINFOS: Final = "SELECT oid::int8 AS oid, subconninfo FROM subscriber.pg_subscription"

# a worker's row is of worth only while its lock is held
_WORKERS: Final = """
SELECT w.subid::int8 AS subid, w.relid::int8 AS relid, v.pid, w.received_lsn::text AS received, w.applied_lsn::text AS applied,
       w.flushed_lsn::text AS flushed, w.latest_end_lsn::text AS latest_end, w.last_msg_send_time, w.last_msg_receipt_time,
       w.latest_end_time, w.transactions, w.changes, w.transactions_per_second, w.changes_per_second, w.copied_rows, w.estimated_rows,
       w.details
FROM subscriber.worker w
JOIN subscriber.pg_stat_subscription v ON v.subid = w.subid AND coalesce(v.relid, 0) = w.relid AND v.pid IS NOT NULL
"""

# of the latest run, also when it has ended
_DETAILS: Final = "SELECT subid::int8 AS subid, relid::int8 AS relid, details FROM subscriber.worker"

_TABLES: Final = """
SELECT r.srsubid::int8 AS subid, r.srrelid::int8 AS relid, n.nspname::text AS namespace, c.relname::text AS name,
       r.srsubstate::text AS state, r.srsublsn::text AS lsn
FROM subscriber.pg_subscription_rel r
JOIN pg_catalog.pg_class c ON c.oid = r.srrelid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
ORDER BY n.nspname, c.relname
"""


async def observe(target: str) -> Sequence[Observation]:
    """Everything, by name; nothing if there is no catalog.

    Raises:
        ConfigurationError: the target's text is neither URL nor conninfo.
        TargetUnavailable: it cannot be reached.
        TargetError: no privilege, or a catalog that is not this program's.
    """
    where = Target(target)
    like = await where.connect(_APPLICATION)
    try:
        reader = CatalogReader(await where.connect_asyncpg(like, _APPLICATION))
    finally:
        await like.close()
    try:
        return await _observe(reader)
    finally:
        await reader.close()


async def _observe(reader: CatalogReader) -> Sequence[Observation]:
    version = await catalog_version(reader.connection, VERSION)
    if version is None:
        return []
    if version < VERSION:
        raise TargetError(
            f'schema "subscriber" of the target has version {version}, this program knows version {VERSION}',
            hint="run or alter a subscription with this program once, which takes it forward",
        )
    conninfos: Mapping[int, str | None] = {}
    if (await reader.fetch(_MAY_SEE))[0]["granted"]:
        conninfos = {row["oid"]: row["subconninfo"] for row in await reader.fetch(_CONNINFOS)}
    workers = {(row["subid"], row["relid"]): row for row in await reader.fetch(_WORKERS)}
    tables = await reader.fetch(_TABLES)
    details = {(row["subid"], row["relid"]): row["details"] for row in await reader.fetch(_DETAILS)}
    await _decode_json(reader.connection)
    return [
        _observation(
            row
            | {
                "subconninfo": conninfos.get(row["oid"]),
                "details": details.get((row["oid"], 0)),
                "by_command_line": row["oid"] in conninfos and conninfos[row["oid"]] is None,
            },
            workers,
            [{**table, "details": details.get((row["oid"], table["relid"]))} for table in tables if table["subid"] == row["oid"]],
        )
        for row in await reader.fetch(_SUBSCRIPTIONS)
    ]


async def _decode_json(connection: asyncpg.Connection[asyncpg.Record]) -> None:
    await connection.set_type_codec("jsonb", encoder=json.dumps, decoder=json.loads, schema="pg_catalog")


def _observation(
    row: Mapping[str, Any], workers: Mapping[tuple[int, int], Mapping[str, Any]], tables: Sequence[Mapping[str, Any]]
) -> Observation:
    oid = row["oid"]
    apply = workers.get((oid, 0))
    stats = row["stats"] or {}
    found, known = definition(row, claimed=False), list[TableObservation]()
    for table in tables:
        try:
            known.append(_table(table, workers.get((oid, table["relid"])), alive=apply is not None))
        except TargetError as error:
            found = replace(found, problem=found.problem or str(error), remedy=found.remedy or error.hint)
    return Observation(
        definition=found,
        pid=apply["pid"] if apply else None,
        worker=_activity(apply, None) if apply else None,
        tables=tuple(known),
        counters={name: value for name, value in stats.items() if name.endswith("_count") or name.startswith("confl_")},
        stats_reset=row["stats_reset"],
        last_error=stats.get("last_error"),
        last_error_time=row["last_error_time"],
        details=WorkerDetails.from_json(row["details"]),
        by_command_line=row["by_command_line"],
    )


def _table(row: Mapping[str, Any], worker: Mapping[str, Any] | None, *, alive: bool) -> TableObservation:
    name = TableName(row["namespace"], row["name"])
    return TableObservation(
        table=name,
        entry=TableEntry(known_table_state(row["state"]), _lsn(row["lsn"])),
        worker=_activity(worker, name) if worker else None,
        # between two attempts the synchronization has no session
        retry=WorkerDetails.from_json(row["details"]).retry if alive else None,
    )


def _activity(row: Mapping[str, Any], table: TableName | None) -> WorkerActivity:
    return WorkerActivity(
        table=table,
        received=_lsn(row["received"]),
        latest_end=_lsn(row["latest_end"]),
        sent_at=_seconds(row["last_msg_send_time"]),
        received_at=_seconds(row["last_msg_receipt_time"]),
        reported_at=_seconds(row["latest_end_time"]),
        applied=_lsn(row["applied"]),
        flushed=_lsn(row["flushed"]),
        transactions=row["transactions"],
        changes=row["changes"],
        transactions_per_second=row["transactions_per_second"],
        changes_per_second=row["changes_per_second"],
        copied_rows=row["copied_rows"],
        estimated_rows=row["estimated_rows"],
        details=row["details"],
    )


def _lsn(text: str | None) -> Lsn | None:
    return None if text is None else Lsn.parse(text)


def _seconds(moment: datetime | None) -> float | None:
    return None if moment is None else moment.timestamp()
