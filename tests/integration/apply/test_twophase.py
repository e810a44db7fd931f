"""Prepared transactions, by a whole subscription on live servers, in all the orders in which they can come.

Message letters in the names: b P (prepare), S p (streamed prepare), K (COMMIT PREPARED), r (ROLLBACK PREPARED).
Native's tests of the same topics: t/021 to t/023 of src/test/subscription.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from subscriber.errors import ApplyError, DataLossError, PublisherUnavailable
from subscriber.protocol.lsn import Lsn
from subscriber.sinks import conflict_log
from subscriber.subscription.run import slot_follower
from tests.support.database import WAIT_SECONDS, Database
from tests.support.observation import PREPARED, acknowledged, all_ready, eventually, slot_of, target_gid, until
from tests.support.replica import QUICK, Replica, replica, subscription_of
from tests.support.two_phase import finish, prepare

TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text)"
ROWS = "SELECT id, md5(v) FROM t ORDER BY id"
COUNT = "SELECT count(*) FROM t"
TWO_PHASE = "SELECT subtwophasestate::text FROM subscriber.pg_subscription"


def make_tables(publisher: Database, target: Database) -> None:
    for database in (publisher, target):
        database.execute(TABLE)
    publisher.execute("CREATE PUBLICATION pub FOR ALL TABLES")


def large(first: int) -> str:
    """More than the publisher's logical_decoding_work_mem of 64 kB."""
    return f"INSERT INTO t SELECT g, repeat('x', 500) FROM generate_series({first}, {first + 399}) AS g"


async def enabled(found: Replica) -> None:
    await all_ready(found)
    await eventually(found.target, TWO_PHASE, "e")
    await found.caught_up()


@pytest.mark.publisher(min=15, lacks="two_phase of the replication protocol")
@pytest.mark.matrix
async def test_all_orders(publisher_db: Database, target_db: Database, tmp_path: Path) -> None:
    make_tables(publisher_db, target_db)
    settings = replace(QUICK, logical_decoding_work_mem=64 * 1024, spool_directory=str(tmp_path))
    async with replica(publisher_db, target_db, two_phase=True, streaming="on", settings=settings) as found:
        await enabled(found)
        slot = f"SELECT two_phase FROM pg_replication_slots WHERE slot_name = '{slot_of(publisher_db)}'"
        assert publisher_db.value(slot) is True
        # b..P..K
        small = prepare(publisher_db, "bPK", "INSERT INTO t VALUES (1, 'a')", "SAVEPOINT s", "INSERT INTO t VALUES (2)", "ROLLBACK TO s")
        await found.caught_up()
        assert target_db.fetch(PREPARED) == [(target_gid(target_db, small),)]
        assert target_db.value(COUNT) == 0
        finish(publisher_db, "bPK", "COMMIT")
        assert len(await found.same(ROWS)) == 1
        assert target_db.fetch(PREPARED) == []
        # b..P..r
        prepare(publisher_db, "bPr", "INSERT INTO t VALUES (10, 'gone')", "UPDATE t SET v = 'gone'")
        await found.caught_up()
        assert len(target_db.fetch(PREPARED)) == 1
        finish(publisher_db, "bPr", "ROLLBACK")
        assert len(await found.same(ROWS)) == 1
        assert target_db.fetch(PREPARED) == []
        # S..p..K and S..p..r, with a rollback to a savepoint and interleaved; later transactions are not held up by open ones
        one = prepare(publisher_db, "SpK", large(1000), "SAVEPOINT s", large(2000), "ROLLBACK TO s", large(3000))
        two = prepare(publisher_db, "Spr", large(5000))
        publisher_db.execute("INSERT INTO t VALUES (20, 'while two are open')")
        publisher_db.execute("UPDATE t SET v = 'changed' WHERE id = 1")
        publisher_db.execute(large(7000))
        await found.caught_up()
        gids = sorted(target_gid(target_db, xid) for xid in (one, two))
        assert target_db.fetch(PREPARED) == [(gid,) for gid in gids]
        assert target_db.value(COUNT) == 402
        streamed = f"SELECT stream_txns >= 2 FROM pg_stat_replication_slots WHERE slot_name = '{slot_of(publisher_db)}'"
        assert publisher_db.value(streamed) is True
        finish(publisher_db, "Spr", "ROLLBACK")
        finish(publisher_db, "SpK", "COMMIT")
        assert len(await found.same(ROWS)) == 402 + 800
        assert target_db.fetch(PREPARED) == []
        # the same name again; and one without changes of the subscription's tables
        for database in (publisher_db, target_db):
            database.execute("CREATE TABLE elsewhere (id int)")
        prepare(publisher_db, "bPK", "INSERT INTO elsewhere VALUES (1)")
        prepare(publisher_db, "empty", "SELECT pg_current_xact_id()")
        prepare(publisher_db, "truncate", "TRUNCATE t", "INSERT INTO t VALUES (1, 'only')")
        for gid in ("bPK", "empty", "truncate"):
            finish(publisher_db, gid, "COMMIT")
        assert len(await found.same(ROWS)) == 1
        assert target_db.fetch(PREPARED) == []
        assert target_db.value("SELECT count(*) FROM subscriber.prepared_transaction") == 0
        assert found.subscription.status.last_error is None
        await acknowledged(publisher_db, publisher_db.current_lsn())


