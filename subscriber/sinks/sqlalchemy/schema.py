"""Tables of the target made and widened from what the publisher says of its own, and judged before anything is written.

DDL is idempotent, step by step: on MySQL each step commits, and a crash between two leaves what the next attempt finds done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from sqlalchemy import TIMESTAMP, Column, Dialect, MetaData, PrimaryKeyConstraint, Table, UniqueConstraint, text
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import CreateSchema, CreateTable, DDLElement
from sqlalchemy.sql.compiler import DDLCompiler

from subscriber.abc import Finding, PublishedTable, TableName
from subscriber.errors import RelationError
from subscriber.protocol.messages import Relation
from subscriber.sinks.sqlalchemy.columns import TargetTable, load_target_table, source_types
from subscriber.sinks.sqlalchemy.creation import CreatedTypes
from subscriber.sinks.sqlalchemy.names import folded_column, identifier, impossible_name, name_findings, target_name
from subscriber.sinks.sqlalchemy.reflection import ReflectedTable, reflect
from subscriber.types import PgType
from subscriber.types.codec import binary_problem

__all__ = ["add_columns", "check", "create_table", "require_usable_name", "table_to_create"]

_MYSQL: Final = {"mysql", "mariadb"}
_TABLE_OPTIONS: Final[dict[str, Any]] = {
    f"{dialect}_{option}": value
    for dialect in ("mysql", "mariadb")
    for option, value in (("engine", "InnoDB"), ("default_charset", "utf8mb4"), ("row_format", "DYNAMIC"))
}


class _AddColumn(DDLElement):
    """ALTER TABLE ... ADD COLUMN, which SQLAlchemy has no construct for."""

    def __init__(self, column: Column[Any]) -> None:
        self.column = column


@compiles(_AddColumn)
def _add_column(element: _AddColumn, compiler: DDLCompiler, **_: Any) -> str:
    table = compiler.preparer.format_table(element.column.table)
    return f"ALTER TABLE {table} ADD COLUMN {compiler.get_column_specification(element.column)}"


async def table_to_create(connection: AsyncConnection, published: PublishedTable) -> Table:
    """The table as it would be made: columns, NOT NULL, primary key, and the replica identity's key if that is another one."""
    schema, name = target_name(published.name, connection.dialect.name)
    sources = source_types(published)
    primary = published.primary_key
    identity = published.key_columns if published.replica_identity in {"d", "i"} else ()
    keys = [key for key in (primary or identity, identity) if key]
    keyed = {column for key in keys for column in key}
    texts = max((sum(_is_text(source) for column, source in sources if column in key) for key in keys), default=0)
    types = await _created_types(connection, sources, texts)
    columns = [
        Column(
            identifier(column),
            types.of(source, key=column in keyed),
            nullable=column not in published.not_null and column not in keyed,
            autoincrement=False,
        )
        for column, source in sources
    ]
    constraints: list[PrimaryKeyConstraint | UniqueConstraint] = []
    if keys:
        constraints.append(PrimaryKeyConstraint(*keys[0]))
        constraints += [UniqueConstraint(*key) for key in keys[1:] if key != keys[0]]
    return Table(name, MetaData(), *columns, *constraints, schema=schema, **_TABLE_OPTIONS)


def _is_text(source: PgType) -> bool:
    return source.builtin not in {"bool", "int2", "int4", "int8", "oid", "float4", "float8", "date", "time", "timestamp", "timestamptz"}


async def _created_types(connection: AsyncConnection, sources: Iterable[tuple[str, PgType]], texts: int = 1) -> CreatedTypes:
    dialect = connection.dialect
    existing: frozenset[tuple[str, str]] = frozenset()
    if dialect.name == "postgresql":
        names = {source.domain or (source.namespace, source.name) for _, source in sources} | {
            (source.namespace, source.name) for _, source in sources
        }
        rows = await connection.execute(
            text(
                "SELECT n.nspname::text, t.typname::text FROM pg_catalog.pg_type AS t "
                "JOIN pg_catalog.pg_namespace AS n ON n.oid = t.typnamespace WHERE t.typname = ANY (CAST(:names AS text[]))"
            ),
            {"names": sorted({name for _, name in names})},
        )
        existing = frozenset((namespace, name) for namespace, name in rows)
    return CreatedTypes(dialect.name, is_mariadb=bool(getattr(dialect, "is_mariadb", False)), keys=texts, existing=existing)


async def create_table(connection: AsyncConnection, published: PublishedTable) -> None:
    """Make the table, and on PostgreSQL its schema, unless it is there."""
    table = await table_to_create(connection, published)
    if table.schema is not None:
        await connection.execute(CreateSchema(table.schema, if_not_exists=True))
    await connection.execute(CreateTable(table, if_not_exists=True))


async def add_columns(
    connection: AsyncConnection, relation: Relation | PublishedTable, published: PublishedTable | None = None
) -> tuple[str, ...]:
    """Add the published columns that the target's table has not; they may be NULL there.

    Returns:
        Their names.
    """
    target = await load_target_table(connection, relation, published)
    target.require_addable()
    sources = {name: source for name, source in source_types(relation, published) if name in target.missing}
    types = await _created_types(connection, sources.items())
    for name, source in sources.items():
        column = Column(identifier(name), types.of(source, key=False))
        Table(target.table.name, MetaData(), column, schema=target.table.schema)
        await connection.execute(_AddColumn(column))
    return target.missing


