"""Where the rows of a copy wait if the table held rows before: a table of our own, of the same columns and without any key.

It is made and dropped by statements that may commit by themselves, so each is idempotent, and the state of the table's synchronization
decides what a staging table that is found means: nothing, unless a copy into it is under way.
"""

from __future__ import annotations

from sqlalchemy import Column, Connection, MetaData, Table, inspect
from sqlalchemy.ext.asyncio import AsyncConnection

from subscriber.sinks.sqlalchemy.columns import TargetTable
from subscriber.sinks.sqlalchemy.reflection import ReflectedTable
from subscriber.sinks.sqlalchemy.tables import PREFIX, CatalogTables

__all__ = ["Staging"]

_MYSQL = frozenset({"mysql", "mariadb"})


class Staging:
    """The staging table of one table.

    Args:
        tables: the catalog, whose schema it lies in.
        relid: the table's number: it makes the name.
    """

    def __init__(self, tables: CatalogTables, relid: int) -> None:
        self._schema = tables.schema
        self._name = f"{'' if tables.schema else PREFIX}copy_{relid}"

    def _quoted(self, connection: AsyncConnection) -> str:
        return connection.dialect.identifier_preparer.format_table(Table(self._name, MetaData(), schema=self._schema))

    async def drop(self, connection: AsyncConnection) -> None:
        """Drop it if it is there."""
        name, schema = self._name, self._schema

        def look(sync: Connection) -> bool:
            return inspect(sync).has_table(name, schema=schema)

        # looked for first: IF EXISTS is a warning on MariaDB, and a commit
        if await connection.run_sync(look):
            await connection.exec_driver_sql(f"DROP TABLE {self._quoted(connection)}")

    async def make(self, connection: AsyncConnection, target: ReflectedTable) -> None:
        """Make it, empty, with a table's columns but for those that it computes: nothing would fill them, and they may be NOT NULL."""
        await self.drop(connection)
        options = " ENGINE=InnoDB" if connection.dialect.name in _MYSQL else ""
        prepare = connection.dialect.identifier_preparer
        names = ", ".join(prepare.format_column(column) for column in target.table.c if column.name not in target.generated)
        made = f"CREATE TABLE {self._quoted(connection)}{options} AS SELECT {names} FROM {prepare.format_table(target.table)} WHERE 1 = 0"  # noqa: S608
        await connection.exec_driver_sql(made)  # quoted

    def like(self, target: TargetTable) -> Table:
        """It, with the columns that rows are copied into."""
        columns = [Column(plan.column.name, plan.column.type) for plan in target.columns if plan.column is not None]
        return Table(self._name, MetaData(), *columns, schema=self._schema)

    async def move(self, connection: AsyncConnection, target: TargetTable) -> None:
        """Move its rows into the table, in the transaction that is open."""
        prepare = connection.dialect.identifier_preparer
        names = ", ".join(prepare.format_column(plan.column) for plan in target.columns if plan.column is not None)
        overriding = " OVERRIDING SYSTEM VALUE" if connection.dialect.name == "postgresql" else ""
        into = f"INSERT INTO {prepare.format_table(target.table)} ({names}){overriding}"
        # quoted
        await connection.exec_driver_sql(f"{into} SELECT {names} FROM {self._quoted(connection)}")  # noqa: S608
