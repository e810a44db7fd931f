"""Apply transactions to the target exactly once: all changes in order, in one pipeline.

A batch is one transaction of the target: BEGIN, all changes of its transactions, the position, COMMIT. They are sent without waiting for
answers. The position moves in the same transaction. So after a crash the position tells which transactions the target has. A
transaction whose end LSN is not past the position is skipped.

The position is updated only from its known value (``WHERE remote_lsn = …``). If a batch comes again after a commit of which this session
knows nothing, the UPDATE finds no row, and the batch is rolled back. A statement after COMMIT may be rejected too. The batch is committed
then, and is not applied again: both cases are a :class:`TargetUnavailable`, and the caller opens the sink again and reads the position.

Long runs of similar changes are sent as sets (:mod:`subscriber.sinks.postgres.apply.set_sender`). If a set does not find all its rows, the
batch is rolled back and applied again, change by change: then the missing rows are counted as conflicts.

If the server rejects a statement, the batch is rolled back and its transactions are applied again one by one, and change by change. Then
the transactions before the failing one become durable, and the error names the right transaction and change. The target's tables are read
again first, because an ALTER TABLE may be the reason for the error. An ALTER TABLE that causes no error is detected before the commit
(:mod:`subscriber.sinks.postgres.tables.fingerprint`), and the batch is retried in the same way.

If the session has a replication origin, its LSN and the publisher's commit time are set right before the commit, in the same pipeline.
The origin's progress (for monitoring) and the target's commit timestamps are those of the last transaction of the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from struct import Struct
from typing import Final

from psycopg.pq.abc import PGresult

from subscriber import crash_points
from subscriber.batch_times import committing
from subscriber.errors import TargetError, TargetUnavailable
from subscriber.interfaces import Batch, RelationGate, TableName
from subscriber.protocol.lsn import Lsn, kept_in_years
from subscriber.sinks.apply_counters import ChangeContext, Tally, count
from subscriber.sinks.catalog_sink import Owner
from subscriber.sinks.postgres.apply.change_sql import control
from subscriber.sinks.postgres.apply.conflicts import UNIQUE_VIOLATION, find_collisions, unique_conflict
from subscriber.sinks.postgres.apply.error_reports import Counted, RefusedByRule, RowsMissed, apply_error
from subscriber.sinks.postgres.apply.refused_tables import FOREIGN_KEY_VIOLATION, find_refused, find_violating
from subscriber.sinks.postgres.apply.transaction_sender import TransactionSender
from subscriber.sinks.postgres.session.apply_session import ApplySession
from subscriber.sinks.postgres.session.pipeline import Pipeline, StatementFailed
from subscriber.sinks.postgres.session.statement import Statement
from subscriber.sinks.postgres.tables.fingerprint import CHECKS, TargetsChanged, check
from subscriber.sinks.postgres.tables.relation_map import RelationMap
from subscriber.transaction.model import Transaction

__all__ = ["BEGIN", "WAL", "Applier", "Committed", "Owner"]

_MISSES: Final = 2
"""After so many misses in a session, the changes of a table are sent one by one."""

_OID: Final = 26
_INT8: Final = 20
_TEXT: Final = 25
_PG_LSN: Final = 3220
_TIMESTAMPTZ: Final = 1184
_MICROSECONDS: Final = Struct(">q")

BEGIN: Final = control("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE", reused=True)
_COMMIT: Final = control("COMMIT", ends=True, reused=True)
WAL: Final = control("SELECT pg_catalog.pg_current_wal_insert_lsn()", reused=True)

# Division by zero if our row is missing or has another position: COMMIT is already sent and must not be executed then.
_MOVED: Final = (
    b'WITH moved AS (UPDATE subscriber."position" SET remote_lsn = $1 '
    b"WHERE srsubid = $2 AND srrelid = $3 AND remote_lsn = $4 RETURNING 1) SELECT 1 / pg_catalog.count(*)%s FROM moved"
)
_MOVE: Final = Statement(_MOVED % b"", (_PG_LSN, _OID, _OID, _PG_LSN), reused=True)
_MOVE_WITH_ORIGIN: Final = Statement(
    _MOVED % b", pg_catalog.pg_replication_origin_xact_setup($1, $5)", (_PG_LSN, _OID, _OID, _PG_LSN, _TIMESTAMPTZ), reused=True
)
# the time is in binary format
_MOVE_FORMATS: Final = (0, 0, 0, 0, 1)
_NOTE_PREPARED: Final = control(
    "INSERT INTO subscriber.prepared_transaction (srsubid, xid, gid, prepare_end_lsn) VALUES ($1, $2, $3, $4)",
    (_OID, _INT8, _TEXT, _PG_LSN),
)

_XACT_SETUP: Final = Statement(b"SELECT pg_catalog.pg_replication_origin_xact_setup($1, $2)", (_PG_LSN, _TIMESTAMPTZ), reused=True)
_XACT_FORMATS: Final = (0, 1)

Committed = Callable[[Lsn, Lsn | None], None]
"""``committed(end_lsn, wal)``: the position is now ``end_lsn``.

