"""When changes are lost: the run ends with a DataLossError that names the cause and the remedy, and the target's rows stay as they are.

One command, ``recover``, lets the next run make the target equal again.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from subscriber import ConfigurationError, DataLossError, SubscriberError
from subscriber.subscription.management.recover import recover
from subscriber.testing.server import EmbeddedServer
from tests.support.database import Database, ServerAddress
from tests.support.observation import acknowledged, all_ready, eventually, slot_of, target_gid
from tests.support.replica import QUICK, replica, subscription_of
from tests.support.standby import standby_of

MakeServer = Callable[..., EmbeddedServer]

LSN = re.compile(r"[0-9A-F]+/[0-9A-F]+")
TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text)"
ROWS = "SELECT id, v FROM t ORDER BY id"
CATALOG = (
    "SELECT s::text, r::text, s.xmin::text, r.xmin::text FROM subscriber.pg_subscription s, subscriber.pg_subscription_rel r ORDER BY 2"
)
SLOTS = "SELECT slot_name::text, active, confirmed_flush_lsn::text FROM pg_replication_slots WHERE database = current_database()"
AHEAD = "it may be the slot of another target"
POSITION = 'SELECT remote_lsn::text FROM subscriber."position" WHERE srrelid = 0'


def make_tables(publisher: Database, target: Database) -> None:
    for database in (publisher, target):
        database.execute(TABLE)
    publisher.execute("INSERT INTO t VALUES (1, 'copied'); CREATE PUBLICATION pub FOR TABLE t")


async def refused(publisher: Database, target: Database, **arguments: Any) -> str:
    """The next run ends with a loss; what it says, on one line. Nothing in the target changes."""
    before = target.fetch(ROWS), target.fetch(POSITION)
    with pytest.raises(DataLossError) as caught:
        await asyncio.wait_for(subscription_of(publisher, target, **arguments).run(), 30)
    assert (target.fetch(ROWS), target.fetch(POSITION)) == before
    line = caught.value.one_line()
    assert "\n" not in line
    assert caught.value.hint
    return line


async def recovered(
    publisher: Database,
    target: Database,
    reason: str | None = None,
    *,
    unforced: str | None = None,
    other: str | None = None,
    **arguments: Any,
) -> None:
    """One command, and the next run ends equal.

    ``reason`` is what a run has said; None: nothing that a check finds. ``unforced``, ``other``: why the command is refused without
    ``--force``, and without ``--accept-publisher``.
    """
    name = f"replica_{publisher.name}"
    known: dict[str, Any] = {"target": target.dsn, "connection": arguments.get("conninfo") or publisher.conninfo()}
    before = target.fetch(ROWS), target.fetch(POSITION)
    slots = publisher.fetch(SLOTS)
    force = reason is None or unforced is not None
    refusals: list[tuple[str | None, dict[str, Any]]] = [(other, {"force": force}), (unforced, {"accept_publisher": other is not None})]
    for message, given in refusals:
        for dry_run in (True, False) if message else ():
            with pytest.raises(ConfigurationError, match=message):
                await recover(name, dry_run=dry_run, **given, **known)
            assert publisher.fetch(SLOTS) == slots
    known |= {"force": force, "accept_publisher": other is not None}
    catalog = target.fetch(CATALOG)
    planned = await recover(name, dry_run=True, **known)
    assert (target.fetch(CATALOG), publisher.fetch(SLOTS)) == (catalog, slots)
    assert [table.name.name for table in planned.tables] == ["t"]
    # the WAL may have grown
    assert LSN.sub("", planned.reason) in LSN.sub("", reason or "nothing seems to be lost")
    assert (target.fetch(ROWS), target.fetch(POSITION)) == before
    await recover(name, **known)
    async with replica(publisher, target, **arguments) as found:
        if "conninfo" not in arguments:
            await found.same(ROWS)
            publisher.execute("INSERT INTO t VALUES (100000, 'after'); DELETE FROM t WHERE id = 1")
            await found.same(ROWS)
            return
        await all_ready(found)


class TestSlot:
    @pytest.mark.matrix
    async def test_dropped_and_made_again(self, publisher_db: Database, target_db: Database) -> None:
        make_tables(publisher_db, target_db)
        async with replica(publisher_db, target_db) as found:
            await all_ready(found)
            # it does not stop the process that runs it
            known: dict[str, Any] = {"target": target_db.dsn, "connection": publisher_db.conninfo()}
            planned = await recover(f"replica_{publisher_db.name}", dry_run=True, force=True, **known)
            assert planned.reason == "nothing seems to be lost"
            publisher_db.execute("INSERT INTO t VALUES (2, 'followed')")
            await found.same(ROWS)
        slot = slot_of(publisher_db)
        publisher_db.execute(f"SELECT pg_drop_replication_slot('{slot}'); INSERT INTO t VALUES (3, 'lost')")
        line = await refused(publisher_db, target_db)
        assert f'replication slot "{slot}" does not exist on the publisher any more' in line
        assert "`subscriber recover NAME`" in line
        # nothing was made in its place
        assert publisher_db.value("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == 0
        publisher_db.execute(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
        line = await refused(publisher_db, target_db)
        assert f'replication slot "{slot}" was advanced to ' in line
        assert "recreated" in line
        await recovered(publisher_db, target_db, line, unforced=AHEAD)
        with pytest.raises(ConfigurationError, match="has lost nothing"):
            await recover(f"replica_{publisher_db.name}", target=target_db.dsn, connection=publisher_db.conninfo())

    async def test_advanced(self, publisher_db: Database, target_db: Database) -> None:
        make_tables(publisher_db, target_db)
        async with replica(publisher_db, target_db) as found:
            await all_ready(found)
            await found.caught_up()
        publisher_db.execute("INSERT INTO t VALUES (2, 'lost')")
        to = publisher_db.value(f"SELECT end_lsn::text FROM pg_replication_slot_advance('{slot_of(publisher_db)}', pg_current_wal_lsn())")
        line = await refused(publisher_db, target_db)
        assert (
            f'replication slot "{slot_of(publisher_db)}" was advanced to {to}, past position {target_db.value(POSITION)} of the target'
            in line
        )
        # rows that only the target has are deleted
        target_db.execute("INSERT INTO t VALUES (-1, 'extra')")
        await recovered(publisher_db, target_db, line, unforced=AHEAD)

    @pytest.mark.parametrize("again", [False, True], ids=["dropped", "made again"])
    async def test_dropped_while_it_is_followed(self, publisher_db: Database, target_db: Database, again: bool) -> None:
        make_tables(publisher_db, target_db)
        subscription = subscription_of(publisher_db, target_db)
        running = asyncio.create_task(subscription.run())
        try:
            await subscription.wait_for(publisher_db.current_lsn(), 30)
            slot = slot_of(publisher_db)
            # no await in between: the subscription cannot reconnect before the slot is dropped
            publisher_db.execute(f"SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = '{slot}' AND active")
            publisher_db.wait(f"SELECT active FROM pg_replication_slots WHERE slot_name = '{slot}'", False)
            publisher_db.execute(f"SELECT pg_drop_replication_slot('{slot}'); INSERT INTO t VALUES (2, 'lost')")
            if again:
                publisher_db.execute(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
            with pytest.raises(DataLossError, match="was advanced to" if again else "does not exist on the publisher any more"):
                await asyncio.wait_for(running, 30)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        assert target_db.fetch(ROWS) == [(1, "copied")]

    async def test_invalidated(self, make_server: MakeServer, target_db: Database) -> None:
        server = make_server(max_slot_wal_keep_size="1MB", max_wal_size="32MB", min_wal_size="32MB")
        server.createdb("pub")
        with contextlib.closing(Database(ServerAddress(server.dsn(), 18), "pub")) as publisher:
            make_tables(publisher, target_db)
            async with replica(publisher, target_db) as found:
                await all_ready(found)
                await found.caught_up()
            for number in range(2, 6):
                publisher.execute(f"INSERT INTO t VALUES ({number}, 'lost')")
                publisher.execute("SELECT pg_switch_wal()")
                publisher.execute("CHECKPOINT")
            status = f"SELECT wal_status FROM pg_replication_slots WHERE slot_name = '{slot_of(publisher)}'"
            await eventually(publisher, status, "lost")
            line = await refused(publisher, target_db)
            assert f'replication slot "{slot_of(publisher)}" was invalidated (wal_removed)' in line
            assert "max_slot_wal_keep_size" in line
            await recovered(publisher, target_db, line)


class TestPublisher:
    async def test_another_one(self, publisher18_db: Database, publisher16_db: Database, target_db: Database) -> None:
        make_tables(publisher18_db, target_db)
        publisher16_db.execute(f"{TABLE}; CREATE PUBLICATION pub FOR TABLE t")
        async with replica(publisher18_db, target_db) as found:
            await all_ready(found)
        publisher16_db.execute(f"SELECT pg_create_logical_replication_slot('{slot_of(publisher18_db)}', 'pgoutput')")
        line = await refused(publisher18_db, target_db, conninfo=publisher16_db.conninfo())
        query = "SELECT system_identifier::text FROM pg_control_system()"
        mine, other = publisher18_db.value(query), publisher16_db.value(query)
        assert f"the publisher's system identifier is {other}, but the target was filled from {mine}" in line
        # as after an upgrade by a dump
        publisher16_db.execute("INSERT INTO t VALUES (7, 'of the other')")
        identifier = "system identifier is .* rows that this publisher does not have would be deleted"
        await recovered(publisher18_db, target_db, line, unforced=AHEAD, other=identifier, conninfo=publisher16_db.conninfo())
        assert target_db.fetch(ROWS) == [(7, "of the other")]

    async def test_restored_to_an_earlier_time(self, make_server: MakeServer, target_db: Database) -> None:
        server = make_server()
        server.createdb("pub")
        address = ServerAddress(server.dsn(), 18)
        with contextlib.closing(Database(address, "pub")) as publisher:
            make_tables(publisher, target_db)
            async with replica(publisher, target_db) as found:
                await all_ready(found)
                await found.caught_up()
        await asyncio.to_thread(server.stop)
        saved = server.base / "saved"
        subprocess.run(["cp", "-a", server.data_directory, saved], check=True)
        server.start()
        with contextlib.closing(Database(address, "pub")) as publisher:
            async with replica(publisher, target_db) as found:
                publisher.execute("INSERT INTO t SELECT g, 'only in the target' FROM generate_series(2, 20000) AS g")
                await found.same("SELECT count(*) FROM t")
        await asyncio.to_thread(server.stop)
        server.data_directory.rename(server.base / "discarded")
        saved.rename(server.data_directory)
        server.start()
        with contextlib.closing(Database(address, "pub")) as publisher:
            line = await refused(publisher, target_db)
            position = target_db.value(POSITION)
            await recovered(publisher, target_db, line)
            assert target_db.value("SELECT count(*) FROM t") == 1
        assert f"before the target's position {position}: it was restored to an earlier time" in line


class TestPreparedTransaction:
    @pytest.mark.publisher(min=15, lacks="two_phase of the replication protocol")
    async def test_prepared_transaction_was_rolled_back_in_the_target(self, publisher_db: Database, target_db: Database) -> None:
        make_tables(publisher_db, target_db)
        subscription = subscription_of(publisher_db, target_db, two_phase=True)
        running = asyncio.create_task(subscription.run())
        try:
            await eventually(target_db, "SELECT to_regclass('subscriber.pg_subscription') IS NOT NULL", True)
            await eventually(target_db, "SELECT subtwophasestate::text FROM subscriber.pg_subscription", "e")
            with publisher_db.connect() as session:
                session.execute("BEGIN; INSERT INTO t VALUES (2, 'x')")
                row = session.execute("SELECT pg_current_xact_id()::text::int").fetchone()
                session.execute(f"PREPARE TRANSACTION '{publisher_db.name}'".encode())
            assert row is not None
            await subscription.wait_for(publisher_db.current_lsn(), 30)
            gid = target_gid(target_db, row[0])
            target_db.execute(f"ROLLBACK PREPARED '{gid}'")
            publisher_db.execute(f"COMMIT PREPARED '{publisher_db.name}'")
            with pytest.raises(DataLossError, match=f'"{gid}" does not exist in the target, and was not committed there'):
                await asyncio.wait_for(running, 30)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        line = await refused(publisher_db, target_db, two_phase=True)
        assert gid in line
        await recovered(publisher_db, target_db, two_phase=True)


@pytest.mark.parametrize(
    ("complete", "relayed"),
    [(True, False), (False, False), pytest.param(True, True, marks=pytest.mark.endurance)],
    ids=["complete", "behind", "relay_log"],
)
async def test_promoted_standby(make_server: MakeServer, target_db: Database, tmp_path: Path, complete: bool, relayed: bool) -> None:
    """With a failover slot: one that has everything is followed on its new timeline, one that lacks what the target has is refused.

    What is in a relay log is applied first.
    """
    settings = replace(QUICK, relay_log=str(tmp_path / "relay") if relayed else None)
    primary = make_server()
    primary.createdb("pub")
    with contextlib.ExitStack() as stack:
        publisher = stack.enter_context(contextlib.closing(Database(ServerAddress(primary.dsn(), 18), "pub")))
        make_tables(publisher, target_db)
        slot = slot_of(publisher)
        standby = stack.enter_context(standby_of(primary))
        copy = stack.enter_context(contextlib.closing(Database(ServerAddress(standby.dsn(), 18), "pub")))
        synced = f"SELECT 1 FROM pg_replication_slots WHERE slot_name = '{slot}' AND synced AND NOT temporary"
        async with replica(publisher, target_db, failover=True, settings=settings) as found:
            await all_ready(found)
            publisher.execute("INSERT INTO t VALUES (2, 'before')")
            await found.same(ROWS)

            async def slot_is_there() -> bool:
                # what the standby needs to take the slot over: our acknowledgement, and a later snapshot of running transactions
                publisher.execute("SELECT pg_log_standby_snapshot()")
                await found.caught_up()
                await eventually(copy, f"SELECT pg_last_wal_replay_lsn() >= '{publisher.current_lsn()}'", True)
                copy.execute("SELECT pg_sync_replication_slots()")
                return bool(copy.fetch(synced))

            async with asyncio.timeout(30):
                while not await slot_is_there():
                    pass
            if not complete:
                copy.execute("ALTER SYSTEM SET primary_conninfo = ''")
                copy.execute("SELECT pg_reload_conf()")
                await eventually(copy, "SELECT count(*) FROM pg_stat_wal_receiver", 0)
            with target_db.connect() as holder:
                if relayed:
                    holder.execute("BEGIN; LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
                publisher.execute("INSERT INTO t VALUES (3, 'last')")
                rows = publisher.fetch(ROWS)
                if relayed:
                    await acknowledged(publisher, publisher.current_lsn())
                    await found.stop()
                    target_db.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
                else:
                    assert await found.same(ROWS) == rows
            if complete:
                await eventually(copy, f"SELECT pg_last_wal_replay_lsn() >= '{publisher.current_lsn()}'", True)
        copy.execute("SELECT pg_promote()")
        if not complete:
            line = await refused(publisher, target_db, conninfo=copy.conninfo())
            assert "the publisher is on timeline 2; timeline 1 of the target's position" in line
            assert "the target holds changes that the promoted server never had" in line
            await recovered(copy, target_db, line)
            return
        copy.execute("INSERT INTO t VALUES (4, 'on the new timeline')")
        async with replica(publisher, target_db, conninfo=copy.conninfo(), settings=settings) as found:
            await found.subscription.wait_for(copy.current_lsn(), 30)
            assert target_db.fetch(ROWS) == [*rows, (4, "on the new timeline")]
        # the position is on a newer timeline than the old primary
        line = await refused(publisher, target_db)
        assert "the publisher is on timeline 1, but the target's position" in line
        assert "connect to the server that was promoted" in line


async def test_promoted_standby_without_the_slot(make_server: MakeServer, target_db: Database) -> None:
    primary = make_server()
    primary.createdb("pub")
    with contextlib.ExitStack() as stack:
        publisher = stack.enter_context(contextlib.closing(Database(ServerAddress(primary.dsn(), 18), "pub")))
        make_tables(publisher, target_db)
        standby = stack.enter_context(standby_of(primary))
        copy = stack.enter_context(contextlib.closing(Database(ServerAddress(standby.dsn(), 18), "pub")))
        async with replica(publisher, target_db) as found:
            await all_ready(found)
            publisher.execute("INSERT INTO t VALUES (2, 'before')")
            await found.same(ROWS)
        await eventually(copy, f"SELECT pg_last_wal_replay_lsn() >= '{publisher.current_lsn()}'", True)
        copy.execute("SELECT pg_promote()")
        copy.execute("INSERT INTO t VALUES (3, 'lost')")
        line = await refused(publisher, target_db, conninfo=copy.conninfo())
        assert "does not exist on the publisher any more" in line
        await recovered(copy, target_db, line)


async def test_what_is_refused(publisher18_db: Database, target_db: Database) -> None:
    """Before anything is changed: the slot and the catalog stay, and the dry run says the same."""
    publisher, target = publisher18_db, target_db
    tree = """
        CREATE TABLE r (id int, shard text, PRIMARY KEY (id, shard)) PARTITION BY LIST (shard);
        CREATE TABLE r_a PARTITION OF r FOR VALUES IN ('a'); CREATE TABLE r_b PARTITION OF r FOR VALUES IN ('b')
    """
    target.execute(f"{tree}; {TABLE}; CREATE TABLE log (id int PRIMARY KEY)")
    publisher.execute(f"""
        {TABLE}; CREATE TABLE r (id int, shard text, PRIMARY KEY (id, shard)); CREATE TABLE r_b (LIKE r INCLUDING ALL);
        CREATE TABLE log (id int PRIMARY KEY); INSERT INTO r VALUES (1, 'a'); INSERT INTO r_b VALUES (1, 'b'); INSERT INTO log VALUES (1);
        CREATE PUBLICATION one FOR TABLE r; CREATE PUBLICATION two FOR TABLE r_b; CREATE PUBLICATION pub FOR TABLE t;
        CREATE PUBLICATION archive FOR TABLE log WITH (publish = 'insert, update')
    """)

    async def refused_without_change(name: str, message: str, **arguments: Any) -> None:
        slots = publisher.fetch(SLOTS)
        for dry_run in (True, False):
            with pytest.raises(SubscriberError, match=message) as caught:
                await recover(f"{name}_{publisher.name}", target=target.dsn, connection=publisher.conninfo(), dry_run=dry_run, **arguments)
            assert caught.value.hint
        assert publisher.fetch(SLOTS) == slots

    kinds: list[tuple[str, dict[str, Any]]] = [("two", {}), ("one", {}), ("archive", {}), ("pub", {"origin": "none"})]
    for name, options in kinds:
        async with replica(publisher, target, name=name, publications=[name], **options) as found:
            await found.caught_up()
    other = r'table "public.{}", which has rows of table "public.{}", also belongs to subscription "{}_'
    await refused_without_change("one", other.format("r_b", "r", "two"), force=True)
    await refused_without_change("two", other.format("r", "r_b", "one"), force=True)
    await refused_without_change("archive", 'table "public.log" cannot be reconciled', force=True)
    publisher.execute(f"SELECT pg_drop_replication_slot('{slot_of(publisher, 'pub')}')")
    await refused_without_change("pub", "has origin = none: rows that were written here")
    publisher.execute("CREATE PUBLICATION again FOR TABLE log WITH (publish = 'insert')")
    with pytest.raises(SubscriberError, match="cannot be reconciled: its publications"):
        await subscription_of(publisher, target, name="new", publications=["again"], copy_data="reconcile").run()
    assert publisher.value(f"SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{slot_of(publisher, 'new')}'") == 0
    # a subscription of PostgreSQL itself
    native = f"native_{target.name}"
    target.execute(f"CREATE SUBSCRIPTION {native} CONNECTION 'dbname=x' PUBLICATION p WITH (connect = false)")
    try:
        oids = f"SELECT oid, 't'::regclass, 'r', NULL FROM pg_subscription WHERE subname = '{native}'"
        target.execute(f"SET allow_system_table_mods = on; INSERT INTO pg_subscription_rel {oids}")
        message = f'table "public.t" also belongs to subscription "{native}" of PostgreSQL itself'
        await refused_without_change("pub", message, force=True)
    finally:
        target.execute(f"ALTER SUBSCRIPTION {native} SET (slot_name = NONE)")
        target.execute(f"DROP SUBSCRIPTION {native}")
    # a slot that another program makes after the command is not dropped by the next run
    slot = slot_of(publisher, "pub")
    await recover(slot, target=target.dsn, connection=publisher.conninfo(), force=True)
    publisher.execute(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    with pytest.raises(SubscriberError, match=f'replication slot "{slot}" already exists'):
        await asyncio.wait_for(subscription_of(publisher, target, name="pub", publications=["pub"], origin="none").run(), 30)
    assert publisher.value(f"SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{slot}'") == 1
