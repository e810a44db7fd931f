"""Verification at one LSN while replication runs, and repair."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from subscriber import ApplyError, ConfigurationError, RelationError, TableName, TargetError, repair, verify
from subscriber.catalog.snapshot_requests import StoredRequests
from subscriber.subscription.run import snapshot_service
from subscriber.subscription.targets import open_store
from subscriber.verification.model import RowKind, TableReport, VerificationLimits, VerificationReport
from subscriber.verification.row_sql import column_sql
from subscriber.walreceiver.copying.rows_by_key import rows_by_key
from tests.support.database import Database
from tests.support.every_type import SPECIMENS
from tests.support.managed import catch_up, create, launched
from tests.support.program import Ended, running, subscriber
from tests.support.replica import Replica, replica

UNREADABLE = {"pg_node_tree", "pg_ndistinct", "pg_dependencies", "pg_mcv_list", "pg_brin_bloom_summary", "pg_brin_minmax_multi_summary"}
READABLE = tuple(each for each in SPECIMENS if each.name.removeprefix("c_").removeprefix("a_") not in UNREADABLE)
"""PostgreSQL accepts no text of the others."""
NUMBERS = "CREATE TABLE t (id int PRIMARY KEY, v int)"
TEXTS = "CREATE TABLE t (id int PRIMARY KEY, v text)"
SHOWN = VerificationLimits(show_values=True)


Replicated = Callable[..., AbstractAsyncContextManager[Replica]]


@pytest.fixture
def replicated(publisher18_db: Database, target_db: Database) -> Replicated:
    """Subscribe to all tables: ``replicated(TABLES, ROWS)``. ``there``: the target's tables, if they are others."""

    @asynccontextmanager
    async def start(tables: str, rows: str = "SELECT", *, there: str | None = None, **options: Any) -> AsyncIterator[Replica]:
        publisher18_db.execute(f"{tables}; {rows}; CREATE PUBLICATION pub FOR ALL TABLES")
        target_db.execute(there or tables)
        async with replica(publisher18_db, target_db, **options) as found:
            await found.caught_up(60)
            yield found

    return start


async def verified(found: Replica, *tables: str, limits: VerificationLimits | None = None, **more: Any) -> VerificationReport:
    return await verify(
        found.subscription.name,
        target=found.target.dsn,
        connection=found.publisher.conninfo(),
        tables=[TableName("public", table) for table in tables],
        limits=limits,
        **more,
    )


def only(report: VerificationReport) -> TableReport:
    (table,) = report.tables
    return table


def named(table: TableReport) -> list[tuple[str, Sequence[str | None], Sequence[str]]]:
    return sorted((each.kind.value, tuple(each.key.values()), each.columns) for each in table.differences)


@contextmanager
def load(publisher: Database, *scripts: str) -> Iterator[None]:
    """Run each script again and again, in a session of its own, while the block lasts."""
    stop = threading.Event()
    failures: list[Exception] = []

    def work(script: str) -> None:
        try:
            with psycopg.connect(publisher.dsn, autocommit=True) as connection:
                while not stop.is_set():
                    connection.execute(script)
        except psycopg.Error as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(script,)) for script in scripts]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures


TRANSFER = """
DO $$
DECLARE a int := 1 + random() * 999; b int := 1 + random() * 999; step int := random() * 100;
BEGIN
    UPDATE account SET balance = balance - step WHERE id = least(a, b);
    UPDATE account SET balance = balance + step WHERE id = greatest(a, b);
    INSERT INTO entry (account, amount) VALUES (a, step);
    DELETE FROM entry WHERE id = (SELECT min(id) FROM entry);
EXCEPTION WHEN deadlock_detected THEN NULL;
END $$
"""
ACCOUNTS = """
CREATE TABLE account (id int PRIMARY KEY, balance int NOT NULL, remark text);
CREATE TABLE entry (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, account int, amount int);
"""


