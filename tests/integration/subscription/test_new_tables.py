"""``new_tables = copy``: tables that join the publications while the subscription runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from subscriber import Subscription, TableName, TableState, verify
from subscriber.subscription.run.tables import new_tables
from subscriber.testing.binaries import find_binaries
from tests.support.database import Database
from tests.support.replica import QUICK, Replica, at_work, replica
from tests.support.roles import role
from tests.support.sqlalchemy_targets import IN_BOTH_ALIKE, OtherTarget

COPY = replace(QUICK, new_tables="copy")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_tables, "_LOOK_SECONDS", 0.2)
    monkeypatch.setattr(new_tables, "_RETRY_SECONDS", 0.5)
    monkeypatch.setenv("PATH", f"{find_binaries(18)}:{os.environ['PATH']}")


@contextlib.asynccontextmanager
async def following(publisher: Database, target: Database, publication: str = "FOR ALL TABLES", **options: Any) -> AsyncIterator[Replica]:
    publisher.execute(f"CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1); CREATE PUBLICATION pub {publication}")
    target.execute("CREATE TABLE IF NOT EXISTS t (id int PRIMARY KEY)")
    async with replica(publisher, target, settings=COPY, **options) as found:
        await found.caught_up()
        yield found


async def ready(found: Replica, *names: str) -> None:
    """Wait until tables are replicated."""
    async with asyncio.timeout(60):
        while True:
            states = {str(table): entry.state for table, entry in found.subscription.status.tables.items()}
            if all(states.get(f"public.{name}") in {TableState.SYNCDONE, TableState.READY} for name in names):
                return
            await asyncio.sleep(0.05)


async def test_tables_that_are_created_and_written_at_once(publisher18_db: Database, target_db: Database) -> None:
    async with following(publisher18_db, target_db) as found:
        publisher18_db.execute("""
            CREATE TYPE mood AS ENUM ('sad', 'happy');
            CREATE TABLE parent (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, m mood DEFAULT 'sad' NOT NULL, n numeric(10, 2));
            CREATE TABLE child (id int PRIMARY KEY, parent bigint REFERENCES parent, v text COLLATE "C");
            CREATE INDEX child_v ON child (v);
            INSERT INTO parent (m) VALUES ('happy'); INSERT INTO child VALUES (1, 1, 'a'); INSERT INTO t VALUES (2)
        """)
        # the others are not stopped
        await asyncio.to_thread(target_db.wait, "SELECT count(*) FROM t", 2)
        publisher18_db.execute("INSERT INTO child VALUES (2, 1, 'b'); UPDATE parent SET n = 1.5")
        await ready(found, "parent", "child")
        publisher18_db.execute("DELETE FROM child WHERE id = 1; INSERT INTO child VALUES (3, 1, 'c'); INSERT INTO t VALUES (3)")
        assert await found.same("SELECT * FROM child ORDER BY id") == [(2, 1, "b"), (3, 1, "c")]
        await found.same("SELECT id, m::text, n FROM parent")
        await found.same("SELECT indexdef FROM pg_indexes WHERE schemaname = 'public' ORDER BY 1")
        await found.same(
            "SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint WHERE connamespace = 'public'::regnamespace ORDER BY 1"
        )
        assert not found.subscription.status.left_out
        assert found.subscription.status.last_error is None


async def test_a_table_that_is_dropped_again_stops_nothing(publisher18_db: Database, target_db: Database) -> None:
    async with following(publisher18_db, target_db) as found:
        for number in range(5):
            publisher18_db.execute(f"CREATE TABLE n{number} (v int); INSERT INTO n{number} VALUES (1); DROP TABLE n{number}")
        publisher18_db.execute("INSERT INTO t VALUES (2)")
        await found.same("SELECT id FROM t ORDER BY id")
        assert not found.running.done()


async def test_tables_that_are_added_to_a_publication(publisher18_db: Database, target_db: Database) -> None:
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE here (id int PRIMARY KEY, v text)")
    target_db.execute("ALTER TABLE here ADD own int DEFAULT 7")
    publisher18_db.execute("CREATE TABLE lacking (id int PRIMARY KEY); CREATE TABLE other (id int PRIMARY KEY)")
    publisher18_db.execute(
        "INSERT INTO here VALUES (1, 'a'); ALTER TABLE lacking ADD o int REFERENCES other; INSERT INTO lacking VALUES (1)"
    )
    async with following(publisher18_db, target_db, "FOR TABLE t") as found:
        publisher18_db.execute("ALTER PUBLICATION pub ADD TABLE here, lacking; INSERT INTO here VALUES (2, 'b')")
        await ready(found, "here", "lacking")
        await found.same("SELECT id, v FROM here ORDER BY id")
        await found.same("SELECT * FROM lacking")
        assert target_db.fetch("SELECT own FROM here") == [(7,), (7,)]
        assert target_db.value("SELECT to_regclass('other')::text") is None, "a table that is not published is not created"


async def test_streamed_changes_of_a_new_table(publisher18_db: Database, target_db: Database) -> None:
    async with following(publisher18_db, target_db, streaming="parallel") as found:
        with publisher18_db.connect() as session:
            session.execute("BEGIN; CREATE TABLE large (id int PRIMARY KEY, v text); INSERT INTO t VALUES (2)")
            session.execute("INSERT INTO large SELECT i, repeat('x', 100) FROM generate_series(1, 20000) AS i")
            session.execute("COMMIT")
        await ready(found, "large")
        publisher18_db.execute("UPDATE large SET v = 'y' WHERE id < 10")
        await found.same("SELECT count(*), count(*) FILTER (WHERE v = 'y') FROM large")
        await found.same("SELECT id FROM t ORDER BY id")


async def test_a_table_that_cannot_be_created_is_named_and_tried_again(publisher18_db: Database, target_db: Database) -> None:
    async with following(publisher18_db, target_db) as found:
        target_db.execute("CREATE VIEW blocked AS SELECT 1 AS id")
        publisher18_db.execute(
            "CREATE TABLE blocked (id int PRIMARY KEY); CREATE TABLE fine (id int PRIMARY KEY); INSERT INTO fine VALUES (1)"
        )
        await ready(found, "fine")
        async with asyncio.timeout(30):
            while "blocked" not in str(found.subscription.status.left_out.get(TableName("public", "blocked"))):
                await asyncio.sleep(0.05)
        target_db.execute("DROP VIEW blocked")
        await ready(found, "blocked")


async def test_what_could_not_be_created_is_said(publisher18_db: Database, target_db: Database, caplog: pytest.LogCaptureFixture) -> None:
    async with following(publisher18_db, target_db) as found:
        with role(publisher18_db) as reader:
            publisher18_db.execute(f"""
                BEGIN; CREATE TABLE n (id int PRIMARY KEY, v int UNIQUE); CREATE TABLE o (id int PRIMARY KEY);
                CREATE POLICY p ON n TO {reader.name} USING (true); COMMIT
            """)
            await ready(found, "n", "o")
            publisher18_db.execute("DROP POLICY p ON n")
    assert "not all that belongs to new tables was created" in caplog.text
    assert "published but not replicated" not in caplog.text


async def test_a_lake(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    lake = f"spark://{tmp_path}/lake"
    async with following(publisher18_db, target_db, target_url=f"{lake}?apply=local") as found:
        publisher18_db.execute("CREATE TABLE n (id int PRIMARY KEY, v text); INSERT INTO n VALUES (1, 'a'); INSERT INTO t VALUES (2)")
        await ready(found, "n")
        publisher18_db.execute("UPDATE n SET v = 'b'; INSERT INTO n VALUES (2, 'c')")
        await found.caught_up()
        report = await verify(found.subscription.name, target=lake, connection=publisher18_db.dsn)
        assert [(table.table.name, table.equal, table.publisher_rows) for table in report.tables] == [("n", True, 2), ("t", True, 2)]
        # the tables of a lake are not renamed
        publisher18_db.execute("ALTER TABLE t RENAME TO other; INSERT INTO other VALUES (3)")
        await ready(found, "other")
        await found.caught_up()
        report = await verify(found.subscription.name, target=lake, connection=publisher18_db.dsn, tables=[TableName("public", "other")])
        assert [(table.equal, table.publisher_rows) for table in report.tables] == [(True, 3)]


@IN_BOTH_ALIKE
async def test_other_databases(publisher18_db: Database, other_target: OtherTarget) -> None:
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR ALL TABLES")
    subscription = Subscription(
        f"new_{publisher18_db.name}",
        connection=publisher18_db.conninfo(),
        publications=["pub"],
        target=other_target.url,
        settings=replace(COPY, create_tables=True),
    )
    async with at_work(subscription):
        await subscription.wait_for(publisher18_db.current_lsn(), 60)
        publisher18_db.execute(
            "CREATE TABLE n (id int PRIMARY KEY, v text UNIQUE); INSERT INTO n VALUES (1, 'a'); INSERT INTO t VALUES (1)"
        )
        async with asyncio.timeout(60):
            while TableName("public", "n") not in subscription.status.tables:
                await asyncio.sleep(0.05)
        publisher18_db.execute("INSERT INTO n VALUES (2, 'b')")
        await subscription.wait_for(publisher18_db.current_lsn(), 60)
        assert await asyncio.to_thread(other_target.fetch, "SELECT id, v FROM n ORDER BY id") == [(1, "a"), (2, "b")]


async def test_tables_that_came_while_nothing_ran(publisher18_db: Database, target_db: Database, caplog: pytest.LogCaptureFixture) -> None:
    """No message says what to do: nothing is to be done."""
    async with following(publisher18_db, target_db):
        pass
    publisher18_db.execute("CREATE TABLE n (id int PRIMARY KEY); INSERT INTO n VALUES (1)")
    async with replica(publisher18_db, target_db, settings=COPY) as found:
        await ready(found, "n")
        await found.same("SELECT * FROM n")
    assert "not replicated" not in caplog.text
    assert caplog.text.count('table "public.n" is published, and was added to the subscription') == 1


async def test_a_renamed_table_is_an_error_until_it_is_renamed_in_the_target(publisher18_db: Database, target_db: Database) -> None:
    async with following(publisher18_db, target_db) as found:
        publisher18_db.execute("ALTER TABLE t RENAME TO other; INSERT INTO other VALUES (2)")
        async with asyncio.timeout(30):
            while 'relation "public.other" does not exist' not in str(found.subscription.status.last_error):
                await asyncio.sleep(0.05)
        target_db.execute("ALTER TABLE t RENAME TO other")
        assert await found.same("SELECT id FROM other ORDER BY id") == [(1,), (2,)]


async def test_new_tables_are_copied_whatever_others_were(publisher18_db: Database, target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1)")
    async with following(publisher18_db, target_db, copy_data=False) as found:
        publisher18_db.execute("""
            CREATE TABLE n (id int PRIMARY KEY, v text); INSERT INTO n VALUES (1, 'a'); CREATE INDEX n_v ON n (v);
            ALTER TABLE t ADD FOREIGN KEY (id) REFERENCES n
        """)
        await ready(found, "n")
        await found.same("SELECT * FROM n")
        await found.same("SELECT indexdef FROM pg_indexes WHERE schemaname = 'public' ORDER BY 1")
        assert target_db.value("SELECT count(*) FROM pg_constraint WHERE contype = 'f'") == 0
