"""Names of sessions, for a subscription whose name leaves no room for a suffix."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from dataclasses import replace

from subscriber import SubscriptionOptions, alter_subscription, drop_subscription
from subscriber.testing.server import EmbeddedServer
from tests.support.database import Database, ServerAddress
from tests.support.managed import create, launched, same
from tests.support.observation import eventually
from tests.support.program import subscriber
from tests.support.replica import QUICK

PARALLEL = "SELECT application_name FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE '%parallel apply'"


async def test_only_the_one_that_follows_bears_the_subscriptions_name(
    make_server: Callable[..., EmbeddedServer], target_db: Database
) -> None:
    """Two names of 63 bytes that differ at their ends; every other session has another name, and tells for whom and what it is."""
    server = make_server(18, log_replication_commands="on", log_statement="all", log_line_prefix="<%a> ")
    long = [f"{'n' * 62}{end}" for end in "ab"]
    with contextlib.closing(Database(ServerAddress(server.dsn(), 18), "postgres")) as publisher:
        for database in (publisher, target_db):
            database.execute("CREATE TABLE ta (id int PRIMARY KEY, v text); CREATE TABLE tb (id int PRIMARY KEY, v text)")
        publisher.execute("CREATE PUBLICATION a FOR TABLE ta; CREATE PUBLICATION b FOR TABLE tb; INSERT INTO ta VALUES (0, 'copied')")
        for name in long:
            await create(publisher, target_db, name, name[-1])
        settings = replace(QUICK, logical_decoding_work_mem=64 * 1024)
        async with launched(target_db, settings=settings):
            for name in long:
                await same(publisher, target_db, name, f"SELECT * FROM t{name[-1]} ORDER BY id")
            await eventually(target_db, "SELECT count(*) FROM subscriber.pg_subscription_rel WHERE srsubstate <> 'r'", 0)
            followed = sorted(publisher.fetch("SELECT application_name FROM pg_stat_replication WHERE state = 'streaming'"))
            assert followed == [(name,) for name in long]
            sessions = [publisher.connect() for _ in long]
            with contextlib.ExitStack() as stack:
                for session, name in zip(sessions, long, strict=True):
                    stack.callback(session.close)
                    session.execute("BEGIN")
                    session.execute(f"INSERT INTO t{name[-1]} SELECT g, repeat('x', 500) FROM generate_series(1, 1000) AS g".encode())
                await eventually(target_db, f"SELECT count(DISTINCT application_name)::int FROM ({PARALLEL}) AS p", 2)
                names = [name for (name,) in target_db.fetch(PARALLEL)]
                assert not {*names} & {*long}
        for name in long:
            async with alter_subscription(name, target=target_db.dsn, settings=QUICK) as subscription:
                await subscription.disable()
                await subscription.set({"failover": True})
        checked = await asyncio.to_thread(
            subscriber, "check", "--connection", publisher.conninfo(), "--publication=a", "--target", target_db.dsn, "--name", long[0]
        )
        assert "Traceback" not in checked.errors
        for name in long:
            await drop_subscription(name, target=target_db.dsn, settings=QUICK)
        seen = set(re.findall(r"^<(.+?)> LOG: +(?:received replication command|statement): (\w+)", server.log(), re.MULTILINE))
        following = {name for name, command in seen if command == "START_REPLICATION"}
        others = {name for name, _ in seen} - following
        assert {*long} <= following
        for role in ("setup", "alter", "drop", "check", "sync"):
            of_role = {name for name in others if name.endswith(f" {role}")}
            # each subscription's own; only the first was checked
            assert len(of_role) == (1 if role == "check" else 2), (role, seen)
        assert all(len(name) <= 63 for name, _ in seen)


async def test_a_short_name_stays_as_it_is(publisher18_db: Database, target_db: Database) -> None:
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t")
    name = await create(publisher18_db, target_db, options=SubscriptionOptions(streaming="parallel"))
    async with launched(target_db):
        await same(publisher18_db, target_db, name, "SELECT * FROM t")
        # once the table's synchronization has gone
        following = f"SELECT application_name FROM pg_stat_replication WHERE application_name LIKE '{name}%'"
        await eventually(publisher18_db, following, [(name,)])
    await drop_subscription(name, target=target_db.dsn, settings=QUICK)
