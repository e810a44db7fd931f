"""Changes of rows: their order, the identity of rows, and values that are not sent."""

from __future__ import annotations

from subscriber.errors import ProtocolError
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import LogicalMessage, Type
from subscriber.testing.compliance.assertions import demand, equal, refused
from subscriber.testing.compliance.feed import START, Feed, Spooled
from subscriber.testing.compliance.sample_messages import UNSENT, Table, truncate
from subscriber.testing.compliance.scenarios import Scenarios

__all__ = ["scenarios"]

scenarios = Scenarios("changes")


@scenarios
async def in_order(feed: Feed) -> None:
    """All kinds of change in one transaction. A deleted key is inserted again, and a key is changed."""
    t = Table("t", "*id int4", "v")
    await feed.create(t)
    done = await feed.apply(
        t.relation,
        t.insert(1, "a"),
        t.insert(2, "b"),
        t.update(1, "c"),
        t.delete(2, None),
        t.insert(2, None),
        t.update(3, None, old=(2, None)),
    )
    await feed.expect(t, (1, "c"), (3, None))
    counted = feed.sink.statistics
    equal((counted.transactions, counted.inserts, counted.updates, counted.deletes), (1, 3, 2, 1), "what was counted")
    equal((counted.confl_update_missing, counted.confl_delete_missing), (0, 0), "conflicts counted")
    equal(await feed.position(), done.end_lsn, "the stored position")


@scenarios
async def relations_stay_known(feed: Feed) -> None:
    """A relation is described once. The description applies until another one with other columns or another order."""
    before = Table("t", "*id int4", "v", "+w")
    after = Table("t", "w", "*id int4", "v")
    await feed.create(before)
    await feed.apply(before.relation, before.insert(1, "a"))
    await feed.apply(before.insert(2, "b"))
    await feed.apply(before.insert(3, "c"), after.relation, after.insert("x", 4, "d"))
    await feed.apply(after.update("y", 1, "a"))
    await feed.expect(before, (1, "a", "y"), (2, "b", None), (3, "c", None), (4, "d", "x"))


@scenarios.needing("given_tables", "shared_tables")
async def columns_by_name(feed: Feed) -> None:
    """The target has another order of columns, and additional columns. These get their defaults and are never changed."""
    t = Table("t", "+extra int4=7", "v", "*id int4", "+n int4=3")
    sent = Table("t", "*id int4", "v")
    await feed.create(t)
    await feed.apply(sent.relation, sent.insert(1, "a"), sent.insert(2, "b"))
    await feed.expect(t, (7, "a", 1, 3), (7, "b", 2, 3))
    await feed.target.clear(t)
    await feed.target.insert(t, [("100", "a", "1", "5")])
    await feed.apply(sent.update(1, "z"), sent.update(10, "z", old=(1, None)))
    await feed.expect(t, (100, "z", 10, 5))


@scenarios
async def streamed(feed: Feed) -> None:
    """The records of a transaction that was streamed carry the ids of its subtransactions."""
    t = Table("t", "*id int4", "v")
    await feed.create(t)
    await feed.give(feed.transaction(t.relation, t.insert(1, "a"), t.insert(2, "b"), t.update(1, "c"), t.delete(2, None), streamed=True))
    await feed.give(feed.transaction(t.insert(3, "d")))
    await feed.expect(t, (1, "c"), (3, "d"))


@scenarios
async def spooled(feed: Feed) -> None:
    """The first records of a large transaction are in a spool. Once it is durable, the spool is discarded."""
    t = Table("t", "*id int4", "v")
    await feed.create(t)
    changes = [t.insert(number, "x") for number in range(20)]
    large = feed.transaction(t.relation, *changes, t.update(0, "first"), t.delete(19, None), streamed=True, spilled=16)
    await feed.give(large)
    await feed.expect(t, (0, "first"), *((number, "x") for number in range(1, 19)))
    demand(isinstance(large.spool, Spooled) and large.spool.discarded > 0, "the spooled part was not discarded")


