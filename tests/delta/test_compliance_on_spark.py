"""The compliance suite over lakes that Spark keeps: engine ``spark``, with units and with MERGE INTO."""

from __future__ import annotations

from pathlib import Path

import pytest

from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.pipeline.engines.engine import Engine
from subscriber.testing.compliance import SCENARIOS, Scenario
from tests.sinks.lakes import LakeTarget


# a unit is the same code as with engine local, which `make test` takes through the suite
@pytest.fixture(params=[pytest.param("units", marks=pytest.mark.endurance), "merge"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> LakeTarget:
    path = tmp_path / "lake"
    spark = request.getfixturevalue("spark" if request.param == "units" else "delta")

    def engine(_: Storage) -> Engine:
        from subscriber.sinks.spark.pipeline.engines.spark_engine import SparkEngine

        return SparkEngine(spark, Location(path=str(path)), merges_all=request.param != "units")

    return LakeTarget(path, engine)


# what MERGE INTO does with rows; the other scenarios are about the landing and the catalog, which are the same with each engine
_OF_ROWS = ("changes.", "identities.", "batches.", "types.")
# a third of the time of this folder; `test_engines_take_turns_and_the_rows_are_the_publishers` merges random histories, too
_LONG = "batches.any_history"


def _is_long(scenario: str) -> bool:
    return scenario == _LONG or not scenario.startswith(_OF_ROWS)


_SCENARIOS = [
    pytest.param(scenario, id=str(scenario), marks=pytest.mark.endurance if _is_long(str(scenario)) else ()) for scenario in SCENARIOS
]


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scenario", _SCENARIOS)
async def test_compliance(scenario: Scenario, target: LakeTarget) -> None:
    await scenario.run(target)
