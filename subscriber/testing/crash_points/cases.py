"""The cases: one for each point and kind of failure."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import multiprocessing
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

from subscriber import crash_points
from subscriber.crash_points import POINTS
from subscriber.errors import SubscriberError
from subscriber.testing.crash_points.child import ERROR_STATUS, Start, make_subscription, run_child, stop_synchronized
from subscriber.testing.crash_points.failures import EXIT_STATUS, Failure, FailureAt, cut_connections, fill_disk
from subscriber.testing.crash_points.publisher import TIMEOUT, CrashPublisher, FakeCrashPublisher
from subscriber.testing.crash_points.scenario import Scenario
from subscriber.testing.crash_points.target import CrashTarget, CuttableTarget, FullDiskTarget

__all__ = ["CORE_POINTS", "Counts", "CrashCase", "Failure", "crash_cases"]

CORE_POINTS: Final[Sequence[str]] = tuple(
    point for point in POINTS if point.partition(".")[0] in {"setup", "copy", "apply", "prepare", "spool", "acknowledge"}
)
"""The points that the program reaches with every sink."""
_STARTS: Final = 4
"""A case needs two starts, or three if the error ends the first attempt."""

Counts = Counter[str]
"""How often each point is reached without a failure."""


@dataclass(frozen=True, slots=True)
class CrashCase:
    """One failure at one point.

    Attributes:
        point: where.
        failure: how.
        occurrence: at which time that the point is reached, from 1. 0: never, to count how often points are reached.
        two_phase: whether the sink implements :class:`subscriber.abc.TwoPhaseSink`.
    """

    point: str
    failure: Failure
    occurrence: int = 1
    two_phase: bool = True

    def __str__(self) -> str:
        return f"{self.point}-{self.failure.value}" + (f"-{self.occurrence}" if self.occurrence > 1 else "")

    async def run(
        self,
        target: CrashTarget,
        directory: Path,
        *,
        publisher: CrashPublisher | None = None,
        mistake: Callable[[], None] | None = None,
    ) -> Counts:
        """Run it.

        Args:
            target: empty.
            directory: for the spool, and for the log of the processes.
            publisher: empty. None: the fake one.
            mistake: is called in each process first; see :class:`Start`.

        Returns:
            How often each point was reached, for a case with occurrence 0.

        Raises:
            ValueError: a target that lives in this process has no full disk and no mistake.
            AssertionError: rows are missing or there too often, something is left behind, the program did not start again, or the point
                was not reached.
            FeedbackViolation: the publisher was told what is not true.
        """
        happened, counts = directory / "happened", directory / "counts"
        counting = self.occurrence == 0
        if isinstance(target, CuttableTarget) and (mistake is not None or self.failure is Failure.DISK_FULL):
            raise ValueError("a full disk, or a mistake, is for a target whose sink runs in a process of its own")
        scenario = Scenario(publisher or FakeCrashPublisher(), two_phase=self.two_phase)
        scenario.fill()
        await scenario.create_tables(target)
        async with scenario.publisher:
            cut = _local_cut(target, scenario.publisher) if isinstance(target, CuttableTarget) else cut_connections
            fill = target.fill_disk if isinstance(target, FullDiskTarget) else fill_disk
            failure = FailureAt(self.point, self.failure, self.occurrence, happened, cut, fill, counts if counting else None)
            start = Start(target, scenario.publisher.dsn(), directory, self.two_phase, failure, mistake)
            runner = _LocalRunner(start) if isinstance(target, CuttableTarget) else _ProcessRunner(start)
            try:
                async with asyncio.timeout(TIMEOUT):
                    await self._follow(scenario, runner)
            except TimeoutError:
                raise AssertionError(f"the scenario did not end within {TIMEOUT:.0f} s\n{_log(directory)}") from None
            finally:
                await runner.kill()
            found = await scenario.differences(target)
            found += [f"the spool has {file.name}" for file in (directory / "spool").glob("*")]
            if not counting and not happened.exists():
                found.append(f"the point {self.point} was not reached")
            assert not found, "\n".join([*found, _log(directory)])
        return Counter(counts.read_text().split()) if counting else Counter()

    async def _follow(self, scenario: Scenario, runner: _Runner) -> None:
        """Let the publisher do its steps while the program runs, and is started again when it has failed. Then end it cleanly."""
        supervising = asyncio.create_task(runner.supervise())

        async def write() -> None:
            async for _ in scenario.steps():
                await scenario.publisher.until_all_confirmed()

        writing = asyncio.create_task(write())
        try:
            await asyncio.wait({supervising, writing}, return_when=asyncio.FIRST_COMPLETED)
            if supervising.done():
                supervising.result()
            await writing
            # the end is a step too: what fails there is started once more
            runner.stop()
            await supervising
        finally:
            for task in (supervising, writing):
                task.cancel()
            await asyncio.gather(supervising, writing, return_exceptions=True)


class _Runner:
    """Starts the program again and again, until it has been stopped and has ended well.

    Args:
        start: of the first run; those after the failure have no hook.
    """

    def __init__(self, start: Start) -> None:
        self._start = start
        self._stopping = False

    async def supervise(self) -> None:
        """Run the program.

        Raises:
            AssertionError: it ended with an error that the failure does not explain.
        """
        for _ in range(_STARTS):
            failed = await self._run()
            if not failed and self._stopping:
                return
            happened = self._start.failure is not None and self._start.failure.happened.exists()
            if not (failed and happened):
                raise AssertionError(f"the program ended by itself\n{_log(self._start.directory)}")
        raise AssertionError(f"the program has failed {_STARTS} times\n{_log(self._start.directory)}")

    async def _run(self) -> bool:
        """Run it once. True: it failed."""
        raise NotImplementedError

    def stop(self) -> None:
        """End it cleanly when all tables are synchronized."""
        self._stopping = True

    async def kill(self) -> None:
        """End it at once, if it runs."""


class _ProcessRunner(_Runner):
    def __init__(self, start: Start) -> None:
        super().__init__(start)
        self._process: BaseProcess | None = None
        self._stop: Connection | None = None

    async def _run(self) -> bool:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        start = self._start
        if start.failure is not None and start.failure.happened.exists():
            start = Start(start.target, start.conninfo, start.directory, start.two_phase, None, start.mistake)
        context = _context(type(start.target).__module__)
        stop, self._stop = context.Pipe(duplex=False)
        process = self._process = context.Process(target=run_child, args=(start, stop), daemon=True)
        process.start()
        loop.add_reader(process.sentinel, ended.set)
        if self._stopping:
            self.stop()
        try:
            await ended.wait()
        finally:
            loop.remove_reader(process.sentinel)
            stop.close()
            self._stop.close()
            self._stop = None
        process.join()
        assert process.exitcode in {0, EXIT_STATUS, ERROR_STATUS}, f"exit status {process.exitcode}\n{_log(start.directory)}"
        return process.exitcode != 0

    def stop(self) -> None:
        super().stop()
        if self._stop is not None:
            self._stop.send_bytes(b"stop")

    async def kill(self) -> None:
        if self._process is not None and self._process.is_alive():
            self._process.kill()
            self._process.join()


class _LocalRunner(_Runner):
    def __init__(self, start: Start) -> None:
        super().__init__(start)
        self._subscription = make_subscription(start)
        self._stops: list[asyncio.Task[None]] = []

    async def _run(self) -> bool:
        self._subscription = make_subscription(self._start)
        if self._stopping:
            self.stop()
        failure = self._start.failure
        with crash_points.watched(failure) if failure is not None else contextlib.nullcontext():
            try:
                await self._subscription.run()
            except SubscriberError:
                return True
        return False

    def stop(self) -> None:
        super().stop()
        self._stops.append(asyncio.create_task(stop_synchronized(self._subscription)))


def _local_cut(target: CuttableTarget, publisher: CrashPublisher) -> Callable[[], None]:
    def cut() -> None:
        publisher.cut()
        target.cut()

    return cut


@functools.cache
def _context(module: str) -> ForkServerContext:
    """Forks processes that have imported everything. The server ends with this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["subscriber.testing.crash_points.preload", "subscriber.testing.crash_points.child", module])
    return context


def _log(directory: Path, lines: int = 40) -> str:
    path = directory / "log"
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""


def crash_cases(
    points: Iterable[str] = CORE_POINTS,
    *,
    failures: Collection[Failure] = (Failure.EXIT, Failure.ERROR, Failure.CUT, Failure.DISK_FULL),
    two_phase: bool = True,
) -> list[CrashCase]:
    """Return the cases of some points.

    Args:
        points: by default those that every sink reaches. Add names of your own that your sink passes to
            :func:`subscriber.crash_points.reached`.
        failures: the kinds.
        two_phase: whether the sink can hold prepared transactions.
    """
    return [
        CrashCase(point, failure, two_phase=two_phase)
        for point in points
        if two_phase or not point.startswith("prepare.")
        for failure in failures
    ]
