"""Table synchronization by a whole subscription: parts, catch-up, handover, columns, publications that change, tables that fail."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace as changed

import pytest

from subscriber import ApplyError, PublisherError, RelationError, TableName, TableState, Until
from subscriber.errors import CopyOutdated
from subscriber.subscription.run.tables.copy_source import PublisherSource
from tests.support.database import Database
from tests.support.observation import eventually
from tests.support.replica import QUICK, Replica, replica, subscription_of
from tests.support.row_gates import closed_gates, make_row_gate, open_transaction, wait_for_state, waiting_at_gate, waiting_for_lock_on
from tests.support.table_synchronization import IN_PARTS, SLOTS, STATES, only_the_main_slot

COPIED_ALONE = "SELECT count(*) FROM subscriber.pg_subscription_rel WHERE srsubstate = 'd'"


@contextlib.contextmanager
def writing(publisher: Database) -> Iterator[threading.Event]:
    """Transactions on the tables big and log, one after another, while the block lasts; the event is set once some are committed."""
    stop, some = threading.Event(), threading.Event()
    failed: list[BaseException] = []

    def write() -> None:
        with publisher.connect() as connection:
            number = 0
            while not stop.is_set():
                number += 1
                # a row changed, one moved to another key, one gone, one new; and a witness without a key
                connection.execute(
                    f"BEGIN; UPDATE big SET v = v || '+' WHERE id = {number * 7 % 2000 + 1};"
                    f"UPDATE big SET id = {100000 + number} WHERE id = {number * 11 % 2000 + 1};"
                    f"DELETE FROM big WHERE id = {number * 13 % 2000 + 1};"
                    f"INSERT INTO big VALUES ({200000 + number}, 'new'); INSERT INTO log VALUES ({number}); COMMIT".encode()
                )
                if number == 20:
                    some.set()
                # no faster than a subscriber on a busy machine can follow
                stop.wait(0.005)

    def guarded() -> None:
        try:
            write()
        except BaseException as error:
            failed.append(error)
            some.set()
            raise

    writer = threading.Thread(target=guarded)
    writer.start()
    try:
        yield some
    finally:
        stop.set()
        writer.join()
    assert not failed


@pytest.mark.matrix
async def test_parts_of_a_large_table_under_concurrent_writes(publisher_db: Database, target_db: Database) -> None:
    for database in (publisher_db, target_db):
        database.execute("CREATE TABLE big (id int PRIMARY KEY, v text); CREATE TABLE log (n int); CREATE TABLE calm (id int PRIMARY KEY)")
    publisher_db.execute("INSERT INTO big SELECT i, repeat('x', 200) FROM generate_series(1, 6000) AS i; INSERT INTO calm VALUES (1), (2)")
    publisher_db.execute("INSERT INTO log SELECT -i FROM generate_series(1, 5000) AS i")
    publisher_db.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    with writing(publisher_db) as some, open_transaction(target_db, "LOCK TABLE big, log IN SHARE MODE") as release:
        async with replica(publisher_db, target_db, settings=IN_PARTS) as copying:
            # three sessions copy one table (one, where none can read a range alone); what is written from here on is behind their snapshot
            in_ranges = publisher_db.version >= 14
            await eventually(target_db, waiting_for_lock_on("big"), 3 if in_ranges else 1)
            await asyncio.to_thread(some.wait, 30)
            assert target_db.value("SELECT count(*) FROM big") == 0
            release()
            await copying.caught_up()
            # each part was a transaction of its own (rows that are never changed show it)
            blocks = publisher_db.value("SELECT pg_relation_size('big') / 8192")
            parts = target_db.value("SELECT count(DISTINCT xmin::text) FROM big WHERE id BETWEEN 2001 AND 6000")
            assert 10 < parts <= blocks // 8 + 1 if in_ranges else parts == 1
    # the writer has ended: all of it, once
    async with replica(publisher_db, target_db, settings=IN_PARTS) as after:
        await after.same("SELECT id, v FROM big ORDER BY id")
        witnesses = await after.same("SELECT n, count(*) FROM log GROUP BY n ORDER BY n")
        assert {count for _, count in witnesses} == {1}
        await after.same("SELECT id FROM calm ORDER BY id")
        await eventually(target_db, "SELECT count(*) FROM subscriber.pg_subscription_rel WHERE srsubstate = 'r'", 3)
        assert after.subscription.status.last_error is None
    assert only_the_main_slot(publisher_db)
    assert target_db.value("SELECT count(*) FROM subscriber.copy_part") == 0
    assert target_db.fetch('SELECT srrelid::int FROM subscriber."position"') == [(0,)]


async def test_a_few_tables_at_a_time(publisher18_db: Database, target_db: Database) -> None:
    names = [f"t{i}" for i in range(7)]
    for database in (publisher18_db, target_db):
        database.execute("".join(f"CREATE TABLE {name} (id int PRIMARY KEY);" for name in names))
    publisher18_db.execute("".join(f"INSERT INTO {name} VALUES (1), (2);" for name in names) + "CREATE PUBLICATION pub FOR ALL TABLES")
    settings = changed(QUICK, max_sync_workers_per_subscription=3)
    with open_transaction(target_db, f"LOCK TABLE {', '.join(names)} IN SHARE MODE") as release:
        async with replica(publisher18_db, target_db, settings=settings) as some:
            waiting = " + ".join(f"({waiting_for_lock_on(name)})" for name in names)
            await eventually(target_db, f"SELECT {waiting}", 3)
            # as a group the tables are given up soon, because they are locked; then each is waited for alone
            await eventually(target_db, COPIED_ALONE, 3)
            # the change of a table that is not copied yet is of no concern to the apply worker, and comes with its copy
            publisher18_db.execute("INSERT INTO t6 VALUES (3); INSERT INTO t0 VALUES (3)")
            release()
            for name in names:
                assert len(await some.same(f"SELECT id FROM {name} ORDER BY id")) == (3 if name in {"t0", "t6"} else 2)
            await eventually(target_db, "SELECT DISTINCT srsubstate::text FROM subscriber.pg_subscription_rel", [("r",)])
    assert only_the_main_slot(publisher18_db)


async def test_a_run_that_ends_leaves_no_slot_behind(
    publisher18_db: Database, target_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug was that a run that ended with its last table's synchronization did not wait for that table's slot to be dropped."""
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    publisher18_db.execute("INSERT INTO t VALUES (1); CREATE PUBLICATION pub FOR ALL TABLES")
    subscription = subscription_of(publisher18_db, target_db)
    drop_slot = PublisherSource.drop_slot
    ended_first = []

    async def drop_late(source: PublisherSource, slot_name: str) -> None:
        if subscription.status.tables[TableName("public", "t")].state is TableState.SYNCDONE:
            while subscription.status.streaming:
                await asyncio.sleep(0.01)
            ended_first.append(slot_name)
        await drop_slot(source, slot_name)

    monkeypatch.setattr(PublisherSource, "drop_slot", drop_late)
    await subscription.run(Until())
    assert len(ended_first) == 1
    assert only_the_main_slot(publisher18_db)
    assert target_db.fetch("SELECT id FROM t") == [(1,)]