@scenarios
async def no_rows(feed: Feed) -> None:
    """Type descriptions and messages change no rows. An empty transaction still moves the position."""
    t = Table("t", "*id int4")
    await feed.create(t)
    message = LogicalMessage(True, Lsn(1), "prefix", b"content")
    await feed.apply(Type(99999, "public", "mood"), message, t.relation, t.insert(1))
    empty = await feed.apply()
    await feed.expect(t, (1,))
    equal(await feed.position(), empty.end_lsn, "the stored position")


@scenarios
async def unknown_relation(feed: Feed) -> None:
    """A row of a relation that was never described is a protocol error."""
    t = Table("t", "*id int4")
    await feed.create(t)
    for change in (t.insert(1), truncate(t)):
        with refused(ProtocolError, "a change of a relation that was never described") as caught:
            await feed.apply(change)
        equal(str(caught.error), "no relation map entry for remote relation ID 4711", "the error")
    equal(await feed.position(), START, "the stored position")


@scenarios
async def gate(feed: Feed) -> None:
    """Changes of tables for which the gate is closed are not applied. The gate may answer differently for the next batch."""
    open_one, closed_one = Table("t", "*id int4", relation_id=1), Table("u", "*id int4", relation_id=2)
    await feed.create(open_one, closed_one)
    await feed.apply(open_one.relation, closed_one.relation, closed_one.insert(7))
    await feed.shut(closed_one)
    await feed.apply(open_one.insert(1), closed_one.insert(1), closed_one.delete(7))
    await feed.expect(open_one, (1,))
    await feed.expect(closed_one, (7,))
    await feed.take_over(closed_one)
    await feed.apply(closed_one.insert(2))
    await feed.expect(closed_one, (2,), (7,))


@scenarios
async def unsent_values(feed: Feed) -> None:
    """A large value that an UPDATE did not change is not sent: the target keeps the stored value."""
    t = Table("t", "*id int4", "big", "v int4", "w")
    await feed.create(t)
    await feed.apply(t.relation, t.insert(1, "long", 1, "w"), t.insert(2, "longer", 2, "w"))
    await feed.apply(
        t.update(1, UNSENT, 5, "x"),
        t.update(3, UNSENT, 6, UNSENT, old=(2, None, None, None)),
        t.update(1, UNSENT, UNSENT, "z"),
    )
    await feed.expect(t, (1, "long", 5, "z"), (3, "longer", 6, "w"))
    await feed.apply(t.update(1, "new", UNSENT, "y"))
    await feed.expect(t, (1, "new", 5, "y"), (3, "longer", 6, "w"))


@scenarios
async def nothing_to_set(feed: Feed) -> None:
    """An UPDATE without changes, of a table that has only its key."""
    t = Table("t", "*id int4")
    await feed.create(t)
    await feed.apply(t.relation, t.insert(1), t.update(1), t.update(1, old=(1,)), t.update(UNSENT, old=(1,)))
    await feed.expect(t, (1,))
    equal(feed.sink.statistics.updates, 3, "updates counted")


@scenarios
async def keys_move(feed: Feed) -> None:
    """Two rows exchange their keys by way of a third key."""
    t = Table("t", "*a int4", "*b int4", "v")
    await feed.create(t)
    await feed.apply(t.relation, t.insert(1, 1, "x"), t.insert(2, 2, "y"))
    await feed.apply(
        t.update(9, 9, "x", old=(1, 1, None)),
        t.update(1, 1, "y", old=(2, 2, None)),
        t.update(2, 2, "x", old=(9, 9, None)),
    )
    await feed.expect(t, (1, 1, "y"), (2, 2, "x"))


@scenarios
async def text_keys(feed: Feed) -> None:
    """Keys that differ in case, accents or a trailing blank are different keys."""
    t = Table("t", "*id", "v int4")
    await feed.create(t)
    keys = ["a", "A", "ä", "a ", "", "ß", "ss", "\N{GREEK SMALL LETTER ALPHA}", "\N{GRINNING FACE}", "%", "a'b\"c\\"]
    await feed.apply(t.relation, *(t.insert(key, number) for number, key in enumerate(keys)))
    await feed.expect(t, *((key, number) for number, key in enumerate(keys)))
    await feed.apply(t.update("A", 100), t.delete("a ", None), t.update("", 101))
    left = {key: number for number, key in enumerate(keys)} | {"A": 100, "": 101}
    del left["a "]
    await feed.expect(t, *left.items())


