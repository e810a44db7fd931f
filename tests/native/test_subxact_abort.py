"""Rollbacks to savepoints in transactions that are streamed, and of whole ones (native's topic 018)."""

from __future__ import annotations

import pytest

from tests.native.native import Nodes
from tests.native.streams import fill, follow_transactions

pytestmark = pytest.mark.publisher(min=14, lacks="streaming of transactions in progress")

ABORTS = (
    "BEGIN",
    fill(7001, 7300),
    "SAVEPOINT s1",
    fill(7301, 7600),
    "SAVEPOINT s2",
    fill(7601, 7900),
    "ROLLBACK TO s1",
    fill(7301, 7310),
    "SAVEPOINT s3",
    fill(7311, 7600),
    "SAVEPOINT s4",
    "DELETE FROM t WHERE id > 7000",
    "ROLLBACK TO s3",
    fill(7401, 7500),
    "RELEASE s3",
    "SAVEPOINT s5",
    "UPDATE t SET id = -id",
    "ROLLBACK TO s5",
    "COMMIT",
)
# all in subtransactions that are rolled back, and then nothing or little
ABORTS_ALL = ("BEGIN", "SAVEPOINT s1", fill(8001, 8400), "SAVEPOINT s2", fill(8401, 8800), "ROLLBACK TO s1", "COMMIT")
ABORTS_WHOLE = ("BEGIN", fill(8001, 8400), "SAVEPOINT s1", fill(8401, 8800), "RELEASE s1", fill(8801, 8900), "ROLLBACK")


@pytest.mark.matrix
async def test_as_native(nodes_native16: Nodes) -> None:
    await follow_transactions(nodes_native16, [ABORTS, ABORTS_ALL, ABORTS_WHOLE], {"id > 7000": 410, "id > 8000": 0}, streaming="parallel")
