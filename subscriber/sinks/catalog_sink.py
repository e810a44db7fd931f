"""What opened sinks share whose targets store the catalog's rows: the first position, prepared transactions, reports, the end of a skip."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from subscriber.catalog.statistics import Reporter
from subscriber.catalog.subscription_rows import CatalogStateStore
from subscriber.errors import TargetError
from subscriber.interfaces import (
    ApplyStatistics,
    Position,
    RelationGate,
    SubscriptionState,
    TableEntry,
    TableName,
    WorkerActivity,
    everything_applies,
)
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import CommitPrepared, Relation, RollbackPrepared
from subscriber.transaction.model import PreparedTransaction

__all__ = ["CatalogSink", "Owner", "nothing_applies"]


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of a position: the subscription (``relid`` 0), or a table while it is synchronized."""

    oid: int
    relid: int = 0

    @property
    def origin(self) -> str:
        """The name that PostgreSQL gives the replication origin of this subscription or table."""
        return f"pg_{self.oid}_{self.relid}" if self.relid else f"pg_{self.oid}"


class Positioned(Protocol):
    """Applies transactions. ``position`` is the LSN of the position that the target has."""

    position: Lsn


class PreparedTransactions(Protocol):
    """Prepared transactions in the target: see :class:`subscriber.interfaces.TwoPhaseSink`."""

    async def prepare(self, prepared: PreparedTransaction, gate: RelationGate) -> None: ...

    async def commit(self, message: CommitPrepared, gate: RelationGate, /) -> None: ...

    async def rollback(self, message: RollbackPrepared) -> None: ...


def nothing_applies(_relation: Relation, _final_lsn: Lsn) -> bool:
    """The gate of a transaction that is skipped."""
    return False


class CatalogSink(CatalogStateStore):
    """A part of :class:`subscriber.interfaces.OpenedSink` and of :class:`subscriber.interfaces.TwoPhaseSink`.

    Args:
        state: of the subscription, as stored.
        statistics: of the sink.
        applier: applies transactions.
        two_phase: the prepared transactions.
        reporter: writes reports.
    """

    def __init__(
        self,
        state: SubscriptionState,
        statistics: ApplyStatistics,
        *,
        applier: Positioned,
        two_phase: PreparedTransactions,
        reporter: Reporter,
    ) -> None:
        self.state = state
        self.statistics = statistics
        self._positioned = applier
        self._prepared = two_phase
        self._reports = reporter
        self._has_position = state.position is not None

    def _require_ready(self) -> None:
        if not self._has_position:
            raise TargetError(
                f'subscription "{self.state.name}" has no position in the target',
                hint="was the subscription dropped? start it with a new name",
            )

    @contextlib.contextmanager
    def _moving(self) -> Iterator[None]:
        """Around work that moves the position, and is durable when it ends."""
        self._require_ready()
        before = self._positioned.position
        yield
        self._moved(before)

    def _moved(self, before: Lsn) -> None:
        """Report the position, unless the work has reported it."""

    async def set_position(self, position: Position) -> None:
        """Store the first position, or one on another timeline. Durable on return."""
        async with self.changing() as rows:
            await rows.save_position(0, position)
        self._has_position = True
        self._positioned.position = position.lsn

    async def park(self, tables: Mapping[TableName, TableEntry]) -> Mapping[TableName, TableEntry]:
        """See :meth:`subscriber.interfaces.ParkingSink.park`.

        Raises:
            RelationError: a trigger of another table fires for changes.
            TargetError, TargetUnavailable
        """
        async with self.changing() as rows:
            return await rows.park(tables)

    async def reconcile(self, tables: Sequence[TableName]) -> Mapping[TableName, TableEntry]:
        """See :meth:`subscriber.interfaces.ParkingSink.reconcile`.

        Raises:
            RelationError: rows of a table belong to another subscription, too.
            TargetError, TargetUnavailable
        """
        async with self.changing() as rows:
            return await rows.reconcile(tables)

    async def report(self, workers: Sequence[WorkerActivity], last_error: str | None) -> None:
        """See :meth:`subscriber.interfaces.StateStore.report`."""
        await self._reports.report(workers, last_error)

    async def prepare(self, prepared: PreparedTransaction, gate: RelationGate) -> None:
        """See :meth:`subscriber.interfaces.TwoPhaseSink.prepare`."""
        with self._moving():
            await self._prepared.prepare(prepared, gate)

    async def commit_prepared(self, message: CommitPrepared, gate: RelationGate = everything_applies) -> None:
        """See :meth:`subscriber.interfaces.TwoPhaseSink.commit_prepared`.

        Raises:
            DataLossError: the target has neither the prepared transaction nor the proof that it was committed.
        """
        with self._moving():
            await self._prepared.commit(message, gate)

    async def rollback_prepared(self, message: RollbackPrepared) -> None:
        """See :meth:`subscriber.interfaces.TwoPhaseSink.rollback_prepared`."""
        with self._moving():
            await self._prepared.rollback(message)
