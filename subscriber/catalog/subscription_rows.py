"""The catalog's data about one subscription: its row, its positions, the states of its tables."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from subscriber.catalog.model import PG_SUBSCRIPTION, PG_SUBSCRIPTION_REL, POSITION, VERIFICATION, known_values
from subscriber.catalog.store import Row, Rows, SharedTable
from subscriber.config import COPY_DATA_WORDS, CopyData
from subscriber.errors import RelationError, SubscriptionChanged
from subscriber.interfaces import Position, SubscriptionState, SyncMode, TableEntry, TableName, TableState, TwoPhaseState
from subscriber.protocol.lsn import INVALID_LSN

if TYPE_CHECKING:
    from subscriber.transaction.column_history import KnownColumns

__all__ = ["CatalogStateStore", "SubscriptionRows", "TableRow", "entry_of", "pending_refresh_of", "tell_dropped"]

_log = logging.getLogger(__name__)

_WITH_LSN: Final = frozenset({TableState.SYNCDONE, TableState.READY, TableState.PARKED})
_BEGINNING: Final = frozenset({TableState.INIT, TableState.DATASYNC})


def entry_of(row: Row) -> TableEntry:
    """Return the state in a row of ``pg_subscription_rel``.

    Raises:
        TargetError: this program does not know the state.
    """
    with known_values(PG_SUBSCRIPTION_REL):
        state, mode = TableState(row["srsubstate"]), SyncMode(row["srmode"])
    lsn = row["srsublsn"] if state in _WITH_LSN else None
    return TableEntry(state, lsn, mode, *((row["srerror"], row["srerrortime"]) if state is TableState.PARKED else ()))


def pending_refresh_of(row: Row) -> CopyData | None:
    """Return the ``copy_data`` of a refresh that a row of ``pg_subscription`` asks for."""
    return None if row["subrefresh"] is None else COPY_DATA_WORDS[row["subrefresh"]]


def _stored(entry: TableEntry) -> Row:
    # a table that is synchronized again gets the columns that the publisher has then
    forgotten = {"srcolumns": None} if entry.state is TableState.INIT else {}
    return {
        **forgotten,
        "srsubstate": entry.state.value,
        "srsublsn": entry.lsn,
        "srmode": entry.mode.value,
        "srerror": entry.error,
        "srerrortime": entry.since,
    }


def _changed(entry: TableEntry) -> Row:
    """New values of a row. A table that is synchronized again keeps the LSN and the time with which it was parked, until that succeeds."""
    kept = {"srsublsn", "srerrortime"} if entry.state in _BEGINNING and entry.mode is not SyncMode.COPY else set()
    return {name: value for name, value in _stored(entry).items() if name not in kept}


@dataclass(frozen=True, slots=True)
class TableRow:
    """One row of ``pg_subscription_rel``.

    Attributes:
        relid: the table's number in the target.
        entry: its state.
        row: all columns, including those that only this kind of target has.
    """

    relid: int
    entry: TableEntry
    row: Row


class SubscriptionRows:
    """One subscription's rows, in an open transaction.

    Args:
        rows: the catalog's rows in that transaction.
        oid: the subscription's.
    """

    def __init__(self, rows: Rows, oid: int) -> None:
        self.rows = rows
        self.oid = oid

    def _key(self, relid: int) -> Row:
        return {"srsubid": self.oid, "srrelid": relid}

    # --- the subscription

    async def subscription(self) -> SubscriptionState:
        """Read the subscription.

        Raises:
            SubscriptionChanged: it does not exist any more.
            TargetError: its row has a value that this program does not know.
        """
        found = await self.rows.select(PG_SUBSCRIPTION, {"oid": self.oid})
        if not found:
            raise SubscriptionChanged(f"subscription with oid {self.oid} does not exist in the target", hint="it has been dropped")
        row = found[0]
        with known_values(PG_SUBSCRIPTION):
            two_phase = TwoPhaseState(row["subtwophasestate"])
            pending_refresh = pending_refresh_of(row)
        return SubscriptionState(
            oid=self.oid,
            name=row["subname"],
            target_identifier=await self.rows.target_identifier(),
            slot_name=row["subslotname"],
            publications=row["subpublications"],
            two_phase=two_phase,
            position=await self.position(0),
            managed=row["subconninfo"] is not None,
            skip_lsn=row["subskiplsn"],
            generation=row["subgeneration"],
            pending_refresh=pending_refresh,
        )

    async def parks(self) -> bool:
        """Whether an error of one table parks it."""
        (row,) = await self.rows.select(PG_SUBSCRIPTION, {"oid": self.oid})
        return bool(row["subonerror"] == "p")

    async def change(self, **values: object) -> None:
        """Store new values of columns in the subscription's row."""
        await self.rows.update(PG_SUBSCRIPTION, {"oid": self.oid}, values)

    async def clear_skip(self) -> None:
        """Clear the LSN of the transaction to skip."""
        await self.change(subskiplsn=INVALID_LSN)

    # --- positions

    async def position(self, relid: int) -> Position | None:
        """Read the position of the subscription (``relid`` 0) or of a table; None: it has none."""
        for row in await self.rows.select(POSITION, self._key(relid)):
            return Position(row["slot_name"], row["system_identifier"], row["timeline"], row["remote_lsn"])
        return None

    async def slot_names(self) -> frozenset[str]:
        """The slots to which its positions belong."""
        return frozenset([row["slot_name"] for row in await self.rows.select(POSITION, {"srsubid": self.oid})])

    async def save_position(self, relid: int, position: Position) -> None:
        """Store a position, in place of an earlier one."""
        values = {
            "slot_name": position.slot_name,
            "system_identifier": position.system_identifier,
            "timeline": position.timeline,
            "remote_lsn": position.lsn,
        }
        await self.forget_position(relid)
        await self.rows.insert(POSITION, [{**self._key(relid), **values}])

    async def forget_position(self, relid: int) -> None:
        await self.rows.delete(POSITION, self._key(relid))

    # --- tables

    async def tables(self, *, lock: bool = False) -> Sequence[tuple[TableName, TableRow]]:
        """Return the subscription's tables.

        Args:
            lock: lock the rows: wait for transactions that change one of them.

        Raises:
            TargetError: this program does not know a state.
        """
        rows = await self.rows.select(PG_SUBSCRIPTION_REL, {"srsubid": self.oid}, lock=lock)
        return [(_name(row), _table_row(row)) for row in rows]

    async def table(self, name: TableName, *, lock: bool = False) -> TableRow | None:
        """Return one table; None: it is not in the subscription.

        Args:
            name: its name.
            lock: lock its row: wait for a transaction that changes it, and keep other transactions from changing it.

        Raises:
            TargetError: this program does not know its state.
        """
        rows = await self.rows.select(PG_SUBSCRIPTION_REL, {"srsubid": self.oid, "srnspname": name.namespace, "srrelname": name.name})
        if rows and lock:
            # by its key: MariaDB locks every row that it scans, and the synchronizations of other tables would wait
            rows = await self.rows.select(PG_SUBSCRIPTION_REL, self._key(rows[0]["srrelid"]), lock=True)
        return _table_row(rows[0]) if rows else None

    async def entry(self, relid: int) -> TableEntry | None:
        """Return the state of one table; None: it is not in the subscription."""
        for row in await self.rows.select(PG_SUBSCRIPTION_REL, self._key(relid)):
            return entry_of(row)
        return None

    async def in_state(self, state: TableState) -> list[int]:
        """Return the numbers of the tables in a state."""
        rows = await self.rows.select(PG_SUBSCRIPTION_REL, {"srsubid": self.oid, "srsubstate": state.value})
        return [row["srrelid"] for row in rows]

    async def add_tables(self, tables: Sequence[TableName], entry: TableEntry) -> Mapping[TableName, RelationError]:
        """Add tables. Set the state of those that the subscription has already.

        Returns:
            The tables that could not be added, because the target does not have them or cannot use them, each with the error.
        """
        where = {"srsubid": self.oid, "srrelname": [table.name for table in tables]}
        known = {_name(row): int(row["srrelid"]) for row in await self.rows.select(PG_SUBSCRIPTION_REL, where)}
        found = await self.rows.relids([table for table in tables if table not in known])
        state = _stored(entry)
        again = [known[table] for table in tables if table in known]
        if again:
            await self.rows.update(PG_SUBSCRIPTION_REL, {"srsubid": self.oid, "srrelid": again}, state)
        new = [
            {**self._key(relid), "srnspname": table.namespace, "srrelname": table.name, **state}
            for table, relid in found.items()
            if not isinstance(relid, RelationError)
        ]
        await self.rows.insert(PG_SUBSCRIPTION_REL, new)
        return {table: error for table, error in found.items() if isinstance(error, RelationError)}

    async def set_entry(self, relid: int, entry: TableEntry, *, only_from: TableState, **more: object) -> bool:
        """Change a table's state if it is ``only_from``. Return whether it was.

        Args:
            relid: the table's.
            entry: its new state.
            only_from: the state in which it must be.
            more: new values of columns that only this kind of target has.
        """
        values = {**_changed(entry), **more}
        return await self.rows.update(PG_SUBSCRIPTION_REL, {**self._key(relid), "srsubstate": only_from.value}, values) == 1

    async def set_entries(self, relids: Sequence[int], entry: TableEntry) -> None:
        """Set the state of tables, whatever it was."""
        await self.rows.update(PG_SUBSCRIPTION_REL, {"srsubid": self.oid, "srrelid": list(relids)}, _changed(entry))

    # --- the columns that a table follows

    async def unknown_columns(self) -> list[TableName]:
        """The tables that changes are applied to, and whose columns are not known."""
        rows = await self.rows.select(PG_SUBSCRIPTION_REL, {"srsubid": self.oid, "srsubstate": TableState.READY.value})
        return [_name(row) for row in rows if row["srcolumns"] is None]

    async def known_columns(self, name: TableName) -> KnownColumns | None:
        """The stored columns of a table.

        Raises:
            TargetError: this program does not know what is stored.
        """
        from subscriber.transaction.column_history import KnownColumns  # noqa: PLC0415 -- most runs do not need it

        where = {"srsubid": self.oid, "srnspname": name.namespace, "srrelname": name.name}
        for row in await self.rows.select(PG_SUBSCRIPTION_REL, where):
            if row["srcolumns"] is not None:
                with known_values(PG_SUBSCRIPTION_REL):
                    return KnownColumns.parse(row["srcolumns"])
        return None

    async def store_columns(self, name: TableName, columns: KnownColumns) -> None:
        """Store the columns of a table."""
        where = {"srsubid": self.oid, "srnspname": name.namespace, "srrelname": name.name}
        await self.rows.update(PG_SUBSCRIPTION_REL, where, {"srcolumns": columns.text()})

    async def forget_columns(self) -> None:
        """Forget the columns of all tables."""
        rows = await self.rows.select(PG_SUBSCRIPTION_REL, {"srsubid": self.oid})
        if known := [row["srrelid"] for row in rows if row["srcolumns"] is not None]:
            await self.rows.update(PG_SUBSCRIPTION_REL, {"srsubid": self.oid, "srrelid": known}, {"srcolumns": None})

    async def find(self, name: TableName) -> tuple[TableName, int] | None:
        """The stored name and the number of the table whose changes have a name; None: it is not in the subscription."""
        row = await self.table(name)
        return None if row is None else (name, row.relid)

    async def park(self, tables: Mapping[TableName, TableEntry]) -> Mapping[TableName, TableEntry]:
        """See :meth:`subscriber.interfaces.ParkingSink.park`."""
        parked: dict[TableName, TableEntry] = {}
        # the triggers of a parked table do not fire: its changes are left out
        others = [name for name, row in await self.tables() if name not in tables and row.entry.state is not TableState.PARKED]
        trigger = await self.rows.firing_trigger(others)
        if trigger is not None:
            raise trigger.reads_parked
        for name, entry in tables.items():
            found = await self.find(name)
            if found is not None:
                stored, relid = found
                parked[stored] = await self._parked_since(relid, entry)
                await self.forget_position(relid)
                await self.set_entries([relid], parked[stored])
        return parked

    async def _parked_since(self, relid: int, entry: TableEntry) -> TableEntry:
        """The entry, with the LSN from which on changes of the table are missing: it may not have been ready before."""
        position = await self.position(relid)
        if position is not None:
            return replace(entry, lsn=position.lsn)
        for row in await self.rows.select(PG_SUBSCRIPTION_REL, self._key(relid)):
            if row["srerrortime"] is not None and row["srsublsn"] is not None:
                return replace(entry, lsn=row["srsublsn"], since=row["srerrortime"])
        return entry

    async def reconcile(self, tables: Sequence[TableName]) -> Mapping[TableName, TableEntry]:
        """See :meth:`subscriber.interfaces.ParkingSink.reconcile`."""
        existing = await self.rows.relids(tables)
        present = [table for table in tables if not isinstance(existing[table], RelationError)]
        await self.require_alone(present)
        entry, begun = TableEntry(TableState.INIT, mode=SyncMode.RECONCILE), {}
        for table in present:
            row = await self.table(table, lock=True)
            if row is not None and await self.set_entry(row.relid, entry, only_from=TableState.PARKED):
                await self.rows.delete(VERIFICATION, {"subid": self.oid, "nspname": table.namespace, "relname": table.name})
                begun[table] = entry
        return begun

    async def require_alone(self, tables: Sequence[TableName]) -> None:
        """Check that no other subscription writes these tables, or parts of them. Its rows would be deleted when they are reconciled.

        Raises:
            RelationError: another one does.
        """
        shared = await self.rows.sharing(tables) if tables else ()
        for table in shared:
            if table.native is not None:
                raise _written_elsewhere(table, f'subscription "{table.native}" of PostgreSQL itself')
        relids = {table.relid: table for table in shared if table.relid is not None}
        names = {table.name: table for table in shared}
        # both: names may be outdated after a rename, numbers after a restore
        found = list(await self.rows.select(PG_SUBSCRIPTION_REL, {"srrelname": sorted({name.name for name in names})})) if names else []
        found += await self.rows.select(PG_SUBSCRIPTION_REL, {"srrelid": list(relids)}) if relids else ()
        for row in found:
            same = names.get(_name(row)) or relids.get(row["srrelid"])
            if row["srsubid"] != self.oid and same is not None:
                other = await self.rows.select(PG_SUBSCRIPTION, {"oid": row["srsubid"]})
                raise _written_elsewhere(same, f'subscription "{other[0]["subname"] if other else row["srsubid"]}"')

    async def remove_table(self, relid: int) -> None:
        await self.forget_position(relid)
        await self.rows.delete(PG_SUBSCRIPTION_REL, self._key(relid))


