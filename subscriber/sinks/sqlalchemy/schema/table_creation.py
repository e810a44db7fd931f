"""Creates tables of the target, and checks them before anything is written, by the publisher's descriptions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from sqlalchemy import TIMESTAMP, Column, Dialect, ForeignKeyConstraint, MetaData, PrimaryKeyConstraint, Table, UniqueConstraint, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.schema import CreateTable

from subscriber.errors import RelationError
from subscriber.interfaces import Finding, PublishedTable, TableName
from subscriber.sinks.sqlalchemy.schema.created_types import CreatedTypes
from subscriber.sinks.sqlalchemy.schema.names import identifier, name_findings, target_name
from subscriber.sinks.sqlalchemy.schema.reflection import ReflectedTable, reflect_all
from subscriber.sinks.sqlalchemy.schema.target_table import TargetTable, plan_target_table, source_types
from subscriber.sinks.sqlalchemy.schema.trial_creation import failed_trials, not_created, structure_findings
from subscriber.types import PgType
from subscriber.types.codec import WITHOUT_BINARY, binary_problem

__all__ = ["Reference", "TableDetails", "check", "create_table", "created_types", "foreign_key", "table_to_create", "unusable", "usable"]

_STRUCTURE: Final = "42P16"

_MYSQL: Final = {"mysql", "mariadb"}
_ASCII_TYPES: Final = frozenset(
    {
        *("bool", "int2", "int4", "int8", "oid", "xid", "xid8", "cid", "float4", "float8", "numeric", "money", "bytea", "uuid", "pg_lsn"),
        *("date", "time", "timetz", "timestamp", "timestamptz", "interval", "bit", "varbit", "inet", "cidr", "macaddr", "macaddr8"),
    }
)
"""Types whose texts are ASCII, which every character set contains."""
_TABLE_OPTIONS: Final[dict[str, Any]] = {
    f"{dialect}_{option}": value
    for dialect in ("mysql", "mariadb")
    for option, value in (("engine", "InnoDB"), ("default_charset", "utf8mb4"), ("row_format", "DYNAMIC"))
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A foreign key: its columns, the table that they refer to, the columns there, and its actions in SQL."""

    columns: Sequence[str]
    table: TableName
    others: Sequence[str]
    on_delete: str | None = None
    on_update: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TableDetails:
    """What a copied schema has beyond what replication needs.

    Attributes:
        keys: columns of further unique keys and of foreign keys: their text gets a length.
        counter: the column that takes values from a sequence, if the target can count it: the only column of the primary key.
        comment: the table's comment.
        comments: those of columns.
        references: foreign keys that are created with the table.
    """

    keys: tuple[tuple[str, ...], ...] = ()
    counter: str | None = None
    comment: str | None = None
    comments: Mapping[str, str] = field(default_factory=dict)
    references: tuple[Reference, ...] = ()


async def table_to_create(
    connection: AsyncConnection, published: PublishedTable, *, temporary: bool = False, details: TableDetails | None = None
) -> Table:
    """Build the table to create: columns, NOT NULL, primary key, and the replica identity's key if it differs from the primary key."""
    details = details or TableDetails()
    name = target_name(published.name)
    sources = source_types(published)
    primary = published.primary_key
    identity = published.key_columns if published.replica_identity in {"d", "i"} else ()
    keys = [key for key in (primary or identity, identity) if key]
    never_null = {column for key in keys for column in key}
    keyed = never_null.union(*details.keys)
    texts = max((sum(_is_text(source) for column, source in sources if column in key) for key in (*keys, *details.keys)), default=0)
    types = created_types(connection.dialect, texts)
    columns = [
        Column(
            identifier(column),
            types.of(source, key=column in keyed),
            nullable=column not in published.not_null and column not in never_null,
            autoincrement=column == details.counter,
            comment=details.comments.get(column),
        )
        for column, source in sources
    ]
    metadata = MetaData()
    constraints: list[PrimaryKeyConstraint | UniqueConstraint | ForeignKeyConstraint] = []
    if keys:
        constraints.append(PrimaryKeyConstraint(*keys[0]))
        constraints += [UniqueConstraint(*key) for key in keys[1:] if key != keys[0]]
    constraints += [foreign_key(metadata, name, reference) for reference in details.references]
    options: dict[str, Any] = {**_TABLE_OPTIONS, "sqlite_autoincrement": details.counter is not None}
    prefixes = ["TEMPORARY"] if temporary else []
    return Table(name, metadata, *columns, *constraints, prefixes=prefixes, comment=details.comment, **options)


