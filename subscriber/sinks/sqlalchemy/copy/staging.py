"""The staging table: it holds the rows of an initial copy if the target's table had rows before.

It has the same columns, and no key but one that MySQL needs.

Some databases commit the statements that create and drop it implicitly, so each step is idempotent. A staging table has a meaning only
while the state of the table's synchronization says that a copy into it has begun.
"""

from __future__ import annotations

from sqlalchemy import Column, Connection, MetaData, Table, inspect
from sqlalchemy.ext.asyncio import AsyncConnection

from subscriber.sinks.sqlalchemy.catalog_tables import PREFIX
from subscriber.sinks.sqlalchemy.schema.reflection import ReflectedTable
from subscriber.sinks.sqlalchemy.schema.target_table import TargetTable

__all__ = ["Staging"]

_MYSQL = frozenset({"mysql", "mariadb"})
_KEY = "subscriber_staged_row BIGINT UNSIGNED NOT NULL AUTO_INCREMENT PRIMARY KEY"
"""MySQL with ``sql_require_primary_key`` creates no table without a key."""


class Staging:
    """The staging table of one table.

    Args:
        relid: the table's number; it is a part of the name.
    """

    def __init__(self, relid: int) -> None:
        self._name = f"{PREFIX}copy_{relid}"

    def _quoted(self, connection: AsyncConnection) -> str:
        return connection.dialect.identifier_preparer.format_table(Table(self._name, MetaData()))

    async def drop(self, connection: AsyncConnection) -> None:
        """Drop the staging table if it exists."""

        def look(sync: Connection) -> bool:
            return inspect(sync).has_table(self._name)

        # check first: on MariaDB, IF EXISTS gives a warning, and a commit
        if await connection.run_sync(look):
            await connection.exec_driver_sql(f"DROP TABLE {self._quoted(connection)}")

    async def make(self, connection: AsyncConnection, target: ReflectedTable) -> None:
        """Create the empty staging table, with a table's columns except the generated ones.

        A copy has no values for generated columns, and they may be NOT NULL.
        """
        await self.drop(connection)
        options = f" ({_KEY}) ENGINE=InnoDB" if connection.dialect.name in _MYSQL else ""
        prepare = connection.dialect.identifier_preparer
        names = ", ".join(prepare.format_column(column) for column in target.table.c if column.name not in target.generated)
        made = f"CREATE TABLE {self._quoted(connection)}{options} AS SELECT {names} FROM {prepare.format_table(target.table)} WHERE 1 = 0"  # noqa: S608
        await connection.exec_driver_sql(made)  # quoted

    def like(self, target: TargetTable) -> Table:
        """Return the staging table with only the columns of the copied rows."""
        columns = [Column(plan.column.name, plan.column.type) for plan in target.columns if plan.column is not None]
        return Table(self._name, MetaData(), *columns)

    async def move(self, connection: AsyncConnection, target: TargetTable) -> None:
        """Insert its rows into the table, in the open transaction.

        Args:
            connection: to the target.
            target: the table.
        """
        prepare = connection.dialect.identifier_preparer
        names = ", ".join(prepare.format_column(plan.column) for plan in target.columns if plan.column is not None)
        into = f"INSERT INTO {prepare.format_table(target.table)} ({names})"
        await connection.exec_driver_sql(f"{into} SELECT {names} FROM {self._quoted(connection)}")  # noqa: S608 (quoted)