@pytest.mark.parametrize("binary", [False, pytest.param(True, marks=pytest.mark.matrix)])
async def test_text_and_binary_copies(publisher_db: Database, target_db: Database, binary: bool) -> None:
    for database in (publisher_db, target_db):
        database.execute("CREATE TABLE t (id int PRIMARY KEY, a bytea, b numeric, c timestamptz, d text[], e jsonb, f text)")
        database.execute(f"CREATE TABLE w (id {'int' if database is publisher_db else 'bigint'} PRIMARY KEY)")
    publisher_db.execute(r"""
        INSERT INTO t VALUES (1, '\x00ff0a09', 'NaN', 'infinity', '{a,NULL,"b\\c"}', '{"k": [1, null]}', E'tab\t nl\n \\N \\. é'),
                             (2, NULL, -1234567890.000120, '0044-03-15 12:00:00 BC', '{}', NULL, ''), (3, '', 0, now(), NULL, '1', NULL)""")
    publisher_db.execute("CREATE PUBLICATION pub FOR TABLE t; CREATE PUBLICATION wide FOR TABLE w; INSERT INTO w VALUES (1)")
    async with replica(publisher_db, target_db, binary=binary) as copied:
        assert len(await copied.same("SELECT t::text FROM t ORDER BY id")) == 3
        publisher_db.execute("UPDATE t SET id = id + 10; INSERT INTO t SELECT id - 10, a, b, c, d, e, f FROM t")
        assert len(await copied.same("SELECT t::text FROM t ORDER BY id")) == 6
        assert copied.subscription.status.last_error is None
    # what tells the formats apart: binary wants the same type on both sides
    wide = subscription_of(publisher_db, target_db, name="wide", publications=["wide"], binary=binary)
    # as natively: copies are binary from 16 on, the stream is from 14 on
    if binary and publisher_db.version >= 16:
        with pytest.raises(ApplyError, match="incorrect binary data format"):
            await wide.run(Until())
        assert target_db.value("SELECT count(*) FROM w") == 0
    else:
        await wide.run(Until())
        assert target_db.fetch("SELECT id FROM w") == [(1,)]
    if binary and publisher_db.version >= 14:
        following = subscription_of(publisher_db, target_db, name="other", publications=["wide"], binary=True, copy_data=False)
        await following.run(Until())
        publisher_db.execute("INSERT INTO w VALUES (2)")
        with pytest.raises(ApplyError, match="incorrect binary data format"):
            await following.run(Until())