@scenarios
async def missing_rows(feed: Feed) -> None:
    """An UPDATE or DELETE of a missing row is skipped and counted."""
    t, f = Table("t", "*id int4", "v", relation_id=1), Table("f", "id int4", "v", full=True, relation_id=2)
    await feed.create(t, f)
    done = await feed.apply(
        t.relation,
        f.relation,
        t.update(1, "x"),
        t.delete(2, None),
        f.update(3, "y", old=(3, "x")),
        f.delete(4, None),
        t.update(5, "x", old=(4, None)),
        t.insert(9, "stays"),
    )
    await feed.expect(t, (9, "stays"))
    await feed.expect(f)
    counted = feed.sink.statistics
    if feed.target.traits.counts_missing:
        equal((counted.confl_update_missing, counted.confl_delete_missing), (3, 2), "missing rows counted")
    equal(await feed.position(), done.end_lsn, "the stored position")


@scenarios
async def whole_row_identity(feed: Feed) -> None:
    """REPLICA IDENTITY FULL without a key: the whole row identifies it, NULLs are equal, and one of several duplicates is changed."""
    f = Table("f", "a int4", "b", full=True)
    await feed.create(f)
    await feed.apply(f.relation, *(f.insert(*values) for values in [(1, "x"), (1, "x"), (1, "x"), (None, None), (None, "x"), (2, None)]))
    await feed.apply(f.update(1, "y", old=(1, "x")), f.delete(1, "x"), f.delete(None, None), f.update(2, "z", old=(2, None)))
    await feed.expect(f, (1, "x"), (1, "y"), (None, "x"), (2, "z"))
    equal(feed.sink.statistics.confl_update_missing + feed.sink.statistics.confl_delete_missing, 0, "missing rows counted")


@scenarios
async def whole_row_identity_with_unsent_values(feed: Feed) -> None:
    """The old row is complete; the new one may lack unchanged values."""
    f = Table("f", "a int4", "big", full=True)
    await feed.create(f)
    await feed.apply(f.relation, f.insert(1, "long"), f.insert(2, "longer"))
    await feed.apply(f.update(3, UNSENT, old=(1, "long")))
    await feed.expect(f, (3, "long"), (2, "longer"))


@scenarios.needing("shared_tables")
async def whole_row_identity_with_a_key(feed: Feed) -> None:
    """REPLICA IDENTITY FULL, and the target has a primary key: the key finds the row, even if the target has changed other columns."""
    t = Table("t", "*id int4", "v", full=True)
    await feed.create(t)
    await feed.target.insert(t, [("1", "changed here"), ("2", "changed here"), ("3", "changed here")])
    await feed.apply(t.relation, t.update(1, "a", old=(1, "x")), t.delete(2, "x"), t.update(4, "b", old=(3, "x")))
    await feed.expect(t, (1, "a"), (4, "b"))


@scenarios
async def key_behind_other_columns(feed: Feed) -> None:
    """The key columns are not the first ones, and not in the order of the table."""
    t = Table("t", "v", "*code", "n int4", "*id int4")
    await feed.create(t)
    await feed.apply(t.relation, t.insert("x", "a", 1, 1), t.insert("y", "a", 2, 2), t.insert("z", "b", 3, 1))
    await feed.apply(t.update("X", "a", None, 1), t.delete(None, "b", None, 1), t.update("Y", "c", 2, 3, old=(None, "a", None, 2)))
    await feed.expect(t, ("X", "a", None, 1), ("Y", "c", 2, 3))


@scenarios
async def truncation(feed: Feed) -> None:
    """TRUNCATE of two tables in the middle of a transaction. A table for which the gate is closed does not change."""
    t, u, v = (Table(name, "*id int4", relation_id=number) for number, name in enumerate("tuv", 1))
    await feed.create(t, u, v)
    await feed.apply(*(each.relation for each in (t, u, v)), *(each.insert(number) for each in (t, u, v) for number in range(5)))
    await feed.shut(v)
    await feed.apply(t.insert(10), truncate(t, u, v), t.insert(11))
    await feed.expect(t, (11,))
    await feed.expect(u)
    await feed.expect(v, *((number,) for number in range(5)))
    equal(feed.sink.statistics.truncates, 1, "TRUNCATEs counted")
