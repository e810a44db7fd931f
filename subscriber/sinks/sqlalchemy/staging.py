"""Where the rows of a copy wait if the table held rows before: a table of our own, of the same columns and without any key.

It is made and dropped by statements that may commit by themselves, so each is idempotent, and the state of the table's synchronization
decides what a staging table that is found means: nothing, unless a copy into it is under way.
"""

from __future__ import annotations

from sqlalchemy import Column, Connection, MetaData, Table, inspect
from sqlalchemy.ext.asyncio import AsyncConnection

from subscriber.config import InsertConflict
from subscriber.sinks.sqlalchemy.columns import TargetTable
from subscriber.sinks.sqlalchemy.reflection import ReflectedTable
from subscriber.sinks.sqlalchemy.statements import insert_row
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

    async def move(self, connection: AsyncConnection, target: TargetTable, conflict: InsertConflict) -> None:
        """Move its rows into the table, in the transaction that is open.

        Args:
            connection: to the target.
            target: the table.
            conflict: what a row of the same key is that was there before: an error, or replaced.

        Raises:
            RelationError: it is to be replaced, and cannot be.
        """
        prepare = connection.dialect.identifier_preparer
        names = ", ".join(prepare.format_column(plan.column) for plan in target.columns if plan.column is not None)
        overriding = " OVERRIDING SYSTEM VALUE" if connection.dialect.name == "postgresql" else ""
        into = f"INSERT INTO {prepare.format_table(target.table)} ({names}){overriding}"
        # without a key nothing is replaced
        replacing = self._replacing(connection, target) if conflict == "upsert" and target.unique is not None else ""
        # quoted; WHERE: else SQLite takes ON for a join's
        await connection.exec_driver_sql(f"{into} SELECT {names} FROM {self._quoted(connection)} WHERE 1 = 1{replacing}")  # noqa: S608

    def _replacing(self, connection: AsyncConnection, target: TargetTable) -> str:
        # what cannot be done row by row cannot be done here
        insert_row(target, connection.dialect, "upsert")
        prepare = connection.dialect.identifier_preparer
        keys = [target.columns[number].name for number in target.unique or ()]
        names = [plan.name for plan in target.columns if plan.column is not None]
        rest = [name for name in names if name not in keys]
        if connection.dialect.name in _MYSQL:
            table, staged = prepare.format_table(target.table), self._quoted(connection)
            sets = [f"{table}.{prepare.quote_identifier(name)} = {staged}.{prepare.quote_identifier(name)}" for name in rest or keys]
            return f" ON DUPLICATE KEY UPDATE {', '.join(sets)}"
        sets = [f"{prepare.quote_identifier(name)} = excluded.{prepare.quote_identifier(name)}" for name in rest]
        quoted = ", ".join(map(prepare.quote_identifier, keys))
        return f" ON CONFLICT ({quoted}) DO " + (f"UPDATE SET {', '.join(sets)}" if sets else "NOTHING")
