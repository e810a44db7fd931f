"""What a PostgreSQL target must have before anything is copied into it.

Free space is known only if the target's data directory is on this machine and holds everything: no function of PostgreSQL tells it.
"""

# names are quoted
# ruff: noqa: S608

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from subscriber.errors import ConfigurationError, SubscriberError, raise_all
from subscriber.interfaces import TableName
from subscriber.protocol.quoting import quote_identifier, quote_literal
from subscriber.sinks.postgres.scripts import ScriptSession
from subscriber.subscription.management.schema import SchemaOptions
from subscriber.subscription.migration.copy_estimate import shown_bytes
from subscriber.subscription.migration.spec import APPLICATION, MigrationSpec
from subscriber.walreceiver.new_publication import planned_tables
from subscriber.walreceiver.session import Session
from subscriber.walreceiver.table_sizes import TableSize, table_sizes

__all__ = ["disk_problem", "require_place", "schema_problems"]

_SPARE: Final = 1.1
"""What the target writes beside tables and indexes: WAL, sorting."""

# the extension that a column's type belongs to
_EXTENSIONS: Final = """
SELECT e.extname, (SELECT pg_catalog.string_agg(DISTINCT n.nspname || '.' || c.relname, ', ')
  FROM pg_catalog.pg_depend AS d
  JOIN pg_catalog.pg_type AS t ON t.oid = d.objid OR t.typelem = d.objid
  JOIN pg_catalog.pg_attribute AS a ON a.atttypid = t.oid AND a.attnum > 0 AND NOT a.attisdropped
  JOIN pg_catalog.pg_class AS c ON c.oid = a.attrelid AND c.relkind IN ('r', 'p')
  JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
 WHERE d.refclassid = 'pg_catalog.pg_extension'::pg_catalog.regclass AND d.refobjid = e.oid AND d.deptype = 'e'
   AND d.classid = 'pg_catalog.pg_type'::pg_catalog.regclass)
  FROM pg_catalog.pg_extension AS e ORDER BY 1
"""
_POLICIES: Final = """
SELECT DISTINCT r.rolname, n.nspname, c.relname
  FROM pg_catalog.pg_policy AS p CROSS JOIN LATERAL pg_catalog.unnest(p.polroles) AS named (oid)
  JOIN pg_catalog.pg_roles AS r ON r.oid = named.oid JOIN pg_catalog.pg_class AS c ON c.oid = p.polrelid
  JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace ORDER BY 1, 2, 3
"""
_ROLES: Final = "SELECT rolname::text, '' FROM pg_catalog.pg_roles"
_AVAILABLE: Final = "SELECT name::text, '' FROM pg_catalog.pg_available_extensions"
# others may be on other disks
_DIRECTORY: Final = """
SELECT CASE WHEN (SELECT pg_catalog.count(*) FROM pg_catalog.pg_tablespace) = 2 THEN pg_catalog.current_setting('data_directory', true) END,
       (pg_catalog.inet_server_addr() IS NULL OR pg_catalog.inet_server_addr() = pg_catalog.inet_client_addr())::text
"""
_SOME: Final = 200


async def require_place(spec: MigrationSpec, *, disk_check: bool) -> str:
    """Find out whether a new target has what the copy needs, before anything is created.

    Args:
        spec: of the migration.
        disk_check: whether a disk that is known to be too small is an error.

    Returns:
        How much is needed, for people.

    Raises:
        ConfigurationError: it has not.
        PublisherError, TargetError: a server cannot be queried.
    """
    async with await spec.publisher() as session, await ScriptSession.open(spec.target, APPLICATION) as target:
        errors = await schema_problems(session, target, spec.schema)
        tables = await table_sizes(session, (await planned_tables(session, spec.publication, spec.choice))[0])
        small, line = await disk_problem(target, tables)
        errors += [small] if small is not None and disk_check else []
        names = [TableName(*spec.options.mapping.target(table.pair)) for table in tables]
        errors += await _filled_tables(target, names) if spec.options.copy_data is True else []
    raise_all(errors)
    return line


async def _filled_tables(target: ScriptSession, tables: Sequence[TableName]) -> list[SubscriberError]:
    """Find tables that have rows in the target before their copy, which would be mixed with those of the publisher."""
    errors: list[SubscriberError] = []
    for begin in range(0, len(tables), _SOME):
        names = ", ".join(f"({quote_literal(each.namespace)}, {quote_literal(each.name)})" for each in tables[begin : begin + _SOME])
        found = await target.query(
            "SELECT n.nspname::text, c.relname::text FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n"
            f" ON n.oid = c.relnamespace WHERE (n.nspname, c.relname) IN ({names}) AND c.relkind IN ('r', 'p')"
        )
        reads = [
            f"SELECT {quote_literal(f'{schema}.{name}')} WHERE EXISTS"
            f" (SELECT FROM {quote_identifier(schema or '')}.{quote_identifier(name or '')})"
            for schema, name in found
        ]
        for (table,) in await target.query(" UNION ALL ".join(reads)) if reads else ():
            hint = "empty it or use another database; for rows that the publisher has, too: -o copy_data=reconcile"
            errors.append(ConfigurationError(f'table "{table}" of the target has rows already', hint=hint))
    return errors


async def schema_problems(publisher: Session, target: ScriptSession, options: SchemaOptions) -> list[SubscriberError]:
    """Find what the schema needs and the target's server does not have: extensions, and roles of policies."""
    available = {name for name, _ in await target.query(_AVAILABLE)}
    errors: list[SubscriberError] = [
        ConfigurationError(
            f'extension "{name}" is not installed on the target\'s server' + (f"; tables that need it: {tables}" if tables else ""),
            hint="install it there" + ("" if tables else ", or leave it out with --exclude-extension"),
        )
        for name, tables in await publisher.execute(_EXTENSIONS)
        if name not in available and name not in options.exclude_extensions
    ]
    roles, lacking = {name for name, _ in await target.query(_ROLES)}, defaultdict[str, list[str]](list)
    for role, schema, table in await publisher.execute(_POLICIES):
        chosen = schema in options.schemas if options.schemas else schema not in options.exclude_schemas
        if role not in roles and chosen:
            lacking[role or ""].append(f"{schema}.{table}")
    return errors + [
        ConfigurationError(
            f'role "{role}" does not exist in the target; tables whose policies name it: {", ".join(tables)}', hint="create the role there"
        )
        for role, tables in lacking.items()
    ]


async def disk_problem(target: ScriptSession, tables: Mapping[TableName, TableSize]) -> tuple[SubscriberError | None, str]:
    """Compare the free space of the target with what is needed.

    Returns:
        The error if it is known to be too small; and a line for people.
    """
    needed = int(sum(each.bytes + each.index_bytes for each in tables.values()) * _SPARE)
    ((directory, is_local),) = await target.query(_DIRECTORY)
    free = _free(directory) if is_local == "true" and directory else None
    if free is None:
        return None, f"target: needs about {shown_bytes(needed)} of disk; its free space is not known here"
    line = f"target: needs about {shown_bytes(needed)} of disk, and has {shown_bytes(free)}"
    if free < needed:
        return ConfigurationError(
            f"the disk of the target is too small: {shown_bytes(needed)} are needed, {shown_bytes(free)} are free",
            hint="make room, or leave out tables with --exclude-table; --no-disk-check starts anyway",
        ), line
    return None, line


def _free(directory: str) -> int | None:
    """The free bytes of a directory of this machine; None: it is not here, or not readable."""
    try:
        if not (Path(directory) / "PG_VERSION").exists():
            return None
        found = os.statvfs(directory)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize
