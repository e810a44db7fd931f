"""Whether the catalog is there, whole, and of a version that this program knows: asked before anything is done by it.

The tables of schema ``subscriber`` are ordinary ones, and hands and restored backups reach them. What is missing, and values that this
program never writes, are found when the catalog is opened, and are one error that names the thing and the remedy; so nothing is begun
that could not be done to its end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from typing import Any, Final

import asyncpg

from subscriber.abc import TableState, TwoPhaseState
from subscriber.config import STORED
from subscriber.errors import TargetError
from subscriber.sinks.postgres.errors import CATALOG_HINT, translated

__all__ = ["COLUMNS", "broken_catalog", "catalog_version", "known_table_state", "known_two_phase", "unknown_value"]

COLUMNS: Final[Mapping[str, Collection[str]]] = {
    "version": ("version",),
    "pg_subscription": (
        "oid",
        "subname",
        "subenabled",
        "subslotname",
        "subpublications",
        "subtwophasestate",
        "subskiplsn",
        "subdbid",
        "subowner",
        *(option.column for option in STORED.values()),
        "subconninfo",
        "submade",
        "subgeneration",
        "subrefresh",
    ),
    "pg_subscription_rel": ("srsubid", "srrelid", "srsubstate", "srsublsn", "srcopyattempt"),
    "position": ("srsubid", "srrelid", "slot_name", "system_identifier", "timeline", "remote_lsn"),
    "prepared_transaction": ("srsubid", "xid", "gid", "prepare_end_lsn"),
    "copy_part": ("srsubid", "srrelid", "xid"),
    "worker": (
        "subid",
        "relid",
        "lock_key",
        "worker_type",
        "received_lsn",
        "applied_lsn",
        "flushed_lsn",
        "last_msg_send_time",
        "last_msg_receipt_time",
        "latest_end_lsn",
        "latest_end_time",
        "transactions",
        "changes",
        "transactions_per_second",
        "changes_per_second",
        "copied_rows",
        "estimated_rows",
        "details",
    ),
    "subscription_stats": (
        "subid",
        "apply_error_count",
        "sync_error_count",
        "confl_insert_exists",
        "confl_update_origin_differs",
        "confl_update_exists",
        "confl_update_missing",
        "confl_delete_origin_differs",
        "confl_delete_missing",
        "confl_multiple_unique_conflicts",
        "stats_reset",
        "last_error",
        "last_error_time",
    ),
    "pg_stat_subscription": (
        "subid",
        "subname",
        "worker_type",
        "pid",
        "leader_pid",
        "relid",
        "received_lsn",
        "last_msg_send_time",
        "last_msg_receipt_time",
        "latest_end_lsn",
        "latest_end_time",
    ),
    "pg_stat_subscription_stats": (
        "subid",
        "subname",
        "apply_error_count",
        "sync_error_count",
        "confl_insert_exists",
        "confl_update_origin_differs",
        "confl_update_exists",
        "confl_update_missing",
        "confl_delete_origin_differs",
        "confl_delete_missing",
        "confl_multiple_unique_conflicts",
        "stats_reset",
    ),
}
"""Tables and views of the latest version, by their columns."""

_SHOWN: Final = 40

# from the catalogs themselves, not to_regclass: while one waits for an advisory lock, its cache does not learn what another session made
_FOUND: Final = """
SELECT c.relname::text AS relation, array_agg(a.attname::text) AS columns
FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE n.nspname = 'subscriber' AND c.relkind IN ('r', 'v')
GROUP BY c.relname
"""


async def catalog_version(connection: asyncpg.Connection[Any], latest: int) -> int | None:
    """Which of the versions from 1 to ``latest`` the catalog has; None: there is none.

    Raises:
        TargetError: it is broken, or of a later version; or no privilege to look.
    """
    with translated():
        async with contextlib.AsyncExitStack() as stack:
            if not connection.is_in_transaction():
                # both looks at the same moment: another process may take the catalog forward in between
                await stack.enter_async_context(connection.transaction(isolation="repeatable_read", readonly=True))
            return await _version(connection, latest)


async def _version(connection: asyncpg.Connection[Any], latest: int) -> int | None:
    found = {row["relation"]: frozenset(row["columns"]) for row in await connection.fetch(_FOUND)}
    if "version" not in found:
        if found.keys() & COLUMNS.keys():
            raise broken_catalog('table "subscriber.version" of the target is missing')
        return None
    if "version" not in found["version"]:
        raise broken_catalog('column "version" of table "subscriber.version" of the target is missing')
    versions = [row["version"] for row in await connection.fetch("SELECT version FROM subscriber.version")]
    if len(versions) != 1 or not isinstance(versions[0], int) or versions[0] < 1:
        raise broken_catalog(f'table "subscriber.version" of the target is {"broken" if versions else "empty"}')
    version: int = versions[0]
    if version > latest:
        raise TargetError(
            f'schema "subscriber" of the target has version {version}, this program knows versions up to {latest}',
            hint="use the version of pg-subscriber that made it, or a later one",
        )
    if version == latest:
        _require_whole(found)
    return version


def _require_whole(found: Mapping[str, Collection[str]]) -> None:
    for relation, columns in COLUMNS.items():
        if relation not in found:
            kind = "view" if relation.startswith("pg_stat_") else "table"
            raise broken_catalog(f'{kind} "subscriber.{relation}" of the target is missing')
        for column in columns:
            if column not in found[relation]:
                raise broken_catalog(f'column "{column}" of table "subscriber.{relation}" of the target is missing')


def broken_catalog(message: str) -> TargetError:
    """The error for a catalog that cannot be used."""
    return TargetError(message, hint=CATALOG_HINT)


def _shown(value: object) -> str:
    """A value as an error shows it: one line, and short."""
    if value is None:
        return "NULL"
    text = " ".join(str(value).split())
    return f'"{text}"' if len(text) <= _SHOWN else f'"{text[:_SHOWN]}..."'


def unknown_value(relation: str, column: str, value: object, known: Collection[str]) -> TargetError:
    """The error for a value that nothing of ours writes."""
    return TargetError(
        f'column "{column}" of subscriber.{relation} in the target has the unknown value {_shown(value)}',
        hint=f"UPDATE subscriber.{relation} there: it can be {', '.join(known)}",
    )


def known_two_phase(text: str) -> TwoPhaseState:
    """``subtwophasestate``.

    Raises:
        TargetError: it is not known.
    """
    try:
        return TwoPhaseState(text)
    except ValueError:
        raise unknown_value("pg_subscription", "subtwophasestate", text, [state.value for state in TwoPhaseState]) from None


def known_table_state(text: str) -> TableState:
    """``srsubstate``.

    Raises:
        TargetError: it is not known.
    """
    try:
        return TableState(text)
    except ValueError:
        raise unknown_value("pg_subscription_rel", "srsubstate", text, ["i", "d", "f", "s", "r"]) from None
