"""The subscription's tables and their states."""

from __future__ import annotations

from dataclasses import replace

from subscriber.interfaces import ParkingSink, SyncMode, TableEntry, TableName, TableState
from subscriber.protocol.lsn import Lsn
from subscriber.testing.compliance.assertions import equal
from subscriber.testing.compliance.feed import Feed
from subscriber.testing.compliance.sample_messages import Table
from subscriber.testing.compliance.scenarios import Scenarios

__all__ = ["scenarios"]

scenarios = Scenarios("tables")


@scenarios
async def tables_are_added_and_removed(feed: Feed) -> None:
    """Tables are added with their state, the next process reads them, and they are removed; their rows stay."""
    t, u = Table("t", "*id int4", relation_id=1), Table("u", "*id int4", relation_id=2)
    equal(await feed.opened.tables(), {}, "tables of a new subscription")
    await feed.begin(TableState.INIT, t)
    await feed.begin(TableState.READY, u)
    await feed.reopen()
    equal(await feed.opened.tables(), {t.name: TableEntry(TableState.INIT), u.name: TableEntry(TableState.READY)}, "its tables")
    await feed.apply(u.relation, u.insert(1))
    await feed.opened.remove_table(u.name)
    equal(await feed.opened.tables(), {t.name: TableEntry(TableState.INIT)}, "what is left")
    await feed.expect(u, (1,))
    await feed.opened.add_tables([u.name], TableEntry(TableState.READY))
    await feed.apply(u.insert(2))
    await feed.expect(u, (1,), (2,))


@scenarios
async def names(feed: Feed) -> None:
    """Names of tables, columns and schemas with blanks, quotes, capitals and letters of any alphabet."""
    quoted = Table('Größe "of" it', "*Der Schlüssel int4", 'a "quoted" name', "%s :p", relation_id=1)
    capital = Table("T", "*ID int4", "select", relation_id=2)
    await feed.create(quoted, capital)
    await feed.apply(quoted.relation, capital.relation, quoted.insert(1, "a", "b"), capital.insert(1, "x"), capital.insert(2, "y"))
    await feed.apply(quoted.update(2, "c", None, old=(1, None, None)), capital.update(1, "z"), capital.delete(2, None))
    await feed.expect(quoted, (2, "c", None))
    await feed.expect(capital, (1, "z"))


@scenarios
async def ready_after_synchronized(feed: Feed) -> None:
    """A table becomes ready when the apply worker has passed its LSN. Tables in other states do not."""
    t, u = Table("t", "*id int4", relation_id=1), Table("u", "*id int4", relation_id=2)
    await feed.begin(TableState.INIT, t)
    await feed.begin(TableState.SYNCDONE, u)
    await feed.opened.set_ready({t.name: Lsn(0x1500)})
    await feed.opened.set_ready({u.name: Lsn(0x1500)})
    await feed.reopen()
    found = await feed.opened.tables()
    equal(found[t.name].state, TableState.INIT, "a table that was not synchronized")
    equal(found[u.name], TableEntry(TableState.READY, Lsn(0x1500)), "a table that was")


@scenarios.needing("parking")
async def parked_and_reconciled(feed: Feed) -> None:
    """The next process knows a parked table and the reason. It goes back to INIT, to be reconciled."""
    t, u, missing = Table("t", "*id int4", relation_id=1), Table("u", "*id int4", relation_id=2), TableName("public", "missing")
    await feed.create(t, u)
    await feed.apply(t.relation, u.relation, t.insert(1), u.insert(1))
    assert isinstance(feed.opened, ParkingSink)
    entry = TableEntry(TableState.PARKED, Lsn(0x1500), error='relation "t" has a "Prüfbedingung"', since=1_800_000_000.25)
    equal(set(await feed.opened.park({t.name: entry, missing: entry})), {t.name}, "the tables that are parked")
    feed.closed.add(t.name)
    await feed.apply(t.insert(2), u.insert(2))
    await feed.reopen()
    found = await feed.opened.tables()
    equal((found[t.name], found[u.name].state), (entry, TableState.READY), "the states in the next process")
    await feed.expect(t, (1,))
    await feed.expect(u, (1,), (2,))
    assert isinstance(feed.opened, ParkingSink)
    again = TableEntry(TableState.INIT, mode=SyncMode.RECONCILE)
    equal(await feed.opened.reconcile([t.name, u.name, missing]), {t.name: again}, "the tables that are reconciled")
    await feed.reopen()
    equal((await feed.opened.tables())[t.name], again, "the state of a table that is to be reconciled")
    assert isinstance(feed.opened, ParkingSink)
    later = TableEntry(TableState.PARKED, Lsn(0x2000), error="again", since=1_900_000_000.25)
    still = replace(entry, error="again")
    equal(await feed.opened.park({t.name: later}), {t.name: still}, "a table that was parked before keeps its LSN and time")
    await feed.reopen()
    equal((await feed.opened.tables())[t.name], still, "its state in the next process")
