"""The program fails once at each crash point, with each sink. Afterwards nothing is lost, repeated or left behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import pytest

from subscriber.crash_points import POINTS
from subscriber.testing.crash_points import CORE_POINTS, CrashCase, Failure, crash_cases
from tests.crash_points.targets import SINKS, make_target

_OWN: Final[Mapping[str, Sequence[str]]] = {
    "memory": (),
    "postgres": [point for point in POINTS if point.startswith(("group.", "postgres."))],
    "sqlite": [point for point in POINTS if point.startswith(("group.", "sqlalchemy."))],
}
_LATER: Final[Mapping[str, int]] = {
    **dict.fromkeys(["apply.taken", "apply.applied", "acknowledge.sending", "acknowledge.sent"], 4),
    **dict.fromkeys(["postgres.committed", "sqlalchemy.committed"], 6),
    **dict.fromkeys(["prepare.prepared", "postgres.prepared", "group.copied"], 4),
    **dict.fromkeys(["prepare.committed", "postgres.commit_prepared", "prepare.rolled_back", "group.stored"], 2),
}
"""Points that are also reached later, in another situation: after the copy, or with a large transaction."""


def _cases(sink: str) -> list[CrashCase]:
    failures = [Failure.ERROR, Failure.CUT, Failure.DISK_FULL] if sink == "memory" else [Failure.EXIT]
    found = crash_cases((*CORE_POINTS, *_OWN[sink]), failures=failures)
    return [*found, *(CrashCase(case.point, case.failure, _LATER[case.point]) for case in found if case.point in _LATER)]


CASES: Final = [(sink, case) for sink in SINKS for case in _cases(sink)]
_SAMPLE: Final = [
    ("memory", CrashCase("prepare.prepared", Failure.ERROR)),
    ("memory", CrashCase("acknowledge.sending", Failure.CUT)),
    ("sqlite", CrashCase("sqlalchemy.committed", Failure.EXIT, 6)),
    ("sqlite", CrashCase("spool.written", Failure.DISK_FULL)),
    ("postgres", CrashCase("copy.finished", Failure.EXIT)),
    ("postgres", CrashCase("postgres.prepared", Failure.EXIT)),
    ("postgres", CrashCase("postgres.end_sent", Failure.CUT)),
]


def _named(cases: Sequence[tuple[str, CrashCase]]) -> list[object]:
    return [pytest.param(sink, case, id=f"{sink}-{case}") for sink, case in cases]


async def _run(sink: str, case: CrashCase, request: pytest.FixtureRequest) -> None:
    await case.run(make_target(sink, request), request.getfixturevalue("tmp_path"))


@pytest.mark.parametrize(("sink", "case"), _named(_SAMPLE))
async def test_sample(sink: str, case: CrashCase, request: pytest.FixtureRequest) -> None:
    await _run(sink, case, request)


@pytest.mark.crash
@pytest.mark.endurance
@pytest.mark.parametrize(("sink", "case"), _named([case for case in CASES if case not in _SAMPLE]))
async def test_every_point(sink: str, case: CrashCase, request: pytest.FixtureRequest) -> None:
    await _run(sink, case, request)
