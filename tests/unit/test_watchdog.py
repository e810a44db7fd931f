"""When work is given up, and when it is not."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from subscriber.config import Settings, SubscriptionOptions
from subscriber.errors import PublisherUnavailable, SubscriberError, TargetUnavailable
from subscriber.interfaces import Sink, TableName, TargetActivity
from subscriber.stream_session import StreamSession
from subscriber.subscription.run.run_state import RunState
from subscriber.subscription.run.watchdog import Watchdog
from subscriber.subscription.spec import RunSpec
from subscriber.waits import awaiting, moved, unwatched
from tests.unit.apply.virtual_time import run

TIMEOUT = 60.0
LONG = 10_000.0
T = TableName("public", "t")


class _Sink:
    """A target that does nothing unless it is told to."""

    def __init__(self, activity: TargetActivity | None = None) -> None:
        self.found = activity or TargetActivity(math.inf)

    async def ping(self) -> None:
        return

    async def activity(self) -> TargetActivity:
        return self.found


class _Asked:
    """A session with the publisher, whose server is busy until then."""

    def __init__(self, until: float, error: SubscriberError | None = None) -> None:
        self.until = until
        self.error = error

    async def is_working(self) -> bool:
        if self.error is not None:
            raise self.error
        return asyncio.get_running_loop().time() < self.until


class WatchedRun:
    """A run that streams, and its watchdog."""

    def __init__(self, activity: TargetActivity | None = None) -> None:
        self.running = RunState()
        self.running.prepared = True
        self.running.session = cast("StreamSession", SimpleNamespace())
        self.watchdog = Watchdog(
            RunSpec(
                name="s",
                conninfo="",
                publications=("p",),
                options=SubscriptionOptions(),
                settings=Settings(watchdog_timeout=TIMEOUT),
                sink=cast("Sink", _Sink(activity)),
            ),
            self.running,
        )

    async def lasts(self, *, tables: bool = False, asked: _Asked | None = None, end: float = 0.0) -> float:
        """How long idle work that waits for this session lasts, and how long its end takes."""
        began = asyncio.get_running_loop().time()

        async def work() -> None:
            async with self.watchdog.watched(tables=tables):
                try:
                    if asked is None:
                        await asyncio.sleep(LONG)
                    else:
                        with awaiting(asked):
                            await asyncio.sleep(LONG)
                finally:
                    await asyncio.sleep(end)

        error, says = (TargetUnavailable, "no progress") if asked is None else (PublisherUnavailable, "the publisher does not answer")
        with pytest.raises(error, match=says):
            await work()
        return asyncio.get_running_loop().time() - began - end


async def _moves(watchdog: Watchdog, *, tables: bool, seconds: float) -> None:
    async with watchdog.watched(tables=tables):
        for _ in range(int(seconds / 10)):
            await asyncio.sleep(10)
            moved()


@pytest.mark.parametrize("tables", [False, True])
def test_work_without_progress(tables: bool) -> None:
    """Each attempt is watched, also after one that was cancelled and takes long to end."""

    async def work() -> None:
        run = WatchedRun()
        async with run.watchdog.watching():
            for _ in range(2):
                assert TIMEOUT <= await run.lasts(tables=tables, end=20.0) < 2 * TIMEOUT

    run(work())


@pytest.mark.parametrize("tables", [False, True])
def test_progress_of_a_task_that_the_work_started(tables: bool) -> None:
    async def work() -> None:
        run = WatchedRun()
        async with run.watchdog.watching(), run.watchdog.watched(tables=tables), asyncio.TaskGroup() as group:
            group.create_task(_progress(20))

    run(work())


def test_task_that_is_no_part_of_the_work() -> None:
    """The receiver asks the publisher now and then where its WAL ends, however long the apply worker makes no progress."""

    async def work() -> None:
        run = WatchedRun()

        async def stands_still() -> None:
            async with run.watchdog.watched():
                apart = asyncio.create_task(_progress(20), context=unwatched())
                try:
                    await asyncio.sleep(LONG)
                finally:
                    apart.cancel()

        async with run.watchdog.watching():
            with pytest.raises(TargetUnavailable, match="no progress for"):
                await stands_still()
            assert asyncio.get_running_loop().time() < 2 * TIMEOUT

    run(work())


async def _progress(times: int) -> None:
    for _ in range(times):
        await asyncio.sleep(TIMEOUT / 2)
        moved()


@pytest.mark.parametrize(
    "found", [TargetActivity(0.0, 0.0), TargetActivity(math.inf, math.inf, ("a session waits",))], ids=["busy", "waiting"]
)
@pytest.mark.parametrize("tables", [False, True])
def test_reason_in_the_target(tables: bool, found: TargetActivity) -> None:
    async def work() -> None:
        run = WatchedRun(found)
        async with run.watchdog.watching(), run.watchdog.watched(tables=tables):
            await asyncio.sleep(LONG)

    run(work())


def test_apply_and_copies_are_distinguished() -> None:
    async def work() -> None:
        run = WatchedRun(TargetActivity(0.0, math.inf))
        async with run.watchdog.watching(), run.watchdog.watched():
            assert await run.lasts(tables=True) < 2 * TIMEOUT

    run(work())


def test_connecting_has_its_own_limit() -> None:
    """A host that does not answer takes more than two minutes: the next one must have its turn."""

    async def work() -> None:
        run = WatchedRun()
        async with run.watchdog.watching(), run.watchdog.watched():
            with awaiting(None):
                await asyncio.sleep(LONG)

    run(work())


@pytest.mark.parametrize("tables", [False, True])
def test_publisher_that_works_is_waited_for(tables: bool) -> None:
    async def work() -> None:
        run = WatchedRun()
        async with run.watchdog.watching():
            lasted = await run.lasts(tables=tables, asked=_Asked(1000.0))
        assert 1000 < lasted < 1000 + 3 * TIMEOUT

    run(work())


def test_publisher_that_does_not_answer() -> None:
    async def work() -> None:
        run = WatchedRun()
        async with run.watchdog.watching():
            assert await run.lasts(asked=_Asked(LONG, PublisherUnavailable("no answer"))) < 2 * TIMEOUT

    run(work())


class _SlowlyAsked:
    """A session with the publisher; it takes a while to find out that its server does nothing."""

    async def is_working(self) -> bool:
        await asyncio.sleep(5.0)
        return False


def test_publisher_that_refuses_the_question_is_not_silent() -> None:
    """It has no session left for the question; the one that copies may work."""
    refusal = PublisherUnavailable("sorry, too many clients already", sqlstate="53300")

    async def work() -> None:
        run = WatchedRun()
        async with run.watchdog.watching(), run.watchdog.watched():
            with awaiting(_Asked(LONG, refusal)):
                await asyncio.sleep(LONG)

    run(work())


def test_work_that_ends_while_the_publisher_is_asked() -> None:
    """It is not given up any more, and the work after it is watched."""

    async def fails(run: WatchedRun) -> None:
        async with run.watchdog.watched(tables=True):
            with awaiting(_SlowlyAsked()):
                # the watchdog looks every 3 s, and asks from the 60th second to the 65th
                await asyncio.sleep(TIMEOUT + 2.0)
                raise TargetUnavailable("refused")

    async def work() -> None:
        run = WatchedRun()
        async with run.watchdog.watching():
            with pytest.raises(TargetUnavailable, match="refused"):
                await fails(run)
            assert await run.lasts(tables=True) < 2 * TIMEOUT

    run(work())


def _requests(run: WatchedRun) -> None:
    run.running.states.request_handover(T)


def _hands_over(run: WatchedRun) -> None:
    run.running.states.try_handover(T, run.running.states.handed)


@pytest.mark.parametrize("begins", [_requests, _hands_over])
def test_handover(begins: Callable[[WatchedRun], None], caplog: pytest.LogCaptureFixture) -> None:
    """The apply worker may wait as long as the table moves, says so, and does not wait for ever."""

    async def work() -> None:
        run = WatchedRun()
        begins(run)
        async with run.watchdog.watching():
            moving = asyncio.create_task(_moves(run.watchdog, tables=True, seconds=600))
            lasted = await run.lasts()
            await moving
        assert 600 < lasted < 600 + 2 * TIMEOUT

    run(work())
    assert 'the apply worker waits until table "public.t" is handed over to it' in caplog.text
