"""``schema_change = follow`` and ``add`` into SQLite and MariaDB: renamed, dropped, added and retyped columns of the publisher."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Literal

import pytest

from subscriber import Subscription, SubscriptionOptions, TargetUnavailable, crash_points
from tests.support.database import WAIT_SECONDS, Database
from tests.support.program import subscriber
from tests.support.replica import QUICK, at_work
from tests.support.sqlalchemy_targets import OtherTarget

FOLLOW = replace(QUICK, schema_change="follow", create_tables=True)
DROP = replace(FOLLOW, dropped_columns="drop")
TABLE = "CREATE TABLE t (id int PRIMARY KEY, a int NOT NULL, b int)"
BOTH = pytest.mark.parametrize("other_target", ["sqlite", "mariadb"], indirect=True)
ONLY_MARIADB = pytest.mark.parametrize("other_target", ["mariadb"], indirect=True)


class Follower:
    """A running subscription of table t."""

    def __init__(self, subscription: Subscription, publisher: Database, target: OtherTarget) -> None:
        self.subscription = subscription
        self.publisher = publisher
        self.target = target

    async def fetch(self, query: str) -> list[tuple[Any, ...]]:
        return await asyncio.to_thread(self.target.fetch, query)

    async def execute(self, query: str) -> None:
        await asyncio.to_thread(self.target.execute, query)

    async def caught_up(self) -> None:
        await self.subscription.wait_for(self.publisher.current_lsn(), WAIT_SECONDS)

    async def known(self) -> None:
        """Wait until the columns of the table are known."""
        await self._until("SELECT count(*) FROM subscriber_pg_subscription_rel WHERE srcolumns IS NULL", 0)

    async def _until(self, query: str, expected: object) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            while (await self.fetch(query))[0][0] != expected:
                await asyncio.sleep(0.02)

    async def same(self, *columns: str, failed: bool = False) -> None:
        """The rows are equal. ``failed``: something failed before."""
        await self.caught_up()
        query = f"SELECT id, {', '.join(columns)} FROM t ORDER BY id"
        texts = f"SELECT id, {', '.join(f'{column}::text' for column in columns)} FROM t ORDER BY id"
        found = [(row[0], *(None if value is None else str(value) for value in row[1:])) for row in await self.fetch(query)]
        assert found == self.publisher.fetch(texts)
        assert (self.subscription.status.last_error is not None) is failed

    async def failed(self, message: str, hint: str) -> None:
        """Wait for an error."""
        async with asyncio.timeout(WAIT_SECONDS):
            while message not in str(error := self.subscription.status.last_error):
                await asyncio.sleep(0.05)
        assert hint in str(getattr(error, "hint", None))

    async def names(self) -> Sequence[str]:
        """The names of the target's columns."""
        queries = {
            "sqlite": "SELECT name FROM pragma_table_info('t')",
            "mariadb": "SELECT column_name FROM information_schema.columns WHERE table_schema = database() AND table_name = 't'",
        }
        return sorted(name for (name,) in await self.fetch(queries[self.target.kind]))


@asynccontextmanager
async def following(
    publisher: Database, target: OtherTarget, table: str = TABLE, settings: Any = FOLLOW, *, published: str = "TABLE t"
) -> AsyncIterator[Follower]:
    publisher.execute(table)
    publisher.execute("INSERT INTO t SELECT i, i, 2 * i FROM generate_series(1, 100) AS i; CREATE PUBLICATION pub FOR " + published)
    async with again(publisher, target, settings) as found:
        await found.caught_up()
        if settings.schema_change == "follow":
            await found.known()
        yield found


@asynccontextmanager
async def again(
    publisher: Database, target: OtherTarget, settings: Any = FOLLOW, *, name: str = "follow", **options: Any
) -> AsyncIterator[Follower]:
    subscription = Subscription(
        f"{name}_{publisher.name}",
        connection=publisher.conninfo(),
        publications=["pub"],
        target=target.url,
        options=SubscriptionOptions(two_phase=False, streaming="on", **options),
        settings=settings,
    )
    async with at_work(subscription):
        yield Follower(subscription, publisher, target)


def each(publisher: Database, statements: str) -> None:
    """Execute statements, each in a transaction of its own unless they begin one."""
    for statement in statements.split(";"):
        publisher.execute(statement)