async def test_both_sides_are_equal_at_one_lsn_under_load(replicated: Replicated, publisher18_db: Database) -> None:
    async with replicated(ACCOUNTS, "INSERT INTO account SELECT i, 1000 FROM generate_series(1, 1000) AS i") as found:
        with load(publisher18_db, TRANSFER, TRANSFER, TRANSFER, "SET synchronous_commit = off; " + TRANSFER):
            lsns = []
            for _ in range(3):
                report = await verified(found)
                assert report.equal, report.to_json()
                assert report.tables[0].publisher_rows == 1000
                assert report.lsn is not None
                lsns.append(report.lsn)
        assert sorted(set(lsns)) == lsns, "each verification is of a later position"


async def test_a_transaction_that_stays_open_does_not_delay_it(replicated: Replicated, publisher18_db: Database) -> None:
    async with replicated(ACCOUNTS, "INSERT INTO account SELECT i, 1000 FROM generate_series(1, 1000) AS i") as found:
        with publisher18_db.connect() as writer:
            writer.execute("BEGIN; UPDATE account SET balance = 0 WHERE id = 1")
            report = await asyncio.wait_for(verified(found, "account"), 30)
            assert report.equal
            assert report.held_seconds < 2
            writer.execute("COMMIT")
        assert (await verified(found, "account")).equal


async def test_a_publisher_that_is_read_only_for_others_can_be_verified(replicated: Replicated, publisher18_db: Database) -> None:
    async with replicated("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)") as found:
        # as during a switch
        publisher18_db.execute(f"ALTER DATABASE {publisher18_db.name} SET default_transaction_read_only = on")
        assert (await verified(found)).equal


async def test_names_rows_and_repairs_them(replicated: Replicated, publisher18_db: Database, target_db: Database) -> None:
    table = "CREATE TABLE t (id int, part text, v text, n numeric(10, 2), PRIMARY KEY (id, part))"
    rows = "INSERT INTO t SELECT i, 'ä' || i, 'v', i FROM generate_series(1, 1000) AS i"
    async with replicated(table, rows, there=f"{table}; ALTER TABLE t ADD own text DEFAULT 'target'") as found:
        assert (await verified(found)).equal
        target_db.execute("""
            DELETE FROM t WHERE id = 10; UPDATE t SET v = NULL, n = 0.01 WHERE id = 20; UPDATE t SET part = 'other' WHERE id = 30;
            UPDATE t SET own = 'kept' WHERE id = 20; INSERT INTO t VALUES (2000, 'x', '', NULL)
        """)
        report = await verified(found, limits=SHOWN)
        assert named(only(report)) == [
            ("different", ("20", "ä20"), ("v", "n")),
            ("extra", ("2000", "x"), ()),
            ("extra", ("30", "other"), ()),
            ("missing", ("10", "ä10"), ()),
            ("missing", ("30", "ä30"), ()),
        ]
        (different,) = [each for each in only(report).differences if each.kind is RowKind.DIFFERENT]
        assert (different.publisher, different.target) == (
            {"id": "20", "part": "ä20", "v": "v", "n": "20.00"},
            {"id": "20", "part": "ä20", "v": None, "n": "0.01"},
        )
        # without --show-values there are none
        hidden = only(await verified(found))
        assert all(each.publisher is None and each.target is None for each in hidden.differences)
        # what changes after the verification is not undone
        publisher18_db.execute("UPDATE t SET v = 'later' WHERE id IN (10, 20); DELETE FROM t WHERE id = 30")
        assert await repair(report, target=target_db.dsn) == {TableName("public", "t"): 5}
        await found.same("SELECT id, part, v, n FROM t ORDER BY id, part")
        assert (await verified(found)).equal
        assert target_db.fetch("SELECT own, v FROM t WHERE id = 20") == [("kept", "later")]


async def test_repairs_values_that_two_rows_have_exchanged(replicated: Replicated, target_db: Database) -> None:
    async with replicated(
        "CREATE TABLE t (id int PRIMARY KEY, u int UNIQUE DEFERRABLE)", "INSERT INTO t SELECT i, i FROM generate_series(1, 10) AS i"
    ) as found:
        target_db.execute("UPDATE t SET u = 11 - u")
        report = await verified(found)
        assert len(only(report).differences) == 10
        await repair(report, target=target_db.dsn)
        assert (await verified(found)).equal