class CatalogStateStore(ABC):
    """The part of :class:`subscriber.interfaces.StateStore` that is the same in all targets with the catalog's rows.

    Each call is one transaction.
    """

    @abstractmethod
    def changing(self) -> AbstractAsyncContextManager[SubscriptionRows]:
        """Open a transaction on the rows of the subscription. It is committed and durable when the block ends without an error.

        Raises:
            TargetUnavailable: the sink is not open, or the connection was lost.
        """

    async def begin_slot(self, slot_name: str | None, publications: Sequence[str], two_phase: TwoPhaseState) -> None:
        """Store the slot's name, the publications and the two-phase state before the slot is created. None withdraws the slot's name."""
        await self._change(subslotname=slot_name, subpublications=tuple(publications), subtwophasestate=two_phase.value)

    async def slot_names(self) -> frozenset[str]:
        """The slots to which stored positions belong."""
        async with self.changing() as rows:
            return await rows.slot_names()

    async def set_publications(self, publications: Sequence[str]) -> None:
        await self._change(subpublications=tuple(publications))

    async def refreshed(self) -> None:
        """Clear a pending refresh."""
        await self._change(subrefresh=None)

    async def set_two_phase(self, state: TwoPhaseState) -> None:
        await self._change(subtwophasestate=state.value)

    async def clear_skip(self) -> None:
        """Clear the LSN of the transaction to skip."""
        async with self.changing() as rows:
            await rows.clear_skip()

    async def unknown_columns(self) -> Sequence[TableName]:
        """See :meth:`subscriber.interfaces.FollowingSink.unknown_columns`."""
        async with self.changing() as rows:
            return await rows.unknown_columns()

    async def store_columns(self, columns: Mapping[TableName, KnownColumns]) -> None:
        """See :meth:`subscriber.interfaces.FollowingSink.store_columns`."""
        async with self.changing() as rows:
            for name, known in columns.items():
                await rows.store_columns(name, known)

    async def forget_columns(self) -> None:
        """See :meth:`subscriber.interfaces.FollowingSink.forget_columns`."""
        async with self.changing() as rows:
            await rows.forget_columns()

    async def _change(self, **values: object) -> None:
        async with self.changing() as rows:
            await rows.change(**values)


def tell_dropped(table: TableName) -> None:
    """Warn that a table leaves its subscription."""
    _log.warning(
        'table "%s" was dropped in the target: it leaves the subscription (hint: create it again, and refresh the subscription to copy it)',
        table,
    )


def _written_elsewhere(table: SharedTable, subscription: str) -> RelationError:
    also = f'table "{table.of}"' if table.name == table.of else f'table "{table.name}", which has rows of table "{table.of}",'
    return RelationError(
        f"{also} also belongs to {subscription}: its rows would be deleted", hint="a table of several subscriptions can only be copied"
    )


def _name(row: Row) -> TableName:
    return TableName(row["srnspname"], row["srrelname"])


def _table_row(row: Row) -> TableRow:
    return TableRow(row["srrelid"], entry_of(row), row)
