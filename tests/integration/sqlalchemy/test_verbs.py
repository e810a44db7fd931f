"""create, alter, drop and the launcher on targets of SQLAlchemy's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace

import pytest

from subscriber import (
    ConfigurationError,
    Launcher,
    PublisherError,
    SubscriptionOptions,
    SubscriptionStatus,
    TargetError,
    alter_subscription,
    create_subscription,
    drop_subscription,
    reset_subscription_stats,
    subscription_status,
)
from tests.support.database import WAIT_SECONDS, Database
from tests.support.program import slots, subscriber
from tests.support.replica import QUICK, at_work
from tests.support.sqlalchemy_targets import ALL, IN_BOTH_ALIKE, OtherTarget

SETTINGS = replace(QUICK, create_tables=True)


def launched(target: OtherTarget) -> contextlib.AbstractAsyncContextManager[Launcher]:
    return at_work(Launcher(target.url, settings=SETTINGS))


async def create(publisher: Database, target: OtherTarget, *publications: str, options: SubscriptionOptions | None = None) -> str:
    name = f"sub_{publisher.name}"
    await create_subscription(
        name, connection=publisher.conninfo(), publications=publications or ("pub",), target=target.url, options=options, settings=SETTINGS
    )
    return name


async def same(publisher: Database, target: OtherTarget, name: str, query: str = ALL) -> list[tuple[object, ...]]:
    """Wait until everything that is committed now is in the target, with all tables."""
    lsn = publisher.current_lsn()
    await until(target, name, lambda states: bool(states) and set(states.values()) <= {"s", "r"})
    await asyncio.to_thread(target.reaches, name, lsn)
    rows = publisher.fetch(query)
    assert target.fetch(query) == rows
    return rows


async def until(target: OtherTarget, name: str, wanted: Callable[[dict[str, str]], bool]) -> None:
    """Wait until the states of the tables are as wanted."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not wanted({name: str(state) for name, state in target.states().items()}):
            await asyncio.sleep(0.05)


@IN_BOTH_ALIKE
async def test_life_of_a_subscription_from_create_to_drop(publisher18_db: Database, other_target: OtherTarget) -> None:
    publisher, target = publisher18_db, other_target
    publisher.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE u (id int PRIMARY KEY, v text)")
    publisher.execute("CREATE PUBLICATION pub FOR TABLE t; CREATE PUBLICATION more FOR TABLE u; INSERT INTO t VALUES (1, 'a')")
    name = await create(publisher, target)
    assert slots(publisher) == [name]
    assert target.states() == {"t": "i"}
    with pytest.raises(TargetError, match=f'^subscription "{name}" already exists$'):
        await create(publisher, target)
    async with launched(target):
        assert await same(publisher, target, name) == [(1, "a")]
        publisher.execute("INSERT INTO t VALUES (2, 'b'); INSERT INTO u VALUES (1, 'u')")
        assert await same(publisher, target, name) == [(1, "a"), (2, "b")]
        async with alter_subscription(name, target=target.url, settings=SETTINGS) as subscription:
            await subscription.add_publications(["more"])
            # added when it returns, as pollers of srsubstate expect
            assert set(target.states()) == {"t", "u"}
        assert await same(publisher, target, name, "SELECT id, v FROM u") == [(1, "u")]
        async with alter_subscription(name, target=target.url, settings=SETTINGS) as subscription:
            await subscription.disable()
        publisher.wait("SELECT count(*) FROM pg_replication_slots WHERE active AND database = current_database()", 0)
        publisher.execute("INSERT INTO t VALUES (3, 'c')")
        renamed = f"{name}_2"
        async with alter_subscription(name, target=target.url, settings=SETTINGS) as subscription:
            await subscription.rename(renamed)
            await subscription.set({"binary": True, "streaming": "off", "origin": "none"})
            await subscription.enable()
        assert len(await same(publisher, target, renamed)) == 3
        publisher.execute("INSERT INTO t VALUES (4, 'd')")
        assert len(await same(publisher, target, renamed)) == 4
        await drop_subscription(renamed, target=target.url, settings=SETTINGS)
        assert slots(publisher) == []
        for table in ("pg_subscription", "pg_subscription_rel", "position", "worker", "subscription_stats", "fence"):
            assert target.fetch(f"SELECT count(*) FROM {target.ours(table)}") == [(0,)], table
        assert len(target.fetch(ALL)) == 4
    with pytest.raises(TargetError, match=r'^subscription "gone" does not exist$'):
        await drop_subscription("gone", target=target.url)


