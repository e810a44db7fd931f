"""Verification at one LSN while replication runs, and repair."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from subscriber import ApplyError, ConfigurationError, RelationError, TableName, TargetError, TargetUnavailable, repair, verify
from subscriber.catalog.snapshot_requests import StoredRequests
from subscriber.subscription.run import snapshot_service
from subscriber.subscription.targets import stored_catalog
from subscriber.verification.model import RowKind
from subscriber.walreceiver.copying.rows_by_key import rows_by_key
from tests.support.database import Database
from tests.support.managed import catch_up, create, launched
from tests.support.program import Ended, running, subscriber
from tests.support.replica import replica
from tests.support.verification import NUMBERS, SHOWN, TEXTS, Replicated, named, only, verified


@contextmanager
def load(publisher: Database, *scripts: str) -> Iterator[None]:
    """Run each script again and again, in a session of its own, while the block lasts."""
    stop = threading.Event()
    failures: list[Exception] = []

    def work(script: str) -> None:
        try:
            with psycopg.connect(publisher.dsn, autocommit=True) as connection:
                # not all that the processor can do: the subscription has to follow
                while not stop.wait(0.005):
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


async def test_repair_keeps_rows_whose_keys_are_equal_for_the_target_only(
    replicated: Replicated, publisher18_db: Database, target_db: Database
) -> None:
    spans = "CREATE TABLE spans (id interval NOT NULL, v int); CREATE TABLE t (id int PRIMARY KEY)"
    async with replicated(
        f"{spans}; ALTER TABLE spans ADD PRIMARY KEY (id)",
        "INSERT INTO spans VALUES ('1 mon', 1), ('24:00:00', 2), ('2 days', 3); INSERT INTO t VALUES (1)",
        there=f"{spans}; ALTER TABLE spans REPLICA IDENTITY FULL",
    ) as found:
        target_db.execute("UPDATE spans SET v = 5 WHERE id = '2 days'; INSERT INTO spans VALUES ('30 days', 4), ('1 day', 2)")
        await repair(await verified(found), target=target_db.dsn)
        await found.same('SELECT id::text COLLATE "C", v FROM spans ORDER BY 1')
        # a table that cannot be repaired prevents no other
        target_db.execute("""
            UPDATE spans SET v = 0; INSERT INTO t VALUES (2);
            CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RETURN NULL; END$$;
            CREATE TRIGGER tr AFTER DELETE ON t FOR EACH ROW EXECUTE FUNCTION f(); ALTER TABLE t ENABLE ALWAYS TRIGGER tr
        """)
        with pytest.raises(RelationError, match=r'trigger "tr" of table "public\.t" fires'):
            await repair(await verified(found), target=target_db.dsn)
        await found.same('SELECT id::text COLLATE "C", v FROM spans ORDER BY 1')
        publisher18_db.execute("ALTER PUBLICATION pub SET (publish = 'insert')")
        target_db.execute("DROP TRIGGER tr ON t")
        with pytest.raises(RelationError, match="do not publish updates and deletes"):
            await repair(await verified(found), target=target_db.dsn)


async def test_repairs_a_table_with_an_identity_column_beside_its_key(replicated: Replicated, target_db: Database) -> None:
    async with replicated(
        "CREATE TABLE t (id int PRIMARY KEY, n int GENERATED ALWAYS AS IDENTITY, v int)",
        "INSERT INTO t (id, v) VALUES (1, 1), (2, 2), (3, 3)",
    ) as found:
        target_db.execute("UPDATE t SET v = 0 WHERE id = 1; UPDATE t SET n = DEFAULT WHERE id = 2; DELETE FROM t WHERE id = 3")
        await repair(await verified(found), target=target_db.dsn)
        assert (await verified(found)).equal


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


async def test_repair_leaves_out_a_table_without_a_key(replicated: Replicated, publisher18_db: Database, target_db: Database) -> None:
    async with replicated("CREATE TABLE bag (v int); CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)") as found:
        target_db.execute("DELETE FROM t; INSERT INTO bag VALUES (1)")
        arguments = (found.subscription.name, "--connection", publisher18_db.dsn, "--target", target_db.dsn, "--repair")
        done = await asyncio.to_thread(subscriber, "verify", *arguments, loud=True)
        assert (done.status, target_db.fetch("SELECT id FROM t")) == (1, [(1,)])
        assert 'table "public.bag" has no key: its rows cannot be repaired one by one (hint: reconcile it as a whole' in done.output
        assert "public.t: 1 row repaired" in done.output


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


async def test_old_rows_of_another_table_are_compared(publisher18_db: Database, target_db: Database) -> None:
    for database in (publisher18_db, target_db):
        database.execute("""
            CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE u (LIKE t INCLUDING ALL); CREATE TABLE p2 (LIKE t INCLUDING ALL);
            CREATE TABLE p (LIKE t INCLUDING ALL) PARTITION BY RANGE (id); CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (9)
        """)
    publisher18_db.execute("INSERT INTO t VALUES (1, 't'); INSERT INTO u VALUES (1, 'u'); INSERT INTO p VALUES (1, 'p')")
    publisher18_db.execute("INSERT INTO p2 VALUES (1, 'q'); CREATE PUBLICATION pub FOR ALL TABLES WITH (publish_via_partition_root)")
    async with replica(publisher18_db, target_db) as found:
        await found.caught_up()
        assert (await verified(found)).equal
        await verified(found, changed=True)
        # no row is written or sent
        publisher18_db.execute("ALTER TABLE t RENAME TO x; ALTER TABLE u RENAME TO t; ALTER TABLE x RENAME TO u")
        publisher18_db.execute("ALTER TABLE p DETACH PARTITION p1; ALTER TABLE p ATTACH PARTITION p2 FOR VALUES FROM (0) TO (9)")
        report = await verified(found, "p", "t", "u", changed=True)
        assert [(table.table.name, len(table.differences)) for table in report.tables] == [("p", 1), ("t", 1), ("u", 1)]


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
        async with stored_catalog(target_db.dsn, "test") as catalog:
            requests = StoredRequests(catalog.store, (await catalog.find(found.subscription.name)).oid, "the test")
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
        assert done.output.endswith("public.t: 1 row repaired\n")
        # it was compared again, although nothing but what changed was read
        stored = target_db.fetch("SELECT differences, more, whole_lsn < lsn FROM subscriber.verification")
        assert stored == [(0, False, True)]
        target_db.execute("UPDATE t SET v = 'wrong' WHERE id = 4")
        done = await run("--repair", "--json")
        report = json.loads(done.output)
        assert (done.status, report["equal"], report["repaired"], report["after"]["equal"]) == (0, False, {"public.t": 1}, True)
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
    async def after_rewriting(*arguments: Any, **options: Any) -> Any:
        # the rows are now newer than the snapshot
        publisher18_db.execute("ALTER TABLE t ALTER v TYPE bigint")
        return await rows_by_key(*arguments, **options)

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


async def test_error_of_the_process_after_the_snapshots_are_open(
    replicated: Replicated, publisher18_db: Database, target_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug was that it was reported nowhere, and the verb named a snapshot that did not exist any more."""

    async def lost(*_: object) -> bool:
        raise TargetUnavailable("the target did not answer within 3 s")

    async with replicated(NUMBERS, "INSERT INTO t VALUES (1, 1)") as found:
        with monkeypatch.context() as patch:
            # asked for the first time once the snapshots are open
            patch.setattr(StoredRequests, "has_verb", lost)
            with pytest.raises(TargetUnavailable, match="the target did not answer within 3 s"):
                await verified(found)
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