async def test_repairs_a_table_with_an_identity_column_beside_its_key(replicated: Replicated, target_db: Database) -> None:
    async with replicated(
        "CREATE TABLE t (id int PRIMARY KEY, n int GENERATED ALWAYS AS IDENTITY, v int)",
        "INSERT INTO t (id, v) VALUES (1, 1), (2, 2), (3, 3)",
    ) as found:
        target_db.execute("UPDATE t SET v = 0 WHERE id = 1; UPDATE t SET n = DEFAULT WHERE id = 2; DELETE FROM t WHERE id = 3")
        await repair(await verified(found), target=target_db.dsn)
        assert (await verified(found)).equal


async def test_an_error_of_a_query_shows_no_value(replicated: Replicated, target_db: Database) -> None:
    there = "CREATE TABLE t (id int PRIMARY KEY, v json)"
    async with replicated("CREATE TABLE t (id int PRIMARY KEY, v jsonb)", "INSERT INTO t VALUES (1, '[]')", there=there) as found:
        # JSONB cannot hold it
        target_db.execute(r"""UPDATE t SET v = '"a value \u0000"'""")
        report = await verified(found)
        reason = only(report).left_out
        assert reason is not None
        assert "SQLSTATE 22P05" in reason
        assert "a value" not in reason
        assert not report.equal


async def test_names_and_repairs_rows_whose_keys_have_another_type(replicated: Replicated, target_db: Database) -> None:
    there = "CREATE TABLE t (id text PRIMARY KEY, v int)"
    async with replicated(NUMBERS, "INSERT INTO t VALUES (1, 1), (2, 2), (3, 3)", there=there) as found:
        assert (await verified(found)).equal
        target_db.execute("INSERT INTO t VALUES ('none', 1), ('01', 1), ('9223372036854775808', 1); DELETE FROM t WHERE id = '3'")
        target_db.execute("UPDATE t SET v = 0 WHERE id = '2'")
        report = await verified(found)
        assert named(only(report)) == [
            ("different", ("2",), ("v",)),
            ("extra", ("01",), ()),
            ("extra", ("9223372036854775808",), ()),
            ("extra", ("none",), ()),
            ("missing", ("3",), ()),
        ]
        await repair(report, target=target_db.dsn)
        assert (await verified(found)).equal


@pytest.mark.parametrize(("here", "there"), [("char(4)", "text"), ("text", "char(4)")])
async def test_keys_with_trailing_blanks(replicated: Replicated, target_db: Database, here: str, there: str) -> None:
    sql = "CREATE TABLE t (id int, code {}, v numeric, PRIMARY KEY (id, code))"
    async with replicated(
        sql.format(here), "INSERT INTO t VALUES (1, 'ab ', 5), (2, 'c', 1), (3, 'd ', 1)", there=sql.format(there)
    ) as found:
        assert (await verified(found)).equal
        target_db.execute("UPDATE t SET v = -v WHERE id = 1; DELETE FROM t WHERE id = 2")
        report = await verified(found)
        assert not report.equal
        repaired = await repair(report, target=target_db.dsn)
        # the text of char(n) lacks the blanks by which the publisher may tell rows apart
        assert bool(repaired) == (await verified(found)).equal == (here == "char(4)")
        assert target_db.fetch("SELECT count(*) FROM t") == [(3 if repaired else 2,)]


async def test_times_in_keys_have_their_zone(replicated: Replicated, target_db: Database) -> None:
    # the bug was a text that means another moment in a target with a time zone
    target_db.execute(f"ALTER DATABASE {target_db.name} SET timezone = 'Asia/Tokyo'")
    moments = "VALUES ('2024-07-01 12:00+00'::timestamptz, 1), ('2024-07-01 03:00+00', 2), ('2024-07-01 21:00+00', 3)"
    async with replicated("CREATE TABLE t (at timestamptz PRIMARY KEY, v int)", f"INSERT INTO t {moments}") as found:
        target_db.execute("UPDATE t SET v = 0 WHERE v = 1; DELETE FROM t WHERE v = 2")
        report = await verified(found)
        assert named(only(report)) == [
            ("different", ("2024-07-01 12:00:00+00",), ("v",)),
            ("missing", ("2024-07-01 03:00:00+00",), ()),
        ]
        await repair(report, target=target_db.dsn)
        assert (await verified(found)).equal
        await found.same("SELECT * FROM t ORDER BY v")