async def test_a_create_that_fails_leaves_nothing(publisher18_db: Database, sqlite_file: OtherTarget) -> None:
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE PUBLICATION pub FOR TABLE t")
    with pytest.raises(PublisherError, match="Connection refused"):
        await create_subscription(
            "mine", connection="host=127.0.0.1 port=1", publications=["pub"], target=sqlite_file.url, settings=SETTINGS
        )
    assert await subscription_status(sqlite_file.url) == []
    with pytest.raises(ConfigurationError, match="slot name"):
        await create_subscription(
            "Not A Slot", connection=publisher18_db.conninfo(), publications=["pub"], target=sqlite_file.url, settings=SETTINGS
        )
    assert slots(publisher18_db) == []
    await create(publisher18_db, sqlite_file)


async def test_refusals_in_natives_words(publisher18_db: Database, sqlite_file: OtherTarget) -> None:
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE PUBLICATION pub FOR TABLE t")
    name = await create(publisher18_db, sqlite_file, options=SubscriptionOptions(enabled=False))
    async with alter_subscription(name, target=sqlite_file.url, settings=SETTINGS) as subscription:
        for attempt, words in (
            (subscription.refresh(), "ALTER SUBSCRIPTION ... REFRESH is not allowed for disabled subscriptions"),
            (subscription.add_publications(["pub"]), f'publication "pub" is already in subscription "{name}"'),
            (subscription.drop_publications(["pub"]), "cannot drop all the publications from a subscription"),
            (subscription.set({"copy_data": False}), 'unrecognized subscription parameter: "copy_data"'),
        ):
            with pytest.raises(ConfigurationError, match=words):
                await attempt
    await drop_subscription(name, target=sqlite_file.url, settings=SETTINGS)


async def test_prepared_transactions_that_wait_keep_two_phase(publisher18_db: Database, sqlite_file: OtherTarget) -> None:
    publisher, target = publisher18_db, sqlite_file
    publisher.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE PUBLICATION pub FOR TABLE t; INSERT INTO t VALUES (1, 'a')")
    name = await create(publisher, target, options=SubscriptionOptions(two_phase=True))
    waiting = f"SELECT gid FROM {target.ours('prepared_transaction')}"
    async with launched(target):
        await same(publisher, target, name)
        state = f"SELECT subtwophasestate FROM {target.ours('pg_subscription')}"
        await asyncio.to_thread(target.wait, state, [("e",)])
        publisher.execute("BEGIN; INSERT INTO t VALUES (2, 'b'); PREPARE TRANSACTION 'waits'")
        await asyncio.to_thread(target.wait, waiting, [("waits",)])
        assert target.fetch(ALL) == [(1, "a")]
        async with alter_subscription(name, target=target.url, settings=SETTINGS) as subscription:
            await subscription.disable()
        async with alter_subscription(name, target=target.url, settings=SETTINGS) as subscription:
            with pytest.raises(ConfigurationError, match='cannot disable "two_phase" when prepared transactions exist'):
                await subscription.set({"two_phase": False})
            await subscription.enable()
        publisher.execute("COMMIT PREPARED 'waits'")
        assert await same(publisher, target, name) == [(1, "a"), (2, "b")]
        assert target.fetch(waiting) == []
        publisher.execute("BEGIN; INSERT INTO t VALUES (3, 'c'); PREPARE TRANSACTION 'left'")
        await asyncio.to_thread(target.wait, waiting, [("left",)])
    done = await asyncio.to_thread(subscriber, "drop", name, f"--target={target.url}")
    assert done.status == 0
    assert "prepared transactions were waiting for their COMMIT PREPARED and were removed with the subscription: left" in done.errors
    publisher.execute("ROLLBACK PREPARED 'left'")
    assert slots(publisher) == []


