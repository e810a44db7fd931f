"""The other driver of MariaDB and MySQL: what each driver does in its own way is the same through it."""

from __future__ import annotations

from typing import Final

import pytest

from subscriber.config import Settings
from subscriber.interfaces import Sink
from subscriber.sinks.sqlalchemy.sink import SqlAlchemySink
from subscriber.testing.compliance import SCENARIOS, Scenario
from tests.sinks.targets import OPTIONS, MariaDBTarget
from tests.support.mariadb_database import MariaDatabase

_TOPICS: Final = {"types", "twophase", "failures", "writers"}


class _AiomysqlTarget(MariaDBTarget):
    def new_sink_with(self, settings: Settings) -> Sink:
        return SqlAlchemySink(self._database.url.replace("mariadb://", "mariadb+aiomysql://"), options=OPTIONS, settings=settings)


@pytest.mark.endurance
@pytest.mark.parametrize("scenario", [scenario for scenario in SCENARIOS if scenario.name.partition(".")[0] in _TOPICS], ids=str)
async def test_aiomysql(scenario: Scenario, mariadb_db: MariaDatabase) -> None:
    target = _AiomysqlTarget(mariadb_db)
    await scenario.run(target)
