"""Apply a group of transactions in its own session, and commit it in its turn: see :mod:`subscriber.sinks.postgres.parallel.groups`."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from psycopg.pq.abc import PGresult

from subscriber import crash_points
from subscriber.batch_times import committing
from subscriber.errors import SubscriberError, TargetError, TargetUnavailable
from subscriber.interfaces import RelationGate, TableName
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.postgres.apply.applier import BEGIN, WAL, Applier
from subscriber.sinks.postgres.apply.error_reports import Counted
from subscriber.sinks.postgres.apply.transaction_sender import TransactionSender
from subscriber.sinks.postgres.parallel.sessions import FENCED, ParallelSessions
from subscriber.sinks.postgres.session.apply_session import ApplySession
from subscriber.sinks.postgres.session.pipeline import Pipeline, StatementFailed
from subscriber.sinks.postgres.session.statement import Statement
from subscriber.sinks.postgres.tables.fingerprint import Fingerprint, check
from subscriber.sinks.postgres.tables.relation_mapping import RelationMapping
from subscriber.transaction.model import Transaction

__all__ = ["GroupAttempt"]

_READ_AGAIN: Final = "a table of the target was read again"
_INVERTED: Final = bytes([1, 0]) + bytes(254)
_HOLDS_UP: Final = "it held up transactions before it"
_CONFLICT: Final = "a change did not find its row, or found one that another origin changed"


class GroupAttempt:
    """One group, in an open transaction of its own session. Its early part is applied at once, the rest right before the commit.

    Args:
        sessions: the pool that the session is returned to.
        session: of this group.
        applier: of the apply session.
        transactions: the group.
        gate: of the batch.
        mappings: the relations that it changes, by id. If one is read again meanwhile, the group is rolled back.
        late: the places of the changes that are made when everything before the group is committed, among all records of the group.

    Attributes:
        failure: why the group was rolled back; None: it was not.
        table: the table that the failure concerns, if it is known.
        committing: the commit has begun.
    """

    def __init__(
        self,
        sessions: ParallelSessions,
        session: ApplySession,
        applier: Applier,
        transactions: Sequence[Transaction],
        gate: RelationGate,
        *,
        mappings: Mapping[int, RelationMapping],
        late: Collection[int],
    ) -> None:
        self._sessions = sessions
        self._session = session
        self._applier = applier
        self._transactions = transactions
        self._gate = gate
        self._mappings = mappings
        self._late: bytearray | None = None
        self._early: bytearray | None = None
        if late:
            count = sum([len(transaction.records) for transaction in transactions])
            self._late = bytearray(count)
            for place in late:
                self._late[place] = 1
            self._early = self._late.translate(_INVERTED)
        self._counted = Counted()
        self._targets: set[Fingerprint] = set()
        self._wal: Lsn | None = None
        self._ending = asyncio.Lock()
        self._ended = False
        self.failure: SubscriberError | None = None
        self.table: TableName | None = None
        self.committing = False
        end = transactions[-1]
        self._task = asyncio.create_task(self._run(), name=f"parallel apply up to {end.end_lsn}")

    @property
    def pid(self) -> int:
        """PID of its session in the target."""
        return self._session.pid

    @property
    def is_alive(self) -> bool:
        """Whether it holds locks that others may wait for."""
        return not self._ended and not self.committing

    async def _run(self) -> None:
        try:
            async with self._session.pipeline(self._completed, stays_open=True) as pipeline:
                pipeline.send(BEGIN, None)
                await self._send(pipeline, late=False)
        except StatementFailed as failure:
            self._fail(self._applier.error(failure), failure.statement.table)
        except SubscriberError as error:
            self._fail(error)
        else:
            for conflict in self._counted.conflicts:
                self._fail(TargetError(_CONFLICT), conflict.table)
        if self.failure is not None:
            await self.roll_back()

    async def _send(self, pipeline: Pipeline, *, late: bool) -> None:
        self._require_mappings()
        sender = TransactionSender(
            self._applier.relations,
            pipeline,
            self._gate,
            self._applier.owner.origin,
            self._counted,
            without_sets=self._applier.without_sets,
            differs=self._applier.differs,
        )
        await sender.send(self._transactions, self._late if late else self._early)
        sender.finish()
        # the sender uses what was read again, but what is followed, and made early, was decided before
        self._require_mappings()
        self._targets |= sender.targets

    def _require_mappings(self) -> None:
        mapped = self._applier.relations.mapped
        if any(mapped(relation_id) is not mapping for relation_id, mapping in self._mappings.items()):
            raise TargetError(_READ_AGAIN)

    def _completed(self, statement: Statement, context: object, result: PGresult) -> None:
        if statement.message_type:
            self._counted.answer(statement, context, result)
        elif statement is WAL:
            self._wal = Lsn.parse((result.get_value(0, 0) or b"").decode())

    def _fail(self, error: SubscriberError, table: TableName | None = None) -> None:
        self.failure, self.table = error, table

    async def commit(self) -> bool:
        """Commit the group with its position. Everything before it must be committed. False: it was rolled back.

        Raises:
            TargetUnavailable: it is unknown whether the commit took effect.
        """
        await asyncio.wait({self._task})
        if self.failure is not None:
            return False
        self._task.result()
        self.committing = True
        end = self._transactions[-1]
        try:
            async with self._session.pipeline(self._completed) as pipeline:
                if self._late:
                    await self._send(pipeline, late=True)
                crash_points.reached("postgres.changes_sent")
                for target in self._targets:
                    pipeline.send(*check(target))
                pipeline.send(FENCED, None, self._sessions.fence)
                self._applier.send_commit(pipeline, end, self._session)
                committing()
                crash_points.reached("postgres.end_sent")
        except StatementFailed as failure:
            if failure.statement is WAL:
                # the statement after COMMIT
                raise self._applier.error(failure) from None
            self._fail(self._applier.error(failure), failure.statement.table)
            return False
        except TargetUnavailable:
            raise
        except SubscriberError as error:
            self._fail(error)
            return False
        finally:
            await self._end()
        crash_points.reached("postgres.committed")
        statistics = self._counted.statistics
        statistics.transactions = statistics.parallel_transactions = len(self._transactions)
        self._applier.adopt(end, self._counted, self._wal)
        return True

    async def roll_back(self) -> None:
        """Roll back and release all locks, unless the commit has begun. Idempotent. If it is cancelled, call it again."""
        if self.committing:
            return
        if self.failure is None:
            # first: commit() must not begin any more
            self._fail(TargetError(_HOLDS_UP))
        if self._task is not asyncio.current_task():
            self._task.cancel()
            await asyncio.wait({self._task})
            if not self._task.cancelled():
                self._task.exception()  # retrieved, so that asyncio does not log it
        await self._end()

    async def _end(self) -> None:
        async with self._ending:
            if not self._ended:
                await self._sessions.give_back(self._session)
                # after the await: if that is cancelled, the next call must repeat it
                self._ended = True