async def test_repair_under_load_undoes_nothing(replicated: Replicated, publisher18_db: Database, target_db: Database) -> None:
    async with replicated(ACCOUNTS, "INSERT INTO account SELECT i, 1000 FROM generate_series(1, 1000) AS i") as found:
        with load(publisher18_db, TRANSFER, TRANSFER, TRANSFER):
            target_db.execute("SET session_replication_role = replica; UPDATE account SET remark = 'wrong' WHERE id % 2 = 0")
            report = await verified(found, "account")
            # an UPDATE writes all columns, so some rows are right again
            assert 0 < len(report.tables[0].differences) <= 500
            await repair(report, target=target_db.dsn)
            assert (await verified(found)).equal
        await found.same("SELECT * FROM account ORDER BY id")
        await found.same("SELECT * FROM entry ORDER BY id")


async def test_compares_types_that_the_target_stores_differently(replicated: Replicated, target_db: Database) -> None:
    here = "a smallint, b numeric(8, 3), c char(5), d varchar(9), e int, f numeric, g json, h jsonb,"
    here += " i timestamp, j timestamptz, k date, l real"
    there = "a int, b numeric, c text, d text, e numeric, f numeric(20, 6), g jsonb, h json,"
    there += " i timestamptz, j timestamp, k timestamp, l float8"
    # a time that does not exist in the target's time zone
    values = """1, 2, 1.5, 'ab', 'cd', 7, 1.25, '{"b":1, "a" :2,"b":3}', '{"b":1, "a" :2}', '2024-03-31 02:30:00.5',
        '2024-07-01 12:00:00+05', '2024-01-01', 1e10"""
    target_db.execute(f"ALTER DATABASE {target_db.name} SET timezone = 'Europe/Berlin'")
    tables = (f"CREATE TABLE t (id {kind} PRIMARY KEY, {columns})" for kind, columns in (("int", here), ("bigint", there)))
    async with replicated(next(tables), f"INSERT INTO t VALUES ({values}); INSERT INTO t VALUES (2)", there=next(tables)) as found:
        report = await verified(found)
        assert report.equal, report.to_json()
        target_db.execute("UPDATE t SET b = 1.501 WHERE id = 1; UPDATE t SET d = '' WHERE id = 2")
        target_db.execute("""UPDATE t SET g = '{"b": 1}', i = i + interval '1 s', l = 1e10 + 1 WHERE id = 1""")
        assert named(only(await verified(found))) == [("different", ("1",), ("b", "g", "i", "l")), ("different", ("2",), ("d",))]


async def test_finds_one_row_in_ranges_of_keys_and_of_blocks(publisher18_db: Database, target_db: Database) -> None:
    table = "CREATE TABLE {0} (id int PRIMARY KEY, v text)"
    for database in (publisher18_db, target_db):
        database.execute(table.format("in_order") + ";" + table.format("shuffled"))
    publisher18_db.execute("""
        INSERT INTO in_order SELECT i, md5(i::text) FROM generate_series(1, 120000) AS i;
        INSERT INTO shuffled SELECT id, v FROM in_order ORDER BY v;
        ANALYZE in_order, shuffled;
        CREATE PUBLICATION pub FOR ALL TABLES
    """)
    async with replica(publisher18_db, target_db) as found:
        await found.caught_up(60)
        target_db.execute("UPDATE in_order SET v = 'x' WHERE id = 77777; UPDATE shuffled SET v = 'x' WHERE id = 77777")
        report = await verified(found)
        in_order, shuffled = report.tables
        assert in_order.ranges > 1
        assert in_order.differing_ranges == 1
        assert named(in_order) == named(shuffled) == [("different", ("77777",), ("v",))]
        assert in_order.publisher_rows == in_order.target_rows == shuffled.publisher_rows == shuffled.target_rows == 120000


