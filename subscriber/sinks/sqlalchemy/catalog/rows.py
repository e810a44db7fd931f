"""The catalog's rows in one transaction: a :class:`subscriber.catalog.store.Rows`."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, delete, insert, inspect, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from subscriber.catalog import model
from subscriber.catalog.model import known_values
from subscriber.catalog.store import FiringTrigger, Plus, Row, SharedTable
from subscriber.catalog.subscription_rows import SubscriptionRows
from subscriber.errors import RelationError, TargetUnavailable
from subscriber.interfaces import TableName
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.sqlalchemy.catalog_tables import FENCE, TABLES, VERSION_TABLE
from subscriber.sinks.sqlalchemy.schema.names import target_name
from subscriber.sinks.sqlalchemy.schema.sqlite_reflection import sqlite_tables
from subscriber.sinks.sqlalchemy.schema.triggers import first_firing

__all__ = ["SqlAlchemyRows", "existing_tables", "move_position", "subscription_rows"]


class SqlAlchemyRows:
    """See :class:`subscriber.catalog.store.Rows`.

    Args:
        connection: with an open transaction.
    """

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    @property
    def hidden(self) -> frozenset[str]:
        """Empty: a role that may read these tables may read all columns."""
        return frozenset()

    async def select(self, table: model.Table, where: Row, *, lock: bool = False) -> Sequence[Row]:
        made = TABLES[table.name]
        query = select(made).where(*_conditions(made, where))
        found = await self._connection.execute(query.with_for_update() if lock else query)
        with known_values(table):
            return [dict(row) for row in found.mappings()]

    async def insert(self, table: model.Table, rows: Sequence[Row]) -> None:
        """Insert rows. With a subscription, also insert its row of ``fence``."""
        if not rows:
            return
        more: Row = {}
        if table is model.WORKER:
            more = {"pid": os.getpid(), "host": socket.gethostname(), "reported": time.time()}
        await self._connection.execute(insert(TABLES[table.name]), [{**row, **more} for row in rows])
        if table is model.PG_SUBSCRIPTION:
            await self.insert(FENCE, [{"srsubid": row["oid"], "token": 0} for row in rows])

    async def update(self, table: model.Table, where: Row, values: Row) -> int:
        made = TABLES[table.name]
        new = {name: made.c[name] + value.number if isinstance(value, Plus) else value for name, value in values.items()}
        return (await self._connection.execute(update(made).where(*_conditions(made, where)).values(new))).rowcount

    async def delete(self, table: model.Table, where: Row) -> None:
        made = TABLES[table.name]
        await self._connection.execute(delete(made).where(*_conditions(made, where)))

    async def new_oid(self) -> int:
        """Draw a number; the counter's row stays locked until the end of the transaction."""
        return await self._draw(1)

    async def _draw(self, count: int) -> int:
        """Draw numbers; return the first."""
        version = VERSION_TABLE
        # first the lock on the row, then the look at it
        await self._connection.execute(update(version).values(next_oid=version.c.next_oid + count))
        return int((await self._connection.execute(select(version.c.next_oid))).scalar_one()) - count

    async def relids(self, tables: Sequence[TableName]) -> Mapping[TableName, int | RelationError]:
        """Draw a number for each table that the target has."""
        there = await existing_tables(self._connection, tables)
        first = await self._draw(len(there)) if there else 0
        drawn = dict(zip([table for table in tables if table in there], range(first, first + len(there)), strict=True))
        return {table: drawn.get(table) or _missing(table) for table in tables}

    async def sharing(self, tables: Sequence[TableName]) -> Sequence[SharedTable]:
        """The tables themselves."""
        return [SharedTable(table, None, table) for table in tables]

    async def firing_trigger(self, tables: Sequence[TableName]) -> FiringTrigger | None:
        """Any trigger: they cannot be suppressed."""
        return await first_firing(self._connection, tables)

    async def target_identifier(self) -> str:
        """Return the random number that was stored when the catalog was created."""
        return str((await self._connection.execute(select(VERSION_TABLE.c.target_identifier))).scalar_one())


def _conditions(table: Table, where: Row) -> list[ColumnElement[bool]]:
    return [table.c[name].in_(value) if isinstance(value, list) else table.c[name] == value for name, value in where.items()]


def _missing(table: TableName) -> RelationError:
    return RelationError(
        f'relation "{table}" does not exist',
        sqlstate="42P01",
        hint="create the table in the target with the publisher's columns, or run with --create-tables",
    )


async def existing_tables(connection: AsyncConnection, names: Collection[TableName]) -> frozenset[TableName]:
    """Those of the publisher's tables that the target has a table for."""
    dialect = connection.dialect
    places = {name: target_name(name) for name in names}

    def look(sync: Connection) -> frozenset[TableName]:
        if dialect.name == "sqlite":
            found = sqlite_tables(sync, set(places.values()))
            return frozenset(name for name, table in places.items() if str(table).lower() in found)
        inspector = inspect(sync)
        listed = frozenset(inspector.get_table_names())
        # names may differ in case, and be those of views
        return frozenset(name for name, table in places.items() if table in listed or inspector.has_table(table))

    return await connection.run_sync(look)


def subscription_rows(connection: AsyncConnection, oid: int) -> SubscriptionRows:
    """Return a subscription's rows, in the open transaction."""
    return SubscriptionRows(SqlAlchemyRows(connection), oid)


async def move_position(connection: AsyncConnection, oid: int, relid: int, *, before: Lsn, lsn: Lsn) -> None:
    """Move the position of a subscription (``relid`` 0) or of a table from the known LSN ``before`` to ``lsn``.

    Raises:
        TargetUnavailable: the stored position is not ``before`` any more.
    """
    table: Any = TABLES["position"]
    row = (table.c.srsubid == oid, table.c.srrelid == relid, table.c.remote_lsn == before)
    moved = await connection.execute(update(table).where(*row).values(remote_lsn=lsn))
    if moved.rowcount != 1:
        raise TargetUnavailable(f"the position of subscription {oid} in the target is not {before} any more", hint="it is read again")
