"""The cases: one for each point and kind of failure. The program fails in each phase of the scenario that reaches the point."""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

from subscriber.crash_points import POINTS
from subscriber.errors import SubscriberError
from subscriber.testing.crash_points.child import (
    ERROR_STATUS,
    SYNCHRONIZED,
    Start,
    make_subscription,
    note_synchronized,
    run_child,
    stop_synchronized,
)
from subscriber.testing.crash_points.failures import (
    EXIT_STATUS,
    PHASES,
    SINK_LINE,
    Failure,
    FailureAt,
    cut_connections,
    failed_at,
    fill_disk,
    set_phase,
)
from subscriber.testing.crash_points.publisher import TIMEOUT, CrashPublisher, FakeCrashPublisher
from subscriber.testing.crash_points.scenario import Scenario
from subscriber.testing.crash_points.target import CrashTarget, CuttableTarget, FullDiskTarget

__all__ = ["CORE_POINTS", "CrashCase", "Failure", "crash_cases"]

CORE_POINTS: Final[Sequence[str]] = (
    *(point for point in POINTS if point.partition(".")[0] in {"setup", "copy", "apply", "prepare", "spool", "acknowledge"}),
    SINK_LINE,
)
"""The points that the program reaches with every sink, and the lines of the sink."""
_STARTS: Final = 2
"""How often the program may end after each failure: the start after it may meet what it has left."""


@dataclass(frozen=True, slots=True)
class CrashCase:
    """Failures of one kind at one point.

    Attributes:
        point: where.
        failure: how.
        phases: when: once in each of these phases in which the point is reached.
        two_phase: whether the sink implements :class:`subscriber.interfaces.TwoPhaseSink`.
        relay_log: whether the subscription has a relay log. It has one at the points of a relay log.
    """

    point: str
    failure: Failure
    phases: Sequence[str] = PHASES
    two_phase: bool = True
    relay_log: bool = False

    def __str__(self) -> str:
        phases = self.phases if tuple(self.phases) != PHASES else ()
        return "-".join([self.point, self.failure.value, *phases, *(["relay_log"] if self.relay_log else [])])

    async def run(
        self,
        target: CrashTarget,
        directory: Path,
        *,
        publisher: CrashPublisher | None = None,
        mistake: Callable[[], None] | None = None,
    ) -> Sequence[str]:
        """Run it.

        Args:
            target: empty.
            directory: for the spool, and for the log of the processes.
            publisher: empty. None: the fake one.
            mistake: is called in each process first; see :class:`Start`.

        Returns:
            The phases in which it failed; the lines for ``sink.line``.

        Raises:
            ValueError: a target that lives in this process has no full disk, no lines and no mistake.
            AssertionError: rows are missing or there too often, something is left behind, the program did not start again, or the point
                was not reached.
            FeedbackViolation: the publisher was told what is not true.
        """
        local = isinstance(target, CuttableTarget)
        if local and (mistake is not None or self.failure is Failure.DISK_FULL or self.point == SINK_LINE):
            raise ValueError("a full disk, lines and a mistake are for a target whose sink runs in a process of its own")
        scenario = Scenario(publisher or FakeCrashPublisher(), two_phase=self.two_phase)
        scenario.fill()
        await scenario.create_tables(target)
        async with scenario.publisher:
            cut = _local_cut(target, scenario.publisher) if isinstance(target, CuttableTarget) else cut_connections
            fill = target.fill_disk if isinstance(target, FullDiskTarget) else fill_disk
            code = _code(type(target.new_sink()).__module__)
            failure = FailureAt(self.point, self.failure, self.phases, directory, cut, fill, code)
            start = Start(
                target,
                scenario.publisher.dsn(),
                directory,
                self.two_phase,
                failure,
                mistake,
                self.relay_log or self.point.startswith("relay."),
            )
            runner = _LocalRunner(start) if local else _ProcessRunner(start)
            try:
                async with asyncio.timeout(TIMEOUT) as limit:
                    await self._follow(scenario, runner, limit)
            except TimeoutError:
                raise AssertionError(f"nothing was confirmed for {TIMEOUT:.0f} s\n{_log(directory)}") from None
            finally:
                await runner.kill()
            found = await scenario.differences(target)
            found += [f"the spool has {file.name}" for file in (directory / "spool").glob("*")]
            failed = failed_at(directory)
            if not failed:
                found.append(f"the point {self.point} was not reached")
            assert not found, "\n".join([*found, f"the program has failed at {self.point} in {', '.join(failed)}", _log(directory)])
        return failed

    async def _follow(self, scenario: Scenario, runner: _Runner, limit: asyncio.Timeout) -> None:
        """Let the publisher do its steps while the program runs, and is started again when it has failed. Then end it cleanly."""
        set_phase(runner.directory, PHASES[0])
        supervising = asyncio.create_task(runner.supervise(limit))

        async def write() -> None:
            async for phase in scenario.steps():
                _extend(limit)
                if phase is None:
                    await scenario.publisher.until_all_confirmed()
                    continue
                if phase == "changes":
                    while not (runner.directory / SYNCHRONIZED).exists():  # noqa: ASYNC110 -- another process creates it
                        await asyncio.sleep(0.01)
                set_phase(runner.directory, phase)

        writing = asyncio.create_task(write())
        try:
            await asyncio.wait({supervising, writing}, return_when=asyncio.FIRST_COMPLETED)
            if supervising.done():
                supervising.result()
            await writing
            # the end is a step too: what fails there is started once more
            set_phase(runner.directory, PHASES[-1])
            runner.stop()
            await supervising
        finally:
            for task in (supervising, writing):
                task.cancel()
            await asyncio.gather(supervising, writing, return_exceptions=True)