async def test_compares_partition_roots_and_column_lists(replicated: Replicated, publisher18_db: Database, target_db: Database) -> None:
    columns = "id int, part int, v text, hidden text"
    publisher18_db.execute(f"""
        CREATE TABLE root ({columns}, doubled int GENERATED ALWAYS AS (part * 2) STORED, PRIMARY KEY (id, part)) PARTITION BY LIST (part);
        CREATE TABLE one PARTITION OF root FOR VALUES IN (1); CREATE TABLE two PARTITION OF root FOR VALUES IN (2);
        INSERT INTO root SELECT i, 1 + i % 2, 'v', 'h' FROM generate_series(1, 1000) AS i;
        CREATE PUBLICATION pub FOR TABLE root (id, part, v) WITH (publish_via_partition_root)
    """)
    # the target is not partitioned, and a table inherits from it
    target_db.execute(f"CREATE TABLE root ({columns}, PRIMARY KEY (id, part)); CREATE TABLE child () INHERITS (root)")
    async with replica(publisher18_db, target_db) as found:
        await found.caught_up()
        target_db.execute("INSERT INTO child VALUES (1, 1, 'not replicated', NULL); UPDATE root SET hidden = 'not replicated'")
        report = await verified(found, changed=True)
        assert (report.equal, only(report).publisher_rows, only(report).target_rows) == (True, 1000, 1000)
        target_db.execute("DELETE FROM ONLY root WHERE id = 4")
        report = await verified(found, changed=True)
        assert named(only(report)) == [("missing", ("4", "1"), ())]
        await repair(report, target=target_db.dsn)
        assert (await verified(found)).equal


async def test_compares_a_table_without_key_as_a_multiset(replicated: Replicated, target_db: Database) -> None:
    async with replicated(
        "CREATE TABLE t (v text, n int); ALTER TABLE t REPLICA IDENTITY FULL",
        "INSERT INTO t VALUES ('a', 1), ('a', 1), ('a', 1), (NULL, 2)",
    ) as found:
        assert (await verified(found)).equal
        target_db.execute("DELETE FROM t WHERE ctid = (SELECT min(ctid) FROM t); INSERT INTO t VALUES ('b', NULL), ('b', NULL)")
        report = await verified(found, limits=SHOWN)
        assert [(each.kind, each.count, each.publisher or each.target) for each in only(report).differences] == [
            (RowKind.MISSING, 1, {"v": "a", "n": "1"}),
            (RowKind.EXTRA, 2, {"v": "b", "n": None}),
        ]
        assert await repair(report, target=target_db.dsn) == {}


async def test_repair_leaves_out_a_table_without_a_key(replicated: Replicated, publisher18_db: Database, target_db: Database) -> None:
    async with replicated("CREATE TABLE bag (v int); CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)") as found:
        target_db.execute("DELETE FROM t; INSERT INTO bag VALUES (1)")
        arguments = (found.subscription.name, "--connection", publisher18_db.dsn, "--target", target_db.dsn, "--repair")
        done = await asyncio.to_thread(subscriber, "verify", *arguments, loud=True)
        assert (done.status, target_db.fetch("SELECT id FROM t")) == (1, [(1,)])
        assert 'table "public.bag" has no key: its rows cannot be repaired one by one (hint: reconcile it as a whole' in done.output
        assert "public.t: 1 rows repaired" in done.output


async def test_refuses_a_subscription_that_does_not_run(replicated: Replicated, target_db: Database) -> None:
    async with replicated("CREATE TABLE t (id int PRIMARY KEY)") as found:
        pass
    with pytest.raises(Exception, match="is not running") as caught:
        await verified(found)
    assert "subscriber run" in str(getattr(caught.value, "hint", ""))
    assert target_db.value("SELECT count(*) FROM subscriber.snapshot_request") == 0


async def test_compares_only_what_changed_since_both_sides_were_equal(
    replicated: Replicated, publisher18_db: Database, target_db: Database
) -> None:
    async with replicated(TEXTS, "INSERT INTO t SELECT i, 'v' FROM generate_series(1, 1000) AS i") as found:
        assert not only(await verified(found, changed=True)).changed_only, "there was no verification before"
        publisher18_db.execute("UPDATE t SET v = 'new' WHERE id <= 10; DELETE FROM t WHERE id = 500; INSERT INTO t VALUES (2000, 'x')")
        await found.caught_up()
        report = await verified(found, changed=True)
        assert report.equal
        assert (only(report).changed_only, only(report).publisher_rows, only(report).target_rows) == (True, 1000, 1000)
        target_db.execute("UPDATE t SET v = 'wrong' WHERE id = 5")
        table = only(await verified(found, changed=True))
        assert table.changed_only
        assert named(table) == [("different", ("5",), ("v",))]
        # after a difference, the next one compares everything again
        table = only(await verified(found, changed=True))
        assert not table.changed_only
        assert len(table.differences) == 1


