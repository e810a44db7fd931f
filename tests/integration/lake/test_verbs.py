"""create, alter, drop, status and the launcher on a lake."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from subscriber import (
    ConfigurationError,
    Launcher,
    PublisherError,
    Subscription,
    SubscriptionOptions,
    TableName,
    TargetError,
    Until,
    alter_subscription,
    create_subscription,
    drop_subscription,
    subscription_status,
)
from subscriber.errors import SubscriptionInUse
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.catalog.lake import Lake
from tests.support.database import WAIT_SECONDS, Database
from tests.support.lakes import applied, assert_same, lake_rows, storage
from tests.support.program import Ended, slots, subscriber
from tests.support.replica import QUICK, at_work

T, U = TableName("public", "t"), TableName("public", "u")
TABLES = "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE u (id int PRIMARY KEY, v text); CREATE PUBLICATION pub FOR TABLE t"


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return tmp_path / "lake"


def launched(lake: Path) -> contextlib.AbstractAsyncContextManager[Launcher]:
    return at_work(Launcher(f"spark://{lake}?batch_delay=50ms", settings=QUICK))


async def create(publisher: Database, lake: Path, *publications: str, options: SubscriptionOptions | None = None) -> str:
    name = f"sub_{publisher.name}"
    await create_subscription(
        name,
        connection=publisher.conninfo(),
        publications=publications or ("pub",),
        target=f"spark://{lake}",
        options=options,
        settings=QUICK,
    )
    return name


async def until(lake: Path, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """What ``status --json`` says of the only subscription, once it is as wanted."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        (found,) = (await status(lake))["subscriptions"]
        if wanted(found):
            return dict(found)
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.1)


async def status(lake: Path) -> dict[str, Any]:
    done = await asyncio.to_thread(subscriber, "status", f"--target=spark://{lake}", "--json")
    found: dict[str, Any] = json.loads(done.output)
    return found


async def landed(lake: Path, publisher: Database) -> None:
    """Wait until everything that is committed now is landed, with all tables."""
    lsn = publisher.current_lsn()
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            found = Lake.find(storage(lake))
            assert found is not None
            reached = found.landed() or Lsn(0)
            # a table that was handed over ahead of the stream is of no snapshot yet
            ready = all(
                table.entry.state.value == "r" or (table.entry.state.value == "s" and (table.entry.lsn or Lsn(0)) <= reached)
                for table in found.state.tables.values()
            )
            if ready and found.state.tables and reached >= lsn:
                return
            await asyncio.sleep(0.05)


