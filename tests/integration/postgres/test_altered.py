"""The PostgreSQL sink: tables of the target that are altered, replaced or dropped while it runs."""

from __future__ import annotations

import asyncio
import re
import time

import pytest

from subscriber.errors import RelationError, TargetUnavailable
from subscriber.interfaces import TableEntry, TableName, TableState
from subscriber.protocol.lsn import Lsn
from tests.support.database import WAIT_SECONDS, Database
from tests.support.observation import until
from tests.support.replica import replica
from tests.support.sink_postgres import START, Feed, Remote, opened, truncate

PRECISE = "1.23456789012"


async def test_values_go_through_the_new_type(any_target_db: Database) -> None:
    """The old one would round, and cut off blanks, without any error."""
    any_target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v real, c char(5)); CREATE TABLE u (id int PRIMARY KEY)")
    remote, other = Remote("t", "*id", "v", "c"), Remote("u", "*id", relation_id=2)
    async with opened(any_target_db) as feed:
        await feed.apply(remote.relation, other.relation, remote.insert(1, "1", "a"), remote.update(1, "2", "a"), other.insert(1))
        any_target_db.execute("ALTER TABLE t ALTER v TYPE float8, ALTER c TYPE text")
        await feed.apply(remote.insert(2, PRECISE, "ab   "))
        any_target_db.execute("ALTER TABLE t ALTER v TYPE numeric")
        await feed.opened.apply(
            feed.batch(
                feed.transaction(other.insert(2)),
                feed.transaction(remote.update(1, PRECISE + "000000000000001", " b ")),
                feed.transaction(remote.insert(3, "3", None)),
            )
        )
        assert any_target_db.fetch("SELECT id, v::text, c FROM t ORDER BY id") == [
            (1, PRECISE + "000000000000001", " b "),
            (2, PRECISE, "ab   "),
            (3, "3", None),
        ]
        assert any_target_db.fetch("SELECT id FROM u ORDER BY id") == [(1,), (2,)]
        counted = feed.sink.statistics
        assert (counted.transactions, counted.inserts, counted.updates) == (5, 5, 2), "what was rolled back does not count"


async def test_table_altered_while_a_batch_waits_for_it(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v real)")
    remote = Remote("t", "*id", "v")
    async with opened(target_db) as feed:
        feed.subscribe("public", "t")
        with target_db.connect() as other:
            other.execute("BEGIN; ALTER TABLE t ALTER v TYPE float8")
            # its table is read as it was before, for the first time
            applying = asyncio.create_task(feed.apply(remote.relation, remote.insert(1, PRECISE)))
            waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 't'::regclass"
            while not (await asyncio.to_thread(target_db.value, waiting)):
                await asyncio.sleep(0.01)
            other.execute("COMMIT")
        await applying
        assert target_db.fetch("SELECT id, v::text FROM t") == [(1, PRECISE)]


async def test_own_truncate_is_no_alteration(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id serial PRIMARY KEY)")
    remote = Remote("t", "*id")
    async with opened(target_db) as feed:
        await feed.apply(remote.relation, remote.insert(1), truncate(remote, restart=True), remote.insert(2))
        # what a superuser's maintenance does to the catalog is none either
        for maintenance in ("VACUUM FULL t", "ANALYZE t", "REINDEX TABLE t", "GRANT SELECT ON t TO PUBLIC"):
            target_db.execute(maintenance)
        await feed.apply(remote.insert(3), truncate(remote), remote.insert(4))
        assert target_db.fetch("SELECT id FROM t") == [(4,)]
        assert feed.sink.statistics.truncates == 2


async def test_dropped_key_is_noticed(target_db: Database) -> None:
    """By the old key the UPDATE would change both rows."""
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    remote = Remote("t", "*id", "v")
    async with opened(target_db) as feed:
        await feed.apply(remote.relation, remote.insert(1, "a"), remote.update(1, "b"))
        target_db.execute("ALTER TABLE t DROP CONSTRAINT t_pkey; INSERT INTO t VALUES (1, 'b')")
        with pytest.raises(RelationError, match="neither REPLICA IDENTITY index nor PRIMARY KEY"):
            await feed.apply(remote.update(1, "c"))
        assert target_db.fetch("SELECT v FROM t") == [("b",), ("b",)]


