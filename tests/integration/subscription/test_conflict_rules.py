"""Conflicts by rule, in whole subscriptions: create, run, status, alter, check, and a table's synchronization."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from subscriber import ConfigurationError, SubscriptionOptions, alter_subscription
from subscriber.testing.server import EmbeddedServer
from tests.support.database import Database, ServerAddress, fresh_database
from tests.support.managed import create, launched, same
from tests.support.observation import all_ready, eventually
from tests.support.program import subscriber
from tests.support.replica import QUICK, replica
from tests.support.sqlalchemy_targets import sqlite_target

ROWS = "SELECT id, v FROM t ORDER BY id"


@pytest.mark.matrix
async def test_rows_that_are_there_already(publisher_db: Database, any_target_db: Database) -> None:
    publisher, target = publisher_db, any_target_db
    for database in (publisher, target):
        database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    publisher.execute("CREATE PUBLICATION pub FOR TABLE t")
    target.execute("INSERT INTO t SELECT g, 'local' FROM generate_series(1, 300) AS g")
    rules = {"insert_exists": "apply_remote", "update_missing.public.t": "insert"}
    options = SubscriptionOptions(copy_data=False, conflict=rules, conflict_log="public.conflicts")
    name = await create(publisher, target, options=options)
    async with launched(target):
        # streamed, where the publisher can
        publisher.execute("INSERT INTO t SELECT g, repeat('x', 500) FROM generate_series(1, 400) AS g")
        await same(publisher, target, name, ROWS)
        target.execute("DELETE FROM t WHERE id = 7")
        publisher.execute("UPDATE t SET v = 'again' WHERE id < 9")
        await same(publisher, target, name, ROWS)
        counted = "SELECT confl_insert_exists::int, confl_update_missing::int FROM subscriber.pg_stat_subscription_stats"
        await asyncio.to_thread(target.wait, counted, [(300, 1)])
        logged = (
            "SELECT conflict, rule, count(*)::int, min((key->>'id')::int) FROM conflicts WHERE lsn IS NOT NULL GROUP BY 1, 2 ORDER BY 1"
        )
        assert target.fetch(logged) == [
            ("insert_exists", "apply_remote", 300, 1),
            ("update_missing", "insert", 1, 7),
        ]
        text = (await asyncio.to_thread(subscriber, "status", "--target", target.dsn, name)).output
        assert "  conflicts     insert_exists = apply_remote, update_missing.public.t = insert\n" in text
        async with alter_subscription(name, target=target.dsn, settings=QUICK) as subscription:
            await subscription.set({"conflict": {"insert_exists": "keep_local"}})
        target.execute("INSERT INTO t VALUES (1000, 'local')")
        publisher.execute("INSERT INTO t VALUES (1000, 'remote'), (1001, 'remote')")
        await same(publisher, target, name, "SELECT id FROM t ORDER BY id")
        assert target.value("SELECT v FROM t WHERE id = 1000") == "local"
        async with alter_subscription(name, target=target.dsn, settings=QUICK) as subscription:
            with pytest.raises(ConfigurationError, match='unrecognized rule for conflict insert_exists: "keep"'):
                await subscription.set({"conflict": {"insert_exists": "keep"}})
            # what the target cannot do, as `create` and `check` refuse it
            with pytest.raises(ConfigurationError, match=r"conflict\.update_origin_differs = last_update_wins needs ") as caught:
                await subscription.set({"conflict": {"update_origin_differs": "last_update_wins"}})
            assert caught.value.hint
            with pytest.raises(ConfigurationError, match=r'table "public\.t" of the target is not a log of conflicts'):
                await subscription.set({"conflict_log": "public.t"})
            assert subscription.definition.options.given_conflict_rules == {
                "insert_exists": "keep_local",
                "update_missing.public.t": "insert",
            }
    subscriber("drop", name, "--target", target.dsn)


def test_check_refuses_what_the_target_cannot_do(publisher18_db: Database, target_db: Database) -> None:
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t")
    connection = ("--connection", publisher18_db.conninfo(), "--publication", "pub")
    for target, option, message in (
        (target_db.dsn, "conflict.update_origin_differs=last_update_wins", "needs track_commit_timestamp in the target, which is off"),
        ("sqlite:////nowhere/x.db", "conflict.insert_exists=last_update_wins", "is not available for this kind of target"),
        ("spark:///nowhere/x", "conflict.update_missing=insert", "is not available for this kind of target"),
        ("spark:///nowhere/x", "conflict_log=public.log", "conflict_log is not available for this kind of target"),
    ):
        for verb in ("check", "run"):
            ended = subscriber(verb, "--name", "r", *connection, "--target", target, "-o", option)
            assert ended.status != 0
            (line,) = [line for line in (ended.output + ended.errors).splitlines() if message in line]
            assert "hint: " in line


def test_check_warns_of_a_rule_without_its_table(publisher18_db: Database, target_db: Database) -> None:
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t")
    connection = ("--connection", publisher18_db.conninfo(), "--publication", "pub", "--target", target_db.dsn)
    ended = subscriber(
        "check", "--name", "r", *connection, "-o", "conflict.insert_exists.public.T=error", "-o", "conflict.delete_missing.public.x=error"
    )
    assert ended.status == 0
    assert "conflict rule of table public.x: the table is not published" in ended.output + ended.errors
    assert "public.t:" not in ended.output + ended.errors


@pytest.fixture
def tracked_db(make_server: Callable[..., EmbeddedServer]) -> Iterator[Database]:
    """A target that keeps commit timestamps."""
    server = make_server(18, track_commit_timestamp="on")
    with fresh_database(ServerAddress(server.dsn(), 18), "tgt") as database:
        yield database


@pytest.mark.parametrize("copy_data", [True, "reconcile"])
async def test_copied_rows_are_the_subscriptions_own(publisher18_db: Database, tracked_db: Database, copy_data: bool) -> None:
    """Their origins are dropped after the copy. Without more, keep_local would keep all of them for ever."""
    publisher, target = publisher18_db, tracked_db
    for database in (publisher, target):
        database.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE u (id int PRIMARY KEY, v text)")
    publisher.execute("CREATE PUBLICATION pub FOR ALL TABLES; INSERT INTO t SELECT g, 'copied' FROM generate_series(1, 9) AS g")
    publisher.execute("INSERT INTO u SELECT * FROM t")
    rules = {"update_origin_differs": "keep_local", "delete_origin_differs": "last_update_wins"}
    async with replica(publisher, target, conflict=rules, copy_data=copy_data) as found:
        await all_ready(found)
        publisher.execute("UPDATE t SET v = 'changed' WHERE id < 5; UPDATE u SET v = 'changed'; DELETE FROM t WHERE id = 9")
        await found.caught_up()
        assert target.fetch(ROWS) == publisher.fetch(ROWS)
        target.execute("UPDATE t SET v = 'local' WHERE id IN (1, 8)")
        publisher.execute("UPDATE t SET v = 'later' WHERE id < 3; DELETE FROM t WHERE id = 8")
        await found.caught_up()
        assert target.fetch("SELECT id, v FROM t WHERE id IN (1, 2, 8) ORDER BY id") == [(1, "local"), (2, "later")]
        statistics = found.subscription.status.statistics
        assert (statistics.confl_update_origin_differs, statistics.confl_delete_origin_differs) == (1, 1)


async def test_log_of_conflicts_in_sqlite(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    """Its tables are created beside the log, also at a second start."""
    target = sqlite_target(tmp_path / "copy.db")
    publisher18_db.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE PUBLICATION pub FOR ALL TABLES; INSERT INTO t VALUES (1, 'a')"
    )
    arguments: dict[str, Any] = {"target_url": target.url, "conflict_log": "public.conflicts", "conflict_log_rows": True}
    for table in ("t", "u"):
        async with replica(publisher18_db, target_db, **arguments) as found:
            await all_ready(found)
            await asyncio.to_thread(target.execute, f"DELETE FROM {table}")
            publisher18_db.execute(f"UPDATE {table} SET v = 'b'")
            await found.caught_up()
        assert target.fetch("SELECT subscription, table_name, conflict, key, remote_row FROM conflicts ORDER BY logged_at")[-1] == (
            found.subscription.name,
            table,
            "update_missing",
            f'{{"id": {1 if table == "t" else 5}}}',
            f'{{"id": {1 if table == "t" else 5}, "v": "b"}}',
        )
        if table == "t":
            publisher18_db.execute("CREATE TABLE u (id int PRIMARY KEY, v text); INSERT INTO u VALUES (5, 'a')")


async def test_table_with_another_name_whose_columns_follow(publisher18_db: Database, target_db: Database) -> None:
    """Its unique indexes are read in the transaction that changes the columns."""
    publisher, target = publisher18_db, target_db
    publisher.execute("CREATE TABLE source (id int PRIMARY KEY, v text, w text)")
    target.execute("CREATE TABLE t (id int PRIMARY KEY, v text, w text)")
    target.execute("CREATE UNIQUE INDEX ON t (lower(w)) WHERE v IS NOT NULL; INSERT INTO t VALUES (1, 'local', 'W'), (2, 'local', 'x')")
    publisher.execute("CREATE PUBLICATION pub FOR TABLE source")
    settings = replace(QUICK, schema_change="follow")
    rules = {"insert_exists.public.source": "apply_remote", "multiple_unique_conflicts": "apply_remote"}
    arguments: dict[str, Any] = {"settings": settings, "copy_data": False, "map": {"public.source": "public.t"}}
    async with replica(publisher, target, conflict=rules, **arguments) as found:
        await all_ready(found)
        publisher.execute("INSERT INTO source VALUES (5, 'remote', 'w')")
        await found.caught_up()
        publisher.execute("""
            BEGIN; ALTER TABLE source ADD n int; ALTER TABLE source RENAME w TO renamed;
            INSERT INTO source VALUES (2, 'remote', 'W2', 7), (6, 'remote', 'X', 8); COMMIT
        """)
        await found.caught_up()
        assert target.fetch("SELECT id, v, renamed, n FROM t ORDER BY id") == publisher.fetch("TABLE source ORDER BY id")
        assert found.subscription.status.statistics.confl_insert_exists == 2


async def test_error_by_rule_parks_its_table(publisher18_db: Database, target_db: Database) -> None:
    publisher, target = publisher18_db, target_db
    for database in (publisher, target):
        database.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE other (id int PRIMARY KEY)")
    publisher.execute("CREATE PUBLICATION pub FOR ALL TABLES; INSERT INTO t VALUES (1, 'x'), (2, 'x')")
    rules = {"update_missing": "error", "delete_missing.public.t": "error"}
    async with replica(publisher, target, conflict=rules, on_error="park", park_after=1) as found:
        await all_ready(found)
        await found.caught_up()
        target.execute("DELETE FROM t WHERE id = 1")
        publisher.execute("UPDATE t SET v = 'y'; INSERT INTO other VALUES (7)")
        await eventually(target, "SELECT count(*) FROM other", 1)
        error = target.value("SELECT srerror FROM subscriber.pg_subscription_rel WHERE srsubstate = 'p'")
        assert 'could not find the row of relation "public.t" to be updated' in error
        # nothing of its transaction
        assert target.fetch(ROWS) == [(2, "x")]