async def test_life_of_a_subscription_from_create_to_drop(publisher18_db: Database, lake: Path) -> None:
    publisher = publisher18_db
    publisher.execute(TABLES)
    publisher.execute("CREATE PUBLICATION more FOR TABLE u; INSERT INTO t VALUES (1, 'a')")
    name = await create(publisher, lake)
    assert slots(publisher) == [name]
    assert (lake / "definition.json").stat().st_mode & 0o077 == 0
    with pytest.raises(TargetError, match=f'^subscription "{name}" already exists$'):
        await create(publisher, lake)
    target = f"spark://{lake}"
    async with launched(lake):
        await landed(lake, publisher)
        with pytest.raises(SubscriptionInUse, match="launcher of this target"):
            await Launcher(target, settings=QUICK).run()
        publisher.execute("INSERT INTO t VALUES (2, 'b'); INSERT INTO u VALUES (1, 'u')")
        async with alter_subscription(name, target=target, settings=QUICK) as subscription:
            await subscription.add_publications(["more"])
            found = Lake.find(storage(lake))
            assert found is not None
            assert set(found.state.tables) == {T, U}
        await landed(lake, publisher)
        assert_same(lake, await applied(lake), publisher, [T, U])
        async with alter_subscription(name, target=target, settings=QUICK) as subscription:
            await subscription.disable()
        publisher.wait("SELECT count(*) FROM pg_replication_slots WHERE active AND database = current_database()", 0)
        publisher.execute("INSERT INTO t VALUES (3, 'c')")
        renamed = f"{name}_2"
        async with alter_subscription(name, target=target, settings=QUICK) as subscription:
            await subscription.rename(renamed)
            await subscription.set({"streaming": "off", "origin": "none", "synchronous_commit": "on", "run_as_owner": True})
            with pytest.raises(ConfigurationError, match="text format"):
                await subscription.set({"binary": True})
            await subscription.enable()
        (found_status,) = await subscription_status(target)
        options = found_status.observation.definition.options
        assert (options.streaming, options.origin, options.synchronous_commit, options.run_as_owner) == ("off", "none", "on", True)
        await landed(lake, publisher)
        assert_same(lake, await applied(lake), publisher, [T, U])
        # landed, and not applied when it is dropped: it is not lost
        publisher.execute("INSERT INTO t VALUES (4, 'd')")
        await landed(lake, publisher)
        await drop_subscription(renamed, target=target, settings=QUICK)
        assert slots(publisher) == []
        assert await subscription_status(target) == []
    assert not (lake / "definition.json").exists()
    assert_same(lake, await applied(lake), publisher, [T, U])
    with pytest.raises(TargetError, match=r'^subscription "gone" does not exist$'):
        await drop_subscription("gone", target=target)
    with pytest.raises(TargetError, match=f'belonged to subscription "{renamed}"'):
        await create(publisher, lake)
    with pytest.raises(TargetError, match=f'belonged to subscription "{renamed}"'):
        await Subscription("other", connection=publisher.conninfo(), publications=["pub"], target=target).run(Until())
    assert slots(publisher) == []


async def test_a_create_that_fails_leaves_nothing(publisher18_db: Database, lake: Path) -> None:
    publisher18_db.execute(TABLES)
    target = f"spark://{lake}"
    with pytest.raises(PublisherError, match="Connection refused"):
        await create_subscription("mine", connection="host=127.0.0.1 port=1", publications=["pub"], target=target, settings=QUICK)
    assert await subscription_status(target) == []
    with pytest.raises(ConfigurationError, match="text format"):
        await create(publisher18_db, lake, options=SubscriptionOptions(binary=True))
    assert slots(publisher18_db) == []
    # created, and never run: its directory may be used again
    name = await create(publisher18_db, lake)
    await drop_subscription(name, target=target, settings=QUICK)
    assert [path.name for path in lake.iterdir() if not path.name.startswith(".") and path.name != "lock"] == []
    await create(publisher18_db, lake)
    with pytest.raises(TargetError, match=r'belongs to subscription "sub_.*", not "second"'):
        await create_subscription("second", connection=publisher18_db.conninfo(), publications=["pub"], target=target, settings=QUICK)
    with pytest.raises(ConfigurationError, match="is defined in the target's catalog"):
        await Subscription(name, connection=publisher18_db.conninfo(), publications=["pub"], target=target).run(Until())
    await drop_subscription(name, target=target, settings=QUICK)
    assert slots(publisher18_db) == []


