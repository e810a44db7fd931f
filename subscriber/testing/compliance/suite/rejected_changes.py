"""Changes that the target rejects: their transaction is rolled back, earlier ones may stay, and after a fix the sink resumes."""

from __future__ import annotations

from subscriber.errors import ApplyError, RelationError
from subscriber.interfaces import TableEntry, TableState
from subscriber.testing.compliance.assertions import demand, equal, refused
from subscriber.testing.compliance.feed import Feed
from subscriber.testing.compliance.sample_messages import Table
from subscriber.testing.compliance.scenarios import Scenarios

__all__ = ["scenarios"]

scenarios = Scenarios("failures")

_SECRET = "53CRET"


@scenarios.needing("constraints", "shared_tables")
async def duplicate_key(feed: Feed) -> None:
    """An INSERT of an existing key: earlier transactions stay. It and later ones are not applied until the row is deleted."""
    t = Table("t", "*id int4", "v")
    await feed.create(t)
    await feed.target.insert(t, [("2", _SECRET)])
    made = [
        feed.transaction(t.relation, t.insert(1, "a")),
        feed.transaction(t.insert(3, "b"), t.update(1, "c"), t.insert(2, _SECRET), t.insert(4, "d")),
        feed.transaction(t.insert(5, "e")),
    ]
    with refused(ApplyError, "the insert of a key that is there", sqlstate="23505") as caught:
        await feed.give(*made)
    text = caught.error.one_line()
    demand("public.t" in text, f"the error does not name the relation: {text}")
    demand(str(made[1].xid) in text and str(made[1].final_lsn) in text, f"the error names neither transaction nor LSN: {text}")
    demand(_SECRET not in text, "the error shows a row's value")
    equal(feed.sink.statistics.confl_insert_exists, 1, "insert_exists counted")
    await feed.expect(t, (1, "a"), (2, _SECRET))
    feed.given = made[0].end_lsn
    equal(await feed.position(), made[0].end_lsn, "the stored position")
    await feed.target.clear(t)
    await feed.target.insert(t, [("1", "a")])
    await feed.give(*made)
    await feed.expect(t, (1, "c"), (2, _SECRET), (3, "b"), (4, "d"), (5, "e"))


@scenarios.needing("constraints")
async def update_to_an_existing_key(feed: Feed) -> None:
    """An UPDATE changes a key to an existing one."""
    t = Table("t", "*id int4", "v")
    await feed.create(t)
    done = await feed.apply(t.relation, t.insert(1, "a"), t.insert(2, "b"))
    with refused(ApplyError, "an update to a key that is there", sqlstate="23505"):
        await feed.apply(t.insert(3, "c"), t.update(2, "a", old=(1, None)))
    await feed.expect(t, (1, "a"), (2, "b"))
    equal(await feed.position(), done.end_lsn, "the stored position")


@scenarios.needing("constraints")
async def not_null(feed: Feed) -> None:
    """NULL in a NOT NULL column, by INSERT and by UPDATE."""
    t = Table("t", "*id int4", "!v")
    await feed.create(t)
    done = await feed.apply(t.relation, t.insert(1, "a"))
    for change in (t.insert(2, None), t.update(1, None)):
        with refused(ApplyError, "NULL in a column that is NOT NULL", sqlstate="23502") as caught:
            await feed.apply(t.insert(7, "x"), change)
        text = caught.error.one_line()
        demand("public.t" in text and '"v"' in text, f"the error names neither relation nor column: {text}")
    await feed.expect(t, (1, "a"))
    equal(await feed.position(), done.end_lsn, "the stored position")


@scenarios.needing("constraints", "shared_tables")
async def resumes_after_an_error(feed: Feed) -> None:
    """The same sink, without being reopened, applies the transaction once the cause is fixed."""
    t = Table("t", "*id int4", "v")
    await feed.create(t)
    await feed.target.insert(t, [("1", "in the way")])
    made = feed.transaction(t.relation, t.insert(1, "a"))
    for _ in range(2):
        with refused(ApplyError, "the insert of a key that is there", sqlstate="23505"):
            await feed.give(made)
    await feed.target.clear(t)
    await feed.give(made, feed.transaction(t.insert(2, "b")))
    await feed.expect(t, (1, "a"), (2, "b"))


@scenarios.needing("given_tables")
async def missing_table(feed: Feed) -> None:
    """A table that the target does not have cannot be added to the subscription."""
    t = Table("nowhere", "*id int4")
    failed = await feed.opened.add_tables([t.name], TableEntry(TableState.INIT))
    equal(list(failed), [t.name], "the tables that were not added")
    demand("public.nowhere" in failed[t.name].one_line(), f"the error does not name it: {failed[t.name].one_line()}")
    equal(await feed.opened.tables(), {}, "the subscription's tables")


@scenarios.needing("given_tables")
async def missing_column(feed: Feed) -> None:
    """A column that the target's table lacks is named in the error. It is no error as long as the table does not change."""
    t, u = Table("t", "*id int4", relation_id=1), Table("u", "*id int4", relation_id=2)
    wider = Table("t", "*id int4", "more", relation_id=1)
    await feed.create(t, u)
    done = await feed.apply(u.relation, u.insert(1), wider.relation)
    with refused(RelationError, "a row with a column that the target has not") as caught:
        await feed.apply(u.insert(2), wider.insert(1, _SECRET))
    text = caught.error.one_line()
    demand("public.t" in text and '"more"' in text and _SECRET not in text, f"the error is not as it should be: {text}")
    await feed.expect(t)
    await feed.expect(u, (1,))
    equal(await feed.position(), done.end_lsn, "the stored position")


@scenarios.needing("constraints")
async def invalid_value(feed: Feed) -> None:
    """A text that is not valid for the column's type."""
    t = Table("t", "*id int4", "n int4")
    await feed.create(t)
    done = await feed.apply(t.relation, t.insert(1, 1))
    with refused(ApplyError, "a text for an integer") as caught:
        await feed.apply(t.insert(2, 2), t.insert(3, _SECRET))
    text = caught.error.one_line()
    demand("public.t" in text and '"n"' in text and _SECRET not in text, f"the error is not as it should be: {text}")
    await feed.expect(t, (1, 1))
    equal(await feed.position(), done.end_lsn, "the stored position")