async def require_usable_name(connection: AsyncConnection, table: TableName, others: Sequence[TableName]) -> None:
    """See that a table would be none of ours in the target, and none of the others.

    Args:
        connection: to the target.
        table: of the publisher.
        others: that the subscription has already.

    Raises:
        RelationError: it would.
    """
    dialect, caseless = connection.dialect, None
    if dialect.name in _MYSQL:
        caseless = bool((await connection.execute(text("SELECT @@lower_case_table_names <> 0"))).scalar())
    for finding in name_findings([*others, table], dialect, caseless=caseless):
        raise RelationError(finding.message, sqlstate="42P07", hint=finding.hint)


async def check(
    connection: AsyncConnection,
    tables: Sequence[PublishedTable],
    *,
    creating: bool = False,
    adding: bool = False,
    binary: bool = False,
) -> list[Finding]:
    """Everything about the tables that would go wrong. Reads only.

    Args:
        connection: to the target.
        tables: all that are published.
        creating: tables that are missing will be made.
        adding: columns that are missing will be added, or left out knowingly.
        binary: values come in the binary format.
    """
    caseless: bool | None = None
    becomes_now = False
    if connection.dialect.name in _MYSQL:
        query = text("SELECT @@lower_case_table_names <> 0, @@explicit_defaults_for_timestamp = 0")
        caseless, becomes_now = map(bool, (await connection.execute(query)).one())
    findings = name_findings([table.name for table in tables], connection.dialect, caseless=caseless)
    for published in tables:
        findings += _column_names(published, connection.dialect)
        if binary:
            findings += _binary(published)
        found = await reflect(connection, published.name)
        if found is None and creating:
            continue
        try:
            target = await load_target_table(connection, published)
            if not adding:
                target.require_complete()
        except RelationError as error:
            findings.append(Finding("error", str(error), error.hint or "compare the target's table with the publisher's"))
            continue
        if found is not None:
            findings += _table(published, target, found)
            if becomes_now:
                findings += _timestamps(published, target, found)
    return findings


def _column_names(published: PublishedTable, dialect: Dialect) -> list[Finding]:
    findings = []
    seen: dict[str, str] = {}
    for name in published.columns:
        other = seen.setdefault(folded_column(name, dialect.name), name)
        if other != name:
            message = f'columns "{other}" and "{name}" of table "{published.name}" have one name in the target'
            findings.append(Finding("error", message, "rename one of them at the publisher, or leave it out of the publication"))
        problem = impossible_name(name, dialect)
        if problem is not None:
            message = f'column "{name}" of table "{published.name}": {problem} in the target'
            findings.append(Finding("error", message, "rename it at the publisher, or leave it out of the publication"))
    return findings


def _binary(published: PublishedTable) -> list[Finding]:
    return [
        Finding("error", f'column "{name}" of table "{published.name}": {problem}', "set binary = false on the subscription")
        for name, source in source_types(published)
        if (problem := binary_problem(source)) is not None
    ]


def _timestamps(published: PublishedTable, target: TargetTable, found: ReflectedTable) -> list[Finding]:
    """Of a server that takes NULL for the current time, where a column is NOT NULL."""
    return [
        Finding(
            "error",
            f'column "{plan.name}" of table "{published.name}" is TIMESTAMP NOT NULL in the target, where NULL becomes the current time',
            "make it NULL or DATETIME there, or set explicit_defaults_for_timestamp = ON",
        )
        for plan in target.columns
        if plan.column is not None
        and isinstance(plan.column.type, TIMESTAMP)
        and plan.name in found.not_null
        and plan.name not in published.not_null
    ]


def _table(published: PublishedTable, target: TargetTable, found: ReflectedTable) -> list[Finding]:
    findings = []
    unfilled = sorted(found.required - set(published.columns))
    if unfilled:
        message = f'column "{unfilled[0]}" of table "{published.name}" is NOT NULL in the target, has no default and is not published'
        findings.append(Finding("error", message, "give it a default in the target, or publish it"))
    if found.engine not in {None, "innodb"}:
        message = f'table "{published.name}" of the target has storage engine {found.engine}, which has no transactions'
        findings.append(Finding("error", message, "ALTER TABLE ... ENGINE = InnoDB"))
    if target.key is None:
        if published.changes and published.replica_identity == "f":
            message = f'table "{published.name}" of the target has no key: each UPDATE and DELETE compares all columns of all rows'
            findings.append(
                Finding("warning", message, "give it a primary key, or a unique index over NOT NULL columns, that is published")
            )
        return findings
    names = {target.columns[index].name for index in target.key}
    if not any(names.issuperset(key) for key in found.keys):
        columns = ", ".join(sorted(names))
        message = f'table "{published.name}" of the target has no unique key within its replica identity ({columns}): rows may be double'
        findings.append(Finding("warning", message, "add a primary key or unique index over these columns"))
    for name in sorted(names & found.inexact):
        message = f'key column "{name}" of table "{published.name}" has a collation in the target under which different keys are equal'
        findings.append(
            Finding("warning", message, "give it a binary collation without padding: BINARY, utf8mb4_nopad_bin, utf8mb4_0900_bin")
        )
    return findings
