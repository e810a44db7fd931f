"""Rows of the catalog: what the target knows of one subscription. Each is read and written in the transaction that is open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, RowMapping, delete, insert, inspect, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from subscriber.abc import Position, SubscriptionState, TableEntry, TableName, TableState
from subscriber.errors import RelationError, SubscriptionChanged, TargetUnavailable
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.sinks.sqlalchemy.entries import draw_oid
from subscriber.sinks.sqlalchemy.integrity import known_row, known_table_entry, known_two_phase
from subscriber.sinks.sqlalchemy.names import target_name
from subscriber.sinks.sqlalchemy.tables import CatalogTables

__all__ = ["SubscriptionRows", "TableRow", "has_table"]


@dataclass(frozen=True, slots=True)
class TableRow:
    """One row of ``pg_subscription_rel``. ``copy`` as :mod:`subscriber.sinks.sqlalchemy.tables` says."""

    relid: int
    entry: TableEntry
    copy: str | None


async def has_table(connection: AsyncConnection, name: TableName) -> bool:
    """Whether the target has the table that a publisher's goes to."""
    schema, table = target_name(name, connection.dialect.name)

    def look(sync: Connection) -> bool:
        return inspect(sync).has_table(table, schema=schema)

    return await connection.run_sync(look)


class SubscriptionRows:
    """One subscription's rows."""

    def __init__(self, tables: CatalogTables, oid: int) -> None:
        self._tables = tables
        self.oid = oid

    # --- the subscription

    async def subscription(self, connection: AsyncConnection) -> SubscriptionState:
        """Read the subscription.

        Raises:
            SubscriptionChanged: it is gone.
            TargetError: it holds a value that nothing of ours writes.
        """
        table = self._tables.pg_subscription
        row = (await connection.execute(select(table).where(table.c.oid == self.oid))).mappings().one_or_none()
        if row is None:
            raise SubscriptionChanged(f"subscription with oid {self.oid} does not exist in the target", hint="it was dropped just now")
        known_row(table, row)
        identifier = (await connection.execute(select(self._tables.version.c.target_identifier))).scalar_one()
        return SubscriptionState(
            oid=self.oid,
            name=row["subname"],
            target_identifier=identifier,
            slot_name=row["subslotname"],
            publications=row["subpublications"],
            two_phase=known_two_phase(table, row["subtwophasestate"]),
            position=await self.position(connection, 0),
            managed=row["subconninfo"] is not None,
            skip_lsn=row["subskiplsn"],
            generation=row["subgeneration"],
            pending_refresh=row["subrefresh"],
        )

    async def update_subscription(self, connection: AsyncConnection, **values: object) -> None:
        """Set columns of the subscription."""
        table = self._tables.pg_subscription
        await connection.execute(update(table).where(table.c.oid == self.oid).values(values))

    async def clear_skip(self, connection: AsyncConnection) -> None:
        """Forget the transaction to be skipped."""
        await self.update_subscription(connection, subskiplsn=INVALID_LSN)

    # --- positions

    async def position(self, connection: AsyncConnection, relid: int) -> Position | None:
        """Read the position of the subscription (0) or of a table.

        Raises:
            TargetError: it holds a value that nothing of ours writes.
        """
        table = self._tables.position
        query = select(table).where(table.c.srsubid == self.oid, table.c.srrelid == relid)
        row = (await connection.execute(query)).mappings().one_or_none()
        if row is None:
            return None
        known_row(table, row)
        return Position(row["slot_name"], row["system_identifier"], row["timeline"], row["remote_lsn"])

    async def slot_names(self, connection: AsyncConnection) -> frozenset[str]:
        """The slots of all its positions."""
        table = self._tables.position
        found = await connection.execute(select(table.c.slot_name).where(table.c.srsubid == self.oid))
        return frozenset(found.scalars())

    async def save_position(self, connection: AsyncConnection, relid: int, position: Position) -> None:
        """Store a position."""
        await self.forget_position(connection, relid)
        await connection.execute(
            insert(self._tables.position).values(
                srsubid=self.oid,
                srrelid=relid,
                slot_name=position.slot_name,
                system_identifier=position.system_identifier,
                timeline=position.timeline,
                remote_lsn=position.lsn,
            )
        )

    async def forget_position(self, connection: AsyncConnection, relid: int) -> None:
        """Remove a position."""
        table = self._tables.position
        await connection.execute(delete(table).where(table.c.srsubid == self.oid, table.c.srrelid == relid))

    async def move_position(self, connection: AsyncConnection, relid: int, before: Lsn, lsn: Lsn) -> None:
        """Move a position from where it is known to be.

        Raises:
            TargetUnavailable: it is not there any more: what is known of it holds no longer.
        """
        table = self._tables.position
        row = (table.c.srsubid == self.oid, table.c.srrelid == relid, table.c.remote_lsn == before)
        moved = await connection.execute(update(table).where(*row).values(remote_lsn=lsn))
        if moved.rowcount != 1:
            raise TargetUnavailable(
                f"the position of subscription {self.oid} in the target is not {before} any more", hint="it is read again"
            )

    # --- tables

    async def tables(self, connection: AsyncConnection, *, lock: bool = False) -> Mapping[TableName, TableRow]:
        """The subscription's tables. ``lock``: wait for transactions that change one of them.

        Raises:
            TargetError: a state is not known.
        """
        table = self._tables.pg_subscription_rel
        query = select(table).where(table.c.srsubid == self.oid)
        rows = (await connection.execute(query.with_for_update() if lock else query)).mappings()
        return {TableName(row["srnspname"], row["srrelname"]): self._row(row) for row in rows}

    async def table(self, connection: AsyncConnection, name: TableName, *, lock: bool = False) -> TableRow | None:
        """One of them. ``lock``: wait for a transaction that changes it, and keep others from that.

        Raises:
            TargetError: its state is not known.
        """
        table = self._tables.pg_subscription_rel
        named = (table.c.srsubid == self.oid, table.c.srnspname == name.namespace, table.c.srrelname == name.name)
        row = (await connection.execute(select(table).where(*named))).mappings().one_or_none()
        if row is None or not lock:
            return None if row is None else self._row(row)
        # by its key: MariaDB locks every row that it looks at on the way, and other tables' synchronizations would wait
        keyed = (table.c.srsubid == self.oid, table.c.srrelid == row["srrelid"])
        row = (await connection.execute(select(table).where(*keyed).with_for_update())).mappings().one_or_none()
        return None if row is None else self._row(row)

    async def add_table(self, connection: AsyncConnection, name: TableName, entry: TableEntry) -> None:
        """Add a table, or set its state if it is there.

        Raises:
            RelationError: the target has no such table.
        """
        if not await has_table(connection, name):
            raise RelationError(
                f'relation "{name}" does not exist',
                sqlstate="42P01",
                hint="create the table in the target with the publisher's columns, or run with --create-tables",
            )
        table = self._tables.pg_subscription_rel
        found = await self.table(connection, name)
        if found is not None:
            await self._set(connection, found.relid, entry, None)
            return
        await connection.execute(
            insert(table).values(
                srsubid=self.oid,
                srrelid=await draw_oid(connection, self._tables),
                srnspname=name.namespace,
                srrelname=name.name,
                srsubstate=entry.state.value,
                srsublsn=entry.lsn,
            )
        )

    async def remove_table(self, connection: AsyncConnection, relid: int) -> None:
        """Forget a table, with its position."""
        table = self._tables.pg_subscription_rel
        await self.forget_position(connection, relid)
        await connection.execute(delete(table).where(table.c.srsubid == self.oid, table.c.srrelid == relid))

    async def change(
        self, connection: AsyncConnection, relid: int, entry: TableEntry, *, only_from: TableState, copy: str | None = None
    ) -> bool:
        """Change a table's state if it is ``only_from``; tell whether it was."""
        table = self._tables.pg_subscription_rel
        row = (table.c.srsubid == self.oid, table.c.srrelid == relid, table.c.srsubstate == only_from.value)
        changed = await connection.execute(update(table).where(*row).values(srsubstate=entry.state.value, srsublsn=entry.lsn, srcopy=copy))
        return changed.rowcount == 1

    async def _set(self, connection: AsyncConnection, relid: int, entry: TableEntry, copy: str | None) -> None:
        table = self._tables.pg_subscription_rel
        row = (table.c.srsubid == self.oid, table.c.srrelid == relid)
        await connection.execute(update(table).where(*row).values(srsubstate=entry.state.value, srsublsn=entry.lsn, srcopy=copy))

    def _row(self, row: RowMapping) -> TableRow:
        table = self._tables.pg_subscription_rel
        entry = known_table_entry(table, row["srsubstate"], row["srsublsn"])
        known_row(table, row)
        return TableRow(row["srrelid"], entry, row["srcopy"])