@pytest.mark.publisher(min=15, lacks="two_phase of the replication protocol")
@pytest.mark.matrix
async def test_prepared_that_changed_nothing(publisher_db: Database, target_db: Database) -> None:
    """18.4 sends PREPARE without BEGIN PREPARE and its end, 15 to 17 the end alone. The bug was that either ended the stream for ever."""
    make_tables(publisher_db, target_db)
    publisher_db.execute("INSERT INTO t VALUES (1, 'locked')")
    lock = "SELECT FROM t FOR UPDATE"
    async with replica(publisher_db, target_db, two_phase=True) as found:
        await enabled(found)
        for how in ("COMMIT", "ROLLBACK"):
            prepare(publisher_db, "empty", lock)
            await found.caught_up()
            finish(publisher_db, "empty", how)
            publisher_db.execute("INSERT INTO t SELECT count(*) + 1 FROM t")
            await found.same(ROWS)
        prepare(publisher_db, "empty", lock)
        await found.caught_up()
    async with replica(publisher_db, target_db, two_phase=True) as found:
        finish(publisher_db, "empty", "COMMIT")
        publisher_db.execute("INSERT INTO t VALUES (10, 'after')")
        assert len(await found.same(ROWS)) == 4
        assert target_db.fetch(PREPARED) == []
        assert target_db.value("SELECT count(*) FROM subscriber.prepared_transaction") == 0


@pytest.mark.publisher(min=15, lacks="two_phase of the replication protocol")
async def test_prepared_that_was_rolled_back_in_the_target(publisher_db: Database, target_db: Database) -> None:
    """It is lost, and the publisher's COMMIT PREPARED says so, after a restart too: it is not taken for an empty one."""
    make_tables(publisher_db, target_db)
    async with replica(publisher_db, target_db, two_phase=True) as found:
        await enabled(found)
        prepare(publisher_db, "lost", "INSERT INTO t VALUES (1, 'lost')")
        await found.caught_up()
    ((gid,),) = target_db.fetch(PREPARED)
    target_db.execute(f"ROLLBACK PREPARED '{gid}'")
    finish(publisher_db, "lost", "COMMIT")
    for _ in range(2):
        with pytest.raises(DataLossError, match="does not exist in the target, and was not committed there"):
            await subscription_of(publisher_db, target_db, two_phase=True).run()


@pytest.mark.publisher(min=15, lacks="two_phase of the replication protocol")
@pytest.mark.matrix
async def test_prepared_before_two_phase_was_enabled(publisher_db: Database, target_db: Database) -> None:
    make_tables(publisher_db, target_db)
    async with replica(publisher_db, target_db) as found:
        await all_ready(found)
        assert target_db.value(TWO_PHASE) == "d"
        late = prepare(publisher_db, "late", "INSERT INTO t VALUES (1, 'late')")
        prepare(publisher_db, "late and large", large(1000))
        prepare(publisher_db, "lone r", "INSERT INTO t VALUES (2, 'gone')")
        publisher_db.execute("INSERT INTO t VALUES (3, 'between')")
        assert len(await found.same(ROWS)) == 1
        assert target_db.fetch(PREPARED) == []
    # as ALTER SUBSCRIPTION … SET (two_phase = true)
    async with replica(publisher_db, target_db, two_phase=True) as found:
        await enabled(found)
        later = prepare(publisher_db, "later", "INSERT INTO t VALUES (4, 'later')")
        finish(publisher_db, "lone r", "ROLLBACK")
        await found.caught_up()
        assert target_db.fetch(PREPARED) == [(target_gid(target_db, later),)]
        finish(publisher_db, "late", "COMMIT")
        assert [row[0] for row in await found.same(ROWS)] == [1, 3]
        finish(publisher_db, "late and large", "COMMIT")
        finish(publisher_db, "later", "COMMIT")
        assert len(await found.same(ROWS)) == 3 + 400
        assert late != later
        assert target_db.fetch(PREPARED) == []
        assert target_db.value("SELECT count(*) FROM subscriber.prepared_transaction") == 0
        assert found.subscription.status.last_error is None


