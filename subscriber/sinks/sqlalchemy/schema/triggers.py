"""Triggers of the target: they fire for changes and for the rows of a reconciliation. SQLite and MariaDB cannot suppress them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from subscriber.catalog.store import FiringTrigger
from subscriber.interfaces import TableName
from subscriber.sinks.sqlalchemy.schema.names import target_name

__all__ = ["first_firing"]

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
            return FiringTrigger(names[str(table).lower()], str(trigger), f"DROP TRIGGER {quoted}", "create it again")
    return None
