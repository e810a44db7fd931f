"""Many small tables in a lake: they are copied in groups, and none is lost or repeated if a catalog's write fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from subscriber import Subscription, TableName, TargetError, Until
from subscriber.errors import TargetUnavailable
from subscriber.sinks.spark.catalog import lake as catalog
from subscriber.sinks.spark.copy.table_group import SparkTableGroup
from subscriber.sinks.spark.files.documents import write_document
from subscriber.sinks.spark.files.storage import Storage
from tests.support.database import WAIT_SECONDS, Database
from tests.support.examples import some_and_others
from tests.support.lakes import applied, apply_all, assert_same
from tests.support.replica import QUICK
from tests.support.table_groups import hook_before_copy, record_snapshot_slots

NAMES = [f"t{number}" for number in range(10)]
TABLES = [TableName("public", name) for name in NAMES]


@pytest.fixture
def publisher(publisher18_db: Database) -> Database:
    """Tables of two rows each, published."""
    publisher18_db.execute(";".join(f"CREATE TABLE {name} (id int PRIMARY KEY, v text)" for name in NAMES))
    publisher18_db.execute(";".join(f"INSERT INTO {name} VALUES (1, 'one'), (2, 'two')" for name in NAMES))
    publisher18_db.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    return publisher18_db


def subscription(publisher: Database, lake: Path) -> Subscription:
    name = f"lake_{publisher.name}"
    return Subscription(name, connection=publisher.conninfo(), publications=["pub"], target=f"spark://{lake}", settings=QUICK)


def change_all(publisher: Database, value: str) -> None:
    publisher.execute(";".join(f"UPDATE {name} SET v = '{value}' WHERE id = 1; DELETE FROM {name} WHERE id = 2" for name in NAMES))


async def test_two_snapshots_for_all_tables(publisher: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = record_snapshot_slots(monkeypatch)
    lake = tmp_path / "lake"
    writes: list[str] = []

    def write(storage: Storage, name: str, document: Mapping[str, Any] | str, **options: Any) -> None:
        writes.append(name)
        write_document(storage, name, document, **options)

    monkeypatch.setattr(catalog, "write_document", write)
    await subscription(publisher, lake).run(Until())
    assert snapshots == [True, True]
    # the bug was that it was written for each table: with thousands of tables, most of the time went into that
    assert writes.count(catalog.CATALOG) < len(TABLES)
    assert_same(lake, await applied(lake), publisher, TABLES)
    change_all(publisher, "changed")
    await subscription(publisher, lake).run(Until())
    assert_same(lake, await applied(lake), publisher, TABLES)
    assert publisher.value("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == 1


async def test_a_table_that_changes_while_it_is_copied(publisher: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = record_snapshot_slots(monkeypatch)
    replica = subscription(publisher, tmp_path / "lake")

    async def change(table: str) -> None:
        if table == "t3":
            publisher.execute("INSERT INTO t3 VALUES (3, 'new'); UPDATE t3 SET v = 'changed' WHERE id = 1")
            lsn = publisher.current_lsn()
            async with asyncio.timeout(WAIT_SECONDS):
                while replica.status.received < lsn:
                    await asyncio.sleep(0.02)

    hook_before_copy(monkeypatch, SparkTableGroup)(change)
    await replica.run(Until())
    assert snapshots.count(False) == 1
    assert_same(tmp_path / "lake", await applied(tmp_path / "lake"), publisher, TABLES)


@some_and_others(
    ["number", "error", "stored", "read"],
    [
        (10, TargetUnavailable, True, True),
        (10, TargetUnavailable, True, False),
        (10, TargetError, False, False),
        (1, TargetError, True, True),
    ],
    [
        *(
            (10, error, *when)
            for error, when in ((TargetUnavailable, (False, False)), (TargetError, (True, True)), (TargetError, (True, False)))
        ),
        *((1, error, *when) for error in (TargetUnavailable, TargetError) for when in ((True, False), (False, False))),
        (1, TargetUnavailable, True, True),
    ],
)
async def test_a_failed_write_of_the_catalog(
    publisher: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stored: bool,
    read: bool,
    error: type[TargetError],
    number: int,
) -> None:
    """Its error does not say whether SYNCDONE was stored. The applier may have read it. Later changes are neither lost nor repeated."""
    tables = TABLES[:number]
    if number == 1:
        publisher.execute("DROP PUBLICATION pub; CREATE PUBLICATION pub FOR TABLE t0")
    failures: list[str] = []

    def write(storage: Storage, name: str, document: Mapping[str, Any] | str, **options: Any) -> None:
        content = json.loads(document) if isinstance(document, str) else document
        ours = [item for item in content.get("tables", ()) if item.get("name") == ["public", tables[number // 2].name]]
        if failures or not ours or ours[0]["state"] != "s":
            write_document(storage, name, document, **options)
            return
        failures.append(name)
        if stored:
            write_document(storage, name, document, **options)
            if read:
                apply_all(tmp_path / "lake")
        change_all(publisher, "changed")
        raise error("the catalog cannot be written")

    monkeypatch.setattr(catalog, "write_document", write)
    lake = tmp_path / "lake"
    # the run retries if the target is unavailable, and may end at other errors
    with contextlib.suppress(TargetError):
        await subscription(publisher, lake).run(Until())
    assert failures == [catalog.CATALOG]
    change_all(publisher, "changed again")
    await subscription(publisher, lake).run(Until())
    assert_same(lake, await applied(lake), publisher, tables)


async def test_a_catalog_that_is_gone(publisher: Database, tmp_path: Path) -> None:
    """Without its catalog, a lake would begin again, and take its Delta tables for the new copies."""
    lake = tmp_path / "lake"
    await subscription(publisher, lake).run(Until())
    await applied(lake)
    (lake / catalog.CATALOG).unlink()
    with pytest.raises(TargetError, match=r"catalog\.json is gone"):
        await subscription(publisher, lake).run(Until())
    with pytest.raises(TargetError, match=r"catalog\.json is gone"):
        await applied(lake)