async def test_skip_and_disable_on_error(publisher18_db: Database, sqlite_file: OtherTarget) -> None:
    publisher, target = publisher18_db, sqlite_file
    publisher.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE PUBLICATION pub FOR TABLE t; INSERT INTO t VALUES (1, 'a')")
    name = await create(publisher, target, options=SubscriptionOptions(disable_on_error=True))
    async with launched(target):
        await same(publisher, target, name)
        # the launcher is in this very loop, and may hold the file
        await asyncio.to_thread(target.execute, "INSERT INTO t VALUES (2, 'in the way')")
        publisher.execute("INSERT INTO t VALUES (2, 'b')")
        await asyncio.to_thread(target.wait, f"SELECT subenabled FROM {target.ours('pg_subscription')}", [(0,)])
        (status,) = await subscription_status(target.url)
        assert status.observation.last_error is not None
        assert 'relation "public.t"' in status.observation.last_error
        assert status.observation.counters["confl_insert_exists"] == 1
        lsn = status.observation.last_error.rsplit("finished at ", 1)[1].split()[0].strip(";,")
        done = await asyncio.to_thread(subscriber, "alter", name, f"--target={target.url}", f"--skip-lsn={lsn}")
        assert (done.status, done.errors) == (0, "")
        done = await asyncio.to_thread(subscriber, "alter", name, f"--target={target.url}", "--enable")
        assert (done.status, done.errors) == (0, "")
        publisher.execute("INSERT INTO t VALUES (3, 'c')")
        await asyncio.to_thread(target.wait, "SELECT v FROM t WHERE id >= 2 ORDER BY id", [("in the way",), ("c",)])
    await drop_subscription(name, target=target.url, settings=SETTINGS)


async def test_skip_of_a_prepared_transaction_that_is_refused_at_its_commit(publisher18_db: Database, sqlite_file: OtherTarget) -> None:
    """The bug was that the LSN that the error named skipped nothing, and the transaction was retried for ever."""
    publisher, target = publisher18_db, sqlite_file
    publisher.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE PUBLICATION pub FOR TABLE t; INSERT INTO t VALUES (1, 'a')")
    name = await create(publisher, target, options=SubscriptionOptions(disable_on_error=True, two_phase=True))
    async with launched(target):
        await same(publisher, target, name)
        two_phase = f"SELECT subtwophasestate FROM {target.ours('pg_subscription')}"
        await asyncio.to_thread(target.wait, two_phase, [("e",)])
        publisher.execute("BEGIN; INSERT INTO t VALUES (2, 'b'); PREPARE TRANSACTION 'refused'")
        await asyncio.to_thread(target.wait, f"SELECT gid FROM {target.ours('prepared_transaction')}", [("refused",)])
        await asyncio.to_thread(target.execute, "INSERT INTO t VALUES (2, 'in the way')")
        publisher.execute("COMMIT PREPARED 'refused'")
        await asyncio.to_thread(target.wait, f"SELECT subenabled FROM {target.ours('pg_subscription')}", [(0,)])
        (status,) = await subscription_status(target.url)
        assert status.observation.last_error is not None
        lsn = status.observation.last_error.rsplit("finished at ", 1)[1].split()[0].strip(";,")
        for change in (f"--skip-lsn={lsn}", "--enable"):
            done = await asyncio.to_thread(subscriber, "alter", name, f"--target={target.url}", change)
            assert (done.status, done.errors) == (0, "")
        publisher.execute("INSERT INTO t VALUES (3, 'c')")
        await asyncio.to_thread(target.wait, "SELECT v FROM t WHERE id >= 2 ORDER BY id", [("in the way",), ("c",)])
        assert target.fetch(f"SELECT gid FROM {target.ours('prepared_transaction')}") == []
        assert target.fetch(f"SELECT subskiplsn FROM {target.ours('pg_subscription')}") == [("0/0",)]
    await drop_subscription(name, target=target.url, settings=SETTINGS)


@IN_BOTH_ALIKE
async def test_counters_are_reset_while_it_runs(publisher18_db: Database, other_target: OtherTarget) -> None:
    publisher, target = publisher18_db, other_target
    publisher.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE PUBLICATION pub FOR TABLE t; INSERT INTO t VALUES (1, 'a'), (2, 'b')"
    )
    name = await create(publisher, target)

    async def missing(count: int) -> SubscriptionStatus:
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                (status,) = await subscription_status(target.url)
                if status.observation.counters["confl_update_missing"] == count:
                    return status
                await asyncio.sleep(0.05)

    async with launched(target):
        await same(publisher, target, name)
        await asyncio.to_thread(target.execute, "DELETE FROM t")
        publisher.execute("UPDATE t SET v = 'c'")
        before = await missing(2)
        assert before.observation.stats_reset is None
        done = await asyncio.to_thread(subscriber, "alter", name, f"--target={target.url}", "--reset-stats")
        assert (done.status, done.output, done.errors) == (0, "", "")
        after = await missing(0)
        assert after.observation.stats_reset is not None
        # no process was stopped
        assert after.observation.pid == before.observation.pid
        publisher.execute("UPDATE t SET v = 'd' WHERE id = 1")
        await missing(1)
    await drop_subscription(name, target=target.url, settings=SETTINGS)
    with pytest.raises(TargetError, match=r'^subscription "gone" does not exist$'):
        await reset_subscription_stats("gone", target=target.url)
