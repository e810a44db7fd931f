"""The compliance suite over lakes that Spark keeps: engines ``rewrite`` and ``merge``."""

from __future__ import annotations

from pathlib import Path

import pytest

from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.pipeline.engines import Engine
from subscriber.testing.compliance import SCENARIOS, Scenario
from tests.sinks.lakes import LakeTarget


@pytest.fixture(params=["rewrite", "merge"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> LakeTarget:
    path = tmp_path / "lake"
    spark = request.getfixturevalue("spark" if request.param == "rewrite" else "delta")

    def engine(storage: Storage) -> Engine:
        from subscriber.sinks.spark.pipeline.engines import RewriteEngine
        from subscriber.sinks.spark.pipeline.merge_engine import MergeEngine

        location = Location(path=str(path))
        return RewriteEngine(spark, location) if request.param == "rewrite" else MergeEngine(spark, location, storage)

    return LakeTarget(path, engine)


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
async def test_compliance(scenario: Scenario, target: LakeTarget) -> None:
    await scenario.run(target)
