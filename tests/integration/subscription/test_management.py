"""create, alter, drop and the launcher, as a person who knows CREATE SUBSCRIPTION expects them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from subscriber import (
    ConfigurationError,
    Launcher,
    Lsn,
    PublisherError,
    Subscription,
    SubscriptionChanged,
    SubscriptionInUse,
    SubscriptionOptions,
    TargetError,
    alter_subscription,
    create_subscription,
    drop_subscription,
)
from subscriber.errors import PublisherUnavailable, RelationError, TargetUnavailable
from subscriber.interfaces import TableEntry, TableName
from subscriber.sinks.postgres.catalog.target_identity import TARGET
from subscriber.sinks.postgres.opened_postgres_sink import OpenedPostgresSink
from subscriber.subscription.targets import open_catalog, open_target
from tests.support.database import Database, ServerAddress, fresh_database
from tests.support.managed import create, launched, same
from tests.support.program import slots
from tests.support.replica import QUICK, replica

ROWS = "SELECT id, v FROM t ORDER BY id"
TABLES = "SELECT srrelid::regclass::text, srsubstate::text FROM subscriber.pg_subscription_rel ORDER BY 1"


def tables(publisher: Database, target: Database, *names: str) -> None:
    for database in (publisher, target):
        for name in names:
            database.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, v text)")


async def defined(target: Database) -> Subscription:
    """The only subscription of a target, as a launcher runs it."""
    catalog = await open_catalog(target.dsn, "test")
    try:
        (definition,) = await catalog.subscriptions()
    finally:
        await catalog.close()
    return Subscription.of_definition(definition, target.dsn, QUICK)


async def test_life_of_a_subscription_from_create_to_drop(publisher18_db: Database, target_db: Database) -> None:
    tables(publisher18_db, target_db, "t", "u")
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t; CREATE PUBLICATION more FOR TABLE u; INSERT INTO t VALUES (1, 'a')")
    name = await create(publisher18_db, target_db)
    # there when it returns
    assert slots(publisher18_db) == [name]
    assert target_db.fetch(TABLES) == [("t", "i")]
    assert target_db.fetch("SELECT subname, subenabled, subslotname, subpublications FROM subscriber.pg_subscription") == [
        (name, True, name, ["pub"])
    ]
    with pytest.raises(TargetError, match=f'^subscription "{name}" already exists$'):
        await create(publisher18_db, target_db)
    async with launched(target_db):
        assert await same(publisher18_db, target_db, name, ROWS) == [(1, "a")]
        publisher18_db.execute("INSERT INTO t VALUES (2, 'b'); INSERT INTO u VALUES (1, 'u')")
        assert await same(publisher18_db, target_db, name, ROWS) == [(1, "a"), (2, "b")]
        async with alter_subscription(name, target=target_db.dsn, settings=QUICK) as subscription:
            await subscription.add_publications(["more"])
            # added when it returns, as pollers of srsubstate expect
            assert target_db.fetch(TABLES) == [("t", "r"), ("u", "i")]
        assert await same(publisher18_db, target_db, name, "SELECT id, v FROM u") == [(1, "u")]
        async with alter_subscription(name, target=target_db.dsn, settings=QUICK) as subscription:
            await subscription.disable()
        publisher18_db.execute("INSERT INTO t VALUES (3, 'c')")
        target_db.wait("SELECT count(*) FROM subscriber.pg_stat_subscription WHERE pid IS NOT NULL", 0)
        publisher18_db.wait("SELECT count(*) FROM pg_replication_slots WHERE active AND database = current_database()", 0)
        renamed = f"{name}_2"
        async with alter_subscription(name, target=target_db.dsn, settings=QUICK) as subscription:
            await subscription.rename(renamed)
            await subscription.set({"binary": True, "streaming": "off", "origin": "none", "synchronous_commit": "local"})
            await subscription.enable()
        assert len(await same(publisher18_db, target_db, renamed, ROWS)) == 3
        assert publisher18_db.fetch("SELECT application_name FROM pg_stat_replication WHERE state = 'streaming'") == [(renamed,)]
        await drop_subscription(renamed, target=target_db.dsn, settings=QUICK)
        assert slots(publisher18_db) == []
        for table in ("pg_subscription", "pg_subscription_rel", '"position"', "worker", "subscription_stats"):
            assert target_db.value(f"SELECT count(*) FROM subscriber.{table}") == 0
        assert len(target_db.fetch(ROWS)) == 3
    with pytest.raises(TargetError, match=r'^subscription "gone" does not exist$'):
        await drop_subscription("gone", target=target_db.dsn)


async def test_refresh_and_removed_tables(publisher18_db: Database, target_db: Database) -> None:
    tables(publisher18_db, target_db, "t", "u", "w")
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t, u; INSERT INTO t VALUES (1, 'a'); INSERT INTO w VALUES (1, 'w')")
    name = await create(publisher18_db, target_db)
    async with launched(target_db):
        await same(publisher18_db, target_db, name, ROWS)
        publisher18_db.execute("ALTER PUBLICATION pub ADD TABLE w; ALTER PUBLICATION pub DROP TABLE u; INSERT INTO w VALUES (2, 'w')")
        await same(publisher18_db, target_db, name, ROWS)
        # not part of the subscription before a refresh
        assert target_db.fetch("SELECT * FROM w") == []
        async with alter_subscription(name, target=target_db.dsn, settings=QUICK) as subscription:
            await subscription.refresh(copy_data=False)
        assert target_db.fetch(TABLES) == [("t", "r"), ("w", "r")]
        publisher18_db.execute("INSERT INTO w VALUES (3, 'w')")
        await same(publisher18_db, target_db, name, ROWS)
        assert target_db.fetch("SELECT id FROM w") == [(3,)]
        publisher18_db.execute("CREATE TABLE absent (id int); ALTER PUBLICATION pub ADD TABLE absent, u")
        async with alter_subscription(name, target=target_db.dsn, settings=QUICK) as subscription:
            with pytest.raises(TargetError, match=r'"public\.absent" does not exist'):
                await subscription.refresh()
        assert target_db.fetch(TABLES) == [("t", "r"), ("w", "r")], "all or nothing"
    await drop_subscription(name, target=target_db.dsn, settings=QUICK)


async def test_refusals_in_natives_words(publisher18_db: Database, target_db: Database) -> None:
    tables(publisher18_db, target_db, "t")
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t")
    name = await create(publisher18_db, target_db, options=SubscriptionOptions(enabled=False))
    async with alter_subscription(name, target=target_db.dsn, settings=QUICK) as subscription:
        for attempt, words in (
            (subscription.refresh(), "ALTER SUBSCRIPTION ... REFRESH is not allowed for disabled subscriptions"),
            (subscription.add_publications(["more"]), "ALTER SUBSCRIPTION with refresh is not allowed for disabled subscriptions"),
            (subscription.add_publications(["pub"]), f'publication "pub" is already in subscription "{name}"'),
            (subscription.add_publications(["a", "a"]), 'publication name "a" used more than once'),
            (subscription.drop_publications(["other"]), f'publication "other" is not in subscription "{name}"'),
            (subscription.drop_publications(["pub"]), "cannot drop all the publications from a subscription"),
            (subscription.set({"copy_data": False}), 'unrecognized subscription parameter: "copy_data"'),
            (subscription.set({"streaming": "some"}), 'streaming requires a Boolean value or "parallel"'),
            (subscription.set({"binary": "perhaps"}), "binary requires a Boolean value"),
            (subscription.set({"origin": "some"}), 'unrecognized origin value: "some"'),
            (subscription.set({"synchronous_commit": "some"}), 'invalid value for parameter "synchronous_commit": "some"'),
            (subscription.set({"slot_name": "Not A Name"}), 'replication slot name "Not A Name" contains an invalid character'),
            (subscription.skip(Lsn(1)), "skip WAL location \\(LSN 0/1\\) must be greater than origin LSN"),
            (subscription.skip(Lsn(0)), "invalid WAL location \\(LSN\\): 0/0"),
            (subscription.set_connection("no such thing"), "invalid connection string"),
        ):
            with pytest.raises(ConfigurationError, match=words):
                await attempt
        await subscription.set_publications(["later"], refresh=False)
        assert subscription.definition.publications == ("later",)
        await subscription.set_publications(["pub"], refresh=False)
        await subscription.set({"slot_name": "none"})
        with pytest.raises(ConfigurationError, match="cannot enable subscription that does not have a slot name"):
            await subscription.enable()
        await subscription.set({"slot_name": name})
        await subscription.enable()
        with pytest.raises(ConfigurationError, match="cannot set slot_name = NONE for enabled subscription"):
            await subscription.set({"slot_name": "none"})
        for option in ("failover", "two_phase"):
            with pytest.raises(ConfigurationError, match=f'cannot set option "{option}" for enabled subscription'):
                await subscription.set({option: True})
        await subscription.disable()
        await subscription.set({"two_phase": True, "failover": True})
        assert publisher18_db.value(f"SELECT failover FROM pg_replication_slots WHERE slot_name = '{name}'") is True
        assert subscription.definition.two_phase == "p"
        with pytest.raises(TargetError, match=f'subscription "{name}" already exists'):
            await create(publisher18_db, target_db, name)
    await drop_subscription(name, target=target_db.dsn, settings=QUICK)


async def test_nothing_half_done(publisher18_db: Database, target_db: Database) -> None:
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR TABLE t")
    name = f"sub_{publisher18_db.name}"
    with pytest.raises(TargetError, match=r'"public\.t" does not exist'):
        await create(publisher18_db, target_db)
    assert slots(publisher18_db) == []
    assert target_db.value("SELECT count(*) FROM subscriber.pg_subscription") == 0
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    with pytest.raises(PublisherError):
        await create_subscription(name, connection=publisher18_db.conninfo(port="1"), publications=["pub"], target=target_db.dsn)
    assert target_db.value("SELECT count(*) FROM subscriber.pg_subscription") == 0
    # killed between the slot and the end: the next one of this name cleans up
    await create(publisher18_db, target_db)
    target_db.execute("UPDATE subscriber.pg_subscription SET submade = false, subenabled = false")
    async with launched(target_db) as launcher:
        assert launcher.subscriptions == {}
        await create(publisher18_db, target_db)
        assert slots(publisher18_db) == [name]
        publisher18_db.execute("INSERT INTO t VALUES (1)")
        await same(publisher18_db, target_db, name, "SELECT * FROM t")
    await drop_subscription(name, target=target_db.dsn)


async def test_a_slot_that_was_there_before_outlives_a_create_that_fails(publisher18_db: Database, target_db: Database) -> None:
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR TABLE t")
    name = f"sub_{publisher18_db.name}"
    publisher18_db.fetch(f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')")
    publisher18_db.execute("INSERT INTO t VALUES (1)")
    options = SubscriptionOptions(create_slot=False, copy_data=False)
    with pytest.raises(TargetError, match=r'"public\.t" does not exist'):
        await create(publisher18_db, target_db, options=options)
    assert slots(publisher18_db) == [name]
    # nor does one that was killed take it along
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    target_db.execute(
        "INSERT INTO subscriber.pg_subscription (oid, subname, subtarget, subowner, subenabled, submade, subconninfo)"
        f" SELECT 99999, '{name}', ({TARGET}), current_user, false, false, ''"
    )
    await create(publisher18_db, target_db, options=options)
    assert target_db.value("SELECT subslotname FROM subscriber.pg_subscription") == name
    async with launched(target_db):
        # everything since the slot was made
        assert await same(publisher18_db, target_db, name, "SELECT * FROM t") == [(1,)]
    await drop_subscription(name, target=target_db.dsn, settings=QUICK)
    assert slots(publisher18_db) == []


async def test_a_worker_that_comes_late_makes_nothing(publisher18_db: Database, target_db: Database) -> None:
    """Dropped or renamed since its definition was read: the bug was an entry of that name, which no launcher ran and create rejected."""
    tables(publisher18_db, target_db, "t")
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t")
    name = await create(publisher18_db, target_db)
    late = await defined(target_db)
    await drop_subscription(name, target=target_db.dsn, settings=QUICK)
    with pytest.raises(SubscriptionChanged):
        await late.run()
    assert target_db.value("SELECT count(*) FROM subscriber.pg_subscription") == 0
    sink = open_target(target_db.dsn, SubscriptionOptions(), QUICK, defined=True)
    with pytest.raises(SubscriptionChanged):
        await sink.open(name, lambda _: None)
    # the same between two connections of one that its command line defines; looked for, it is made
    sink = open_target(target_db.dsn, SubscriptionOptions(), QUICK)
    await (await sink.open(name, lambda _: None)).close()
    await drop_subscription(name, target=target_db.dsn, settings=QUICK)
    with pytest.raises(SubscriptionChanged):
        await sink.open(name, lambda _: None)
    assert target_db.value("SELECT count(*) FROM subscriber.pg_subscription") == 0
    assert not await sink.exists(name)
    await (await sink.open(name, lambda _: None)).close()
    await drop_subscription(name, target=target_db.dsn, settings=QUICK)


async def test_refresh_that_was_cut_off(publisher18_db: Database, target_db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken back with tables added, these were copied and then never followed."""
    tables(publisher18_db, target_db, "t", "u", "w")
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t; CREATE PUBLICATION more FOR TABLE u, w; INSERT INTO u VALUES (1, 'u')")
    name = await create(publisher18_db, target_db)
    add_tables = OpenedPostgresSink.add_tables

    async def add_one(self: OpenedPostgresSink, tables: Sequence[TableName], entry: TableEntry) -> Mapping[TableName, RelationError]:
        await add_tables(self, [table for table in tables if table.name != "w"], entry)
        raise TargetUnavailable("connection to the target was lost")

    with monkeypatch.context() as patched:
        patched.setattr(OpenedPostgresSink, "add_tables", add_one)
        async with alter_subscription(name, target=target_db.dsn, settings=QUICK) as subscription:
            with pytest.raises(TargetUnavailable) as caught:
                await subscription.add_publications(["more"])
    assert "the subscription completes it when it runs next" in caught.value.one_line()

    async def lost(*_: object) -> None:
        raise PublisherUnavailable("lost the connection to the publisher")

    async with launched(target_db):
        assert await same(publisher18_db, target_db, name, "SELECT id, v FROM u") == [(1, "u")]
        assert [table for table, _ in target_db.fetch(TABLES)] == ["t", "u", "w"]
        with monkeypatch.context() as patched:
            patched.setattr("subscriber.subscription.setup.setup.drop_leftover_slots", lost)
            async with alter_subscription(name, target=target_db.dsn, settings=QUICK) as subscription:
                await subscription.drop_publications(["more"])
                assert subscription.definition.publications == ("pub",)
        assert [table for table, _ in target_db.fetch(TABLES)] == ["t"]
    await drop_subscription(name, target=target_db.dsn, settings=QUICK)


