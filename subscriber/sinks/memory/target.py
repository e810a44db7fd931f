"""The state that stays after a sink is closed: tables, and the subscriptions that other targets store in a catalog."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from subscriber.config import SchemaChange, SchemaChangeCallback
from subscriber.errors import RelationError, TargetUnavailable
from subscriber.interfaces import Position, PublishedTable, TableEntry, TableName, TwoPhaseState, WorkerActivity
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.sinks.memory.accepted_changes import Change
from subscriber.sinks.memory.table import MemoryColumn, MemoryTable, Values

__all__ = ["MemoryTarget", "SubscriptionRecord", "TableRecord", "no_table"]

_FIRST_OID: Final = 16_384


@dataclass(slots=True)
class TableRecord:
    """One table of a subscription.

    Attributes:
        entry: state of the table.
        position: the table's own position during its synchronization.
        copied: numbers of the rows that an unfinished copy has inserted.
        holder: the object that synchronizes the table, or None.
    """

    entry: TableEntry
    position: Position | None = None
    copied: set[int] = field(default_factory=set)
    holder: object | None = None


@dataclass(slots=True)
class SubscriptionRecord:
    """One subscription.

    Attributes:
        writer: the open sink, or None.
        prepared: changes of prepared transactions by xid and gid.
        activity: the latest report of the workers.
        last_error: the last error that was reported.
    """

    oid: int
    slot_name: str | None = None
    publications: tuple[str, ...] = ()
    two_phase: TwoPhaseState = TwoPhaseState.DISABLED
    position: Position | None = None
    skip_lsn: Lsn = INVALID_LSN
    tables: dict[TableName, TableRecord] = field(default_factory=dict)
    prepared: dict[tuple[int, str], list[Change]] = field(default_factory=dict)
    writer: object | None = None
    activity: tuple[WorkerActivity, ...] = ()
    last_error: str | None = None


class MemoryTarget:
    """A database in memory, for one event loop. It stays when sinks are closed and opened again.

    Args:
        create_tables: create published tables that are missing.
        schema_change: what to do about a published column that a table does not have, as :attr:`subscriber.config.Settings.schema_change`.
    """

    def __init__(
        self,
        *,
        create_tables: bool = True,
        schema_change: SchemaChange | SchemaChangeCallback = "error",
    ) -> None:
        self.identifier = uuid.uuid4().hex
        self.create_tables = create_tables
        self.schema_change: SchemaChange | SchemaChangeCallback = schema_change
        self.subscriptions: dict[str, SubscriptionRecord] = {}
        self._tables: dict[TableName, MemoryTable] = {}
        self._oids = itertools.count(_FIRST_OID)

    @property
    def tables(self) -> tuple[TableName, ...]:
        """Names of all tables."""
        return tuple(self._tables)

    def create_table(self, name: TableName | str, columns: Iterable[MemoryColumn | str], key: Sequence[str] = ()) -> MemoryTable:
        """Create a table, or replace it.

        Args:
            name: ``schema.name`` as a text, or a ``TableName``.
            columns: columns in their order.
            key: names of the primary key's columns.
        """
        found = _name(name)
        made = [MemoryColumn(column) if isinstance(column, str) else column for column in columns]
        table = self._tables[found] = MemoryTable(found, made, key, self.new_oid())
        return table

    def create_published(self, published: PublishedTable) -> None:
        """Create a table as the publisher describes it, unless it exists."""
        if published.name not in self._tables:
            key = published.primary_key or (() if published.replica_identity == "f" else published.key_columns)
            columns = [MemoryColumn(name, not_null=name in published.not_null) for name in published.columns]
            self.create_table(published.name, columns, key)

    def follow(self, table: MemoryTable, columns: Sequence[str]) -> None:
        """Handle published columns that a table does not have, as ``schema_change`` says: add them, or leave them out.

        Raises:
            RelationError: ``schema_change`` says "error".
        """
        missing = tuple(name for name in columns if name not in table.columns)
        if not missing:
            return
        choice = self.schema_change
        if not isinstance(choice, str):
            choice = choice(table.name.namespace, table.name.name, missing)
        if choice == "add":
            for name in missing:
                table.add_column(MemoryColumn(name))
        elif choice == "error":
            names = f"column{'s' if len(missing) > 1 else ''}: " + ", ".join(f'"{name}"' for name in missing)
            message = f'logical replication target relation "{table.name}" is missing replicated {names}'
            raise RelationError(message, sqlstate="55000", hint="add the column to the target's table, or leave it out of the publication")

    def drop_table(self, name: TableName | str) -> None:
        """Drop a table."""
        del self._tables[_name(name)]

    def table(self, name: TableName | str) -> MemoryTable:
        """The table of this name.

        Raises:
            RelationError: there is no such table.
        """
        found = self.find(_name(name))
        if found is None:
            raise no_table(name)
        return found

    def find(self, name: TableName) -> MemoryTable | None:
        """The table of this name, or None."""
        return self._tables.get(name)

    def rows(self, name: TableName | str) -> list[Values]:
        """All rows of a table, oldest first.

        Raises:
            RelationError: there is no such table.
        """
        return self.table(name).rows()

    def new_oid(self) -> int:
        """An oid that was not used in this target before."""
        return next(self._oids)

    def sever(self) -> None:
        """Disconnect all sinks, as if their processes were killed. Their next call raises TargetUnavailable."""
        for subscription in self.subscriptions.values():
            subscription.writer = None
            for record in subscription.tables.values():
                record.holder = None

    def require(self, holder: object | None, who: object, what: str) -> None:
        """Check that ``who`` is the ``holder``, the only object that may write.

        Raises:
            TargetUnavailable: ``who`` was disconnected by :meth:`sever`, or was never opened.
        """
        if holder is not who:
            raise TargetUnavailable(f"{what} is not open, or was cut off", hint="the connection is retried")


def no_table(name: TableName | str) -> RelationError:
    """The error about a table that the target does not have."""
    return RelationError(f'logical replication target relation "{name}" does not exist', hint="create it, or let the target create tables")


def _name(name: TableName | str) -> TableName:
    if isinstance(name, TableName):
        return name
    namespace, _, rest = name.rpartition(".")
    return TableName(namespace or "public", rest)
