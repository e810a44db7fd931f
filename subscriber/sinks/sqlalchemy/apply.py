"""Applies transactions to the target, exactly once.

*Exactly once.* A batch is one transaction of the target: the fence first, then all changes of its transactions, the position, COMMIT. So
at every instant the target holds the changes of the transactions up to its position, whole, and none behind it. Wherever we, the
connection or the target is killed:

===============================  ==========================  =====================================================================
 killed                           the target keeps            what comes after
===============================  ==========================  =====================================================================
 before COMMIT reached it         the state before            position as before: the publisher sends the batch again
 while it commits                 either                      raising the fence waits for the end of that transaction (or its server
                                                              is gone, and recovers it to either); the position read then tells
 after it, before we learn it     the state behind            position moved: transactions up to it are passed over
===============================  ==========================  =====================================================================

What was acknowledged to the publisher is never behind the position: ``committed`` is called after COMMIT returned, which is when the
database has it on disk.

*The position is moved from where it is known to be* (``WHERE remote_lsn = …``). Whatever had gone wrong about the above, a batch that is
there already could not come a second time: the UPDATE would find no row, and the batch be rolled back.

*Two paths.* First the changes are gathered (:mod:`subscriber.sinks.sqlalchemy.batching`). If anything is refused, the batch is rolled back
and its transactions are applied one by one and change by change, with the target's tables read afresh: those before the bad one become
durable, and the error names the right one.

*DDL before data.* If a table lacks columns that are to be added, the batch is rolled back, the columns are added, in a transaction apart
where the database has that, and the batch begins anew. A crash in between leaves columns that the next attempt finds there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncConnection

from subscriber.abc import Batch, RelationGate
from subscriber.errors import RelationError, TargetError, TargetUnavailable
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.sqlalchemy.bulk import BulkTables
from subscriber.sinks.sqlalchemy.changes import TransactionRunner
from subscriber.sinks.sqlalchemy.engine import Session
from subscriber.sinks.sqlalchemy.fencing import Fence
from subscriber.sinks.sqlalchemy.relation_map import RelationMap, SchemaBehind
from subscriber.sinks.sqlalchemy.rows import move_position
from subscriber.sinks.sqlalchemy.schema import add_columns
from subscriber.sinks.sqlalchemy.tables import CatalogTables
from subscriber.sinks.tally import Counted, Tally, count
from subscriber.transaction.model import Transaction

__all__ = ["Applier", "Finish", "Owner"]

Finish = Callable[[AsyncConnection], Awaitable[None]]
"""What else belongs into the transaction, behind the changes."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose position is moved: the subscription's (``relid`` 0) or a table's while it is synchronized."""

    oid: int
    relid: int = 0

    @property
    def origin(self) -> str:
        """The name of native's replication origin for it."""
        return f"pg_{self.oid}_{self.relid}" if self.relid else f"pg_{self.oid}"


class Applier:
    """Applies transactions through one session.

    Attributes:
        relations: which remote relation is what.
        position: what the target's is.

    Args:
        owner: whose position is moved.
        tally: counted into, once a transaction is committed.
        committed: told of each position, once it is durable.
    """

    def __init__(
        self,
        session: Session,
        tables: CatalogTables,
        fence: Fence,
        relations: RelationMap,
        owner: Owner,
        *,
        position: Lsn,
        tally: Tally,
        committed: Callable[[Lsn], None],
    ) -> None:
        self._session = session
        self._tables = tables
        self._fence = fence
        self.relations = relations
        self.owner = owner
        self.position = position
        self._bulk_tables = BulkTables()
        self._tally = tally
        self._committed = committed

    async def apply(self, batch: Batch) -> None:
        """Apply those transactions of a batch that are past the position.

        Raises:
            ApplyError, RelationError, TargetError: nothing of the transaction named stays, those before it do.
            TargetUnavailable: the position tells what stayed.
        """
        pending = []
        for transaction in batch.transactions:
            if transaction.end_lsn > self.position:
                pending.append(transaction)
            else:
                await self.skip(transaction)
        if not pending:
            self.settled()
            return
        await self.apply_all(pending, batch.gate, self.relations)

    async def skip(self, transaction: Transaction) -> None:
        """Pass over a transaction that the target has already; what it describes counts nevertheless.

        Raises:
            ProtocolError, SpoolError
        """
        await self.relations.learn(transaction)
        await transaction.discard()

    async def apply_all(
        self, transactions: Sequence[Transaction], gate: RelationGate, relations: RelationMap, finish: Finish | None = None
    ) -> None:
        """Apply transactions that are past the position, together or, if that is refused, one by one.

        Args:
            transactions: in order.
            gate: which relations' changes are for us.
            relations: what they describe is noted there.
            finish: goes into the transaction of the last one.

        Raises:
            ApplyError, RelationError, TargetError, TargetUnavailable: as :meth:`apply`.
        """
        try:
            await self._attempt(transactions, gate, relations, finish, exact=False)
        except TargetUnavailable:
            raise
        except TargetError:
            if not self._session.usable:
                raise
        else:
            return
        relations.forget_targets()
        for transaction in transactions:
            await self._attempt([transaction], gate, relations, finish if transaction is transactions[-1] else None, exact=True)

    async def _attempt(
        self, transactions: Sequence[Transaction], gate: RelationGate, relations: RelationMap, finish: Finish | None, *, exact: bool
    ) -> None:
        added: set[int] = set()
        while True:
            try:
                await self._once(transactions, gate, relations, finish, exact=exact)
            except SchemaBehind as behind:
                relation_id = behind.relation.relation_id
                if relation_id in added:
                    raise RelationError(str(behind), hint="add them to the target's table") from None
                added.add(relation_id)
                await self._add_columns(behind)
            else:
                return

    async def _add_columns(self, behind: SchemaBehind) -> None:
        async with self._session.transaction() as connection:
            await self._fence.hold(connection)
            await add_columns(connection, behind.relation, behind.published)

    async def _once(
        self, transactions: Sequence[Transaction], gate: RelationGate, relations: RelationMap, finish: Finish | None, *, exact: bool
    ) -> None:
        remembered = relations.remembered()
        counted = Counted()
        end_lsn = transactions[-1].end_lsn
        done = False
        try:
            async with self._session.transaction() as connection:
                await self._fence.hold(connection)
                runner = TransactionRunner(
                    connection, relations, gate, self.owner.origin, counted, bulk_tables=None if exact else self._bulk_tables
                )
                for transaction in transactions:
                    await runner.run(transaction)
                await runner.flush()
                if finish is not None:
                    await finish(connection)
                await self._move_position(connection, end_lsn)
            done = True
        finally:
            if not done:
                relations.restore(remembered)
                if counted.failed is not None:
                    count(self._tally.statistics, counted.failed)
        self.position = end_lsn
        self._tally.add(counted)
        self._committed(end_lsn)
        for transaction in transactions:
            await transaction.discard()

    def settled(self) -> None:
        """Tell once more of the position: what came again is durable already."""
        self._committed(self.position)

    async def move(self, lsn: Lsn, finish: Finish | None = None) -> None:
        """Move the position without changes; never back.

        Raises:
            TargetError, TargetUnavailable
        """
        lsn = max(lsn, self.position)
        async with self._session.transaction() as connection:
            await self._fence.hold(connection)
            if finish is not None:
                await finish(connection)
            await self._move_position(connection, lsn)
        self.position = lsn
        self._committed(lsn)

    async def _move_position(self, connection: AsyncConnection, lsn: Lsn) -> None:
        await move_position(connection, self._tables, self.owner.oid, self.owner.relid, before=self.position, lsn=lsn)
