"""Checks whether a published table can be created in the target.

Many limits of a database are hard to predict: reserved names, bytes of a row and of a key, numbers of columns. So every table that is not
plain is created for a trial that leaves nothing behind: in an SQLite database in memory, or as a temporary table of MariaDB and MySQL.
Creating a temporary table does not commit the transaction.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

from sqlalchemy import Dialect, Table
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.schema import CreateTable, DropTable

from subscriber.errors import RelationError, TargetError, TargetUnavailable
from subscriber.interfaces import Finding, PublishedTable, TableName
from subscriber.sinks.sqlalchemy.schema.names import folded_column, impossible_name, target_name
from subscriber.sinks.sqlalchemy.session.database_errors import target_error

__all__ = ["failed_trials", "not_created", "structure_findings"]

_MYSQL: Final = frozenset({"mysql", "mariadb"})
_PLAIN: Final = re.compile(r"(?!sqlite|db_|fts_)[a-z_][a-z0-9_]{0,40}", re.ASCII)
_PLAIN_COLUMNS: Final = 30
"""A row of at most this number of columns fits, for all types."""
_PLAIN_KEY: Final = 4
_KEY_OF_MARIADB: Final = 31
_RENAME: Final = "rename it on the publisher, or leave it out of the publication"
_OTHERWISE: Final = "create it there with other types, or leave it or some of its columns out of the publication"
_NOT_ALLOWED: Final = frozenset({1044, 1142, 1227, 1786, 1787})
"""Error numbers: the server rejects all temporary tables."""


Make = Callable[[AsyncConnection, PublishedTable], Awaitable[Table]]


def structure_findings(published: PublishedTable, dialect: Dialect) -> list[Finding]:
    """Return the problems of a table's columns and key in a target of this dialect. They do not depend on who creates the table there."""
    found: list[tuple[str, str]] = []
    seen: dict[str, str] = {}
    for name in published.columns:
        other = seen.setdefault(folded_column(name, dialect.name), name)
        if other != name:
            message = f'columns "{other}" and "{name}" of table "{published.name}" have the same name in the target'
            found.append((message, "rename one of them on the publisher, or leave it out of the publication"))
        problem = impossible_name(name, dialect)
        if problem is not None:
            found.append((f'column "{name}" of table "{published.name}": {problem} in the target', _RENAME))
    if not published.columns:
        message = f'table "{published.name}" has no columns, and the target does not support such tables'
        found.append((message, "add a column, or leave it out of the publication"))
    if dialect.name in _MYSQL and len(published.key_columns) > _KEY_OF_MARIADB and published.replica_identity != "f":
        message = (
            f'table "{published.name}" has a key of {len(published.key_columns)} columns: MariaDB crashes when it looks up a row by it'
        )
        found.append((message, "use another replica identity, or leave the table out of the publication"))
    if dialect.name == "sqlite" and published.replica_identity == "f" and not published.primary_key and _hides_rowid(published):
        message = f'table "{published.name}" has no key, and its columns hide the row number of SQLite'
        found.append((message, "give it a primary key, or rename one of the columns rowid, oid and _rowid_"))
    return [Finding("error", message, hint, published.name, alone=True) for message, hint in found]


def _hides_rowid(published: PublishedTable) -> bool:
    return {"rowid", "oid", "_rowid_"} <= {name.lower() for name in published.columns}


async def failed_trials(connection: AsyncConnection, tables: Iterable[PublishedTable], make: Make) -> list[Finding]:
    """Create tables for a trial and return their problems. Nothing is left in the target.

    Args:
        connection: to the target.
        tables: the tables that the target lacks.
        make: returns a temporary table that is otherwise like the one to create.

    Raises:
        TargetUnavailable: the connection was lost.
    """
    suspects = [table for table in tables if not _is_plain(table, connection.dialect)]
    if not suspects:
        return []
    if connection.dialect.name in _MYSQL:
        return await _tried(connection, suspects, make)
    if connection.dialect.name != "sqlite":
        return []
    engine = create_async_engine("sqlite+aiosqlite://")
    try:
        async with engine.connect() as memory:
            return await _tried(memory, suspects, make)
    finally:
        await engine.dispose()


def _is_plain(published: PublishedTable, dialect: Dialect) -> bool:
    name = str(target_name(published.name))
    return (
        len(published.columns) <= _PLAIN_COLUMNS
        and len(published.primary_key) <= _PLAIN_KEY
        and len(published.key_columns) <= max(_PLAIN_KEY, len(published.columns) * (published.replica_identity == "f"))
        and all(map(_PLAIN.fullmatch, (name, *published.columns)))
    )


async def _tried(connection: AsyncConnection, tables: Sequence[PublishedTable], make: Make) -> list[Finding]:
    findings = []
    for published in tables:
        try:
            table = await make(connection, published)
            await connection.execute(CreateTable(table))
            await _drop(connection, table)
        except SQLAlchemyError as error:
            if isinstance(error, DBAPIError) and error.orig is not None and error.orig.args[:1] and error.orig.args[0] in _NOT_ALLOWED:
                break
            failed = not_created(published.name, error)
            if isinstance(failed, TargetUnavailable):
                raise failed from None
            findings.append(Finding("error", str(failed), failed.hint or _OTHERWISE, published.name, alone=True))
    return findings


async def _drop(connection: AsyncConnection, table: Table) -> None:
    if connection.dialect.name in _MYSQL:
        await connection.exec_driver_sql(f"DROP TEMPORARY TABLE {connection.dialect.identifier_preparer.format_table(table)}")
    else:
        await connection.execute(DropTable(table))


def not_created(name: TableName, error: SQLAlchemyError) -> TargetError:
    """Return the error of a CREATE TABLE. It may show the database's message, because DDL holds no values of rows."""
    known = target_error(error)
    if isinstance(known, TargetUnavailable) or (type(known) is TargetError and known.sqlstate not in {None, "XX000"}):
        known.add_note(f'while creating table "{name}"')
        return known
    original = error.orig if isinstance(error, DBAPIError) else error
    arguments = original.args if original is not None else ()
    said = arguments[1] if len(arguments) > 1 and isinstance(arguments[0], int) else original
    reason = " ".join(str(said).split())[:300]
    return RelationError(f'table "{name}" cannot be created in the target: {reason}', sqlstate=known.sqlstate, hint=_OTHERWISE)