@pytest.mark.parametrize("encoding", ["LATIN1", "UTF8"])
async def test_errors_that_the_target_cannot_spell(publisher18_db: Database, target_server: ServerAddress, encoding: str) -> None:
    """The bug was that the launcher tried to store it for ever, and followed no other change."""
    with fresh_database(target_server, "tgt", f"ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0") as target:
        publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR TABLE t")
        target.execute("CREATE TABLE t (id int PRIMARY KEY)")
        name = await create(publisher18_db, target)
        catalog = await open_catalog(target.dsn, "test")
        text = "SELECT last_error FROM subscriber.subscription_stats"
        for error, escaped in (("нет…", r"\u043d\u0435\u0442\u2026"), ("\udcff", r"\udcff")):
            await catalog.note_error((await catalog.subscriptions())[0].oid, error)
            assert target.value(text) == (error if encoding == "UTF8" and error.isprintable() else escaped)
        await catalog.close()
        sink = open_target(target.dsn, SubscriptionOptions(), QUICK)
        opened = await sink.open(name, lambda _: None)
        await opened.report([], "нет")
        assert target.value(text) == ("нет" if encoding == "UTF8" else r"\u043d\u0435\u0442")
        await opened.close()
        await drop_subscription(name, target=target.dsn, settings=QUICK)


