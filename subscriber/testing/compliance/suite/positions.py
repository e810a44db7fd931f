"""Exactly once: the stored position, and transactions that are received again."""

from __future__ import annotations

from subscriber.errors import TargetError
from subscriber.interfaces import Position, TwoPhaseState
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import CommitPrepared
from subscriber.testing.compliance.assertions import demand, equal, refused
from subscriber.testing.compliance.feed import NAME, SLOT, START, SYSTEM, Feed
from subscriber.testing.compliance.sample_messages import Table
from subscriber.testing.compliance.scenarios import Scenarios
from subscriber.transaction.model import PreparedTransaction

__all__ = ["scenarios"]

scenarios = Scenarios("positions")


@scenarios
async def first_position(feed: Feed) -> None:
    """A new subscription has neither slot nor position. Once set, the next process reads both."""
    equal(feed.state.position, None, "the position of a new subscription")
    equal(feed.state.slot_name, None, "the slot of a new subscription")
    equal(feed.state.two_phase, TwoPhaseState.DISABLED, "two-phase of a new subscription")
    equal(feed.state.name, NAME, "its name")
    first = feed.state
    await feed.reopen()
    equal(feed.state.position, Position(SLOT, SYSTEM, 1, START), "the stored position")
    equal((feed.state.oid, feed.state.target_identifier), (first.oid, first.target_identifier), "what identifies it")


@scenarios
async def existence(feed: Feed) -> None:
    """A sink reports whether a subscription exists without being opened, and creates nothing."""
    other = feed.target.new_sink()
    equal(await other.exists(NAME), True, "whether it exists")
    for _ in range(2):
        if feed.target.traits.several_subscriptions:
            equal(await other.exists("another"), False, "whether another exists")
        else:
            with refused(TargetError, "asking for another subscription where there is one"):
                await other.exists("another")


@scenarios
async def setup(feed: Feed) -> None:
    """The state stored while a subscription is being created."""
    await feed.opened.begin_slot("a_slot", ["pub", "Publikation, zweite"], TwoPhaseState.PENDING)
    await feed.reopen()
    found = feed.state
    equal((found.slot_name, found.publications, found.two_phase), ("a_slot", ("pub", "Publikation, zweite"), TwoPhaseState.PENDING), "it")
    await feed.opened.set_two_phase(TwoPhaseState.ENABLED)
    await feed.opened.set_publications(["one"])
    await feed.opened.refreshed()
    await feed.reopen()
    found = feed.state
    equal((found.slot_name, found.publications, found.two_phase), ("a_slot", ("one",), TwoPhaseState.ENABLED), "what was changed")
    demand(SLOT in await feed.opened.slot_names(), "the slot of the position is not among the slots")
    await feed.opened.begin_slot(None, ["one"], TwoPhaseState.DISABLED)
    await feed.reopen()
    equal(feed.state.slot_name, None, "a slot that was taken back")


@scenarios
async def another_timeline(feed: Feed) -> None:
    """The publisher was promoted: the position moves to the new timeline."""
    moved = Position("another_slot", "7000000000000000002", 2, Lsn(0x2000))
    await feed.opened.set_position(moved)
    await feed.reopen()
    equal(feed.state.position, moved, "the stored position")


@scenarios.needing("several_subscriptions")
async def change_before_position(feed: Feed) -> None:
    """A subscription without position rejects changes, because after a crash it would be unknown whether they were applied."""
    other = Feed(feed.target, "without_position")
    await other.open(begin=False)
    with refused(TargetError, "a change before the first position"):
        await other.apply()
    await other.opened.close()


@scenarios
async def again(feed: Feed) -> None:
    """A batch that comes again changes no rows, but its relation messages apply. Of an overlapping batch the new part is applied."""
    t = Table("t", "*id int4", "v")
    await feed.create(t)
    first = [feed.transaction(t.relation, t.insert(1, "a")), feed.transaction(t.insert(2, "a")), feed.transaction(t.update(1, "b"))]
    await feed.give(*first)
    await feed.give(*first)
    await feed.expect(t, (1, "b"), (2, "a"))
    await feed.reopen()
    await feed.give(*first, feed.transaction(t.insert(3, "c")))
    await feed.expect(t, (1, "b"), (2, "a"), (3, "c"))
    last = await feed.apply(t.delete(2, None))
    await feed.expect(t, (1, "b"), (3, "c"))
    equal(await feed.position(), last.end_lsn, "the stored position")


@scenarios
async def idle(feed: Feed) -> None:
    """The position moves without data, and never back. Transactions that end before it are then skipped."""
    t = Table("t", "*id int4")
    await feed.create(t)
    before = feed.transaction(t.relation, t.insert(1))
    idle = feed.next_lsn()
    await feed.opened.advance(idle)
    equal(await feed.position(), idle, "the stored position")
    await feed.opened.advance(Lsn(idle - 0x10))
    equal(await feed.position(), idle, "the stored position after advancing to an earlier one")
    await feed.opened.apply(feed.batch(before))
    await feed.expect(t)
    await feed.apply(t.insert(2))
    await feed.expect(t, (2,))


@scenarios
async def skipping(feed: Feed) -> None:
    """A skipped transaction changes no rows, its relation messages apply, and the position moves."""
    t = Table("t", "*id int4")
    await feed.create(t)
    skipped = feed.transaction(t.relation, t.insert(1))
    await feed.opened.skip(skipped)
    feed.given = skipped.end_lsn
    await feed.apply(t.insert(2))
    await feed.expect(t, (2,))
    await feed.opened.clear_skip()
    await feed.give(skipped)
    await feed.expect(t, (2,))


@scenarios.needing("two_phase")
async def skipping_prepared(feed: Feed) -> None:
    """A prepared transaction is skipped. Its COMMIT PREPARED still comes."""
    t = Table("t", "*id int4")
    await feed.create(t)
    skipped = feed.transaction(t.relation, t.insert(1))
    await feed.opened.skip(PreparedTransaction(skipped, f"gid of {skipped.xid}"))
    await feed.apply(t.insert(2))
    await feed.commit_prepared(skipped)
    await feed.expect(t, (2,))


@scenarios.needing("two_phase")
async def skipping_a_stored_transaction(feed: Feed) -> None:
    """If changes are stored until COMMIT PREPARED and rejected there, the COMMIT PREPARED is skipped."""
    if feed.two_phase.prepares_in_target:
        return
    t = Table("t", "*id int4")
    await feed.create(t)
    made = await feed.prepare(t.relation, t.insert(1))
    lsn = feed.next_lsn()
    message = CommitPrepared(0, lsn, Lsn(lsn + 0x30), 0, made.xid, f"gid of {made.xid}")
    await feed.opened.skip(message)
    feed.given = message.end_lsn
    equal(await feed.position(), message.end_lsn, "the position after the skipped transaction")
    await feed.two_phase.commit_prepared(message)
    await feed.apply(t.relation, t.insert(2))
    await feed.expect(t, (2,))