async def test_prepared_transactions_that_wait_keep_two_phase(publisher18_db: Database, lake: Path) -> None:
    publisher, target = publisher18_db, f"spark://{lake}"
    publisher.execute(TABLES + "; INSERT INTO t VALUES (1, 'a')")
    name = await create(publisher, lake, options=SubscriptionOptions(two_phase=True))
    async with launched(lake):
        await landed(lake, publisher)
        await until(lake, lambda found: bool(found["two_phase_state"] == "e"))
        publisher.execute("BEGIN; INSERT INTO t VALUES (2, 'b'); PREPARE TRANSACTION 'waits'")
        async with asyncio.timeout(WAIT_SECONDS):
            while not list(lake.glob("prepared/*/prepared.json")):
                await asyncio.sleep(0.05)
        async with alter_subscription(name, target=target, settings=QUICK) as subscription:
            await subscription.disable()
        async with alter_subscription(name, target=target, settings=QUICK) as subscription:
            with pytest.raises(ConfigurationError, match='cannot disable "two_phase" when prepared transactions exist'):
                await subscription.set({"two_phase": False})
            await subscription.enable()
        assert ("2", "b") not in lake_rows(lake, await applied(lake), T, ["id", "v"])
        publisher.execute("COMMIT PREPARED 'waits'")
        await landed(lake, publisher)
        assert_same(lake, await applied(lake), publisher, [T])
        publisher.execute("BEGIN; INSERT INTO t VALUES (3, 'c'); PREPARE TRANSACTION 'left'")
        async with asyncio.timeout(WAIT_SECONDS):
            while not list(lake.glob("prepared/*/prepared.json")):
                await asyncio.sleep(0.05)
    done = await asyncio.to_thread(subscriber, "drop", name, f"--target={target}")
    assert done.status == 0, done.errors
    assert "prepared transactions were waiting for their COMMIT PREPARED and were removed with the subscription: left" in done.errors
    publisher.execute("ROLLBACK PREPARED 'left'")
    assert slots(publisher) == []


def _bytes_behind(lake: Path, lsn: Lsn) -> int:
    return sum(path.stat().st_size for path in lake.glob("landing/*.parquet") if int(path.name.split("-")[0]) > lsn)


async def test_skip(publisher18_db: Database, lake: Path) -> None:
    publisher, target = publisher18_db, f"spark://{lake}"
    publisher.execute(TABLES + "; INSERT INTO t VALUES (1, 'a')")
    name = await create(publisher, lake)
    async with launched(lake):
        await landed(lake, publisher)
        async with alter_subscription(name, target=target, settings=QUICK) as subscription:
            await subscription.disable()
        publisher.wait("SELECT count(*) FROM pg_replication_slots WHERE active AND database = current_database()", 0)
        publisher.execute("INSERT INTO t VALUES (2, 'unwanted')")
        publisher.execute("INSERT INTO t VALUES (3, 'c')")
        peek = (
            f"SELECT data FROM pg_logical_slot_peek_binary_changes('{name}', NULL, NULL, 'proto_version', '1', 'publication_names', 'pub')"
        )
        commits = [bytes(data) for (data,) in publisher.fetch(peek) if bytes(data)[:1] == b"C"]
        lsn = Lsn(int.from_bytes(commits[0][2:10], "big"))
        done = await asyncio.to_thread(subscriber, "alter", name, f"--target={target}", "--skip-lsn=0/1")
        assert done.errors.startswith("subscriber: skip WAL location (LSN 0/1) must be greater than origin LSN ")
        for change in (f"--skip-lsn={lsn}", "--enable"):
            done = await asyncio.to_thread(subscriber, "alter", name, f"--target={target}", change)
            assert (done.status, done.errors) == (0, "")
        await landed(lake, publisher)
        assert set(lake_rows(lake, await applied(lake), T, ["id", "v"])) == {("1", "a"), ("3", "c")}
        await until(lake, lambda found: found["skip_lsn"] is None and found["state"] == "running")
    await drop_subscription(name, target=target, settings=QUICK)


async def test_disable_on_error(publisher18_db: Database, lake: Path) -> None:
    publisher, target = publisher18_db, f"spark://{lake}"
    publisher.execute(TABLES + "; INSERT INTO t VALUES (1, 'a')")
    name = await create(publisher, lake, options=SubscriptionOptions(disable_on_error=True))
    async with launched(lake):
        await landed(lake, publisher)
        (lake / "landing").rename(lake / "moved")
        (lake / "landing").write_text("no directory")
        publisher.execute("INSERT INTO t VALUES (2, 'b')")
        found = await until(lake, lambda found: not found["enabled"])
        assert found["last_error"].startswith(f"cannot write {lake}/landing")
        assert found["last_error"].endswith("(hint: the lake needs a directory of its own)")
        (lake / "landing").unlink()
        (lake / "moved").rename(lake / "landing")
        done = await asyncio.to_thread(subscriber, "alter", name, f"--target={target}", "--enable")
        assert (done.status, done.errors) == (0, "")
        await landed(lake, publisher)
        assert_same(lake, await applied(lake), publisher, [T])
    await drop_subscription(name, target=target, settings=QUICK)


