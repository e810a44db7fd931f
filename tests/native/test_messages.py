"""Logical decoding messages (native's topic 020): a subscription does not ask for them, and its position goes on past them."""

from __future__ import annotations

from tests.native.native import Site
from tests.support.observation import acknowledged

EMIT = "SELECT pg_logical_emit_message({}, 'prefix', repeat('content', 30))"


async def test_are_passed_over(site: Site) -> None:
    site.everywhere("CREATE TABLE t (id int PRIMARY KEY, v text)")
    site.publisher.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    async with site.followed(streaming="on") as twins:
        for transactional in ("true", "false"):
            emit = EMIT.format(transactional)
            site.publisher.execute(emit)
            site.publisher.execute(f"BEGIN; {emit}; ROLLBACK")
            site.publisher.execute(f"BEGIN; {emit}; SAVEPOINT a; {emit}; ROLLBACK TO a; {emit}; COMMIT")
            site.publisher.execute(f"BEGIN; {emit}; INSERT INTO t SELECT count(*) + 1, 'small' FROM t; {emit}; COMMIT")
            # many and large ones alone, and between rows of a transaction that is streamed
            site.publisher.execute(f"BEGIN; {emit} FROM generate_series(1, 1000); COMMIT")
            first = f"{site.publisher.value('SELECT max(id) FROM t')} + i"
            rows = f"INSERT INTO t SELECT {first}, repeat('x', 500) FROM generate_series(1, 300) AS i"
            site.publisher.execute(
                f"BEGIN; {rows}; {emit} FROM generate_series(1, 300); SAVEPOINT b; {emit}; UPDATE t SET v = v || 'y'; ROLLBACK TO b; COMMIT"
            )
        site.publisher.execute(f"BEGIN; INSERT INTO t VALUES (9999, 'gone'); {EMIT.format('true')}; ROLLBACK")
        await twins.equal()
        assert await twins.value("SELECT count(*) FROM t") == 602
        await twins.untroubled()
        # the last record is a message: acknowledged nevertheless
        site.publisher.execute(EMIT.format("false"))
        await acknowledged(site.publisher, site.publisher.current_lsn())
