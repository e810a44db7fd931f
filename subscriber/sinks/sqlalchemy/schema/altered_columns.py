"""Adds, renames and alters columns of the target's tables.

Each step is idempotent, or found done by its caller: on MySQL each ALTER TABLE commits, and a crash may follow.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from sqlalchemy import Column, Dialect, Executable, MetaData, Table, text, update
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import DDLElement
from sqlalchemy.sql.compiler import DDLCompiler
from sqlalchemy.types import NullType, TypeEngine

from subscriber.errors import RelationError, TargetError, TargetUnavailable
from subscriber.interfaces import PublishedTable, TableName
from subscriber.protocol.messages import Relation
from subscriber.sinks.sqlalchemy.schema.column_steps import AddColumns, Drop, Redefine, Rename, Step
from subscriber.sinks.sqlalchemy.schema.created_types import Untyped
from subscriber.sinks.sqlalchemy.schema.names import identifier, target_name
from subscriber.sinks.sqlalchemy.schema.reflection import reflect
from subscriber.sinks.sqlalchemy.schema.table_creation import created_types
from subscriber.sinks.sqlalchemy.schema.target_table import load_target_table, source_types
from subscriber.sinks.sqlalchemy.session.database_errors import translated
from subscriber.types.codec import READ_ERRORS

__all__ = ["add_columns", "created_type", "make_step"]

_UNFILLED: Final = "subscriber_new_column"
"""Name of a column until all rows have its value. The database may commit each statement: after a crash it is found, and made again."""
_TYPE: Final = re.compile(
    r"\w+(\((?:'(?:[^']|'')*'|[^)'])*\))?( unsigned| zerofill)*( CHARACTER SET \w+)?( COLLATE \w+)?", re.IGNORECASE | re.ASCII
)
"""A type of MySQL, as SHOW CREATE TABLE writes it."""
_SQLITE_NEEDED_BY: Final = re.compile(r"error in (index|view|trigger) (.+) after drop column")
_NEEDED_BY: Final = """
SELECT CONCAT('ALTER TABLE `', REPLACE(k.table_name, '`', '``'), '` DROP FOREIGN KEY `', REPLACE(k.constraint_name, '`', '``'), '`')
  FROM information_schema.key_column_usage AS k
 WHERE k.referenced_table_name IS NOT NULL
   AND ((k.table_schema = DATABASE() AND k.table_name = :table AND k.column_name = :column)
        OR (k.referenced_table_schema = DATABASE() AND k.referenced_table_name = :table AND k.referenced_column_name = :column))
UNION
SELECT CONCAT('ALTER TABLE `', REPLACE(s.table_name, '`', '``'), '` DROP ',
              CASE s.index_name WHEN 'PRIMARY' THEN 'PRIMARY KEY' ELSE CONCAT('INDEX `', REPLACE(s.index_name, '`', '``'), '`') END)
  FROM information_schema.statistics AS s
 WHERE s.table_schema = DATABASE() AND s.table_name = :table AND s.column_name = :column
UNION
SELECT CONCAT('DROP VIEW `', REPLACE(v.table_name, '`', '``'), '`')
  FROM information_schema.views AS v
 WHERE v.table_schema = DATABASE() AND INSTR(v.view_definition, CONCAT('`', REPLACE(:table, '`', '``'), '`')) > 0
   AND INSTR(v.view_definition, CONCAT('.`', REPLACE(:column, '`', '``'), '`')) > 0