@pytest.mark.publisher(min=15, lacks="two_phase of the replication protocol")
@pytest.mark.matrix
async def test_pending_while_there_are_no_tables(publisher_db: Database, target_db: Database) -> None:
    publisher_db.execute("CREATE PUBLICATION pub")
    slot = f"SELECT two_phase FROM pg_replication_slots WHERE slot_name = '{slot_of(publisher_db)}'"
    async with replica(publisher_db, target_db, two_phase=True) as found:
        await found.caught_up()
        assert target_db.value(TWO_PHASE) == "p"
        assert publisher_db.value(slot) is False
    for database in (publisher_db, target_db):
        database.execute(TABLE)
    publisher_db.execute("INSERT INTO t VALUES (1, 'copied'); ALTER PUBLICATION pub ADD TABLE t")
    async with replica(publisher_db, target_db, two_phase=True) as found:
        await enabled(found)
        assert publisher_db.value(slot) is True
        xid = prepare(publisher_db, "first", "INSERT INTO t VALUES (2, 'prepared')")
        await found.caught_up()
        assert target_db.fetch(PREPARED) == [(target_gid(target_db, xid),)]
        finish(publisher_db, "first", "COMMIT")
        assert len(await found.same(ROWS)) == 2


@pytest.mark.publisher(min=15, lacks="two_phase of the replication protocol")
@pytest.mark.matrix
async def test_rolled_back_before_it_was_decoded(publisher_db: Database, target_db: Database) -> None:
    # a publisher that finds the transaction aborted while decoding it sends what it has, or nothing, and then still sends PREPARE
    # (reorderbuffer.c: ReorderBufferPrepare, concurrent_abort): legal, because its rollback follows
    make_tables(publisher_db, target_db)
    async with replica(publisher_db, target_db, two_phase=True, streaming="off") as found:
        await enabled(found)
    publisher_db.execute(
        f"SELECT pg_create_logical_replication_slot('look_{publisher_db.name}', 'pgoutput', twophase => true);"
        "CREATE TABLE other (id int PRIMARY KEY, v text)"
    )
    prepare(
        publisher_db, "partial", "INSERT INTO t VALUES (1, 'x')", large(1000), "INSERT INTO other VALUES (1, 'described in the middle')"
    )
    finish(publisher_db, "partial", "ROLLBACK")
    publisher_db.execute("INSERT INTO t VALUES (2, 'after')")
    tags = [
        row[0]
        for row in publisher_db.fetch(
            f"SELECT chr(get_byte(data, 0)) FROM pg_logical_slot_get_binary_changes('look_{publisher_db.name}', NULL, NULL,"
            " 'proto_version', '3', 'publication_names', 'pub', 'two_phase', 'true')"
        )
    ]
    partial = tags[: tags.index("r")]
    assert (partial[0], partial[-1]) == ("b", "P")
    assert partial.count("I") < 402, "this publisher sent it whole: the test shows nothing"
    async with replica(publisher_db, target_db, two_phase=True, streaming="off") as found:
        assert [row[0] for row in await found.same(ROWS)] == [2]
        assert target_db.fetch(PREPARED) == []
        assert found.subscription.status.last_error is None


