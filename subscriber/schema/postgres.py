"""Copies the schema of the publisher to a PostgreSQL target."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from subscriber.apply.tasks import task_group
from subscriber.config.mapping import NO_MAPPING, TableMapping
from subscriber.errors import TargetError
from subscriber.interfaces import Query, TableName
from subscriber.interfaces.schema import SchemaProgress, SchemaStep, Section, StepState
from subscriber.interfaces.table_schema import DatabaseSchema
from subscriber.protocol.quoting import quote_identifier, quote_literal
from subscriber.protocol.session_settings import unpin
from subscriber.schema.archive import Entry, Selection, read_archive
from subscriber.schema.client_programs import ClientPrograms, find_client_programs
from subscriber.schema.database_properties import database_changes, read_database
from subscriber.schema.inspection import SchemaScope, inspect
from subscriber.schema.left_out_keys import LeftOutKeys, adapt_keys, left_out_keys
from subscriber.schema.mapped_copy import mapped_entries
from subscriber.schema.restore import of_new_tables, of_tables, restore, section, without_tables
from subscriber.schema.roles import Roles
from subscriber.sinks.postgres.scripts import ScriptSession
from subscriber.walreceiver.session import Session

__all__ = ["SchemaOrder", "client_programs", "copy_to_postgres", "inspect_target", "query_target"]

_APPLICATION: Final = "subscriber schema"
_ONLY_TABLES: Final = (
    "tables have other names: views, functions, triggers and policies, whose texts name tables, are not created; privileges are not granted"
)
_ROLES: Final = "SELECT rolname::text FROM pg_catalog.pg_roles"
_EXISTING: Final = """
SELECT n.nspname::text, c.relname::text FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'p')
"""
_VIEWS: Final = """
SELECT n.nspname::text, c.relname::text FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
 WHERE c.relkind = 'm' AND c.relispopulated = {}
"""
# a partition is analyzed with its table. What was analyzed, and has not changed much, is left: a call may be repeated
_TABLES: Final = """
SELECT n.nspname::text, c.relname::text FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
 WHERE (c.relkind IN ('r', 'p') OR (c.relkind = 'm' AND c.relispopulated)) AND NOT c.relispartition AND n.nspname IN ({})
   AND (pg_catalog.pg_stat_get_last_analyze_time(c.oid) IS NULL OR EXISTS (
        SELECT FROM (SELECT c.oid UNION ALL SELECT relid FROM pg_catalog.pg_partition_tree(c.oid) WHERE c.relkind = 'p') AS t
          JOIN pg_catalog.pg_class AS l ON l.oid = t.oid
         WHERE pg_catalog.pg_stat_get_mod_since_analyze(l.oid) > 50 + 0.1 * GREATEST(l.reltuples, 0)))
 ORDER BY pg_catalog.pg_relation_size(c.oid) DESC, 1, 2
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaOrder:
    """What to copy, and how.

    Attributes:
        selection: which objects.
        sections: which sections, in their order.
        renamed_roles: the target's role for an owner or grantee of the publisher.
        jobs: how many indexes and constraints are built at the same time.
        bindir: the directory of pg_dump and pg_restore; None: they are looked for.
        tables: only these tables, with what belongs to them and what they need; empty: everything.
        only_new_tables: leave out what belongs to tables that exist in the target.
        publications: only the rows of their tables are moved.
        left_out_keys: what is done with foreign keys that refer to other tables; None: they are created as they are.
        mapping: the names of the target's tables. If it has any, only the published tables are created, with what they need.
    """

    selection: Selection
    sections: Sequence[Section] = tuple(Section)
    renamed_roles: Mapping[str, str]
    jobs: int
    bindir: str | None = None
    tables: Collection[TableName] = ()
    only_new_tables: bool = False
    publications: Sequence[str] = ()
    left_out_keys: LeftOutKeys | None = None
    mapping: TableMapping = NO_MAPPING


