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

*Changed columns.* SQLite changes them in the transaction of the row that needs it. Other databases commit before DDL. There the batch is
rolled back, the transactions before the one that needs other columns are applied, the columns are changed in transactions of their own, and
the rest of the batch is applied. After a crash in between, the next attempt finds what was done
(:mod:`subscriber.sinks.sqlalchemy.schema.column_steps`). If a transaction has rows of the table that were written before its columns were
renamed, dropped or got values, that is an error.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from sqlalchemy.ext.asyncio import AsyncConnection

from subscriber import crash_points
from subscriber.errors import RelationError, TargetError, TargetUnavailable
from subscriber.interfaces import Batch, RelationGate, TableName
from subscriber.protocol.decoder import decode
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Relation, Tag
from subscriber.sinks.apply_counters import Counted, Tally, count
from subscriber.sinks.catalog_sink import Owner
from subscriber.sinks.runs import CHANGES
from subscriber.sinks.sqlalchemy.apply.bulk import BulkTables
from subscriber.sinks.sqlalchemy.apply.relation_map import RelationMap, SchemaBehind
from subscriber.sinks.sqlalchemy.apply.transaction_runner import TransactionRunner
from subscriber.sinks.sqlalchemy.catalog.rows import move_position, subscription_rows
from subscriber.sinks.sqlalchemy.schema.altered_columns import make_step
from subscriber.sinks.sqlalchemy.schema.column_steps import Drop, Found, Rename
from subscriber.sinks.sqlalchemy.session.fence import Fence
from subscriber.sinks.sqlalchemy.session.session import Session
from subscriber.transaction.column_history import KnownColumns
from subscriber.transaction.model import Transaction

__all__ = ["Applier", "Finish", "Owner"]

Finish = Callable[[AsyncConnection], Awaitable[None]]
"""Executes further statements in the transaction, after the changes."""


class Applier:
    """Applies transactions through one session.

    Attributes:
        relations: the publisher's relations and their tables in the target.
        position: the LSN of the position that the target has.

    Args:
        owner: the owner of the position that is moved.
        tally: receives the counts of a transaction after its commit.
        committed: called with the LSN of each position when it is durable.
    """

    def __init__(
        self,
        session: Session,
        fence: Fence,
        relations: RelationMap,
        owner: Owner,
        *,
        position: Lsn,
        tally: Tally,
        committed: Callable[[Lsn], None],
    ) -> None:
        self._session = session
        self._fence = fence
        self.relations = relations
        self.owner = owner
        self.position = position
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
            if transaction.end_lsn > self.position:
                await self._attempt([transaction], gate, relations, finish if transaction is transactions[-1] else None, exact=True)

    async def _attempt(
        self, transactions: Sequence[Transaction], gate: RelationGate, relations: RelationMap, finish: Finish | None, *, exact: bool
    ) -> None:
        made: set[str] = set()
        left = list(transactions)
        while left:
            try:
                await self._once(left, gate, relations, finish, exact=exact)
            except SchemaBehind as behind:
                before = [each for each in left if each.final_lsn < behind.final_lsn]
                if before:
                    # their rows belong to the earlier columns
                    await self._attempt(before, gate, relations, None, exact=exact)
                    del left[: len(before)]
                    made.clear()
                    continue
                try:
                    if str(behind) in made or self._alters_inside:
                        raise RelationError(str(behind), hint="alter the target's table") from None
                    made.add(str(behind))
                    await self._change_columns(behind, left[0])
                except TargetError as error:
                    error.of_table, error.finish_lsn = (behind.relation.namespace, behind.relation.name), behind.final_lsn
                    raise
            else:
                return

    @property
    def _alters_inside(self) -> bool:
        """Whether ALTER TABLE can be a part of a transaction."""
        return self._session.connection.dialect.name == "sqlite"

    async def _change_columns(self, behind: SchemaBehind, transaction: Transaction) -> None:
        """Change columns of a table, before the transaction that needs it is applied. Each step is committed."""
        if not all(step.fits_earlier for step in behind.steps) and await _is_earlier(transaction, behind.relation):
            raise RelationError(
                f"{behind}, and a transaction has rows from before and after this change, which this kind of database cannot make inside a"
                " transaction",
                hint=f"`subscriber alter NAME --resync {behind.relation.namespace}.{behind.relation.name}` adds what is missing and"
                " compares all rows; commit DDL by itself",
                sqlstate="55000",
            )
        for step in behind.steps:
            async with self._session.transaction() as connection:
                await self._fence.hold(connection)
                await make_step(connection, behind.relation, behind.published, step)
            crash_points.reached("columns.changed")
            if isinstance(step, Rename | Drop | Found):
                async with self._session.transaction() as connection:
                    await self._fence.hold(connection)
                    await self._store_columns(connection, behind.relation, step.known)

    async def _change_columns_inside(self, connection: AsyncConnection, behind: SchemaBehind) -> None:
        """Change columns of a table in the open transaction."""
        for step in behind.steps:
            await make_step(connection, behind.relation, behind.published, step)
            crash_points.reached("columns.changed")
            if isinstance(step, Rename | Drop | Found):
                await self._store_columns(connection, behind.relation, step.known)

    async def _store_columns(self, connection: AsyncConnection, relation: Relation, known: KnownColumns) -> None:
        rows = subscription_rows(connection, self.owner.oid)
        await rows.store_columns(TableName(relation.namespace, relation.name), known)

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
                    connection,
                    relations,
                    gate,
                    self.owner.origin,
                    counted,
                    alter=self._change_columns_inside if self._alters_inside else None,
                    bulk_tables=None if exact else self._bulk_tables,
                )
                for transaction in transactions:
                    await runner.run(transaction)
                await runner.flush()
                await runner.write_log()
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
        await move_position(connection, self.owner.oid, self.owner.relid, before=self.position, lsn=lsn)


async def _is_earlier(transaction: Transaction, relation: Relation) -> bool:
    """Whether a transaction changes rows of a relation before it describes it so."""
    changed, start = False, 5 if transaction.prefixed else 1
    async for chunk in transaction.chunks():
        for record in chunk:
            if record[0] == Tag.RELATION and decode(record, in_stream=transaction.prefixed) == relation:
                return changed
            if record[0] in CHANGES and int.from_bytes(record[start : start + 4]) == relation.relation_id:
                changed = True
    return False