def _extend(limit: asyncio.Timeout) -> None:
    limit.reschedule(asyncio.get_running_loop().time() + TIMEOUT)


class _Runner:
    """Starts the program again and again, until it has been stopped and has ended well.

    Args:
        start: of each run.
    """

    def __init__(self, start: Start) -> None:
        self._start = start
        self._stopping = False
        self.directory = start.directory

    async def supervise(self, limit: asyncio.Timeout) -> None:
        """Run the program. ``limit`` is the time of each start, and of each step of the publisher.

        Raises:
            AssertionError: it ended with an error that the failures do not explain.
        """
        ends = 0
        while await self._run() or not self._stopping:
            ends += 1
            if ends > _STARTS * len(failed_at(self.directory)):
                raise AssertionError(f"the program ended by itself\n{_log(self.directory)}")
            _extend(limit)

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
        self._waiting: list[asyncio.Task[None]] = []

    async def _run(self) -> bool:
        self._subscription = make_subscription(self._start)
        self._waiting.append(asyncio.create_task(note_synchronized(self._subscription, self.directory)))
        if self._stopping:
            self.stop()
        with self._start.failure.watching():
            try:
                await self._subscription.run()
            except SubscriberError:
                return True
            finally:
                for task in self._waiting:
                    task.cancel()
        return False

    def stop(self) -> None:
        super().stop()
        self._waiting.append(asyncio.create_task(stop_synchronized(self._subscription)))


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


def _code(module: str) -> str:
    """Where the lines of a sink are: in the package of its module, or in the module."""
    package, _, _ = module.rpartition(".")
    file = sys.modules[package or module].__file__
    assert file is not None
    return f"{Path(file).parent}/" if package else file


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
    found = []
    for point in points:
        if point == SINK_LINE and Failure.EXIT in failures:
            found += [CrashCase(point, Failure.EXIT, phases, two_phase) for phases in (PHASES[:2], PHASES[2:])]
        elif point != SINK_LINE and (two_phase or not point.startswith("prepare.")):
            found += [CrashCase(point, failure, two_phase=two_phase) for failure in failures]
    return found