@pytest.mark.publisher(min=15, lacks="two_phase of the replication protocol")
async def test_rolled_back_while_it_is_sent(publisher_db: Database, target_db: Database, tmp_path: Path) -> None:
    # as before, but a part of it is on its way already: that part is prepared, and rolled back
    for database in (publisher_db, target_db):
        database.execute(f"{TABLE}; CREATE TABLE other (id int PRIMARY KEY)")
    publisher_db.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    settings = replace(QUICK, logical_decoding_work_mem=64 * 1024, spool_directory=str(tmp_path))
    async with replica(publisher_db, target_db, two_phase=True, streaming="off", settings=settings) as found:
        await enabled(found)
        with target_db.connect() as blocker:
            blocker.execute("BEGIN; LOCK TABLE t")
            # they wait for the lock, and fill our memory (transactions as small as these are not spilled): nothing more is read
            for number in range(1, 401):
                publisher_db.execute(f"INSERT INTO t VALUES ({number}, repeat('x', 500))")
            await eventually(target_db, "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted AND relation = 't'::regclass", True)
            rows = 20_000
            await asyncio.to_thread(
                prepare,
                publisher_db,
                "partial",
                f"INSERT INTO t SELECT g, repeat('x', 1000) FROM generate_series(10001, {10_000 + rows}) AS g",
                "INSERT INTO other VALUES (1)",  # looking this one up the publisher notices
            )
            stuck = (
                "SELECT wait_event FROM pg_stat_activity WHERE pid ="
                f" (SELECT active_pid FROM pg_replication_slots WHERE slot_name = '{slot_of(publisher_db)}')"
            )
            await eventually(publisher_db, stuck, "WalSenderWriteData")
            finish(publisher_db, "partial", "ROLLBACK")
            blocker.execute("COMMIT")
        publisher_db.execute("INSERT INTO t VALUES (0, 'after')")
        assert len(await found.same(ROWS)) == 401
        assert await found.same("SELECT id FROM other") == []
        assert target_db.fetch(PREPARED) == []
        prepared = found.subscription.status.statistics.inserts - 401
        assert 0 < prepared <= rows, "neither nothing of it nor all of it was prepared"
        assert found.subscription.status.last_error is None


@contextlib.asynccontextmanager
async def process(publisher: Database, target: Database) -> AsyncIterator[asyncio.subprocess.Process]:
    """``subscriber run`` with two_phase; the one thing that is killed here."""
    running = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "subscriber",
        "run",
        "--connection",
        publisher.conninfo(),
        "--publication",
        "pub",
        "--target",
        target.dsn,
        "--name",
        slot_of(publisher),
        "-o",
        "two_phase=true",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={key: value for key, value in os.environ.items() if not key.startswith("PG")},
    )
    try:
        yield running
    finally:
        if running.returncode is None:
            running.kill()
        await running.communicate()


async def test_killed_between_prepare_and_commit(publisher18_db: Database, target_db: Database) -> None:
    make_tables(publisher18_db, target_db)
    prepared = f"SELECT count(*) FROM pg_prepared_xacts WHERE database = '{target_db.name}'"
    async with replica(publisher18_db, target_db, two_phase=True) as found:
        await enabled(found)
        stopped = prepare(publisher18_db, "stopped", "INSERT INTO t VALUES (1, 'over a stop')")
        await found.caught_up()
    assert target_db.fetch(PREPARED) == [(target_gid(target_db, stopped),)]
    publisher18_db.execute("INSERT INTO t VALUES (100, 'while away')")
    async with process(publisher18_db, target_db) as running:
        await eventually(target_db, COUNT, 1)
        xid = prepare(publisher18_db, "killed", "INSERT INTO t VALUES (2, 'over a kill')")
        prepare(publisher18_db, "killed too", "INSERT INTO t VALUES (3, 'gone')")
        await eventually(target_db, prepared, 3)
        running.send_signal(signal.SIGKILL)
        assert await running.wait() == -signal.SIGKILL
    finish(publisher18_db, "stopped", "COMMIT")
    finish(publisher18_db, "killed too", "ROLLBACK")
    publisher18_db.execute("INSERT INTO t VALUES (101, 'while away')")
    async with process(publisher18_db, target_db) as running:
        await eventually(target_db, COUNT, 3)
        assert target_db.fetch(PREPARED) == [(target_gid(target_db, xid),)]
        running.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(running.wait(), WAIT_SECONDS) == 0
    finish(publisher18_db, "killed", "COMMIT")
    async with replica(publisher18_db, target_db, two_phase=True) as found:
        assert [row[0] for row in await found.same(ROWS)] == [1, 2, 100, 101]
        assert target_db.fetch(PREPARED) == []
        assert found.subscription.status.last_error is None