async def test_table_changed_by_another_writer_is_copied_again(publisher18_db: Database, lake: Path) -> None:
    publisher18_db.execute(f"{TABLES}, u; INSERT INTO t VALUES (1, 'a'); INSERT INTO u VALUES (1, 'a')")
    name = await create(publisher18_db, lake)
    async with launched(lake):
        await landed(lake, publisher18_db)
        before = await applied(lake)
        DeltaTable(str(lake / before.tables[T].path)).delete()
        publisher18_db.execute("INSERT INTO t VALUES (2, 'b'); INSERT INTO u VALUES (2, 'b')")
        await landed(lake, publisher18_db)
        snapshot = await applied(lake)
        assert set(snapshot.tables) == {U}
        assert_same(lake, snapshot, publisher18_db, [U])
        found = await until(lake, lambda _: True)
        assert {item["name"]: bool(item["parked"]) for item in found["tables"]} == {"t": True, "u": False}
        text = await asyncio.to_thread(subscriber, "status", f"--target=spark://{lake}")
        assert found["tables_by_state"]["p"] == 1
        assert [item["state"] for item in found["tables"]] in (["p", "r"], ["p", "s"])
        assert re.search(r"^  tables        1 (ready|synchronized), 1 parked$", text.output, re.MULTILINE)
        assert re.search(r"^    public.t: parked since \S+ \S+, [0-9A-F]+/[0-9A-F]+: ", text.output, re.MULTILINE)
        assert f": Delta table {lake}/tables/public/t was changed by another writer, in version 2 " in text.output
        checked = await asyncio.to_thread(subscriber, "status", f"--target=spark://{lake}", "--check")
        assert checked.status == 1, checked.output
        assert "parked: public.t since " in checked.output
        refused = await asyncio.to_thread(subscriber, "alter", name, f"--target=spark://{lake}", "--resync=public.nosuch")
        assert 'table "public.nosuch" is not published any more' in refused.errors
        # the command of the hint, as it is
        command = re.search(r"copy it again: subscriber (alter .*?);", text.output)
        assert command is not None
        done = await asyncio.to_thread(subscriber, *shlex.split(command[1]))
        assert done.status == 0, done.errors
        publisher18_db.execute("INSERT INTO t VALUES (3, 'c')")
        await landed(lake, publisher18_db)
        snapshot = await applied(lake)
        assert not snapshot.stopped
        assert_same(lake, snapshot, publisher18_db, [T, U])
        found = await until(lake, lambda _: True)
        assert [item["parked"] for item in found["tables"]] == [None, None]


