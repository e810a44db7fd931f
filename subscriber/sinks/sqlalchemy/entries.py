"""The catalog's making, and a subscription's first entry in it.

Databases like MariaDB commit each CREATE TABLE by itself. So the tables are made one by one, each if it is missing, and the row of
``version`` comes last: with that row the catalog is complete, without it whoever comes next makes what is missing.
"""

from __future__ import annotations

import secrets

from sqlalchemy import Table, insert, inspect, select, text, update
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.schema import CreateColumn, CreateSchema, CreateTable, DropTable

from subscriber.config import SubscriptionOptions
from subscriber.errors import SubscriptionChanged, TargetError
from subscriber.sinks.sqlalchemy.catalog import option_values
from subscriber.sinks.sqlalchemy.engine import Database
from subscriber.sinks.sqlalchemy.integrity import known_value, unknown_value
from subscriber.sinks.sqlalchemy.locks import CATALOG_KEY, Locks
from subscriber.sinks.sqlalchemy.tables import CATALOG_VERSION, FIRST_OID, VERSION, CatalogTables

__all__ = ["draw_oid", "ensure_catalog", "ensure_subscription", "find_subscription", "insert_subscription", "read_version"]


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
        # versions 1 and 2 have the same columns
        for column in tables.pg_subscription.c:
            if column.info.get(CATALOG_VERSION, 0) > max(version, 2):
                name = connection.dialect.identifier_preparer.format_table(tables.pg_subscription)
                await connection.execute(text(f"ALTER TABLE {name} ADD COLUMN {CreateColumn(column).compile(dialect=connection.dialect)}"))
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


def _has(connection: Connection, table: Table) -> bool:
    return inspect(connection).has_table(table.name, schema=table.schema)


async def draw_oid(connection: AsyncConnection, tables: CatalogTables) -> int:
    """Give a number that was never given in this target, in the transaction that is open.

    Raises:
        TargetError: the counter is none.
    """
    version = tables.version
    # first the lock on the row, then the look at it
    await connection.execute(update(version).values(next_oid=version.c.next_oid + 1))
    drawn: int = known_value(version, "next_oid", (await connection.execute(select(version.c.next_oid))).scalar_one()) - 1
    if drawn < FIRST_OID:
        # what SQLite makes of a text to which one is added
        raise unknown_value(version, "next_oid", drawn, [f"a number above all oids there and {FIRST_OID}"])
    return drawn


async def find_subscription(connection: AsyncConnection, tables: CatalogTables, name: str) -> int | None:
    """A subscription's oid, or None.

    Raises:
        TargetError: it is no oid.
    """
    subscription = tables.pg_subscription
    found = (await connection.execute(select(subscription.c.oid).where(subscription.c.subname == name))).scalar()
    oid: int | None = known_value(subscription, "oid", found)
    return oid


async def insert_subscription(connection: AsyncConnection, tables: CatalogTables, name: str) -> int:
    """Make a subscription's entry, in the transaction that is open; return its oid.

    Raises:
        TargetError: somebody made one of that name just now.
    """
    oid = await draw_oid(connection, tables)
    await connection.execute(insert(tables.pg_subscription).values(oid=oid, subname=name))
    await connection.execute(insert(tables.fence).values(srsubid=oid, token=0))
    await connection.execute(insert(tables.subscription_stats).values(subid=oid))
    return oid


async def ensure_subscription(database: Database, name: str, options: SubscriptionOptions, *, known: bool) -> int:
    """Find the subscription's entry, or make it; return its oid.

    An entry that its command line defines shows the parameters of the latest one.

    Args:
        database: the target.
        name: of the subscription.
        options: of whoever runs it.
        known: it was there, and is not made again: nobody would run the new one, and its name would be taken.

    Raises:
        SubscriptionChanged: it was known, and is gone.
        TargetUnavailable, TargetError
    """
    tables = database.tables
    subscription = tables.pg_subscription
    async with database.writing() as connection:
        # drawing an oid locks the row that everybody draws from: of two that find no entry, the second one looks again
        oid = await find_subscription(connection, tables, name)
        if oid is None and known:
            raise SubscriptionChanged(
                f'subscription "{name}" was dropped or renamed just now', hint="subscriber status lists the subscriptions that exist"
            )
        if oid is None:
            await connection.execute(update(tables.version).values(next_oid=tables.version.c.next_oid))
            oid = await find_subscription(connection, tables, name)
        if oid is None:
            oid = await insert_subscription(connection, tables, name)
        values = option_values(options)
        shown = select(*(subscription.c[column] for column in values)).where(
            subscription.c.oid == oid, subscription.c.subconninfo.is_(None)
        )
        row = (await connection.execute(shown)).one_or_none()
        if row is not None and tuple(row) != tuple(values.values()):
            await connection.execute(update(subscription).where(subscription.c.oid == oid).values(values))
    return oid