def foreign_key(metadata: MetaData, table: str, reference: Reference) -> ForeignKeyConstraint:
    """Build a foreign key. SQLAlchemy wants to know the other table: it gets one of the same name with these columns."""
    place, others = target_name(reference.table), reference.others
    if place != table and place not in metadata.tables:
        Table(place, metadata)
    if place != table:
        for each in others:
            if each not in metadata.tables[place].c:
                metadata.tables[place].append_column(Column(identifier(each)))
    named = [metadata.tables[place].c[each] for each in others] if place != table else [f"{place}.{each}" for each in others]
    return ForeignKeyConstraint(list(reference.columns), named, onupdate=reference.on_update, ondelete=reference.on_delete)


def _is_text(source: PgType) -> bool:
    return source.builtin not in {"bool", "int2", "int4", "int8", "oid", "float4", "float8", "date", "time", "timestamp", "timestamptz"}


def created_types(dialect: Dialect, texts: int = 1) -> CreatedTypes:
    """The types of columns that are created. ``texts``: how many text columns share the key."""
    return CreatedTypes(dialect.name, is_mariadb=bool(getattr(dialect, "is_mariadb", False)), keys=texts)


async def create_table(connection: AsyncConnection, published: PublishedTable, details: TableDetails | None = None) -> None:
    """Create the table, if it does not exist.

    Raises:
        RelationError: the target cannot have such a table.
        TargetError, TargetUnavailable
    """
    for finding in structure_findings(published, connection.dialect):
        raise RelationError(finding.message, sqlstate=_STRUCTURE, hint=finding.hint)
    try:
        table = await table_to_create(connection, published, details=details)
        await connection.execute(CreateTable(table, if_not_exists=True))
    except SQLAlchemyError as error:
        raise not_created(published.name, error) from None


async def _trial_table(connection: AsyncConnection, published: PublishedTable) -> Table:
    return await table_to_create(connection, published, temporary=True)


async def _caseless(connection: AsyncConnection) -> bool | None:
    """Whether the target ignores the case of table names; None: as this kind of database always does."""
    if connection.dialect.name not in _MYSQL:
        return None
    return bool((await connection.execute(text("SELECT @@lower_case_table_names <> 0"))).scalar())


async def usable(connection: AsyncConnection, tables: Iterable[PublishedTable]) -> list[PublishedTable]:
    """Return the published tables whose names are possible in the target."""
    published = sorted(tables, key=lambda table: table.name)
    findings = name_findings([table.name for table in published], connection.dialect, caseless=await _caseless(connection))
    refused = {finding.table for finding in findings}
    return [table for table in published if table.name not in refused]


async def unusable(
    connection: AsyncConnection, tables: Sequence[TableName], others: Sequence[TableName], published: Mapping[TableName, PublishedTable]
) -> dict[TableName, RelationError]:
    """Those of the tables that would be one of ours in the target, or another one, or whose columns have no names there.

    Args:
        connection: to the target.
        tables: of the publisher.
        others: that the subscription has already.
        published: what the publisher's catalog says of them.
    """
    findings = [
        (finding, "42P07") for finding in name_findings([*others, *tables], connection.dialect, caseless=await _caseless(connection))
    ]
    for name in tables:
        if name in published:
            findings += [(finding, _STRUCTURE) for finding in structure_findings(published[name], connection.dialect)]
    found: dict[TableName, RelationError] = {}
    known = frozenset(others)
    for finding, sqlstate in findings:
        if finding.table is not None and finding.table not in known:
            found.setdefault(finding.table, RelationError(finding.message, sqlstate=sqlstate, hint=finding.hint))
    return found