@pytest.mark.publisher(min=15, lacks="two_phase of the replication protocol")
async def test_repeated_after_a_crash_before_the_position_moved(publisher_db: Database, target_db: Database) -> None:
    """A crash between a target's COMMIT and our feedback makes the publisher send everything behind the old position again."""
    make_tables(publisher_db, target_db)
    async with replica(publisher_db, target_db, two_phase=True) as found:
        await enabled(found)
        xid = prepare(publisher_db, "again", "INSERT INTO t VALUES (1, 'once')")
        await found.caught_up()
        position = target_db.value('SELECT remote_lsn::text FROM subscriber."position" WHERE srrelid = 0')
    gid = target_gid(target_db, xid)
    # as a process does that is killed right behind COMMIT PREPARED: the position stays
    finish(publisher_db, "again", "COMMIT")
    target_db.execute(f"COMMIT PREPARED '{gid}'")
    assert target_db.value("SELECT count(*) FROM subscriber.prepared_transaction WHERE gid LIKE 'pg_gid%'") == 1
    now = Lsn.parse(target_db.value('SELECT remote_lsn::text FROM subscriber."position" WHERE srrelid = 0'))
    assert now < publisher_db.current_lsn()
    assert now >= Lsn.parse(position)
    publisher_db.execute("INSERT INTO t VALUES (2, 'after')")
    async with replica(publisher_db, target_db, two_phase=True) as found:
        assert [row[0] for row in await found.same(ROWS)] == [1, 2]
        assert target_db.value("SELECT count(*) FROM subscriber.prepared_transaction") == 0
        assert found.subscription.status.last_error is None


@pytest.mark.parametrize("ending", ["COMMIT", "ROLLBACK"])
@pytest.mark.publisher(min=15, lacks="two_phase of the replication protocol")
async def test_prepared_long_ago_and_streamed_again(
    publisher_db: Database, target_db: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture, ending: str
) -> None:
    """A publisher short of memory streams it once more, though the stream began behind its PREPARE; its K or r is the end of that."""
    make_tables(publisher_db, target_db)
    settings = replace(QUICK, logical_decoding_work_mem=64 * 1024, spool_directory=str(tmp_path))

    def spilled() -> bool:
        return any(tmp_path.glob("*/*.spool"))

    async with replica(publisher_db, target_db, two_phase=True, streaming="parallel", settings=settings) as found:
        await enabled(found)
        # it fits into the publisher's 64 kB, until another one comes
        prepare(publisher_db, "again", "INSERT INTO t SELECT g, repeat('x', 500) FROM generate_series(1000, 1069) AS g")
        await found.caught_up()
        assert len(target_db.fetch(PREPARED)) == 1
    assert not spilled()
    caplog.set_level("INFO")
    async with replica(publisher_db, target_db, two_phase=True, streaming="parallel", settings=settings) as found:
        publisher_db.execute(large(5000))
        await found.caught_up()
        assert target_db.value(COUNT) == 400
        assert spilled()
        sessions = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE '%parallel apply'"
        if publisher_db.version >= 16:
            await until(lambda: "is prepared in the target already" in caplog.text, "an attempt of what is prepared already")
        # none waits for the locks of what is prepared
        await eventually(target_db, f"{sessions} AND xact_start IS NOT NULL", 0)
        finish(publisher_db, "again", ending)
        assert len(await found.same(ROWS)) == (470 if ending == "COMMIT" else 400)
        assert not spilled()
        assert target_db.fetch(PREPARED) == []
        assert found.subscription.status.last_error is None


@pytest.mark.publisher(min=15, lacks="two_phase of the replication protocol")
async def test_rejected_prepared_transaction_that_is_rolled_back(publisher_db: Database, target_db: Database) -> None:
    """A prepared transaction that the target refuses is no obstacle once the publisher has rolled it back."""
    make_tables(publisher_db, target_db)
    target_db.execute("INSERT INTO t VALUES (1, 'in the way')")
    async with replica(publisher_db, target_db, two_phase=True) as found:
        await enabled(found)
        prepare(publisher_db, "refused", "INSERT INTO t VALUES (1, 'x')")
        publisher_db.execute("INSERT INTO t VALUES (2, 'behind')")
        await until(lambda: found.subscription.status.statistics.confl_insert_exists >= 2, "tried again")
        assert target_db.value(COUNT) == 1
        assert target_db.fetch(PREPARED) == []
        finish(publisher_db, "refused", "ROLLBACK")
        await found.caught_up()
        assert target_db.fetch("SELECT * FROM t ORDER BY id") == [(1, "in the way"), (2, "behind")]
        assert target_db.fetch(PREPARED) == []


