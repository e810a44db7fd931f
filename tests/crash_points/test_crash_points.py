"""The program fails once at each crash point, with each sink. Afterwards nothing is lost, repeated or left behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest

from subscriber.crash_points import POINTS
from subscriber.testing.crash_points import CORE_POINTS, CrashCase, CrashTarget, Failure, crash_cases
from tests.crash_points.targets import CrashMemory, CrashPostgres, CrashSqlite

_MAKERS: Final[Mapping[str, Callable[[pytest.FixtureRequest], CrashTarget]]] = {
    "memory": lambda _: CrashMemory(),
    "postgres": lambda request: CrashPostgres(request.getfixturevalue("target_db")),
    "sqlite": lambda request: CrashSqlite(_directory(request) / "replica.db"),
}
_OWN: Final[Mapping[str, Sequence[str]]] = {
    "memory": (),
    "postgres": [point for point in POINTS if point.startswith("postgres.")],
    "sqlite": [point for point in POINTS if point.startswith("sqlalchemy.")],
}
_LATER: Final = frozenset(
    {"apply.taken", "apply.applied", "acknowledge.sending", "acknowledge.sent", "postgres.committed", "sqlalchemy.committed"}
)
"""Points that are also reached much later: their first time is during the copy."""


def _directory(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue("tmp_path")
    return found


def _cases(sink: str) -> list[CrashCase]:
    failures = [Failure.ERROR, Failure.CUT, Failure.DISK_FULL] if sink == "memory" else [Failure.EXIT]
    found = crash_cases((*CORE_POINTS, *_OWN[sink]), failures=failures)
    return [*found, *(CrashCase(case.point, case.failure, 4) for case in found if case.point in _LATER)]


_ALL: Final = [(sink, case) for sink in _MAKERS for case in _cases(sink)]
_SAMPLE: Final = [
    ("memory", CrashCase("prepare.prepared", Failure.ERROR)),
    ("memory", CrashCase("acknowledge.sending", Failure.CUT)),
    ("sqlite", CrashCase("sqlalchemy.committed", Failure.EXIT, 4)),
    ("sqlite", CrashCase("spool.written", Failure.DISK_FULL)),
    ("postgres", CrashCase("copy.finished", Failure.EXIT)),
    ("postgres", CrashCase("postgres.prepared", Failure.EXIT)),
    ("postgres", CrashCase("postgres.end_sent", Failure.CUT)),
]


def _named(cases: Sequence[tuple[str, CrashCase]]) -> list[object]:
    return [pytest.param(sink, case, id=f"{sink}-{case}") for sink, case in cases]


async def _run(sink: str, case: CrashCase, request: pytest.FixtureRequest) -> None:
    await case.run(_MAKERS[sink](request), _directory(request))


@pytest.mark.parametrize(("sink", "case"), _named(_SAMPLE))
async def test_sample(sink: str, case: CrashCase, request: pytest.FixtureRequest) -> None:
    await _run(sink, case, request)


@pytest.mark.crash
@pytest.mark.endurance
@pytest.mark.parametrize(("sink", "case"), _named([case for case in _ALL if case not in _SAMPLE]))
async def test_every_point(sink: str, case: CrashCase, request: pytest.FixtureRequest) -> None:
    await _run(sink, case, request)
