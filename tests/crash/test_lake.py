"""Subscriber and applier of a lake are killed at random, under load; every snapshot that a reader finds is a moment of the publisher's."""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psycopg
import pytest
from deltalake import DeltaTable

from subscriber.interfaces import TableName
from subscriber.sinks.spark.catalog.history import history_name
from subscriber.sinks.spark.catalog.snapshots import Snapshot, read_snapshot
from subscriber.testing.load.mixed_load import MixedLoad
from subscriber.testing.load.tables import TABLES, create_tables
from tests.crash.process import QUICK
from tests.support.database import Database, let_slots_be_created, let_small_transactions_stream
from tests.support.delta_tables import delta_rows
from tests.support.lakes import Place, apply_all, assert_same, storage

KILLS = int(os.environ.get("SUBSCRIBER_LAKE_KILLS", "10"))
LEFT, RIGHT = TableName("public", "left_side"), TableName("public", "right_side")
TOTAL = 40 * 100


class Program:
    """``python -m subscriber …`` as a process, to be killed."""

    def __init__(self, directory: Path, name: str, *arguments: str) -> None:
        self._log = directory / f"{name}.log"
        self._arguments = [sys.executable, "-m", "subscriber", "-v", *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([*self._arguments, *more], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        return self._process

    def kill(self) -> None:
        assert self._process is not None
        assert self._process.poll() is None, f"ended by itself\n{self.log()}"
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def log(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-30:])


class Transfers:
    """A session that moves money between two tables, keys and all; the total never changes."""

    def __init__(self, publisher: Database) -> None:
        for name in (LEFT, RIGHT):
            publisher.execute(
                f"CREATE TABLE {name} (id int PRIMARY KEY, amount int NOT NULL, note text);"
                f"ALTER TABLE {name} ALTER note SET STORAGE EXTERNAL;"
                f"INSERT INTO {name} SELECT i, 50, repeat('n' || i, 2000) FROM generate_series(1, 40) AS i"
            )
        self._dsn = publisher.dsn
        self._stop = threading.Event()
        self.count = 0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Transfers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        dice = random.Random(self.count)
        with psycopg.connect(self._dsn) as session:
            while not self._stop.wait(0.05):
                amount, low, high = dice.randint(1, 9), dice.randint(1, 40), dice.randint(1, 40)
                with session.transaction():
                    session.execute(f"UPDATE {LEFT} SET amount = amount - %s WHERE id %% 1000 = %s", (amount, low))
                    session.execute(
                        f"UPDATE {RIGHT} SET amount = amount + %s, id = (id + 1000) %% 100000 WHERE id %% 1000 = %s", (amount, high)
                    )
                self.count += 1


def check_snapshot(lake: Place, snapshot: Snapshot) -> bool:
    """The money is all there, with its notes; False if the tables are not both in the snapshot yet, or vacuumed away."""
    if not {LEFT, RIGHT} <= snapshot.tables.keys():
        return False
    total = 0
    for name in (LEFT, RIGHT):
        where = snapshot.tables[name]
        rows = delta_rows(DeltaTable(f"{lake}/{where.path}", version=where.version), ["id", "amount", "note"])
        assert sorted(row["id"] % 1000 for row in rows) == list(range(1, 41))
        assert all(row["note"] == f"n{row['id'] % 1000}" * 2000 for row in rows)
        total += sum(row["amount"] for row in rows)
    assert total == TOTAL
    return True


def check_logs(lake: Place, snapshot: Snapshot) -> None:
    """No change is in a change log twice, and none is missing: replayed, it has as many rows as the table."""
    for name, where in snapshot.tables.items():
        if where.path.startswith("history/"):
            continue
        columns = ["_op", "_lsn", "_seq", "_moved"]
        rows = delta_rows(DeltaTable(f"{lake}/log/{name.namespace}/{name.name}"), columns)
        changes = [(row["_lsn"], row["_seq"]) for row in rows if row["_op"] != "c"]
        assert len(changes) == len(set(changes)), name
        count = 0
        for row in sorted(rows, key=lambda row: (row["_lsn"], row["_seq"])):
            match row["_op"]:
                case "t":
                    count = 0
                case "d":
                    count -= 1
                case "u":
                    count += row["_moved"]
                case _:
                    count += 1
        table = DeltaTable(f"{lake}/{where.path}", version=where.version)
        assert count == len(delta_rows(table, ["_special"])), name


def check_histories(lake: Place, snapshot: Snapshot) -> None:
    """At each LSN since both copies the money was all there, with its notes."""
    total, count, start = Counter[int](), Counter[int](), 0
    for name in (LEFT, RIGHT):
        where = snapshot.tables[history_name(name, ())]
        columns = ["id", "amount", "note", "_lsn", "_end_lsn"]
        rows = delta_rows(DeltaTable(f"{lake}/{where.path}", version=where.version), columns)
        start = max(start, min(row["_lsn"] for row in rows))
        for row in rows:
            assert row["note"] == f"n{row['id'] % 1000}" * 2000
            for lsn, sign in ((row["_lsn"], 1), (row["_end_lsn"], -1)):
                if lsn is not None:
                    total[lsn] += sign * row["amount"]
                    count[lsn] += sign
    there, money = 0, 0
    for lsn in sorted(count):
        there, money = there + count[lsn], money + total[lsn]
        assert lsn < start or (there, money) == (80, TOTAL), lsn


def check_files(lake: Path) -> None:
    """Every file of every snapshot that is remembered is there."""
    for document in sorted((lake / "snapshots").glob("*.json")):
        for table in json.loads(document.read_text())["document"]["tables"]:
            for uri in DeltaTable(str(lake / table["path"]), version=table["version"]).file_uris():
                assert Path(uri).exists(), (document.name, uri)


@pytest.mark.crash
@pytest.mark.endurance
@pytest.mark.timeout(240 + 20 * KILLS)
async def test_killed_at_random(publisher18_db: Database, tmp_path: Path) -> None:
    seed = secrets.randbelow(10**6)
    print(f"seed {seed}")
    dice = random.Random(seed)
    publisher, lake = publisher18_db, tmp_path / "lake"
    await create_tables(publisher.dsn, rows=1000)
    transfers = Transfers(publisher)
    publisher.execute("CREATE PUBLICATION pub FOR ALL TABLES WITH (publish_via_partition_root = true)")
    name = f"lake_{publisher.name}"
    target = f"spark://{lake}?history.{LEFT}=scd2&history.{RIGHT}=scd2"
    settings = [argument for setting in (*QUICK, f"spool_directory={tmp_path / 'spool'}") for argument in ("-c", setting)]
    subscriber = Program(
        tmp_path,
        "subscriber",
        *("run", "--connection", publisher.conninfo(), "--publication", "pub", "--target", target),
        *("--name", name, "-o", "two_phase=true", *settings),
    )
    applier = Program(tmp_path, "applier", "spark-apply", str(lake), "--engine", "local", "--target-rows", "2000")
    load = MixedLoad(publisher.dsn, seed=seed, rate=10, sessions=2, huge_rows=500)
    let_slots_be_created(publisher, load)
    enough = asyncio.Event()
    met: Counter[str] = Counter()
    try:
        with transfers:
            running = asyncio.create_task(load.run(enough))
            subscriber.start()
            await there((lake / "subscriber.json").exists, subscriber)
            applier.start()
            await there(partial(publishes, lake), subscriber, applier)
            for number in range(KILLS):
                if number == KILLS // 4:
                    # these kills were amid the copies; no slot will be created any more
                    await there(partial(publishes_all, lake), subscriber, applier)
                    let_small_transactions_stream(publisher, load)
                victim = (subscriber, applier)[number % 2]
                before = read_snapshot(storage(lake))
                # chance, not synchronisation: somewhere in what it does
                await asyncio.sleep(dice.uniform(0, 1.5))
                victim.kill()
                snapshot = read_snapshot(storage(lake))
                assert snapshot is not None
                met["checked"] += await asyncio.to_thread(check_snapshot, lake, snapshot)
                met["moved"] += before is None or snapshot.lsn > before.lsn
                victim.start()
                await there(partial(is_beyond, lake, snapshot), subscriber, applier)
            enough.set()
            await running
        await load.finish()
        subscriber.kill()
        applier.kill()
        status = await asyncio.to_thread(subscriber.start("--until-caught-up").wait, 90)
        assert status == 0, subscriber.log()
    finally:
        enough.set()
        subscriber.end()
        applier.end()
    snapshot = await asyncio.to_thread(apply_all, lake)
    assert await asyncio.to_thread(check_snapshot, lake, snapshot)
    assert_same(lake, snapshot, publisher, [LEFT, RIGHT, *(TableName("load", table) for table in TABLES)])
    await asyncio.to_thread(tidy, lake)
    await asyncio.to_thread(check_logs, lake, snapshot)
    await asyncio.to_thread(check_histories, lake, snapshot)
    await asyncio.to_thread(check_files, lake)
    print(f"{KILLS} kills, {transfers.count} transfers, {load.report.transactions} transactions, {dict(met)}")
    assert met["checked"] >= KILLS // 2


def tidy(lake: Place) -> None:
    """All that is applied becomes change log."""
    from subscriber.sinks.spark.pipeline.applier import Applier
    from subscriber.sinks.spark.pipeline.engines.local_engine import LocalEngine

    Applier(storage(lake), LocalEngine(storage(lake))).tidy(now=True)


def publishes(lake: Place) -> bool:
    snapshot = read_snapshot(storage(lake))
    return snapshot is not None and {LEFT, RIGHT} <= snapshot.tables.keys()


def publishes_all(lake: Place) -> bool:
    snapshot = read_snapshot(storage(lake))
    return snapshot is not None and sum(table.path.startswith("tables/") for table in snapshot.tables.values()) == 2 + len(TABLES)


def is_beyond(lake: Place, before: Snapshot) -> bool:
    snapshot = read_snapshot(storage(lake))
    return snapshot is not None and snapshot.lsn > before.lsn


async def there(condition: Callable[[], bool], *programs: Program, patience: float = 90.0) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, "\n".join(program.log() for program in programs)
        await asyncio.sleep(0.05)
