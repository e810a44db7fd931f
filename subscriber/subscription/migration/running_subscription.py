"""The subscription of a migration while it runs in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, Self

from subscriber.apply.progress import CopyProgress
from subscriber.apply.retry import Backoff, policy
from subscriber.catalog import Observation
from subscriber.errors import SubscriberError, SubscriptionChanged, SubscriptionInUse, TargetError
from subscriber.subscription.launcher import Launcher
from subscriber.subscription.migration.spec import MigrationSpec
from subscriber.subscription.migration.step_log import goes_away

__all__ = ["RunningSubscription"]

_FIRST_SECONDS: Final = 0.1
_POLL_SECONDS: Final = 0.5
_CORRECT_SECONDS: Final = 10.0
"""Longer than the subscription waits after an error, unless ``wal_retrieve_retry_interval`` is changed."""


class RunningSubscription:
    """Runs the subscription. :meth:`start` makes it.

    Args:
        spec: of the migration.
        progress: is told about the copies of tables.
    """

    def __init__(self, spec: MigrationSpec, progress: CopyProgress | None) -> None:
        self._spec = spec
        self._name = spec.name
        self._settings = spec.settings
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
            self._launcher = Launcher(self._spec.target, [self._name], settings=self._settings, progress=self._progress)
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
        began = clock()
        due, corrected = began + _CORRECT_SECONDS, False
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
            # each look is a session with the target
            await self._pause(min(_POLL_SECONDS, _FIRST_SECONDS + (clock() - began) / 5))

    async def is_dropped(self, seconds: float) -> bool:
        """Wait for so long, or until the subscription is dropped.

        Raises:
            TargetError: it does not run any more.
        """
        end = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < end:
            if await self._look() is None:
                return True
            await self._pause(_POLL_SECONDS)
        return False

    async def _look(self) -> Observation | None:
        assert self._task is not None  # it was started
        if self._task.done():
            await self._task
            raise TargetError(f'subscription "{self._name}" does not run any more', hint="repeat the command")
        return await self._spec.observed()

    async def _pause(self, seconds: float) -> None:
        assert self._task is not None  # it was started
        await asyncio.wait({self._task}, timeout=seconds)

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
