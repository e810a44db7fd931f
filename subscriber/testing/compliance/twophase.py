"""Prepared transactions: kept until their COMMIT PREPARED, whatever happens in between, and applied once."""

from __future__ import annotations

from subscriber.errors import ApplyError, DataLossError, ProtocolError
from subscriber.testing.compliance.checking import equal, refused
from subscriber.testing.compliance.feed import Feed
from subscriber.testing.compliance.registry import Scenarios
from subscriber.testing.compliance.values import Table
from subscriber.transaction.model import Transaction

__all__ = ["scenarios"]

scenarios = Scenarios("twophase")


@scenarios.needing("two_phase")
async def commit(feed: Feed) -> None:
    """What is prepared is invisible until it is committed; transactions between pass it; each message may come twice."""
    t = Table("t", "*id int4", "v")
    await feed.create(t)
    prepared = await feed.prepare(t.relation, t.insert(1, "prepared"), t.insert(2, "prepared"))
    await feed.expect(t)
    equal(await feed.position(), prepared.end_lsn, "the position behind the prepare")
    await feed.give_prepared(prepared)
    await feed.apply(t.relation, t.insert(3, "between"))
    await feed.expect(t, (3, "between"))
    await feed.reopen()
    message = await feed.commit_prepared(prepared)
    await feed.sink.commit_prepared(message)
    await feed.expect(t, (1, "prepared"), (2, "prepared"), (3, "between"))
    equal(await feed.position(), message.end_lsn, "the position behind the commit")
    await feed.apply(t.relation, t.update(1, "changed since"), t.delete(2, None))
    await feed.expect(t, (1, "changed since"), (3, "between"))


@scenarios.needing("two_phase")
async def rollback(feed: Feed) -> None:
    """What is rolled back never was; so is one that was never prepared here."""
    t = Table("t", "*id int4")
    await feed.create(t)
    prepared = await feed.prepare(t.relation, t.insert(1))
    await feed.reopen()
    message = await feed.rollback_prepared(prepared)
    await feed.sink.rollback_prepared(message)
    equal(await feed.position(), message.rollback_end_lsn, "the position behind the rollback")
    unknown = feed.transaction()
    message = await feed.rollback_prepared(unknown)
    equal(await feed.position(), message.rollback_end_lsn, "the position behind a rollback of what was never prepared")
    await feed.apply(t.relation, t.insert(1))
    await feed.expect(t, (1,))


@scenarios.needing("two_phase")
async def committing_what_is_not_there(feed: Feed) -> None:
    """COMMIT PREPARED of a transaction that the target does not have: its changes are lost, and that is said."""
    with refused(DataLossError, "COMMIT PREPARED of an unknown transaction"):
        await feed.commit_prepared(feed.transaction())


@scenarios.needing("two_phase")
async def several(feed: Feed) -> None:
    """Several are prepared at once, and end in another order; each has its own rows."""
    t = Table("t", "*id int4", "v")
    await feed.create(t)
    prepared = [await feed.prepare(*([] if number else [t.relation]), t.insert(number, "x")) for number in range(4)]
    await feed.commit_prepared(prepared[2])
    await feed.reopen()
    await feed.rollback_prepared(prepared[0])
    await feed.commit_prepared(prepared[3])
    await feed.commit_prepared(prepared[1])
    await feed.expect(t, *((number, "x") for number in (1, 2, 3)))


@scenarios.needing("two_phase")
async def empty(feed: Feed) -> None:
    """One that changes nothing is prepared and committed like any other."""
    prepared = await feed.prepare()
    await feed.reopen()
    await feed.commit_prepared(prepared)


@scenarios.needing("two_phase")
async def damaged(feed: Feed) -> None:
    """A damaged record is refused before the prepared transaction is kept: the publisher sends it again, and it is whole then."""
    t = Table("t", "*id int4", "v")
    await feed.create(t)
    prepared = feed.transaction(t.relation, t.insert(1, "x"), t.insert(2, "y"))
    whole = list(prepared.records)
    for size in (3, len(whole[-1]) - 1):
        prepared.records[-1] = whole[-1][:size]
        with refused(ProtocolError, f"a prepared transaction whose last record ends after {size} bytes"):
            await feed.give_prepared(prepared)
        await feed.reopen()
    prepared.records[:] = whole
    await feed.give_prepared(prepared)
    await feed.commit_prepared(prepared)
    await feed.expect(t, (1, "x"), (2, "y"))


