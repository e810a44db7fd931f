"""The compliance suite over every sink: the same scenarios, the same rows; they differ by what they declare."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import pytest

from subscriber.sinks.postgres.parallel.pace import Pace
from subscriber.sinks.spark.pipeline.engines.local_engine import LocalEngine
from subscriber.testing.compliance import SCENARIOS, ComplianceTarget, Scenario
from tests.sinks.lakes import LakeTarget
from tests.sinks.targets import MariaDBTarget, MemoryAdapter, PostgresTarget, SqliteTarget

_MAKERS: Final[Mapping[str, Callable[[pytest.FixtureRequest], ComplianceTarget]]] = {
    "postgres": lambda request: PostgresTarget(request.getfixturevalue("target_db")),
    "memory": lambda _: MemoryAdapter(),
    "sqlite": lambda request: SqliteTarget(_file(request)),
    "mariadb": lambda request: MariaDBTarget(request.getfixturevalue("mariadb_db")),
    "lake": lambda request: LakeTarget(_file(request), LocalEngine),
}


def _file(request: pytest.FixtureRequest) -> Path:
    directory: Path = request.getfixturevalue("tmp_path")
    return directory / "replica.db"


@pytest.fixture(params=_MAKERS)
def target(request: pytest.FixtureRequest) -> ComplianceTarget:
    """An empty one of each kind."""
    return _MAKERS[request.param](request)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
async def test_compliance(scenario: Scenario, target: ComplianceTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    # with apply_workers, groups from the first batch on
    monkeypatch.setattr(Pace, "next_part", lambda *_: (True, 1.0))
    await scenario.run(target)


def test_the_suite_is_whole() -> None:
    names = [scenario.name for scenario in SCENARIOS]
    assert len(set(names)) == len(names)
    assert {name.partition(".")[0] for name in names} == {
        "changes",
        "identities",
        "settings",
        "batches",
        "positions",
        "failures",
        "writers",
        "tables",
        "copying",
        "twophase",
        "parallel",
        "types",
    }