@pytest.mark.parametrize(
    "ddl",
    [
        "ALTER TABLE t RENAME TO t_old; CREATE TABLE t (id int PRIMARY KEY)",
        "DROP TABLE t; CREATE TABLE t (id int PRIMARY KEY)",
        "ALTER SCHEMA public RENAME TO gone; CREATE SCHEMA public; CREATE TABLE public.t (id int PRIMARY KEY)",
    ],
)
async def test_replaced_table_is_not_followed_by_its_name(target_db: Database, ddl: str) -> None:
    """Natively its changes are left out, and are lost. The bug was that they still were after the old table had its name back."""
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    remote = Remote("t", "*id")
    async with opened(target_db) as feed:
        await feed.apply(remote.relation, remote.insert(1))
        before = feed.position()
        target_db.execute(ddl)
        for _ in range(2):
            with pytest.raises(RelationError, match=r'table "public\.t" of the target was replaced by another one') as caught:
                await feed.apply(remote.insert(2))
            assert "start the run again" in (caught.value.hint or "")
        assert (feed.position(), target_db.fetch("SELECT * FROM public.t")) == (before, [])
        if "t_old" in ddl:
            target_db.execute("ALTER TABLE t RENAME TO t_new; ALTER TABLE t_old RENAME TO t")
        else:
            feed.subscribe("public", "t")
        await feed.apply(remote.insert(2))
        assert target_db.fetch("SELECT * FROM public.t") == ([(1,), (2,)] if "t_old" in ddl else [(2,)])


async def test_table_in_the_way_of_a_renamed_one(target_db: Database) -> None:
    """Changes of a table that is not of the subscription are left out, until the subscription's table has that name.

    The bug was that this was noticed only at the next Relation message.
    """
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (id int PRIMARY KEY)")
    async with opened(target_db) as feed:
        await feed.apply(Remote("t", "*id").relation, Remote("t", "*id").insert(1))
        target_db.execute("DELETE FROM subscriber.pg_subscription_rel WHERE srrelid = 'u'::regclass")
        feed.closed = {"public.u"}
        renamed = Remote("u", "*id")
        await feed.apply(renamed.relation, renamed.insert(2))
        target_db.execute("ALTER TABLE u RENAME TO other; ALTER TABLE t RENAME TO u")
        await feed.apply(renamed.insert(3))
        assert target_db.fetch("SELECT id FROM u ORDER BY id") == [(1,), (3,)]


async def test_renamed_table_is_followed_by_its_oid(target_db: Database) -> None:
    """The rooms above know the old name still: their gate is closed for the new one."""
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    async with opened(target_db) as feed:
        await feed.apply(Remote("t", "*id").relation, Remote("t", "*id").insert(1))
        target_db.execute("CREATE SCHEMA s; ALTER TABLE t RENAME TO u; ALTER TABLE u SET SCHEMA s")
        feed.closed = {"s.u"}
        renamed = Remote("u", "*id", namespace="s")
        await feed.apply(renamed.relation, renamed.insert(2))
        assert target_db.fetch("SELECT id FROM s.u ORDER BY id") == [(1,), (2,)]
        # synchronized up to an LSN: earlier changes are the synchronization's
        done = await feed.apply(renamed.insert(3))
        later = Lsn(done.end_lsn + 10_000)
        target_db.execute(f"UPDATE subscriber.pg_subscription_rel SET srsubstate = 's', srsublsn = '{later}'")
        await feed.apply(renamed.insert(4))
        feed.lsn = int(later)
        await feed.apply(renamed.insert(5))
        assert target_db.fetch("SELECT id FROM s.u ORDER BY id") == [(1,), (2,), (3,), (5,)]
        target_db.execute("UPDATE subscriber.pg_subscription_rel SET srsubstate = 'i'")
        await feed.apply(renamed.insert(6))
        assert target_db.value("SELECT count(*) FROM s.u") == 4


