"""What outlives a sink: tables, and what the catalog of another target would hold of each subscription."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from subscriber.abc import Position, PublishedTable, TableEntry, TableName, TwoPhaseState, WorkerActivity
from subscriber.config import InsertConflict, SchemaChange, SchemaChangeCallback
from subscriber.errors import RelationError, TargetUnavailable
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.sinks.memory.changes import Change
from subscriber.sinks.memory.table import MemoryColumn, MemoryTable, Values

__all__ = ["MemoryTarget", "SubscriptionRecord", "TableRecord"]

_FIRST_OID: Final = 16_384


@dataclass(slots=True)
class TableRecord:
    """One table of a subscription.

    Attributes:
        entry: its state.
        position: its own, while it is synchronized.
        copied: numbers of the rows of a copy that is not finished.
        overwritten: by their numbers, rows that such a copy has overwritten, as they were.
        holder: whoever synchronizes it.
    """

    entry: TableEntry
    position: Position | None = None
    copied: set[int] = field(default_factory=set)
    overwritten: dict[int, Values] = field(default_factory=dict)
    holder: object | None = None


@dataclass(slots=True)
class SubscriptionRecord:
    """One subscription.

    Attributes:
        writer: the sink that is open.
        prepared: changes of prepared transactions by xid and gid.
        activity: the workers, as they reported last.
        last_error: as reported last.
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
    """A database in memory, for one event loop. Sinks come and go; this stays.

    Args:
        create_tables: make published tables that are missing.
        schema_change: what comes of a published column that a table has not, as :attr:`subscriber.config.Settings.schema_change`.
        insert_conflict: what an INSERT of a key that is there is.
    """

    def __init__(
        self,
        *,
        create_tables: bool = True,
        schema_change: SchemaChange | SchemaChangeCallback = "error",
        insert_conflict: InsertConflict = "error",
    ) -> None:
        self.identifier = uuid.uuid4().hex
        self.create_tables = create_tables
        self.schema_change: SchemaChange | SchemaChangeCallback = schema_change
        self.insert_conflict: InsertConflict = insert_conflict
        self.subscriptions: dict[str, SubscriptionRecord] = {}
        self._tables: dict[TableName, MemoryTable] = {}
        self._oids = itertools.count(_FIRST_OID)

    @property
    def tables(self) -> tuple[TableName, ...]:
        """Names of all tables."""
        return tuple(self._tables)

    def create_table(self, name: TableName | str, columns: Iterable[MemoryColumn | str], key: Sequence[str] = ()) -> MemoryTable:
        """Make a table, or replace it.

        Args:
            name: ``schema.name`` as a text, or a name.
            columns: in their order.
            key: names of the primary key's columns.
        """
        found = _name(name)
        made = [MemoryColumn(column) if isinstance(column, str) else column for column in columns]
        table = self._tables[found] = MemoryTable(found, made, key, self.new_oid())
        return table

    def create_published(self, published: PublishedTable) -> None:
        """Make a table as the publisher's catalog describes it, unless it is there."""
        if published.name not in self._tables:
            key = published.primary_key or (() if published.replica_identity == "f" else published.key_columns)
            columns = [MemoryColumn(name, not_null=name in published.not_null) for name in published.columns]
            self.create_table(published.name, columns, key)

    def follow(self, table: MemoryTable, columns: Sequence[str]) -> None:
        """Do about published columns that a table has not what was decided: add them, or leave them out.

        Raises:
            RelationError: neither.
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
        """Forget a table."""
        del self._tables[_name(name)]

    def table(self, name: TableName | str) -> MemoryTable:
        """A table.

        Raises:
            RelationError: there is none of this name.
        """
        found = self.find(_name(name))
        if found is None:
            raise RelationError(
                f'logical replication target relation "{name}" does not exist', hint="create it, or let the target create tables"
            )
        return found

    def find(self, name: TableName) -> MemoryTable | None:
        """A table, or None."""
        return self._tables.get(name)

    def rows(self, name: TableName | str) -> list[Values]:
        """All rows of a table, oldest first.

        Raises:
            RelationError: there is no such table.
        """
        return self.table(name).rows()

    def new_oid(self) -> int:
        """One that nothing here has."""
        return next(self._oids)

    def sever(self) -> None:
        """All sinks lose their connection, as when their processes are killed: what they do next is TargetUnavailable."""
        for subscription in self.subscriptions.values():
            subscription.writer = None
            for record in subscription.tables.values():
                record.holder = None

    def require(self, holder: object | None, who: object, what: str) -> None:
        """Whoever is about to write must be the one that may.

        Raises:
            TargetUnavailable: it was severed, or never opened.
        """
        if holder is not who:
            raise TargetUnavailable(f"{what} is not open, or was cut off", hint="open it again")


def _name(name: TableName | str) -> TableName:
    if isinstance(name, TableName):
        return name
    namespace, _, rest = name.rpartition(".")
    return TableName(namespace or "public", rest)