async def test_drop_needs_the_publisher_or_no_slot(publisher18_db: Database, target_db: Database) -> None:
    tables(publisher18_db, target_db, "t")
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t")
    name = await create(publisher18_db, target_db, options=SubscriptionOptions(enabled=False))
    async with alter_subscription(name, target=target_db.dsn) as subscription:
        await subscription.set_connection(publisher18_db.conninfo(port="1"))
    with pytest.raises(PublisherError, match=f'could not connect to publisher when attempting to drop replication slot "{name}"'):
        await drop_subscription(name, target=target_db.dsn)
    async with alter_subscription(name, target=target_db.dsn) as subscription:
        await subscription.set({"slot_name": "none"})
    await drop_subscription(name, target=target_db.dsn)
    assert target_db.value("SELECT count(*) FROM subscriber.pg_subscription") == 0
    assert slots(publisher18_db) == [name]


async def test_not_connected(publisher18_db: Database, target_db: Database) -> None:
    tables(publisher18_db, target_db, "t")
    name = f"sub_{publisher18_db.name}"
    options = SubscriptionOptions.parse(["connect=false"])
    await create_subscription(name, connection=publisher18_db.conninfo(), publications=["pub"], target=target_db.dsn, options=options)
    assert slots(publisher18_db) == []
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t")
    publisher18_db.fetch(f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')")
    publisher18_db.execute("INSERT INTO t VALUES (1, 'before')")
    async with launched(target_db):
        async with alter_subscription(name, target=target_db.dsn) as subscription:
            await subscription.enable()
            await subscription.refresh()
        await same(publisher18_db, target_db, name, ROWS)
    await drop_subscription(name, target=target_db.dsn)


async def test_one_launcher_and_no_claim_over_a_run(publisher18_db: Database, target_db: Database) -> None:
    tables(publisher18_db, target_db, "t")
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t; INSERT INTO t VALUES (1, 'a')")
    name = await create(publisher18_db, target_db)
    async with launched(target_db, name):
        await same(publisher18_db, target_db, name, ROWS)
        with pytest.raises(SubscriptionInUse, match="the launcher of this target is active for PID"):
            await Launcher(target_db.dsn).run()
    with pytest.raises(TargetError, match='subscription "absent" does not exist'):
        await Launcher(target_db.dsn, ["absent"]).run()
    await drop_subscription(name, target=target_db.dsn)


async def test_worker_between_two_connections_learns_of_a_verb(publisher18_db: Database, target_db: Database) -> None:
    """No launcher stops it: it must not continue with its old definition."""
    tables(publisher18_db, target_db, "t", "u")
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t; INSERT INTO t VALUES (1, 'a')")
    name = await create(publisher18_db, target_db)
    subscription = await defined(target_db)
    running = asyncio.create_task(subscription.run())
    await same(publisher18_db, target_db, name, ROWS)
    await asyncio.to_thread(target_db.wait, "SELECT srsubstate::text FROM subscriber.pg_subscription_rel", "r")
    publisher18_db.execute("ALTER PUBLICATION pub ADD TABLE u; INSERT INTO u VALUES (1, 'u')")

    async def refresh() -> None:
        async with alter_subscription(name, target=target_db.dsn, settings=QUICK) as altered:
            await altered.refresh()

    refreshing = asyncio.create_task(refresh())
    await asyncio.to_thread(target_db.wait, "SELECT subgeneration::int FROM subscriber.pg_subscription", 1)
    assert not running.done()
    target_db.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = '{name}'")
    await asyncio.wait_for(refreshing, 30)
    with pytest.raises(SubscriptionChanged):
        await asyncio.wait_for(running, 30)
    assert target_db.fetch(TABLES) == [("t", "r"), ("u", "i")]
    async with launched(target_db):
        assert await same(publisher18_db, target_db, name, "SELECT id, v FROM u") == [(1, "u")]
    await drop_subscription(name, target=target_db.dsn, settings=QUICK)


async def test_publications_cut_off_before_their_refresh(publisher18_db: Database, target_db: Database) -> None:
    tables(publisher18_db, target_db, "t", "u")
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t; CREATE PUBLICATION more FOR TABLE u; INSERT INTO u VALUES (1, 'u')")
    name = await create(publisher18_db, target_db)
    # what a verb leaves that is killed behind its first step
    target_db.execute("UPDATE subscriber.pg_subscription SET subpublications = '{pub,more}', subrefresh = true")
    async with launched(target_db):
        assert await same(publisher18_db, target_db, name, "SELECT id, v FROM u") == [(1, "u")]
        assert target_db.value("SELECT subrefresh IS NULL FROM subscriber.pg_subscription")
    await drop_subscription(name, target=target_db.dsn, settings=QUICK)


async def test_rejected_verb_changes_nothing_for_a_running_subscription(publisher18_db: Database, target_db: Database) -> None:
    tables(publisher18_db, target_db, "t")
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t; INSERT INTO t VALUES (1, 'a')")
    async with replica(publisher18_db, target_db) as found:
        await found.caught_up()
        name = found.subscription.name
        began = asyncio.get_running_loop().time()
        with pytest.raises(SubscriptionInUse, match="is active for PID"):
            async with alter_subscription(name, target=target_db.dsn):
                pass
        assert asyncio.get_running_loop().time() - began < 10, "no launcher stops it: it is not waited for"
        target_db.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = '{name}'")
        publisher18_db.execute("INSERT INTO t VALUES (2, 'b')")
        await found.same(ROWS)


async def test_one_bad_row_of_the_catalog_is_no_reason_to_end_the_others(publisher18_db: Database, target_db: Database) -> None:
    tables(publisher18_db, target_db, "t", "u")
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t; CREATE PUBLICATION more FOR TABLE u; INSERT INTO u VALUES (1, 'u')")
    good = await create(publisher18_db, target_db, f"good_{publisher18_db.name}", "more")
    bad = await create(publisher18_db, target_db, f"bad_{publisher18_db.name}")
    target_db.execute(f"UPDATE subscriber.pg_subscription SET subpublications = '{{}}' WHERE subname = '{bad}'")
    async with launched(target_db):
        assert await same(publisher18_db, target_db, good, "SELECT id, v FROM u") == [(1, "u")]
        stats = "subscriber.subscription_stats JOIN subscriber.pg_subscription s ON s.oid = subid"
        error = f"SELECT last_error LIKE 'no publication%' FROM {stats} WHERE subname = '{bad}'"
        await asyncio.to_thread(target_db.wait, error, True)
        # an error is shown as long as it is retried
        publisher18_db.execute("INSERT INTO u VALUES (2, 'u')")
        await same(publisher18_db, target_db, good, "SELECT id, v FROM u")
        target_db.execute("INSERT INTO u VALUES (3, 'of the target')")
        publisher18_db.execute("INSERT INTO u VALUES (3, 'u')")
        await asyncio.to_thread(target_db.wait, f"SELECT last_error LIKE 'duplicate key%' FROM {stats} WHERE subname = '{good}'", True)
    for name in (good, bad):
        await drop_subscription(name, target=target_db.dsn, settings=QUICK)
