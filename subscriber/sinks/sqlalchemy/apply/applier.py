"""Applies transactions to the target, exactly once.

*Exactly once.* A batch is one transaction of the target: the fence, all changes of its transactions, the position, COMMIT. So the target
always has all changes of the transactions up to its position, and no later change. After a crash of this process, of the connection or of
the target:

===============================  ==========================  =====================================================================
 crash                            state of the target         recovery
===============================  ==========================  =====================================================================
 before COMMIT arrived            before the batch            the position is unchanged: the publisher sends the batch again
 during COMMIT                    before or after the batch   raising the fence waits until that transaction has ended (a crashed
                                                              target has recovered by then); the position then shows which
 after COMMIT, before its answer  after the batch             the position has moved: transactions up to it are skipped
===============================  ==========================  =====================================================================

An LSN that was acknowledged to the publisher is never past the stored position: ``committed`` is called after COMMIT returned, and the
database then has the transaction on disk.

*The position is updated only from its known value* (``WHERE remote_lsn = …``). This is a second safeguard: if a batch came a second time
all the same, the UPDATE would find no row, and the batch would be rolled back.

*Two paths.* The fast path makes changes in runs (:mod:`subscriber.sinks.runs`). If the target rejects anything, the batch is rolled back.
Then the target's tables are read again, and the transactions are applied one by one, change by change. The transactions before the bad one
become durable, and the error names the right change.

*DDL before data.* If a table lacks columns that are to be added, the batch is rolled back. The columns are added in a separate transaction
(some databases commit DDL implicitly), and the batch is retried. After a crash in between, the next attempt finds the columns in place.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from sqlalchemy.ext.asyncio import AsyncConnection

from subscriber import crash_points
from subscriber.errors import RelationError, TargetError, TargetUnavailable
from subscriber.interfaces import Batch, NewColumnValues, RelationGate
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.apply_counters import Counted, Tally, count
from subscriber.sinks.catalog_sink import Owner
from subscriber.sinks.sqlalchemy.apply.bulk import BulkTables
from subscriber.sinks.sqlalchemy.apply.relation_map import RelationMap, SchemaBehind
from subscriber.sinks.sqlalchemy.apply.transaction_runner import TransactionRunner
from subscriber.sinks.sqlalchemy.catalog.rows import move_position
from subscriber.sinks.sqlalchemy.catalog_tables import CatalogTables
from subscriber.sinks.sqlalchemy.schema.table_creation import add_columns
from subscriber.sinks.sqlalchemy.session.fence import Fence
from subscriber.sinks.sqlalchemy.session.session import Session
from subscriber.transaction.model import Transaction

__all__ = ["Applier", "Finish", "Owner"]

Finish = Callable[[AsyncConnection], Awaitable[None]]
"""Executes further statements in the transaction, after the changes."""


class Applier:
    """Applies transactions through one session.

    Attributes:
        relations: the publisher's relations and their tables in the target.
        position: the LSN of the position that the target has.
        new_values: what existing rows have in columns that are added; None: NULL.

    Args:
        owner: the owner of the position that is moved.
        tally: receives the counts of a transaction after its commit.
        committed: called with the LSN of each position when it is durable.
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
        self.new_values: NewColumnValues | None = None
        self._bulk_tables = BulkTables()
        self._tally = tally
        self._committed = committed

    async def apply(self, batch: Batch) -> None:
        """Apply the transactions of a batch that are past the position. Skip the others.

        Raises:
            ApplyError, RelationError, TargetError: the transaction that the error names is rolled back, those before it are durable.
            TargetUnavailable: read the position to learn which transactions are durable.
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
        """Skip a transaction, for example one that the target already has. Its Relation messages still apply.

        Raises:
            ProtocolError, SpoolError
        """
        await self.relations.learn(transaction)
        await transaction.discard()

    async def apply_all(
        self, transactions: Sequence[Transaction], gate: RelationGate, relations: RelationMap, finish: Finish | None = None
    ) -> None:
        """Apply transactions that are past the position: all together, or one by one if the target rejects that.

        Args:
            transactions: in order.
            gate: tells which relations' changes to apply.
            relations: stores the Relation messages of the transactions.
            finish: executed in the target transaction of the last one.

        Raises:
            ApplyError, RelationError, TargetError, TargetUnavailable: as in :meth:`apply`.
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
                relation = behind.relation
                try:
                    if relation.relation_id in added:
                        raise RelationError(str(behind), hint="add them to the target's table") from None
                    added.add(relation.relation_id)
                    await self._add_columns(behind)
                except TargetError as error:
                    error.of_table, error.finish_lsn = (relation.namespace, relation.name), transactions[0].final_lsn
                    raise
            else:
                return

    async def _add_columns(self, behind: SchemaBehind) -> None:
        values = await self.new_values(behind.relation, behind.missing) if self.new_values is not None else {}
        async with self._session.transaction() as connection:
            await self._fence.hold(connection)
            await add_columns(connection, behind.relation, behind.published, values)

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
                if relations.log is not None and counted.resolved:
                    await relations.log.write(connection, counted.resolved)
                crash_points.reached("sqlalchemy.changes_made")
                if finish is not None:
                    await finish(connection)
                await self._move_position(connection, end_lsn)
                crash_points.reached("sqlalchemy.position_moved")
            done = True
        finally:
            if not done:
                relations.restore(remembered)
                if counted.failed is not None:
                    count(self._tally.statistics, counted.failed)
        crash_points.reached("sqlalchemy.committed")
        self.position = end_lsn
        self._tally.add(counted)
        self._committed(end_lsn)
        for transaction in transactions:
            await transaction.discard()

    def settled(self) -> None:
        """Report the position again: transactions that came again are already durable."""
        self._committed(self.position)

    async def move(self, lsn: Lsn, finish: Finish | None = None) -> None:
        """Move the position without changes. It never moves back.

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
