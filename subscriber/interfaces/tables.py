"""The interfaces of table synchronizations: one table, or a group of small tables."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from subscriber.interfaces.values import Batch, CopyFormat, Position, PublishedTable, TableEntry, TableName
from subscriber.protocol.lsn import Lsn

if TYPE_CHECKING:
    from subscriber.interfaces.abilities import ComparedTables, Query

__all__ = [
    "ReconcilingTableGroup",
    "ReconcilingTableSink",
    "ReplacedKeys",
    "ReplacedRange",
    "Replacement",
    "ReplacingSink",
    "TableGroup",
    "TableSink",
    "TargetRows",
]


class TableSink(Protocol):
    """The synchronization of one table, on its own sessions. Only one per table exists at a time, also across processes.

    A crash at any instant leaves the state before a call or the state after it.
    """

    @property
    def relation_id(self) -> int:
        """A number that permanently identifies the table in this target (PostgreSQL: its oid). Known after :meth:`begin`."""
        ...

    async def begin(self) -> TableEntry:
        """Return the stored entry. First undo an unfinished copy (state DATASYNC becomes INIT).

        Call it again after another call failed, to learn whether that call took effect.
        """
        ...

    async def start_copy(self) -> None:
        """Store DATASYNC."""
        ...

    async def describe(self, table: PublishedTable) -> None:
        """Receive the publisher's description of the table.

        It is called before :meth:`start_copy`, so that a table that does not fit is not started. It is called again before the first
        :meth:`copy`, because the publisher's table may have been altered in between.

        Raises:
            RelationError: the target's table does not match.
        """
        ...

    async def copy(self, columns: Sequence[str], copy_format: CopyFormat, data: AsyncIterator[bytes]) -> None:
        """Store the rows of one COPY stream. Calls may overlap.

        Raises:
            TargetError: the target rejected the rows.
        """
        ...

    async def finish_copy(self, position: Position) -> None:
        """Store FINISHEDCOPY and the table's own position together with all rows copied since :meth:`start_copy`, atomically."""
        ...

    async def position(self) -> Position:
        """The table's own position: that of the snapshot, or a later one from :meth:`apply`. Only in state FINISHEDCOPY."""
        ...

    async def apply(self, batch: Batch) -> None:
        """Apply the changes of this table in a batch, with the position. Durable on return."""
        ...

    async def finish_sync(self, lsn: Lsn) -> None:
        """Store SYNCDONE at ``lsn`` and delete the table's own position."""
        ...

    async def close(self) -> None:
        """Release the sessions. Uncommitted work is rolled back. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class ReplacedKeys:
    """Rows of the publisher that take the place of the target's rows with the same keys.

    Attributes:
        key: the columns that identify a row.
        keys: texts of these columns. All rows of the target with one of these keys are deleted, and those with a NULL in the key if one
            of these has a None.
        rows: reads the publisher's rows with these keys: all published columns, as texts. It may be called again.
    """

    key: tuple[str, ...]
    keys: Sequence[Sequence[str | None]]
    rows: Callable[[], Awaitable[Sequence[Sequence[str | None]]]]


@dataclass(frozen=True, slots=True)
class ReplacedRange:
    """Rows of the publisher that take the place of all rows of a range.

    Attributes:
        key: the columns that identify a row; empty: the table has no key.
        column: its values are from ``low`` to before ``high``; None: all rows.
        low, high: texts of values; None: no bound. NULL lies above all values.
        rows: opens the publisher's rows of the range, as COPY data. It may be called again.
    """

    key: tuple[str, ...]
    column: str | None
    low: str | None
    high: str | None
    rows: Callable[[], AbstractAsyncContextManager[AsyncIterator[bytes]]]


Replacement = ReplacedKeys | ReplacedRange


@dataclass(frozen=True, slots=True)
class TargetRows:
    """Rows of a PostgreSQL target that are compared with the publisher's.

    Attributes:
        queries: sessions that read them.
        condition: SQL that is true for these rows only; empty: all rows of the table.
    """

    queries: Sequence[Query]
    condition: str = ""


class ReplacingSink(Protocol):
    """Replaces rows of one table."""

    async def replace(self, replacements: Sequence[Replacement], columns: Sequence[str], copy_format: CopyFormat) -> None:
        """Delete rows, and then store those of the publisher, all or nothing.

        Columns that only the target has keep their values where the row has a key. A row is deleted only if the text of its key is the
        one that was read from it. Foreign keys do not fire, as when changes are applied.

        Args:
            replacements: what to delete and to store.
            columns: the published columns.
            copy_format: of the rows of a range.

        Raises:
            ApplyError: the target rejects a row; with an SQLSTATE of class 23 if another row, which may be replaced later, prevents it.
            TargetError: or another subclass. Nothing was changed.
        """
        ...


@runtime_checkable
class ReconcilingTableSink(ReplacingSink, Protocol):
    """A :class:`TableSink` whose rows can be compared with the publisher's, and replaced, has these methods too.

    It stores ``TableEntry.mode`` with the state. With another mode than COPY, :meth:`TableSink.begin` undoes nothing.
    """

    async def begin_again(self) -> TableEntry:
        """As :meth:`TableSink.begin`, but the rows of an unfinished copy stay, with the state DATASYNC."""
        ...

    async def compared(self, sessions: int) -> TargetRows | ComparedTables | None:
        """Return the rows to compare: in mode COPY those that an unfinished copy has stored, else all of them.

        Called after :meth:`TableSink.start_copy`.

        Args:
            sessions: how many read them.

        Returns:
            None: there are none that can be compared.

        Raises:
            RelationError: a trigger of the target would fire for rows that are only deleted and stored again. An unfinished copy is undone
                then.
        """
        ...

    async def replace(self, replacements: Sequence[Replacement], columns: Sequence[str], copy_format: CopyFormat) -> None:
        """As :meth:`ReplacingSink.replace`, in one transaction. Calls may overlap."""
        ...

    async def undo_copy(self) -> None:
        """Delete the rows of an unfinished copy. The state stays."""
        ...


class TableGroup(Protocol):
    """Tables that are copied one after another through one session. Each takes one transaction, with its rows and its state.

    Where rows and states are stored apart, the states of up to :attr:`at_once` tables are stored together.

    One call at a time. A crash at any instant leaves each table in INIT, without copied rows, or in SYNCDONE, with all of them.
    """

    @property
    def usable(self) -> bool:
        """False once the session is lost, or its sink was closed. Then only :meth:`close` may be called."""
        ...

    @property
    def at_once(self) -> int:
        """How many tables may be copied before :meth:`finish`: 1, if the rows are in the transaction that it commits."""
        ...

    async def begin(self, tables: Sequence[TableName]) -> Mapping[TableName, int]:
        """Connect. Return the tables that are in INIT, each with its :attr:`TableSink.relation_id`."""
        ...

    async def copy(self, table: PublishedTable, copy_format: CopyFormat, data: AsyncIterator[bytes]) -> None:
        """Store a table's rows. Other sessions see them only after :meth:`finish`. It waits only a moment for locks of other sessions.

        Raises:
            SubscriberError: the table was rolled back. The group can continue with other tables if it is still ``usable``.
        """
        ...

    async def finish(self, tables: Mapping[TableName, Lsn]) -> None:
        """Store SYNCDONE for copied tables, each with its LSN, and commit. Durable on return.

        Raises:
            TargetError: all of them were rolled back. But if the group is not ``usable`` any more, the call may have taken effect:
                :meth:`TableSink.begin` returns the state.
        """
        ...

    async def roll_back(self, table: TableName) -> None:
        """Roll back a table that is not finished. Idempotent."""
        ...

    async def close(self) -> None:
        """Release the session. Uncommitted work is rolled back. Idempotent."""
        ...


@runtime_checkable
class ReconcilingTableGroup(TableGroup, ReplacingSink, Protocol):
    """A :class:`TableGroup` whose tables can be reconciled, too: in the transaction that :meth:`TableGroup.finish` commits."""

    async def compared(self, table: PublishedTable) -> TargetRows:
        """Begin to reconcile a table, in the place of :meth:`TableGroup.copy`. Return its rows, which one session reads.

        Raises:
            RelationError: rows of the table belong to another subscription, too, or a trigger fires for them.
            SubscriberError: as :meth:`TableGroup.copy`.
        """
        ...