async def test_a_part_of_what_was_rolled_back(publisher18_db: Database, target_db: Database) -> None:
    """What 18 sends of a prepared transaction that was rolled back may be rejected: here, its DELETE of row 1 does not come."""
    publisher_db = publisher18_db
    make_tables(publisher_db, target_db)
    publisher_db.execute("INSERT INTO t VALUES (1, 'there'), (2, 'there')")
    async with replica(publisher_db, target_db, two_phase=True, streaming="off") as found:
        await enabled(found)
    # what the walsender knows of the table from here it need not look up in the aborted transaction, which it would notice
    publisher_db.execute("UPDATE t SET v = 'before' WHERE id = 2")
    beginning = ("SAVEPOINT s", "DELETE FROM t WHERE id = 1", large(1000), "RELEASE s")
    prepare(publisher_db, "refused", *beginning, "INSERT INTO t VALUES (1, 'again')")
    finish(publisher_db, "refused", "ROLLBACK")
    # what finds no row is no error, and no conflict of anything that was ever committed
    prepare(publisher_db, "missing", *beginning, "UPDATE t SET v = 'x' WHERE id >= 1000")
    finish(publisher_db, "missing", "ROLLBACK")
    publisher_db.execute("UPDATE t SET v = 'behind' WHERE id = 1")
    async with replica(publisher_db, target_db, two_phase=True, streaming="off") as found:
        assert len(await found.same(ROWS)) == 2
        assert target_db.fetch(PREPARED) == []
        statistics = found.subscription.status.statistics
        assert (statistics.confl_insert_exists, statistics.confl_update_missing) == (1, 0)
        assert statistics.updates == 2
        assert found.subscription.status.last_error is None


@pytest.mark.parametrize("answer", [PublisherUnavailable("too many walsenders"), TimeoutError()])
async def test_outcome_of_a_prepared_transaction_is_unknown(
    publisher18_db: Database, target_db: Database, monkeypatch: pytest.MonkeyPatch, answer: Exception
) -> None:
    """Then the target's error is reported."""

    async def asked(*_: object, **__: object) -> bool:
        raise answer

    monkeypatch.setattr(slot_follower, "was_rolled_back", asked)
    make_tables(publisher18_db, target_db)
    target_db.execute("INSERT INTO t VALUES (1, 'in the way')")
    async with replica(publisher18_db, target_db, two_phase=True) as found:
        await enabled(found)
        prepare(publisher18_db, "refused", "INSERT INTO t VALUES (1, 'x')")
        await until(lambda: isinstance(found.subscription.status.last_error, ApplyError), "the target's error")
        target_db.execute("DELETE FROM t")
        finish(publisher18_db, "refused", "COMMIT")
        assert [row[0] for row in await found.same(ROWS)] == [1]


async def test_prepared_transactions_keep_no_old_rows_of_the_log_of_conflicts(
    publisher18_db: Database, target_db: Database, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Or the next transaction that removes old rows waits for the end of the prepared one, which comes after it."""
    monkeypatch.setattr(conflict_log, "_ROWS", 1)
    make_tables(publisher18_db, target_db)
    publisher18_db.execute("INSERT INTO t SELECT g, 'x' FROM generate_series(1, 1100) AS g")
    settings = replace(QUICK, logical_decoding_work_mem=64 * 1024, spool_directory=str(tmp_path))
    options = {"two_phase": True, "streaming": "parallel", "conflict_log": "public.log"}
    async with replica(publisher18_db, target_db, settings=settings, **options) as found:
        await enabled(found)
        old = "INSERT INTO log (logged_at, subscription) SELECT now() - interval '1 year', subname FROM subscriber.pg_subscription"
        target_db.execute(old)
        target_db.execute("DELETE FROM t")
        prepare(publisher18_db, "small", "DELETE FROM t WHERE id = 1")
        await found.caught_up()
        prepare(publisher18_db, "large", large(2000), "DELETE FROM t WHERE id = 2")
        await found.caught_up()
        publisher18_db.execute("DELETE FROM t WHERE id = 3")
        await found.caught_up()
        assert target_db.fetch("SELECT key FROM log") == [({"id": 3},)]
        finish(publisher18_db, "small", "COMMIT")
        finish(publisher18_db, "large", "COMMIT")
        await found.caught_up()
        assert target_db.fetch("SELECT key FROM log ORDER BY lsn") == [({"id": 1},), ({"id": 2},), ({"id": 3},)]
