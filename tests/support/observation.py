"""What a test sees of a running subscription from outside, while its loop runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from subscriber.interfaces import TableState
from subscriber.protocol.lsn import Lsn
from tests.support.database import WAIT_SECONDS, Database
from tests.support.replica import Replica


async def eventually(database: Database, query: str, expected: Any, timeout: float = WAIT_SECONDS) -> None:
    """As Database.wait, in a thread: the subscription runs in this loop. Nothing else may use the database at that time."""
    await asyncio.to_thread(database.wait, query, expected, timeout)


async def until(condition: Callable[[], bool], what: str, timeout: float = WAIT_SECONDS, *, in_thread: bool = False) -> None:
    """Poll a condition of this process. In a thread, it may wait for a lock that a subscription of this loop holds."""
    deadline = time.monotonic() + timeout
    while not (await asyncio.to_thread(condition) if in_thread else condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"after {timeout:g} s still not: {what}")
        await asyncio.sleep(0.02)


async def all_ready(replica: Replica) -> None:
    """Every table is in the apply worker's hands."""

    def ready() -> bool:
        tables = replica.subscription.status.tables
        return bool(tables) and all(entry.state is TableState.READY for entry in tables.values())

    await until(ready, "all tables ready")


def slot_of(publisher: Database, name: str = "replica") -> str:
    """The slot of :func:`tests.support.replica.subscription_of`."""
    return f"{name}_{publisher.name}"


def confirmed(publisher: Database, name: str = "replica") -> Lsn:
    """How far the publisher knows our work to be durable."""
    query = f"SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = '{slot_of(publisher, name)}'"
    return Lsn.parse(publisher.value(query))


async def acknowledged(publisher: Database, lsn: Lsn, timeout: float = WAIT_SECONDS) -> None:
    """Wait until the slot has followed up to there."""
    query = f"SELECT confirmed_flush_lsn >= '{lsn}' FROM pg_replication_slots WHERE slot_name = '{slot_of(publisher)}'"
    await eventually(publisher, query, True, timeout)


def target_gid(target: Database, xid: int) -> str:
    """The name of the publisher's prepared transaction in the target: pg_gid_%u_%u, as native's."""
    return f"pg_gid_{target.value('SELECT oid FROM subscriber.pg_subscription')}_{xid}"


PREPARED = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database() ORDER BY gid"


async def lock_refused(database: Database, times: int = 3, timeout: float = WAIT_SECONDS) -> None:
    """Wait until one session has asked for an advisory lock so many times and did not get it, as a session does that retries."""
    query = (
        "SELECT pid, query_start::text FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle%' "
        "AND query LIKE 'SELECT pg_catalog.pg_try_advisory%'"
    )
    asked: dict[object, set[object]] = {}
    deadline = time.monotonic() + timeout
    while all(len(starts) < times for starts in asked.values()):
        assert time.monotonic() < deadline, "no session asks for an advisory lock repeatedly"
        for pid, start in await asyncio.to_thread(database.fetch, query):
            asked.setdefault(pid, set()).add(start)
        await asyncio.sleep(0.02)