async def test_recover(publisher18_db: Database, publisher16_db: Database, lake: Path) -> None:
    publisher, target = publisher18_db, f"spark://{lake}"
    publisher.execute(f"{TABLES}, u; INSERT INTO t VALUES (1, 'a'), (2, 'b'); INSERT INTO u VALUES (1, 'a')")
    publisher16_db.execute(TABLES)
    name = await create(publisher, lake)

    async def recover(*arguments: str) -> Ended:
        return await asyncio.to_thread(subscriber, "recover", name, f"--target={target}", *arguments)

    async with launched(lake):
        await landed(lake, publisher)
        before = await applied(lake)
        done = await recover("--dry-run")
        assert (done.status, "has lost nothing" in done.errors) == (1, True)
        # landed, and not applied: it belongs to the old versions
        publisher.execute("INSERT INTO t VALUES (3, 'c')")
        await landed(lake, publisher)
    publisher.wait(f"SELECT active FROM pg_replication_slots WHERE slot_name = '{name}'", False)
    publisher.execute(f"SELECT pg_drop_replication_slot('{name}'); DELETE FROM t WHERE id = 1; UPDATE t SET v = 'lost' WHERE id = 2")
    documents = {path.name: path.read_bytes() for path in lake.glob("*.json")}
    done = await recover("--dry-run")
    assert (done.status, f'replication slot "{name}" does not exist' in done.output) == (0, True), done.errors
    assert "public.t: copied into new versions, " in done.output
    assert {path.name: path.read_bytes() for path in lake.glob("*.json")} == documents
    for arguments in ((), ("--force",)):
        done = await recover(*arguments)
        assert done.status == 0, done.errors
    # readers have the old versions until the new ones are complete
    assert set(lake_rows(lake, before, T, ["id", "v"])) == {("1", "a"), ("2", "b")}
    publisher.execute("INSERT INTO t VALUES (4, 'later'); INSERT INTO u VALUES (2, 'later')")
    async with launched(lake):
        await until(lake, lambda found: all(item["state"] in {"s", "r"} for item in found["tables"]))
        publisher.execute("INSERT INTO t VALUES (5, 'followed')")
        await landed(lake, publisher)
        assert_same(lake, await applied(lake), publisher, [T, U])
        async with alter_subscription(name, target=target, settings=QUICK) as subscription:
            await subscription.set_connection(publisher16_db.conninfo())
            await subscription.disable()
        done = await recover()
        assert (done.status, "the versions of a lake cannot continue" in done.errors, done.errors.count("\n")) == (1, True, 1)
        async with alter_subscription(name, target=target, settings=QUICK) as subscription:
            await subscription.set_connection(publisher.conninfo())
    await drop_subscription(name, target=target, settings=QUICK)


async def test_status_tells_of_the_applier_too(publisher18_db: Database, lake: Path) -> None:
    publisher, target = publisher18_db, f"spark://{lake}"
    publisher.execute(TABLES + "; INSERT INTO t VALUES (1, 'a')")
    missing = await asyncio.to_thread(subscriber, "status", f"--target={target}")
    assert (missing.status, missing.errors.split(" (hint")[0]) == (1, f"subscriber: directory {lake} does not exist")
    name = await create(publisher, lake, options=SubscriptionOptions(enabled=False))
    await until(lake, lambda found: bool(found["state"] == "disabled"))
    async with alter_subscription(name, target=target, settings=QUICK) as subscription:
        await subscription.enable()
    found = await until(lake, lambda found: bool(found["state"] == "not_running"))
    assert found["applier"]["pid"] is None
    assert found["applier"]["published_lsn"] is None
    async with launched(lake):
        await landed(lake, publisher)
        snapshot = await applied(lake)
        publisher.execute("INSERT INTO t VALUES (2, 'b')")
        await landed(lake, publisher)
        found = await until(lake, lambda found: bool(found["applier"]["waiting_batches"]) and found["state"] == "running")
        assert found["publisher"]["slot_active"] is True
        assert found["tables_by_state"] in ({"r": 1}, {"s": 1})
        assert found["applier"]["published_lsn"] == str(snapshot.lsn)
        assert found["applier"]["waiting_batches"] == 1
        assert found["applier"]["waiting_bytes"] == _bytes_behind(lake, snapshot.lsn)
        text = await asyncio.to_thread(subscriber, "status", f"--target={target}")
        assert text.output.startswith(f"{name}: running, PID ")
        assert f"  applier       not running, published {snapshot.lsn}, 1 batches, " in text.output
        snapshot = await applied(lake)
        found = await until(lake, lambda found: not found["applier"]["waiting_batches"])
        assert found["applier"]["progress"][-1]["sources"][0]["endOffset"] == str(snapshot.lsn)
        assert found["applier"]["written_bytes"] > 0
        text = await asyncio.to_thread(subscriber, "status", f"--target={target}")
        assert re.search(r"    freshness   \d+\.\d s, target 2 s.*written, \d+\.\d for each landed byte", text.output)
        assert found["stats_reset"] is None
        assert Lsn.parse(found["applier"]["published_lsn"]) >= snapshot.lsn
    await drop_subscription(name, target=target, settings=QUICK)
