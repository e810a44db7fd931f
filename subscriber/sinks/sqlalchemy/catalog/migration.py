"""Creates the catalog, and migrates it to this version.

Databases like MariaDB commit each CREATE TABLE implicitly. So each missing table is created on its own, and the row of ``version`` is
inserted last. With that row the catalog is complete. Without it the next process creates the missing tables.
"""

from __future__ import annotations

import secrets

from sqlalchemy import Table, insert, inspect, select, text, update
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.schema import CreateColumn, CreateTable, DropTable

from subscriber.catalog import model
from subscriber.catalog.model import PG_SUBSCRIPTION, VERIFICATION
from subscriber.catalog.store import CATALOG_KEY
from subscriber.errors import TargetError
from subscriber.sinks.sqlalchemy.catalog_tables import FIRST_OID, VERSION, CatalogTables
from subscriber.sinks.sqlalchemy.session.database import Database
from subscriber.sinks.sqlalchemy.session.locks import Locks

__all__ = ["ensure_catalog", "read_version", "require_version"]


async def ensure_catalog(database: Database) -> None:
    """Create the catalog, or migrate it to this version. Two processes may do this at the same time.

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
            # the rows of worker are reports that need not be kept
            await connection.execute(DropTable(tables.worker, if_exists=True))
            await connection.execute(CreateTable(tables.worker))
        for described in (PG_SUBSCRIPTION, VERIFICATION):
            if await connection.run_sync(_has, tables.by_name[described.name]):
                await _add_missing_columns(connection, described, tables.by_name[described.name])
        await _create_missing(connection, tables)
        await connection.execute(update(tables.version).values(version=VERSION))
        return
    await _create_missing(connection, tables)
    identifier = str(secrets.randbits(63))
    await connection.execute(insert(tables.version).values(version=VERSION, target_identifier=identifier, next_oid=FIRST_OID))


async def _add_missing_columns(connection: AsyncConnection, described: model.Table, table: Table) -> None:
    # an upgrade that was killed may have added some of them: MariaDB commits each
    there = await connection.run_sync(lambda sync: {str(column["name"]) for column in inspect(sync).get_columns(table.name)})
    name = connection.dialect.identifier_preparer.format_table(table)
    for missing in described.columns.keys() - there:
        added = CreateColumn(table.c[missing]).compile(dialect=connection.dialect)
        await connection.execute(text(f"ALTER TABLE {name} ADD COLUMN {added}"))


async def _create_missing(connection: AsyncConnection, tables: CatalogTables) -> None:
    for table in tables.metadata.sorted_tables:
        # check first: IF NOT EXISTS gives a warning on MariaDB
        if not await connection.run_sync(_has, table):
            await connection.execute(CreateTable(table, if_not_exists=True))


async def read_version(connection: AsyncConnection, tables: CatalogTables) -> int | None:
    """Return the catalog's version, or None if the catalog does not exist or is incomplete.

    Raises:
        TargetError: a later version of this program created it.
    """
    if not await connection.run_sync(lambda sync: _has(sync, tables.version)):
        return None
    version: int | None = (await connection.execute(select(tables.version.c.version))).scalar()
    if version is not None and version > VERSION:
        raise TargetError(
            f"the catalog in the target has version {version}, but this program supports versions up to {VERSION}",
            hint="use the version of pg-subscriber that created it, or a later one",
        )
    return version


async def require_version(connection: AsyncConnection, tables: CatalogTables) -> bool:
    """Check that the catalog has this version, for callers that only read. False: there is no catalog.

    Raises:
        TargetError: it has another version, or its table of versions is empty.
    """
    if not await connection.run_sync(_has, tables.version):
        return False
    version = await read_version(connection, tables)
    if version is None:
        raise TargetError(f'table "{tables.version.name}" of the target is empty', hint="restore it from a backup")
    if version < VERSION:
        raise TargetError(
            f"the catalog in the target has version {version}, but this program needs version {VERSION}",
            hint="run or alter a subscription once with this program: that upgrades it",
        )
    return True


def _has(connection: Connection, table: Table) -> bool:
    return inspect(connection).has_table(table.name)
