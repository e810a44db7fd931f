"""Fixtures of tests of ``apply_workers``."""

from __future__ import annotations

import asyncio

import pytest

from subscriber.interfaces import Batch
from subscriber.sinks.postgres.parallel import groups
from subscriber.sinks.postgres.parallel.groups import ParallelGroups
from subscriber.sinks.postgres.parallel.pace import Pace
from tests.support.apply_workers import Counts


@pytest.fixture
def many_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small groups from the first batch on, for which sessions are open."""
    apply = ParallelGroups.apply

    async def apply_with_sessions(self: ParallelGroups, batch: Batch) -> None:
        self._open_sessions()
        if self._opening is not None:
            await asyncio.wait({self._opening})
        await apply(self, batch)

    monkeypatch.setattr(groups, "LEAST", 4)
    monkeypatch.setattr(Pace, "next_part", lambda *_: (True, 1.0))
    monkeypatch.setattr(ParallelGroups, "apply", apply_with_sessions)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    return Counts(monkeypatch)
