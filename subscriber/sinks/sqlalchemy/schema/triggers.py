"""Triggers of the target that fire for the rows which a reconciliation deletes and writes. SQLite and MariaDB cannot suppress them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sqlalchemy import Table, text
from sqlalchemy.ext.asyncio import AsyncConnection

from subscriber.catalog.store import FiringTrigger
from subscriber.errors import RelationError
from subscriber.interfaces import TableName
from subscriber.sinks.sqlalchemy.schema.names import target_name

__all__ = ["firing_trigger", "first_firing"]

_MYSQL: Final = (
    "SELECT trigger_name FROM information_schema.triggers"
    " WHERE event_object_table = :relation AND event_object_schema = coalesce(:namespace, database()) ORDER BY 1"
)
_SQLITE: Final = (
    "SELECT name FROM sqlite_master WHERE type = 'trigger' AND tbl_name = :relation COLLATE NOCASE AND :namespace IS NULL ORDER BY 1"
)
_QUERIES: Final = {"sqlite": _SQLITE, "mysql": _MYSQL, "mariadb": _MYSQL}


_ALL: Final = {
    "sqlite": "SELECT tbl_name, name FROM sqlite_master WHERE type = 'trigger' ORDER BY 2",
    "mysql": "SELECT event_object_table, trigger_name FROM information_schema.triggers WHERE event_object_schema = database() ORDER BY 2",
}


async def first_firing(connection: AsyncConnection, tables: Sequence[TableName]) -> FiringTrigger | None:
    """Return the first trigger of these tables; None: there is none, or the kind of database is another one.

    Args:
        connection: with the target.
        tables: the publisher's names.
    """
    dialect = connection.dialect
    query = _ALL.get("mysql" if dialect.name == "mariadb" else dialect.name)
    if query is None or not tables:
        return None
    names = {str(target_name(table)).lower(): table for table in tables}
    for table, trigger in await connection.execute(text(query)):
        if str(table).lower() in names:
            quoted = dialect.identifier_preparer.quote_identifier(str(trigger))
            return FiringTrigger(names[str(table).lower()], str(trigger), f"DROP TRIGGER {quoted}")
    return None


async def firing_trigger(connection: AsyncConnection, name: TableName, table: Table) -> RelationError | None:
    """Return the error for the first trigger of a table; None: it has none, or the kind of database is another one.

    Args:
        connection: with the target.
        name: of the table, for the error.
        table: the target's.
    """
    query = _QUERIES.get(connection.dialect.name)
    if query is None:
        return None
    trigger = (await connection.execute(text(query), {"relation": table.name, "namespace": table.schema})).scalar()
    if trigger is None:
        return None
    return RelationError(
        f'trigger "{trigger}" fires for the rows that are deleted and written while table "{name}" is reconciled',
        sqlstate="55000",
        hint=f"DROP TRIGGER {connection.dialect.identifier_preparer.quote_identifier(str(trigger))}, and create it again afterwards",
    )
