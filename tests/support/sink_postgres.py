"""Feeds the PostgreSQL sink: transactions made of pgoutput messages, as reassembly gives them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import psycopg

from subscriber.config import Settings, SubscriptionOptions
from subscriber.interfaces import Batch, Position, RelationGate
from subscriber.protocol.encoder import encode
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import (
    Column,
    CommitPrepared,
    Delete,
    Insert,
    Message,
    Relation,
    ReplicaIdentity,
    RollbackPrepared,
    Truncate,
    TruncateOption,
    TupleData,
    Update,
)
from subscriber.sinks.postgres.opened_postgres_sink import OpenedPostgresSink
from subscriber.sinks.postgres.sink import PostgresSink
from subscriber.transaction.model import PreparedTransaction, Transaction
from tests.support.database import Database

NAME = "sub"
START = Lsn(0x1000)
UNCHANGED = object()
"""A value that was not sent: unchanged TOAST."""


class Binary(bytes):
    """A value in binary format."""


def row(*values: object) -> TupleData:
    """A tuple: None is NULL, :data:`UNCHANGED` unsent, :class:`Binary` binary, anything else text."""
    kinds, raw = bytearray(), list[bytes | None]()
    for value in values:
        if value is None or value is UNCHANGED:
            kinds += b"n" if value is None else b"u"
            raw.append(None)
        elif isinstance(value, Binary):
            kinds += b"b"
            raw.append(bytes(value))
        else:
            kinds += b"t"
            raw.append(value if isinstance(value, bytes) else str(value).encode())
    return TupleData(bytes(kinds), raw)


class Remote:
    """A relation of the publisher. ``*`` before a column's name puts it into the replica identity. ``types``: oid, or (oid, modifier)."""

    def __init__(
        self,
        name: str,
        *columns: str,
        identity: str = "d",
        relation_id: int = 4711,
        namespace: str = "public",
        types: Mapping[str, int | tuple[int, int]] = MappingProxyType({}),
    ) -> None:
        self.relation_id = relation_id
        self.width = len(columns)
        full = identity == "f"
        described = tuple(
            Column(name, *(given if isinstance(given, tuple) else (given, -1)), key=full or column.startswith("*"))
            for column in columns
            for name in [column.lstrip("*")]
            for given in [types.get(name, 25)]
        )
        self.relation = Relation(relation_id, namespace, name, cast("ReplicaIdentity", identity), described)
        self.full = full

    def insert(self, *values: object) -> Insert:
        return Insert(self.relation_id, row(*values))

    def update(self, *values: object, old: Sequence[object] | None = None) -> Update:
        """``old``: the whole old row (full) or the old key with None elsewhere."""
        before = None if old is None else row(*old)
        return Update(self.relation_id, None if self.full else before, before if self.full else None, row(*values))

    def delete(self, *old: object) -> Delete:
        before = row(*old)
        return Delete(self.relation_id, None if self.full else before, before if self.full else None)


def truncate(*remotes: Remote, restart: bool = False) -> Truncate:
    options = TruncateOption.RESTART_IDENTITY if restart else TruncateOption(0)
    return Truncate(options, tuple(remote.relation_id for remote in remotes))


class SpooledOnce:
    """A spooled part whose records are made when they are read."""

    def __init__(self, chunks: Iterable[Sequence[bytes]]) -> None:
        self._chunks = chunks
        self.discarded = 0

    async def chunks(self, start: int = 0) -> AsyncIterator[Sequence[bytes]]:
        for chunk in self._chunks:
            yield chunk[start:]
            start = max(start - len(chunk), 0)

    async def discard(self) -> None:
        self.discarded += 1


class Feed:
    """A sink opened on a database, and a publisher's clock of LSNs."""

    def __init__(self, database: Database, *, workers: int = 1, **options: Any) -> None:
        self.database = database
        self.settings = Settings(apply_workers=workers)
        self.target = database.dsn
        self.options = SubscriptionOptions(**{"synchronous_commit": "local", **options})
        self.durable: list[Lsn] = []
        self.closed: set[str] = set()
        self.subscribed: set[str] = set()
        self.lsn = int(START)
        self.xid = 700
        self.sink = self.new_sink()
        self.opened: OpenedPostgresSink

    def new_sink(self, target: str | None = None) -> PostgresSink:
        return PostgresSink(target or self.target, options=self.options, settings=self.settings)

    async def open(self) -> None:
        self.opened = await self.sink.open(NAME, self.durable.append)
        self.oid = self.opened.state.oid
        if self.opened.state.position is None:
            await self.opened.set_position(Position("slot", "7000000000000000001", 1, START))

    async def reopen(self) -> None:
        """As after a crash of ours: a new sink reads what is stored."""
        await self.opened.close()
        self.sink = self.new_sink()
        await self.open()

    def transaction(self, *messages: Message) -> Transaction:
        self.lsn += 0x100
        self.xid += 1
        records = [encode(message) for message in messages]
        return Transaction(
            xid=self.xid,
            final_lsn=Lsn(self.lsn),
            end_lsn=Lsn(self.lsn + 0x30),
            commit_time=0,
            prefixed=False,
            records=records,
            size=sum(map(len, records)),
        )

    @property
    def gate(self) -> RelationGate:
        return self._is_open

    def _is_open(self, relation: Relation, _final_lsn: Lsn) -> bool:
        name = f"{relation.namespace}.{relation.name}"
        if name not in self.closed and name not in self.subscribed:
            self.subscribed.add(name)
            self.subscribe(relation.namespace, relation.name)
        return name not in self.closed

    def subscribe(self, namespace: str, name: str) -> None:
        """Make what bears this name in the target now a table of the subscription."""
        with psycopg.connect(self.database.dsn, autocommit=True) as connection:
            connection.execute(
                "INSERT INTO subscriber.pg_subscription_rel (srsubid, srrelid, srnspname, srrelname, srsubstate) "
                "SELECT %s, c.oid, n.nspname, c.relname, 'r' FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
                "WHERE n.nspname = %s AND c.relname = %s ON CONFLICT DO NOTHING",
                (self.oid, namespace, name),
            )

    def batch(self, *transactions: Transaction) -> Batch:
        return Batch(transactions, self.gate)

    async def apply(self, *messages: Message) -> Transaction:
        """One transaction as a batch of its own."""
        transaction = self.transaction(*messages)
        await self.opened.apply(self.batch(transaction))
        return transaction

    async def prepare(self, *messages: Message) -> Transaction:
        transaction = self.transaction(*messages)
        await self.opened.prepare(PreparedTransaction(transaction, f"gid{transaction.xid}"), self.gate)
        return transaction

    def commit_prepared(self, transaction: Transaction) -> CommitPrepared:
        self.lsn += 0x100
        return CommitPrepared(0, Lsn(self.lsn), Lsn(self.lsn + 0x30), 0, transaction.xid, f"gid{transaction.xid}")

    def rollback_prepared(self, transaction: Transaction) -> RollbackPrepared:
        self.lsn += 0x100
        return RollbackPrepared(0, transaction.end_lsn, Lsn(self.lsn + 0x30), 0, 0, transaction.xid, f"gid{transaction.xid}")

    def position(self) -> Lsn:
        """As the target has it."""
        return Lsn.parse(self.database.value('SELECT remote_lsn::text FROM subscriber."position" WHERE srrelid = 0'))


@contextlib.asynccontextmanager
async def opened(database: Database, **options: Any) -> AsyncIterator[Feed]:
    feed = Feed(database, **options)
    await feed.open()
    try:
        yield feed
    finally:
        await feed.opened.close()