@scenarios.needing("two_phase")
async def late(feed: Feed) -> None:
    """One from before the slot's two-phase start comes right before its commit, long behind the position, and is done nevertheless."""
    t = Table("t", "*id int4")
    await feed.create(t)
    early = feed.transaction(t.relation, t.insert(1))
    done = await feed.apply(t.relation, t.insert(2))
    await feed.give_prepared(early)
    equal(await feed.position(), done.end_lsn, "the position behind a late prepare")
    await feed.give_prepared(early)
    await feed.commit_prepared(early)
    await feed.expect(t, (1,), (2,))


@scenarios.needing("two_phase")
async def large_and_streamed(feed: Feed) -> None:
    """A large one that was streamed and spooled; what it describes counts for itself, also in another process."""
    t, u = Table("t", "*id int4", "v", relation_id=1), Table("u", "*id int4", relation_id=2)
    await feed.create(t, u)
    padding = "x" * 500
    changes = [t.insert(number, padding) for number in range(2000)]
    large = feed.transaction(t.relation, *changes, u.relation, u.insert(1), t.delete(0, None), streamed=True, spilled=1500)
    await feed.give_prepared(large)
    await feed.expect(t)
    await feed.reopen()
    await feed.commit_prepared(large)
    await feed.expect(u, (1,))
    await feed.expect(t, *((number, padding) for number in range(1, 2000)))


@scenarios.needing("two_phase")
async def known_relations(feed: Feed) -> None:
    """A relation that was described before the transaction is described to it, also when it is committed by another process."""
    t = Table("t", "*id int4", "v")
    wider = Table("t", "*id int4", "v", "+w")
    await feed.create(wider)
    await feed.apply(t.relation, t.insert(1, "a"))
    prepared = await feed.prepare(t.insert(2, "b"), t.update(1, "c"))
    await feed.reopen()
    other_order = Table("t", "v", "*id int4")
    await feed.apply(other_order.relation, other_order.insert("d", 3))
    await feed.commit_prepared(prepared)
    await feed.apply(other_order.insert("e", 4))
    await feed.expect(wider, (1, "c", None), (2, "b", None), (3, "d", None), (4, "e", None))


@scenarios.needing("two_phase")
async def gate_at_prepare(feed: Feed) -> None:
    """Which tables' changes are wanted is asked when it is prepared."""
    t, u = Table("t", "*id int4", relation_id=1), Table("u", "*id int4", relation_id=2)
    await feed.create(t, u)
    await feed.shut(u)
    prepared = await feed.prepare(t.relation, u.relation, t.insert(1), u.insert(1))
    await feed.shut(t)
    await feed.take_over(u)
    await feed.commit_prepared(prepared)
    await feed.take_over(t)
    await feed.expect(t, (1,))
    await feed.expect(u)


@scenarios.needing("two_phase", "constraints", "shared_tables")
async def refused_change(feed: Feed) -> None:
    """A change that the target refuses: said at the prepare or at the commit, and after the remedy it goes on."""
    t = Table("t", "*id int4")
    await feed.create(t)
    await feed.target.insert(t, [("1",)])
    made = feed.transaction(t.relation, t.insert(7), t.insert(1))
    if feed.sink.capabilities.prepares_in_target:
        with refused(ApplyError, "preparing what the target refuses", sqlstate="23505"):
            await feed.give_prepared(made)
        await feed.target.clear(t)
        await feed.give_prepared(made)
    else:
        await feed.give_prepared(made)
        await _refused_at_commit(feed, made)
        await feed.target.clear(t)
    await feed.commit_prepared(made)
    await feed.expect(t, (1,), (7,))


async def _refused_at_commit(feed: Feed, made: Transaction) -> None:
    for _ in range(2):
        with refused(ApplyError, "committing what the target refuses", sqlstate="23505"):
            await feed.commit_prepared(made)
        equal(await feed.position(), made.end_lsn, "the position after a refused commit")