async def test_a_column_that_was_added_is_compared_in_old_rows(
    replicated: Replicated, publisher18_db: Database, target_db: Database
) -> None:
    async with replicated("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t SELECT generate_series(1, 100)") as found:
        assert (await verified(found)).equal
        # no row is written
        target_db.execute("ALTER TABLE t ADD v int DEFAULT 1")
        publisher18_db.execute("ALTER TABLE t ADD v int DEFAULT 2")
        report = await verified(found, changed=True)
        assert {each.columns for each in only(report).differences} == {("v",)}
        assert len(only(report).differences) == 100
        target_db.execute("UPDATE t SET v = 2")
        assert (await verified(found)).equal
        assert only(await verified(found, changed=True)).changed_only


async def test_a_column_that_is_published_now_is_compared_in_old_rows(publisher18_db: Database, target_db: Database) -> None:
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE t (id int PRIMARY KEY, v int)")
    publisher18_db.execute("INSERT INTO t VALUES (1, 1); CREATE PUBLICATION pub FOR TABLE t (id)")
    async with replica(publisher18_db, target_db) as found:
        await found.caught_up()
        assert (await verified(found)).equal
        assert only(await verified(found, changed=True)).changed_only
        publisher18_db.execute("ALTER PUBLICATION pub SET TABLE t (id, v)")
        assert named(only(await verified(found, changed=True))) == [("different", ("1",), ("v",))]


async def test_a_table_that_is_copied_again_is_not_repaired(replicated: Replicated, target_db: Database) -> None:
    async with replicated("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)") as found:
        target_db.execute("INSERT INTO t VALUES (2)")
        report = await verified(found)
        target_db.execute("UPDATE subscriber.pg_subscription_rel SET srsubstate = 'd'")
        with pytest.raises(RelationError, match="it is still being synchronized"):
            await repair(report, target=target_db.dsn)
        target_db.execute("UPDATE subscriber.pg_subscription_rel SET srsubstate = 'r'")
        await repair(report, target=target_db.dsn)
        assert (await verified(found)).equal


async def test_a_row_that_the_target_rejects_is_an_error_of_the_target(replicated: Replicated, target_db: Database) -> None:
    async with replicated(NUMBERS, "INSERT INTO t VALUES (1, 1)") as found:
        target_db.execute("DELETE FROM t; ALTER TABLE t ADD CHECK (v <> 1)")
        with pytest.raises(ApplyError, match="violates check constraint"):
            await repair(await verified(found), target=target_db.dsn)


async def test_a_deletion_on_one_side_alone_is_found_without_newer_rows(replicated: Replicated, target_db: Database) -> None:
    async with replicated(TEXTS, "INSERT INTO t SELECT i, 'v' FROM generate_series(1, 1000) AS i") as found:
        assert (await verified(found)).equal
        target_db.execute("DELETE FROM t WHERE id = 7")
        assert named(only(await verified(found, changed=True))) == [("missing", ("7",), ())]


def sessions(name: str) -> str:
    """Query how many sessions of this name there are."""
    return f"SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE '%{name}'"


async def test_a_killed_verification_leaves_nothing_behind(replicated: Replicated, publisher18_db: Database, target_db: Database) -> None:
    async with replicated(TEXTS, "INSERT INTO t SELECT i, 'v' FROM generate_series(1, 100000) AS i; ANALYZE t") as found:
        arguments = ["verify", found.subscription.name, "--connection", publisher18_db.dsn, "--target", target_db.dsn, "--max-rate", "1000"]
        with running(*arguments) as program:
            await asyncio.to_thread(publisher18_db.wait, sessions("verify"), 2)
            await asyncio.to_thread(target_db.wait, "SELECT count(*) FROM subscriber.snapshot_request", 0)
            program.send(signal.SIGKILL)
            await asyncio.to_thread(program.ended)
        publisher18_db.execute("UPDATE t SET v = 'later' WHERE id = 1")
        await found.caught_up()
        await asyncio.to_thread(publisher18_db.wait, sessions("verify"), 0)
        assert (await verified(found)).equal


