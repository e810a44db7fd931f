"""The program fails at each crash point, with each sink. Afterwards nothing is lost, repeated or left behind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from subscriber.crash_points import POINTS
from subscriber.testing.crash_points import CORE_POINTS, PHASES, SINK_LINE, CrashCase, Failure, crash_cases
from tests.crash_points.postgres_publisher import PostgresCrashPublisher
from tests.crash_points.targets import CrashPostgres, make_target
from tests.support.database import Database

_CORE: Final = tuple(point for point in CORE_POINTS if point != SINK_LINE)
_SQL, _POSTGRES, _LAKE = ("group.", "sqlalchemy."), ("group.", "postgres."), ("group.", "landing.", "publishing.")
_RELAY: Final = ("relay.",)
_OF_MARIADB: Final = ("prepare.", *_SQL)
"""What may differ from SQLite: both have the same sink."""
_EACH_CHANGE: Final[Sequence[tuple[str, Sequence[str], Failure]]] = [
    ("sqlite", (*_CORE, *_SQL), Failure.EXIT),
    ("mariadb", _OF_MARIADB, Failure.EXIT),
    ("postgres", (*_CORE, *_POSTGRES), Failure.EXIT),
    ("lake", (*_CORE, *_LAKE), Failure.EXIT),
    ("memory", _CORE, Failure.ERROR),
    ("memory", _RELAY, Failure.ERROR),
    ("sqlite", _RELAY, Failure.EXIT),
    ("memory", _CORE, Failure.CUT),
    ("postgres", _POSTGRES, Failure.CUT),
    ("sqlite", (*_CORE, *_SQL), Failure.DISK_FULL),
]
"""The sinks, with the first parts of the names of their points: each with EXIT, if it has a process, and each other failure with one."""
_ENDURANCE: Final[Sequence[tuple[str, Sequence[str], Failure]]] = [
    ("sqlite", (*_CORE, *_SQL), Failure.ERROR),
    ("sqlite", (*_CORE, *_SQL), Failure.CUT),
    ("mariadb", tuple(point for point in _CORE if not point.startswith(_OF_MARIADB)), Failure.EXIT),
    ("mariadb", (*_CORE, *_SQL), Failure.CUT),
    ("postgres", _RELAY, Failure.EXIT),
    ("postgres", _CORE, Failure.CUT),
    ("postgres", (*_CORE, *_POSTGRES), Failure.ERROR),
    ("postgres_full", (*_CORE, *_POSTGRES), Failure.DISK_FULL),
    ("lake", (*_CORE, *_LAKE), Failure.ERROR),
    ("lake", (*_CORE, *_LAKE), Failure.DISK_FULL),
]
"""The rest."""


def _cases(plan: Sequence[tuple[str, Sequence[str], Failure]]) -> list[tuple[str, CrashCase]]:
    return [
        (sink, case)
        for sink, names, failure in plan
        for case in crash_cases([point for point in POINTS if point.startswith(tuple(names))], failures=[failure])
    ]


def _named(cases: Sequence[tuple[str, CrashCase]]) -> list[object]:
    return [pytest.param(sink, case, id=f"{sink}-{case}") for sink, case in cases]


CASES: Final = _cases(_EACH_CHANGE)
_SAMPLE: Final[Sequence[tuple[str, CrashCase, Sequence[str]]]] = [
    ("memory", CrashCase("prepare.prepared", Failure.ERROR), ["prepared"]),
    ("sqlite", CrashCase("apply.applied", Failure.EXIT), ["copy", "changes", "streams", "prepared"]),
    ("postgres", CrashCase("spool.rolled_back", Failure.EXIT), ["streams"]),
    ("postgres", CrashCase("postgres.end_sent", Failure.CUT), ["copy", "changes", "streams", "prepared"]),
    ("lake", CrashCase("acknowledge.sent", Failure.EXIT), list(PHASES)),
    ("sqlite", CrashCase("relay.synced", Failure.EXIT), ["copy", "changes", "streams", "prepared"]),
]
"""With the phases in which the program fails."""


async def _run(sink: str, case: CrashCase, request: pytest.FixtureRequest) -> Sequence[str]:
    return await case.run(make_target(sink, request), request.getfixturevalue("tmp_path"))


@pytest.mark.parametrize(("sink", "case", "phases"), [pytest.param(*row, id=f"{row[0]}-{row[1]}") for row in _SAMPLE])
async def test_sample(sink: str, case: CrashCase, phases: Sequence[str], request: pytest.FixtureRequest) -> None:
    assert await _run(sink, case, request) == phases


@pytest.mark.crash_points
@pytest.mark.parametrize(("sink", "case"), _named(CASES))
async def test_every_point(sink: str, case: CrashCase, request: pytest.FixtureRequest) -> None:
    await _run(sink, case, request)


# with a relay log, the publisher is confirmed by what is in it: whether the sink stores a position without changes depends on the time
_WITH_RELAY_LOG = [
    point for point in _CORE if point.startswith(("apply.", "prepare.", "acknowledge.", "setup.")) and point != "apply.advanced"
]


@pytest.mark.crash_points
@pytest.mark.parametrize("point", _WITH_RELAY_LOG)
async def test_with_a_relay_log(point: str, request: pytest.FixtureRequest) -> None:
    await _run("sqlite", CrashCase(point, Failure.EXIT, relay_log=True), request)


@pytest.mark.endurance
@pytest.mark.parametrize(("sink", "case"), _named(_cases(_ENDURANCE)))
async def test_other_failures(sink: str, case: CrashCase, request: pytest.FixtureRequest) -> None:
    await _run(sink, case, request)


@pytest.mark.crash
@pytest.mark.publisher(min=15, lacks="two-phase subscriptions")
@pytest.mark.matrix
async def test_postgres_as_publisher(target_db: Database, publisher_db: Database, tmp_path: Path) -> None:
    case = CrashCase("postgres.prepared", Failure.EXIT)
    await case.run(CrashPostgres(target_db), tmp_path, publisher=PostgresCrashPublisher(publisher_db))


@pytest.mark.endurance
@pytest.mark.parametrize("point", ["copy.slot_created", "group.copied", "copy.batch_applied", "spool.written", "postgres.committed"])
async def test_postgres_as_publisher_at_other_points(point: str, target_db: Database, publisher18_db: Database, tmp_path: Path) -> None:
    """The fake publisher, which is faster, has these on each change."""
    case = CrashCase(point, Failure.EXIT)
    await case.run(CrashPostgres(target_db), tmp_path, publisher=PostgresCrashPublisher(publisher18_db))
