"""Errors of a subscription that exists already: one line with the remedy, status 1, nothing changed, nothing lost, within seconds."""

from __future__ import annotations

import asyncio
import signal

import pytest

from subscriber.protocol.lsn import Lsn
from tests.support.database import fresh_database
from tests.support.program import position, running, slots
from tests.support.replication_setup import ALL, SECRET, ReplicationSetup
from tests.support.streams import streaming

# many seconds, for a machine that is busy with other tests
SECONDS = 30.0


async def test_slot_in_use(replication: ReplicationSetup) -> None:
    replication.assert_replicates()
    # a walsender without feedback, so that the slot stays where it is
    async with streaming(replication.publisher, replication.name, "pub"):
        before = replication.state()
        done = await asyncio.to_thread(replication.run)
    # it waits for ten seconds: the walsender of a process that was killed takes a moment to notice
    assert 9 < done.seconds < SECONDS
    *earlier, last = done.errors.splitlines()
    assert (done.status, done.output) == (1, "")
    assert last.startswith(f'subscriber: replication slot "{replication.name}" is active for PID ')
    assert "(hint: " in last
    assert any("is active for PID" in line and "this has lasted for" in line for line in earlier)
    replication.assert_no_secrets(done)
    assert replication.state() == before
    replication.assert_replicates()


def test_slot_lost(replication: ReplicationSetup) -> None:
    replication.assert_replicates()
    replication.publisher.fetch(f"SELECT pg_drop_replication_slot('{replication.name}')")
    before = replication.state()
    done = replication.run()
    replication.assert_error(
        done, f'replication slot "{replication.name}" does not exist on the publisher any more: changes after .* are lost'
    )
    assert done.seconds < SECONDS
    assert replication.state() == before
    # the remedy that it names
    replication.target.execute("TRUNCATE t")
    replication.name += "_2"
    replication.assert_replicates()


def test_slot_ahead_of_us(replication: ReplicationSetup) -> None:
    replication.assert_replicates()
    replication.publisher.execute("DELETE FROM t WHERE id = 1")
    replication.publisher.fetch(f"SELECT pg_replication_slot_advance('{replication.name}', pg_current_wal_flush_lsn())")
    before = replication.state()
    done = replication.run()
    replication.assert_error(done, f'replication slot "{replication.name}" was advanced to .*, past position .* of the target: .* are lost')
    assert done.seconds < SECONDS
    assert replication.state() == before
    replication.target.execute("TRUNCATE t")
    replication.name += "_2"
    replication.assert_replicates()


def test_slot_invalidated(replication: ReplicationSetup) -> None:
    replication.move_publisher(max_slot_wal_keep_size="1MB")
    replication.assert_replicates()
    while replication.publisher.value(f"SELECT wal_status FROM pg_replication_slots WHERE slot_name = '{replication.name}'") != "lost":
        replication.publisher.execute("SELECT pg_switch_wal()")
        replication.publisher.execute("SELECT pg_logical_emit_message(false, 'filler', repeat('x', 1000000)); CHECKPOINT")
    before = replication.state()
    replication.assert_error(replication.run(), f'replication slot "{replication.name}" was invalidated .*: changes after .* are lost')
    assert replication.state() == before
    found = replication.check()
    assert (found.status, found.errors) == (1, "")
    assert f'error: replication slot "{replication.name}" was invalidated' in found.output
    replication.target.execute("TRUNCATE t")
    replication.name += "_2"
    replication.assert_replicates()


def test_another_publisher(replication: ReplicationSetup) -> None:
    replication.assert_replicates()
    other = replication.resources.enter_context(fresh_database(replication.target.server, "other"))
    other.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE PUBLICATION pub FOR TABLE t")
    before = replication.state()
    replication.connection = other.dsn
    done = replication.run()
    replication.assert_error(done, r"the publisher's system identifier is \d+, but the target was filled from \d+")
    assert done.seconds < SECONDS
    assert replication.state() == before
    assert slots(other) == []
    replication.reset_arguments()
    replication.assert_replicates()


