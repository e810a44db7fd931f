"""The sink in memory, where no publisher is needed for it."""

from __future__ import annotations

import pytest

from subscriber.errors import ProtocolError
from subscriber.testing.compliance.feed import Feed
from subscriber.testing.compliance.sample_messages import Table
from tests.sinks.targets import MemoryAdapter


async def test_nothing_stays_of_a_transaction_that_is_no_protocol() -> None:
    """The bug was that only errors of the target took back the changes before them."""
    feed = Feed(MemoryAdapter())
    await feed.open()
    t, wider = Table("t", "*id int4", "v"), Table("t", "*id int4", "v", "w")
    await feed.create(t)
    done = await feed.apply(t.relation, t.insert(1, "a"))
    with pytest.raises(ProtocolError, match="has 3 columns where its Relation message has 2"):
        await feed.apply(t.insert(2, "b"), t.update(1, "b"), wider.insert(3, "c", "c"))
    await feed.expect(t, (1, "a"))
    assert await feed.position() == done.end_lsn
    await feed.close()
