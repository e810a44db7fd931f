"""The catalog of subscriptions in a target of SQLAlchemy: verbs, launcher and status."""

from __future__ import annotations

import asyncio
import os
import stat
from collections import Counter
from collections.abc import AsyncIterator, Mapping

import pytest

from subscriber import ConfigurationError, Lsn, SubscriptionInUse, SubscriptionOptions, TableName, TableState, TargetError
from subscriber.catalog import Definition, subscriptions
from subscriber.catalog.statistics import Reporter
from subscriber.catalog.store import writer_key
from subscriber.interfaces import TwoPhaseState, WorkerActivity
from subscriber.sinks.sqlalchemy.catalog.subscriptions import SqlAlchemyCatalog, observe
from subscriber.sinks.sqlalchemy.catalog_tables import TABLES
from subscriber.sinks.sqlalchemy.session.database import Database
from subscriber.sinks.sqlalchemy.session.locks import Locks
from tests.support.sqlalchemy_targets import OtherTarget

OPTIONS = SubscriptionOptions(binary=True, streaming="on", disable_on_error=True, origin="none", failover=True, two_phase=True)


def defined(name: str, **more: object) -> Definition:
    values = {
        "enabled": True,
        "conninfo": "host=nowhere password=hush",
        "slot_name": "slot",
        "publications": ("a", "b,\"c'"),
        "options": OPTIONS,
        "two_phase": TwoPhaseState.PENDING,
    }
    return Definition(name=name, **(values | more))  # type: ignore[arg-type]


@pytest.fixture
async def catalog(other_target: OtherTarget) -> AsyncIterator[SqlAlchemyCatalog]:
    found = await SqlAlchemyCatalog.open(other_target.url)
    yield found
    await found.close()


async def test_stored_subscription_is_read_back(catalog: SqlAlchemyCatalog, other_target: OtherTarget) -> None:
    async with catalog.create(defined("ünlike \"any' other")) as made:
        assert made.oid >= 16384
        assert (made.enabled, made.made, made.claimed) == (False, False, True)
        await catalog.update(made.oid, {"made": True, "enabled": True})
    (found,) = await catalog.subscriptions()
    expected = defined("ünlike \"any' other", oid=made.oid)
    assert found == expected
    await catalog.update(found.oid, {"skip_lsn": Lsn.parse("16/B374D848"), "streaming": "off", "publications": ["x"], "slot_name": None})
    await catalog.update(found.oid, {"pending_refresh": False, "two_phase": TwoPhaseState.ENABLED, "binary": False})
    (found,) = await catalog.subscriptions()
    assert (str(found.skip_lsn), found.options.streaming, found.publications, found.slot_name) == ("16/B374D848", "off", ("x",), None)
    assert (found.pending_refresh, found.two_phase, found.options.binary) == (False, TwoPhaseState.ENABLED, False)
    (seen,) = await observe(other_target.url)
    assert seen.definition == found
    assert set(seen.counters.values()) == {0}
    assert (seen.pid, seen.worker, seen.tables, seen.last_error) == (None, None, (), None)


async def test_names_are_unique_and_not_cut_off(catalog: SqlAlchemyCatalog) -> None:
    oids = {}
    for name in ("one", "One", "x" * 63):
        async with catalog.create(defined(name)) as made:
            oids[name] = made.oid
    assert len(set(oids.values())) == 3
    with pytest.raises(TargetError, match=r'^subscription "one" already exists$') as caught:
        async with catalog.create(defined("one")):
            pass
    assert caught.value.sqlstate == "42710"
    with pytest.raises(TargetError, match=r'^subscription "one" already exists$'):
        await catalog.update(oids["One"], {"name": "one"})
    await catalog.update(oids["one"], {"name": "one"})
    for name in ("", "x" * 64, "ü" * 32, "a\0b"):
        with pytest.raises(ConfigurationError, match="is empty or longer than 63 bytes"):
            await catalog.update(oids["one"], {"name": name})
    assert [found.name for found in await catalog.subscriptions()] == ["One", "one", "x" * 63]


async def test_a_claim_keeps_others_away(catalog: SqlAlchemyCatalog, other_target: OtherTarget) -> None:
    async with catalog.create(defined("mine")):
        pass
    other = await SqlAlchemyCatalog.open(other_target.url)
    try:
        async with catalog.claim("mine") as claimed:
            assert claimed.generation == 1
            assert [found.claimed for found in await other.subscriptions()] == [True]
            fence = f"SELECT token FROM {other_target.ours('fence')}"
            assert other_target.fetch(fence) == [(1,)]
            waiting = asyncio.create_task(_claim(other, "mine"))
            assert not waiting.done()
        assert await waiting == 2
        assert [found.claimed for found in await other.subscriptions()] == [False]
        with pytest.raises(TargetError, match=r'^subscription "gone" does not exist$'):
            await _claim(other, "gone")
    finally:
        await other.close()


async def _claim(catalog: SqlAlchemyCatalog, name: str) -> int:
    async with catalog.claim(name) as found:
        return found.generation


async def test_a_claim_waits_for_the_writer(catalog: SqlAlchemyCatalog, other_target: OtherTarget) -> None:
    async with catalog.create(defined("mine")) as made:
        pass
    database = Database(other_target.url)
    locks = Locks(database)
    try:
        await locks.take(writer_key(made.oid), "the subscription")
        claiming = asyncio.create_task(_claim(catalog, "mine"))
        # the writer sees the claim
        observer = await SqlAlchemyCatalog.open(other_target.url)
        while not (await observer.subscriptions())[0].claimed:
            await asyncio.sleep(0.02)
        assert not claiming.done()
        await locks.release(writer_key(made.oid))
        assert await claiming == 1
        await observer.close()
    finally:
        await locks.close()
        await database.close()


