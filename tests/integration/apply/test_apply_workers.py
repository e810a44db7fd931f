"""``apply_workers``: groups of transactions are applied at the same time, and no reader can tell.

The smallest group is made small here, so that some transactions are many groups.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from subscriber import Until, crash_points
from subscriber.errors import TargetUnavailable
from subscriber.interfaces import Batch
from subscriber.sinks.postgres.apply.applier import Applier
from subscriber.sinks.postgres.apply.transaction_sender import TransactionSender
from subscriber.sinks.postgres.parallel import group, groups
from subscriber.sinks.postgres.parallel.group import GroupAttempt
from subscriber.sinks.postgres.parallel.groups import ParallelGroups
from subscriber.sinks.postgres.parallel.keys import GroupKeys
from subscriber.sinks.postgres.parallel.pace import Pace
from subscriber.subscription.cutover.cutover import cutover
from subscriber.subscription.cutover.options import CutoverOptions
from subscriber.testing.server import EmbeddedServer
from subscriber.transaction.model import Transaction
from tests.support.database import Database, ServerAddress, fresh_database
from tests.support.managed import catch_up, create, launched
from tests.support.observation import all_ready, until
from tests.support.prefixes import Alterer, History, Reader
from tests.support.replica import QUICK, Replica, replica, subscription_of
from tests.support.roles import role
from tests.support.verification import verified

WORKERS = replace(QUICK, apply_workers=3, batch_rows=120)
TRANSACTIONS = 250


@pytest.fixture(autouse=True)
def many_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small groups from the first batch on, for which sessions are open."""
    apply = ParallelGroups.apply

    async def apply_with_sessions(self: ParallelGroups, batch: Batch) -> None:
        self._open_sessions()
        if self._opening is not None:
            await asyncio.wait({self._opening})
        await apply(self, batch)

    monkeypatch.setattr(groups, "LEAST", 4)
    monkeypatch.setattr(Pace, "prefers_groups", lambda _: True)
    monkeypatch.setattr(ParallelGroups, "apply", apply_with_sessions)


