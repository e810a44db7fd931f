"""Logical decoding messages (native's topic 020): a subscription does not ask for them, and its position moves past them."""

from __future__ import annotations

import pytest

from tests.native.native import Nodes
from tests.support.observation import acknowledged

EMIT = "SELECT pg_logical_emit_message({}, 'prefix', repeat('content', 30))"


@pytest.mark.matrix
async def test_are_passed_over(nodes: Nodes) -> None:
    nodes.everywhere("CREATE TABLE t (id int PRIMARY KEY, v text)")
    nodes.publisher.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    async with nodes.followed(streaming="on") as both:
        for transactional in ("true", "false"):
            emit = EMIT.format(transactional)
            nodes.publisher.execute(emit)
            nodes.publisher.execute(f"BEGIN; {emit}; ROLLBACK")
            nodes.publisher.execute(f"BEGIN; {emit}; SAVEPOINT a; {emit}; ROLLBACK TO a; {emit}; COMMIT")
            nodes.publisher.execute(f"BEGIN; {emit}; INSERT INTO t SELECT count(*) + 1, 'small' FROM t; {emit}; COMMIT")
            # many and large ones alone, and between rows of a transaction that is streamed
            nodes.publisher.execute(f"BEGIN; {emit} FROM generate_series(1, 1000); COMMIT")
            first = f"{nodes.publisher.value('SELECT max(id) FROM t')} + i"
            rows = f"INSERT INTO t SELECT {first}, repeat('x', 500) FROM generate_series(1, 300) AS i"
            nodes.publisher.execute(
                f"BEGIN; {rows}; {emit} FROM generate_series(1, 300); SAVEPOINT b; {emit}; UPDATE t SET v = v || 'y'; ROLLBACK TO b; COMMIT"
            )
        nodes.publisher.execute(f"BEGIN; INSERT INTO t VALUES (9999, 'gone'); {EMIT.format('true')}; ROLLBACK")
        await both.equal()
        assert await both.value("SELECT count(*) FROM t") == 602
        await both.assert_no_errors()
        # the last record is a message: acknowledged nevertheless
        nodes.publisher.execute(EMIT.format("false"))
        await acknowledged(nodes.publisher, nodes.publisher.current_lsn())
