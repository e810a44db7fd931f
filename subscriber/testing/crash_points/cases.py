"""The cases: one for each point and kind of failure."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import multiprocessing
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

from subscriber import crash_points
from subscriber.crash_points import POINTS
from subscriber.errors import SubscriberError
from subscriber.testing.crash_points.child import ERROR_STATUS, NAME, Start, make_subscription, run_child
from subscriber.testing.crash_points.failures import EXIT_STATUS, Failure, FailureAt, cut_connections
from subscriber.testing.crash_points.scenario import Scenario
from subscriber.testing.crash_points.target import CrashTarget, CuttableTarget

__all__ = ["CORE_POINTS", "Counts", "CrashCase", "Failure", "crash_cases"]

CORE_POINTS: Final[Sequence[str]] = tuple(
    point for point in POINTS if point.partition(".")[0] in {"setup", "copy", "apply", "prepare", "spool", "acknowledge"}
)
"""The points that the program reaches with every sink."""
_WRITES: Final = frozenset({"spool.written"})
"""Where a disk may be full. The error must be one that the step expects, so these are not all points."""
_STARTS: Final = 4
"""A case needs two starts, or three if the error ends the first attempt."""
_TIMEOUT: Final = 60.0

Counts = Counter[str]
"""How often each point is reached without a failure."""


@dataclass(frozen=True, slots=True)
class CrashCase:
    """One failure at one point.

    Attributes:
        point: where.
        failure: how.
        occurrence: at which time that the point is reached, from 1. 0: never, to count how often points are reached.
        two_phase: whether the sink implements :class:`subscriber.TwoPhaseSink`.
    """

    point: str
    failure: Failure
    occurrence: int = 1
    two_phase: bool = True

    def __str__(self) -> str:
        return f"{self.point}-{self.failure.value}" + (f"-{self.occurrence}" if self.occurrence > 1 else "")

    async def run(self, target: CrashTarget, directory: Path, *, mistake: Callable[[], None] | None = None) -> Counts:
        """Run it.

        Args:
            target: empty.
            directory: for the spool, and for the log of the processes.
            mistake: is called in each process first; see :class:`Start`.

        Returns:
            How often each point was reached, for a case with occurrence 0.

        Raises:
            AssertionError: rows are missing or there too often, something is left behind, the program did not start again, or the point
                was not reached.
            FeedbackViolation: the publisher was told what is not true.
        """
        happened, counts = directory / "happened", directory / "counts"
        counting = self.occurrence == 0
        scenario = Scenario(two_phase=self.two_phase)
        scenario.fill()
        await scenario.create_tables(target)
        async with scenario.publisher as publisher:
            cut = _local_cut(target, scenario) if isinstance(target, CuttableTarget) else cut_connections
            failure = FailureAt(self.point, self.failure, self.occurrence, happened, cut, counts if counting else None)
            start = Start(target, publisher.dsn(), directory, self.two_phase, failure, mistake)
            runner = _LocalRunner(start) if isinstance(target, CuttableTarget) else _ProcessRunner(start)
            try:
                async with asyncio.timeout(_TIMEOUT):
                    await self._follow(scenario, runner)
            except TimeoutError:
                raise AssertionError(f"the scenario did not end within {_TIMEOUT:.0f} s\n{_log(directory)}") from None
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
        publisher = scenario.publisher
        supervising = asyncio.create_task(runner.supervise())

        async def write() -> None:
            async for _ in scenario.steps():
                await publisher.until_confirmed(NAME, timeout=_TIMEOUT)

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
        """End it cleanly."""
        self._stopping = True

    async def kill(self) -> None:
        """End it at once, if it runs."""


class _ProcessRunner(_Runner):
    def __init__(self, start: Start) -> None:
        super().__init__(start)
        self._process: BaseProcess | None = None

    async def _run(self) -> bool:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        start = self._start
        if start.failure is not None and start.failure.happened.exists():
            start = Start(start.target, start.conninfo, start.directory, start.two_phase, None, start.mistake)
        process = self._process = _context(type(start.target).__module__).Process(target=run_child, args=(start,), daemon=True)
        process.start()
        loop.add_reader(process.sentinel, ended.set)
        if self._stopping:
            self.stop()
        try:
            await ended.wait()
        finally:
            loop.remove_reader(process.sentinel)
        process.join()
        assert process.exitcode in {0, EXIT_STATUS, ERROR_STATUS}, f"exit status {process.exitcode}\n{_log(start.directory)}"
        return process.exitcode != 0

    def stop(self) -> None:
        super().stop()
        if self._process is not None:
            self._process.terminate()

    async def kill(self) -> None:
        if self._process is not None and self._process.is_alive():
            self._process.kill()
            self._process.join()


class _LocalRunner(_Runner):
    def __init__(self, start: Start) -> None:
        super().__init__(start)
        self._subscription = make_subscription(start)

    async def _run(self) -> bool:
        self._subscription = make_subscription(self._start)
        if self._stopping:
            self._subscription.stop()
        failure = self._start.failure
        with crash_points.watched(failure) if failure is not None else contextlib.nullcontext():
            try:
                await self._subscription.run()
            except SubscriberError:
                return True
        return False

    def stop(self) -> None:
        super().stop()
        self._subscription.stop()


def _local_cut(target: CuttableTarget, scenario: Scenario) -> Callable[[], None]:
    def cut() -> None:
        for session in scenario.publisher.sessions.values():
            session.writer.transport.abort()
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
        failures: the kinds. A full disk only happens where the program writes to one.
        two_phase: whether the sink can hold prepared transactions.
    """
    return [
        CrashCase(point, failure, two_phase=two_phase)
        for point in points
        if two_phase or not point.startswith("prepare.")
        for failure in failures
        if failure is not Failure.DISK_FULL or point in _WRITES
    ]
