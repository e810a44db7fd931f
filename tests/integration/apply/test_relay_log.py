"""A subscription with a relay log, on live servers: the publisher waits for it, and not for the target."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from subscriber import ConfigurationError, DataLossError, Settings, SubscriptionOptions
from subscriber.errors import SpoolError, SubscriptionInUse
from subscriber.interfaces.worker_details import WorkerDetails
from subscriber.protocol.lsn import Lsn
from subscriber.recording.relay_log import RelayLog
from subscriber.recording.relay_segment import read_head
from subscriber.subscription.cutover.link import Link
from subscriber.subscription.launcher import Launcher
from subscriber.subscription.management.alter import alter_subscription
from subscriber.subscription.management.create import create_subscription
from subscriber.subscription.management.drop import drop_subscription
from subscriber.subscription.management.recover import recover
from subscriber.testing.server import EmbeddedServer
from tests.support.database import WAIT_SECONDS, Database, ServerAddress, fresh_database
from tests.support.observation import PREPARED, acknowledged, all_ready, confirmed, eventually, until
from tests.support.replica import QUICK, replica

TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text)"
ROWS = "SELECT id, md5(v) FROM t ORDER BY id"
TWO_PHASE = "SELECT subtwophasestate::text FROM subscriber.pg_subscription"
TERMINATE = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
RETAINED = "SELECT max(pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn))::int8 FROM pg_replication_slots WHERE NOT temporary"


def settings(directory: Path, size: int = 2**30) -> Settings:
    # 64 kB: large transactions are streamed, and read from the relay log
    return replace(QUICK, relay_log=str(directory / "relay"), relay_log_size=size, logical_decoding_work_mem=128 * 1024)


def tables(publisher: Database, target: Database) -> None:
    for database in (publisher, target):
        database.execute(TABLE)
    publisher.execute("INSERT INTO t SELECT i, 'copied' FROM generate_series(1, 100) AS i; CREATE PUBLICATION pub FOR ALL TABLES")


def size(directory: Path) -> int:
    return sum(path.stat().st_size for path in (directory / "relay").rglob("*.relay"))


async def test_target_is_locked_and_then_the_publisher_is_down(
    make_server: Callable[..., EmbeddedServer], target_db: Database, tmp_path: Path
) -> None:
    """While the target takes nothing, the slot moves on. Everything is applied without the publisher, which is not asked about anything.

    A savepoint that was rolled back after its changes were streamed is among it, and a prepared transaction.
    """
    server = make_server(18, max_prepared_transactions="5", max_wal_size="64MB", checkpoint_timeout="30s")
    with fresh_database(ServerAddress(server.dsn(), 18), "pub") as publisher:
        tables(publisher, target_db)
        publisher.execute("ALTER SYSTEM SET logical_decoding_work_mem = '64kB'; ")
        publisher.execute("SELECT pg_reload_conf()")
        arguments = {"settings": settings(tmp_path, 2**24), "streaming": "parallel", "two_phase": True, "synchronous_commit": "on"}
        async with replica(publisher, target_db, **arguments) as found:
            await all_ready(found)
            await eventually(target_db, TWO_PHASE, "e")
            await eventually(publisher, "SELECT bool_and(two_phase) FROM pg_replication_slots", True)
            with target_db.connect() as holder:
                holder.execute("BEGIN; LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
                for number in range(8):
                    first = 1000 + number * 2000
                    publisher.execute(
                        f"INSERT INTO t SELECT i, repeat(md5(i::text), 20) FROM generate_series({first}, {first + 1999}) AS i"
                    )
                publisher.execute(
                    "BEGIN; INSERT INTO t VALUES (200000, 'top'); SAVEPOINT a;"
                    " INSERT INTO t SELECT i, 'never was' FROM generate_series(300000, 304200) AS i; ROLLBACK TO a;"
                    " INSERT INTO t SELECT i, 'after' FROM generate_series(400000, 402000) AS i; COMMIT"
                )
                publisher.execute("BEGIN; UPDATE t SET v = 'prepared' WHERE id = 1; PREPARE TRANSACTION 'p'")
                publisher.execute("COMMIT PREPARED 'p'")
                publisher.execute("UPDATE t SET v = v || 'x' WHERE id < 50; ALTER TABLE t ADD COLUMN w int; ALTER TABLE t DROP COLUMN w")
                lsn = publisher.current_lsn()
                await acknowledged(publisher, lsn)
                # the slot's restart_lsn follows with the next record of running transactions
                publisher.execute("CHECKPOINT")
                publisher.execute("INSERT INTO t VALUES (500000, 'last')")
                lsn = publisher.current_lsn()
                await acknowledged(publisher, lsn)
                assert publisher.value(RETAINED) < 100 * 2**20
                status = found.subscription.status
                assert status.relay_log is not None
                assert status.flushed < lsn <= status.relay_log.flushed <= status.received
                assert status.relay_log.size == size(tmp_path) > 8 * 2000 * 640
                # what is visible in the target is told truthfully
                assert publisher.value("SELECT replay_lsn < flush_lsn FROM pg_stat_replication")
                rows = publisher.fetch(ROWS)
                await asyncio.to_thread(server.stop)
                # two_phase that waits to be enabled, which needs the publisher, is no reason to wait
                target_db.execute("UPDATE subscriber.pg_subscription SET subtwophasestate = 'p'")
                relay = found.subscription._state.relay
                assert relay is not None
                relay.two_phase = False
                target_db.execute(TERMINATE)
                holder.execute("ROLLBACK")
            await eventually(target_db, "SELECT count(*) FROM t WHERE id = 500000", 1)
            assert target_db.value(TWO_PHASE) == "p"
            assert target_db.fetch(ROWS) == rows
            assert found.subscription.status.streaming is False
            assert target_db.fetch(PREPARED) == []
            # all segments but the last one are removed
            await until(lambda: size(tmp_path) < 2**23, "segments removed")
            await asyncio.to_thread(server.start)
            publisher.reconnect()
            publisher.execute("INSERT INTO t VALUES (500001, 'and on')")
            await found.same(ROWS)
            await eventually(target_db, TWO_PHASE, "e")
            assert found.subscription.status.statistics.confl_update_missing == 0


async def held_back(publisher: Database, target: Database, directory: Path, count: int) -> None:
    """Run while the target is locked, so that the slot is past the target's position at the end."""
    async with replica(publisher, target, settings=settings(directory)) as found:
        await all_ready(found)
        with target.connect() as holder:
            holder.execute("BEGIN; LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
            publisher.execute(f"INSERT INTO t SELECT coalesce(max(id), 0) + i, 'held' FROM t, generate_series(1, {count}) AS i GROUP BY i")
            await acknowledged(publisher, publisher.current_lsn())
            await found.stop()
            # it would do the rest of its pipeline
            target.execute(TERMINATE)
            holder.execute("ROLLBACK")


async def refused(publisher: Database, target: Database, **arguments: object) -> str:
    with pytest.raises(DataLossError) as met:
        async with replica(publisher, target, **arguments) as found:
            await asyncio.wait_for(found.running, WAIT_SECONDS)
    return met.value.one_line()


async def test_start_compares_target_relay_log_and_slot(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    publisher, target = publisher18_db, target_db
    tables(publisher, target)
    async with replica(publisher, target, settings=settings(tmp_path)) as found:
        await found.same(ROWS)
    backup = tmp_path / "backup"
    shutil.copytree(tmp_path / "relay", backup / "relay")
    await held_back(publisher, target, tmp_path, 10)
    slot = confirmed(publisher)
    # without a relay log, with another one, with an old one
    said = await refused(publisher, target)
    assert f"was advanced to {slot}, past position" in said
    assert "start it with the same -c relay_log" in said
    # nothing is lost, and recover says so, also after that start
    with pytest.raises(ConfigurationError, match="a relay log may have the changes") as met:
        await recover(f"replica_{publisher.name}", target=target.dsn, connection=publisher.conninfo())
    assert "start it with the same -c relay_log" in (met.value.hint or "")
    said = await refused(publisher, target, settings=settings(tmp_path / "other"))
    assert f"past position {target.value('SELECT remote_lsn::text FROM subscriber.position')} of the target" in said
    assert f'the relay log "{tmp_path}/other/relay/' in said
    assert "is empty" in said
    said = await refused(publisher, target, settings=settings(backup))
    assert "past position" in said
    assert "relay log" in said
    assert "the changes in between are lost" in said
    # the relay log may be all that can tell what is missing, so it stays
    target.execute("CREATE TABLE saved AS TABLE subscriber.position; DELETE FROM subscriber.position")
    assert "has lost its position in the target" in await refused(publisher, target, settings=settings(tmp_path))
    target.execute("INSERT INTO subscriber.position TABLE saved; DROP TABLE saved")
    # with its own
    async with replica(publisher, target, settings=settings(tmp_path)) as found:
        assert len(await found.same(ROWS)) == 110
        # two processes
        with pytest.raises(SubscriptionInUse):
            async with replica(publisher, target, settings=settings(tmp_path)) as other:
                await asyncio.wait_for(other.running, WAIT_SECONDS)
    # now the slot has nothing that the target does not have, so no relay log is needed, and an old one is no harm
    async with replica(publisher, target) as found:
        publisher.execute("INSERT INTO t VALUES (1000, 'without')")
        await found.same(ROWS)
    async with replica(publisher, target, settings=settings(backup)) as found:
        publisher.execute("INSERT INTO t VALUES (1001, 'again')")
        assert len(await found.same(ROWS)) == 112
    # neither is one with changes that the publisher does not have, or a damaged one
    (path,) = backup.rglob("*.relay")
    session, _ = read_head(path)
    assert session.relay_of is not None
    position = Lsn.parse(str(target.value("SELECT remote_lsn::text FROM subscriber.position")))
    log = RelayLog(str(backup / "relay"), 2**30, session.relay_of)
    await log.open()
    await log.begin(replace(session, timeline=99, start_lsn=position))
    await log.close()
    for number in range(2):
        async with replica(publisher, target, settings=settings(backup)) as found:
            publisher.execute(f"INSERT INTO t VALUES ({2000 + number}, 'again')")
            assert len(await found.same(ROWS)) == 113 + number
        (path,) = backup.rglob("*.relay")
        path.write_bytes(b"damaged")
    # and now its relay log is lost, with changes that are nowhere else
    await held_back(publisher, target, tmp_path, 10)
    shutil.rmtree(tmp_path / "relay")
    await refused(publisher, target, settings=settings(tmp_path))
    await recover(f"replica_{publisher.name}", target=target.dsn, connection=publisher.conninfo(), force=True)
    async with replica(publisher, target, settings=settings(tmp_path)) as found:
        await all_ready(found)
        assert len(await found.same(ROWS)) == 124


async def test_removed_while_running(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    """Nothing is acknowledged that is not there any more. If the target had everything, the next start begins a new relay log."""
    tables(publisher18_db, target_db)
    async with replica(publisher18_db, target_db, settings=settings(tmp_path)) as found:
        await found.same(ROWS)
        await all_ready(found)
        before = confirmed(publisher18_db)
        shutil.rmtree(tmp_path / "relay")
        publisher18_db.execute("INSERT INTO t VALUES (1000, 'x')")
        with pytest.raises(DataLossError, match="was removed or replaced while it was in use"):
            await asyncio.wait_for(found.running, WAIT_SECONDS)
        assert confirmed(publisher18_db) >= before
        found.running.exception()
        with pytest.raises(DataLossError):
            await found.stop()
        async with replica(publisher18_db, target_db, settings=settings(tmp_path)) as again:
            assert len(await again.same(ROWS)) == 101
        found.running = again.running


async def test_is_full_and_then_not(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    """At its limit receiving pauses, and says so; with room it continues."""
    tables(publisher18_db, target_db)
    async with replica(publisher18_db, target_db, settings=settings(tmp_path, 2**20)) as found:
        await all_ready(found)
        with target_db.connect() as holder:
            holder.execute("BEGIN; LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
            for number in range(60):
                first = 1000 + number * 100
                publisher18_db.execute(f"INSERT INTO t SELECT i, repeat('x', 500) FROM generate_series({first}, {first + 99}) AS i")

            def paused() -> bool:
                log = found.subscription.status.relay_log
                return log is not None and log.paused

            await until(paused, "receiving pauses")
            assert size(tmp_path) < 2 * 2**20
            assert confirmed(publisher18_db) < publisher18_db.current_lsn()
            holder.execute("ROLLBACK")
        await found.same(ROWS)
        assert not paused()


async def test_disk_is_full(publisher18_db: Database, target_db: Database, small_disk: Path) -> None:
    """What is stored is applied, and then there is room. Nothing is acknowledged that could not be stored."""
    tables(publisher18_db, target_db)
    async with replica(publisher18_db, target_db, settings=settings(small_disk)) as found:
        await all_ready(found)
        with target_db.connect() as holder:
            holder.execute("BEGIN; LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
            for number in range(80):
                first = 1000 + number * 100
                publisher18_db.execute(f"INSERT INTO t SELECT i, repeat('x', 500) FROM generate_series({first}, {first + 99}) AS i")

            def fails() -> bool:
                log = found.subscription.status.relay_log
                return log is not None and log.retry is not None

            await until(fails, "receiving fails")
            error = found.subscription.status.last_error
            assert isinstance(error, SpoolError)
            assert "No space left on device" in str(error)
            assert "make room" in (error.hint or "")
            holder.execute("ROLLBACK")
        await found.same(ROWS)
    # a disk that can only be read
    publisher18_db.execute("INSERT INTO t VALUES (100000, 'read-only')")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(SpoolError, match="Read-only file system") as met:
        async with replica(publisher18_db, target_db, settings=settings(small_disk)) as found:
            await asyncio.wait_for(found.running, WAIT_SECONDS)
    assert "set relay_log to a directory" in (met.value.hint or "")
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    async with replica(publisher18_db, target_db, settings=settings(small_disk)) as found:
        await found.same(ROWS)


async def test_target_is_down_under_load(make_server: Callable[..., EmbeddedServer], publisher18_db: Database, tmp_path: Path) -> None:
    """The slot moves on, and the publisher keeps little WAL."""
    server = make_server(18)
    with fresh_database(ServerAddress(server.dsn(), 18), "target") as target:
        tables(publisher18_db, target)
        publisher18_db.execute("ALTER TABLE t ALTER v SET STORAGE EXTERNAL")
        async with replica(publisher18_db, target, settings=settings(tmp_path)) as found:
            await all_ready(found)
            await asyncio.to_thread(server.stop)
            first = publisher18_db.current_lsn()
            for number in range(50):
                rows = f"generate_series({number + 1}000, {number + 1}999) AS i"
                publisher18_db.execute(f"INSERT INTO t SELECT i, repeat(md5(i::text), 90) FROM {rows}")
                publisher18_db.execute(f"UPDATE t SET v = 'changed' WHERE id % 1000 = {number}")
            publisher18_db.execute("CHECKPOINT")
            publisher18_db.execute("INSERT INTO t VALUES (1000000, 'last')")
            last = publisher18_db.current_lsn()
            assert last - first > 120 * 2**20
            await acknowledged(publisher18_db, last)
            assert publisher18_db.value(RETAINED) < 100 * 2**20
            assert found.subscription.status.flushed <= first
            await asyncio.to_thread(server.start)
            target.reconnect()
            await found.same(ROWS)


async def test_alter_applies_to_what_is_received_from_then_on(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    """What is in the relay log was received before."""
    publisher, target = publisher18_db, target_db
    tables(publisher, target)
    name = f"replica_{publisher.name}"
    await create_subscription(name, connection=publisher.dsn, publications=["pub"], target=target.dsn)
    launcher = Launcher(target.dsn, settings=settings(tmp_path))
    running = asyncio.create_task(launcher.run())
    await eventually(target, "SELECT bool_and(srsubstate = 'r') FROM subscriber.pg_subscription_rel", True)
    with target.connect() as holder:
        holder.execute("BEGIN; LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
        publisher.execute("INSERT INTO t SELECT i, repeat('x', 1000) FROM generate_series(1000, 1999) AS i")
        publisher.execute("INSERT INTO t VALUES (2000, 'before')")
        await acknowledged(publisher, publisher.current_lsn())
        altering = asyncio.create_task(filtered(name, publisher, target))
        await eventually(target, "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event_type = 'Lock'", True)
        target.execute(TERMINATE)
        altered = await altering
        holder.execute("ROLLBACK")
    # the session that ended may have been the applying one alone: then the receiving one goes on until the next attempt
    await eventually(publisher, f"SELECT count(*) FROM pg_stat_replication WHERE backend_start > '{altered}'", 1)
    publisher.execute("INSERT INTO t VALUES (3000, 'left out'), (999, 'passes')")
    await eventually(target, "SELECT count(*) FROM t WHERE id = 999", 1)
    assert target.fetch("SELECT count(*), max(id) FROM t") == [(1102, 2000)]
    launcher.stop()
    await running


async def filtered(name: str, publisher: Database, target: Database) -> str:
    """Set a row filter. Return the publisher's time at which it was set."""
    async with alter_subscription(name, target=target.dsn) as found:
        await found.set({"where": {"public.t": "id < 1000"}})
        return str(publisher.value("SELECT clock_timestamp()"))


async def test_cutover_waits_for_the_target(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    """What the slot has confirmed may be in the relay log only. A drop removes the relay log."""
    tables(publisher18_db, target_db)
    async with replica(publisher18_db, target_db, settings=settings(tmp_path)) as found:
        await found.same(ROWS)
        name = found.subscription.name
        dsn = publisher18_db.dsn
        link = Link(name, publisher=dsn, target=target_db.dsn, admin=dsn, slot=name, publications=["pub"])
        with target_db.connect() as holder:
            holder.execute("BEGIN; LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
            publisher18_db.execute("INSERT INTO t VALUES (1000, 'x')")
            lsn = publisher18_db.current_lsn()
            await acknowledged(publisher18_db, lsn)
            waiting = asyncio.create_task(link.wait(lsn))
            assert not (await asyncio.wait({waiting}, timeout=1.0))[0]
            holder.execute("ROLLBACK")
        await waiting
        assert target_db.value("SELECT count(*) FROM t") == 101
    assert list((tmp_path / "relay").iterdir())
    await drop_subscription(name, target=target_db.dsn, connection=publisher18_db.dsn, settings=settings(tmp_path))
    assert not list((tmp_path / "relay").iterdir())


async def test_launcher_keeps_the_relay_log_of_what_is_gone(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    """The subscription may be gone from the catalog because that was restored."""
    tables(publisher18_db, target_db)
    name = f"managed_{publisher18_db.name}"
    await create_subscription(name, connection=publisher18_db.dsn, publications=["pub"], target=target_db.dsn)
    launcher = Launcher(target_db.dsn, settings=settings(tmp_path))
    running = asyncio.create_task(launcher.run())
    await eventually(target_db, "SELECT count(*) FROM t", 100)
    assert list((tmp_path / "relay").iterdir())
    await drop_subscription(name, target=target_db.dsn)
    await create_subscription(
        name, connection=publisher18_db.dsn, publications=["pub"], target=target_db.dsn, options=SubscriptionOptions(copy_data=False)
    )
    await until(lambda: len(list((tmp_path / "relay").iterdir())) == 2, "another relay log")
    launcher.stop()
    await running


async def test_two_phase_stays_while_the_relay_log_may_have_a_prepare(publisher18_db: Database, target_db: Database) -> None:
    """The slot is ahead of the target then. The publisher would send the transaction again, with its COMMIT PREPARED."""
    tables(publisher18_db, target_db)
    name = f"managed_{publisher18_db.name}"
    options = SubscriptionOptions(two_phase=True, enabled=False)
    await create_subscription(name, connection=publisher18_db.dsn, publications=["pub"], target=target_db.dsn, options=options)
    publisher18_db.execute("INSERT INTO t VALUES (1000, 'x')")
    publisher18_db.execute("SELECT pg_replication_slot_advance(slot_name, pg_current_wal_lsn()) FROM pg_replication_slots")
    async with alter_subscription(name, target=target_db.dsn) as found:
        with pytest.raises(ConfigurationError, match='cannot disable "two_phase" while the relay log has changes'):
            await found.set({"two_phase": False})


async def test_receiving_ends(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    """An error that must not be retried is told at once. What is stored is applied, and then the run ends with it."""
    tables(publisher18_db, target_db)
    async with replica(publisher18_db, target_db, settings=settings(tmp_path)) as found:
        await all_ready(found)
        with target_db.connect() as holder:
            holder.execute("BEGIN; LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
            publisher18_db.execute("INSERT INTO t VALUES (1000, 'x')")
            await acknowledged(publisher18_db, publisher18_db.current_lsn())
            slots = "FROM pg_replication_slots WHERE database = current_database()"
            # the subscription cannot connect in between, because this does not give way to it
            publisher18_db.execute(f"SELECT pg_terminate_backend(active_pid, 10000) {slots}")
            publisher18_db.execute(f"SELECT pg_drop_replication_slot(slot_name) {slots}")

            def failure() -> str:
                log = found.subscription.status.relay_log
                return log.failure or "" if log is not None else ""

            await until(lambda: "does not exist on the publisher any more" in failure(), "receiving has ended")
            assert isinstance(found.subscription.status.last_error, DataLossError)
            relay_log = found.subscription.status.relay_log
            assert relay_log is not None
            assert relay_log.oldest is not None
            # the catalog does not have it
            details = WorkerDetails(relay_log=dataclasses.replace(relay_log, oldest=None))
            assert WorkerDetails.from_json(details.to_json()) == details
            holder.execute("ROLLBACK")
        with pytest.raises(DataLossError, match="does not exist on the publisher any more"):
            await asyncio.wait_for(found.running, WAIT_SECONDS)
        # so that the end of this block does not raise it again
        found.running = asyncio.create_task(asyncio.sleep(0))
        assert target_db.value("SELECT count(*) FROM t WHERE id = 1000") == 1
