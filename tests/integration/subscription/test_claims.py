"""A subscription that its command line defines is not run while a verb of another process changes it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from subscriber.subscription.targets import open_catalog
from tests.integration.lake.test_bad_input import arguments
from tests.support.database import Database
from tests.support.program import subscriber
from tests.support.sqlalchemy_targets import Replica

CLAIMED = "is being altered or dropped by another process (hint: start it again when that process has ended)"


async def refused_while_claimed(target: str, name: str, run: list[str]) -> None:
    """Between the end of its slots and the end of its entry, a drop holds no lock of a writer: a run made the slots again."""
    assert subscriber(*run, "--until-caught-up").status == 0
    catalog = await open_catalog(target, "test")
    try:
        async with catalog.claim(name):
            done = await asyncio.to_thread(subscriber, *run, "--until-caught-up")
            assert (done.status, CLAIMED in done.errors) == (1, True), done.errors
    finally:
        await catalog.close()
    assert subscriber(*run, "--until-caught-up").status == 0


@pytest.mark.parametrize("other_target", ["native", "sqlite", pytest.param("mariadb", marks=pytest.mark.endurance)], indirect=True)
async def test_run_of_a_claimed_subscription(other_replica: Replica) -> None:
    pair = other_replica
    await refused_while_claimed(pair.target.url, pair.name, pair.arguments())


async def test_run_of_a_claimed_lake(publisher18_db: Database, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR TABLE t")
    await refused_while_claimed(f"spark://{lake}", f"lake_{publisher18_db.name}", arguments(publisher18_db, lake))
