"""Batches of many transactions: they must give the same rows as one change after the other."""

from __future__ import annotations

import random
from typing import Final

from subscriber.apply.receiving.rolled_back import remove_changes
from subscriber.protocol.messages import Message
from subscriber.testing.compliance.assertions import equal
from subscriber.testing.compliance.feed import FIRST_SUBXID, Feed
from subscriber.testing.compliance.sample_messages import UNSENT, Table
from subscriber.testing.compliance.scenarios import Scenarios

__all__ = ["scenarios"]

scenarios = Scenarios("batches")

_HISTORIES: Final = 3
_BATCHES: Final = 8
_KEYS: Final = 8


@scenarios
async def several_transactions(feed: Feed) -> None:
    """A batch of transactions that touch the same rows. Relations are described in the first transaction that needs them."""
    t, u = Table("t", "*id int4", "v", relation_id=1), Table("u", "*id int4", "v", relation_id=2)
    await feed.create(t, u)
    made = [
        feed.transaction(t.relation, t.insert(1, "a"), t.insert(2, "a")),
        feed.transaction(t.delete(1, None), u.relation, u.insert(1, "first")),
        feed.transaction(),
        feed.transaction(t.insert(1, "b"), u.update(1, "second")),
        feed.transaction(t.update(3, "c", old=(1, None)), t.insert(1, "d"), u.delete(1, None)),
        feed.transaction(t.update(2, "e"), t.update(2, "f"), u.insert(1, "third"), streamed=True),
    ]
    await feed.give(*made)
    await feed.expect(t, (1, "d"), (2, "f"), (3, "c"))
    await feed.expect(u, (1, "third"))
    equal(feed.sink.statistics.transactions, len(made), "transactions counted")
    equal(await feed.position(), made[-1].end_lsn, "the stored position")


@scenarios
async def rolled_back_savepoint(feed: Feed) -> None:
    """A streamed transaction without the changes of a subtransaction. Its description of a relation stays, and is needed."""
    t, u = Table("t", "*id int4", "v", relation_id=1), Table("u", "*id int4", "v", relation_id=2)
    await feed.create(t, u)
    whole: list[Message] = [t.relation, t.insert(1, "a"), u.relation, u.insert(9, "never"), u.insert(1, "b"), t.update(1, "c")]
    # two records have the same xid
    made = feed.transaction(*whole, streamed=True)
    remove_changes(made, {FIRST_SUBXID + 1})
    equal((made.left_out, made.count), (1, 5), "changes left out, and records kept")
    await feed.give(made)
    await feed.expect(t, (1, "c"))
    await feed.expect(u, (1, "b"))
    equal(await feed.position(), made.end_lsn, "the stored position")


@scenarios
async def large(feed: Feed) -> None:
    """Some thousand rows of two tables, alternating and in runs, in one batch."""
    t, u = Table("t", "*id int4", "v", "n int8", relation_id=1), Table("u", "*id int4", "v", relation_id=2)
    await feed.create(t, u)
    count = 1500
    made = [feed.transaction(t.relation, u.relation, *(t.insert(number, "new", number * 10) for number in range(count)))]
    made.append(feed.transaction(*(change for number in range(400) for change in (t.update(number, "changed", 0), u.insert(number, "x")))))
    made.append(feed.transaction(*(t.delete(number, None, None) for number in range(300))))
    made.append(feed.transaction(*(t.update(number, None, 1) for number in range(300, 1000) if number % 2)))
    await feed.give(*made)
    expected: dict[int, tuple[object, ...]] = {number: (number, "new", number * 10) for number in range(300, count)}
    expected.update({number: (number, "changed", 0) for number in range(300, 400)})
    expected.update({number: (number, None, 1) for number in range(300, 1000) if number % 2})
    await feed.expect(t, *expected.values())
    await feed.expect(u, *((number, "x") for number in range(400)))


@scenarios
async def any_history(feed: Feed) -> None:
    """Random histories of a few rows, in batches of any size, compared with a model that applies one change at a time."""
    history = _History(random.Random(20261121))
    await feed.create(history.keyed, history.full)
    for number in range(_HISTORIES * _BATCHES):
        made = [feed.transaction(*history.changes(described=not number and not first)) for first in range(history.rng.randint(1, 6))]
        await feed.give(*made)
        await feed.expect(history.keyed, *((key, *values) for key, values in history.rows.items()))
        await feed.expect(history.full, *history.bag)
        if not number % _BATCHES:
            # in a new stream the publisher describes relations again
            await feed.reopen()
            await feed.give(feed.transaction(history.keyed.relation, history.full.relation))
    equal(feed.sink.statistics.confl_update_missing + feed.sink.statistics.confl_delete_missing, 0, "missing rows counted")


class _History:
    """Generates valid changes of two tables, and tracks the resulting rows."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.keyed = Table("keyed", "*id int4", "a", "b int4", relation_id=1)
        self.full = Table("full_identity", "a int4", "b", full=True, relation_id=2)
        self.rows: dict[int, tuple[str | None, int | None]] = {}
        self.bag: list[tuple[int | None, str | None]] = []

    def changes(self, *, described: bool) -> list[Message]:
        """Generate a transaction. With ``described`` it begins with the relations."""
        found: list[Message] = [self.keyed.relation, self.full.relation] if described else []
        count = self.rng.choice((0, 1, 1, 2, 3, 5, 12))
        return found + [self._of_bag() if self.rng.random() < 0.25 else self._of_rows() for _ in range(count)]

    def _values(self) -> tuple[str | None, int | None]:
        return self.rng.choice((None, "x", "y", "z")), self.rng.choice((None, 0, 1, -1))

    def _of_rows(self) -> Message:
        rng, rows, keyed = self.rng, self.rows, self.keyed
        free = [key for key in range(_KEYS) if key not in rows]
        what = rng.random()
        if free and (not rows or what < 0.35):
            key = rng.choice(free)
            rows[key] = self._values()
            return keyed.insert(key, *rows[key])
        key = rng.choice(list(rows))
        if what < 0.55:
            del rows[key]
            return keyed.delete(key, None, None)
        before, after = rows[key], self._values()
        if what < 0.65:  # an unsent value did not change
            rows[key] = before[0], after[1]
            return keyed.update(key, UNSENT, after[1])
        if free and what < 0.85:
            moved = rng.choice(free)
            del rows[key]
            rows[moved] = after
            return keyed.update(moved, *after, old=(key, None, None))
        rows[key] = after
        return keyed.update(key, *after)

    def _of_bag(self) -> Message:
        rng, bag, full = self.rng, self.bag, self.full
        values = rng.choice((None, 1, 2)), rng.choice((None, "x"))
        what = rng.random()
        if not bag or what < 0.5:
            bag.append(values)
            return full.insert(*values)
        before = bag.pop(rng.randrange(len(bag)))
        if what < 0.75:
            return full.delete(*before)
        bag.append(values)
        return full.update(*values, old=before)