@pytest.mark.matrix
async def test_columns_of_both_sides(publisher_db: Database, target_db: Database) -> None:
    """A column list, another order, extra columns of the target with defaults, generated columns on either side."""
    publisher_db.execute("""
        CREATE TABLE t (id int PRIMARY KEY, a text, secret text, b int, "odd ""name" int, doubled int GENERATED ALWAYS AS (b * 2) STORED);
        INSERT INTO t VALUES (1, 'one', 'hidden', 10, 5), (2, NULL, 'hidden', NULL, 6);
        CREATE TABLE g (id int PRIMARY KEY, v int, sum int GENERATED ALWAYS AS (id + v) STORED);
        INSERT INTO g VALUES (1, 1);
    """)
    listed = '(b, id, a, "odd ""name")' if publisher_db.version >= 15 else ""
    publisher_db.execute(f"CREATE PUBLICATION pub FOR TABLE t {listed}, g")
    copied, updated, inserted = ("none", "none", "none") if listed else ("hidden", "more", "hidden")
    target_db.execute("""
        CREATE TABLE t ("odd ""name" int, doubled int DEFAULT -1, b bigint, seen text DEFAULT 'here', secret text DEFAULT 'none', a text,
                        length int GENERATED ALWAYS AS (length(a)) STORED, id int PRIMARY KEY);
        CREATE TABLE g (sum int GENERATED ALWAYS AS (id * 100 + v) STORED, v int, id int PRIMARY KEY)""")
    query = 'SELECT id, a, b, "odd ""name", secret, seen, doubled, length FROM t ORDER BY id'
    async with replica(publisher_db, target_db) as columns:
        await columns.caught_up()
        assert target_db.fetch(query) == [(1, "one", 10, 5, copied, "here", -1, 3), (2, None, None, 6, copied, "here", -1, None)]
        assert target_db.fetch("SELECT id, v, sum FROM g") == [(1, 1, 101)]
        target_db.execute("UPDATE t SET seen = 'kept' WHERE id = 1")
        publisher_db.execute("UPDATE t SET a = 'longer', secret = 'more' WHERE id = 1; INSERT INTO t VALUES (3, 'three', 'hidden', 30, 7)")
        publisher_db.execute("UPDATE g SET v = 5")
        await columns.caught_up()
        assert target_db.fetch(query) == [
            (1, "longer", 10, 5, updated, "kept", -1, 6),
            (2, None, None, 6, copied, "here", -1, None),
            (3, "three", 30, 7, inserted, "here", -1, 5),
        ]
        assert target_db.fetch("SELECT id, v, sum FROM g") == [(1, 5, 105)]


async def test_published_generated_columns_are_copied_and_followed(publisher18_db: Database, target_db: Database) -> None:
    definition = "id int PRIMARY KEY, v int, twice int"
    publisher18_db.execute(f"CREATE TABLE t ({definition} GENERATED ALWAYS AS (v * 2) STORED); INSERT INTO t VALUES (1, 1), (2, NULL)")
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t WITH (publish_generated_columns = stored)")
    target_db.execute(f"CREATE TABLE t ({definition})")
    async with replica(publisher18_db, target_db) as generated:
        assert await generated.same("SELECT id, v, twice FROM t ORDER BY id") == [(1, 1, 2), (2, None, None)]
        publisher18_db.execute("UPDATE t SET v = 21 WHERE id = 2; INSERT INTO t VALUES (3, 3)")
        assert await generated.same("SELECT id, v, twice FROM t ORDER BY id") == [(1, 1, 2), (2, 21, 42), (3, 3, 6)]