@BOTH
async def test_renames(publisher18_db: Database, other_target: OtherTarget) -> None:
    async with following(publisher18_db, other_target) as found:
        each(publisher18_db, "ALTER TABLE t RENAME a TO c; INSERT INTO t VALUES (101, 1, 2)")
        await found.same("c", "b")
        # swapped, in a circle, to another case; with and without rows between
        each(publisher18_db, "ALTER TABLE t RENAME b TO x; ALTER TABLE t RENAME c TO b; ALTER TABLE t RENAME x TO c")
        each(publisher18_db, "UPDATE t SET b = 7 WHERE id = 5")
        await found.same("b", "c")
        each(
            publisher18_db,
            """
            ALTER TABLE t ADD d int DEFAULT 9; INSERT INTO t VALUES (102, 1, 2, 3);
            ALTER TABLE t RENAME b TO x; ALTER TABLE t RENAME c TO b;
            INSERT INTO t VALUES (103, 1, 2, 3); ALTER TABLE t RENAME d TO c; ALTER TABLE t RENAME x TO d;
            INSERT INTO t VALUES (104, 1, 2, 3)
        """,
        )
        await found.same("b", "c", "d")
        each(publisher18_db, "ALTER TABLE t RENAME b TO x; ALTER TABLE t RENAME c TO b; ALTER TABLE t RENAME d TO c")
        each(publisher18_db, "ALTER TABLE t RENAME x TO d; ALTER TABLE t ADD e int DEFAULT 5; UPDATE t SET b = 1 WHERE id = 7")
        await found.same("b", "c", "d", "e")
        each(publisher18_db, 'ALTER TABLE t RENAME b TO "B"; UPDATE t SET "B" = 1 WHERE id = 8')
        await found.caught_up()
        assert "B" in await found.names()
        each(publisher18_db, 'ALTER TABLE t RENAME "B" TO "b 50% {0}"; UPDATE t SET "b 50% {0}" = 1 WHERE id = 9')
        await found.caught_up()
        assert "b 50% {0}" in await found.names()
        # of the key; rolled back
        each(publisher18_db, 'ALTER TABLE t RENAME "b 50% {0}" TO b; ALTER TABLE t RENAME id TO key')
        each(publisher18_db, "UPDATE t SET b = 0 WHERE key = 3; DELETE FROM t WHERE key = 4; ALTER TABLE t RENAME key TO id")
        each(publisher18_db, "BEGIN; ALTER TABLE t RENAME b TO never; INSERT INTO t VALUES (105, 1, 2, 3, 4); ROLLBACK")
        each(publisher18_db, "INSERT INTO t VALUES (106, 1, 2, 3, 4)")
        await found.same("b", "c", "d", "e")
        assert await found.names() == ["b", "c", "d", "e", "id"]


@BOTH
async def test_dropped_columns_stay_and_may_be_null(publisher18_db: Database, other_target: OtherTarget) -> None:
    table = "CREATE TABLE t (id int PRIMARY KEY, a varchar(20) NOT NULL, b int)"
    async with following(publisher18_db, other_target, table) as found:
        each(publisher18_db, "ALTER TABLE t DROP a; INSERT INTO t VALUES (101, 1); UPDATE t SET b = 0 WHERE id = 2")
        await found.same("b")
        assert await found.fetch("SELECT id, a FROM t WHERE id IN (1, 2, 101) ORDER BY id") == [(1, "1"), (2, "2"), (101, None)]
        each(publisher18_db, "ALTER TABLE t ADD c int DEFAULT 3; INSERT INTO t VALUES (102)")
        await found.same("b", "c")
        each(publisher18_db, "ALTER TABLE t DROP b; INSERT INTO t VALUES (103)")
        await found.same("c")
        each(publisher18_db, "ALTER TABLE t ADD d text; INSERT INTO t VALUES (104, 1, 'x')")
        await found.same("c", "d")
        # its name is taken
        each(publisher18_db, "ALTER TABLE t RENAME c TO b; INSERT INTO t VALUES (105)")
        await found.failed('has another column "b"', "DROP COLUMN")
        await found.execute("ALTER TABLE t DROP COLUMN b")
        await found.caught_up()
        assert await found.names() == ["a", "b", "d", "id"]


