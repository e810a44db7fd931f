"""The limit of copies, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from subscriber.apply.progress import Quiet
from subscriber.interfaces import TableName
from subscriber.subscription.migration.copy_estimate import CopyEstimate, shown_bytes, shown_seconds
from subscriber.walreceiver.copying.copy_rate import CopyRate
from subscriber.walreceiver.table_sizes import TableSize
from tests.unit.apply.virtual_time import run


def test_several_copies_share_the_limit_and_it_can_be_changed() -> None:
    async def work() -> None:
        rate, loop = CopyRate(1000), asyncio.get_running_loop()

        async def copy(pieces: int) -> None:
            for _ in range(pieces):
                await rate.spend(500)

        await asyncio.gather(copy(10), copy(10))
        assert loop.time() == pytest.approx(10, rel=0.1)
        rate.limit = 0.0
        await copy(1000)
        assert loop.time() == pytest.approx(10, rel=0.1)
        # a long wait ends when the limit is raised
        rate.limit = 1
        slow = asyncio.create_task(copy(1))
        await asyncio.sleep(5)
        assert not slow.done()
        rate.limit = 1_000_000
        await slow
        assert loop.time() < 18

    run(work())


def test_estimate() -> None:
    large, small = TableName("a", "large"), TableName("a", "small")
    estimate = CopyEstimate("move", Quiet())
    sizes = {large: TableSize(3 * 1024**3, 0, 3000, True), small: TableSize(1024**3, 0, None, True)}
    estimate.plan(sizes, set())
    estimate.sample(0)
    assert estimate.line == "copying: 0 of 2 tables, 0 bytes of about 4.0 GB (0%)"
    # the launcher adds the subscription's name
    estimate.started(TableName("move: a", "large"), 3000)
    estimate.advanced(TableName("move: a", "large"), 1000)
    estimate.sample(100)
    assert estimate.line == "copying: 0 of 2 tables, 1.0 GB of about 4.0 GB (25%), 10.2 MB/s, about 5 min left"
    estimate.advanced(TableName("move: a", "large"), 9000)
    estimate.finished(TableName("move: a", "small"))
    estimate.sample(400)
    assert estimate.line == "copying: 1 of 2 tables, 4.0 GB of about 4.0 GB (100%), 10.2 MB/s, about 0 s left"
    assert [shown_bytes(number) for number in (5, 2048, 10 * 1024**4)] == ["5 bytes", "2.0 kB", "10.0 TB"]
    assert [shown_seconds(number) for number in (5, 8400, 300_000)] == ["5 s", "2 h 20 min", "3.5 days"]
