"""What tests of ``apply_workers`` share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, Final

import pytest

from subscriber.interfaces import Batch
from subscriber.sinks.postgres.parallel import groups
from subscriber.sinks.postgres.parallel.group import GroupAttempt
from subscriber.sinks.postgres.parallel.groups import ParallelGroups
from subscriber.sinks.postgres.parallel.pace import Pace
from tests.support.database import Database
from tests.support.observation import all_ready
from tests.support.replica import QUICK, Replica, replica

__all__ = ["WORKERS", "Counts", "always_in_groups", "behind"]

WORKERS: Final = replace(QUICK, apply_workers=3, batch_rows=120)


class Counts:
    """What happened to groups."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.committed = self.failed = 0
        commit = GroupAttempt.commit

        async def counted(attempt: GroupAttempt) -> bool:
            done = await commit(attempt)
            self.committed += done
            self.failed += not done
            return done

        monkeypatch.setattr(GroupAttempt, "commit", counted)


def always_in_groups(patch: pytest.MonkeyPatch) -> None:
    """Small groups from the first batch on, for which sessions are open."""
    apply = ParallelGroups.apply

    async def apply_with_sessions(self: ParallelGroups, batch: Batch) -> None:
        self._open_sessions()
        if self._opening is not None:
            await asyncio.wait({self._opening})
        await apply(self, batch)

    patch.setattr(groups, "LEAST", 4)
    patch.setattr(Pace, "next_part", lambda *_: (True, 1.0))
    patch.setattr(ParallelGroups, "apply", apply_with_sessions)


@contextlib.asynccontextmanager
async def behind(publisher: Database, target: Database, write: Callable[[], None], **arguments: Any) -> AsyncIterator[Replica]:
    """A subscription that has much to apply: what ``write`` writes while it is stopped."""
    arguments = {"settings": WORKERS} | arguments
    async with replica(publisher, target, **arguments) as found:
        await all_ready(found)
        await found.caught_up()
    await asyncio.to_thread(write)
    async with replica(publisher, target, **arguments) as found:
        yield found
