"""``apply_workers``: groups of transactions are applied at the same time, and no reader can tell.

The smallest group is made small here, so that some transactions are many groups.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from subscriber import Until, crash_points
from subscriber.errors import TargetUnavailable
from subscriber.sinks.postgres.parallel import group, groups
from subscriber.sinks.postgres.parallel.group import GroupAttempt
from subscriber.sinks.postgres.parallel.groups import ParallelGroups
from subscriber.sinks.postgres.parallel.keys import GroupKeys
from subscriber.testing.server import EmbeddedServer
from tests.support.apply_workers import WORKERS, Counts, behind
from tests.support.database import Database, ServerAddress, fresh_database
from tests.support.many_writers import ManyWriters, Sums
from tests.support.observation import all_ready, until
from tests.support.prefixes import Alterer, History, Reader
from tests.support.replica import replica, subscription_of
from tests.support.verification import verified

pytestmark = pytest.mark.usefixtures("many_groups")

TRANSACTIONS = 250


async def check(publisher: Database, target: Database, seed: int, *, planted: bool = False, altered: bool = False) -> str | None:
    """Run a history, with a reader.

    Args:
        publisher, target: empty.
        seed: of the history.
        altered: the tables of the target are altered meanwhile.
        planted: there is a mistake, because of which the target may also reject a change.

    Returns:
        What the reader found, or why the target rejected a change.
    """
    rng = random.Random(seed)
    history = History(publisher, target, rng)
    reader, alterer = Reader(history), Alterer(history, rng)
    options: dict[str, Any] = {
        "binary": rng.random() < 0.3,
        "synchronous_commit": rng.choice(("off", "local")),
        "streaming": rng.choice(("on", "parallel")),
        "two_phase": history.two_phase,
    }
    print(f"seed {seed}", options, history.schema)
    try:
        async with behind(publisher, target, lambda: history.write(TRANSACTIONS), **options) as found:
            subscription, end = found.subscription, publisher.current_lsn()
            with reader.running(), alterer.running() if altered else contextlib.nullcontext():
                if planted:
                    await until(
                        lambda: bool(reader.problem or subscription.status.last_error or subscription.status.flushed >= end), "the end"
                    )
                    return reader.problem or (None if subscription.status.last_error is None else str(subscription.status.last_error))
                await found.caught_up()
            if reader.problem is None:
                assert target.value(history.digest) == history.digests[-1], history.schema
                statistics = subscription.status.statistics
                assert (statistics.confl_update_missing, statistics.confl_delete_missing) == (0, 0)
                assert (statistics.confl_update_origin_differs, statistics.confl_delete_origin_differs) == (0, 0)
    finally:
        history.close()
    print(f"seed {seed}: {len(reader.seen)} states of {len(history.digests)}, {alterer.done} alterations")
    return reader.problem


SEEDS = [0, *(pytest.param(number, marks=pytest.mark.endurance) for number in range(1, 25))]


@pytest.mark.timeout(180)
@pytest.mark.matrix
@pytest.mark.parametrize("number", SEEDS)
async def test_a_reader_sees_prefixes(publisher_db: Database, any_target_db: Database, counts: Counts, number: int) -> None:
    assert await check(publisher_db, any_target_db, secrets.randbelow(10**6)) is None
    print(counts.committed, counts.failed)
    assert counts.committed


@pytest.mark.timeout(180)
@pytest.mark.parametrize("number", SEEDS)
async def test_many_writers(publisher18_db: Database, target_db: Database, counts: Counts, number: int) -> None:
    writers, seed = ManyWriters(publisher18_db, target_db, 6), secrets.randbelow(10**6)
    print(f"seed {seed}")
    sums = Sums(writers)
    async with behind(publisher18_db, target_db, lambda: writers.write(seed, 100), copy_data=False) as found:
        with sums.running():
            await found.caught_up()
        assert sums.problem is None
        for table in ("account", "seat", "log"):
            await found.same(f"SELECT * FROM {table} ORDER BY 1, 2")
    assert counts.committed


@pytest.mark.endurance
@pytest.mark.timeout(180)
async def test_a_target_that_knows_origins(publisher18_db: Database, make_server: Callable[..., EmbeddedServer]) -> None:
    """With commit timestamps, each change looks who changed its row last: the sessions count as one."""
    server = make_server(18, track_commit_timestamp="on")
    for _ in range(5):
        with fresh_database(ServerAddress(server.dsn(), 18), "tgt") as target, fresh_database(publisher18_db.server, "pub") as publisher:
            assert await check(publisher, target, secrets.randbelow(10**6)) is None


@pytest.mark.endurance
@pytest.mark.timeout(300)
async def test_the_target_crashes(publisher18_db: Database, make_server: Callable[..., EmbeddedServer]) -> None:
    server = make_server(18, max_prepared_transactions="10")
    for _ in range(5):
        with fresh_database(ServerAddress(server.dsn(), 18), "tgt") as target, fresh_database(publisher18_db.server, "pub") as publisher:
            crashing = asyncio.create_task(_crash(server, target))
            assert await check(publisher, target, secrets.randbelow(10**6)) is None
            await crashing


async def _crash(server: EmbeddedServer, target: Database) -> None:
    """Crash the target when it has got some transactions, and again when it has got more."""

    def has(count: int) -> bool:
        return bool(target.value("SELECT count(*) FROM log") > count)

    await until(lambda: bool(target.value("SELECT to_regclass('log') IS NOT NULL")), "there is a log")
    for count in sorted(random.sample(range(TRANSACTIONS * 3 // 4), 3)):
        await until(partial(has, count), "more is applied")
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        target.reconnect()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("number", SEEDS)
async def test_tables_of_the_target_are_altered(publisher18_db: Database, target_db: Database, number: int) -> None:
    assert await check(publisher18_db, target_db, secrets.randbelow(10**6), altered=True) is None


@pytest.mark.timeout(180)
@pytest.mark.parametrize("number", SEEDS)
async def test_a_mistake_in_the_keys_takes_time_only(
    publisher18_db: Database, target_db: Database, monkeypatch: pytest.MonkeyPatch, counts: Counts, number: int
) -> None:
    monkeypatch.setattr(GroupKeys, "meets", lambda *_: {})
    monkeypatch.setattr(groups, "PATIENCE", 0.01)
    assert await check(publisher18_db, target_db, secrets.randbelow(10**6)) is None
    print(counts.committed, counts.failed)
    assert counts.failed


@pytest.mark.timeout(180)
@pytest.mark.parametrize("number", SEEDS)
async def test_cut_at_the_commits(publisher18_db: Database, target_db: Database, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The program loses its sessions before, during and after a commit: nothing is lost, and nothing comes twice."""
    rng, left = random.Random(secrets.randbelow(10**6)), 6

    def cut(point: str) -> None:
        nonlocal left
        if left and point in {"postgres.changes_sent", "postgres.end_sent", "postgres.committed"} and rng.random() < 0.3:
            left -= 1
            raise TargetUnavailable("cut by the test")

    with crash_points.watched(cut):
        assert await check(publisher18_db, target_db, secrets.randbelow(10**6)) is None
    assert not left