@pytest.mark.publisher(min=15, lacks="column lists")
@pytest.mark.matrix
async def test_column_lists_that_contradict_each_other(publisher_db: Database, target_db: Database) -> None:
    for database in (publisher_db, target_db):
        database.execute("CREATE TABLE t (id int PRIMARY KEY, a int, b int)")
    publisher_db.execute("INSERT INTO t VALUES (1, 1, 1)")
    publisher_db.execute("CREATE PUBLICATION narrow FOR TABLE t (id, a); CREATE PUBLICATION whole FOR TABLE t (b, a, id)")
    both = subscription_of(publisher_db, target_db, publications=["narrow", "whole"])
    words = 'cannot use different column lists for table "public.t" in different publications'
    with pytest.raises(PublisherError, match=words) as refused:
        await both.run()
    assert refused.value.hint
    assert publisher_db.fetch(SLOTS) == []
    assert target_db.value("SELECT to_regnamespace('subscriber')") is None
    # fixed: a list of all columns is equal to no list; then they contradict each other again while a run would continue
    publisher_db.execute("ALTER PUBLICATION narrow SET TABLE t")
    await both.run(Until())
    assert target_db.fetch("SELECT * FROM t") == [(1, 1, 1)]
    publisher_db.execute("ALTER PUBLICATION narrow SET TABLE t (id, b)")
    with pytest.raises(PublisherError, match=words):
        await both.run(Until())
    assert only_the_main_slot(publisher_db)


async def test_two_publications_with_the_same_table(publisher18_db: Database, target_db: Database) -> None:
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE t (n int)")
    publisher18_db.execute("INSERT INTO t VALUES (1), (2); CREATE PUBLICATION one FOR TABLE t; CREATE PUBLICATION two FOR ALL TABLES")
    async with replica(publisher18_db, target_db, publications=["one", "two"]) as both:
        assert await both.same("SELECT n FROM t ORDER BY n") == [(1,), (2,)]
        publisher18_db.execute("INSERT INTO t VALUES (3)")
        assert await both.same("SELECT n FROM t ORDER BY n") == [(1,), (2,), (3,)]


async def test_tables_come_and_go(publisher18_db: Database, target_db: Database, caplog: pytest.LogCaptureFixture) -> None:
    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE old (id int PRIMARY KEY); CREATE TABLE new (id int PRIMARY KEY)")
    publisher18_db.execute("CREATE TABLE missing (id int PRIMARY KEY); INSERT INTO old VALUES (1); INSERT INTO new VALUES (1)")
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE old")
    async with replica(publisher18_db, target_db) as first:
        await first.same("SELECT id FROM old")
        publisher18_db.execute("INSERT INTO missing VALUES (1); ALTER PUBLICATION pub ADD TABLE new, missing")
        # until the next run a new table is not part of the subscription, and its changes are left out
        publisher18_db.execute("INSERT INTO new VALUES (2); INSERT INTO old VALUES (2)")
        await first.same("SELECT id FROM old ORDER BY id")
        assert target_db.value("SELECT count(*) FROM new") == 0
        assert [text for text in warnings() if 'table "public.new" is published, but not part of the subscription' in text]
        publisher18_db.execute("INSERT INTO new VALUES (3)")
    publisher18_db.execute("INSERT INTO new VALUES (4); INSERT INTO old VALUES (3)")
    async with replica(publisher18_db, target_db) as second:
        assert await second.same("SELECT id FROM new ORDER BY id") == [(1,), (2,), (3,), (4,)]
        publisher18_db.execute("INSERT INTO new VALUES (5)")
        assert len(await second.same("SELECT id FROM new ORDER BY id")) == 5
        assert await second.same("SELECT id FROM old ORDER BY id") == [(1,), (2,), (3,)]
        assert second.subscription.status.tables.keys() == {TableName("public", "old"), TableName("public", "new")}
        assert [text for text in warnings() if "is published but not replicated" in text and "public.missing" in text]
        # as natively: nothing is passed over for want of a table
        publisher18_db.execute("INSERT INTO missing VALUES (2); INSERT INTO new VALUES (6)")
        async with asyncio.timeout(30):
            while not isinstance(second.subscription.status.last_error, RelationError):
                await asyncio.sleep(0.02)
        assert 'logical replication target relation "public.missing" does not exist' in str(second.subscription.status.last_error)
        assert target_db.value("SELECT count(*) FROM new") == 5
        target_db.execute("CREATE TABLE missing (id int PRIMARY KEY)")
        assert len(await second.same("SELECT id FROM new ORDER BY id")) == 6
        assert target_db.value("SELECT count(*) FROM missing") == 0
    publisher18_db.execute(
        "ALTER PUBLICATION pub DROP TABLE old; INSERT INTO old VALUES (4); INSERT INTO new VALUES (7); INSERT INTO missing VALUES (3)"
    )
    async with replica(publisher18_db, target_db) as third:
        await third.same("SELECT id FROM new ORDER BY id")
        assert await third.same("SELECT id FROM missing ORDER BY id") == [(1,), (2,), (3,)]
        assert target_db.fetch("SELECT id FROM old ORDER BY id") == [(1,), (2,), (3,)]
        assert third.subscription.status.tables.keys() == {TableName("public", "missing"), TableName("public", "new")}
        assert third.subscription.status.last_error is None
    assert {name for name, _ in target_db.fetch(STATES)} == {"missing", "new"}
    assert only_the_main_slot(publisher18_db)


