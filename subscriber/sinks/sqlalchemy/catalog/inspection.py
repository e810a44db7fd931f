"""Inspects a target independently of its subscriptions: its kind and its tables. Also removes the leftovers of a subscription.

The demonstration uses it, and tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from sqlalchemy import BigInteger, Column, MetaData, Table, Text, func, inspect, select
from sqlalchemy.dialects import mysql
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.schema import CreateTable, DropTable

from subscriber.catalog.subscriptions import find_subscription, remove_rows
from subscriber.interfaces import TableName
from subscriber.sinks.sqlalchemy.catalog.rows import SqlAlchemyRows
from subscriber.sinks.sqlalchemy.catalog_tables import METADATA, OF_SUBSCRIPTION, TABLES, VERSION_TABLE
from subscriber.sinks.sqlalchemy.schema.names import target_name
from subscriber.sinks.sqlalchemy.session.database import Database

__all__ = ["TargetInspection"]

_FETCH_ROWS: Final = 2_000


class TargetInspection:
    """One target.

    Args:
        target: its URL.

    Raises:
        ConfigurationError: the target is not a URL of SQLAlchemy, or its driver is not installed.
    """

    def __init__(self, target: str) -> None:
        self._database = Database(target)

    @property
    def database(self) -> Database:
        return self._database

    async def describe(self) -> str:
        """Describe the target for users: kind, version and location, without a password.

        Raises:
            TargetError: the target cannot be reached, or rejects the login.
        """
        async with self._database.reading() as connection:
            dialect = connection.dialect
            version = ".".join(str(part) for part in dialect.server_version_info or ())
            url = connection.engine.url
        kind = {"sqlite": "SQLite", "mysql": "MySQL", "mariadb": "MariaDB"}.get(dialect.name, dialect.name)
        if dialect.name == "mysql" and getattr(dialect, "is_mariadb", False):
            kind = "MariaDB"
        if url.host is None:
            return f"{kind} {version}, file {url.database}"
        port = f":{url.port}" if url.port else ""
        return f'{kind} {version} on {url.host}{port}, database "{url.database}"'

    async def has_catalog(self) -> bool:
        """Whether the target has this program's catalog."""
        async with self._database.reading() as connection:
            return await connection.run_sync(lambda sync: inspect(sync).has_table(VERSION_TABLE.name))

    async def existing(self, tables: Iterable[TableName]) -> list[str]:
        """Return the names, in the target, of those tables of the publisher that have a table there."""
        async with self._database.reading() as connection:
            return [str(self._place(name).fullname) for name in tables if await self._columns(connection, name)]

    async def _columns(self, connection: AsyncConnection, name: TableName) -> set[str]:
        place = self._place(name)

        def find(sync: object) -> set[str]:
            inspector = inspect(sync)
            assert inspector is not None
            if not inspector.has_table(place.name):
                return set()
            return {str(found["name"]) for found in inspector.get_columns(place.name)}

        return await connection.run_sync(find)

    def _place(self, name: TableName) -> Table:
        return Table(target_name(name), MetaData())

    async def prepared_transactions(self) -> frozenset[int]:
        """Return the publisher's ids of the prepared transactions that are stored in the target."""
        prepared = TABLES["prepared_transaction"]
        async with self._database.reading() as connection:
            return frozenset((await connection.execute(select(prepared.c.xid).where(prepared.c.complete))).scalars())

    async def make_text_table(self, name: TableName, key: str, columns: Sequence[str]) -> None:
        """Create a table that accepts every value as PostgreSQL's text, for kinds of databases whose own types accept less.

        Args:
            name: the publisher's table.
            key: the name of its key, an integer.
            columns: the names of its other columns.
        """
        place = self._place(name)
        long = Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
        made = Table(
            place.name,
            MetaData(),
            Column(key, BigInteger, primary_key=True, autoincrement=False),
            *(Column(each, long) for each in columns),
            mysql_charset="utf8mb4",
            mariadb_charset="utf8mb4",
        )
        async with self._database.writing() as connection:
            await connection.execute(CreateTable(made))

    async def drop_tables(self, tables: Iterable[TableName]) -> None:
        """Drop the tables for these tables of the publisher, if they exist."""
        async with self._database.writing() as connection:
            for name in tables:
                await connection.execute(DropTable(self._place(name), if_exists=True))

    async def forget(self, name: str, *, had_catalog: bool) -> None:
        """Remove the rows of an ended subscription. If ``had_catalog`` is False and no subscription is left, drop the catalog too."""
        if not await self.has_catalog():
            return
        async with self._database.writing() as connection:
            rows = SqlAlchemyRows(connection)
            found = await find_subscription(rows, name)
            if found is not None:
                await remove_rows(rows, OF_SUBSCRIPTION, found["oid"])
        if not had_catalog:
            await self._drop_unused_catalog()

    async def _drop_unused_catalog(self) -> None:
        async with self._database.writing() as connection:
            if (await connection.execute(select(func.count()).select_from(TABLES["pg_subscription"]))).scalar():
                return
            for each in METADATA.sorted_tables:
                await connection.execute(DropTable(each, if_exists=True))

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        await self._database.close()