@pytest.mark.timeout(180)
@pytest.mark.parametrize("number", SEEDS)
async def test_sessions_of_the_target_are_ended(publisher18_db: Database, target_db: Database, number: int) -> None:
    stopped = asyncio.Event()

    async def end() -> None:
        with contextlib.closing(target_db.connect()) as session:
            while not stopped.is_set():
                # chance, not synchronisation
                await asyncio.sleep(random.uniform(0, 0.1))
                await asyncio.to_thread(
                    session.execute,
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
                    " AND application_name LIKE '%parallel apply' ORDER BY random() LIMIT 1",
                )

    ending = asyncio.create_task(end())
    try:
        assert await check(publisher18_db, target_db, secrets.randbelow(10**6)) is None
    finally:
        stopped.set()
        await ending


@pytest.mark.timeout(180)
async def test_sessions_are_ended_at_each_stage(
    publisher18_db: Database, target_db: Database, monkeypatch: pytest.MonkeyPatch, counts: Counts
) -> None:
    """The session of a group, or the apply session, ends while the group waits for its turn and at each step of its commit."""
    whose = {
        "session": "LIKE '%parallel apply'",
        "apply session": f"= 'replica_{publisher18_db.name}'",
    }
    points = "waits", "postgres.changes_sent", "postgres.end_sent", "postgres.committed"
    left = [(point, session) for point in points for session in whose]
    commit, inside = GroupAttempt.commit, False

    def end(point: str) -> None:
        if inside and left and left[0][0] == point:
            _, session = left.pop(0)
            target_db.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                f" WHERE datname = current_database() AND application_name {whose[session]}"
            )

    async def observed(attempt: GroupAttempt) -> bool:
        nonlocal inside
        await asyncio.wait({attempt._task})
        inside = attempt.failure is None
        try:
            end("waits")
            return await commit(attempt)
        finally:
            inside = False

    monkeypatch.setattr(GroupAttempt, "commit", observed)
    with crash_points.watched(end):
        assert await check(publisher18_db, target_db, secrets.randbelow(10**6)) is None
    assert not left