async def test_snapshots_of_a_requester_that_ends_are_closed(replicated: Replicated, publisher18_db: Database, target_db: Database) -> None:
    async with replicated("CREATE TABLE t (id int PRIMARY KEY)") as found:
        async with open_store(target_db.dsn, "test") as (store, find):
            requests = StoredRequests(store, (await find(found.subscription.name)).oid, "the test")
            await requests.take_lock()
            await requests.put("1", {"kind": "snapshot"})
            await asyncio.to_thread(target_db.wait, "SELECT state FROM subscriber.snapshot_request", "o")
            assert publisher18_db.value(sessions("snapshot")) == 1
            publisher18_db.execute("INSERT INTO t VALUES (1)")
            await found.caught_up()
        # its lock is free now
        await asyncio.to_thread(publisher18_db.wait, sessions("snapshot"), 0)
        assert (await verified(found)).equal


async def test_the_command_line_tells_and_repairs(replicated: Replicated, publisher18_db: Database, target_db: Database) -> None:
    async with replicated(TEXTS, "INSERT INTO t SELECT i, 'secret' FROM generate_series(1, 10) AS i") as found:
        target_db.execute("UPDATE t SET v = 'wrong' WHERE id = 3")

        async def run(*more: str) -> Ended:
            arguments = ["verify", found.subscription.name, "--connection", publisher18_db.dsn, "--target", target_db.dsn, *more]
            return await asyncio.to_thread(subscriber, *arguments)

        done = await run("--repair", "--dry-run")
        assert (done.status, done.errors) == (1, "")
        assert "  update different: id=3 in v\n" in done.output
        assert "secret" not in done.output
        done = await run("--json")
        report = json.loads(done.output)
        assert (done.status, report["equal"], report["tables"][0]["differences"]) == (
            1,
            False,
            [{"kind": "different", "key": {"id": "3"}, "columns": ["v"]}],
        )
        done = await run("--repair")
        assert (done.status, done.errors) == (0, "")
        assert "public.t: 1 rows repaired\n" in done.output
        assert (await run()).status == 0
        assert "--dry-run belongs to --repair" in (await run("--dry-run")).errors


async def test_prepared_transactions_are_on_neither_side(replicated: Replicated, publisher18_db: Database, target_db: Database) -> None:
    async with replicated(TEXTS, "INSERT INTO t VALUES (1, 'v')", two_phase=True) as found:
        await asyncio.to_thread(target_db.wait, "SELECT subtwophasestate FROM subscriber.pg_subscription", "e")
        gid = f"verify_{publisher18_db.name}"
        publisher18_db.execute("BEGIN; UPDATE t SET v = 'prepared'; INSERT INTO t VALUES (2, 'prepared')")
        publisher18_db.execute(f"PREPARE TRANSACTION '{gid}'")
        await found.caught_up()
        report = await verified(found)
        assert (report.equal, only(report).publisher_rows) == (True, 1)
        publisher18_db.execute(f"COMMIT PREPARED '{gid}'")
        report = await verified(found)
        assert (report.equal, only(report).publisher_rows) == (True, 2)


async def test_repair_of_rows_that_a_prepared_transaction_has_locked_ends(
    replicated: Replicated, publisher18_db: Database, target_db: Database
) -> None:
    async with replicated(TEXTS, "INSERT INTO t VALUES (1, 'v')", two_phase=True) as found:
        await asyncio.to_thread(target_db.wait, "SELECT subtwophasestate FROM subscriber.pg_subscription", "e")
        target_db.execute("UPDATE t SET v = 'wrong'")
        report = await verified(found)
        gid = f"locked_{publisher18_db.name}"
        publisher18_db.execute("BEGIN; UPDATE t SET v = 'prepared'")
        publisher18_db.execute(f"PREPARE TRANSACTION '{gid}'")
        await found.caught_up()
        # the lock is free only when apply has continued
        with pytest.raises(TargetError, match="are locked in the target"):
            await asyncio.wait_for(repair(report, target=target_db.dsn), 30)
        publisher18_db.execute(f"COMMIT PREPARED '{gid}'")
        await found.caught_up()
        assert (await verified(found)).equal


