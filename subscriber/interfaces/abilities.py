"""Abilities: a sink has one by implementing its methods. Callers ask with ``isinstance``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from subscriber.interfaces.tables import TableGroup
from subscriber.interfaces.values import PublishedTable, RelationGate, TableEntry, TableName, TargetActivity, everything_applies

if TYPE_CHECKING:
    # `subscriber status` needs none of these
    from subscriber.errors import MissingColumns
    from subscriber.protocol.messages import CommitPrepared, Relation, RollbackPrepared
    from subscriber.transaction.model import PreparedTransaction, Transaction

__all__ = [
    "AbortableSink",
    "ApplyWorkersSink",
    "ComparedTables",
    "DescribedSink",
    "ExportSnapshot",
    "ExportingSink",
    "FinishingSink",
    "GroupingSink",
    "KeyedRowSource",
    "ParallelSink",
    "ParallelTransaction",
    "ParkingSink",
    "PingedSink",
    "PostgresDatabase",
    "Query",
    "RepairingSink",
    "ResolvingSink",
    "Row",
    "RowSource",
    "SchemaGapSink",
    "TwoPhaseSink",
    "WatchedSink",
]


Row = Sequence[str | None]
"""One row of texts."""


class Query(Protocol):
    """Runs one SELECT. Its columns are texts."""

    def __call__(self, sql: str, /, *values: str) -> Awaitable[Sequence[Sequence[str | None]]]:
        """``values`` are the parameters $1, $2 and so on."""
        ...


@runtime_checkable
class TwoPhaseSink(Protocol):
    """An opened sink that keeps prepared transactions of the publisher until their COMMIT PREPARED."""

    @property
    def prepares_in_target(self) -> bool:
        """Whether they are prepared in the target itself, which reports errors in their changes at once.

        Otherwise the sink stores the changes durably, and :meth:`commit_prepared` applies them.
        """
        ...

    async def prepare(self, prepared: PreparedTransaction, gate: RelationGate) -> None:
        """Apply a transaction up to PREPARE TRANSACTION. Durable on return, and the position not earlier. Idempotent.

        The gate is asked now, also without ``prepares_in_target``.

        Do this even if its end LSN is not past the position: a transaction that was prepared before two-phase was enabled for the slot
        comes late, right before its COMMIT PREPARED.
        """
        ...

    async def commit_prepared(self, message: CommitPrepared, gate: RelationGate = everything_applies) -> None:
        """COMMIT PREPARED, together with the position. Idempotent.

        Args:
            message: the end of the prepared transaction.
            gate: whether to apply the changes of a relation. Without ``prepares_in_target`` it is asked again, because a table may have
                been parked, or dropped by the publisher, since PREPARE. Otherwise the changes were made at PREPARE.

        Raises:
            ApplyError, RelationError: only without ``prepares_in_target``. The transaction stays prepared.
            DataLossError: the target has neither the prepared transaction nor a record of its commit. NeverPrepared if it was also never
                prepared there.
        """
        ...

    async def rollback_prepared(self, message: RollbackPrepared) -> None:
        """ROLLBACK PREPARED if the prepared transaction exists. Otherwise store only the position. Idempotent."""
        ...


@runtime_checkable
class DescribedSink(Protocol):
    """An opened sink that needs the publisher's description of the tables, including types that Relation messages do not describe."""

    async def describe_tables(self, tables: Sequence[PublishedTable]) -> None:
        """Receive the descriptions of these tables. If the sink is so configured, it creates missing tables.

        It is called in every run after :meth:`Sink.open`, before :meth:`StateStore.add_tables` and before the first change, and again when
        the tables are refreshed.
        """
        ...


@runtime_checkable
class ResolvingSink(Protocol):
    """A sink that can follow rules for conflicts. Other sinks are used with the default rules only."""

    @property
    def conflict_rules(self) -> Mapping[str, Collection[str]]:
        """The rules that it can follow besides the default, by kind of conflict."""
        ...

    @property
    def logs_conflicts(self) -> bool:
        """Whether it can write conflicts into a table."""
        ...


@runtime_checkable
class ApplyWorkersSink(Protocol):
    """A sink that can apply transactions in several sessions at once (``apply_workers``). Other sinks are used with one."""

    @property
    def has_apply_workers(self) -> bool:
        """Whether it can."""
        ...


@runtime_checkable
class GroupingSink(Protocol):
    """An opened sink that can copy small tables faster in groups."""

    def open_group(self) -> TableGroup:
        """Create a group. Several groups may work at the same time."""
        ...


