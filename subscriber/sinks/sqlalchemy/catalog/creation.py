"""Creates the catalog.

Databases like MariaDB commit each CREATE TABLE implicitly. So each missing table is created on its own, and the row of ``version`` is
inserted last. With that row the catalog is complete. Without it the next process creates the missing tables.
"""

from __future__ import annotations

import secrets

from sqlalchemy import Table, insert, inspect, select
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.schema import CreateTable

from subscriber.catalog.store import CATALOG_KEY
from subscriber.errors import TargetError
from subscriber.sinks.sqlalchemy.catalog_tables import FIRST_OID, METADATA, VERSION, VERSION_TABLE
from subscriber.sinks.sqlalchemy.session.database import Database
from subscriber.sinks.sqlalchemy.session.locks import Locks

__all__ = ["catalog_version", "ensure_catalog", "has_catalog"]


async def ensure_catalog(database: Database) -> None:
    """Create the catalog if it does not exist. Two processes may do this at the same time.

    Raises:
        TargetUnavailable: the target cannot be reached.
        TargetError: no privilege, a read-only target, or a catalog of another version.
    """
    async with database.reading() as connection:
        if await catalog_version(connection) is not None:
            return
    locks = Locks(database)
    try:
        await locks.take(CATALOG_KEY, "the catalog of the target")
        async with database.writing() as connection:
            await _make(connection)
    finally:
        await locks.close()


async def _make(connection: AsyncConnection) -> None:
    if await catalog_version(connection) is not None:
        return
    for table in METADATA.sorted_tables:
        # check first: IF NOT EXISTS gives a warning on MariaDB
        if not await connection.run_sync(_has, table):
            await connection.execute(CreateTable(table, if_not_exists=True))
    identifier = str(secrets.randbits(63))
    await connection.execute(insert(VERSION_TABLE).values(version=VERSION, target_identifier=identifier, next_oid=FIRST_OID))


async def catalog_version(connection: AsyncConnection) -> int | None:
    """Return the catalog's version, or None if the catalog does not exist or is incomplete.

    Raises:
        TargetError: it has another version.
    """
    if not await connection.run_sync(_has, VERSION_TABLE):
        return None
    version: int | None = (await connection.execute(select(VERSION_TABLE.c.version))).scalar()
    if version is not None and version != VERSION:
        raise TargetError(
            f"the catalog in the target has version {version}, but this program needs version {VERSION}",
            hint="use the version of pg-subscriber that created it",
        )
    return version


async def has_catalog(connection: AsyncConnection) -> bool:
    """Whether there is a catalog, for callers that only read.

    Raises:
        TargetError: it has another version, or its table of versions is empty.
    """
    if not await connection.run_sync(_has, VERSION_TABLE):
        return False
    if await catalog_version(connection) is None:
        raise TargetError(f'table "{VERSION_TABLE.name}" of the target is empty', hint="restore it from a backup")
    return True


def _has(connection: Connection, table: Table) -> bool:
    return inspect(connection).has_table(table.name)
