"""Check the target before a subscription starts, and report what would fail. A check changes nothing.

Source: PostgreSQL manual, Logical Replication, Restrictions and Security; CREATE SUBSCRIPTION (run_as_owner).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal

from subscriber.config import ConflictRules
from subscriber.errors import RelationError, TargetError, TargetUnavailable
from subscriber.interfaces import Finding, PublishedTable, Query, TableName
from subscriber.protocol.quoting import quote_identifier
from subscriber.sinks.postgres.apply.rule_needs import rules_refused
from subscriber.sinks.postgres.capacity import few_connections, few_origins
from subscriber.sinks.postgres.catalog.schema import IN_RECOVERY, IN_RECOVERY_HINT, catalog_version
from subscriber.sinks.postgres.session.apply_session import WAL_FUNCTIONS
from subscriber.sinks.postgres.session.catalog_reader import CatalogReader, Execute
from subscriber.sinks.postgres.session.firing import first_firing
from subscriber.sinks.postgres.session.libpq_session import LibpqSession
from subscriber.sinks.postgres.session.origins import catalog_run
from subscriber.sinks.postgres.session.postgres_errors import CATALOG_HINT, translated
from subscriber.sinks.postgres.session.queries import run_query
from subscriber.sinks.postgres.session.target import Target
from subscriber.sinks.postgres.tables.conflict_log import ConflictLog
from subscriber.sinks.postgres.tables.relation_mapping import RelationMapping, TargetTable, described_relation, map_relation, missing_table
from subscriber.sinks.postgres.tables.table_reader import read_tables

__all__ = ["check_target", "querying", "subscription_exists"]

Grant = tuple[str, str]

_APPLICATION: Final = "subscriber check"
_FIRST_NORMAL_OID: Final = 16384
_NO_PRIVILEGE: Final = "42501"

# functions that all roles may use by default: a hardened server may have revoked that
_FUNCTIONS: Final = """
age array_agg bool_and concat concat_ws count current_database current_setting format format_type generate_series hashtextextended
json_build_array lo_create lo_unlink lower now pg_advisory_lock pg_advisory_lock_shared pg_advisory_unlock pg_advisory_xact_lock
pg_advisory_xact_lock_shared pg_backend_pid pg_blocking_pids pg_control_system pg_current_snapshot pg_current_xact_id pg_get_expr
pg_get_indexdef pg_has_role pg_is_in_recovery pg_notify pg_partition_ancestors pg_partition_root pg_partition_tree pg_snapshot_xmax
pg_terminate_backend pg_try_advisory_xact_lock pg_xact_commit_timestamp_origin quote_ident row_number set_config split_part starts_with
strpos to_jsonb to_regclass to_regtype unnest
"""
_FALLBACKS: Final = {"pg_blocking_pids": "the log cannot say what a wait is for, and transactions are applied in parallel less often"}
"""What a run does without some of them."""
_REVOKED: Final = """
SELECT p.oid::pg_catalog.regprocedure::text AS function, p.proname::text AS name
FROM pg_catalog.pg_proc AS p JOIN pg_catalog.pg_namespace AS n ON n.oid = p.pronamespace
WHERE n.nspname = 'pg_catalog' AND p.proname = ANY ($1::text[]) AND NOT pg_catalog.has_function_privilege(p.oid, 'EXECUTE') ORDER BY 1
"""

_SERVER: Final = """
SELECT pg_catalog.pg_is_in_recovery() AS standby, pg_catalog.current_setting('max_prepared_transactions')::int AS prepared,
       pg_catalog.current_setting('server_version_num')::int AS version, r.rolsuper AS superuser, r.rolname::text AS role,
       pg_catalog.current_database()::text AS database,
       pg_catalog.has_database_privilege(pg_catalog.current_database(), 'CREATE') AS may_create,
       (SELECT n.oid::int8 FROM pg_catalog.pg_namespace n WHERE n.nspname = 'subscriber') AS namespace
FROM pg_catalog.pg_roles r WHERE r.rolname = current_user
"""

# for each pair of a role and a table: the privileges that the role lacks, and whether the session may become that role
_RIGHTS: Final = """
SELECT wanted.oid, pg_catalog.pg_has_role(wanted.role, 'MEMBER') AS member,
       ARRAY(SELECT p.name FROM pg_catalog.unnest(ARRAY['INSERT', 'UPDATE', 'DELETE', 'TRUNCATE', 'SELECT']) AS p(name)
             WHERE NOT pg_catalog.has_table_privilege(wanted.role, wanted.oid, p.name)) AS missing,
       pg_catalog.has_database_privilege(wanted.role, pg_catalog.current_database(), 'TEMPORARY') AS temporary,
       pg_catalog.current_database()::text AS database
