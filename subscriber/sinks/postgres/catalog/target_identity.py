"""Which target a subscription's rows are for.

The catalog's rows are true in the server and database in which they were written. There an oid names one table for ever. But they also get
elsewhere: by pg_dump and pg_restore, ``CREATE DATABASE … TEMPLATE``, or pg_upgrade. The position is still right if nothing was written
since. But oids, and the transaction ids of an unfinished copy, may name other objects. And the rows may be those of a copy that was made
for tests, while the true target still follows the slot. So each subscription stores the identity of its target:

- the server's system identifier (pg_upgrade and initdb give a new one, a promoted standby keeps it),
- the database's oid (a copy of the database has another one),
- the oid of the catalog's own table (a restored catalog has another one).

If one of them differs, no run and no verb touches the subscription, until a user says that this is its target now (:func:`accept`).
"""

# names are quoted or ours
# ruff: noqa: S608

from __future__ import annotations

from typing import Any, Final

from subscriber.catalog.model import PG_SUBSCRIPTION_REL, POSITION
from subscriber.catalog.store import Rows
from subscriber.catalog.subscription_rows import entry_of, tell_dropped
from subscriber.errors import ConfigurationError, RelationError, TargetError
from subscriber.interfaces import SyncMode, TableName, TableState
from subscriber.protocol.quoting import quote_identifier
from subscriber.sinks.postgres.session.catalog_reader import CatalogReader, Execute

__all__ = ["FOLLOW_TABLES", "REBIND_TABLES", "TARGET", "accept", "follow_tables", "require_own_target"]

TARGET: Final = """
SELECT pg_catalog.concat_ws('/', s.system_identifier, d.oid, c.oid)
FROM pg_catalog.pg_control_system() AS s, pg_catalog.pg_database AS d, pg_catalog.pg_class AS c
WHERE d.datname = pg_catalog.current_database() AND c.oid = 'subscriber.pg_subscription'::pg_catalog.regclass
"""

# a parked table that was dropped stays in the subscription, and a new one with its name takes its place
REBIND_TABLES: Final = """
UPDATE subscriber.pg_subscription_rel r SET srrelid = c.oid
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE r.srsubid = {}::int8::oid AND r.srsubstate::text = 'p' AND n.nspname = r.srnspname AND c.relname = r.srrelname
  AND c.relkind IN ('r', 'p') AND NOT EXISTS (SELECT FROM pg_catalog.pg_class old WHERE old.oid = r.srrelid)
  AND NOT EXISTS (SELECT FROM subscriber.pg_subscription_rel same WHERE same.srsubid = r.srsubid AND same.srrelid = c.oid)
"""

# as in PostgreSQL, a table that was renamed stays in the subscription, and a dropped one leaves it at once, with its other rows:
# a remaining position would keep its slot. With on_error = park it stays, and is parked at its next change
FOLLOW_TABLES: Final = """
WITH renamed AS (
    UPDATE subscriber.pg_subscription_rel r SET srnspname = n.nspname, srrelname = c.relname
    FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE r.srsubid = $1::int8::oid AND c.oid = r.srrelid AND (r.srnspname <> n.nspname OR r.srrelname <> c.relname)
), gone AS (
    DELETE FROM subscriber.pg_subscription_rel r
    WHERE r.srsubid = $1::int8::oid AND r.srsubstate::text <> 'p'
      AND NOT EXISTS (SELECT FROM subscriber.pg_subscription s WHERE s.oid = r.srsubid AND s.subonerror::text = 'p')
      AND NOT EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.oid = r.srrelid) RETURNING r.srrelid, r.srnspname, r.srrelname
), positions AS (
    DELETE FROM subscriber."position" AS p USING gone WHERE p.srsubid = $1::int8::oid AND p.srrelid = gone.srrelid
), parts AS (
    DELETE FROM subscriber.copy_part AS c USING gone WHERE c.srsubid = $1::int8::oid AND c.srrelid = gone.srrelid
)
SELECT srnspname::text, srrelname::text FROM gone
"""