class Counts:
    """What happened to groups."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.committed = self.failed = 0
        commit = GroupAttempt.commit

        async def counted(attempt: GroupAttempt) -> bool:
            done = await commit(attempt)
            self.committed += done
            self.failed += not done
            return done

        monkeypatch.setattr(GroupAttempt, "commit", counted)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    return Counts(monkeypatch)


@contextlib.asynccontextmanager
async def behind(publisher: Database, target: Database, write: Callable[[], None], **arguments: Any) -> AsyncIterator[Replica]:
    """A subscription that has much to apply: what ``write`` writes while it is stopped."""
    arguments = {"settings": WORKERS} | arguments
    async with replica(publisher, target, **arguments) as found:
        await all_ready(found)
        await found.caught_up()
    await asyncio.to_thread(write)
    async with replica(publisher, target, **arguments) as found:
        yield found


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


@pytest.mark.endurance
@pytest.mark.timeout(180)
async def test_a_target_that_knows_origins(publisher18_db: Database, make_server: Callable[..., EmbeddedServer]) -> None:
    """With commit timestamps, each change looks who changed its row last: the sessions count as one."""
    server = make_server(18, track_commit_timestamp="on")
    for _ in range(5):
        with fresh_database(ServerAddress(server.dsn(), 18), "tgt") as target, fresh_database(publisher18_db.server, "pub") as publisher:
            assert await check(publisher, target, secrets.randbelow(10**6)) is None


@pytest.mark.timeout(180)
@pytest.mark.parametrize("number", SEEDS)
async def test_tables_of_the_target_are_altered(publisher18_db: Database, target_db: Database, number: int) -> None:
    assert await check(publisher18_db, target_db, secrets.randbelow(10**6), altered=True) is None


@pytest.mark.timeout(180)
@pytest.mark.parametrize("number", SEEDS)
async def test_a_mistake_in_the_keys_takes_time_only(
    publisher18_db: Database, target_db: Database, monkeypatch: pytest.MonkeyPatch, counts: Counts, number: int
) -> None:
    monkeypatch.setattr(GroupKeys, "meets", lambda *_: set())
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
    monkeypatch.setattr(GroupKeys, "meets", lambda *_: set())
    monkeypatch.setattr(groups, "PATIENCE", 0.01)
    found = await check(publisher18_db, target_db, secrets.randbelow(10**6), planted=True)
    assert found is not None
    assert "the rows are not those" in found or "duplicate key" in found


# --- what users meet

TABLES = "CREATE TABLE t (id int PRIMARY KEY, u int UNIQUE, v text); CREATE TABLE hits (id int PRIMARY KEY, n int)"
ROWS = "SELECT id, u, v FROM t ORDER BY id"


TRIGGER = """
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.v := (SELECT count(*) FROM public.t); RETURN NEW; END $$;
CREATE TRIGGER note BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION note(); ALTER TABLE t ENABLE ALWAYS TRIGGER note
"""


def make(publisher: Database, target: Database) -> None:
    for database in (publisher, target):
        database.execute(f"{TABLES}; INSERT INTO hits VALUES (1, 0)")
    publisher.execute("CREATE PUBLICATION pub FOR ALL TABLES")


def each(publisher: Database, statements: str, count: int, first: int = 1) -> None:
    publisher.execute(f"DO $$ BEGIN FOR i IN {first}..{first + count - 1} LOOP {statements}; COMMIT; END LOOP; END $$")


@pytest.mark.parametrize("synchronous_commit", ["off", "local"])
async def test_a_row_that_all_change_is_changed_in_the_turn(
    publisher18_db: Database, target_db: Database, counts: Counts, synchronous_commit: str
) -> None:
    make(publisher18_db, target_db)
    statements = "INSERT INTO t VALUES (i, i, 'x'), (-i, -i, 'x'); UPDATE hits SET n = n + 1"

    def write() -> None:
        each(publisher18_db, statements, 200)

    async with behind(publisher18_db, target_db, write, copy_data=False, synchronous_commit=synchronous_commit) as found:
        await found.same(ROWS)
        assert target_db.value("SELECT n FROM hits") == 200
        statistics = found.subscription.status.statistics
        assert (statistics.inserts, statistics.updates, statistics.transactions) == (400, 200, 200)
        assert statistics.parallel_transactions > 20
    assert counts.committed
    assert not counts.failed


async def test_errors_and_conflicts_are_real_and_counted_once(publisher18_db: Database, target_db: Database, counts: Counts) -> None:
    make(publisher18_db, target_db)
    target_db.execute("INSERT INTO t VALUES (1000, 150, 'only here')")

    def write() -> None:
        target_db.execute("DELETE FROM hits")
        each(publisher18_db, "INSERT INTO t VALUES (i, i, 'x')", 100)
        each(publisher18_db, "UPDATE hits SET n = n + 1; UPDATE t SET v = 'y' WHERE id = i", 40)
        each(publisher18_db, "INSERT INTO t VALUES (i, i, 'x')", 100, 101)

    async with behind(publisher18_db, target_db, write, copy_data=False) as found:
        statistics = found.subscription.status.statistics
        await until(lambda: statistics.apply_error_count > 1, "the error comes again")
        assert "duplicate key value" in str(found.subscription.status.last_error)
        # everything before the transaction that fails is there
        assert target_db.value("SELECT max(id) FROM t WHERE id < 1000") == 149
        assert statistics.confl_insert_exists - statistics.apply_error_count in {0, 1}
        target_db.execute("DELETE FROM t WHERE id = 1000")
        await found.same(ROWS)
        assert statistics.confl_update_missing == 40
    assert counts.committed
    assert counts.failed


async def test_whatever_comes_between(publisher18_db: Database, target_db: Database, counts: Counts) -> None:
    """Transactions that are applied alone: they find everything before them, and nothing after them."""
    make(publisher18_db, target_db)

    def write() -> None:
        rows = "INSERT INTO t VALUES (i, i, 'x')"
        each(publisher18_db, rows, 60)
        publisher18_db.execute("TRUNCATE hits")
        each(publisher18_db, f"{rows}; INSERT INTO hits VALUES (i, 0)", 60, 100)
        publisher18_db.execute("BEGIN; UPDATE t SET v = 'prepared'; PREPARE TRANSACTION 'two_phase'")
        publisher18_db.execute("COMMIT PREPARED 'two_phase'")
        each(publisher18_db, rows, 60, 200)
        publisher18_db.execute("INSERT INTO t SELECT g, g, repeat('large', 2000) FROM generate_series(1000, 1999) AS g")
        each(publisher18_db, "UPDATE t SET v = 'after' WHERE id = i", 60, 1000)
        for database in (publisher18_db, target_db):
            database.execute("ALTER TABLE t ADD w int DEFAULT 7")
        each(publisher18_db, "INSERT INTO t VALUES (i, i, 'x', i)", 60, 300)
        publisher18_db.execute("CREATE INDEX ON t (v); CREATE UNIQUE INDEX ON t (w) WHERE w > 300")
        each(publisher18_db, "UPDATE t SET w = 1000 + i WHERE id = i", 60, 300)

    async with behind(publisher18_db, target_db, write, two_phase=True, streaming="parallel", copy_data=False) as found:
        await found.same("SELECT id, u, md5(v), w FROM t ORDER BY id")
        await found.same("SELECT * FROM hits ORDER BY id")
        statistics = found.subscription.status.statistics
        assert (statistics.confl_update_missing, statistics.truncates) == (0, 1)
    assert counts.committed
    assert not counts.failed


async def test_a_table_that_is_read_again_while_a_group_is_sent(
    publisher18_db: Database, target_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trigger that sees the order is new: the group that was begun without it is applied in its turn."""
    make(publisher18_db, target_db)
    send, apply_group, begun, made = GroupAttempt._run, Applier.apply_group, asyncio.Event(), asyncio.Event()

    class Sender(TransactionSender):
        async def send(self, transactions: Iterable[Transaction]) -> None:
            if not begun.is_set():
                begun.set()
                target_db.execute(TRIGGER)
                self._relations.forget_targets()
            await super().send(transactions)

    async def run(self: GroupAttempt) -> None:
        await send(self)
        made.set()

    async def in_its_turn(self: Applier, *arguments: Any) -> None:
        if begun.is_set():
            await made.wait()
        await apply_group(self, *arguments)

    monkeypatch.setattr(group, "TransactionSender", Sender)
    monkeypatch.setattr(GroupAttempt, "_run", run)
    monkeypatch.setattr(Applier, "apply_group", in_its_turn)
    write = partial(each, publisher18_db, "INSERT INTO t VALUES (i, i, 'x')", 200)
    settings = replace(WORKERS, apply_workers=2)
    async with behind(publisher18_db, target_db, write, settings=settings, copy_data=False) as found:
        await found.same("SELECT count(*) FROM t")
    assert target_db.fetch("SELECT id, v FROM t WHERE v NOT IN ('x', (id - 1)::text)") == []


