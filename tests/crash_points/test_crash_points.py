"""The program fails once at each crash point, with each sink. Afterwards nothing is lost, repeated or left behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest

from subscriber.crash_points import POINTS
from subscriber.testing.crash_points import CORE_POINTS, CrashCase, Failure, crash_cases
from tests.crash_points.postgres_publisher import PostgresCrashPublisher
from tests.crash_points.targets import CrashPostgres, make_target
from tests.support.database import Database

_ALL: Final = (Failure.EXIT, Failure.ERROR, Failure.CUT, Failure.DISK_FULL)
_PLAN: Final[Sequence[tuple[str, Sequence[str], Sequence[Failure]]]] = [
    ("memory", (), [Failure.ERROR, Failure.CUT]),
    ("sqlite", ("group.", "sqlalchemy."), _ALL),
    ("mariadb", ("group.", "sqlalchemy."), [Failure.EXIT, Failure.CUT]),
    ("postgres", ("group.", "postgres."), [Failure.EXIT, Failure.ERROR, Failure.CUT]),
    ("postgres_full", ("group.", "postgres."), [Failure.DISK_FULL]),
    ("lake", ("group.", "landing.", "publishing."), [Failure.EXIT, Failure.ERROR, Failure.DISK_FULL]),
]
"""For each sink: its own points, by the first part of their names, and the failures."""
_LATER: Final[Mapping[str, int]] = {
    **dict.fromkeys(["apply.taken", "apply.applied", "acknowledge.sending", "acknowledge.sent"], 4),
    **dict.fromkeys(["postgres.committed", "sqlalchemy.committed", "landing.landed"], 6),
    **dict.fromkeys(["prepare.prepared", "postgres.prepared", "landing.prepared", "group.copied"], 4),
    **dict.fromkeys(["prepare.committed", "postgres.commit_prepared", "landing.commit_written", "prepare.rolled_back", "group.stored"], 2),
    **dict.fromkeys([point for point in POINTS if point.startswith("publishing.")], 2),
}
"""Points that are also reached later, in another situation: after the copy, or with a large transaction."""


def _cases(own: Sequence[str], failures: Sequence[Failure]) -> list[CrashCase]:
    found = crash_cases((*CORE_POINTS, *(point for point in POINTS if point.startswith(tuple(own)))), failures=failures)
    return [*found, *(CrashCase(case.point, case.failure, _LATER[case.point]) for case in found if case.point in _LATER)]


CASES: Final = [(sink, case) for sink, own, failures in _PLAN for case in _cases(own, failures)]
_SAMPLE: Final = [
    ("memory", CrashCase("prepare.prepared", Failure.ERROR)),
    ("memory", CrashCase("acknowledge.sending", Failure.CUT)),
    ("sqlite", CrashCase("sqlalchemy.committed", Failure.EXIT, 6)),
    ("sqlite", CrashCase("spool.written", Failure.DISK_FULL)),
    ("postgres", CrashCase("copy.finished", Failure.EXIT)),
    ("postgres", CrashCase("postgres.prepared", Failure.EXIT)),
    ("postgres", CrashCase("spool.rolled_back", Failure.EXIT)),
    ("postgres", CrashCase("postgres.end_sent", Failure.CUT)),
    ("lake", CrashCase("publishing.table_committed", Failure.EXIT, 2)),
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


_OF_POSTGRES: Final = (
    "copy.slot_created",
    "group.copied",
    "copy.batch_applied",
    "spool.written",
    "postgres.committed",
    "postgres.prepared",
)


@pytest.mark.crash
@pytest.mark.publisher(min=15, lacks="two-phase subscriptions")
@pytest.mark.parametrize("point", _OF_POSTGRES)
async def test_postgres_as_publisher(point: str, target_db: Database, publisher_db: Database, tmp_path: Path) -> None:
    case = CrashCase(point, Failure.EXIT, _LATER.get(point, 1))
    await case.run(CrashPostgres(target_db), tmp_path, publisher=PostgresCrashPublisher(publisher_db))
