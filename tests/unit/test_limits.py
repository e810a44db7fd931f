"""Limits of copies and of changes, in virtual time."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import NoReturn
from zoneinfo import ZoneInfoNotFoundError

import pytest

from subscriber.apply.progress import Quiet
from subscriber.config import SubscriptionOptions
from subscriber.config.copy_window import CopyWindow
from subscriber.errors import ConfigurationError
from subscriber.interfaces import TableName
from subscriber.rate_limit import RateLimit
from subscriber.subscription.migration.copy_estimate import CopyEstimate, shown_bytes, shown_seconds
from subscriber.walreceiver.table_sizes import TableSize
from tests.unit.apply.virtual_time import run


def test_several_copies_share_the_limit_and_it_can_be_changed() -> None:
    async def work() -> None:
        rate, loop = RateLimit(1000), asyncio.get_running_loop()

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


def seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


@pytest.mark.parametrize(
    ("window", "now", "opens"),
    [
        ("22:00-06:00", "2026-01-10T21:59Z", "2026-01-10T22:00Z"),
        ("22:00-06:00", "2026-01-10T22:00Z", None),
        ("22:00-06:00", "2026-01-11T05:59:59Z", None),
        ("22:00-06:00", "2026-01-11T06:00Z", "2026-01-11T22:00Z"),
        ("9:30-17:00", "2026-01-10T17:00Z", "2026-01-11T09:30Z"),
        ("18:00-24:00", "2026-01-10T23:59Z", None),
        ("18:00-24:00", "2026-01-11T00:00Z", "2026-01-11T18:00Z"),
        ("22:00-06:00 America/New_York", "2026-01-10T22:00Z", "2026-01-11T03:00Z"),
        # the clock is put forward from 02:00 to 03:00, and back from 03:00 to 02:00
        ("02:30-05:00 Europe/Paris", "2026-03-29T00:30Z", "2026-03-29T01:30Z"),
        ("02:30-05:00 Europe/Paris", "2026-03-29T01:30Z", None),
        ("02:30-05:00 Europe/Paris", "2026-10-25T00:10Z", "2026-10-25T00:30Z"),
        ("22:00-06:00 Europe/Paris", "2026-10-25T04:30Z", None),
        ("02:30-05:00 Europe/Paris", "2026-10-25T01:10Z", "2026-10-25T01:30Z"),
    ],
)
def test_window(window: str, now: str, opens: str | None) -> None:
    known = SubscriptionOptions(copy_window=window).window
    assert known is not None
    assert known.opens(seconds(now)) == (None if opens is None else seconds(opens))
    assert CopyWindow.parse("copy_window", str(known)) == known


def test_utc_needs_no_database_of_time_zones(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(key: str) -> NoReturn:
        raise ZoneInfoNotFoundError(key)

    monkeypatch.setattr("subscriber.config.copy_window.ZoneInfo", missing)
    known = SubscriptionOptions(copy_window="22:00-06:00").window
    assert known is not None
    assert known.opens(seconds("2026-01-10T21:59Z")) == seconds("2026-01-10T22:00Z")
    with pytest.raises(ConfigurationError, match="Europe/Paris") as caught:
        SubscriptionOptions(copy_window="22:00-06:00 Europe/Paris")
    assert "pip install tzdata" in str(caught.value.hint)


@pytest.mark.parametrize(
    "window", ["22-6", "22:00", "25:00-06:00", "22:00-06:60", "06:00-06:00", "22:00-06:00 Nowhere/City", "22:00-06:00 ../../etc"]
)
def test_window_that_is_wrong(window: str) -> None:
    with pytest.raises(ConfigurationError, match="copy_window") as caught:
        SubscriptionOptions.parse([f"copy_window={window}"])
    assert "22:00-06:00 Europe/Paris" in str(caught.value.hint)


def test_options_that_a_running_subscription_follows() -> None:
    options = SubscriptionOptions.parse(["copy_window= 22:00 - 06:00", "max_copy_rate=1MB/s", "max_apply_rate=10kB", "binary=true"])
    assert options.without_limits == SubscriptionOptions(binary=True)
    assert options.copy_window == "22:00-06:00 UTC"
    assert SubscriptionOptions.parse(["copy_window=none"]).window is None


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