async def test_without_copy_data(publisher18_db: Database, target_db: Database) -> None:
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE u (id int PRIMARY KEY)")
    publisher18_db.execute("INSERT INTO t VALUES (1, 'before'), (2, 'before'); CREATE PUBLICATION pub FOR TABLE t")
    async with replica(publisher18_db, target_db, copy_data=False) as following:
        await following.caught_up()
        assert target_db.value("SELECT count(*) FROM t") == 0
        assert following.subscription.status.tables[TableName("public", "t")].state is TableState.READY
        publisher18_db.execute(
            "INSERT INTO t VALUES (3, 'after'); UPDATE t SET v = 'missing' WHERE id = 1; ALTER PUBLICATION pub ADD TABLE u"
        )
        publisher18_db.execute("INSERT INTO u VALUES (1)")
        await following.caught_up()
        assert target_db.fetch("SELECT id, v FROM t") == [(3, "after")]
        assert following.subscription.status.statistics.confl_update_missing == 1
    async with replica(publisher18_db, target_db, copy_data=False) as again:
        await again.caught_up()
        publisher18_db.execute("INSERT INTO u VALUES (2)")
        await again.caught_up()
        assert target_db.fetch("SELECT id FROM u") == [(2,)]
    assert only_the_main_slot(publisher18_db)


@contextlib.asynccontextmanager
async def one_failing(publisher: Database, target: Database, mischief: str) -> AsyncIterator[Replica]:
    """A replica of the table first, and of two added to it: bad, whose copy fails, and good, which waits for the same worker.

    (With bad from the start the run would end: a first start reports at once what has to be fixed.)
    """
    for database in (publisher, target):
        database.execute("CREATE TABLE first (id int PRIMARY KEY)")
    publisher.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    await subscription_of(publisher, target).run(Until())
    for database in (publisher, target):
        database.execute("CREATE TABLE bad (id int, v text); CREATE TABLE good (id int PRIMARY KEY, v text)")
    publisher.execute(
        "INSERT INTO bad SELECT i, repeat('x', 200) FROM generate_series(1, 2000) AS i; INSERT INTO good VALUES (1, 'copied')"
    )
    publisher.execute("ALTER TABLE bad REPLICA IDENTITY FULL")
    target.execute(mischief)
    settings = changed(IN_PARTS, max_sync_workers_per_subscription=1)
    async with replica(publisher, target, settings=settings) as found:
        await asyncio.to_thread(wait_for_state, target, "good", "sr")
        yield found


async def test_failing_copy_does_not_stop_others_and_succeeds_once_fixed(publisher18_db: Database, target_db: Database) -> None:
    """The last part fails while earlier ones are committed already: they are undone, rows of others stay."""
    mischief = "INSERT INTO bad VALUES (-1, 'mine'); ALTER TABLE bad ADD CONSTRAINT small CHECK (id < 2000)"
    async with one_failing(publisher18_db, target_db, mischief) as failing:
        publisher18_db.execute(
            "INSERT INTO good VALUES (2, 'followed'); UPDATE bad SET v = 'changed' WHERE id <= 3; DELETE FROM bad WHERE id = 4"
        )
        await eventually(target_db, "SELECT count(*) FROM good", 2)
        # several attempts
        await eventually(target_db, "SELECT max(srcopyattempt) >= 3 FROM subscriber.pg_subscription_rel", True)
        assert isinstance(failing.subscription.status.last_error, ApplyError)
        assert 'while copying table "public.bad"' in failing.subscription.status.last_error.one_line()
        target_db.execute("ALTER TABLE bad DROP CONSTRAINT small")
        await failing.caught_up()
        assert target_db.fetch("SELECT v FROM bad WHERE id = -1") == [("mine",)]
        target_db.execute("DELETE FROM bad WHERE id = -1")
        assert len(await failing.same("SELECT id, v FROM bad ORDER BY id, v")) == 1999
        await failing.same("SELECT id, v FROM good ORDER BY id")
    assert only_the_main_slot(publisher18_db)
    assert target_db.value("SELECT count(*) FROM subscriber.copy_part") == 0