def test_another_slot_name(replication: ReplicationSetup) -> None:
    replication.assert_replicates()
    before = replication.state()
    replication.more = ["-o", "slot_name=another"]
    replication.assert_error(replication.run(), f'uses replication slot "{replication.name}", not "another"')
    assert replication.state() == before
    replication.reset_arguments()
    replication.assert_replicates()


def test_values_that_the_target_s_type_refuses_when_copied(replication: ReplicationSetup) -> None:
    replication.target.execute("ALTER TABLE t ALTER v TYPE int USING 0")
    done = replication.run("--until-caught-up")
    line = replication.assert_error(done, r"public\.t")
    assert '"v"' in line
    assert "invalid text representation" in line
    assert done.seconds < SECONDS
    assert replication.target.value("SELECT count(*) FROM t") == 0
    assert any('"v"' in text and "integer" in text for text in done.errors.splitlines() if " WARNING " in text)
    replication.target.execute("ALTER TABLE t ALTER v TYPE text")
    replication.assert_replicates()
    assert slots(replication.publisher) == [replication.name]


@pytest.mark.parametrize(
    ("fault", "message", "repair"),
    [
        pytest.param(
            "ALTER TABLE t ALTER v TYPE int USING 0", 'column "v"', "ALTER TABLE t ALTER v TYPE text", marks=pytest.mark.endurance
        ),
        ("ALTER TABLE t DROP v", 'is missing replicated column: "v"', "ALTER TABLE t ADD v text"),
        pytest.param(
            "ALTER TABLE t ADD CHECK (id < 0) NOT VALID",
            'violates check constraint "t_id_check"',
            "ALTER TABLE t DROP CONSTRAINT t_id_check",
            marks=pytest.mark.endurance,
        ),
        (
            "INSERT INTO t VALUES (102, 'stray')",
            'duplicate key value violates unique constraint "t_pkey"',
            "DELETE FROM t WHERE v = 'stray'",
        ),
    ],
)
def test_changes_that_the_target_refuses(replication: ReplicationSetup, fault: str, message: str, repair: str) -> None:
    replication.assert_replicates()
    replication.target.execute(fault)
    replication.publisher.execute(f"INSERT INTO t VALUES (102, '{SECRET}')")
    before, end = replication.state(), replication.publisher.current_lsn()
    states = "SELECT srrelid, srsubstate::text FROM subscriber.pg_subscription_rel"
    start, tables = Lsn.parse(position(replication.target, replication.name)), replication.target.fetch(states)
    done = replication.run("--until-caught-up")
    line = replication.assert_error(done, message)
    assert "public.t" in line
    assert done.seconds < SECONDS
    # as idle does, the position may move between BEGIN and COMMIT of what failed, and a table become ready
    idle = {'"position"', "pg_subscription_rel"}
    assert {name: rows for name, rows in replication.state().items() if name not in idle} == {
        name: rows for name, rows in before.items() if name not in idle
    }
    assert start <= Lsn.parse(position(replication.target, replication.name)) < end
    assert replication.target.fetch(states) in (tables, [(*table[:-1], "r") for table in tables])
    # a run without an end reports the error and retries; it succeeds once the fault is repaired
    replication.more = ["-c", "wal_retrieve_retry_interval=200ms"]
    with running("run", *replication.arguments()) as program:
        program.says("next attempt in", 2)
        replication.target.execute(repair)
        if "DROP v" in fault or "TYPE int" in fault:
            replication.target.execute(f"UPDATE t SET v = '{SECRET}'")
        replication.target.wait(ALL, replication.publisher.fetch(ALL))
        program.send(signal.SIGTERM)
        ended = program.ended()
    assert ended.status == 0
    replication.assert_no_secrets(ended)
    assert all(" ERROR " in text for text in ended.errors.splitlines())
    replication.assert_replicates()
