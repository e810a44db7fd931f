"""Streamed transactions that are applied before their end, and ordinary ones that several sessions apply."""

from __future__ import annotations

import asyncio
from typing import Final

from subscriber.apply.receiving.rolled_back import remove_changes
from subscriber.interfaces import ParallelTransaction
from subscriber.protocol.messages import Message, Relation
from subscriber.testing.compliance.assertions import equal
from subscriber.testing.compliance.feed import FIRST_SUBXID, Feed
from subscriber.testing.compliance.sample_messages import Table
from subscriber.testing.compliance.scenarios import Scenarios
from subscriber.transaction.model import PreparedTransaction, Transaction

__all__ = ["scenarios"]

scenarios = Scenarios("parallel")

_COUNT: Final = 3000
_TRANSACTIONS: Final = 1000
"""Of a batch: enough for several sessions."""
_LATER: Final = 300
"""After so many transactions, a row is changed."""


def _everything(_relation: Relation) -> bool:
    return True


async def _begun(feed: Feed, *messages: Message) -> tuple[ParallelTransaction, Transaction]:
    made = feed.transaction(*messages, streamed=True)
    attempt = await feed.parallel.open_parallel(made.xid, _everything)
    half = len(made.records) // 2
    await attempt.apply(made.records[:half])
    await attempt.apply(made.records[half:])
    return attempt, made


@scenarios.needing("parallel_apply")
async def commit(feed: Feed) -> None:
    """Its changes are invisible until the commit. Then they are visible, the position is stored, and others were applied meanwhile."""
    t = Table("t", "*id int4")
    await feed.create(t)
    attempt, made = await _begun(feed, t.relation, t.insert(1), t.insert(2))
    await feed.expect(t)
    equal(await attempt.commit(made), True, "whether it was committed")
    feed.given = made.end_lsn
    await feed.expect(t, (1,), (2,))
    equal(await feed.position(), made.end_lsn, "the stored position")
    await feed.give(made)
    await feed.expect(t, (1,), (2,))


@scenarios.needing("parallel_apply")
async def roll_back(feed: Feed) -> None:
    """An abandoned attempt leaves no changes, and the whole transaction can be applied afterwards."""
    t = Table("t", "*id int4")
    await feed.create(t)
    attempt, made = await _begun(feed, t.relation, t.insert(1))
    await attempt.roll_back()
    await attempt.roll_back()
    await feed.expect(t)
    await feed.give(made)
    await feed.expect(t, (1,))


@scenarios.needing("parallel_apply")
async def cut(feed: Feed) -> None:
    """The records of an aborted subtransaction are cut off."""
    t = Table("t", "*id int4")
    await feed.create(t)
    attempt, whole = await _begun(feed, t.relation, t.insert(1), t.insert(2), t.insert(3))
    # records 2 and 3 belong to another subtransaction than 0 and 1
    await attempt.cut(2)
    kept = feed.transaction(t.relation, t.insert(1), streamed=True)
    kept.xid = whole.xid
    equal(await attempt.commit(kept), True, "whether it was committed")
    feed.given = kept.end_lsn
    await feed.expect(t, (1,))


@scenarios.needing("parallel_apply")
async def rolled_back_savepoint(feed: Feed) -> None:
    """Changes that are applied turn out to be rolled back: the attempt is abandoned, and the rest is applied."""
    t = Table("t", "*id int4")
    await feed.create(t)
    attempt, made = await _begun(feed, t.relation, t.insert(1), t.insert(2), t.insert(3), t.insert(4))
    remove_changes(made, {FIRST_SUBXID + 1})
    await attempt.roll_back()
    await feed.give(made)
    await feed.expect(t, (1,), (4,))


@scenarios.needing("parallel_apply", "two_phase")
async def prepare(feed: Feed) -> None:
    """It ends with PREPARE TRANSACTION."""
    t = Table("t", "*id int4")
    await feed.create(t)
    attempt, made = await _begun(feed, t.relation, t.insert(1))
    equal(await attempt.prepare(PreparedTransaction(made, f"gid of {made.xid}")), True, "whether it was prepared")
    feed.given = made.end_lsn
    await feed.expect(t)
    await feed.reopen()
    await feed.commit_prepared(made)
    await feed.expect(t, (1,))


@scenarios.needing("apply_workers")
async def workers(feed: Feed) -> None:
    """Several sessions apply transactions. What a reader sees at any time is what the publisher had after one of them."""
    t = Table("t", "*id int4", "n int4")
    await feed.create(t)
    await feed.reopen_with_workers(3)
    await feed.apply(t.relation)
    reading = asyncio.create_task(_read(feed, t))
    for first in range(0, _COUNT, _TRANSACTIONS):
        made = []
        for number in range(first, first + _TRANSACTIONS):
            later = [t.update(number - _LATER, 1)] if number >= _LATER else []
            made.append(feed.transaction(t.insert(number, 0), *later))
        await feed.give(*made)
    reading.cancel()
    await asyncio.wait({reading})
    if not reading.cancelled():
        reading.result()
    await feed.expect(t, *_state(_COUNT))
    equal(await feed.position(), feed.given, "the stored position")


async def _read(feed: Feed, table: Table) -> None:
    while True:
        rows = sorted((int(str(number)), int(str(value))) for number, value in await feed.target.rows(table))
        equal(rows, _state(len(rows)), f"rows that were visible, after transaction {rows[-1][0] if rows else 'none'}")
        await asyncio.sleep(0)


def _state(count: int) -> list[tuple[int, int]]:
    """The rows after so many transactions."""
    return [(number, int(number < count - _LATER)) for number in range(count)]