FROM ROWS FROM (pg_catalog.unnest($1::text[]::name[]), pg_catalog.unnest($2::oid[])) AS wanted(role, oid)
"""
# columns without which no row can be inserted; a trigger that fires for replicated rows may give them a value
_REQUIRED: Final = """
SELECT a.attrelid AS oid, a.attname::text AS name
FROM pg_catalog.pg_attribute AS a JOIN pg_catalog.pg_type AS t ON t.oid = a.atttypid
WHERE a.attrelid = ANY ($1::oid[]) AND a.attnum > 0 AND NOT a.attisdropped AND a.attnotnull AND NOT a.atthasdef AND a.attidentity = ''
  AND t.typdefaultbin IS NULL
  AND NOT EXISTS (SELECT FROM pg_catalog.pg_trigger AS g WHERE g.tgrelid = a.attrelid AND NOT g.tgisinternal AND g.tgenabled IN ('A', 'R'))
ORDER BY a.attnum
"""
_TYPE_NAMES: Final = """
SELECT oid, pg_catalog.format_type(oid, NULL) AS name FROM pg_catalog.unnest($1::oid[]) AS oid
"""


async def check_target(
    target: Target,
    tables: Sequence[PublishedTable],
    *,
    two_phase: bool,
    as_owner: bool,
    origin_none: bool,
    asynchronous: bool,
    parks: bool,
    rules: ConflictRules,
    log: ConflictLog | None,
    workers: int,
    name: str | None,
) -> list[Finding]:
    """Check everything that a subscription of these tables needs.

    Args:
        target: the target database.
        tables: as the publisher describes them.
        two_phase: whether the subscription uses two-phase commit.
        as_owner: whether changes are made as the tables' owners.
        origin_none: the subscription has ``origin = none``, so it may be part of a loop.
        asynchronous: the subscription has ``synchronous_commit = off``.
        parks: the subscription has ``on_error = park``.
        rules: what to do about conflicts.
        log: the table in which they are logged, if there is one.
        workers: the setting ``apply_workers``.
        name: of the subscription, if the target has it already.

    Raises:
        TargetUnavailable, TargetError: no session with the target.
    """
    async with _reader(target) as reader:
        findings = await _server(reader, two_phase=two_phase)
        run = catalog_run(reader.connection)
        for refused in (await rules_refused(run, rules), await log.refused(run) if log is not None else None):
            if refused is not None:
                findings.append(Finding("error", str(refused), refused.hint or ""))
        findings += await _functions(reader, asynchronous=asynchronous)
        if workers > 1:
            findings += await few_connections(reader, workers)
        relied_on = origin_none or bool(await reader.fetch("SELECT FROM pg_catalog.pg_publication LIMIT 1"))
        if relied_on or workers > 1:
            findings += await few_origins(reader, name, relied_on=relied_on, workers=workers)
        if parks and len(tables) > 1:
            async with reader.transaction() as execute:
                trigger = await first_firing(execute, [table.name for table in tables], "${}".format)
            findings += [] if trigger is None else [Finding.of(trigger.reads_parked)]
        return findings + await _tables(reader, tables, as_owner=as_owner)


async def subscription_exists(target: Target, name: str) -> bool:
    """Whether the catalog has a subscription of this name; False without a catalog.

    Raises:
        TargetUnavailable, TargetError: no connection, a missing privilege, or a catalog of a later version.
    """
    async with _session(target) as run:
        if await catalog_version(run) is None:
            return False
        return bool(await run("SELECT FROM subscriber.pg_subscription WHERE subname = %s::text::name", name))


@contextlib.asynccontextmanager
async def querying(target: Target) -> AsyncIterator[Query]:
    """A transaction for SELECTs. See :meth:`subscriber.interfaces.PostgresDatabase.querying`."""
    connection = await target.connect(_APPLICATION)
    try:
        await run_query(connection, "BEGIN READ ONLY")
        yield partial(run_query, connection)
    finally:
        await connection.close()


@contextlib.asynccontextmanager
async def _session(target: Target) -> AsyncIterator[Execute]:
    """A session for a few queries at the start of a run. Through libpq alone: a second connection takes longer than the queries."""
    connection = await target.connect(_APPLICATION)

    async def run(query: str, /, *parameters: object) -> list[tuple[Any, ...]]:
        with translated():
            cursor = await connection.execute(query.encode(), parameters or None)
            return await cursor.fetchall() if cursor.description is not None else []

    try:
        yield run
    finally:
        await connection.close()


@contextlib.asynccontextmanager
async def _reader(target: Target) -> AsyncIterator[CatalogReader]:
    reader = CatalogReader(LibpqSession(await target.connect(_APPLICATION)))
    try:
        yield reader
    finally:
        await reader.close()


async def _server(reader: CatalogReader, *, two_phase: bool) -> list[Finding]:
    found = (await reader.fetch(_SERVER))[0]
    role, findings = found["role"], list[Finding]()
    if found["standby"]:
        findings.append(Finding("error", IN_RECOVERY, IN_RECOVERY_HINT))
    if two_phase and found["prepared"] == 0:
        hint = "set max_prepared_transactions of the target to a value above zero and restart it, or use two_phase = false"
        # PostgreSQL's CREATE and ALTER SUBSCRIPTION accept it, and the worker fails at the first prepared transaction
        message = "prepared transactions are disabled in the target: the first one of the publisher stops the subscription"
        findings.append(Finding("warning", message, hint))
    if not found["superuser"] and not await _may_set_replica(reader, found["version"]):
        hint = f'use a superuser, or on PostgreSQL 15 or later: GRANT SET ON PARAMETER session_replication_role TO "{role}"'
        findings.append(Finding("error", f'role "{role}" may not set session_replication_role in the target', hint))
    return findings + await _catalog(reader, found["namespace"], may_create=found["may_create"], role=role)


async def _functions(reader: CatalogReader, *, asynchronous: bool) -> list[Finding]:
    """Find functions that the role may not use. Those of the WAL are tried: some servers refuse them in spite of the privilege."""
    findings = [
        Finding.revoked(row["function"], "in the target", _FALLBACKS.get(row["name"]))
        for row in await reader.fetch(_REVOKED, _FUNCTIONS.split())
    ]
    if asynchronous:
        try:
            await reader.fetch(WAL_FUNCTIONS)
        except TargetUnavailable:
            raise
        except TargetError as error:
            message = f"synchronous_commit = off has no effect: each commit waits until it is on disk, because of: {error}"
            findings.append(Finding("warning", message, "GRANT EXECUTE on the function to the role if small transactions are too slow"))
    return findings


async def _may_set_replica(reader: CatalogReader, version: int) -> bool:
    if version < 150000:
        return False
    return bool(
        (await reader.fetch("SELECT pg_catalog.has_parameter_privilege('session_replication_role', 'SET') AS granted"))[0]["granted"]
    )


async def _catalog(reader: CatalogReader, namespace: int | None, *, may_create: bool, role: str) -> list[Finding]:
    try:
        version = await catalog_version(catalog_run(reader.connection))
    except TargetError as error:
        if error.sqlstate == _NO_PRIVILEGE:
            return [
                Finding(
                    "error", f'role "{role}" cannot use schema "subscriber" of the target: {error}', "connect as the role that created it"
                )
            ]
        return [Finding("error", str(error), error.hint or CATALOG_HINT)]
    if version is None:
        if namespace is None and not may_create:
            return [
                Finding(
                    "error", f'role "{role}" may not create schema "subscriber" in the target', f'GRANT CREATE ON DATABASE … TO "{role}"'
                )
            ]
        if namespace is not None:
            query = "SELECT pg_catalog.has_schema_privilege($1::int8::oid, 'CREATE') AS granted"
            if not (await reader.fetch(query, namespace))[0]["granted"]:
                return [
                    Finding(
                        "error",
                        f'role "{role}" may not create tables in schema "subscriber" of the target',
                        "make this role the owner of the schema, or GRANT CREATE ON SCHEMA to it",
                    )
                ]
        return []
    # all roles may read the catalog; this role must write
    query = "SELECT pg_catalog.has_table_privilege('subscriber.pg_subscription', 'INSERT') AS granted"
    if not (await reader.fetch(query))[0]["granted"]:
        message = f'role "{role}" cannot use schema "subscriber" of the target: permission denied for table pg_subscription'
        return [Finding("error", message, "connect as the role that created it")]
    return []


async def _tables(reader: CatalogReader, published: Sequence[PublishedTable], *, as_owner: bool) -> list[Finding]:
    targets = await read_tables(reader, [table.name for table in published], as_owner=as_owner)
    rights, temporary = await _rights(reader, targets.values())
    required = await _required(reader, targets.values())
    type_names = await _type_names(reader, {oid for table in published for oid in table.column_types})
    findings = list[Finding]()
    for table in published:
        found = _fit(table, targets.get(table.name), type_names)
        if table.name in targets and not any(finding.severity == "error" for finding in found):
            blocking = _blocking(table, required[table.name])
            found = [*rights[table.name], *blocking, *found, *_temporary(table, targets[table.name], temporary[table.name])]
        findings += [replace(finding, table=table.name) for finding in found]
    return findings


def _fit(published: PublishedTable, target: TargetTable | None, type_names: Mapping[int, str]) -> list[Finding]:
    try:
        if target is None:
            raise missing_table(published.name)
        mapping = map_relation(described_relation(published), target)
    except RelationError as error:
        # as in PostgreSQL: CREATE SUBSCRIPTION only requires that the table exists; the table's synchronization checks the rest
        alone = target is not None and target.is_table
        hint = error.hint or "compare the target's table with the publisher's"
        return [Finding("error", str(error), hint, alone=alone, stops="without_copy")]
    findings = _types(published, mapping, type_names)
    if mapping.problem is not None and published.changes:
        findings.insert(0, Finding("warning", f"UPDATE and DELETE will fail: {mapping.problem}", mapping.problem.hint or ""))
    return findings


async def _rights(
    reader: CatalogReader, tables: Collection[TargetTable]
) -> tuple[Mapping[TableName, list[Finding]], Mapping[TableName, Grant | None]]:
    """What the roles that change the tables may not do; and the role that may not create temporary tables, with the database."""
    ((current,),) = [row.values() for row in await reader.fetch("SELECT current_user::text AS role")]
    roles = [table.role or current for table in tables]
    rows = {row["oid"]: row for row in await reader.fetch(_RIGHTS, roles, [table.oid for table in tables])}
    found = {table.name: (table, role, rows[table.oid]) for table, role in zip(tables, roles, strict=True)}
    return (
        {name: _right(table, role, row["missing"], current=current, member=row["member"]) for name, (table, role, row) in found.items()},
        {name: None if row["temporary"] else (role, row["database"]) for name, (_, role, row) in found.items()},
    )


def _temporary(published: PublishedTable, target: TargetTable, lacking: Grant | None) -> list[Finding]:
    own = [column.name for column in target.columns if column.name not in published.columns and not column.generated]
    if lacking is None or not own or not published.key_columns:
        return []
    role, database = lacking
    message = f'role "{role}" may not create temporary tables: table "{published.name}", which has columns of its own, cannot be reconciled'
    return [Finding("warning", message, f"GRANT TEMPORARY ON DATABASE {quote_identifier(database)} TO {quote_identifier(role)}")]


def _right(table: TargetTable, role: str, missing: Sequence[str], *, current: str, member: bool) -> list[Finding]:
    if table.role is not None and not member:
        message = f'role "{current}" cannot SET ROLE to "{role}", the owner of table "{table.name}"'
        return [Finding("error", message, f'GRANT "{role}" TO "{current}", or set run_as_owner = true', alone=True, stops="without_copy")]
    if missing:
        message = f'role "{role}" lacks {", ".join(missing)} on table "{table.name}" of the target'
        # the copy needs INSERT only
        stops: Literal["without_copy", "always"] = "without_copy" if "INSERT" in missing else "always"
        return [Finding("error", message, f'GRANT {", ".join(missing)} ON {table.name} TO "{role}"', alone=True, stops=stops)]
    return []


async def _required(reader: CatalogReader, tables: Collection[TargetTable]) -> Mapping[TableName, list[str]]:
    """The columns of each table without which no row can be inserted."""
    found: dict[TableName, list[str]] = {table.name: [] for table in tables}
    names = {table.oid: table.name for table in tables}
    for row in await reader.fetch(_REQUIRED, list(names)):
        found[names[row["oid"]]].append(row["name"])
    return found


def _blocking(published: PublishedTable, required: Sequence[str]) -> list[Finding]:
    own = [name for name in required if name not in published.columns]
    if not own:
        return []
    message = f'column "{own[0]}" of table "{published.name}" is NOT NULL in the target, has no default and is not published'
    table = f"{quote_identifier(published.name.namespace)}.{quote_identifier(published.name.name)}"
    hint = f"ALTER TABLE {table} ALTER {quote_identifier(own[0])} DROP NOT NULL, or SET DEFAULT …, or publish it"
    return [Finding("error", message, hint, alone=True, stops="without_copy")]


async def _type_names(reader: CatalogReader, oids: Collection[int]) -> Mapping[int, str]:
    # oids of other types differ between databases, so they cannot be compared
    known = [oid for oid in oids if 0 < oid < _FIRST_NORMAL_OID]
    return {row["oid"]: row["name"] for row in await reader.fetch(_TYPE_NAMES, known)}


def _types(published: PublishedTable, mapping: RelationMapping, names: Mapping[int, str]) -> list[Finding]:
    findings = []
    for column, type_oid in zip(mapping.columns, published.column_types, strict=False):
        if type_oid != column.type_oid and type_oid in names and column.type_oid < _FIRST_NORMAL_OID:
            message = (
                f'column "{column.name}" of table "{published.name}" is of type {names[type_oid]} on the publisher '
                f"and of type {column.type_name} in the target"
            )
            findings.append(
                Finding("warning", message, "the publisher's values must be valid input for the target's type; binary = true will fail")
            )
    return findings