async def test_one_launcher(catalog: SqlAlchemyCatalog, other_target: OtherTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriptions, "_LAUNCHER_SECONDS", 0.2)
    await catalog.become_launcher()
    await catalog.wait(0.01)
    other = await SqlAlchemyCatalog.open(other_target.url)
    try:
        with pytest.raises(SubscriptionInUse, match="the launcher of this target") as caught:
            await other.become_launcher()
        assert caught.value.hint == "one `subscriber run --target` serves all subscriptions of a target: stop the other one first"
        monkeypatch.undo()
        await catalog.close()
        await other.become_launcher()
    finally:
        await other.close()


class Counted:
    """Counters, as a sink keeps them."""

    def __init__(self, **counters: int) -> None:
        self.counters = Counter(counters)

    def unwritten(self, name: str) -> int:
        return self.counters[name]

    def wrote(self, counted: Mapping[str, int]) -> None:
        self.counters.subtract(counted)


async def test_reports_of_workers_are_visible_while_they_run(catalog: SqlAlchemyCatalog, other_target: OtherTarget) -> None:
    async with catalog.create(defined("mine")) as made:
        pass
    database = catalog.store.database
    async with database.writing() as connection:
        for relid, name, state in ((20000, "ready", "r"), (20001, "copying", "d")):
            await connection.execute(
                TABLES["pg_subscription_rel"]
                .insert()
                .values(srsubid=made.oid, srrelid=relid, srnspname="public", srrelname=name, srsubstate=state, srsublsn=Lsn(5))
            )
    apply = WorkerActivity(
        received=Lsn(2**40), applied=Lsn(3), flushed=None, received_at=1.5, transactions=7, changes=8, transactions_per_second=0.5
    )
    copying = WorkerActivity(table=TableName("public", "copying"), copied_rows=11, estimated_rows=12)
    dropped = WorkerActivity(table=TableName("public", "gone"))
    tally = Counted(confl_insert_exists=2, apply_error_count=1)
    reporter = Reporter(catalog.store.transaction, catalog.store.now, made.oid, tally)
    await reporter.report([apply, copying, dropped], None)
    await reporter.report([apply, copying, dropped], "it failed")
    tally.counters["confl_insert_exists"] += 3
    await reporter.report([apply, copying, dropped], None)
    (seen,) = await observe(other_target.url)
    assert seen.worker is None, "nobody holds the writer's lock"
    assert (seen.counters["confl_insert_exists"], seen.counters["apply_error_count"]) == (5, 1)
    assert seen.last_error == "it failed"
    assert seen.last_error_time is not None
    locks = Locks(database)
    try:
        await locks.take(writer_key(made.oid), "it")
        (seen,) = await observe(other_target.url)
    finally:
        await locks.close()
    assert seen.worker == apply
    assert seen.pid == os.getpid()
    assert [(found.table.name, found.entry.state, found.entry.lsn, found.worker) for found in seen.tables] == [
        ("copying", TableState.DATASYNC, None, copying),
        ("ready", TableState.READY, Lsn(5), None),
    ]


async def test_nothing_stays_of_one_that_is_removed(catalog: SqlAlchemyCatalog, other_target: OtherTarget) -> None:
    async with catalog.create(defined("mine")) as made, catalog.create(defined("other's")) as others:
        await Reporter(catalog.store.transaction, catalog.store.now, made.oid, Counted()).report([WorkerActivity()], None)
        await catalog.note_error(others.oid, "some error")
        assert list(await catalog.remove(made.oid)) == []
        for table, column in (("pg_subscription", "oid"), ("fence", "srsubid"), ("worker", "subid"), ("subscription_stats", "subid")):
            left = {oid for (oid,) in other_target.fetch(f"SELECT {column} FROM {other_target.ours(table)}")}
            assert left <= {others.oid}, table
    (seen,) = await observe(other_target.url)
    assert (seen.definition.name, seen.last_error) == ("other's", "some error")


async def test_looking_makes_nothing(other_target: OtherTarget) -> None:
    if other_target.path is None:
        assert await observe(other_target.url) == []
    else:
        with pytest.raises(TargetError, match=f'^file "{other_target.path}" does not exist$'):
            await observe(other_target.url)
        assert list(other_target.path.parent.iterdir()) == []
    assert not other_target.has_catalog()


async def test_a_new_file_is_its_owners_alone(sqlite_file: OtherTarget) -> None:
    catalog = await SqlAlchemyCatalog.open(sqlite_file.url)
    await catalog.close()
    assert sqlite_file.path is not None
    for path in sqlite_file.path.parent.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


async def test_a_catalog_of_another_version_is_refused(catalog: SqlAlchemyCatalog, other_target: OtherTarget) -> None:
    other_target.execute(f"UPDATE {other_target.ours('version')} SET version = 99")
    with pytest.raises(TargetError, match="version 99") as caught:
        await observe(other_target.url)
    assert caught.value.hint == "use the version of pg-subscriber that created it"
    with pytest.raises(TargetError, match="version 99"):
        await SqlAlchemyCatalog.open(other_target.url)