@runtime_checkable
class SchemaGapSink(Protocol):
    """An opened sink whose tables get new columns and types by themselves, with NULL or the same values in the rows that they have.

    Before it takes a change of a table whose columns have changed, it raises a :class:`subscriber.RelationError` with
    ``missing_columns``.
    """

    async def take_columns(self, missing: MissingColumns, gap: str | None) -> TableEntry | None:
        """Let a table continue with the columns that it has now. Durable on return.

        Args:
            missing: of the error.
            gap: why rows that exist may have other values than NULL in the new columns. None: they have NULL.

        Returns:
            The table's entry, if it is copied again. None: it continues.
        """
        ...


@runtime_checkable
class ParkingSink(Protocol):
    """An opened sink that can leave out a table that the target rejects, until it is reconciled. Calls are durable on return."""

    async def park(self, tables: Mapping[TableName, TableEntry]) -> Mapping[TableName, TableEntry]:
        """Store the state PARKED. The table's own position is forgotten.

        Args:
            tables: names, as the changes have them, and the entries to store.

        Returns:
            The tables that were found, by the names that the subscription has for them.

        Raises:
            RelationError: it would be wrong: a trigger of another table, which may read it, fires for changes. Nothing was changed.
        """
        ...

    async def reconcile(self, tables: Sequence[TableName]) -> Mapping[TableName, TableEntry]:
        """Let parked tables be synchronized again: their rows are reconciled.

        Returns:
            Their new entries. A table that is not parked, or that the target lacks, is left out.

        Raises:
            RelationError: rows of a table belong to another subscription, too. Nothing was changed.
        """
        ...


class ParallelTransaction(Protocol):
    """One transaction that is applied while the publisher still sends it, in an open transaction on its own session.

    *An attempt only.* The caller keeps all records. If the attempt fails, the caller passes the whole transaction to :meth:`Stream.apply`.
    So every error but one rolls the attempt back and ends it, and is no reason to stop. If the cause persists, ``Stream.apply`` reports it.
    *Invisible.* Other sessions see none of its changes before :meth:`commit`. It may hold locks for which others wait, such as
    :meth:`Stream.apply`. Then it must be rolled back (:meth:`ParallelSink.holding_up`).
    *Order.* Records come in the order received, each once. One call at a time. Only :meth:`roll_back` may be called while another,
    cancelled call has not returned yet.
    """

    async def apply(self, records: Sequence[bytes], *, more: bool = False) -> None:
        """Apply the next records. They are raw; those of a streamed transaction have an xid after the tag.

        Args:
            records: the records.
            more: whether the next call is expected at once, so that this one need not wait until the changes are made.

        Raises:
            SubscriberError: see above.
        """
        ...

    async def cut(self, count: int) -> None:
        """Undo all but the first ``count`` records: the next one began a subtransaction that was aborted."""
        ...

    async def commit(self, transaction: Transaction) -> bool:
        """Commit the transaction after its last record, with its end LSN as the position, as :meth:`Stream.apply` would.

        Not called while another call of the sink runs. If it returns True, the sink has discarded and counted the transaction.

        Returns:
            False if the transaction was rolled back.

        Raises:
            TargetUnavailable: the commit may have taken effect, as with ``Stream.apply``.
        """
        ...

    async def prepare(self, prepared: PreparedTransaction) -> bool:
        """Prepare the transaction, as :meth:`TwoPhaseSink.prepare` would. Otherwise like :meth:`commit`."""
        ...

    async def roll_back(self) -> None:
        """Roll back and release all locks. Idempotent. Does nothing after :meth:`commit` or :meth:`prepare`."""
        ...


@runtime_checkable
class ParallelSink(Protocol):
    """An opened sink that can apply transactions before their end, in parallel to other work."""

    async def open_parallel(self, xid: int, gate: Callable[[Relation], bool | None], *, streamed: bool = True) -> ParallelTransaction:
        """Begin to apply the transaction ``xid`` before its end. :meth:`OpenedSink.close` rolls back what is left of it.

        Args:
            xid: its (top) id on the publisher.
            gate: as :data:`RelationGate`, but the final LSN may not be known yet. The caller checks whether its answers stay the same.
            streamed: whether the publisher sends it while it runs. Then it describes its relations itself. Otherwise it also uses those
                that earlier transactions described. All of these are applied, and no other one is applied before its end.

        Raises:
            TargetUnavailable, TargetError: no session is available; or the transaction is already prepared in the target.
        """
        ...

    async def holding_up(self, waiting: ParallelTransaction | None, others: Sequence[ParallelTransaction]) -> Sequence[ParallelTransaction]:
        """Return those of ``others`` that must be rolled back, because a running call may wait for them for ever.

        They hold locks that the call waits for, directly or through other sessions; or this cannot be determined. May overlap with
        that call.

        Args:
            waiting: the transaction whose call it is; None: it is a call of the sink.
            others: transactions that may be rolled back.

        Raises:
            TargetUnavailable, TargetError: the locks cannot be queried.
        """
        ...


