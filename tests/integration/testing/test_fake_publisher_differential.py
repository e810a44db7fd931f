"""Random transactions on a real server and on the fake publisher: both send the same messages.

LSNs and times are left out, and transactions are numbered in the order of their ends. Streamed transactions are put together, because the
two do not count the same bytes of memory for a change.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from itertools import zip_longest
from typing import Any

import psycopg
import pytest

from subscriber.protocol.capabilities import StreamOptions, capabilities
from subscriber.protocol.decoder import decode
from subscriber.protocol.frames import PrimaryKeepalive, StandbyStatusUpdate, decode_frame, encode_frame
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import (
    Begin,
    BeginPrepare,
    Commit,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    Prepare,
    Relation,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    Type,
    Update,
)
from subscriber.testing.fake_publisher import FakePublisher, FakeTransaction
from subscriber.walreceiver.connection import WalReceiverConnection
from subscriber.walreceiver.stream import WalSenderStream
from tests.support.database import WAIT_SECONDS, Database
from tests.support.examples import seeds

TABLES = """
CREATE TABLE keyed (id int PRIMARY KEY, a text, big text);
CREATE TABLE whole (id int, a text, big text); ALTER TABLE whole REPLICA IDENTITY FULL;
CREATE TABLE indexed (id int NOT NULL UNIQUE, a text, big text); ALTER TABLE indexed REPLICA IDENTITY USING INDEX indexed_id_key;
CREATE TABLE unpublished (id int PRIMARY KEY, a text, big text);
CREATE PUBLICATION app FOR TABLE keyed, whole, indexed;
"""
NAMES = ("keyed", "whole", "indexed", "unpublished")
WORK_MEM = 64 * 1024
CHANGES = (Insert, Update, Delete, Truncate, LogicalMessage)


class Both:
    """One transaction on both."""

    def __init__(self, session: psycopg.Connection[Any], fake: FakeTransaction, rng: random.Random, number: int) -> None:
        self.session, self.fake, self.rng = session, fake, rng
        self.number = number
        self.next = number * 100_000
        self.mine: list[tuple[str, int]] = []
        session.execute("BEGIN")

    def insert(self, table: str, count: int = 1, size: int = 5) -> None:
        rows = [
            {"id": self.next + place, "a": "x" * size, "big": "y" * 3000 if self.rng.random() < 0.2 else None} for place in range(count)
        ]
        self.next += count
        for row in rows:
            self.session.execute(f"INSERT INTO {table} VALUES (%(id)s, %(a)s, %(big)s)", row)
        self.fake.insert(table, rows)
        self.mine += [(table, int(str(row["id"]))) for row in rows]

    def change(self) -> None:
        if not self.mine:
            self.insert("keyed")
        table, key = self.rng.choice(self.mine)
        match self.rng.randrange(4):
            case 0:
                self.session.execute(f"UPDATE {table} SET a = 'changed' WHERE id = {key}")
                self.fake.update(table, {"id": key}, a="changed")
            case 1:
                self.session.execute(f"UPDATE {table} SET id = {self.next} WHERE id = {key}")
                self.fake.update(table, {"id": key}, id=self.next)
                self.next += 1
            case 2:
                self.session.execute(f"UPDATE {table} SET big = NULL WHERE id = {key}")
                self.fake.update(table, {"id": key}, big=None)
            case _:
                self.session.execute(f"DELETE FROM {table} WHERE id = {key}")
                self.fake.delete(table, {"id": key})

    def message(self, *, transactional: bool) -> None:
        self.session.execute("SELECT pg_logical_emit_message(%s, 'prefix', 'content')", [transactional])
        self.fake.message("prefix", "content", transactional=transactional)

        # a message has the LSN of the record behind it: the two have no order if they are of two subtransactions
        self.insert("keyed")

    def savepoint(self, steps: int, depth: int) -> None:
        self.session.execute(f"SAVEPOINT s{depth}")
        with self.fake.savepoint():
            self.work(steps, depth + 1)
            if self.rng.random() < 0.5:
                self.session.execute(f"ROLLBACK TO SAVEPOINT s{depth}")
                self.session.execute(f"RELEASE SAVEPOINT s{depth}")
                self.fake.rollback_savepoint()
            else:
                self.session.execute(f"RELEASE SAVEPOINT s{depth}")

    def work(self, steps: int, depth: int = 0) -> None:
        for _ in range(steps):
            match self.rng.randrange(10):
                case 0 | 1 | 2 | 3:
                    self.insert(self.rng.choice(NAMES), self.rng.randrange(1, 4))
                case 4 | 5 | 6:
                    self.change()
                case 7:
                    self.message(transactional=self.rng.random() < 0.7)
                case _ if depth < 3:
                    self.savepoint(self.rng.randrange(1, 4), depth)
                case _:
                    pass

    def finish(self, *, two_phase: bool) -> bool:
        """End it. Returns whether it is prepared."""
        match self.rng.randrange(6 if two_phase else 4):
            case 0:
                self.session.execute("ROLLBACK")
                self.fake.rollback()
            case 1 | 2 | 3:
                self.session.execute("COMMIT")
                self.fake.commit()
            case _:
                gid = f"gid {self.number}"
                self.session.execute(f"PREPARE TRANSACTION '{gid}'")
                self.fake.prepare(gid)
                return True
        return False


def scenario(database: Database, publisher: FakePublisher, rng: random.Random, *, two_phase: bool) -> list[Both]:
    """Some transactions side by side; at most one of them is large. Returns those that are prepared."""
    prepared: list[Both] = []
    with database.connect() as one, database.connect() as other:
        first = Both(one, publisher.transaction(), rng, 0)
        for table in NAMES:
            first.insert(table)
        first.session.execute("COMMIT")
        first.fake.commit()
        for number in range(1, 7):
            pair = Both(one, publisher.transaction(), rng, 2 * number), Both(other, publisher.transaction(), rng, 2 * number + 1)
            for part in range(3):
                for transaction in pair:
                    transaction.work(rng.randrange(1, 4))
                if part == 1 and number % 2:
                    pair[0].insert(rng.choice(NAMES[:3]), 200, 1000)
            for transaction in rng.sample(pair, 2):
                prepared += [transaction] * transaction.finish(two_phase=two_phase)
    return prepared


def end_prepared(database: Database, publisher: FakePublisher, prepared: list[Both]) -> None:
    for place, transaction in enumerate(prepared):
        # a prepared transaction that is rolled back before it is decoded comes in part, as far as the caches of the server happen to reach
        database.execute(f"{'ROLLBACK' if place % 2 else 'COMMIT'} PREPARED '{transaction.fake.gid}'")
        (transaction.fake.rollback_prepared if place % 2 else transaction.fake.commit_prepared)()
    database.execute("TRUNCATE keyed, unpublished, whole RESTART IDENTITY CASCADE")
    truncating = publisher.transaction()
    truncating.truncate("keyed", "unpublished", "whole", cascade=True, restart_identity=True)
    truncating.commit()


async def received(conninfo: str, options: StreamOptions, end: Lsn) -> list[Message]:
    """What the slot sends up to the end."""
    connection = await WalReceiverConnection.connect(conninfo, application_name="differential")
    stream = await connection.start_replication("differential", Lsn(0), options)
    found: list[Message] = []
    in_stream = False
    try:
        while True:
            for data in await stream.receive():
                frame = decode_frame(data)
                if isinstance(frame, PrimaryKeepalive):
                    if frame.end_lsn >= end:
                        await confirm(conninfo, stream, frame.end_lsn)
                        return found
                    continue
                message = decode(frame.payload, in_stream=in_stream)
                in_stream = isinstance(message, StreamStart) or (in_stream and not isinstance(message, StreamStop))
                found.append(message)
    finally:
        await stream.close()


async def confirm(conninfo: str, stream: WalSenderStream, lsn: Lsn) -> None:
    await stream.send(encode_frame(StandbyStatusUpdate(lsn, lsn, lsn, 0, reply_requested=False)))
    async with await WalReceiverConnection.connect(conninfo, application_name="differential") as watch:
        async with asyncio.timeout(WAIT_SECONDS):
            while (slot := await watch.slot("differential")) is None or slot.confirmed_flush_lsn != lsn:
                pass


class Normal:
    """The form of messages that both must give: whole transactions, each change with the description of its relation."""

    def __init__(self) -> None:
        self.xids: dict[int, int] = {}
        self.relations: dict[int, Any] = {}
        self.streams: dict[int, list[Message]] = {}

    def value(self, name: str, value: Any) -> Any:
        if name == "xid":
            return self.xids.setdefault(value, len(self.xids))
        if name == "relation_id":
            return self.relations[value]
        if name == "relation_ids":
            return [self.relations[oid] for oid in value]
        if "lsn" in name or "time" in name:
            return None if value is None else "…"
        return (value.kinds, value.values) if hasattr(value, "kinds") else value

    def form(self, message: Message) -> tuple[Any, ...]:
        names = [each.name for each in fields(message)] if is_dataclass(message) else list(message.__slots__)
        if isinstance(message, CHANGES):
            names.remove("xid")
        return (type(message).__name__, *((name, self.value(name, getattr(message, name))) for name in sorted(names)))

    def all(self, messages: Sequence[Message]) -> list[Any]:
        found: list[Any] = []
        block: list[Message] | None = None
        for message in messages:
            match message:
                case Relation():
                    self.relations[message.relation_id] = (message.name, message.replica_identity, message.columns)
                case Type():
                    pass
                case StreamStart(xid):
                    block = self.streams.setdefault(xid, [])
                case StreamStop():
                    block = None
                case StreamAbort(xid, subxid):
                    kept = [change for change in self.streams.get(xid, ()) if getattr(change, "xid", None) != subxid]
                    self.streams[xid] = [] if subxid == xid else kept
                case StreamCommit(xid, flags, commit_lsn, end_lsn, time):
                    parts: list[Message] = [Begin(commit_lsn, time, xid), *self.streams.pop(xid), Commit(flags, commit_lsn, end_lsn, time)]
                    found += map(self.form, parts)
                case StreamPrepare(flags, lsn, end_lsn, time, xid, gid):
                    begin, end = BeginPrepare(lsn, end_lsn, time, xid, gid), Prepare(flags, lsn, end_lsn, time, xid, gid)
                    found += map(self.form, (begin, *self.streams.pop(xid), end))
                case Insert() | Update() | Delete() | Truncate() | LogicalMessage(transactional=True) if block is not None:
                    block.append(message)
                case _:
                    found.append(self.form(message))
        return found


def difference(fake: list[Any], real: list[Any]) -> str:
    """The first difference with what surrounds it, shortened; empty: they are equal."""
    found, expected = (list(map(shown, messages)) for messages in (fake, real))
    for place, (one, other) in enumerate(zip_longest(found, expected)):
        if one != other:
            return "\n".join(["", "fake:", *found[max(place - 4, 0) : place + 3], "", "real:", *expected[max(place - 4, 0) : place + 3]])
    return ""


def shown(message: Any) -> str:
    return re.sub(r"([xy])\1{5,}", lambda found: f"{found[1]}*{len(found[0])}", str(message))


@seeds(3, 6)
@pytest.mark.matrix
async def test_both_send_the_same(publisher_db: Database, seed: int) -> None:
    rng = random.Random(seed)
    database, caps = publisher_db, capabilities(publisher_db.version * 10000)
    streaming = rng.choice(["off", "on" if caps.streaming else "off", "parallel" if caps.parallel_streaming else "on"])
    two_phase = rng.random() < 0.7 and caps.two_phase
    options = StreamOptions(
        protocol_version=caps.protocol_version,
        streaming=streaming if caps.streaming else "off",  # type: ignore[arg-type]
        two_phase=two_phase,
        origin="any" if caps.at_least(16) else None,
        publications=("app",),
        binary=rng.random() < 0.5 and caps.at_least(14),
        messages=caps.at_least(14),
    )
    database.execute(TABLES + "".join(f"ALTER TABLE {name} ALTER big SET STORAGE EXTERNAL;" for name in NAMES))
    database.execute(f"SELECT pg_create_logical_replication_slot('differential', 'pgoutput', false{', true' * two_phase})")
    async with FakePublisher(database.version, logical_decoding_work_mem=WORK_MEM) as publisher:
        columns = {"id": "int", "a": "text", "big": "text"}
        publisher.create_table("keyed", columns, key=["id"])
        publisher.create_table("whole", columns, replica_identity="f")
        publisher.create_table("indexed", columns, replica_identity="i", identity_index=["id"])
        publisher.create_table("unpublished", columns, key=["id"])
        publisher.create_publication("app", "keyed", "whole", "indexed")
        await publisher.create_slot("differential", two_phase=two_phase)
        prepared = await asyncio.to_thread(scenario, database, publisher, rng, two_phase=two_phase)
        real = await received(database.conninfo(), options, database.current_lsn())
        fake = await received(publisher.dsn(), options, publisher.wal.end)
        # another stream: the ends of the prepared transactions
        await asyncio.to_thread(end_prepared, database, publisher, prepared)
        real += await received(database.conninfo(), options, database.current_lsn())
        fake += await received(publisher.dsn(), options, publisher.wal.end)
        streamed = {any(isinstance(message, StreamStart) for message in messages) for messages in (real, fake)}
        assert len(streamed) == 1
        assert options.streaming != "off" or streamed == {False}
        found = difference(Normal().all(fake), Normal().all(real))
        assert not found, found
    database.execute("SELECT pg_drop_replication_slot('differential')")
