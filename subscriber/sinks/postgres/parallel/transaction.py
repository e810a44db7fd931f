"""Apply a transaction before its end; implements :class:`subscriber.interfaces.ParallelTransaction`.

It is one transaction of the target that stays open between the pieces that arrive. Pieces that follow each other at once are sent in one
pipeline. At the first record of a subtransaction a savepoint is set, with the name that PostgreSQL gives it
(``pg_sp_<subscription oid>_<xid>``). An abort of the subtransaction undoes everything from its first record on: the changes, the counters,
and the relations that the publisher described. Only a streamed transaction has subtransactions.

The publisher does not tell when a subtransaction ends without an abort. So its savepoint is never released, and savepoints nest ever
deeper. The server searches all levels for each row that it reads, so an attempt with more than :data:`MOST_SAVEPOINTS` savepoints ends.

A relation that the publisher describes in a stream is valid only for this transaction until its commit. So these relations are kept
separate from those of the apply session, and are added to them at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from psycopg.pq.abc import PGresult

from subscriber.errors import TargetError
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.messages import Relation
from subscriber.sinks.postgres.apply.applier import BEGIN, WAL, Applier
from subscriber.sinks.postgres.apply.change_sql import control
from subscriber.sinks.postgres.apply.error_reports import Counted, RowsMissed
from subscriber.sinks.postgres.apply.prepared_transactions import PreparedTransactions
from subscriber.sinks.postgres.apply.transaction_sender import TransactionSender
from subscriber.sinks.postgres.parallel.sessions import FENCED, ParallelSessions
from subscriber.sinks.postgres.session.apply_session import ApplySession
from subscriber.sinks.postgres.session.pipeline import Pipeline, StatementFailed
from subscriber.sinks.postgres.session.statement import Statement
from subscriber.sinks.postgres.tables.fingerprint import Fingerprint, check
from subscriber.sinks.postgres.tables.relation_map import RelationMap
from subscriber.transaction.model import PreparedTransaction, Transaction

__all__ = ["MOST_SAVEPOINTS", "PostgresParallelTransaction"]

_log = logging.getLogger(__name__)

MOST_SAVEPOINTS: Final = 500


class _Savepoint:
    """A savepoint before record number ``index``."""

    def __init__(self, name: str, index: int, relations: dict[int, Relation]) -> None:
        self.name = name
        self.index = index
        self.relations = relations
        self.counted: Counted | None = None
        """The counters at the savepoint; None until the server has answered."""


class PostgresParallelTransaction:
    """See the module's docstring.

    Args:
        sessions: the pool that the session is returned to.
        session: the session for this transaction only.
        relations: a map for this transaction only; empty if it is streamed.
        applier: the applier of the apply session; it takes over a committed transaction.
        two_phase: the two-phase messages of the apply session.
        xid: transaction id on the publisher.
        streamed: whether its records have an xid.
        gate: decides which tables are changed.
        prepared: called with the previous position when a prepared transaction may have moved the position.
    """

    def __init__(
        self,
        sessions: ParallelSessions,
        session: ApplySession,
        relations: RelationMap,
        applier: Applier,
        two_phase: PreparedTransactions,
        *,
        xid: int,
        streamed: bool,
        gate: Callable[[Relation], bool | None],
        prepared: Callable[[Lsn], None],
    ) -> None:
        self._sessions = sessions
        self._session = session
        self._relations = relations
        self._applier = applier
        self._two_phase = two_phase
        self._xid = xid
        self._streamed = streamed
        self._gate = gate
        self._prepared = prepared
        self._begun = self._ended = False
        self._ending = asyncio.Lock()
        self._count = 0
        self._known = {xid}
        self._savepoints: list[_Savepoint] = []
        self._counted = Counted()
        self._targets: set[Fingerprint] = set()
        self._wal: Lsn | None = None
        self._open = contextlib.AsyncExitStack()
        self._sending: tuple[Pipeline, TransactionSender] | None = None

    @property
    def pid(self) -> int:
        """PID of its session in the target."""
        return self._session.pid

    async def apply(self, records: Sequence[bytes], *, more: bool = False) -> None:
        try:
            if self._sending is None:
                self._sending = await self._begin_sending()
            pipeline, sender = self._sending
            try:
                for subxid, run in self._runs(records):
                    if subxid is not None:
                        sender.finish()
                        self._set_savepoint(pipeline, subxid)
                    await sender.send([self._piece(run)])
                    self._count += len(run)
            except BaseException as error:
                self._sending = None
                await self._open.__aexit__(type(error), error, error.__traceback__)
                raise
            if not more:
                await self._settle()
        except StatementFailed as failure:
            raise self._error(failure) from None

    def _error(self, failure: StatementFailed) -> TargetError:
        error = self._applier.error(failure)
        if isinstance(error, RowsMissed):
            self._applier.note_early_miss(error.table, self._xid)
        return error

    async def _begin_sending(self) -> tuple[Pipeline, TransactionSender]:
        pipeline = await self._open.enter_async_context(self._session.pipeline(self._completed, stays_open=True))
        if not self._begun:
            self._begun = True
            pipeline.send(BEGIN, None)
        return pipeline, TransactionSender(
            self._relations,
            pipeline,
            lambda relation, _: self._gate(relation),
            self._applier.owner.origin,
            self._counted,
            without_sets=self._applier.without_sets,
            differs=self._applier.differs,
        )

    async def _settle(self) -> None:
        """End the pipeline: all changes are made then.

        Raises:
            StatementFailed: the server rejected a statement.
            TargetUnavailable
        """
        if self._sending is not None:
            _, sender = self._sending
            self._sending = None
            async with self._open:
                sender.finish()
            self._targets |= sender.targets

    def _piece(self, records: list[bytes]) -> Transaction:
        return Transaction(
            xid=self._xid, final_lsn=INVALID_LSN, end_lsn=INVALID_LSN, commit_time=0, prefixed=self._streamed, records=records
        )

    def _runs(self, records: Sequence[bytes]) -> Iterator[tuple[int | None, list[bytes]]]:
        """Split records where a subtransaction begins. Yields its xid and records; the xid is None if no subtransaction begins there."""
        if not self._streamed:
            yield None, list(records)
            return
        begun: int | None = None
        run: list[bytes] = []
        last = b""
        for record in records:
            if record[1:5] != last:
                last = record[1:5]
                xid = int.from_bytes(last)
                if xid not in self._known:
                    self._known.add(xid)
                    if run:
                        yield begun, run
                    begun, run = xid, []
            run.append(record)
        if run:
            yield begun, run

    def _set_savepoint(self, pipeline: Pipeline, subxid: int) -> None:
        if len(self._savepoints) >= MOST_SAVEPOINTS:
            raise TargetError("too many subtransactions", hint="it is applied at its end")
        name = f"pg_sp_{self._applier.owner.oid}_{subxid}"
        savepoint = _Savepoint(name, self._count, self._relations.remembered())
        self._savepoints.append(savepoint)
        pipeline.send(control(f"SAVEPOINT {name}"), savepoint)

    def _completed(self, statement: Statement, context: object, result: PGresult) -> None:
        if statement.message_type:
            self._counted.answer(statement, context, result)
        elif isinstance(context, _Savepoint):
            context.counted = self._counted.copy()
        elif statement is WAL:
            self._wal = Lsn.parse((result.get_value(0, 0) or b"").decode())

    async def cut(self, count: int) -> None:
        try:
            await self._settle()
        except StatementFailed as failure:
            raise self._error(failure) from None
        savepoint: _Savepoint | None = None
        while self._savepoints and self._savepoints[-1].index >= count:
            savepoint = self._savepoints.pop()
        if savepoint is None or savepoint.index != count or savepoint.counted is None:
            raise TargetError(f"transaction {self._xid} has no savepoint at its record {count}", hint="it is applied at its end")
        await self._session.fetch(f"ROLLBACK TO SAVEPOINT {savepoint.name}")
        # ROLLBACK TO keeps the savepoint, and later ones would nest ever deeper
        await self._session.fetch(f"RELEASE SAVEPOINT {savepoint.name}")
        self._count = count
        self._counted = savepoint.counted
        self._relations.restore(savepoint.relations)

    async def commit(self, transaction: Transaction) -> bool:
        """Commit it with its position. See :meth:`subscriber.interfaces.ParallelTransaction.commit`.

        Raises:
            TargetUnavailable: it is unknown whether the commit took effect.
            SpoolError: its spool file cannot be removed; the transaction is committed.
        """
        if transaction.end_lsn <= self._applier.position or not self._complete(transaction):
            return False
        if not await self._finish(transaction, lambda pipeline: self._applier.send_commit(pipeline, transaction, self._session)):
            return False
        self._applier.relations.adopt(self._relations)
        self._applier.adopt(transaction, self._counted, self._wal)
        await transaction.discard()
        return True

    async def prepare(self, prepared: PreparedTransaction) -> bool:
        """Prepare it. See :meth:`subscriber.interfaces.ParallelTransaction.prepare`.

        Raises:
            TargetUnavailable: it is unknown whether it took effect.
            TargetError: the transaction is prepared, but the position could not be moved.
            SpoolError: its spool file cannot be removed; the transaction is prepared.
        """
        transaction = prepared.transaction
        before = self._applier.position
        if not self._complete(transaction) or await self._two_phase.is_done(transaction.xid):
            return False
        gid = self._two_phase.gid(transaction.xid)
        if not await self._finish(
            transaction, lambda pipeline: self._applier.send_prepare(pipeline, transaction, gid, self._session), prepared=True
        ):
            return False
        self._applier.relations.adopt(self._relations)
        self._applier.adopt(transaction, self._counted, None, prepared=True)
        await self._two_phase.prepared(transaction)
        self._prepared(before)
        return True

    def _complete(self, transaction: Transaction) -> bool:
        return self._begun and self._count == transaction.count

    async def _finish(self, transaction: Transaction, end: Callable[[Pipeline], None], *, prepared: bool = False) -> bool:
        """Run the final statements. Returns False if everything is rolled back."""
        try:
            await self._settle()
            async with self._session.pipeline(self._completed) as pipeline:
                for target in self._targets:
                    pipeline.send(*check(target))
                if self._relations.log is not None:
                    resolved, lsn, time = self._counted.resolved, transaction.final_lsn, transaction.commit_time
                    self._relations.log.send(pipeline, resolved, lsn, time, prepared=prepared)
                pipeline.send(FENCED, None, self._sessions.fence)
                end(pipeline)
        except StatementFailed as failure:
            if failure.statement is WAL:
                # the statement after COMMIT
                raise self._error(failure) from None
            # the apply worker applies the spooled records, and reports the error if it occurs again
            _log.info("transaction %d could not be ended by its parallel apply worker: %s", self._xid, self._error(failure))
            return False
        self._counted.statistics.transactions += 1
        self._counted.statistics.parallel_transactions += 1
        return True

    async def roll_back(self) -> None:
        """Roll back, unless it was committed or prepared. Idempotent."""
        async with self._ending:
            if not self._ended:
                if self._sending is not None:
                    # its statements may wait for a lock: the session is terminated
                    self._sending = None
                    await self._open.__aexit__(asyncio.CancelledError, asyncio.CancelledError(), None)
                await self._sessions.give_back(self._session)
                # after the await: if that is cancelled, the next call must repeat it
                self._ended = True