@BOTH
async def test_dropped_columns_are_dropped(publisher18_db: Database, other_target: OtherTarget) -> None:
    table = "CREATE TABLE t (id int PRIMARY KEY, a varchar(20) NOT NULL, b int, c int, z int)"
    async with following(publisher18_db, other_target, table, DROP) as found:
        await found.execute("ALTER TABLE t ADD COLUMN own integer")
        for statements in (
            "INSERT INTO t VALUES (101, 'x', 1); ALTER TABLE t DROP a; INSERT INTO t VALUES (102, 1)",
            # its name for another one, and a new one with the name that became free
            "ALTER TABLE t DROP b; ALTER TABLE t RENAME c TO b; ALTER TABLE t ADD a int DEFAULT 7; INSERT INTO t VALUES (103, 1, 2, 3)",
            "ALTER TABLE t DROP b, ADD b int DEFAULT 4; DELETE FROM t WHERE id = 7",
        ):
            each(publisher18_db, statements)
            await found.caught_up()
        await found.same("z", "a", "b")
        assert await found.names() == ["a", "b", "id", "own", "z"]
        # what needs a column
        for statement in ("CREATE INDEX i ON t (id, b)", "CREATE VIEW v AS SELECT z FROM t"):
            await found.execute(statement)
        each(publisher18_db, "ALTER TABLE t DROP b; INSERT INTO t VALUES (106, 1)")
        statement = 'DROP INDEX "i"' if other_target.kind == "sqlite" else "ALTER TABLE `t` DROP INDEX `i`"
        await found.failed('column "b" of table "public.t" was dropped on the publisher', f"execute there: {statement}; or keep")
        await found.execute(statement)
        await found.same("z", "a", failed=True)
        each(publisher18_db, "ALTER TABLE t DROP z; INSERT INTO t VALUES (107, 1)")
        statement = 'DROP VIEW "v"' if other_target.kind == "sqlite" else "DROP VIEW `v`"
        await found.failed('column "z" of table "public.t" was dropped on the publisher', f"execute there: {statement}; or keep")
        await found.execute(statement)
        await found.same("a", failed=True)
        assert await found.names() == ["a", "id", "own"]
    # another subscription has the table
    async with again(publisher18_db, other_target, DROP, name="other", copy_data=False) as found:
        await found.caught_up()
    async with again(publisher18_db, other_target, DROP) as found:
        each(publisher18_db, "ALTER TABLE t DROP a; INSERT INTO t VALUES (108)")
        await found.caught_up()
        assert await found.names() == ["a", "id", "own"]


@BOTH
async def test_types(publisher18_db: Database, other_target: OtherTarget) -> None:
    table = "CREATE TABLE t (id int PRIMARY KEY, a int NOT NULL, b numeric(9, 2) DEFAULT 1)"
    async with following(publisher18_db, other_target, table) as found:
        each(publisher18_db, "ALTER TABLE t ALTER a TYPE bigint, ALTER id TYPE bigint; INSERT INTO t VALUES (10000000000, 10000000000, 2)")
        each(publisher18_db, "ALTER TABLE t ALTER b TYPE numeric(30, 2); ALTER TABLE t ADD v varchar(3) DEFAULT 'abc'")
        each(publisher18_db, "INSERT INTO t VALUES (1000, 1, 12345678901234.25, 'x')")
        await found.same("a", "b", "v")
        each(publisher18_db, "ALTER TABLE t ALTER v TYPE text, ALTER b TYPE numeric, ALTER a TYPE numeric; ALTER TABLE t RENAME v TO w")
        each(publisher18_db, "INSERT INTO t VALUES (1001, 1.5, 1.23456, repeat('long', 200))")
        await found.same("a", "b", "w")
        each(publisher18_db, "ALTER TABLE t ALTER b TYPE numeric(30, 1); UPDATE t SET w = 'x' WHERE id = 9")
        await found.failed(
            'column "b" of table "public.t" has type numeric(30,1) on the publisher now, numeric before', "--resync public.t"
        )


@BOTH
@pytest.mark.parametrize("how", ["add", "follow"])
async def test_rows_before_and_after_a_new_column(
    publisher18_db: Database, other_target: OtherTarget, how: Literal["add", "follow"]
) -> None:
    """The bug was that rows of the same batch, written before the column was added, got NULL in it and not the default."""
    settings = replace(FOLLOW, schema_change=how)
    async with following(publisher18_db, other_target, settings=settings):
        pass
    each(publisher18_db, "INSERT INTO t VALUES (101, 1, 2), (102, 1, 2); UPDATE t SET a = 5 WHERE id = 102")
    each(publisher18_db, "ALTER TABLE t ADD c int DEFAULT 7; INSERT INTO t VALUES (103, 1, 2, 8); DELETE FROM t WHERE id = 101")
    each(publisher18_db, "ALTER TABLE t ADD d text DEFAULT 'it''s'; INSERT INTO t VALUES (104, 1, 2, 8, 'x')")
    async with again(publisher18_db, other_target, settings) as found:
        await found.same("a", "b", "c", "d")