async def test_skipped_change_needs_its_table(target_db: Database) -> None:
    target_db.execute("CREATE TABLE a (id int PRIMARY KEY)")
    a, nowhere = Remote("a", "*id"), Remote("nowhere", "*id", relation_id=2)
    async with opened(target_db) as feed:
        feed.closed = {"public.nowhere"}
        for change, kind in ((nowhere.delete(1), "DELETE"), (truncate(a, nowhere), "TRUNCATE")):
            with pytest.raises(RelationError, match=r'^logical replication target relation "public.nowhere" does not exist\n') as caught:
                await feed.apply(a.relation, nowhere.relation, a.insert(1), change)
            assert f'during message type "{kind}"' in caught.value.one_line()
            assert feed.position() == START
        target_db.execute("CREATE TABLE nowhere (other int)")
        await feed.apply(a.relation, nowhere.relation, a.insert(1), nowhere.insert(1), truncate(a, nowhere), a.insert(2))
        assert target_db.fetch("SELECT id FROM a") == [(2,)]
        assert feed.sink.statistics.skipped_tables == {"public.nowhere"}


async def test_table_dropped_before_it_is_ready(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (id int PRIMARY KEY)")
    t, u = TableName("public", "t"), TableName("public", "u")
    async with opened(target_db) as feed:
        for table in (t, u):
            await feed.opened.add_tables([table], TableEntry(TableState.SYNCDONE, START))
        target_db.execute("DROP TABLE t")
        for table in (t, u):
            await feed.opened.set_ready({table: START})
        assert await feed.opened.tables() == {u: TableEntry(TableState.READY, START)}


async def test_rolled_back_conflicts_are_not_logged_and_repeated_ones_are_counted(
    target_db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v int)")
    remote = Remote("t", "*id", "v")
    feed = Feed(target_db)
    began = time.monotonic()
    await feed.open()
    try:
        await feed.apply(remote.relation, remote.insert(0, 0))
        missing = feed.transaction(*(remote.update(number, 1) for number in range(1, 101)))
        with pytest.raises(Exception, match="duplicate key"):
            await feed.opened.apply(feed.batch(missing, feed.transaction(remote.delete(1, None), remote.insert(0, 0))))
        lines = [record.message for record in caplog.records]
        assert lines == [
            'conflict detected on relation "public.t": conflict=update_missing: Could not find the row to be updated (100 rows).'
            " Replica identity (id)."
        ]
        for number in range(1, 51):
            await feed.apply(remote.delete(number, None))
    finally:
        await feed.opened.close()
    texts = [record.message for record in caplog.records if "conflict" in record.message]
    assert len(texts) < 9 + time.monotonic() - began, "one line at once, and one a second"
    counted = feed.sink.statistics
    assert (counted.confl_update_missing, counted.confl_delete_missing) == (100, 50)
    logged = sum(int(found[1]) if (found := re.search(r"\((\d+) rows\)", text)) else 1 for text in texts)
    assert logged == 150, "what waited is logged when the sink closes"


def terminate_reader(target: Database, application_name: str) -> None:
    """End the session that asks how far the target's WAL is flushed, and wait until it has gone."""
    named = f"FROM pg_stat_activity WHERE datname = current_database() AND application_name = '{application_name}'"
    target.wait(f"SELECT count(*) {named}", 2)
    # the other one, which applies, has the writer's lock
    pid = target.value(f"SELECT pid {named} AND pid NOT IN (SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted)")
    target.execute(f"SELECT pg_terminate_backend({pid})")
    target.wait(f"SELECT count(*) FROM pg_stat_activity WHERE pid = {pid}", 0)


async def test_next_call_reports_the_lost_reader(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    remote = Remote("t", "*id")
    async with opened(target_db, synchronous_commit="off") as feed:
        done = await feed.apply(remote.relation, remote.insert(1))
        while feed.durable[-1:] != [done.end_lsn]:
            await asyncio.sleep(0.01)
        terminate_reader(target_db, "sub")
        before, done = done, await feed.apply(remote.insert(2))
        raised: list[TargetUnavailable] = []
        async with asyncio.timeout(WAIT_SECONDS):
            while not raised:
                await asyncio.sleep(0.02)
                try:
                    # passed over, being there already
                    await feed.opened.apply(feed.batch(done))
                except TargetUnavailable as error:
                    raised.append(error)
        assert "durability of commits is unknown" in str(raised[0])
        for call in (feed.opened.advance(done.end_lsn), feed.apply(remote.insert(3)), feed.prepare(remote.insert(3))):
            with pytest.raises(TargetUnavailable, match="durability of commits is unknown"):
                await call
        assert feed.durable[-1] == before.end_lsn
        await feed.opened.close()
        assert feed.durable[-1] == done.end_lsn, "closing makes it durable"


async def test_stream_recovers_from_a_lost_reader(publisher18_db: Database, target_db: Database) -> None:
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t")
    async with replica(publisher18_db, target_db) as following:
        await following.caught_up()
        states = "SELECT srsubstate::text FROM subscriber.pg_subscription_rel"
        await asyncio.to_thread(target_db.wait, states, "r")
        publisher18_db.execute("INSERT INTO t VALUES (1)")
        await following.same("SELECT id FROM t")
        terminate_reader(target_db, f"replica_{publisher18_db.name}")
        publisher18_db.execute("INSERT INTO t VALUES (2)")
        assert await following.same("SELECT id FROM t ORDER BY id") == [(1,), (2,)]
        publisher18_db.execute("INSERT INTO t VALUES (3)")
        assert await following.same("SELECT id FROM t ORDER BY id") == [(1,), (2,), (3,)]


async def test_replaced_table_is_copied_by_the_next_run(publisher18_db: Database, target_db: Database) -> None:
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t; INSERT INTO t VALUES (1)")
    async with replica(publisher18_db, target_db) as following:
        await following.same("SELECT id FROM t")
        await asyncio.to_thread(target_db.wait, "SELECT srsubstate::text FROM subscriber.pg_subscription_rel", "r")
        target_db.execute("ALTER TABLE t RENAME TO t_old; CREATE TABLE t (id int PRIMARY KEY)")
        publisher18_db.execute("INSERT INTO t VALUES (2)")
        await until(lambda: isinstance(following.subscription.status.last_error, RelationError), "the table was replaced")
        assert target_db.fetch("SELECT id FROM t") == []
        await following.stop()
        async with replica(publisher18_db, target_db) as again:
            assert await again.same("SELECT id FROM t ORDER BY id") == [(1,), (2,)]
            publisher18_db.execute("INSERT INTO t VALUES (3)")
            assert await again.same("SELECT id FROM t ORDER BY id") == [(1,), (2,), (3,)]
            assert target_db.fetch("SELECT id FROM t_old") == [(1,)]


async def test_renamed_on_both_sides_while_it_is_followed(
    publisher18_db: Database, target_db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE v (id int PRIMARY KEY)")
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t, v; INSERT INTO t VALUES (1)")
    async with replica(publisher18_db, target_db) as following:
        await following.same("SELECT id FROM t")
        ready = "SELECT count(*) FROM subscriber.pg_subscription_rel WHERE srsubstate = 'r'"
        await asyncio.to_thread(target_db.wait, ready, 2)
        for database in (target_db, publisher18_db):
            database.execute("ALTER TABLE t RENAME TO u; CREATE SCHEMA s; ALTER TABLE v SET SCHEMA s")
        publisher18_db.execute("INSERT INTO u VALUES (2); INSERT INTO s.v VALUES (1)")
        assert await following.same("SELECT id FROM u ORDER BY id") == [(1,), (2,)]
        assert await following.same("SELECT id FROM s.v") == [(1,)]
        assert "left out" not in caplog.text
        # a dropped one leaves the subscription
        target_db.execute("DROP TABLE u")
        await asyncio.to_thread(target_db.wait, "SELECT count(*) FROM subscriber.pg_subscription_rel", 1)
