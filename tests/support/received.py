"""What the tests of ``subscriber.transactions`` check."""

from __future__ import annotations

import asyncio
from typing import Any

from subscriber.config import Settings
from subscriber.consumer.received import ReceivedTransaction
from subscriber.consumer.transactions import TransactionStream
from subscriber.protocol.lsn import Lsn
from subscriber.transaction.changes import Change, DeleteChange, InsertChange, MessageChange, TruncateChange, UpdateChange
from tests.support.database import Database

SOON = Settings(wal_retrieve_retry_interval=0.2, wal_receiver_status_interval=1)
SMALL = 64 * 1024
TIMEOUT = 30.0

Simple = tuple[Any, ...]


def simple(change: Change) -> Simple:
    match change:
        case InsertChange():
            return ("insert", change.relation.name, change.new)
        case UpdateChange():
            return ("update", change.relation.name, change.key, change.old, change.new)
        case DeleteChange():
            return ("delete", change.relation.name, change.key, change.old)
        case TruncateChange():
            return ("truncate", {relation.name for relation in change.relations}, change.cascade, change.restart_identity)
        case MessageChange():
            return ("message", change.prefix, change.content)


async def changes(transaction: ReceivedTransaction) -> list[Simple]:
    return [simple(change) async for change in transaction]


async def first(stream: TransactionStream[ReceivedTransaction]) -> tuple[ReceivedTransaction, list[Simple]]:
    """The next transaction and its changes."""
    async with asyncio.timeout(TIMEOUT):
        async for transaction in stream:
            return transaction, await changes(transaction)
    raise AssertionError("the stream ended")


async def eventually(database: Database, query: str, expected: Any) -> None:
    """As Database.wait, while the loop runs."""
    await asyncio.to_thread(database.wait, query, expected)


def confirmed(database: Database, slot: str) -> Lsn:
    return Lsn.parse(database.value(f"SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = '{slot}'"))


def slots(database: Database) -> int:
    return int(database.value("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"))


def cut_connection(database: Database) -> None:
    """End the walsender, as a failing network would."""
    found = database.fetch(
        "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE database = current_database() AND active"
    )
    assert found == [(True,)]
