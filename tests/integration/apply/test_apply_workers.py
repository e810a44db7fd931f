"""``apply_workers``: what users meet. The smallest group is made small here, so that some transactions are many groups."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import pytest

from subscriber.sinks.postgres.apply.applier import Applier
from subscriber.sinks.postgres.apply.transaction_sender import TransactionSender
from subscriber.sinks.postgres.parallel import group
from subscriber.sinks.postgres.parallel.group import GroupAttempt
from subscriber.sinks.postgres.parallel.pace import Pace
from subscriber.sinks.postgres.parallel.sessions import ParallelSessions
from subscriber.sinks.postgres.session.apply_session import ApplySession
from subscriber.subscription.cutover.cutover import cutover
from subscriber.subscription.cutover.options import CutoverOptions
from subscriber.transaction.model import Transaction
from tests.support.apply_workers import WORKERS, Counts, behind
from tests.support.database import Database
from tests.support.managed import catch_up, create, launched
from tests.support.observation import all_ready, until
from tests.support.replica import replica
from tests.support.roles import role
from tests.support.sink_postgres import Remote, opened

pytestmark = pytest.mark.usefixtures("many_groups")

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


async def test_changes_of_other_rows_do_not_wait(publisher18_db: Database, target_db: Database, counts: Counts) -> None:
    """All transactions change the same row of a table, and others. The bug was that all changes of the table waited for the row."""
    make(publisher18_db, target_db)
    write = partial(each, publisher18_db, "INSERT INTO t VALUES (i, i, 'x'), (-i, -i, 'x'); UPDATE t SET v = i WHERE id = 1", 300)
    async with behind(publisher18_db, target_db, write, copy_data=False) as found:
        await found.same(ROWS)
        assert found.subscription.status.statistics.parallel_transactions > 30
    assert not counts.failed


async def test_a_part_of_a_batch_is_applied_in_groups(
    publisher18_db: Database, target_db: Database, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(publisher18_db, target_db)
    ways = cycle([(True, 0.5), (False, 1.0)])
    monkeypatch.setattr(Pace, "next_part", lambda *_: next(ways))
    write = partial(each, publisher18_db, "INSERT INTO t VALUES (i, i, 'x'); UPDATE t SET v = 'y' WHERE id = i - 10", 500)
    async with behind(publisher18_db, target_db, write, copy_data=False) as found:
        await found.same(ROWS)
        statistics = found.subscription.status.statistics
        assert 100 < statistics.parallel_transactions < 400
        assert (statistics.transactions, statistics.confl_update_missing) == (500, 0)
    assert counts.committed


async def test_empty_transactions_at_the_end_of_a_batch(target_db: Database, counts: Counts) -> None:
    """A publisher before 15 sends them. The bug was that their time was divided by the number of their changes."""
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    remote = Remote("t", "*id", types={"id": 23})
    async with opened(target_db, workers=3) as feed:
        inserts = [feed.transaction(remote.insert(number)) for number in range(20)]
        batch = feed.batch(feed.transaction(remote.relation), *inserts, feed.transaction())
        await feed.opened.apply(batch)
        assert feed.position() == batch.end_lsn
    assert target_db.value("SELECT count(*) FROM t") == 20


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
        async def send(self, transactions: Iterable[Transaction], chosen: Iterable[int] | None = None) -> None:
            if not begun.is_set():
                begun.set()
                target_db.execute(TRIGGER)
                self._relations.forget_targets()
            await super().send(transactions, chosen)

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


async def test_a_session_that_is_lost_while_it_opens(
    publisher18_db: Database, target_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug was that there were fewer sessions for a minute."""
    carry, lost = ParallelSessions._carry_origin, list[int]()

    async def carry_origin(self: ParallelSessions, session: ApplySession) -> None:
        if not lost:
            lost.append(session.pid)
            target_db.execute(f"SELECT pg_terminate_backend({session.pid}, 5000)")
        await carry(self, session)

    monkeypatch.setattr(ParallelSessions, "_carry_origin", carry_origin)
    make(publisher18_db, target_db)
    async with replica(publisher18_db, target_db, settings=WORKERS, copy_data=False) as found:
        await all_ready(found)
        publisher18_db.execute("INSERT INTO t VALUES (1, 1, 'x')")
        await found.same(ROWS)
        sessions = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name ~ 'parallel apply$'"
        await asyncio.to_thread(target_db.wait, sessions, 3)
    assert lost


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


async def test_two_subscriptions_change_the_same_rows(publisher18_db: Database, target_db: Database, counts: Counts) -> None:
    """Groups of one wait for groups of the other, and each waits for its own turn: no server sees that."""
    for database in (publisher18_db, target_db):
        database.execute(
            f"{TABLES}; CREATE TABLE other (id int PRIMARY KEY); INSERT INTO hits SELECT g, 0 FROM generate_series(1, 20) AS g"
        )
    publisher18_db.execute("CREATE PUBLICATION one FOR TABLE t, hits; CREATE PUBLICATION two FOR TABLE other, hits")
    names: list[dict[str, Any]] = [
        {"name": name, "publications": [name], "settings": WORKERS, "copy_data": False} for name in ("one", "two")
    ]
    for arguments in names:
        async with replica(publisher18_db, target_db, **arguments) as found:
            await all_ready(found)
    hits = "UPDATE hits SET n = i WHERE id = 1 + {} % 20"
    statements = (
        f"INSERT INTO t VALUES (i, i, 'x'), (-i, -i, 'x'); {hits.format('i')}; {hits.format('(400 - i)')}; INSERT INTO other VALUES (i)"
    )
    await asyncio.to_thread(each, publisher18_db, statements, 400)
    async with replica(publisher18_db, target_db, **names[0]) as one, replica(publisher18_db, target_db, **names[1]) as two:
        await asyncio.gather(one.caught_up(), two.caught_up())
        for query in (ROWS, "SELECT * FROM other ORDER BY id", "SELECT * FROM hits ORDER BY id"):
            assert target_db.fetch(query) == publisher18_db.fetch(query)
    # on a slow machine, all may be rolled back because they hold up the other subscription
    assert counts.committed or counts.failed
