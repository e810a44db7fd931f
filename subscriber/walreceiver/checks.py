"""Check the publisher for problems that would stop the subscription.

The REPLICATION privilege needs no check: without it the connection itself fails.

Source: PostgreSQL manual, Logical Replication, Configuration Settings and Security; Row Filters; Replica Identity.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from subscriber.config import Settings, SubscriptionOptions
from subscriber.interfaces import Finding, PublishedTable, TableName
from subscriber.protocol.quoting import quote_literal
from subscriber.walreceiver.connection import WalReceiverConnection
from subscriber.walreceiver.publication import missing_publications, other_identities, published_sequences
from subscriber.walreceiver.publisher_errors import PLUGIN_HINT, START_OVER, invalidation_remedy
from subscriber.walreceiver.publisher_subscriptions import subscribed_tables
from subscriber.walreceiver.session import Session

__all__ = ["check_publisher", "decoding_problems"]

# entries are compared exactly; a name may stand in double quotes
_NAMES_PGOUTPUT: Final = re.compile(r'(?:^|,)\s*(?:pgoutput|"pgoutput")\s*(?:,|$)')

# functions that all roles may use by default: a hardened server may have revoked that
_FUNCTIONS: Final = """
array_position bool_and bool_or count current_database current_setting format format_type has_any_column_privilege has_column_privilege
has_schema_privilege has_table_privilege json_agg json_build_array lower max pg_backend_pid pg_blocking_pids
pg_column_size pg_current_snapshot pg_current_wal_flush_lsn pg_get_expr pg_get_publication_sequences pg_get_publication_tables
pg_get_replica_identity_index pg_is_in_recovery pg_last_wal_replay_lsn
pg_partition_ancestors pg_partition_tree pg_relation_filenode pg_relation_size pg_snapshot_xmax pg_wal_lsn_diff pg_xact_status
row_security_active set_config starts_with string_agg sum to_json to_jsonb to_regclass unnest
"""

_FALLBACKS: Final = {
    "pg_blocking_pids": "the log cannot say what a wait is for",
    **dict.fromkeys(
        ("pg_current_snapshot", "pg_snapshot_xmax", "pg_xact_status"),
        "a large transaction with savepoints is received a second time, without streaming",
    ),
}
"""What a run does without some of them."""
_SHOWN: Final = 10


async def check_publisher(
    connection: WalReceiverConnection,
    publications: Sequence[str],
    tables: Sequence[PublishedTable],
    slot_name: str | None,
    *,
    options: SubscriptionOptions,
    settings: Settings,
    missing: Literal["error", "warning"] = "error",
) -> list[Finding]:
    """Check everything that a subscription needs on the publisher. Changes nothing.

    Args:
        connection: with the role that will replicate.
        publications: to subscribe to.
        tables: the tables that they publish.
        slot_name: the subscription's slot, which need not exist; None for a subscription without a slot.
        options: of the subscription. If tables are copied, the role must be able to read them.
        settings: give the number of tables that are synchronized at once. Each needs a slot and a walsender.
        missing: the severity of a publication that does not exist.

    Raises:
        PublisherError: the publisher refused to answer.
    """
    findings = [Finding("error", message, hint) for message, hint in await decoding_problems(connection, "on the publisher")]
    findings += await _functions(connection)
    findings += await _slot(connection, slot_name)
    findings += await _headroom(connection, slot_name, settings.max_sync_workers_per_subscription if options.copy_data else 0)
    absent = await missing_publications(connection, publications)
    findings += [
        Finding(missing, f'publication "{name}" does not exist on the publisher', f'CREATE PUBLICATION "{name}" there, or correct the name')
        for name in absent
    ]
    if not tables and len(absent) < len(set(publications)) and await published_sequences(connection, publications):
        message = "the publications publish sequences only: nothing is copied or followed"
        findings.append(Finding("warning", message, "`subscriber sequences sync` sets them in the target"))
    elif not tables and len(absent) < len(set(publications)):
        findings.append(Finding("warning", "the publications publish no table", "ALTER PUBLICATION … ADD TABLE on the publisher"))
    if tables and options.copy_data:
        findings += await _readable(connection, tables)
    findings += _identities(tables)
    if any(table.kind == "p" for table in tables):
        findings += _partitions(await other_identities(connection, publications, options.mapping))
    if options.copy_data and options.origin == "none":
        findings += await _subscribed(connection, publications)
    return findings


async def decoding_problems(session: Session, place: str) -> list[tuple[str, str]]:
    """Find the settings that keep a server from decoding with pgoutput.

    Args:
        session: with the server.
        place: what messages call it, for example "on the publisher".

    Returns:
        Messages with their hints.
    """
    ((standby, wal_level, effective, libraries),) = await session.execute(
        "SELECT pg_catalog.pg_is_in_recovery(), pg_catalog.current_setting('wal_level'),"
        " pg_catalog.current_setting('effective_wal_level', true),"
        " (SELECT setting FROM pg_catalog.pg_settings WHERE name = 'output_plugin_libraries')"  # hidden from most roles
    )
    problems = []
    # 19 has effective_wal_level: the first logical slot raises it, but not on a standby
    enough = "logical" in (wal_level, effective) or (effective is not None and wal_level == "replica" and standby == "f")
    if not enough:
        problems.append((f'wal_level is "{wal_level}" {place}', "ALTER SYSTEM SET wal_level = logical there, and restart it"))
    if libraries is not None and not _NAMES_PGOUTPUT.search(libraries):
        problems.append((f"output_plugin_libraries does not allow pgoutput {place}", PLUGIN_HINT))
    return problems


async def _functions(connection: WalReceiverConnection) -> list[Finding]:
    rows = await connection.execute(f"""
        SELECT p.oid::pg_catalog.regprocedure, p.proname
          FROM pg_catalog.pg_proc AS p JOIN pg_catalog.pg_namespace AS n ON n.oid = p.pronamespace
         WHERE n.nspname = 'pg_catalog' AND p.proname IN ({", ".join(map(quote_literal, _FUNCTIONS.split()))})
           AND NOT pg_catalog.has_function_privilege(p.oid, 'EXECUTE') ORDER BY 1
    """)  # noqa: S608
    return [Finding.revoked(function or "", "on the publisher", _FALLBACKS.get(name or "")) for function, name in rows]


async def _slot(connection: WalReceiverConnection, name: str | None) -> list[Finding]:
    slot = None if name is None else await connection.slot(name)
    if slot is None:
        return []
    if slot.plugin != "pgoutput":
        what = f"uses output plugin {slot.plugin}" if slot.plugin else "is a physical slot"
        return [Finding("error", f'replication slot "{name}" {what}', "use another slot_name")]
    ((dbname,),) = await connection.execute("SELECT pg_catalog.current_database()")
    if slot.database != dbname:
        return [Finding("error", f'replication slot "{name}" belongs to database "{slot.database}"', "use another slot_name")]
    if slot.lost:
        remedy = f"{invalidation_remedy(slot.lost_because)}; {START_OVER}; without a subscription, drop the slot"
        return [Finding("error", f'replication slot "{name}" was invalidated ({slot.lost_because})', remedy)]
    findings = []
    if slot.active:
        findings.append(Finding("warning", f'replication slot "{name}" is active for PID {slot.active_pid}', "stop the other subscriber"))
    if slot.wal_status == "unreserved":
        findings.append(
            Finding(
                "warning", f'replication slot "{name}" will lose WAL soon', "start the subscription, or increase max_slot_wal_keep_size"
            )
        )
    return findings


async def _headroom(connection: WalReceiverConnection, slot_name: str | None, sync_workers: int) -> list[Finding]:
    ((slots, max_slots, senders, max_senders, ours),) = await connection.execute(f"""
        SELECT (SELECT pg_catalog.count(*) FROM pg_catalog.pg_replication_slots),
               pg_catalog.current_setting('max_replication_slots'),
               (SELECT pg_catalog.count(*) FROM pg_catalog.pg_stat_replication),
               pg_catalog.current_setting('max_wal_senders'),
               (SELECT pg_catalog.count(*) FROM pg_catalog.pg_replication_slots WHERE slot_name = {quote_literal(slot_name or "")})
    """)  # noqa: S608
    used = {"max_replication_slots": int(slots or 0) - int(ours or 0), "max_wal_senders": int(senders or 0) - 1}
    limits = {"max_replication_slots": int(max_slots or 0), "max_wal_senders": int(max_senders or 0)}
    findings = []
    for name, limit in limits.items():
        free = limit - used[name]
        hint = f"increase {name} on the publisher, or drop slots and end connections that are not needed"
        if free < 1:
            findings.append(Finding("error", f"none of {name} = {limit} is free", hint))
        elif free < 1 + sync_workers:
            message = f"only {free} of {name} = {limit} are free, but table synchronization needs up to {1 + sync_workers}"
            findings.append(Finding("warning", message, hint))
    return findings


async def _readable(connection: WalReceiverConnection, tables: Sequence[PublishedTable]) -> list[Finding]:
    wanted = ", ".join(f"({table.relation_id}, {quote_literal(column)})" for table in tables for column in table.publisher_columns or ("",))
    rows = await connection.execute(f"""
        SELECT c.oid, current_user, pg_catalog.has_schema_privilege(c.relnamespace, 'USAGE'), pg_catalog.row_security_active(c.oid),
               pg_catalog.bool_and(CASE WHEN wanted.attname = '' THEN pg_catalog.has_any_column_privilege(c.oid, 'SELECT')
                                        ELSE pg_catalog.has_column_privilege(c.oid, wanted.attname, 'SELECT') END)
          FROM (VALUES {wanted}) AS wanted (relid, attname) JOIN pg_catalog.pg_class AS c ON c.oid = wanted.relid
         GROUP BY c.oid, c.relnamespace  -- 13 does not know oid as a primary key
    """)  # noqa: S608
    names = {str(table.relation_id): table.name for table in tables}
    findings = []
    for oid, role, usage, row_security, select in rows:
        name = names[oid or ""]
        found = []
        if usage != "t":
            found.append((f"permission denied for schema {name.namespace}", f'GRANT USAGE ON SCHEMA … TO "{role}"'))
        if select != "t":
            found.append((f"permission denied for table {name}", f'GRANT SELECT ON TABLE … TO "{role}"'))
        if row_security == "t":
            message = f'row-level security hides rows of table {name} from role "{role}"'
            found.append((message, "ALTER ROLE … BYPASSRLS on the publisher"))
        findings += [Finding("error", message, hint, name, alone=True) for message, hint in found]
    return sorted(set(findings), key=lambda finding: finding.message)


def _identities(tables: Sequence[PublishedTable]) -> list[Finding]:
    return [
        Finding(
            "warning",
            f"table {table.name} has no replica identity: updates and deletes of it fail on the publisher",
            "give it a primary key, or ALTER TABLE … REPLICA IDENTITY FULL",
            table.name,
        )
        for table in tables
        if table.changes and not table.key_columns and table.replica_identity != "f"
    ]


def _partitions(found: Mapping[TableName, Sequence[TableName]]) -> list[Finding]:
    return [
        Finding(
            "warning",
            f"updates and deletes of {len(partitions)} partition{'s' if len(partitions) > 1 else ''} of table {root} will be lost, because"
            f" the replica identity there lacks columns of the table's: {_listed(partitions)}",
            "ALTER TABLE … REPLICA IDENTITY of the partitions: the same columns as those of the table, or FULL",
            root,
        )
        for root, partitions in found.items()
    ]


def _listed(tables: Sequence[TableName]) -> str:
    more = f" and {len(tables) - _SHOWN:,} more" if len(tables) > _SHOWN else ""
    return ", ".join(map(str, tables[:_SHOWN])) + more


async def _subscribed(connection: WalReceiverConnection, publications: Sequence[str]) -> list[Finding]:
    """As check_publications_origin in PostgreSQL: a copy cannot tell the origin of rows."""
    tables = {found.table for found in await subscribed_tables(connection, publications)}
    return [
        Finding(
            "warning",
            f"with origin = none, the copy of table {table} may include rows of another origin: the publisher has a subscription for it",
            "make sure that its rows did not come from elsewhere, or use copy_data = false",
            table,
        )
        for table in sorted(tables)
    ]
