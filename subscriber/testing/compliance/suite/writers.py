"""One writer per subscription, several subscriptions per target, and reports to other sessions."""

from __future__ import annotations

from subscriber.errors import SubscriptionInUse
from subscriber.interfaces import TableEntry, TableState, WorkerActivity
from subscriber.testing.compliance.assertions import demand, equal, refused
from subscriber.testing.compliance.feed import NAME, Feed
from subscriber.testing.compliance.sample_messages import Table
from subscriber.testing.compliance.scenarios import Scenarios

__all__ = ["scenarios"]

scenarios = Scenarios("writers")


@scenarios
async def one(feed: Feed) -> None:
    """While a subscription is open it cannot be opened again. Once it is closed, it can."""
    t = Table("t", "*id int4")
    await feed.create(t)
    second = feed.target.new_sink()
    with refused(SubscriptionInUse, "opening a subscription that is open"):
        await second.open(NAME, feed.durable.append)
    await feed.apply(t.relation, t.insert(1))
    await feed.expect(t, (1,))
    await feed.reopen()


@scenarios
async def closing_twice(feed: Feed) -> None:
    """Closing is idempotent, and a closed sink can be opened again."""
    t = Table("t", "*id int4")
    await feed.create(t)
    await feed.apply(t.relation, t.insert(1))
    await feed.opened.close()
    await feed.opened.close()
    await feed.open()
    await feed.apply(t.relation, t.insert(2))
    await feed.expect(t, (1,), (2,))


@scenarios.needing("several_subscriptions")
async def two_subscriptions(feed: Feed) -> None:
    """Two subscriptions of one target have their own positions and tables, and are open at the same time."""
    t, u = Table("t", "*id int4", relation_id=1), Table("u", "*id int4", relation_id=1)
    await feed.create(t)
    other = Feed(feed.target, "other")
    await other.open()
    try:
        demand(other.state.oid != feed.state.oid, "two subscriptions have the same oid")
        await other.create(u)
        await feed.apply(t.relation, t.insert(1))
        last = await other.apply(u.relation, u.insert(2))
        last = await other.apply(u.insert(3))
        await feed.expect(t, (1,))
        await feed.expect(u, (2,), (3,))
        equal(await other.position(), last.end_lsn, "the other's position")
        equal(await other.opened.tables(), {u.name: TableEntry(TableState.READY, None)}, "the other's tables")
    finally:
        await other.close()
    other.assert_acknowledgements()


@scenarios
async def reports(feed: Feed) -> None:
    """A report of the workers changes neither rows nor position."""
    t = Table("t", "*id int4")
    await feed.create(t)
    done = await feed.apply(t.relation, t.insert(1))
    table = WorkerActivity(table=t.name, copied_rows=7, estimated_rows=10)
    await feed.opened.report([WorkerActivity(applied=done.end_lsn, transactions=1, changes=1), table], "an error, with 'quotes'")
    await feed.opened.report([], None)
    await feed.expect(t, (1,))
    equal(await feed.position(), done.end_lsn, "the stored position")


@scenarios.needing("given_tables")
async def check(feed: Feed) -> None:
    """A check finds no error in a matching table, and an error in a table that lacks a column. It changes nothing."""
    t, u = Table("t", "*id int4", "v", relation_id=1), Table("u", "*id int4", relation_id=2)
    await feed.target.create_table(t)
    await feed.target.create_table(u)
    sink = feed.target.new_sink()
    equal([found for found in await sink.check([t.published], two_phase=False) if found.severity == "error"], [], "what was found")
    wider = Table("u", "*id int4", "more", relation_id=2)
    found = await sink.check([t.published, wider.published], two_phase=False)
    errors = [finding for finding in found if finding.severity == "error"]
    equal(len(errors), 1, f"errors found: {errors}")
    demand("u" in errors[0].message and "more" in errors[0].message, f"the finding names neither table nor column: {errors[0].message}")
    await feed.expect(u)
