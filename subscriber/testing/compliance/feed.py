"""An open sink on a target, and the publisher's side: LSNs, and transactions made of messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Final

from subscriber.config import Settings
from subscriber.interfaces import (
    Batch,
    DescribedSink,
    OpenedSink,
    ParallelSink,
    Position,
    SubscriptionState,
    TableEntry,
    TableName,
    TableSink,
    TableState,
    TwoPhaseSink,
)
from subscriber.protocol.encoder import encode
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import CommitPrepared, Message, Relation, RollbackPrepared
from subscriber.testing.compliance.assertions import equal
from subscriber.testing.compliance.sample_messages import Table
from subscriber.testing.compliance.target import ComplianceTarget, Row, SettableTarget, WorkersTarget
from subscriber.transaction.model import PreparedTransaction, Transaction
from subscriber.types.builtin import SQL_NAMES
from subscriber.verification.values import normalizer

__all__ = ["FIRST_SUBXID", "NAME", "START", "Feed", "Spooled"]

NAME: Final = "compliance"
START: Final = Lsn(0x1000)
FIRST_SUBXID: Final = 90_000
"""The xid of the first two records of a streamed transaction; the next two have the next one."""
SLOT: Final = "compliance_slot"
SYSTEM: Final = "7000000000000000001"


class Spooled:
    """The spooled records of a transaction."""

    def __init__(self, chunks: Iterable[Sequence[bytes]]) -> None:
        self._chunks = list(chunks)
        self.discarded = 0

    async def chunks(self, start: int = 0) -> AsyncIterator[Sequence[bytes]]:
        """All records from number ``start``."""
        for chunk in self._chunks:
            if start < len(chunk):
                yield chunk[start:]
            start = max(start - len(chunk), 0)

    async def discard(self) -> None:
        """Count the call."""
        self.discarded += 1


class Feed:
    """Drives a sink as the apply worker does.

    Attributes:
        target: accessed without the sink.
        sink: the sink.
        closed: tables for which the gate is closed. Use :meth:`shut`, which also changes the catalog.
        durable: end LSNs that the sink reported.
        given: end LSN of the last transaction given to it.
    """

    def __init__(self, target: ComplianceTarget, name: str = NAME) -> None:
        self.target = target
        self.name = name
        self.sink = target.new_sink()
        self._opened: OpenedSink | None = None
        self.closed: set[TableName] = set()
        self.durable: list[Lsn] = []
        self.given = START
        self._lsn = int(START)
        self._xid = 700
        self._described: dict[TableName, Table] = {}

    @property
    def opened(self) -> OpenedSink:
        """The opened sink."""
        assert self._opened is not None
        return self._opened

    @property
    def state(self) -> SubscriptionState:
        """The state that the sink had when it was opened."""
        return self.opened.state

    async def open(self, *, begin: bool = True) -> None:
        """Open the sink. If it is new, set its position, unless ``begin`` is False."""
        self._opened = await self.sink.open(self.name, self.durable.append)
        if self.state.position is None and begin:
            await self.opened.set_position(Position(SLOT, SYSTEM, 1, START))
        if self._described:
            await self.describe()

    async def close(self) -> None:
        """Close the sink, which makes everything durable."""
        if self._opened is not None:
            await self._opened.close()

    async def reopen(self) -> None:
        """Open another sink, which reads the stored state like a new process."""
        await self.close()
        self.sink = self.target.new_sink()
        await self.open()

    async def reopen_with(self, settings: Settings) -> None:
        assert isinstance(self.target, SettableTarget), "the target of such a sink must have new_sink_with()"
        await self.close()
        self.sink = self.target.new_sink_with(settings)
        await self.open()

    async def reopen_with_workers(self, workers: int) -> None:
        assert isinstance(self.target, WorkersTarget), "the target of such a sink must have new_sink_with_workers()"
        await self.close()
        self.sink = self.target.new_sink_with_workers(workers)
        await self.open()

    async def position(self) -> Lsn:
        """The stored position, as a new process reads it."""
        await self.reopen()
        assert self.state.position is not None
        return self.state.position.lsn

    def assert_acknowledgements(self) -> None:
        """Check, after the sink was closed, that the positions reported as durable never went back, and reached the last one given."""
        equal(self.durable, sorted(self.durable), "LSNs reported as durable go back")
        if self.durable:
            equal(self.durable[-1], self.given, "the last LSN reported as durable")
        else:
            equal(self.given, START, "nothing was reported as durable")

    @property
    def two_phase(self) -> TwoPhaseSink:
        """The sink, in a scenario that needs ``two_phase``."""
        assert isinstance(self.opened, TwoPhaseSink)
        return self.opened

    @property
    def parallel(self) -> ParallelSink:
        """The sink, in a scenario that needs ``parallel_apply``."""
        assert isinstance(self.opened, ParallelSink)
        return self.opened

    # --- tables

    async def create(self, *tables: Table) -> None:
        """Create tables in the target, ready for changes."""
        await self.begin(TableState.READY, *tables)

    async def begin(self, state: TableState, *tables: Table) -> None:
        """Create tables in the target, and add them to the subscription in this state."""
        for table in tables:
            await self.target.create_table(table)
        await self.describe(*tables)
        equal(await self.opened.add_tables([table.name for table in tables], TableEntry(state)), {}, "the tables that were not added")

    async def describe(self, *tables: Table) -> None:
        """Pass the publisher's descriptions of the tables, if the sink needs them."""
        self._described.update({table.name: table for table in tables})
        if isinstance(self.opened, DescribedSink):
            await self.opened.describe_tables([table.published for table in self._described.values()])

    async def expect(self, table: Table, *rows: Sequence[object]) -> None:
        """Check that the table holds exactly these rows. Values are texts, or converted by ``str``, in the order of all columns."""
        expected = [tuple(None if value is None else str(value) for value in row) for row in rows]
        found = await self.target.rows(table)
        equal(_comparable(table, found), _comparable(table, expected), f"rows of table {table.name}")

    async def shut(self, *tables: Table) -> None:
        """Close the gate for these tables, and set their state as if they were still being synchronized."""
        for table in tables:
            self.closed.add(table.name)
            await self.opened.remove_table(table.name)
            await self.opened.add_tables([table.name], TableEntry(TableState.INIT))

    async def take_over(self, *tables: Table) -> None:
        """Undo :meth:`shut`."""
        for table in tables:
            self.closed.discard(table.name)
            await self.opened.remove_table(table.name)
            await self.opened.add_tables([table.name], TableEntry(TableState.READY))

    async def hand_over(self, sink: TableSink, lsn: Lsn) -> None:
        """Let the apply worker take over a copied table at ``lsn``, if its rows are not visible before."""
        if not self.target.traits.copies_visible:
            await sink.finish_sync(lsn)
            await self.opened.advance(lsn)
            self.given = max(self.given, lsn)

    # --- transactions

    def gate(self, relation: Relation, _final_lsn: Lsn) -> bool:
        """Open for all tables except those in :attr:`closed`."""
        return TableName(relation.namespace, relation.name) not in self.closed

    def next_lsn(self) -> Lsn:
        """Return the LSN of a new commit record. Its end is 0x30 further."""
        self._lsn += 0x100
        return Lsn(self._lsn)

    def transaction(self, *messages: Message, streamed: bool = False, spilled: int = 0) -> Transaction:
        """Make a transaction that was committed after all others.

        Args:
            messages: its content.
            streamed: whether its records carry an xid, from :data:`FIRST_SUBXID` on.
            spilled: how many of the first records are in a spool, in chunks of three.
        """
        final_lsn = self.next_lsn()
        self._xid += 1
        records = [encode(message) for message in messages]
        if streamed:
            records = [record[:1] + (FIRST_SUBXID + number // 2).to_bytes(4, "big") + record[1:] for number, record in enumerate(records)]
        made = Transaction(
            xid=self._xid,
            final_lsn=final_lsn,
            end_lsn=Lsn(final_lsn + 0x30),
            commit_time=0,
            prefixed=streamed,
            records=records[spilled:],
            spilled=spilled,
            size=sum(map(len, records)),
        )
        if spilled:
            made.spool = Spooled(records[start : min(start + 3, spilled)] for start in range(0, spilled, 3))
        return made

    def batch(self, *transactions: Transaction) -> Batch:
        """Combine transactions to a batch. Those that were given before come again, as after a crash: their records are still there."""
        for transaction in transactions:
            transaction.discarded = False
        return Batch(transactions, self.gate)

    async def give(self, *transactions: Transaction) -> None:
        """Apply them as one batch."""
        await self.opened.apply(self.batch(*transactions))
        self.given = max(self.given, transactions[-1].end_lsn)

    async def apply(self, *messages: Message) -> Transaction:
        made = self.transaction(*messages)
        await self.give(made)
        return made

    # --- two-phase

    async def prepare(self, *messages: Message) -> Transaction:
        made = self.transaction(*messages)
        await self.give_prepared(made)
        return made

    async def give_prepared(self, transaction: Transaction) -> None:
        await self.two_phase.prepare(PreparedTransaction(transaction, _gid(transaction)), self.gate)
        self.given = max(self.given, transaction.end_lsn)

    async def commit_prepared(self, transaction: Transaction) -> CommitPrepared:
        lsn = self.next_lsn()
        message = CommitPrepared(0, lsn, Lsn(lsn + 0x30), 0, transaction.xid, _gid(transaction))
        await self.two_phase.commit_prepared(message)
        self.given = message.end_lsn
        return message

    async def rollback_prepared(self, transaction: Transaction) -> RollbackPrepared:
        lsn = self.next_lsn()
        message = RollbackPrepared(0, transaction.end_lsn, Lsn(lsn + 0x30), 0, 0, transaction.xid, _gid(transaction))
        await self.two_phase.rollback_prepared(message)
        self.given = message.rollback_end_lsn
        return message


def _gid(transaction: Transaction) -> str:
    return f"gid of {transaction.xid}"


def _comparable(table: Table, rows: Iterable[Row]) -> list[tuple[str | None, ...]]:
    normalizers = [normalizer(SQL_NAMES.get(column.type, column.type)) for column in table.columns]
    normalized = [tuple(normalize(value) for normalize, value in zip(normalizers, row, strict=True)) for row in rows]
    return sorted(normalized, key=lambda row: [(value is None, value or "") for value in row])
