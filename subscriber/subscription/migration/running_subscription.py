"""The subscription of a migration while it runs in this process, and what is retried."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, Self, TypeVar

from subscriber.apply.progress import CopyProgress
from subscriber.apply.retry import Backoff, Policy, policy
from subscriber.catalog import Observation
from subscriber.config import Settings
from subscriber.errors import SubscriberError, SubscriptionChanged, SubscriptionInUse, TargetError
from subscriber.subscription.launcher import Launcher
from subscriber.subscription.targets import observe_target

__all__ = ["RunningSubscription", "goes_away", "observed", "retried"]

_POLL_SECONDS: Final = 0.5
_CORRECT_SECONDS: Final = 10.0
"""Longer than the subscription waits after an error, unless ``wal_retrieve_retry_interval`` is changed."""
_Result = TypeVar("_Result")


def goes_away(error: SubscriberError) -> bool:
    """Whether the cause ends without a new call: a server that restarts or fails over, or has no space, memory or sessions.

    53400 is not such a cause: a user must raise a limit, or drop a slot.
    """
    sqlstate = error.sqlstate or ""
    return policy(error).policy is Policy.SOON or (sqlstate.startswith("53") and sqlstate != "53400")


async def retried(name: str, work: Callable[[], Awaitable[_Result]], settings: Settings, tell: Callable[[str], None]) -> _Result:
    """Repeat the work of a step, which finds out what is done already, while it fails for a reason that goes away."""
    backoff, told = Backoff(settings), ""
    while True:
        try:
            return await work()
        except SubscriberError as error:
            if not goes_away(error):
                raise
            if (line := f"{name}: {error.one_line()}; it is retried") != told:
                told = line
                tell(line)
            await asyncio.sleep(backoff.pause(policy(error)))


async def observed(target: str, name: str) -> Observation | None:
    """The subscription in the target's catalog; None: there is none, or it was not made completely."""
    found = (each for each in await observe_target(target) if each.definition.name == name and each.definition.made)
    return next(found, None)


class RunningSubscription:
    """Runs the subscription. :meth:`start` makes it.

    Args:
        name: of the subscription.
        target: URL or conninfo of the target.
        settings: of the process.
        progress: is told about the copies of tables.
    """

    def __init__(self, name: str, target: str, settings: Settings, progress: CopyProgress | None) -> None:
        self._name = name
        self._target = target
        self._settings = settings
        self._progress = progress
        self._launcher: Launcher | None = None
        self._task: asyncio.Task[None] | None = None
        self._ends = asyncio.Event()

    @contextlib.asynccontextmanager
    async def start(self) -> AsyncIterator[Self]:
        """Run it until the block ends."""
        self._task = asyncio.create_task(self._launch())
        try:
            yield self
        finally:
            self._ends.set()
            if self._launcher is not None:
                self._launcher.stop()
            await self._task

    async def _launch(self) -> None:
        """Run the subscription. Where the target cannot be reached at first, the launcher ends: it is started again."""
        backoff = Backoff(self._settings)
        while not self._ends.is_set():
            self._launcher = Launcher(self._target, [self._name], settings=self._settings, progress=self._progress)
            try:
                await self._launcher.run()
            except SubscriptionInUse as error:
                # another migration, or `run`: it does not go away by itself
                raise TargetError(str(error), hint=error.hint) from error
            except SubscriberError as error:
                if not goes_away(error):
                    raise
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ends.wait(), backoff.pause(policy(error)))
            else:
                return

    async def until(self, reached: Callable[[Observation], bool], correct: Callable[[], Awaitable[bool]]) -> None:
        """Wait until the subscription has a state.

        Args:
            reached: whether it has the state.
            correct: called once in a while, and when the subscription is stuck. True: something was corrected that could be the cause.

        Raises:
            TargetError: it was dropped, or does not run any more.
            SubscriberError: nothing else can be done until a user corrects an error.
        """
        clock = asyncio.get_running_loop().time
        due, corrected = clock() + _CORRECT_SECONDS, False
        while True:
            found = await self._look()
            if found is None:
                raise TargetError(f'subscription "{self._name}" was dropped', hint="repeat the command to begin again")
            if reached(found):
                return
            error = None if corrected else self._stuck(found)
            if error is not None or clock() >= due:
                due = clock() + _CORRECT_SECONDS
                # if so, the next attempt of the subscription shows whether it was the cause
                corrected = await correct()
                found = await self._look()
                if not corrected and found is not None and (error := error and self._stuck(found)) is not None:
                    error.add_note("nothing else can be done until this is corrected: then start the same command again")
                    raise error
            await self._pause()

    async def is_dropped(self, seconds: float) -> bool:
        """Wait for so long, or until the subscription is dropped.

        Raises:
            TargetError: it does not run any more.
        """
        end = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < end:
            if await self._look() is None:
                return True
            await self._pause()
        return False

    async def _look(self) -> Observation | None:
        assert self._task is not None  # it was started
        if self._task.done():
            await self._task
            raise TargetError(f'subscription "{self._name}" does not run any more', hint="repeat the command")
        return await observed(self._target, self._name)

    async def _pause(self) -> None:
        assert self._task is not None  # it was started
        await asyncio.wait({self._task}, timeout=_POLL_SECONDS)

    def _stuck(self, found: Observation) -> SubscriberError | None:
        """The error that a user must correct, if no other table is left to be copied."""
        if not found.definition.enabled:
            why = f": {found.last_error}" if found.last_error else ""
            return TargetError(
                f'subscription "{self._name}" is disabled{why}',
                hint=f"`subscriber alter {self._name} --target … --enable` enables it",
            )
        subscription = self._launcher.subscriptions.get(self._name) if self._launcher is not None else None
        status = subscription.status if subscription is not None else None
        error = status.last_error if status is not None else None
        # a process that was killed may still have the subscription for a moment
        if status is None or error is None or isinstance(error, SubscriptionChanged | SubscriptionInUse):
            return None
        if goes_away(error) or status.copying:
            return None
        return error if found.worker is None or status.retry is not None else None