async def test_too_few_connections(publisher18_db: Database, target_db: Database, caplog: pytest.LogCaptureFixture, counts: Counts) -> None:
    make(publisher18_db, target_db)
    with role(target_db) as few:
        target_db.execute(f"""
            GRANT SET ON PARAMETER session_replication_role TO {few.name}; GRANT CREATE ON DATABASE {target_db.name} TO {few.name};
            ALTER TABLE t OWNER TO {few.name}; ALTER TABLE hits OWNER TO {few.name}
        """)
        async with replica(publisher18_db, target_db, target_url=few.conninfo, settings=WORKERS, copy_data=False) as found:
            await all_ready(found)
            await found.caught_up()
            sessions = target_db.value(f"SELECT count(*) FROM pg_stat_activity WHERE usename = '{few.name}'")
            target_db.execute(f"ALTER ROLE {few.name} CONNECTION LIMIT {sessions + 1}")
            await asyncio.to_thread(each, publisher18_db, "INSERT INTO t VALUES (i, i, 'x')", 500)
            await found.same(ROWS)
            await asyncio.to_thread(each, publisher18_db, "INSERT INTO t VALUES (i, i, 'x')", 500, 1000)
            await found.same(ROWS)
        (line,) = [record.getMessage() for record in caplog.records if "apply_workers = 3" in record.getMessage()]
        assert "only 1 of these sessions could be opened in the target" in line
        assert "too many connections" in line
    assert counts.committed


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


async def test_other_settings(publisher18_db: Database, target_db: Database, counts: Counts) -> None:
    """Where groups are not used, and where they are: the rows are the same."""
    make(publisher18_db, target_db)
    cases: list[tuple[bool, dict[str, Any]]] = [
        (True, {"max_apply_rate": 500_000}),
        (True, {"streaming": "off", "two_phase": True}),
        (False, {"settings": replace(WORKERS, apply_workers=1)}),
        (False, {"settings": replace(WORKERS, schema_change="follow")}),
        (False, {"conflict": {"insert_exists": "apply_remote", "update_missing": "insert"}}),
    ]
    for number, (in_groups, arguments) in enumerate(cases):
        before, first = counts.committed, 1 + 1000 * number
        write = partial(each, publisher18_db, "INSERT INTO t VALUES (i, i, 'x'); UPDATE t SET v = 'y' WHERE id = i - 100", 300, first)
        async with behind(publisher18_db, target_db, write, copy_data=False, **arguments) as found:
            await found.same(ROWS)
            statistics = found.subscription.status.statistics
            assert statistics.confl_update_missing == 0
        assert (counts.committed > before) is in_groups, arguments
    assert not counts.failed


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


async def test_cutover_with_a_backlog(publisher18_db: Database, target_db: Database, counts: Counts) -> None:
    make(publisher18_db, target_db)
    target_db.execute("DELETE FROM hits")
    name = await create(publisher18_db, target_db)
    async with launched(target_db, settings=WORKERS):
        await asyncio.to_thread(catch_up, publisher18_db, target_db, name)
        await asyncio.to_thread(each, publisher18_db, "INSERT INTO t VALUES (i, i, 'x'); UPDATE t SET v = 'y' WHERE id = i - 100", 2000)
        await cutover(name, target=target_db.dsn, options=CutoverOptions(verify="full", max_lag=60))
        publisher18_db.reconnect()
        target_db.reconnect()
        assert target_db.fetch(ROWS) == publisher18_db.fetch(ROWS)
        assert target_db.value("SELECT count(*) FROM t") == 2000
    assert counts.committed