"""
"""Statements that remove what needs a column of MySQL. A view may only need another column of this name."""


class _AddColumn(DDLElement):
    """ALTER TABLE ... ADD COLUMN: SQLAlchemy has no construct for it."""

    def __init__(self, column: Column[Any]) -> None:
        self.column = column


@compiles(_AddColumn)
def _add_column(element: _AddColumn, compiler: DDLCompiler, **_: Any) -> str:
    table = compiler.preparer.format_table(element.column.table)
    return f"ALTER TABLE {table} ADD COLUMN {compiler.get_column_specification(element.column)}"


class _Alter(DDLElement):
    """ALTER TABLE with any action. It may name columns as ``{0}``, ``{1}``."""

    def __init__(self, table: Table, action: str, *columns: str) -> None:
        self.table = table
        self.action = action
        self.columns = columns


@compiles(_Alter)
def _alter(element: _Alter, compiler: DDLCompiler, **_: Any) -> str:
    columns = [compiler.preparer.quote(identifier(column)) for column in element.columns]
    action = element.action.format(*columns) if columns else element.action
    return f"ALTER TABLE {compiler.preparer.format_table(element.table)} {action}"


def created_type(dialect: Dialect, relation: Relation, published: PublishedTable | None, name: str, *, key: bool) -> TypeEngine[Any]:
    """The type that a column of the publisher gets in a table that is created."""
    return created_types(dialect).of(dict(source_types(relation, published))[name], key=key)


async def make_step(connection: AsyncConnection, relation: Relation, published: PublishedTable | None, step: Step) -> None:
    """Change a column of a relation's table.

    Raises:
        RelationError: a column cannot hold the value that existing rows are to get.
        TargetError: the target rejects it. The hint has the statements.
        TargetUnavailable
    """
    name = TableName(relation.namespace, relation.name)
    match step:
        case AddColumns(values):
            await add_columns(connection, relation, published, values)
        case Rename(old, new):
            await _execute(connection, _Alter(Table(target_name(name), MetaData()), "RENAME COLUMN {0} TO {1}", old, new))
        case Drop(column):
            await _drop_column(connection, name, column)
        case Redefine(column, kind):
            table = await reflect(connection, name)
            if table is not None:
                redefine = _replace_column if connection.dialect.name == "sqlite" else _modify_column
                await redefine(connection, table.table, column, kind)


async def _execute(connection: AsyncConnection, *statements: Executable) -> None:
    try:
        for statement in statements:
            with translated():
                await connection.execute(statement)
    except TargetUnavailable:
        raise
    except TargetError as error:
        texts = "; ".join(str(statement.compile(dialect=connection.dialect)) for statement in statements)  # type: ignore[attr-defined]
        error.hint = f"let the target accept this, or change the column there yourself: {texts}"
        raise


async def _drop_column(connection: AsyncConnection, name: TableName, column: str) -> None:
    table = Table(target_name(name), MetaData())
    if connection.dialect.name != "sqlite":
        # MySQL would change or drop an index, and leave a view that cannot be read
        found = await connection.execute(text(_NEEDED_BY), {"table": table.name, "column": column})
        if statements := [statement for (statement,) in found]:
            raise _needed(name, column, statements)
    try:
        await _execute(connection, _Alter(table, "DROP COLUMN {0}", column))
    except TargetError as error:
        # the error of the driver
        if needed := _SQLITE_NEEDED_BY.search(str(error.__context__)):
            raise _needed(name, column, [f'DROP {needed[1].upper()} "{needed[2]}"']) from None
        raise


def _needed(name: TableName, column: str, statements: Sequence[str]) -> RelationError:
    return RelationError(
        f'column "{column}" of table "{name}" was dropped on the publisher, and indexes, constraints or views of the target need it',
        hint=f"execute there: {'; '.join(statements)}; or keep the column with dropped_columns = keep",
        sqlstate="2BP01",
    )


async def _replace_column(connection: AsyncConnection, table: Table, name: str, kind: TypeEngine[Any] | None) -> None:
    """SQLite cannot change a column: the values move to a new one."""
    kind = kind or table.c[name].type
    new = Column(_UNFILLED, Untyped() if isinstance(kind, NullType) else kind)
    changed = Table(table.name, MetaData(), new, Column(identifier(name), kind))
    await _execute(
        connection,
        _AddColumn(new),
        update(changed).values({changed.c[_UNFILLED]: changed.c[name]}),
        _Alter(table, "DROP COLUMN {0}", name),
        _Alter(table, "RENAME COLUMN {0} TO {1}", _UNFILLED, name),
    )


async def _modify_column(connection: AsyncConnection, table: Table, name: str, kind: TypeEngine[Any] | None) -> None:
    """MySQL changes a column to a complete definition: its own, with another type, or with NULL."""
    dialect = connection.dialect
    row: Sequence[Any] = (await connection.exec_driver_sql(f"SHOW CREATE TABLE {dialect.identifier_preparer.format_table(table)}")).one()
    quoted = f"`{name}` "
    (line,) = [line.strip().removesuffix(",") for line in str(row[1]).splitlines() if line.strip().startswith(quoted)]
    found = _TYPE.match(line, len(quoted))
    assert found is not None
    rest = line[found.end() :]
    if kind is None:
        definition = quoted + found[0] + rest.replace(" NOT NULL", " NULL", 1)
    else:
        definition = quoted + kind.compile(dialect=dialect) + rest
    # the driver reads a percent sign as the begin of a parameter
    await _execute(connection, _Alter(table, f"MODIFY COLUMN {definition}".replace("%", "%%")))


async def add_columns(
    connection: AsyncConnection,
    relation: Relation | PublishedTable,
    published: PublishedTable | None = None,
    values: Mapping[str, str | None] | None = None,
) -> None:
    """Add the published columns that the target's table lacks. They may be NULL there.

    Args:
        connection: to the target.
        relation: as for :func:`load_target_table`.
        published: as there.
        values: what existing rows get, as texts of PostgreSQL; others get NULL.
    """
    target = await load_target_table(connection, relation, published)
    target.require_addable()
    types = created_types(connection.dialect)
    if _UNFILLED in target.table.c:
        # an earlier attempt has left it
        await _execute(connection, _Alter(target.table, "DROP COLUMN {0}", _UNFILLED))
    for name, source in source_types(relation, published):
        if name not in target.missing:
            continue
        column = Column(identifier(name), types.of(source, key=False))
        table = Table(target.table.name, MetaData(), column)
        value = (values or {}).get(name)
        if value is None or not isinstance(relation, Relation):
            await _execute(connection, _AddColumn(column))
        else:
            await _add_filled(connection, table, relation, published, value)


async def _add_filled(connection: AsyncConnection, table: Table, relation: Relation, published: PublishedTable | None, value: str) -> None:
    """Add the only column of ``table``."""
    (column,) = table.columns
    unfilled = Column(_UNFILLED, column.type)
    Table(table.name, MetaData(), unfilled)
    await _execute(connection, _AddColumn(unfilled))
    columns = tuple(replace(each, name=_UNFILLED) if each.name == column.name else each for each in relation.columns)
    await _fill(connection, replace(relation, columns=columns), published, value)
    await _execute(connection, _Alter(table, "RENAME COLUMN {0} TO {1}", _UNFILLED, str(column.name)))


async def _fill(connection: AsyncConnection, relation: Relation, published: PublishedTable | None, value: str) -> None:
    """Store a value in the column that is not filled yet, in all rows."""
    target = await load_target_table(connection, relation, published)
    (plan,) = [each for each in target.columns if each.name == _UNFILLED]
    try:
        bound = plan.text(value.encode())
    except READ_ERRORS as error:
        raise RelationError(
            f'a column of table "{target.name}" cannot hold the value that the rows of the publisher have in it: {type(error).__name__}',
            hint="add the column by hand, with a type that can hold it",
        ) from None
    await connection.execute(update(target.table).values({target.table.c[_UNFILLED]: plan.parameter("filled")}), {"filled": bound})
