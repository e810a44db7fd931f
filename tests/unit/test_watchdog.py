"""When an attempt is given up, and when it is not."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import cast

import pytest

from subscriber.abc import Sink, TargetActivity
from subscriber.errors import TargetUnavailable
from subscriber.subscription.running import Running
from subscriber.subscription.session import StreamSession
from subscriber.subscription.watchdog import Watchdog
from tests.unit.apply.virtual_time import run

TIMEOUT = 60.0


class _Sink:
    """A target that does nothing."""

    async def ping(self) -> None:
        return

    async def activity(self) -> TargetActivity:
        return TargetActivity(math.inf)


async def _stands_still(watchdog: Watchdog, end: float = 0.0) -> float:
    """How long an attempt lasts that does nothing; its end takes so long."""
    began = asyncio.get_running_loop().time()

    async def attempt() -> None:
        async with watchdog.attempt():
            try:
                await asyncio.sleep(10_000)
            finally:
                await asyncio.sleep(end)

    with pytest.raises(TargetUnavailable, match="no progress"):
        await attempt()
    return asyncio.get_running_loop().time() - began - end


def _watchdog(*, streams: bool) -> Watchdog:
    running = Running()
    running.prepared = True
    running.session = cast("StreamSession", SimpleNamespace(receiver=SimpleNamespace(pieces=0))) if streams else None
    return Watchdog("s", running, cast("Sink", _Sink()), TIMEOUT)


@pytest.mark.parametrize("streams", [True, False])
def test_time_to_connect(streams: bool) -> None:
    """A host that does not answer takes more than two minutes: the next one must have its turn."""

    async def work() -> None:
        watchdog = _watchdog(streams=streams)
        async with watchdog.watching():
            lasted = await _stands_still(watchdog)
        assert lasted < 2 * TIMEOUT if streams else 2 * 131 < lasted < math.inf

    run(work())


def test_transaction_that_is_read_without_the_target() -> None:
    """Its rows are not for the target."""

    async def work() -> None:
        running = Running()
        receiver = SimpleNamespace(pieces=0)
        running.prepared, running.session = True, cast("StreamSession", SimpleNamespace(receiver=receiver))
        watchdog = Watchdog("s", running, cast("Sink", _Sink()), TIMEOUT)
        async with watchdog.watching(), watchdog.attempt():
            for _ in range(100):
                await asyncio.sleep(TIMEOUT / 10)
                receiver.pieces += 1

    run(work())


def test_attempt_that_takes_long_to_end() -> None:
    """It is cancelled once, and the next one is watched as well."""

    async def work() -> None:
        watchdog = _watchdog(streams=True)
        async with watchdog.watching():
            for _ in range(2):
                assert await _stands_still(watchdog, end=20.0) < 2 * TIMEOUT

    run(work())
