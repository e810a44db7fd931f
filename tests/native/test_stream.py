"""Transactions that are sent while they are in progress (native's topic 015).

Those with subtransactions, DDL and rollbacks are in files of their own.
"""

from __future__ import annotations

import pytest

from tests.native.native import Nodes
from tests.native.streams import TABLE, fill, follow_transactions, was_streamed

STREAM = (
    "BEGIN",
    fill(1, 400),
    "UPDATE t SET n = id WHERE id % 2 = 0",
    "DELETE FROM t WHERE id % 3 = 0",
    "UPDATE t SET id = id + 1000 WHERE id < 50",
    fill(501, 800),
    "TRUNCATE u",
    fill(1, 50, "u"),
    "COMMIT",
)


@pytest.mark.publisher(min=14, lacks="streaming of transactions in progress")
@pytest.mark.parametrize(
    ("streaming", "binary"),
    [pytest.param("off", False, marks=pytest.mark.endurance), pytest.param("on", True, marks=pytest.mark.matrix), ("parallel", False)],
)
async def test_as_native(nodes_native16: Nodes, streaming: str, binary: bool) -> None:
    await follow_transactions(nodes_native16, [STREAM], {"id > 0": 601, "n IS NOT NULL": 151}, streaming=streaming, binary=binary)


@pytest.mark.publisher(min=14, lacks="streaming of transactions in progress")
async def test_interleaved(nodes_native16: Nodes) -> None:
    """Two at a time that change the same rows one after the other, and end in the other order than they began."""
    nodes = nodes_native16
    nodes.everywhere(TABLE)
    nodes.publisher.execute(f"{fill(1, 100)}; CREATE PUBLICATION pub FOR ALL TABLES")
    async with nodes.followed(streaming="parallel") as both:
        with nodes.publisher.connect() as one, nodes.publisher.connect() as two:

            def in_both_targets(first: str, second: str) -> None:
                one.execute(first.encode())
                two.execute(second.encode())

            in_both_targets("BEGIN", "BEGIN")
            in_both_targets(fill(1001, 1300), fill(2001, 2300))
            in_both_targets("UPDATE t SET n = 1 WHERE id <= 50", "UPDATE t SET n = 2 WHERE id BETWEEN 51 AND 100")
            in_both_targets("SAVEPOINT a", "SAVEPOINT a")
            in_both_targets(fill(1301, 1600), fill(2301, 2600))
            in_both_targets("ROLLBACK TO a", "RELEASE a")
            in_both_targets(fill(1601, 1700), fill(2601, 2900))
            two.execute("COMMIT")
            one.execute("UPDATE t SET n = 3 WHERE id BETWEEN 90 AND 100 OR id > 2800")
            one.execute("COMMIT")
        await both.equal()
        assert await both.value("SELECT count(*) FROM t") == 100 + 400 + 900
        assert await both.value("SELECT count(*) FROM t WHERE n = 3") == 111
        assert was_streamed(both)
        await both.assert_no_errors()
