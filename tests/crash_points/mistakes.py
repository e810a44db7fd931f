"""Mistakes that a developer could make. Each is planted by a function, which is called first in each process of a case."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

from subscriber import crash_points
from subscriber.apply.receiving.spool import SpoolDirectory
from subscriber.apply.receiving.spool_file import SpoolFile
from subscriber.apply.tables.table_state import TableStates
from subscriber.apply.worker import ApplyWorker
from subscriber.interfaces import Batch
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import CommitPrepared, Relation
from subscriber.sinks.postgres.apply.prepared_transactions import PreparedTransactions
from subscriber.sinks.spark.files.storage import PendingFile
from subscriber.sinks.spark.landing_stream import LandingStream
from subscriber.sinks.spark.pipeline.applier import Applier as LakeApplier
from subscriber.sinks.spark.pipeline.engines.engine import Engine, TableResult, TableRound
from subscriber.sinks.sqlalchemy.apply.applier import Applier
from subscriber.sinks.sqlalchemy.copy.sqlalchemy_table_sink import SqlAlchemyTableSink
from subscriber.subscription.setup import setup
from subscriber.transaction.model import Event, Transaction
from subscriber.walreceiver.connection import WalReceiverConnection

__all__ = [
    "PUBLISHED_BEFORE_COMMITS",
    "acknowledge_before_apply",
    "acknowledge_commit_before_commit_prepared",
    "apply_again_what_a_table_has",
    "catch_up_one_transaction_late",
    "forget_spool_of_killed_process",
    "forget_table_slot",
    "keep_rolled_back_savepoint",
    "move_position_after_commit",
    "name_prepared_transaction_by_process",
    "publish_snapshot_before_commits",
    "store_copied_rows_after_state",
    "trust_position_of_slot",
    "write_manifest_before_files",
]

PUBLISHED_BEFORE_COMMITS: Final = "mistake.published_before_commits"
"""A point of :func:`publish_snapshot_before_commits`: how many snapshots are published before depends on the time."""


def _plant(owner: object, name: str, wrong: object) -> None:
    setattr(owner, name, wrong)


def acknowledge_before_apply() -> None:
    """A transaction is acknowledged when it is taken, and applied afterwards."""
    right = ApplyWorker._apply_batch

    async def wrong(self: ApplyWorker) -> None:
        event = self._receiver.peek()
        assert isinstance(event, Transaction)
        self._tracker.flush(event.end_lsn)
        await self._receiver.report_now()
        await right(self)

    _plant(ApplyWorker, "_apply_batch", wrong)


def acknowledge_commit_before_commit_prepared() -> None:
    """COMMIT PREPARED is acknowledged when it is taken, and done afterwards."""
    right = ApplyWorker._apply_single

    async def wrong(self: ApplyWorker, event: Event) -> None:
        if isinstance(event, CommitPrepared):
            self._tracker.flush(event.end_lsn)
            await self._receiver.report_now()
        await right(self, event)

    _plant(ApplyWorker, "_apply_single", wrong)


def move_position_after_commit() -> None:
    """The position is moved in a second transaction of the target."""
    right, move = Applier._once, Applier._move_position

    async def stay(*_: object) -> None:
        pass

    async def wrong(self: Applier, transactions: Sequence[Transaction], *arguments: Any, **named: Any) -> None:
        before, committed = self.position, self._committed
        self._committed = lambda _: None
        _plant(Applier, "_move_position", stay)
        try:
            await right(self, transactions, *arguments, **named)
        finally:
            _plant(Applier, "_move_position", move)
            self._committed = committed
        self.position = before
        await self.move(transactions[-1].end_lsn)

    _plant(Applier, "_once", wrong)


def trust_position_of_slot() -> None:
    """After a restart, the slot's position decides what is applied, and not the target's."""
    right = WalReceiverConnection.start_replication

    async def start(self: WalReceiverConnection, slot: str, _lsn: Lsn, options: Any) -> Any:
        return await right(self, slot, Lsn(0), options)

    async def apply(self: Applier, batch: Batch) -> None:
        await self.apply_all(batch.transactions, batch.gate, self.relations)

    _plant(WalReceiverConnection, "start_replication", start)
    _plant(Applier, "apply", apply)


def keep_rolled_back_savepoint() -> None:
    """The spool keeps the records of a savepoint that was rolled back."""
    _plant(SpoolFile, "truncate", lambda *_: None)


def forget_spool_of_killed_process() -> None:
    """The directory of the spool depends on the process, so the next one does not find it."""
    right = SpoolDirectory.__init__

    def wrong(self: SpoolDirectory, base: str | None, key: str) -> None:
        right(self, base, f"{key} of {os.getpid()}")

    _plant(SpoolDirectory, "__init__", wrong)


def name_prepared_transaction_by_process() -> None:
    """The gid of a prepared transaction depends on the process, so the next one does not find it, and prepares it again."""
    right = PreparedTransactions.gid

    def wrong(self: PreparedTransactions, xid: int) -> str:
        return f"{right(self, xid)}_{os.getpid()}"

    _plant(PreparedTransactions, "gid", wrong)


def store_copied_rows_after_state() -> None:
    """The state says that a table is copied before its rows are stored."""
    store, position, locked = SqlAlchemyTableSink._store, SqlAlchemyTableSink.position, SqlAlchemyTableSink._locked
    waiting: list[Any] = []

    async def later(_: SqlAlchemyTableSink, *arguments: Any) -> None:
        waiting.append(arguments)

    async def wrong(self: SqlAlchemyTableSink) -> Any:
        found = await position(self)
        _plant(SqlAlchemyTableSink, "_locked", lambda self, _state=None: locked(self))
        for arguments in waiting:
            await store(self, *arguments)
        _plant(SqlAlchemyTableSink, "_locked", locked)
        waiting.clear()
        return found

    _plant(SqlAlchemyTableSink, "_store", later)
    _plant(SqlAlchemyTableSink, "position", wrong)


def catch_up_one_transaction_late() -> None:
    """The first transaction after a table's snapshot is left out."""
    right = SqlAlchemyTableSink.apply

    async def wrong(self: SqlAlchemyTableSink, batch: Batch) -> None:
        left_out = batch.transactions[: self._applier is None]
        for transaction in left_out:
            await transaction.discard()
        await right(self, Batch(batch.transactions[len(left_out) :], batch.gate))

    _plant(SqlAlchemyTableSink, "apply", wrong)