async def check(
    connection: AsyncConnection,
    tables: Sequence[PublishedTable],
    *,
    creating: bool = False,
    adding: bool = False,
    binary: bool = False,
) -> list[Finding]:
    """Return all problems that these tables would meet in the target. Changes nothing.

    Args:
        connection: to the target.
        tables: all published tables.
        creating: missing tables will be created.
        adding: missing columns will be added, or ignored as the user chose.
        binary: the publisher sends values in the binary format.
    """
    becomes_now = False
    if connection.dialect.name in _MYSQL:
        becomes_now = bool((await connection.execute(text("SELECT @@explicit_defaults_for_timestamp = 0"))).scalar())
    names = sorted(table.name for table in tables)
    findings = name_findings(names, connection.dialect, caseless=await _caseless(connection))
    impossible = {finding.table for finding in findings}
    missing = []
    reflected = await reflect_all(connection, [name for name in names if name not in impossible])
    for published in tables:
        found = structure_findings(published, connection.dialect)
        if binary:
            found += _binary(published)
        if published.name not in impossible and not found:
            there = reflected.get(published.name)
            if there is None and creating:
                missing.append(published)
            else:
                found += _there(connection.dialect.name, published, there, adding=adding, becomes_now=becomes_now)
        findings += [replace(finding, table=published.name) for finding in found]
    return findings + await failed_trials(connection, missing, _trial_table)


def _there(dialect: str, published: PublishedTable, found: ReflectedTable | None, *, adding: bool, becomes_now: bool) -> list[Finding]:
    try:
        target = plan_target_table(found, published, None, dialect)
        if not adding:
            target.require_complete()
    except RelationError as error:
        # alone=False for a missing table: it prevents the whole subscription, as in PostgreSQL
        hint = error.hint or "compare the target's table with the publisher's"
        return [Finding("error", str(error), hint, alone=found is not None, stops="without_copy")]
    if found is None:
        return []
    findings = _table(published, target, found) + _character_sets(published, target, found)
    return findings + (_timestamps(published, target, found) if becomes_now else [])


def _character_sets(published: PublishedTable, target: TargetTable, found: ReflectedTable) -> list[Finding]:
    return [
        Finding(
            "warning",
            f'column "{plan.name}" of table "{published.name}" has character set {found.character_sets[plan.name]} in the target:'
            " values with other characters are rejected",
            "ALTER TABLE ... CONVERT TO CHARACTER SET utf8mb4",
        )
        for plan in target.columns
        if plan.name in found.character_sets and plan.source.builtin not in _ASCII_TYPES
    ]


def _binary(published: PublishedTable) -> list[Finding]:
    findings = []
    for name, source in source_types(published):
        problem = binary_problem(source)
        # only the copy fails: the stream sends text for such a type
        only_copy = problem is None and source.builtin in WITHOUT_BINARY
        if only_copy:
            problem = f"type {source} has no binary format, the initial copy fails"
        if problem is not None:
            message = f'column "{name}" of table "{published.name}": {problem}'
            findings.append(Finding("error", message, "set binary = false on the subscription", alone=only_copy))
    return findings


def _timestamps(published: PublishedTable, target: TargetTable, found: ReflectedTable) -> list[Finding]:
    """Find NOT NULL columns for which the server replaces NULL by the current time."""
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
        findings.append(Finding("error", message, "give it a default in the target, or publish it", alone=True, stops="without_copy"))
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
        message = (
            f'table "{published.name}" of the target has no unique key within its replica identity ({columns}): rows may be duplicated'
        )
        findings.append(Finding("warning", message, "add a primary key or unique index over these columns"))
    for name in sorted(names & found.inexact):
        message = f'key column "{name}" of table "{published.name}" has a collation in the target under which different keys are equal'
        findings.append(
            Finding("warning", message, "give it a binary collation without padding: BINARY, utf8mb4_nopad_bin, utf8mb4_0900_bin")
        )
    return findings
