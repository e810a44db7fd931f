"""ALTER TABLE in subtransactions that are rolled back (native's topic 019)."""

from __future__ import annotations

import pytest

from tests.native.native import Nodes
from tests.native.streams import fill, follow_transactions

ABORTS_DDL = (
    "BEGIN",
    fill(9001, 9200),
    "SAVEPOINT s1",
    "ALTER TABLE u ADD COLUMN a int",
    "INSERT INTO u SELECT i, repeat('d', 400), i, i FROM generate_series(9001, 9300) AS i",
    "ROLLBACK TO s1",
    fill(9001, 9300, "u"),
    "ALTER TABLE u ADD COLUMN b int",
    "INSERT INTO u SELECT i, repeat('e', 400), i, i FROM generate_series(9301, 9500) AS i",
    "COMMIT",
)


@pytest.mark.publisher(min=14, lacks="streaming of transactions in progress")
async def test_as_native(nodes_native16: Nodes) -> None:
    await follow_transactions(nodes_native16, [ABORTS_DDL], {"id > 9000": 200}, streaming="on")