async def test_truncated_while_it_is_copied(publisher18_db: Database, target_db: Database) -> None:
    """TRUNCATE waits for the transaction that reads the rows: what was copied goes again, by catching up or by another copy."""
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE other (id int PRIMARY KEY)")
    publisher18_db.execute("INSERT INTO t SELECT i, 'copied' FROM generate_series(1, 100) AS i; CREATE PUBLICATION pub FOR ALL TABLES")
    make_row_gate(target_db, "t", "NEW.id = 100", 1)
    with closed_gates(target_db, 1) as release, contextlib.closing(publisher18_db.connect()) as session:
        async with replica(publisher18_db, target_db) as found:
            await eventually(target_db, waiting_at_gate(1), 1)
            await asyncio.to_thread(wait_for_state, target_db, "other", "sr")
            statements = b"BEGIN; TRUNCATE t, other; INSERT INTO t VALUES (1, 'followed'); INSERT INTO other VALUES (1); COMMIT"
            truncating = asyncio.create_task(asyncio.to_thread(session.execute, statements))
            await eventually(publisher18_db, waiting_for_lock_on("t"), 1)
            release(1)
            await truncating
            publisher18_db.execute("INSERT INTO t VALUES (2, 'later')")
            assert await found.same("SELECT id, v FROM t ORDER BY id") == [(1, "followed"), (2, "later")]
            assert await found.same("SELECT id FROM other") == [(1,)]
            assert isinstance(found.subscription.status.last_error, CopyOutdated | None)
    assert only_the_main_slot(publisher18_db)


async def test_a_catch_up_that_fails_does_not_copy_again(publisher18_db: Database, target_db: Database) -> None:
    """A row of the target conflicts with a change, not with the copy: the copy stays, and the change is applied once the row is fixed."""
    publisher18_db.execute("CREATE TABLE other (id int PRIMARY KEY)")
    target_db.execute("CREATE TABLE other (id int PRIMARY KEY)")
    async with asyncio.timeout(90):
        for database in (publisher18_db, target_db):
            database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
        publisher18_db.execute("INSERT INTO t SELECT i, 'copied' FROM generate_series(1, 100) AS i; CREATE PUBLICATION pub FOR ALL TABLES")
        make_row_gate(target_db, "t", "NEW.id = 100", 1)
        with closed_gates(target_db, 1) as release:
            async with replica(publisher18_db, target_db) as failing:
                await eventually(target_db, waiting_at_gate(1), 1)
                await asyncio.to_thread(wait_for_state, target_db, "other", "sr")
                target_db.execute("INSERT INTO t VALUES (1000, 'mine')")
                publisher18_db.execute("UPDATE t SET v = 'followed' WHERE id = 1; INSERT INTO t VALUES (1000, 'theirs')")
                # the apply worker is past them: they are the synchronization's
                publisher18_db.execute("INSERT INTO other VALUES (0)")
                await eventually(target_db, "SELECT count(*) FROM other", 1)
                release(1)
                await asyncio.to_thread(wait_for_state, target_db, "t", "f")
                publisher18_db.execute("INSERT INTO other VALUES (1)")
                await eventually(target_db, "SELECT count(*) FROM other", 2)
                copied = target_db.fetch("SELECT DISTINCT xmin::text FROM t WHERE id BETWEEN 2 AND 100")
                while not isinstance(failing.subscription.status.last_error, ApplyError):
                    await asyncio.sleep(0.02)
                assert target_db.fetch("SELECT id, v FROM t WHERE id IN (1, 1000) ORDER BY id") == [(1, "copied"), (1000, "mine")]
                target_db.execute("DELETE FROM t WHERE id = 1000")
                assert len(await failing.same("SELECT id, v FROM t ORDER BY id")) == 101
                assert target_db.fetch("SELECT DISTINCT xmin::text FROM t WHERE id BETWEEN 2 AND 100") == copied
    assert only_the_main_slot(publisher18_db)
