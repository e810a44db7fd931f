"""Subtransactions of transactions that are streamed (native's topic 016)."""

from __future__ import annotations

import pytest

from tests.native.native import Nodes
from tests.native.streams import fill, follow_transactions

pytestmark = pytest.mark.publisher(min=14, lacks="streaming of transactions in progress")

SUBTRANSACTIONS = (
    "BEGIN",
    fill(2001, 2200),
    *(
        statement
        for i in range(1, 6)
        for statement in (f"SAVEPOINT s{i}", fill(2200 + i * 300, 2450 + i * 300), f"UPDATE t SET n = {i} WHERE id % 5 = {i}")
    ),
    "RELEASE s4",
    fill(5001, 5300),
    "RELEASE s2",
    "DELETE FROM t WHERE n = 3",
    "COMMIT",
)


async def test_as_native(nodes_native16: Nodes) -> None:
    await follow_transactions(nodes_native16, [SUBTRANSACTIONS], {"id > 2000": 1565, "n = 3": 0}, streaming="on")