async def test_what_stops_finds_whole_transactions(publisher18_db: Database, target_db: Database, counts: Counts) -> None:
    """``--until-lsn`` and ``verify`` while there is much to apply; then nothing."""
    history = History(publisher18_db, target_db, random.Random(secrets.randbelow(10**6)))
    print(history.schema)
    arguments: dict[str, Any] = {"settings": WORKERS}
    async with replica(publisher18_db, target_db, **arguments) as found:
        await all_ready(found)
    history.write(100)
    lsn, wanted = publisher18_db.current_lsn(), len(history.digests) - 1
    history.write(200)
    reader = Reader(history)
    await subscription_of(publisher18_db, target_db, **arguments).run(Until(lsn))
    with contextlib.closing(target_db.connect()) as session:
        reader.step(session)
    assert reader.problem is None
    assert max(reader.seen) >= wanted
    async with replica(publisher18_db, target_db, **arguments) as found:
        with reader.running():
            while found.subscription.status.applied < publisher18_db.current_lsn():
                report = await verified(found)
                assert report.equal, report
        assert reader.problem is None
        # nothing is committed any more, but WAL is written
        publisher18_db.execute("SELECT pg_logical_emit_message(false, 'idle', 'nothing'), pg_switch_wal()")
        await found.caught_up()
    assert target_db.value(history.digest) == history.digests[-1]
    assert counts.committed
    history.close()


# --- planted mistakes


@pytest.mark.timeout(180)
async def test_a_commit_out_of_order_is_found(publisher18_db: Database, target_db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    take_turn = ParallelGroups._take_turn

    async def too_early(self: ParallelGroups, taken: Any) -> None:
        window = self._window
        if len(window) > 1 and window[1].attempt is not None:
            window[0], window[1] = window[1], window[0]
        await take_turn(self, window[0])

    monkeypatch.setattr(ParallelGroups, "_take_turn", too_early)
    found = await check(publisher18_db, target_db, secrets.randbelow(10**6), planted=True)
    assert found is not None
    assert "are not" in found or "duplicate key" in found


@pytest.mark.timeout(180)
async def test_a_failure_that_is_believed_is_found(publisher18_db: Database, target_db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that was not found before the turn, with keys that do not show it."""
    fail = GroupAttempt._fail

    def believe(self: GroupAttempt, error: Exception, table: object = None) -> None:
        if str(error) != group._CONFLICT:
            fail(self, error, table)  # type: ignore[arg-type]

    monkeypatch.setattr(GroupAttempt, "_fail", believe)
    monkeypatch.setattr(GroupKeys, "meets", lambda *_: {})
    monkeypatch.setattr(groups, "PATIENCE", 0.01)
    found = await check(publisher18_db, target_db, secrets.randbelow(10**6), planted=True)
    assert found is not None
    assert "the rows are not those" in found or "duplicate key" in found