It is on disk when the target has flushed its own WAL up to ``wal``; None: it is already on disk.
"""


class Applier:
    """Applies transactions to the target through one session.

    Attributes:
        relations: the remote relations and their target tables.
        alone: each transaction is one of the target.

    Args:
        owner: owner of the position.
        position: the stored position.
        tally: counts transactions after their commit.
        committed: called after each commit.
    """

    def __init__(
        self,
        session: ApplySession,
        relations: RelationMap,
        owner: Owner,
        *,
        position: Lsn,
        tally: Tally,
        committed: Committed,
    ) -> None:
        self._session = session
        self.relations = relations
        self.owner = owner
        self.position = position
        self._tally = tally
        self._committed = committed
        self._missed: Counter[TableName] = Counter()
        self._without_sets: set[TableName] = set()
        self._missed_early: set[int] = set()
        # the commit timestamps of rows are those of a batch: last_update_wins needs those of each transaction
        self.alone = bool(relations.rules.kinds("by_time"))

    @property
    def without_sets(self) -> Collection[TableName]:
        """The argument ``without_sets`` of :class:`TransactionSender`: tables whose sets missed rows more than once."""
        return self._without_sets

    async def apply(self, batch: Batch) -> None:
        """Apply the transactions of a batch that are past the position.

        Raises:
            ApplyError, RelationError, TargetError: the named transaction is rolled back; those before it are committed.
            TargetUnavailable: the position tells what is committed. Also if tables of the target were altered twice in the meantime.
        """
        pending = await self.pending(batch)
        for group in [[each] for each in pending] if self.alone else [pending] if pending else []:
            await self.apply_group(group, batch.gate)

    async def pending(self, batch: Batch) -> list[Transaction]:
        """The transactions of a batch that are past the position. The others are skipped.

        Raises:
            ProtocolError, SpoolError
        """
        position = self.position
        pending = [transaction for transaction in batch.transactions if transaction.end_lsn > position]
        for transaction in batch.transactions if len(pending) < len(batch.transactions) else ():
            if transaction.end_lsn <= position:
                await self.skip(transaction)
        return pending

    async def apply_group(self, pending: Sequence[Transaction], gate: RelationGate) -> None:
        """Apply transactions in one transaction of the target; after an error, in one for each. Errors are those of :meth:`apply`."""
        self.relations.expect(pending)
        try:
            if await self._succeeds(pending, lambda without_sets: self._attempt(pending, gate, without_sets=without_sets)):
                return
            self.relations.forget_targets()
            for transaction in pending:
                await self._attempt([transaction], gate, last=True)
        finally:
            self.relations.expect(())

    async def _succeeds(
        self, transactions: Iterable[Transaction], attempt: Callable[[Collection[TableName] | None], Awaitable[None]]
    ) -> bool:
        """Make an attempt with sets, and one without them if a set misses rows. False: both failed.

        Raises:
            TargetUnavailable
        """
        missed: TableName | None = None
        early = self._missed_early.intersection([transaction.xid for transaction in transactions]) if self._missed_early else set()
        self._missed_early -= early
        for without_sets in (None,) if early else (self._without_sets, None):
            try:
                await attempt(without_sets)
            except RowsMissed as miss:
                missed = miss.table
                continue
            except TargetsChanged:
                break
            except TargetUnavailable:
                raise
            except TargetError:
                break
            self._note_miss(missed)
            return True
        return False

    def note_early_miss(self, table: TableName | None, xid: int) -> None:
        """Count a set that missed rows in parallel apply. At its end the transaction is applied without sets, and not counted again."""
        self._note_miss(table)
        self._missed_early.add(xid)

    def _note_miss(self, table: TableName | None) -> None:
        """After a set that missed rows: send the table's changes one by one from now on, if it happens often."""
        if table is not None:
            self._missed[table] += 1
            if self._missed[table] >= _MISSES:
                self._without_sets.add(table)

    async def skip(self, transaction: Transaction) -> None:
        """Skip a transaction that the target already has, but keep the relations that it describes.

        Raises:
            ProtocolError, SpoolError
        """
        await self.relations.learn(transaction)
        await transaction.discard()

    async def prepare(self, transaction: Transaction, gate: RelationGate, gid: str) -> None:
        """Apply a transaction up to PREPARE TRANSACTION, with a row that proves COMMIT PREPARED later. The position does not move.

        Raises:
            ApplyError, RelationError, TargetError: the transaction is rolled back.
            TargetUnavailable
        """
        if await self._succeeds([transaction], lambda without_sets: self._prepare(transaction, gate, gid, without_sets=without_sets)):
            return
        self.relations.forget_targets()
        await self._prepare(transaction, gate, gid, last=True)

    async def _attempt(
        self,
        transactions: Sequence[Transaction],
        gate: RelationGate,
        *,
        without_sets: Collection[TableName] | None = None,
        last: bool = False,
    ) -> None:
        end = transactions[-1]
        end_lsn = end.end_lsn
        wal = await self._run(
            transactions, gate, lambda pipeline: self.send_commit(pipeline, end, self._session), without_sets=without_sets, last=last
        )
        crash_points.reached("postgres.committed")
        self.position = end_lsn
        self._committed(end_lsn, wal)
        for transaction in transactions:
            if transaction.spool is not None:
                await transaction.discard()

    async def _prepare(
        self,
        transaction: Transaction,
        gate: RelationGate,
        gid: str,
        *,
        without_sets: Collection[TableName] | None = None,
        last: bool = False,
    ) -> None:
        def finish(pipeline: Pipeline) -> None:
            self.send_prepare(pipeline, transaction, gid, self._session)

        await self._run([transaction], gate, finish, without_sets=without_sets, last=last, prepared=transaction.xid)

    def ended(self, prepared: int, *, committed: bool) -> None:
        """Count COMMIT PREPARED or ROLLBACK PREPARED of a transaction from :meth:`prepare`, or from another session (:meth:`adopt`)."""
        self._tally.ended(prepared, committed=committed)

    def send_commit(self, pipeline: Pipeline, end: Transaction, session: ApplySession) -> None:
        """After all changes: move the position to the end of the last transaction, and commit. ``session``: owner of the pipeline."""
        context = ChangeContext(self.owner.origin, end.xid, end.final_lsn, "STREAM COMMIT" if end.prefixed else "COMMIT")
        values = [value.encode() for value in (str(end.end_lsn), str(self.owner.oid), str(self.owner.relid), str(self.position))]
        if session.origin is None:
            pipeline.send(_MOVE, context, values)
        else:
            pipeline.send(_MOVE_WITH_ORIGIN, context, [*values, _commit_time(end)], _MOVE_FORMATS)
        pipeline.send(_COMMIT, context)
        if not session.commits_are_durable:
            pipeline.send(WAL, context)

    def send_prepare(self, pipeline: Pipeline, transaction: Transaction, gid: str, session: ApplySession) -> None:
        """After all changes: prepare, with the row that proves COMMIT PREPARED later. ``session``: owner of the pipeline."""
        ending = "STREAM PREPARE" if transaction.prefixed else "PREPARE"
        context = ChangeContext(self.owner.origin, transaction.xid, transaction.final_lsn, ending)
        values = [str(self.owner.oid), str(transaction.xid), gid, str(transaction.end_lsn)]
        pipeline.send(_NOTE_PREPARED, context, [value.encode() for value in values])
        if session.origin is not None:
            pipeline.send(_XACT_SETUP, context, [str(transaction.end_lsn).encode(), _commit_time(transaction)], _XACT_FORMATS)
        # needs no quoting: the variable parts of the gid are two numbers
        pipeline.send(control(f"PREPARE TRANSACTION '{gid}'", ends=True), context)

    @property
    def differs(self) -> int | None:
        """The argument ``differs`` of :class:`TransactionSender`. Origins of parallel apply sessions count as our own."""
        return self._session.origin or 0 if self._session.commit_timestamps else None

    def adopt(self, transaction: Transaction, counted: Counted, wal: Lsn | None, *, prepared: bool = False) -> None:
        """Take over a transaction that another session ended by :meth:`send_commit` or :meth:`send_prepare`, as if applied here."""
        self._tally.add(counted, transaction.xid if prepared else None)
        if not prepared:
            self.position = transaction.end_lsn
            self._committed(transaction.end_lsn, wal)

    async def _run(
        self,
        transactions: Sequence[Transaction],
        gate: RelationGate,
        finish: Callable[[Pipeline], None],
        *,
        without_sets: Collection[TableName] | None,
        last: bool,
        prepared: int | None = None,
    ) -> Lsn | None:
        """Make one attempt to apply transactions.

        Args:
            transactions: the transactions to apply.
            gate: the gate of the batch.
            finish: sends the statements that end the target's transaction.
            without_sets: see :class:`TransactionSender`.
            last: there is no retry, so a conflict is looked up, added to the error, and counted.
            prepared: xid of the transaction that is prepared, or None.
        """
        remembered = self.relations.remembered()
        counted = Counted()
        wal: Lsn | None = None

        def completed(statement: Statement, context: object, result: PGresult) -> None:
            nonlocal wal
            if statement.message_type:
                counted.answer(statement, context, result)
            elif statement is WAL:
                wal = Lsn.parse((result.get_value(0, 0) or b"").decode())

        done = False
        sender: TransactionSender | None = None
        try:
            async with self._session.pipeline(completed) as pipeline:
                pipeline.send(BEGIN, None)
                sender = TransactionSender(
                    self.relations,
                    pipeline,
                    gate,
                    self.owner.origin,
                    counted,
                    without_sets=without_sets,
                    differs=self.differs,
                    prepared=prepared is not None,
                )
                await sender.send(transactions)
                sender.finish()
                pipeline.start()
                crash_points.reached("postgres.changes_sent")
                if self.relations.log is not None:
                    await pipeline.answered()
                    sender.write_log()
                for target in sender.targets:
                    pipeline.send(*check(target))
                finish(pipeline)
                committing()
                crash_points.reached("postgres.end_sent")
            done = True
        except StatementFailed as failure:
            changed = sender.changed if sender is not None else ()
            raise (await self._final_error(failure, changed) if last else self.error(failure)) from None
        finally:
            if not done:
                self.relations.restore(remembered)
        counted.statistics.transactions += len(transactions)
        self._tally.add(counted, prepared)
        return wal

    async def _final_error(self, failure: StatementFailed, changed: Collection[TableName]) -> TargetError:
        statement = failure.statement
        if statement.ends and failure.diagnostics.sqlstate == FOREIGN_KEY_VIOLATION:
            error = self.error(failure)
            blamed = await find_violating(self._session, failure.diagnostics, changed)
            error.of_table = None if blamed is None else (blamed.namespace, blamed.name)
            return error
        if statement.truncated:
            error = self.error(failure)
            if error.of_table is None and not isinstance(error, TargetUnavailable):
                blamed = await find_refused(self._session, statement.truncated)
                error.of_table = None if blamed is None else (blamed.namespace, blamed.name)
            return error
        if failure.diagnostics.sqlstate != UNIQUE_VIOLATION or statement.table is None:
            error = self.error(failure)
            if isinstance(error, RefusedByRule):
                count(self._tally.statistics, error.conflict)
            return error
        collisions = await find_collisions(self._session, failure)
        count(self._tally.statistics, unique_conflict(statement, collisions))
        return apply_error(failure, collisions)

    def error(self, failure: StatementFailed) -> TargetError:
        """The error of a rejected statement. TargetUnavailable: only the stored position tells what is committed."""
        if failure.statement in CHECKS and failure.diagnostics.sqlstate == "22012":
            return TargetsChanged()
        if failure.statement in (_MOVE, _MOVE_WITH_ORIGIN) and failure.diagnostics.sqlstate == "22012":
            return TargetUnavailable(
                f"the target does not have position {self.position} of subscription {self.owner.oid} any more",
                hint="temporary error; if it persists, another program changes schema subscriber of the target",
            )
        if failure.statement is WAL:
            return TargetUnavailable(
                "pg_current_wal_insert_lsn() was refused after a commit",
                hint="temporary error: from now on commits wait until they are on disk; to avoid that, GRANT EXECUTE on it to the role",
            )
        return apply_error(failure)


def _commit_time(transaction: Transaction) -> bytes:
    return _MICROSECONDS.pack(kept_in_years(transaction.commit_time))
