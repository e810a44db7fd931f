"""The initial copy (native's topic 004): into tables that have rows, that reject a row, that change during the copy, or not at all."""

from __future__ import annotations

import asyncio

from subscriber import TargetError
from tests.native.native import Nodes
from tests.support.row_gates import open_transaction, waiting_for_lock_on

TABLE = "CREATE TABLE {} (id int PRIMARY KEY, v text)"
FILL = "INSERT INTO {} SELECT i, 'copied' FROM generate_series(1, {}) AS i"


async def test_into_tables_that_hold_rows(nodes18: Nodes) -> None:
    """Rows of the target's own stay; one that conflicts is an error until it is removed. The other tables continue."""
    nodes18.everywhere("".join(TABLE.format(name) + ";" for name in ("empty", "apart", "in_the_way")))
    for name in ("empty", "apart", "in_the_way"):
        nodes18.publisher.execute(FILL.format(name, 20))
    nodes18.in_targets("INSERT INTO apart VALUES (100, 'own'); INSERT INTO in_the_way VALUES (7, 'own')")
    nodes18.publisher.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    async with nodes18.followed(ready=False) as both:
        await both.both_report('duplicate key value violates unique constraint "in_the_way_pkey"', TargetError)
        nodes18.publisher.execute(
            "UPDATE empty SET v = 'changed'; UPDATE in_the_way SET v = 'changed' WHERE id < 5; INSERT INTO in_the_way VALUES (21)"
        )
        for target in (both.native, both.ours):
            await asyncio.to_thread(target.wait, "SELECT count(*) FROM empty WHERE v = 'changed'", 20)
            assert target.fetch("SELECT * FROM in_the_way") == [(7, "own")]
        nodes18.in_targets("DELETE FROM in_the_way")
        await both.equal(publisher=False)
        assert await both.rows("SELECT * FROM apart WHERE id > 20") == [(100, "own")]
        assert len(await both.same("SELECT * FROM in_the_way ORDER BY id")) == 21


async def test_changes_while_it_is_copied(nodes18: Nodes) -> None:
    """Of every kind, in the table itself, in others, and in one transaction with both; with a TRUNCATE at the end."""
    nodes18.everywhere("".join(TABLE.format(name) + ";" for name in ("slow", "quick", "emptied")))
    for name in ("slow", "quick", "emptied"):
        nodes18.publisher.execute(FILL.format(name, 500))
    nodes18.publisher.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    with (
        open_transaction(nodes18.native, "LOCK TABLE slow IN SHARE MODE") as release_native,
        open_transaction(nodes18.ours, "LOCK TABLE slow IN SHARE MODE") as release_ours,
    ):
        async with nodes18.followed(ready=False) as both:
            for target in (both.native, both.ours):
                await asyncio.to_thread(target.wait, waiting_for_lock_on("slow"), 1)
            nodes18.publisher.execute(
                "UPDATE slow SET v = 'changed' WHERE id < 50; UPDATE slow SET id = id + 1000 WHERE id BETWEEN 60 AND 70"
            )
            nodes18.publisher.execute(
                "BEGIN; INSERT INTO slow VALUES (600, 'x'); UPDATE quick SET v = 'y' WHERE id = 1; DELETE FROM slow WHERE id = 80; COMMIT"
            )
            nodes18.publisher.execute(
                "DELETE FROM slow WHERE id = 600; INSERT INTO slow VALUES (600, 'again'); TRUNCATE emptied; INSERT INTO emptied VALUES (1)"
            )
            release_native()
            release_ours()
            await both.equal()
            assert await both.value("SELECT count(*) FROM slow") == 500
            assert await both.value("SELECT count(*) FROM emptied") == 1
            await both.assert_no_errors()


async def test_without_copying(nodes18: Nodes) -> None:
    nodes18.everywhere(TABLE.format("t"))
    nodes18.publisher.execute(f"{FILL.format('t', 10)}; CREATE PUBLICATION pub FOR TABLE t")
    async with nodes18.followed(copy_data=False) as both:
        nodes18.publisher.execute("INSERT INTO t VALUES (11, 'new'); UPDATE t SET v = 'x' WHERE id = 1")
        await both.equal(publisher=False)
        assert await both.rows("SELECT id FROM t") == [(11,)]