@BOTH
async def test_one_transaction(publisher18_db: Database, other_target: OtherTarget) -> None:
    async with following(publisher18_db, other_target) as found:
        each(
            publisher18_db,
            """
            BEGIN; ALTER TABLE t ADD c int DEFAULT 7; ALTER TABLE t RENAME a TO x; ALTER TABLE t RENAME b TO a; ALTER TABLE t RENAME x TO b;
            UPDATE t SET c = 8 WHERE id < 5; INSERT INTO t SELECT i, 1, 2 FROM generate_series(1000, 9000) AS i;
            SAVEPOINT s; ALTER TABLE t RENAME a TO never; INSERT INTO t SELECT i, i, 1 FROM generate_series(10000, 12000) AS i;
            ROLLBACK TO s;
            ALTER TABLE t ADD d int; INSERT INTO t VALUES (20000, 1, 2, 3, 4); COMMIT
        """,
        )
        await found.same("a", "b", "c", "d")
        each(
            publisher18_db, "BEGIN; UPDATE t SET c = 9 WHERE id = 1; ALTER TABLE t RENAME c TO e; UPDATE t SET e = 10 WHERE id = 2; COMMIT"
        )
        if other_target.kind == "sqlite":
            await found.same("a", "b", "e", "d")
        else:
            await found.failed("cannot make inside a transaction", "--resync public.t")


@BOTH
async def test_what_the_target_has_is_not_made_again(publisher18_db: Database, other_target: OtherTarget) -> None:
    async with following(publisher18_db, other_target) as found:
        for statement in ("ALTER TABLE t RENAME COLUMN a TO x", "ALTER TABLE t ADD COLUMN y integer DEFAULT 1"):
            await found.execute(statement)
        each(publisher18_db, "ALTER TABLE t RENAME a TO x; ALTER TABLE t ADD y int DEFAULT 1; INSERT INTO t VALUES (103, 1, 2, 3)")
        await found.same("x", "b", "y")
        await found.execute("ALTER TABLE t ADD COLUMN own integer")
    async with again(publisher18_db, other_target) as found:
        # one that the target has kept is not the new one
        each(
            publisher18_db,
            "ALTER TABLE t DROP y; INSERT INTO t VALUES (104, 1, 2); ALTER TABLE t ADD y int; INSERT INTO t VALUES (105, 1, 2)",
        )
        await found.failed('has another column "y"', "DROP COLUMN")
        await found.execute("ALTER TABLE t DROP COLUMN y")
        await found.same("x", "b", "y", failed=True)


@BOTH
@pytest.mark.parametrize("statement", ["ALTER TABLE t RENAME COLUMN b TO own", "ALTER TABLE t DROP COLUMN b"])
async def test_a_column_that_is_lost(publisher18_db: Database, other_target: OtherTarget, statement: str) -> None:
    """The bug was that the column was added, with NULL in all rows."""
    async with following(publisher18_db, other_target, published="ALL TABLES") as found:
        await found.execute(statement)
        each(publisher18_db, "INSERT INTO t VALUES (101, 1, 2)")
        await found.failed('column "b" of table "public.t" has been renamed or dropped in the target', "--resync public.t")
        if "RENAME" in statement:
            await found.execute("ALTER TABLE t RENAME COLUMN own TO b")
            await found.same("a", "b", failed=True)
            return
    sides = (f"follow_{publisher18_db.name}", f"--target={other_target.url}")
    assert (await asyncio.to_thread(subscriber, "alter", *sides, "--resync=public.t")).status == 0
    async with again(publisher18_db, other_target) as found:
        await found.same("a", "b")


@ONLY_MARIADB
async def test_ends_after_each_step(publisher18_db: Database, other_target: OtherTarget) -> None:
    """MariaDB commits each ALTER TABLE. What was done is recognized."""
    async with following(publisher18_db, other_target):
        pass
    each(
        publisher18_db,
        """
        INSERT INTO t VALUES (101, 1, 2); ALTER TABLE t RENAME a TO x; ALTER TABLE t RENAME b TO a; ALTER TABLE t RENAME x TO b;
        ALTER TABLE t ALTER a TYPE bigint; ALTER TABLE t ADD c int DEFAULT 7; INSERT INTO t VALUES (102, 1, 2, 3)
    """,
    )
    ends = 0
    for wanted in range(1, 20):
        count = 0

        def reached(point: str, wanted: int = wanted) -> None:
            nonlocal count
            count += point == "columns.changed"
            if point == "columns.changed" and count == (1 if wanted % 2 else 2):
                raise TargetUnavailable("ends here", hint="a test wants this")

        with crash_points.watched(reached):
            async with again(publisher18_db, other_target, replace(FOLLOW, wal_retrieve_retry_interval=600)) as found:
                done = asyncio.create_task(found.caught_up())
                async with asyncio.timeout(WAIT_SECONDS):
                    while not done.done() and found.subscription.status.last_error is None:
                        await asyncio.sleep(0.02)
                ended = done.done()
                done.cancel()
        if ended:
            break
        ends += 1
    assert ends >= 4
    async with again(publisher18_db, other_target) as found:
        await found.same("a", "b", "c")
        assert await found.names() == ["a", "b", "c", "id"]
