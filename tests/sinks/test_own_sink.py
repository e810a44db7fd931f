"""The compliance suite over the sink in docs/howto/own-sink.md, exactly as the page shows it."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from subscriber import (
    ConfigurationError,
    PublisherError,
    Subscription,
    SubscriptionOptions,
    TargetError,
    check,
    copy_schema,
    drop_subscription,
    repair,
    sync_sequences,
    verify,
)
from subscriber.subscription.management.status import subscription_status
from subscriber.testing.compliance import SCENARIOS, Scenario
from tests.support.code_blocks import Block, blocks
from tests.support.database import Database
from tests.support.replica import at_work


def _block(part: str) -> Block:
    (found,) = [block for block in blocks() if block.page == "docs/howto/own-sink.md" and part in block.text]
    return found


def own_sink() -> dict[str, Any]:
    """What the block of the sink defines."""
    names: dict[str, Any] = {}
    exec(_block("class JsonSink(").text, names)
    return names


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
async def test_compliance(scenario: Scenario, tmp_path: Path) -> None:
    names = own_sink()
    exec(_block("class JsonTarget").text, names)
    await scenario.run(names["JsonTarget"](tmp_path))


async def test_two_phase_is_refused_before_the_publisher_is_asked(tmp_path: Path) -> None:
    sink = own_sink()["JsonSink"](tmp_path)
    options = SubscriptionOptions(two_phase=True)
    with pytest.raises(ConfigurationError, match=r"^this kind of target cannot hold prepared transactions$"):
        await check("replica", connection="host=/nowhere", publications=["pub"], target=sink, options=options)
    with pytest.raises(ConfigurationError, match=r"^this kind of target cannot hold prepared transactions$"):
        Subscription("replica", connection="host=/nowhere", publications=["pub"], target=sink, options=options)


async def test_a_slot_that_sends_prepared_transactions_is_refused(publisher18_db: Database, tmp_path: Path) -> None:
    sink, slot = own_sink()["JsonSink"](tmp_path), f"slot_{publisher18_db.name}"
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR TABLE t")
    publisher18_db.fetch(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput', twophase => true)")
    options = SubscriptionOptions(create_slot=False, copy_data=False, slot_name=slot)
    subscription = Subscription("replica", connection=publisher18_db.dsn, publications=["pub"], target=sink, options=options)
    with pytest.raises(PublisherError, match=r"sends prepared transactions, which this kind of target cannot hold$"):
        await subscription.run()
    publisher18_db.fetch(f"SELECT pg_drop_replication_slot('{slot}')")
    publisher18_db.fetch(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    subscription = Subscription("replica", connection=publisher18_db.dsn, publications=["pub"], target=sink, options=options)
    async with at_work(subscription):
        await subscription.wait_for(publisher18_db.current_lsn())
    with publisher18_db.connect(replication="database") as session:
        session.execute(f'ALTER_REPLICATION_SLOT "{slot}" (TWO_PHASE true)')
    subscription = Subscription("replica", connection=publisher18_db.dsn, publications=["pub"], target=sink, options=options)
    with pytest.raises(PublisherError, match=r"sends prepared transactions, which this kind of target cannot hold$"):
        await subscription.run()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The page's package as pip would install it. Returns the URL of a target."""
    site = tmp_path / "site"
    metadata = site / "json_sink-1.dist-info"
    metadata.mkdir(parents=True)
    (site / "json_sink.py").write_text(_block("class JsonSink(").text + _block("class JsonKind").text)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: json-sink\nVersion: 1\n")
    ((group, points),) = tomllib.loads(_block("[project.entry-points").text)["project"]["entry-points"].items()
    (metadata / "entry_points.txt").write_text("\n".join([f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]))
    monkeypatch.syspath_prepend(str(site))
    (tmp_path / "copies").mkdir()
    return f"json://{tmp_path / 'copies'}"


async def test_its_url_has_verify_and_repair(installed: str, publisher18_db: Database) -> None:
    publisher18_db.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE bag (v float8); INSERT INTO bag SELECT 0.1 FROM generate_series(1, 3);"
        "INSERT INTO t SELECT i, repeat('x', i) FROM generate_series(1, 9) AS i; CREATE PUBLICATION pub FOR ALL TABLES"
    )
    options = SubscriptionOptions.parse(["where.public.t=id < 8"])
    subscription = Subscription("replica", connection=publisher18_db.dsn, publications=["pub"], target=installed, options=options)
    with pytest.raises(TargetError, match=r'^subscription "replica" does not exist'):
        await verify("replica", target=installed, connection=publisher18_db.dsn)
    async with at_work(subscription):
        publisher18_db.execute("UPDATE t SET v = 'y' WHERE id = 3; INSERT INTO bag VALUES (NULL)")
        await subscription.wait_for(publisher18_db.current_lsn())
        found = await verify("replica", target=installed, connection=publisher18_db.dsn)
        assert found.equal
        counts = [(str(each.table), each.publisher_rows, each.target_rows) for each in found.tables]
        assert counts == [("public.bag", 4, 4), ("public.t", 7, 7)]
        file = Path(installed.removeprefix("json://")) / "replica.json"
        document = json.loads(file.read_text())
        rows = document["tables"]["public.t"]
        rows[0]["v"] = "other"
        del rows[1]
        rows.append({"id": "70", "v": None})
        file.write_text(json.dumps(document))
        found = await verify("replica", target=installed, connection=publisher18_db.dsn)
        (differing,) = found.differing
        assert sorted((each.kind.value, *each.key.values()) for each in differing.differences) == [
            ("different", "1"),
            ("extra", "70"),
            ("missing", "2"),
        ]
        assert sum((await repair(found, target=installed)).values()) == 3
        assert (await verify("replica", target=installed, connection=publisher18_db.dsn)).equal
    with pytest.raises(TargetError, match="is not running"):
        await verify("replica", target=installed, connection=publisher18_db.dsn)


async def test_binary_is_refused_before_a_slot_is_created(installed: str, publisher18_db: Database) -> None:
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR TABLE t")
    given: dict[str, Any] = {
        "connection": publisher18_db.dsn,
        "publications": ["pub"],
        "target": installed,
        "options": SubscriptionOptions(binary=True),
    }
    found = await check("replica", **given)
    assert [(each.severity, each.hint) for each in found] == [("error", "set binary to false")]
    with pytest.raises(TargetError, match="only values in the text format"):
        await Subscription("replica", **given).run()
    assert publisher18_db.fetch("SELECT FROM pg_replication_slots WHERE database = current_database()") == []


async def test_verbs_say_what_its_kind_lacks(installed: str) -> None:
    lacks = "^a directory of JSON files has no "
    with pytest.raises(ConfigurationError, match=f"{lacks}catalog of subscriptions$"):
        await subscription_status(installed)
    with pytest.raises(ConfigurationError, match=f"{lacks}sequences$"):
        await sync_sequences(target=installed, connection="host=/nowhere", sequences=["all"])
    with pytest.raises(ConfigurationError, match=f"{lacks}keys, indexes and constraints$"):
        await copy_schema(target=installed, connection="host=/nowhere")


async def test_without_a_catalog_a_hint_says_how_to_remove_a_subscription(installed: str) -> None:
    with pytest.raises(ConfigurationError) as found:
        await drop_subscription("replica", target=installed)
    assert str(found.value.hint).endswith("to remove a subscription, drop its slot on the publisher, and delete what the target stores")
