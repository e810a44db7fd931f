"""Published tables that are not replicated: a run with an end fails and names them; status, metrics and the library show them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from subscriber import TableName, alter_subscription
from subscriber.errors import RelationError
from subscriber.subscription.run_status import Until
from tests.integration.cli.test_metrics import scrape_until, told_port
from tests.integration.subscription.test_checks import PARTITIONS
from tests.support.database import Database
from tests.support.managed import catch_up, create, launched
from tests.support.observation import until
from tests.support.program import running, subscriber
from tests.support.replica import QUICK, replica, subscription_of
from tests.support.sqlalchemy_targets import IN_BOTH_ALIKE, OtherTarget, Replica

LATER = TableName("public", "later")


def left_out(target: str) -> dict[str, str]:
    """What status says, by table."""
    (found,) = json.loads(subscriber("status", "--target", target, "--json").output)["subscriptions"]
    return {f"{table['schema']}.{table['name']}": table["reason"] for table in found["tables_left_out"]}


def create_tables(publisher: Database, target: Database) -> None:
    for database in (publisher, target):
        database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    publisher.execute("CREATE TABLE later (id int PRIMARY KEY); INSERT INTO later VALUES (1); CREATE PUBLICATION pub FOR TABLE t")


def test_table_that_the_target_lacks(publisher18_db: Database, target_db: Database) -> None:
    create_tables(publisher18_db, target_db)
    arguments = ["run", "--connection", publisher18_db.dsn, "--publication=pub", "--target", target_db.dsn, "--name", publisher18_db.name]
    assert subscriber(*arguments, "--until-caught-up").status == 0
    assert left_out(target_db.dsn) == {}
    publisher18_db.execute("ALTER PUBLICATION pub ADD TABLE later")
    done = subscriber(*arguments, "--until-caught-up")
    assert done.status == 1
    assert 'subscriber: 1 published table is not replicated: "public.later": relation "public.later" does not exist' in done.errors
    done = subscriber(*arguments, "--until-lsn", str(publisher18_db.current_lsn()), "--allow-missing-tables")
    assert done.status == 0, done.errors
    # also when nothing runs
    assert 'relation "public.later" does not exist' in left_out(target_db.dsn)["public.later"]
    text = subscriber("status", "--target", target_db.dsn).output
    assert "1 left out" in text
    assert 'public.later: left out: relation "public.later" does not exist' in text
    target_db.execute("CREATE TABLE later (id int PRIMARY KEY)")
    done = subscriber(*arguments, "--until-caught-up")
    assert (done.status, done.errors) == (0, "")
    assert target_db.fetch("SELECT id FROM later") == [(1,)]
    assert left_out(target_db.dsn) == {}


def test_until_names_a_table_that_does_not_fit_once(publisher18_db: Database, target_db: Database) -> None:
    create_tables(publisher18_db, target_db)
    target_db.execute("CREATE TABLE later (other int)")
    publisher18_db.execute("ALTER PUBLICATION pub ADD TABLE later")
    done = subscriber(
        *("run", "--connection", publisher18_db.dsn, "--publication=pub", "--target", target_db.dsn, "--name", publisher18_db.name),
        "--until-caught-up",
    )
    assert (done.status, done.errors.count("public.later")) == (1, 1), done.errors


def test_until_names_a_table_that_cannot_be_created_once(publisher18_db: Database, sqlite_file: OtherTarget) -> None:
    """The bug was that two warnings and the error named it."""
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE sqlite_later (id int PRIMARY KEY)")
    publisher18_db.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    source = ["run", "--connection", publisher18_db.dsn, "--publication=pub", "--until-caught-up"]
    arguments = [*source, "--target", sqlite_file.url, "-c", "create_tables=on"]
    for extra, status in (((), 1), (("--allow-missing-tables",), 0)):
        done = subscriber(*arguments, *extra, "--name", f"{publisher18_db.name}_{status}")
        assert (done.status, [line.count("public.sqlite_later") > 0 for line in done.errors.splitlines()]) == (status, [True]), done.errors


@IN_BOTH_ALIKE
def test_in_other_targets(other_replica: Replica) -> None:
    pair = other_replica
    pair.catches_up()
    pair.publisher.execute("CREATE TABLE later (id int PRIMARY KEY); ALTER PUBLICATION pub ADD TABLE later")
    pair.more = ["-c", "create_tables=off"]
    done = subscriber(*pair.arguments("--until-caught-up"))
    assert done.status == 1
    assert '1 published table is not replicated: "public.later"' in done.errors
    assert list(left_out(pair.target.url)) == ["public.later"]
    assert subscriber(*pair.arguments("--until-caught-up", "--allow-missing-tables")).status == 0


@pytest.mark.parametrize("other_target", ["mariadb"], indirect=True)
def test_many_tables_in_mariadb(other_replica: Replica) -> None:
    # the bug was that the report of all of them did not fit a TEXT column (64 kB), so that the subscription was shown as not running
    pair = other_replica
    pair.catches_up()
    pair.publisher.execute(
        "DO $$BEGIN FOR i IN 1..300 LOOP EXECUTE format('CREATE TABLE %I ()', lpad(i::text, 60, 'x')); END LOOP; END$$;"
        " DO $$BEGIN EXECUTE (SELECT 'ALTER PUBLICATION pub ADD TABLE ' || string_agg(quote_ident(relname), ', ')"
        " FROM pg_class WHERE relkind = 'r' AND relname LIKE 'xxx%'); END$$"
    )
    pair.more = ["-c", "create_tables=off"]
    done = subscriber(*pair.arguments("--until-caught-up", "--allow-missing-tables"))
    assert (done.status, "could not write the status to the target" in done.errors) == (0, False)
    assert len(left_out(pair.target.url)) == 300


def test_table_published_during_the_run(publisher18_db: Database, target_db: Database) -> None:
    create_tables(publisher18_db, target_db)
    target_db.execute("CREATE TABLE later (id int PRIMARY KEY)")
    name = publisher18_db.name
    ahead = publisher18_db.value(f"SELECT '{publisher18_db.current_lsn()}'::pg_lsn + 1000000")
    with running(
        *("run", "--connection", publisher18_db.dsn, "--publication=pub", "--target", target_db.dsn, "--name", name),
        f"--until-lsn={ahead}",
    ) as program:
        # a slot is active while it is created, too, which is before the tables are listed
        streaming = "SELECT count(*) FROM pg_replication_slots JOIN pg_stat_replication ON pid = active_pid WHERE state = 'streaming'"
        publisher18_db.wait(f"{streaming} AND slot_name = '{name}'", 1)
        publisher18_db.execute("ALTER PUBLICATION pub ADD TABLE later")
        while publisher18_db.value(f"SELECT pg_current_wal_flush_lsn() < '{ahead}'"):
            publisher18_db.execute("SELECT pg_logical_emit_message(false, 'filler', repeat('x', 100000))")
        done = program.ended()
    assert done.status == 1
    assert '1 published table is not replicated: "public.later": published since the tables were listed' in done.errors


async def test_change_of_an_unknown_table_and_two_phase(publisher18_db: Database, target_db: Database) -> None:
    create_tables(publisher18_db, target_db)
    target_db.execute("CREATE TABLE later (id int PRIMARY KEY)")
    async with replica(publisher18_db, target_db, two_phase=True) as both:
        await both.caught_up()
        await until(lambda: both.subscription.status.tables[TableName("public", "t")].state.value == "r", "ready")
        publisher18_db.execute("ALTER PUBLICATION pub ADD TABLE later; INSERT INTO t VALUES (1); INSERT INTO later VALUES (2)")
        await until(lambda: LATER in both.subscription.status.left_out, "the table is left out")
        await asyncio.to_thread(target_db.wait, "SELECT subtwophasestate::text FROM subscriber.pg_subscription", "e")
    subscription = subscription_of(publisher18_db, target_db, two_phase=True)
    with pytest.raises(RelationError, match="cannot be copied while two_phase is enabled"):
        await subscription.run(Until())
    assert subscription.status.left_out.keys() == {LATER}
    await subscription.run(Until(allow_missing_tables=True))


async def test_created_subscription_before_refresh(publisher18_db: Database, target_db: Database) -> None:
    create_tables(publisher18_db, target_db)
    target_db.execute("CREATE TABLE later (id int PRIMARY KEY)")
    name = await create(publisher18_db, target_db)
    publisher18_db.execute("ALTER PUBLICATION pub ADD TABLE later")

    def shown() -> Any:
        return left_out(target_db.dsn)

    with running("run", "--target", target_db.dsn, "-v", "--http", "127.0.0.1:0") as program:
        scrape_until(told_port(program), lambda found: found.get(("subscriber_tables_left_out", ())) == 1)
        program.says('published tables are not replicated: "public.later"')
        await asyncio.to_thread(catch_up, publisher18_db, target_db, name)
    await until(lambda: list(shown()) == ["public.later"], "status shows it")
    async with alter_subscription(name, target=target_db.dsn) as subscription:
        await subscription.refresh()
    assert shown() == {}
    async with launched(target_db):
        await asyncio.to_thread(target_db.wait, "SELECT id FROM later", 1)
        assert shown() == {}


async def test_renamed_table_is_not_left_out(publisher18_db: Database, target_db: Database) -> None:
    create_tables(publisher18_db, target_db)
    async with replica(publisher18_db, target_db) as both:
        await both.caught_up()
        for database in (target_db, publisher18_db):
            database.execute("ALTER TABLE t RENAME TO renamed")
        publisher18_db.execute("INSERT INTO renamed VALUES (5)")
        await both.same("SELECT id FROM renamed")
        assert both.subscription.status.left_out == {}


async def test_partitions_whose_updates_are_lost(publisher18_db: Database, target_db: Database) -> None:
    publisher18_db.execute(PARTITIONS)
    target_db.execute("CREATE TABLE root (id int, part int, v text, PRIMARY KEY (id, part))")
    publisher18_db.execute("INSERT INTO root SELECT 1, g, 'a' FROM generate_series(1, 5) AS g")
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE root WITH (publish_via_partition_root)")
    lost = {TableName("public", "Deep"), TableName("public", "other")}
    subscription = subscription_of(publisher18_db, target_db)
    with pytest.raises(RelationError, match=r'2 published tables are not replicated: "public\.Deep": updates and deletes are lost'):
        await subscription.run(Until())
    assert subscription.status.left_out.keys() == lost
    for partition in ("other", '"Deep"'):
        publisher18_db.execute(f"ALTER TABLE {partition} REPLICA IDENTITY DEFAULT")
    publisher18_db.execute("DELETE FROM root WHERE part <> 3")
    again = subscription_of(publisher18_db, target_db)
    await again.run(Until())
    assert again.status.left_out == {}
    assert target_db.fetch("SELECT part FROM root") == [(3,)]


async def test_tables_that_are_dropped_do_not_stop_apply(
    publisher_db: Database, target_db: Database, sqlite_file: OtherTarget, caplog: pytest.LogCaptureFixture
) -> None:
    """As in PostgreSQL, a change of a table that the target lacks is an error; but nothing could be lost if the publisher dropped it."""
    for execute in (publisher_db.execute, target_db.execute, sqlite_file.execute):
        execute("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE old (id int PRIMARY KEY)")
    publisher_db.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    walsenders = (
        f"SELECT slot_name, active_pid FROM pg_replication_slots WHERE slot_name ~ '^(native|other)_{publisher_db.name}$' ORDER BY 1"
    )
    quick = replace(QUICK, create_tables=False)
    async with (
        replica(publisher_db, target_db, name="native") as native,
        replica(publisher_db, target_db, name="other", target_url=sqlite_file.url, settings=quick) as other,
    ):
        for each in (native, other):
            await each.caught_up()
        before = publisher_db.fetch(walsenders)
        for target in (target_db, sqlite_file):
            # in a thread: the subscription runs in this loop, and may hold SQLite's lock
            await asyncio.to_thread(target.execute, "DROP TABLE old")
        # one of the subscription, some in one transaction, and one whose changes are streamed; apply waits meanwhile
        publisher_db.execute("INSERT INTO old VALUES (1)")
        publisher_db.execute("DROP TABLE old")
        for i in range(3):
            publisher_db.execute(f"CREATE TABLE b{i} (id int); INSERT INTO b{i} VALUES (1); INSERT INTO t VALUES ({i}); DROP TABLE b{i}")
        publisher_db.execute("CREATE TABLE large (id int PRIMARY KEY)")
        publisher_db.execute("INSERT INTO large SELECT generate_series(1, 3000); INSERT INTO t VALUES (3)")
        publisher_db.execute("DROP TABLE large")
        publisher_db.execute("INSERT INTO t VALUES (4)")
        for each in (native, other):
            await each.caught_up()
        # each costs a query, and no restart of the stream (the other target leaves out without one what is not of the subscription)
        assert publisher_db.fetch(walsenders) == before
    for target in (target_db, sqlite_file):
        assert target.fetch("SELECT id FROM t ORDER BY id") == [(i,) for i in range(5)]
    assert caplog.text.count("has dropped since are left out") == 5 + 1
    assert caplog.text.count("published, but not part of the subscription") == 4
    # one that was renamed is an error: its changes would be lost
    publisher_db.execute("ALTER TABLE t RENAME TO renamed")
    publisher_db.execute("INSERT INTO renamed VALUES (5)")
    with pytest.raises(RelationError, match=r'"public\.renamed" does not exist'):
        await subscription_of(publisher_db, target_db, name="native").run(Until(allow_missing_tables=True))