async def test_repair_does_not_delete_the_rows_of_a_rewritten_table(
    replicated: Replicated, publisher18_db: Database, target_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def after_rewriting(*arguments: Any) -> Any:
        # the rows are now newer than the snapshot
        publisher18_db.execute("ALTER TABLE t ALTER v TYPE bigint")
        return await rows_by_key(*arguments)

    async with replicated(NUMBERS, "INSERT INTO t VALUES (1, 1), (2, 2)") as found:
        target_db.execute("UPDATE t SET v = 0")
        report = await verified(found)
        with monkeypatch.context() as patch:
            patch.setattr(snapshot_service, "rows_by_key", after_rewriting)
            with pytest.raises(RelationError, match="truncated or rewritten"):
                await repair(report, target=target_db.dsn)
        assert target_db.fetch("SELECT id, v FROM t ORDER BY id") == [(1, 0), (2, 0)]
        await repair(report, target=target_db.dsn)
        assert (await verified(found)).equal


async def test_a_subscription_of_the_catalog_needs_no_connection_string(publisher18_db: Database, target_db: Database) -> None:
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE other (id int PRIMARY KEY)")
    publisher18_db.execute(
        "INSERT INTO t SELECT i, 'v' FROM generate_series(1, 10) AS i; CREATE PUBLICATION pub FOR TABLE t WHERE (id > 5)"
    )
    name = await create(publisher18_db, target_db)
    async with launched(target_db):
        await asyncio.to_thread(catch_up, publisher18_db, target_db, name)
        report = await verify(name, target=target_db.dsn)
        assert report.equal
        # the target holds what the row filter publishes
        assert (only(report).publisher_rows, only(report).target_rows) == (5, 5)
        target_db.execute("INSERT INTO t VALUES (1, 'v')")
        assert named(only(await verify(name, target=target_db.dsn))) == [("extra", ("1",), ())]
        publisher18_db.execute("ALTER PUBLICATION pub ADD TABLE other")
        assert [table.left_out for table in (await verify(name, target=target_db.dsn)).tables] == [
            "it is not part of the subscription",
            None,
        ]
        with pytest.raises(ConfigurationError, match=r'table "public\.none" is not published'):
            await verify(name, target=target_db.dsn, tables=[TableName("public", "none")])
    with pytest.raises(TargetError, match='subscription "none" does not exist'):
        await verify("none", target=target_db.dsn)


async def test_a_lake_that_does_not_exist_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match='subscription "copy" does not exist'):
        await verify("copy", target=f"spark://{tmp_path}/lake", connection="host=nowhere")
    assert not list(tmp_path.iterdir())


def test_different_values_have_different_hashes(publisher18_db: Database) -> None:
    """Also where PostgreSQL's own hash of the type is equal: it ignores the sign of a numeric, and folds a timestamp to 32 bits."""
    values = {
        "numeric": ["5", "-5", "5.0", "50000", "0", "NaN", "Infinity", "-Infinity", None],
        "timestamp": ["epoch", "2000-01-01", "2000-01-01 01:11:34.967297", "1999-12-31 23:59:59.999999", "infinity", "-infinity", None],
        "timestamptz": ["epoch", "4714-11-24 00:00:00+00 BC", "2024-10-27 00:30:00.000001+00", "infinity", "-infinity", None],
        "int8": ["0", "-1", "4294967296", "4294967297", "1", "-4294967296", None],
    }
    for kind, texts in values.items():
        hashed = column_sql("v", kind, kind, null=True, same_modifier=True).hashed("7")
        found = set()
        for zone in ("UTC", "Europe/Berlin"):
            publisher18_db.execute(f"SET timezone = '{zone}'")
            listed = ", ".join("(NULL)" if text is None else f"('{text}')" for text in texts)
            found.add(
                tuple(
                    row[0] for row in publisher18_db.fetch(f"SELECT {hashed} FROM (VALUES {listed}) AS t(text), CAST(text AS {kind}) AS v")
                )
            )
        assert len(found) == 1, kind
        assert all(len(set(hashes)) == len(texts) for hashes in found), kind
