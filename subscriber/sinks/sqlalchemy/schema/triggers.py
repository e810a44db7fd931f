"""Triggers of the target that fire for the rows which a reconciliation deletes and writes. SQLite and MariaDB cannot suppress them."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Table, text
from sqlalchemy.ext.asyncio import AsyncConnection

from subscriber.errors import RelationError
from subscriber.interfaces import TableName

__all__ = ["firing_trigger"]

_MYSQL: Final = (
    "SELECT trigger_name FROM information_schema.triggers"
    " WHERE event_object_table = :relation AND event_object_schema = coalesce(:namespace, database()) ORDER BY 1"
)
_SQLITE: Final = (
    "SELECT name FROM sqlite_master WHERE type = 'trigger' AND tbl_name = :relation COLLATE NOCASE AND :namespace IS NULL ORDER BY 1"
)
_QUERIES: Final = {"sqlite": _SQLITE, "mysql": _MYSQL, "mariadb": _MYSQL}


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