async def client_programs(connection: str, target: str, bindir: str | None) -> ClientPrograms:
    """Find the programs that :func:`copy_to_postgres` will use.

    Raises:
        ConfigurationError: pg_dump is missing or too old.
        PublisherError, TargetError: a server cannot be reached.
    """
    async with (
        await Session.connect(connection, application_name=_APPLICATION) as publisher,
        await ScriptSession.open(target, _APPLICATION) as session,
    ):
        return await find_client_programs(bindir, publisher.pgconn.server_version // 10000, session.version)


async def copy_to_postgres(connection: str, target: str, order: SchemaOrder, progress: SchemaProgress) -> list[str]:
    """Create what the target lacks.

    Returns:
        What was left out or changed, one line each: ownership and privileges of roles that the target lacks; foreign keys.

    Raises:
        ConfigurationError: pg_dump is missing or too old.
        PublisherError: the schema cannot be read.
        TargetError: an object cannot be created. What was created stays; repeat the call to continue.
    """
    async with (
        await Session.connect(connection, application_name=_APPLICATION) as publisher,
        contextlib.AsyncExitStack() as stack,
    ):
        sessions = [await stack.enter_async_context(await ScriptSession.open(target, _APPLICATION)) for _ in range(order.jobs)]
        server = publisher.pgconn.server_version // 10000
        programs = await find_client_programs(order.bindir, server, sessions[0].version)
        dumped = await read_archive(publisher, connection, programs, order.selection)
        entries, lines = await _chosen(dumped, order, publisher, sessions[0])
        roles = Roles({name or "" for (name,) in await sessions[0].query(_ROLES)}, order.renamed_roles)
        populated = {(schema, name) for schema, name in await publisher.execute(_VIEWS.format("true"))}
        left = list[str]()
        for which in order.sections:
            # the objects of pre-data need each other, and take no time
            used = sessions if which is Section.POST_DATA else sessions[:1]
            await restore(section(entries, which), roles.sql, used, progress)
            if which is Section.POST_DATA and not order.tables:
                if not order.selection.schemas and not order.mapping.renames:
                    left = await _move_properties(publisher, sessions[0], order, progress)
                await _finish(entries, populated, sessions, progress)
    missing = [f'role "{role}" does not exist in the target: its ownership and privileges were left out' for role in sorted(roles.missing)]
    return [*missing, *lines, *left]


async def _chosen(
    entries: Sequence[Entry], order: SchemaOrder, publisher: Session, session: ScriptSession
) -> tuple[Sequence[Entry], list[str]]:
    """What is created of the publisher's schema, and a line for what is left out or changed."""
    if order.mapping.renames:
        names, chosen = order.mapping, order.tables
        mapped, lines = await mapped_entries(publisher, session, entries, names, publications=order.publications, tables=chosen)
        return mapped, lines if chosen else [_ONLY_TABLES, *lines]
    entries, lines = without_tables(entries, order.mapping.excludes) if order.mapping else (entries, [])
    if order.left_out_keys is not None and Section.POST_DATA in order.sections:
        keys = await left_out_keys(publisher, order.publications)
        entries, changed = adapt_keys(entries, keys, order.left_out_keys, session.version)
        lines += changed
    if order.tables:
        entries = of_tables(entries, {(table.namespace, table.name) for table in order.tables})
    if order.only_new_tables:
        entries = of_new_tables(entries, {(schema or "", name or "") for schema, name in await session.query(_EXISTING)})
    return entries, lines


async def _move_properties(publisher: Session, session: ScriptSession, order: SchemaOrder, progress: SchemaProgress) -> list[str]:
    """Give the target's database the properties of the publisher's that it does not have. Return the other differences."""
    changes = database_changes(await read_database(publisher.execute), await read_database(session.query), order.renamed_roles)
    left = list[str]()
    for change in changes:
        difference = change.difference
        if not change.moves or (change.privilege and not order.selection.owners):
            left += [] if difference.extra else [difference.message]
            continue
        began = time.monotonic()
        try:
            await session.run("".join(difference.ddl))
        except TargetError as error:
            left.append(f"{difference.message}; it cannot be moved: {error.one_line()}")
        else:
            progress(SchemaStep("database property", StepState.CREATED, time.monotonic() - began, 0, 0))
    return left


async def _finish(
    entries: Sequence[Entry], populated: set[tuple[str | None, str | None]], sessions: Sequence[ScriptSession], progress: SchemaProgress
) -> None:
    """Fill the materialized views, which are not replicated, and collect statistics."""
    empty = {(schema, name) for schema, name in await sessions[0].query(_VIEWS.format("false"))}
    views = [entry for entry in entries if entry.type == "MATERIALIZED VIEW" and (entry.schema, entry.name) in empty & populated]
    steps = [(str(view), f"REFRESH MATERIALIZED VIEW {_quoted(view.schema, view.name)}") for view in views]
    async with await ScriptSession.open(sessions[0].conninfo, _APPLICATION) as session:
        await session.run(unpin())
        # a view may read another one
        await _run(steps, [session], progress)
    schemas = {entry.schema for entry in entries if entry.type in {"TABLE", "MATERIALIZED VIEW", "INDEX", "CONSTRAINT", "FK CONSTRAINT"}}
    if schemas:
        tables = await sessions[0].query(_TABLES.format(", ".join(map(quote_literal, sorted(schemas)))))
        await _run(
            [(f"statistics of {schema}.{name}", f"ANALYZE {_quoted(schema or '', name or '')}") for schema, name in tables],
            sessions,
            progress,
        )


def _quoted(schema: str, name: str) -> str:
    return f"{quote_identifier(schema)}.{quote_identifier(name)}"


async def _run(steps: Sequence[tuple[str, str]], sessions: Sequence[ScriptSession], progress: SchemaProgress) -> None:
    waiting, done = list(reversed(steps)), 0

    async def work(session: ScriptSession) -> None:
        nonlocal done
        while waiting:
            what, sql = waiting.pop()
            progress(SchemaStep(what, StepState.BEGUN, 0.0, done, len(steps)))
            began = time.monotonic()
            try:
                await session.run(sql)
            except TargetError as error:
                error.add_note(f"while executing {sql} in the target")
                raise
            done += 1
            progress(SchemaStep(what, StepState.CREATED, time.monotonic() - began, done, len(steps)))

    async with task_group() as group:
        for session in sessions:
            group.create_task(work(session))


@contextlib.asynccontextmanager
async def query_target(target: str) -> AsyncIterator[Query]:
    """Run queries in a PostgreSQL target.

    Raises:
        ConfigurationError: ``target`` is neither a URL nor a conninfo.
        TargetUnavailable, TargetError: the target cannot be read.
    """
    async with await ScriptSession.open(target, _APPLICATION) as session:
        yield session.query


async def inspect_target(target: str, scope: SchemaScope) -> DatabaseSchema:
    """Read the schema of a PostgreSQL target.

    Raises:
        ConfigurationError: ``target`` is neither a URL nor a conninfo.
        TargetUnavailable, TargetError: the target cannot be read.
    """
    async with query_target(target) as query:
        return await inspect(query, scope)
