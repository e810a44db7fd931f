"""A subscription that its command line defines is not run while a verb of another process changes it."""

from __future__ import annotations

import asyncio
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from subscriber.catalog import Catalog
from subscriber.catalog.store import writer_key
from subscriber.catalog.subscriptions import StoredCatalog
from subscriber.config import Settings, SubscriptionOptions
from subscriber.errors import SubscriptionInUse
from subscriber.sinks.spark.catalog import subscriptions
from subscriber.subscription.management.drop import ignore_durable
from subscriber.subscription.targets import open_catalog, open_target, opened_catalog, stored_catalog
from tests.integration.lake.test_bad_input import arguments
from tests.support.cancellation import cancelled_at
from tests.support.database import Database
from tests.support.program import subscriber
from tests.support.sqlalchemy_targets import OtherTarget, Replica

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


async def _generation(catalog: Catalog) -> int:
    (found,) = await catalog.subscriptions()
    return found.generation


async def _cancelled_while_it_waits_for_the_writer(target: str) -> None:
    """The bug was that the process that runs the subscription ended at its next connection, because of another generation."""
    sink = await open_target(target, SubscriptionOptions(), Settings()).open("mine", ignore_durable)
    try:
        async with opened_catalog(target, "test") as catalog, opened_catalog(target, "test") as other:
            before = await _generation(other)
            claiming = asyncio.create_task(catalog.claim("mine").__aenter__())
            while await _generation(other) == before:
                await asyncio.sleep(0.01)
            claiming.cancel()
            with pytest.raises(asyncio.CancelledError):
                await claiming
            assert await _generation(other) == before
    finally:
        await sink.close()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("other_target", ["native", "sqlite"], indirect=True)
async def test_claim_that_is_cancelled_at_each_step(other_target: OtherTarget, late: bool) -> None:
    """The bug was that a claim that was cancelled while it stored the generation left the new one."""
    sink = await open_target(other_target.url, SubscriptionOptions(), Settings()).open("mine", ignore_durable)
    waited: list[str] = []
    try:
        async with opened_catalog(other_target.url, "test") as other:
            before = await _generation(other)
            for step in count():
                async with stored_catalog(other_target.url, "test") as catalog:
                    await cancelled_at(_claim(catalog, waited), step, late=late)
                assert await _generation(other) == before, f"step {step}"
                if waited:
                    break
    finally:
        await sink.close()


@pytest.mark.parametrize("late", [False, True])
async def test_claim_of_a_lake_that_is_cancelled_at_each_step(tmp_path: Path, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriptions, "_STOP_SECONDS", 0.0)
    url, in_use = f"spark://{tmp_path}/lake", False

    async def claim() -> None:
        nonlocal in_use
        try:
            async with catalog.claim("mine"):
                raise AssertionError("the writer's lock is free")
        except SubscriptionInUse:
            in_use = True

    sink = await open_target(url, SubscriptionOptions(), Settings()).open("mine", ignore_durable)
    try:
        async with opened_catalog(url, "test") as catalog:
            before = await _generation(catalog)
            for step in count():
                await cancelled_at(claim(), step, late=late)
                assert await _generation(catalog) == before, f"step {step}"
                if in_use:
                    break
    finally:
        await sink.close()


async def _claim(catalog: StoredCatalog[Any], waited: list[str]) -> None:
    """Claim the subscription. The name of the writer's lock is in ``waited`` when that is waited for."""
    take_lock, oid = catalog.store.take_lock, (await catalog.find("mine")).oid

    async def take(key: str, *arguments: Any) -> None:
        if key == writer_key(oid):
            waited.append(key)
        await take_lock(key, *arguments)

    catalog.store.take_lock = take
    async with catalog.claim("mine"):
        raise AssertionError("the writer's lock is free")


@pytest.mark.parametrize("other_target", ["native", "sqlite", pytest.param("mariadb", marks=pytest.mark.endurance)], indirect=True)
async def test_cancelled_claim(other_target: OtherTarget) -> None:
    await _cancelled_while_it_waits_for_the_writer(other_target.url)


async def test_cancelled_claim_of_a_lake(tmp_path: Path) -> None:
    await _cancelled_while_it_waits_for_the_writer(f"spark://{tmp_path / 'lake'}")
