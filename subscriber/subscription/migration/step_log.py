"""The steps of a migration: retried, timed, told, and stored in the target's catalog."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from subscriber.apply.retry import Backoff, Policy, policy
from subscriber.catalog.model import MIGRATION
from subscriber.errors import SubscriberError
from subscriber.subscription.migration.spec import APPLICATION, MigrationSpec, Tell
from subscriber.subscription.targets import stored_catalog

__all__ = ["StepLog", "goes_away"]

_Result = TypeVar("_Result")


def goes_away(error: SubscriberError) -> bool:
    """Whether the cause ends without a new call: a server that restarts or fails over, or has no space, memory or sessions.

    53400 is not such a cause: a user must raise a limit, or drop a slot.
    """
    sqlstate = error.sqlstate or ""
    return policy(error) is Policy.SOON or (sqlstate.startswith("53") and sqlstate != "53400")


@dataclass(frozen=True, slots=True)
class _Step:
    name: str
    began: float
    ended: float


class StepLog:
    """Makes the steps.

    Args:
        spec: of the migration.
        tell: is given a line for each step.
    """

    def __init__(self, spec: MigrationSpec, tell: Tell) -> None:
        self._spec = spec
        self._tell = tell
        self._steps: list[_Step] = []

    @property
    def last(self) -> str | None:
        """The step that was made last."""
        return self._steps[-1].name if self._steps else None

    async def step(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Make a step, and store that it was made. Those before ``create`` are stored with it: before, the target has no catalog."""
        began, clock = time.time(), time.monotonic()
        await self.retried(name, work)
        self._steps.append(_Step(name, began, began + time.monotonic() - clock))
        self._tell(f"{name}: {time.monotonic() - clock:.1f} s")
        if name not in {"publish", "schema"}:
            await self.retried(name, self._store)

    async def retried(self, name: str, work: Callable[[], Awaitable[_Result]]) -> _Result:
        """Repeat the work of a step, which finds out what is done already, while it fails for a reason that goes away."""
        backoff, told = Backoff(self._spec.settings), ""
        while True:
            try:
                return await work()
            except SubscriberError as error:
                if not goes_away(error):
                    raise
                if (line := f"{name}: {error.one_line()}; it is retried") != told:
                    told = line
                    self._tell(line)
                await asyncio.sleep(backoff.pause(policy(error)))

    async def _store(self) -> None:
        async with stored_catalog(self._spec.target, APPLICATION) as catalog:
            oid = (await catalog.find(self._spec.name)).oid
            async with catalog.store.transaction() as rows:
                known = {row["step"] for row in await rows.select(MIGRATION, {"subid": oid})}
                made = [each for each in self._steps if each.name not in known]
                values = [{"subid": oid, "step": each.name, "began_at": each.began, "ended_at": each.ended} for each in made]
                if values:
                    await rows.insert(MIGRATION, values)
