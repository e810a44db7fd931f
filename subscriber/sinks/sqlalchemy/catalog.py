"""How the catalog is made, and taken forward to this version.

Databases like MariaDB commit each CREATE TABLE by itself. So the tables are made one by one, each if it is missing, and the row of
``version`` comes last: with that row the catalog is complete; without it the next process makes what is missing.
"""

from __future__ import annotations

import secrets

from sqlalchemy import Table, insert, inspect, select, text, update
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.schema import CreateColumn, CreateSchema, CreateTable, DropTable

from subscriber.catalog.model import PG_SUBSCRIPTION
from subscriber.catalog.store import CATALOG_KEY
from subscriber.errors import TargetError
from subscriber.sinks.sqlalchemy.engine import Database
from subscriber.sinks.sqlalchemy.locks import Locks
from subscriber.sinks.sqlalchemy.tables import FIRST_OID, VERSION, CatalogTables

__all__ = ["ensure_catalog", "read_version", "require_version"]


async def ensure_catalog(database: Database) -> None:
    """Make the catalog, or see that it is this version's. Two processes may do so at once.

    Raises:
        TargetUnavailable: the target cannot be reached.
        TargetError: no privilege, a read-only target, or a catalog of a later version of this program.
    """
    async with database.reading() as connection:
        if await read_version(connection, database.tables) == VERSION:
            return
    locks = Locks(database)
    try:
        await locks.take(CATALOG_KEY, "the catalog of the target")
        async with database.writing() as connection:
            await _make(connection, database.tables)
    finally:
        await locks.close()


async def _make(connection: AsyncConnection, tables: CatalogTables) -> None:
    version = await read_version(connection, tables)
    if version == VERSION:
        return
    if version is not None:
        if version == 1:
            # what workers report does not have to be kept
            await connection.execute(DropTable(tables.worker, if_exists=True))
            await connection.execute(CreateTable(tables.worker))
        table = tables.by_name[PG_SUBSCRIPTION.name]
        for column in PG_SUBSCRIPTION.columns.values():
            # versions 1 and 2 have the same columns
            if column.version > max(version, 2):
                name = connection.dialect.identifier_preparer.format_table(table)
                added = CreateColumn(table.c[column.name]).compile(dialect=connection.dialect)
                await connection.execute(text(f"ALTER TABLE {name} ADD COLUMN {added}"))
        await connection.execute(update(tables.version).values(version=VERSION))
        return
    if tables.schema is not None:
        await connection.execute(CreateSchema(tables.schema, if_not_exists=True))
    for table in tables.metadata.sorted_tables:
        # looked for first: IF NOT EXISTS is a warning on MariaDB
        if not await connection.run_sync(_has, table):
            await connection.execute(CreateTable(table, if_not_exists=True))
    identifier = str(secrets.randbits(63))
    await connection.execute(insert(tables.version).values(version=VERSION, target_identifier=identifier, next_oid=FIRST_OID))


async def read_version(connection: AsyncConnection, tables: CatalogTables) -> int | None:
    """The catalog's version, or None if there is none, or an unfinished one.

    Raises:
        TargetError: it is of a later version of this program.
    """
    if not await connection.run_sync(lambda sync: _has(sync, tables.version)):
        return None
    version: int | None = (await connection.execute(select(tables.version.c.version))).scalar()
    if version is not None and version > VERSION:
        raise TargetError(
            f"the catalog in the target has version {version}, this program knows versions up to {VERSION}",
            hint="use the version of pg-subscriber that made it, or a later one",
        )
    return version


async def require_version(connection: AsyncConnection, tables: CatalogTables) -> bool:
    """See that the catalog has this version, for those that only look; False: there is none.

    Raises:
        TargetError: it has another version.
    """
    if not await connection.run_sync(_has, tables.version):
        return False
    version = await read_version(connection, tables)
    if version is None:
        raise TargetError(f'table "{tables.version.name}" of the target is empty', hint="restore it from a backup")
    if version < VERSION:
        raise TargetError(
            f"the catalog in the target has version {version}, this program knows version {VERSION}",
            hint="run or alter a subscription with this program once, which takes it forward",
        )
    return True


def _has(connection: Connection, table: Table) -> bool:
    return inspect(connection).has_table(table.name, schema=table.schema)
