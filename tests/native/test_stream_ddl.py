"""ALTER TABLE inside a transaction that is streamed, in subtransactions too (native's topic 017)."""

from __future__ import annotations

import pytest

from tests.native.native import Nodes
from tests.native.streams import fill, follow_transactions

pytestmark = pytest.mark.publisher(min=14, lacks="streaming of transactions in progress")

DDL = (
    "BEGIN",
    fill(6001, 6200),
    "ALTER TABLE t ADD COLUMN a int",
    "INSERT INTO t SELECT i, repeat('a', 400), i, -i FROM generate_series(6201, 6400) AS i",
    "SAVEPOINT s1",
    "ALTER TABLE t ADD COLUMN b int",
    "INSERT INTO t SELECT i, repeat('b', 400), i, -i, -i FROM generate_series(6401, 6600) AS i",
    "SAVEPOINT s2",
    "ALTER TABLE t DROP COLUMN a",
    "INSERT INTO t SELECT i, repeat('c', 400), i, -i FROM generate_series(6601, 6800) AS i",
    "ALTER TABLE t ADD COLUMN c int",
    "UPDATE t SET c = 7 WHERE id > 6700",
    "COMMIT",
)


async def test_as_native(nodes_native16: Nodes) -> None:
    await follow_transactions(nodes_native16, [DDL], {"id > 6000": 800, "c = 7": 100, "b IS NOT NULL": 400}, streaming="on", binary=True)