@runtime_checkable
class PostgresDatabase(Protocol):
    """A :class:`Sink` whose target may be a PostgreSQL database."""

    def querying(self) -> AbstractAsyncContextManager[Query | None]:
        """Open a transaction for SELECTs in the target, on its own session. Works without ``open``. It is rolled back at the end.

        Yields None if the target is not a PostgreSQL database.

        Raises:
            TargetUnavailable, TargetError: the target cannot be queried.
        """
        ...


ExportSnapshot = Callable[[], Awaitable[tuple[str, int]]]
"""Takes a snapshot of the target. Returns its name, for other processes, and its ``xmin``; 0: the target has no transaction ids."""


@runtime_checkable
class ExportingSink(Protocol):
    """An opened sink whose target can export snapshots."""

    def exporting(self) -> AbstractAsyncContextManager[ExportSnapshot]:
        """Open a session that can take a snapshot at once. The snapshot can be imported until the block ends. May overlap with any call.

        The function that it yields is called like the sink's other methods, by the one caller.

        Raises:
            TargetUnavailable, TargetError: also from the function that it yields.
        """
        ...


@runtime_checkable
class FinishingSink(Protocol):
    """An opened sink that does a part of its work in the background."""

    async def finish(self) -> None:
        """Called at the end of a run that ends by itself (``--until-caught-up``), before the sink is closed.

        Raises:
            SubscriberError: what keeps the background work from its end. It is the error of the run.
        """
        ...


@runtime_checkable
class RepairingSink(Protocol):
    """An opened sink that can replace rows by their state on the publisher."""

    async def repair(self, table: PublishedTable, key: Sequence[str], keys: Sequence[Row], rows: Sequence[Row]) -> None:
        """Make the rows with these keys equal to those of the publisher, in one transaction that does not move the position.

        Called like the other methods, by the one caller, while the target has exactly the publisher's transactions up to one LSN.
        Triggers and foreign keys do not fire, as when changes are applied.

        Args:
            table: as published.
            key: columns that identify a row.
            keys: values of these columns, as PostgreSQL's texts. Those that have no row in ``rows`` are deleted.
            rows: the publisher's rows with these keys: all published columns, as PostgreSQL's texts or None.

        Raises:
            ApplyError, RelationError: the target rejects a row. Nothing was changed.
            TargetError, TargetUnavailable: the target cannot be reached, or does not take the rows.
        """
        ...


class RowSource(Protocol):
    """A table of a target, in a snapshot. Values are those of the driver. Several calls may run at once."""

    def is_integer(self, number: int) -> bool:
        """Whether a column, by its number, holds integers, and ranges of it can be read without reading all rows."""
        ...

    def rows(self, column: str | None, low: int | None, high: int | None) -> AsyncIterator[Sequence[Sequence[object]]]:
        """Read all rows, or those of a range of an integer column, some thousand at a time.

        Args:
            column: the column; None: all rows.
            low: the lowest value; None: no bound.
            high: the value above the highest; None: no bound.

        Raises:
            TargetUnavailable, TargetError: the target cannot be read.
        """
        ...


@runtime_checkable
class KeyedRowSource(RowSource, Protocol):
    """Such a table that finds rows by their keys."""

    async def rows_by_key(self, keys: Sequence[Sequence[str]]) -> Sequence[Sequence[object]]:
        """Read the rows with these keys, given as PostgreSQL's texts.

        Raises:
            TargetUnavailable, TargetError: the target cannot be read.
        """
        ...


class ComparedTables(Protocol):
    """Tables of a target in a snapshot, whose rows this program hashes."""

    async def table(self, published: PublishedTable, key: Sequence[str]) -> RowSource:
        """Find a table. Its columns are those of the publisher, in that order.

        Args:
            published: the table.
            key: the columns by which :class:`KeyedRowSource` finds rows; may be empty.

        Raises:
            RelationError: the target does not have it, or lacks a column.
        """
        ...


@runtime_checkable
class PingedSink(Protocol):
    """An opened sink that has sessions with a server."""

    async def ping(self) -> None:
        """Check that the sessions for applying are alive. It is called like the other methods, by the one caller.

        Raises:
            TargetUnavailable: a session is lost, or does not answer within some seconds.
        """
        ...


@runtime_checkable
class AbortableSink(Protocol):
    """A :class:`Sink` that has sessions with a server."""

    def abort(self) -> None:
        """Cut the sessions, because the server does not answer: what waits for it ends."""
        ...


@runtime_checkable
class WatchedSink(Protocol):
    """A :class:`Sink` that has sessions with a server, or a file that other programs may lock."""

    async def activity(self) -> TargetActivity:
        """Observe the sink's sessions, including those of table synchronizations, through another session.

        May overlap with any other call, including :meth:`Sink.open` and :meth:`OpenedSink.close`, and may be cancelled at any moment.

        Raises:
            TargetError: the sessions cannot be observed.
        """
        ...