_IS_OWN: Final = f"SELECT s.subtarget = ({TARGET}) FROM subscriber.pg_subscription AS s WHERE s.oid = $1::int8::oid"
_ACCEPT: Final = f"UPDATE subscriber.pg_subscription SET subtarget = ({TARGET}) WHERE oid = $1::int8::oid"
# to the rules of conflicts, the rows that the tables have now are the subscription's own: a restore gave them another origin
_OWN_ROWS: Final = """
UPDATE subscriber.pg_subscription_rel SET srsyncxid = pg_catalog.pg_current_xact_id()::text::int8
WHERE srsubid = $1::int8::oid AND srsubstate::text IN ('s', 'r')
"""
_FORGET_PARTS: Final = "DELETE FROM subscriber.copy_part WHERE srsubid = $1::int8::oid"


async def follow_tables(reader: CatalogReader, oid: int) -> None:
    """Rename and remove tables of a subscription as they were renamed and dropped in the target.

    Raises:
        TargetUnavailable
    """
    for row in await reader.fetch(FOLLOW_TABLES, oid):
        tell_dropped(TableName(row["srnspname"], row["srrelname"]))


async def require_own_target(execute: Execute, oid: int, name: str) -> None:
    """Check that a subscription's rows were written in this server and database.

    Raises:
        ConfigurationError: they are a copy.
        TargetUnavailable, TargetError
    """
    found = await execute(_IS_OWN, oid)
    if found and not found[0][0]:
        raise ConfigurationError(
            f'subscription "{name}" belongs to another target: schema subscriber was copied or restored, or the server was upgraded',
            hint="if this database takes the other one's place: `subscriber alter NAME --target URL --accept-target`;"
            " if it is only a copy: DROP SCHEMA subscriber CASCADE",
        )


async def accept(rows: Rows, execute: Execute, oid: int, *, reconciled: bool = False) -> None:
    """Make this server and database the target of a subscription: find its tables again by their names. ``rows`` have ``execute``.

    Args:
        rows: the catalog's.
        execute: runs queries in the same transaction.
        oid: the subscription's.
        reconciled: all tables are reconciled next, so rows of a copy that was not finished do no harm.

    Raises:
        RelationError: a table is missing.
        TargetError: a table was being copied, and is not empty.
    """
    tables = await rows.select(PG_SUBSCRIPTION_REL, {"srsubid": oid})
    found = await rows.relids([TableName(row["srnspname"], row["srrelname"]) for row in tables])
    relids: dict[int, int] = {0: 0}
    for row in tables:
        name = TableName(row["srnspname"], row["srrelname"])
        relid = found[name]
        if isinstance(relid, RelationError):
            raise RelationError(
                f'table "{name}" of the subscription is missing', hint="restore it, or drop the subscription and copy again"
            )
        relids[row["srrelid"]] = relid
    for row in tables:
        name = TableName(row["srnspname"], row["srrelname"])
        entry = entry_of(row)
        copied = entry.state is TableState.DATASYNC and entry.mode is SyncMode.COPY and not reconciled
        if copied and await _has_rows(execute, name):
            raise TargetError(f'table "{name}" holds rows of a copy that was not finished', hint="TRUNCATE it, and try again")
    for table in (PG_SUBSCRIPTION_REL, POSITION):
        stored: list[Any] = [
            {**row, "srrelid": relids[row["srrelid"]]} for row in await rows.select(table, {"srsubid": oid}) if row["srrelid"] in relids
        ]
        await rows.delete(table, {"srsubid": oid})
        if stored:
            await rows.insert(table, stored)
    await execute(_OWN_ROWS, oid)
    await execute(_FORGET_PARTS, oid)
    await execute(_ACCEPT, oid)


async def _has_rows(execute: Execute, table: TableName) -> bool:
    return bool(await execute(f"SELECT FROM {quote_identifier(table.namespace)}.{quote_identifier(table.name)} LIMIT 1"))
