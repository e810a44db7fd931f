"""``--map``, ``--exclude-table``, ``-o columns`` and ``-o rename``: other names and fewer columns in the target."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from subscriber import (
    SchemaOptions,
    Settings,
    SubscriptionOptions,
    TableName,
    alter_subscription,
    check,
    copy_schema,
    diff_schema,
    repair,
    subscription_status,
    sync_sequences,
    verify,
)
from subscriber.errors import ConfigurationError, PublisherError
from subscriber.testing.binaries import find_binaries
from tests.support.database import Database
from tests.support.examples import some_and_others
from tests.support.managed import catch_up, create, launched
from tests.support.program import subscriber
from tests.support.replica import QUICK, replica, subscription_of
from tests.support.sqlalchemy_targets import sqlite_target

OPTIONS: dict[str, Any] = {
    "map": {"public.*": "app.*", 'public."Orders"': "sales.purchase"},
    "columns": {'public."Orders"': "(id, amount, note)", "public.keyless": "a"},
    "rename": {'public."Orders"': "id:number, note:text"},
    "exclude_table": "audit*, public.secret",
}
SOURCE = """
CREATE TABLE "Orders" (secret text, id int PRIMARY KEY, hidden text DEFAULT repeat('h', 30), amount numeric, note text);
ALTER TABLE "Orders" ALTER note SET STORAGE EXTERNAL, ALTER hidden SET STORAGE EXTERNAL;
CREATE TABLE item (id int PRIMARY KEY, note text);
CREATE TABLE keyless (hidden int, a int);
CREATE TABLE secret (id int PRIMARY KEY);
CREATE TABLE audit_log (id int PRIMARY KEY, note text);
CREATE SCHEMA other; CREATE TABLE other.item (id int PRIMARY KEY, note text);
CREATE PUBLICATION pub FOR ALL TABLES;
INSERT INTO "Orders" SELECT 'no', n, 'no', n * 1.50, 'copied ' || n FROM generate_series(1, 100) AS n;
INSERT INTO item SELECT n, 'copied' FROM generate_series(1, 10) AS n;
INSERT INTO other.item VALUES (1, 'other'); INSERT INTO secret VALUES (1); INSERT INTO audit_log VALUES (1);
INSERT INTO keyless VALUES (1, 2)
"""
TARGET = """
CREATE SCHEMA app; CREATE SCHEMA sales; CREATE SCHEMA other;
CREATE TABLE sales.purchase (number int PRIMARY KEY, amount numeric, text text);
CREATE TABLE app.item (id int PRIMARY KEY, note text);
CREATE TABLE app.keyless (a int);
CREATE TABLE other.item (id int PRIMARY KEY, note text)
"""
ORDERS = 'SELECT id, amount::text, note FROM "Orders" ORDER BY 1'
TABLES = ["app.item", "app.keyless", "other.item", "sales.purchase"]
STREAMED = Settings(wal_retrieve_retry_interval=0.2, logical_decoding_work_mem=256 * 1024)

BINDIR = str(find_binaries(18))
Fetch = Callable[[str], list[tuple[Any, ...]]]


@some_and_others(["kind", "binary"], [("postgres", True), ("sqlite", False)], [("postgres", False), ("sqlite", True)])
@pytest.mark.publisher(min=14, lacks="streaming of running transactions")
async def test_everything_at_once(publisher_db: Database, target_db: Database, tmp_path: Path, kind: str, binary: bool) -> None:
    source, options = publisher_db, {**OPTIONS, "binary": binary and kind == "postgres"}
    if kind == "sqlite" and binary:
        pytest.skip("the same as without it")
    source.execute(SOURCE)
    source.execute(f"ALTER DATABASE {source.name} SET logical_decoding_work_mem = '64kB'")
    target_db.execute(TARGET)
    other = sqlite_target(tmp_path / "copy.db")
    url, fetch = (target_db.dsn, target_db.fetch) if kind == "postgres" else (other.url, other.fetch)
    purchases, keyless = ("sales.purchase", "app.keyless") if kind == "postgres" else ("sales__purchase", "app__keyless")

    settings = replace(STREAMED, create_tables=kind == "sqlite")

    async def same() -> int:
        await running.caught_up()
        rows = source.fetch(ORDERS)
        if kind == "postgres":
            assert fetch(f"SELECT number, amount::text, text FROM {purchases} ORDER BY 1") == rows
        found = await verify(running.subscription.name, target=url, connection=source.conninfo())
        assert [(str(table.table), table.equal, table.left_out) for table in found.tables] == [(name, True, None) for name in TABLES]
        assert found.tables[-1].key == ("number",)
        return len(rows)

    async with replica(source, target_db, target_url=url, settings=settings, **options) as running:
        assert await same() == 100
        large = "repeat('x', 5000)"
        source.execute(f"INSERT INTO \"Orders\" VALUES ('s', 101, 'h', 1, {large}), ('s', 102, NULL, NULL, NULL)")
        # a value that is not sent; a new key; a column that the target lacks
        source.execute('UPDATE "Orders" SET amount = 7 WHERE id = 101; UPDATE "Orders" SET id = id + 1000 WHERE id IN (1, 102)')
        source.execute('UPDATE "Orders" SET hidden = \'changed\' WHERE id < 10; DELETE FROM "Orders" WHERE id = 5')
        source.execute("INSERT INTO keyless VALUES (5, 6); INSERT INTO other.item VALUES (2, 'more'); UPDATE item SET note = 'new'")
        source.execute("INSERT INTO secret VALUES (2); INSERT INTO audit_log VALUES (2)")
        assert await same() == 101
        assert sorted(fetch(f"SELECT * FROM {keyless}")) == [(2,), (6,)]
        with source.connect() as session:
            session.execute("BEGIN")
            session.execute(
                "INSERT INTO \"Orders\" SELECT 's', n, repeat('h', 50), n, repeat('y', 9) FROM generate_series(2001, 5000) AS n"
            )
            session.execute('SAVEPOINT a; UPDATE "Orders" SET amount = 0; ROLLBACK TO a; UPDATE "Orders" SET amount = -id WHERE id % 7 = 0')
            session.execute("TRUNCATE item, audit_log; INSERT INTO item VALUES (77, 'after'); DELETE FROM secret")
            session.execute("COMMIT")
        assert await same() == 3101
        status = running.subscription.status
        assert sorted(map(str, status.tables)) == TABLES
    # another start, whose catalog has the names
    source.execute('UPDATE "Orders" SET amount = 1 WHERE id = 50; TRUNCATE "Orders"; INSERT INTO "Orders" (id, note) VALUES (1, 2)')
    async with replica(source, target_db, target_url=url, settings=settings, **options) as running:
        assert await same() == 1
    (found,) = await subscription_status(url)
    assert [str(table.table) for table in found.observation.tables] == TABLES
    with pytest.raises(ConfigurationError, match="was started with other values of rename, and"):
        await subscription_of(source, target_db, target_url=url, settings=settings, **{**options, "rename": {}}).run()


async def test_managed_with_resync_status_and_cutover(publisher18_db: Database, target_db: Database) -> None:
    source = publisher18_db
    source.execute("CREATE SCHEMA old; CREATE TABLE old.t (id int GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, v text, w text)")
    source.execute("CREATE TABLE old.u (id serial PRIMARY KEY); CREATE SEQUENCE old.free; CREATE TABLE old.no (id int PRIMARY KEY)")
    source.execute("INSERT INTO old.t (v) SELECT 'a' FROM generate_series(1, 60000); INSERT INTO old.u SELECT; SELECT nextval('old.free')")
    source.execute("CREATE INDEX ON old.t (v); ALTER TABLE old.u ADD t int REFERENCES old.t; CREATE PUBLICATION pub FOR ALL TABLES")
    options = SubscriptionOptions(
        map={"old.*": "fresh.*", "old.t": "single.t"}, columns={"old.t": "id, v"}, rename={"old.t": "id:number"}, exclude_table="no"
    )
    where: dict[str, Any] = {"connection": source.conninfo(), "publications": ["pub"], "target": target_db.dsn, "names": options}
    (line,) = await copy_schema(**where, options=SchemaOptions(bindir=BINDIR))
    assert line.startswith("tables have other names: views, functions, triggers and policies")
    # no column uses it
    target_db.execute("CREATE SEQUENCE fresh.free")
    name = await create(source, target_db, options=options)
    mine = (source, target_db, name)
    async with launched(target_db):
        await asyncio.to_thread(catch_up, *mine)
        found = await sync_sequences(name, target=target_db.dsn, dry_run=True)
        assert [(str(each.sequence), each.place, each.next_value) for each in found] == [
            ("fresh.free", "sequence fresh.free", 2),
            ("fresh.t_id_seq", "sequence single.t_id_seq", 60001),
            ("fresh.u_id_seq", "sequence fresh.u_id_seq", 2),
        ]
        # found by ranges of the renamed key
        target_db.execute("DELETE FROM single.t WHERE number % 20000 = 7; UPDATE single.t SET v = 'wrong' WHERE number = 50000")
        target_db.execute("INSERT INTO single.t VALUES (70000, 'extra')")
        async with alter_subscription(name, target=target_db.dsn) as altered:
            await altered.resync([TableName("single", "t")])
        await asyncio.to_thread(catch_up, *mine)
        report = await verify(name, target=target_db.dsn)
        assert [(str(table.table), table.equal) for table in report.tables] == [("fresh.u", True), ("single.t", True)]
        target_db.execute("DELETE FROM single.t WHERE number = 8")
        report = await verify(name, target=target_db.dsn)
        (difference,) = report.tables[1].differences
        assert difference.key == {"number": "8"}
        await repair(report, target=target_db.dsn)
        assert target_db.value("SELECT count(*) FROM single.t") == 60000
        assert await diff_schema(name, target=target_db.dsn) == []
        shown = await asyncio.to_thread(subscriber, "status", "--target", target_db.dsn)
        assert (
            "  map           old.*=fresh.*; old.t=single.t\n  columns       old.t=(id, v)\n  rename        old.t=id:number\n"
            in shown.output
        )
        assert "  exclude_table no\n" in shown.output
        verb = ("cutover", name, "--target", target_db.dsn, "--verify", "none")
        refused = await asyncio.to_thread(subscriber, *verb)
        assert "tables have other names or columns in the new database" in refused.errors
        done = await asyncio.to_thread(subscriber, *verb, "--no-way-back", loud=True)
        assert done.status == 0, done.errors
        for note in (
            "rows of tables that exclude_table leaves out are not moved: old.no",
            "columns of table old.t that columns leaves out",
        ):
            assert note in done.errors
        target_db.reconnect()
        target_db.execute("INSERT INTO single.t (v) VALUES ('new'); INSERT INTO fresh.u DEFAULT VALUES")
        assert target_db.value("SELECT max(number) FROM single.t") == 60001
        assert target_db.value("SELECT max(id) FROM fresh.u") == 2
    source.reconnect()


async def test_altered_exclude_table(publisher18_db: Database, target_db: Database) -> None:
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE a (id int); CREATE TABLE b (id int)")
    publisher18_db.execute("CREATE PUBLICATION pub FOR ALL TABLES; INSERT INTO a VALUES (1); INSERT INTO b VALUES (1)")
    mine = (publisher18_db, target_db, await create(publisher18_db, target_db, options=SubscriptionOptions(columns={"public.a": "id"})))
    async with launched(target_db):
        for given, there in (("b", [1]), ("none", [1, 2, 3])):
            await asyncio.to_thread(catch_up, *mine)
            if given == "none":
                target_db.execute("TRUNCATE b")
            async with alter_subscription(mine[2], target=target_db.dsn) as found:
                await found.set({"exclude_table": given})
            publisher18_db.execute("INSERT INTO b SELECT max(id) + 1 FROM b; INSERT INTO a SELECT 1")
            await asyncio.to_thread(target_db.wait, "SELECT count(*) FROM subscriber.pg_subscription_rel", 1 if given == "b" else 2)
            await asyncio.to_thread(catch_up, *mine)
            assert target_db.value("SELECT array_agg(id ORDER BY id) FROM b") == there
        assert target_db.value("SELECT count(*) FROM a") == 3


async def test_new_column_beside_a_renamed_one(publisher18_db: Database, target_db: Database) -> None:
    """The bug was that it was taken for the renamed one, whose name the publisher does not have."""
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY, a int, gone int); INSERT INTO t VALUES (1, 2, 3)")
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t")
    target_db.execute("CREATE SCHEMA s; CREATE TABLE s.u (id int PRIMARY KEY, x int)")
    options: dict[str, Any] = {"map": {"public.t": "s.u"}, "rename": {"public.t": "a:x"}}
    target_db.execute("ALTER TABLE s.u ADD gone int")
    async with replica(publisher18_db, target_db, settings=replace(QUICK, schema_change="add"), **options) as running:
        await running.caught_up()
        publisher18_db.execute("ALTER TABLE t ADD b int DEFAULT 7; INSERT INTO t VALUES (2, 3, 4, 5)")
        await running.caught_up()
    assert target_db.fetch("SELECT id, x, gone, b FROM s.u ORDER BY id") == [(1, 2, 3, 7), (2, 3, 4, 5)]


CASES = [
    ({"map": {"public.b": "public.a"}}, "tables public.a and public.b of the publisher would both be table public.a of the target"),
    (
        {"map": {"public.*": "s.*", "public.b": "s.a"}},
        "tables public.a and public.b of the publisher would both be table s.a of the target",
    ),
    (
        {"map": {"public.absent": "public.b"}},
        "tables public.absent and public.b of the publisher would both be table public.b of the target",
    ),
    ({"map": {"public.a": "nowhere.a"}}, 'logical replication target relation "nowhere.a" does not exist'),
    ({"columns": {"public.a": "v"}}, "column id of table public.a is left out, and belongs to the replica identity"),
    ({"columns": {"public.a": "id, x"}}, "columns.public.a: the table has no published column x"),
    ({"columns": {"public.whole": "id"}}, "column v of table public.whole is left out, and belongs to the replica identity"),
    ({"rename": {"public.a": "id:v"}}, "two columns of table public.a would have the name v"),
    ({"rename": {"public.a": "x:v"}}, "rename.public.a: the table has no published column x"),
    ({"rename": {"public.a": "v:x"}}, 'logical replication target relation "public.a" is missing replicated column: "x"'),
    ({"map": {"public.absent": "public.c"}}, "map.public.absent: no such table is published"),
    ({"map": {"absent.*": "c.*"}}, "map.absent.*: no such table is published"),
    ({"exclude_table": "a, absent*"}, "exclude_table absent*: no such table is published"),
]


async def test_bad_input(publisher18_db: Database, target_db: Database) -> None:
    tables = "CREATE TABLE a (id int PRIMARY KEY, v int); CREATE TABLE b (id int PRIMARY KEY); CREATE TABLE whole (id int, v int)"
    for database in (publisher18_db, target_db):
        database.execute(tables)
    publisher18_db.execute("ALTER TABLE whole REPLICA IDENTITY FULL; CREATE PUBLICATION pub FOR ALL TABLES")
    where = {"connection": publisher18_db.conninfo(), "publications": ["pub"], "target": target_db.dsn}
    for given, message in CASES:
        findings = await check("s", options=SubscriptionOptions(**given), **where)  # type: ignore[arg-type]
        assert [found for found in findings if found.message.startswith(message) and found.hint], (given, findings)
    # a column of the target that blocks, and a role that may not write
    target_db.execute("ALTER TABLE b ADD own int NOT NULL, ADD filled int NOT NULL DEFAULT 1")
    found = await check("s", options=SubscriptionOptions(columns={"public.a": "id, v"}), **where)  # type: ignore[arg-type]
    assert [(each.message, each.hint) for each in found if each.severity == "error"] == [
        (
            'column "own" of table "public.b" is NOT NULL in the target, has no default and is not published',
            'ALTER TABLE "public"."b" ALTER "own" DROP NOT NULL, or SET DEFAULT …, or publish it',
        )
    ]
    target_db.execute("ALTER TABLE b DROP own, DROP filled")
    assert not await check("s", options=SubscriptionOptions(columns={"public.a": "id"}, exclude_table="whole"), **where)  # type: ignore[arg-type]
    with pytest.raises(PublisherError, match=r"column id of table public\.a is left out"):
        await subscription_of(publisher18_db, target_db, columns={"public.a": "v"}).run()
    assert not target_db.value("SELECT to_regclass('subscriber.pg_subscription') IS NOT NULL")
    with pytest.raises(ConfigurationError, match="schema_change = follow is not available with columns or rename"):
        subscription_of(publisher18_db, target_db, rename={"public.a": "v:x"}, settings=replace(QUICK, schema_change="follow"))
    columns = ("-o", "columns.public.a=id, v", "-c", "schema_change=follow")
    follow = await asyncio.to_thread(
        subscriber, "check", "--connection", publisher18_db.conninfo(), "--publication", "pub", "--target", target_db.dsn, *columns
    )
    assert follow.errors.startswith("subscriber: schema_change = follow is not available with columns or rename")
    assert follow.errors.count("\n") == 1
    # a lake in one line
    source = ("--connection", publisher18_db.conninfo(), "--publication", "pub")
    lake = await asyncio.to_thread(subscriber, "check", *source, "--target", "spark:///tmp/x", "--map", "a.b=c.d")
    assert lake.errors.startswith("subscriber: map is not available for a lake: its tables have the publisher's names and columns (hint: ")
    assert lake.errors.count("\n") == 1
    # created while the stream is open
    target_db.execute("CREATE SCHEMA x; CREATE TABLE x.b (id int PRIMARY KEY)")
    running = subscription_of(publisher18_db, target_db, map={"public.b": "x.b"}, exclude_table="whole, a", name="second")
    task = asyncio.create_task(running.run())
    await running.wait_for(publisher18_db.current_lsn())
    publisher18_db.execute("CREATE SCHEMA x; CREATE TABLE x.b (id int PRIMARY KEY); INSERT INTO x.b VALUES (1)")
    with pytest.raises(ConfigurationError, match=r"tables public\.b and x\.b of the publisher would both be table x\.b"):
        await task
    # renamed on the publisher: without an error, its values would be lost
    options: dict[str, Any] = {"columns": {"public.a": "id, v"}, "exclude_table": "whole, b"}
    running = subscription_of(publisher18_db, target_db, **options, name="third")
    task = asyncio.create_task(running.run())
    await running.wait_for(publisher18_db.current_lsn())
    publisher18_db.execute("ALTER TABLE a RENAME v TO w; INSERT INTO a VALUES (1, 2)")
    with pytest.raises(ConfigurationError, match=r"columns\.public\.a: the table has no published column v"):
        await task
    with pytest.raises(ConfigurationError, match=r"columns\.public\.a: the table has no published column v"):
        await subscription_of(publisher18_db, target_db, **options, name="third").run()
    # another table of the publisher gets the name that one had before
    publisher18_db.execute("CREATE SCHEMA s; CREATE TABLE s.a (id int PRIMARY KEY); CREATE SCHEMA t; CREATE TABLE t.a (id int PRIMARY KEY)")
    target_db.execute("CREATE SCHEMA t; CREATE TABLE t.a (id int PRIMARY KEY)")
    publisher18_db.execute("CREATE PUBLICATION swapped FOR TABLE s.a; INSERT INTO s.a VALUES (1)")
    swapped: dict[str, Any] = {"map": {"s.*": "t.*"}, "publications": ["swapped"], "name": "fourth"}
    running = subscription_of(publisher18_db, target_db, **swapped)
    task = asyncio.create_task(running.run())
    await running.wait_for(publisher18_db.current_lsn())
    publisher18_db.execute("ALTER PUBLICATION swapped SET TABLE t.a; INSERT INTO t.a VALUES (2)")
    with pytest.raises(ConfigurationError, match=r"tables s\.a and t\.a of the publisher would both be table t\.a"):
        await task
    with pytest.raises((ConfigurationError, PublisherError), match=r"tables s\.a and t\.a of the publisher would both be table t\.a"):
        await subscription_of(publisher18_db, target_db, **swapped).run()
    assert target_db.fetch("TABLE t.a") == [(1,)]
