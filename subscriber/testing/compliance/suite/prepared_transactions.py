"""Prepared transactions: they are kept until COMMIT PREPARED, also over a restart, and applied once."""

from __future__ import annotations

from subscriber.errors import ApplyError, DataLossError, ProtocolError
from subscriber.interfaces import TwoPhaseSink
from subscriber.testing.compliance.assertions import equal, refused
from subscriber.testing.compliance.feed import Feed
from subscriber.testing.compliance.sample_messages import Table
from subscriber.testing.compliance.scenarios import Scenarios
from subscriber.transaction.model import Transaction

__all__ = ["scenarios"]

scenarios = Scenarios("twophase")


@scenarios
async def ability(feed: Feed) -> None:
    """``supports_two_phase`` says whether the opened sink keeps prepared transactions."""
    equal(feed.target.new_sink().supports_two_phase, isinstance(feed.opened, TwoPhaseSink), "supports_two_phase")


@scenarios.needing("two_phase")
async def commit(feed: Feed) -> None:
    """Prepared changes are invisible until the commit. Other transactions may commit before it. Each message may come twice."""
    t = Table("t", "*id int4", "v")
    await feed.create(t)
    prepared = await feed.prepare(t.relation, t.insert(1, "prepared"), t.insert(2, "prepared"))
    await feed.expect(t)
    equal(await feed.position(), prepared.end_lsn, "the position after the prepare")
    await feed.give_prepared(prepared)
    await feed.apply(t.relation, t.insert(3, "between"))
    await feed.expect(t, (3, "between"))
    await feed.reopen()
    message = await feed.commit_prepared(prepared)
    await feed.two_phase.commit_prepared(message)
    await feed.expect(t, (1, "prepared"), (2, "prepared"), (3, "between"))
    equal(await feed.position(), message.end_lsn, "the position after the commit")
    await feed.apply(t.relation, t.update(1, "changed since"), t.delete(2, None))
    await feed.expect(t, (1, "changed since"), (3, "between"))


@scenarios.needing("two_phase")
async def rollback(feed: Feed) -> None:
    """A rollback leaves no changes. It may also name a transaction that was never prepared here."""
    t = Table("t", "*id int4")
    await feed.create(t)
    prepared = await feed.prepare(t.relation, t.insert(1))
    await feed.reopen()
    message = await feed.rollback_prepared(prepared)
    await feed.two_phase.rollback_prepared(message)
    equal(await feed.position(), message.rollback_end_lsn, "the position after the rollback")
    unknown = feed.transaction()
    message = await feed.rollback_prepared(unknown)
    equal(await feed.position(), message.rollback_end_lsn, "the position after a rollback of an unknown transaction")
    await feed.apply(t.relation, t.insert(1))
    await feed.expect(t, (1,))


@scenarios.needing("two_phase")
async def commit_of_an_unknown_transaction(feed: Feed) -> None:
    """COMMIT PREPARED of a transaction that the target does not have is an error, because its changes are lost."""
    with refused(DataLossError, "COMMIT PREPARED of an unknown transaction"):
        await feed.commit_prepared(feed.transaction())


@scenarios.needing("two_phase")
async def several(feed: Feed) -> None:
    """Several are prepared at once, and end in another order. Each has its own rows."""
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
    """A transaction without changes is prepared and committed like any other."""
    prepared = await feed.prepare()
    await feed.reopen()
    await feed.commit_prepared(prepared)


@scenarios.needing("two_phase")
async def damaged(feed: Feed) -> None:
    """A damaged record is rejected before the transaction is stored, so that the publisher sends the intact transaction again."""
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
    """One from before two-phase was enabled comes right before its commit. It is applied although it is far below the position."""
    t = Table("t", "*id int4")
    await feed.create(t)
    early = feed.transaction(t.relation, t.insert(1))
    done = await feed.apply(t.relation, t.insert(2))
    await feed.give_prepared(early)
    equal(await feed.position(), done.end_lsn, "the position after a late prepare")
    await feed.give_prepared(early)
    await feed.commit_prepared(early)
    await feed.expect(t, (1,), (2,))


@scenarios.needing("two_phase")
async def large_and_streamed(feed: Feed) -> None:
    """A large one that was streamed and spooled. Its relation messages apply to itself, also in another process."""
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
    """A relation described before the transaction is known to it, also when another process commits it."""
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
    """The gate is asked when the transaction is prepared."""
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
    """The target rejects a change at the prepare or at the commit. After a fix the transaction is applied."""
    t = Table("t", "*id int4")
    await feed.create(t)
    await feed.target.insert(t, [("1",)])
    made = feed.transaction(t.relation, t.insert(7), t.insert(1))
    if feed.two_phase.prepares_in_target:
        with refused(ApplyError, "preparing a transaction that the target rejects", sqlstate="23505"):
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
        with refused(ApplyError, "committing a transaction that the target rejects", sqlstate="23505"):
            await feed.commit_prepared(made)
        equal(await feed.position(), made.end_lsn, "the position after a rejected commit")