def apply_again_what_a_table_has() -> None:
    """The apply worker does not ask up to where a table has been synchronized."""

    def wrong(_: TableStates, _relation: Relation, _lsn: Lsn) -> bool:
        return True

    _plant(TableStates, "gate", wrong)


def forget_table_slot() -> None:
    """The slots that table synchronizations of a killed process left are not dropped."""

    async def wrong(*_: object) -> None:
        pass

    _plant(setup, "drop_leftover_slots", wrong)


def write_manifest_before_files() -> None:
    """The manifest of a batch is written, and its files get their names afterwards."""
    commit, report = PendingFile.commit, LandingStream._report_landed
    waiting: list[tuple[PendingFile, str | None]] = []

    def later(self: PendingFile, name: str | None = None) -> int:
        if not (name or self.name).startswith("landing/"):
            return commit(self, name)
        waiting.append((self, name))
        return int(self.stream.tell())

    def wrong(self: LandingStream) -> None:
        for file, name in waiting:
            commit(file, name)
        waiting.clear()
        report(self)

    _plant(PendingFile, "commit", later)
    _plant(LandingStream, "_report_landed", wrong)


def publish_snapshot_before_commits() -> None:
    """The snapshot of a round is published, and its tables commit afterwards."""
    apply, tidy = Engine.apply, LakeApplier.tidy
    waiting: list[tuple[Engine, Sequence[TableRound]]] = []

    def later(self: Engine, works: Sequence[TableRound]) -> list[TableResult]:
        waiting.append((self, works))
        return [TableResult() for _ in works]

    def wrong(self: LakeApplier, **named: Any) -> int:
        if any(work.task.after for _, works in waiting for work in works):
            crash_points.reached(PUBLISHED_BEFORE_COMMITS)
        for engine, works in waiting:
            apply(engine, works)
        waiting.clear()
        return tidy(self, **named)

    _plant(Engine, "apply", later)
    _plant(LakeApplier, "tidy", wrong)
