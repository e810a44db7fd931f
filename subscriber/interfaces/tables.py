"""The interfaces of table synchronizations: one table, or a group of small tables."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from subscriber.interfaces.conditions import Condition
from subscriber.interfaces.values import Batch, CopyFormat, Position, PublishedTable, SnapshotOrder, TableEntry, TableName
from subscriber.protocol.lsn import Lsn

if TYPE_CHECKING:
    from subscriber.interfaces.abilities import Query

__all__ = [
    "KeptRows",
    "ResumableTableSink",
    "SnapshotTableSink",
    "TableGroup",
    "TableSink",
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


@runtime_checkable
class SnapshotTableSink(Protocol):
    """A :class:`TableSink` whose target reads the publisher directly has this method too."""

    async def copy_snapshot(self, order: SnapshotOrder, rows: Callable[[int], None]) -> None:
        """Store all rows, instead of calls of :meth:`TableSink.copy`. The snapshot stays open until this returns.

        Args:
            order: where to read the rows.
            rows: called with the number of further rows stored.

        Raises:
            PublisherUnavailable: the snapshot does not exist any more; copy again.
            TargetError: the rows cannot be stored.
        """
        ...


@dataclass(frozen=True, slots=True)
class KeptRows:
    """Rows that an interrupted copy has left in a PostgreSQL target.

    Attributes:
        query: reads in the target.
        condition: SQL that is true for these rows only.
    """

    query: Query
    condition: str


@runtime_checkable
class ResumableTableSink(Protocol):
    """A :class:`TableSink` that can keep the rows of an interrupted copy has these methods too."""

    async def begin_again(self) -> TableEntry:
        """As :meth:`TableSink.begin`, but the rows of an unfinished copy stay, with the state DATASYNC."""
        ...

    async def kept(self) -> KeptRows | None:
        """The rows of an unfinished copy; None: there are none. Called after :meth:`TableSink.start_copy`."""
        ...

    async def undo_copy(self) -> None:
        """Delete these rows. The state stays."""
        ...

    async def delete_kept(self, condition: Condition) -> None:
        """Delete those of the kept rows that satisfy a condition. Durable on return."""
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
