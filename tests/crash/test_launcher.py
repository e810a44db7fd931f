"""Publisher, target and launcher are killed in turn, twenty times each, while two subscriptions follow a mixed load and are refreshed."""

from __future__ import annotations

import asyncio
import random
import secrets
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psycopg
import pytest

from subscriber import (
    Settings,
    SubscriberError,
    SubscriptionOptions,
    TableName,
    alter_subscription,
    create_subscription,
    drop_subscription,
)
from subscriber.testing.comparison import compare, compare_prepared
from subscriber.testing.load.mixed_load import Kind
from subscriber.testing.load.tables import table_names
from subscriber.testing.server import EmbeddedServer
from tests.crash.scenario import make_load, make_tables, under_load
from tests.support.database import Database, ServerAddress

KILLS = 20
QUICK = Settings(wal_retrieve_retry_interval=0.2, wal_receiver_status_interval=1.0)
SETTINGS = ("wal_retrieve_retry_interval=200ms", "wal_receiver_status_interval=1s", "logical_decoding_work_mem=128kB", "batch_rows=500")
PATIENCE = 120.0
LAUNCHES = (
    "SELECT count(*) FROM pg_stat_activity a JOIN pg_locks l ON l.pid = a.pid AND l.locktype = 'advisory' AND l.granted "
    "WHERE a.application_name = 'subscriber launcher'"
)


class LauncherScenario:
    """Both servers, the launcher, and two subscriptions: one of the load's tables with two_phase, one whose tables come and go."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # 16: slots can be created there while transactions with savepoints are rolled back (docs/reference/publishers.md)
        self.publishing = EmbeddedServer.create(16)
        self.receiving = EmbeddedServer.create(18)
        for server in (self.publishing, self.receiving):
            server.createdb("crash")
        self.publisher, self.target = self._database(self.publishing), self._database(self.receiving)
        self.launcher: subprocess.Popen[bytes] | None = None
        self.refreshed = Counter[str]()
        self.extra = 0

    @staticmethod
    def _database(server: EmbeddedServer) -> Database:
        return Database(ServerAddress(server.dsn(), server.version), "crash")

    def log(self) -> str:
        return "\n".join((self.directory / "log").read_text(errors="replace").splitlines()[-60:])

    def launch(self) -> None:
        command = [sys.executable, "-m", "subscriber", "-v", "run", "--target", self.target.dsn]
        for setting in (*SETTINGS, f"spool_directory={self.directory / 'spool'}"):
            command += ["-c", setting]
        with (self.directory / "log").open("ab") as log:
            self.launcher = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def assert_runs(self) -> None:
        assert self.launcher is not None
        assert self.launcher.poll() is None, f"ended by itself with {self.launcher.returncode}\n{self.log()}"

    def end(self) -> None:
        if self.launcher is not None:
            self.launcher.kill()
            self.launcher.wait()
        for database in (self.publisher, self.target):
            database.close()
        for server in (self.publishing, self.receiving):
            server.remove()

    async def create(self) -> None:
        await make_tables(self.publisher, self.target)
        self.publisher.execute("CREATE PUBLICATION extra")
        for name, publication, two_phase in (("load", "pub", True), ("extra", "extra", False)):
            await create_subscription(
                name,
                connection=self.publisher.conninfo(),
                publications=[publication],
                target=self.target.dsn,
                options=SubscriptionOptions(two_phase=two_phase),
                settings=QUICK,
            )

    # --- what happens

    async def kill(self, party: str) -> None:
        if party == "launcher":
            self.assert_runs()
            assert self.launcher is not None
            self.launcher.kill()
            self.launcher.wait()
            await asyncio.to_thread(self.target.wait, LAUNCHES, 0)
            self.launch()
            # from here on it waits for servers that are away
            await asyncio.to_thread(self.target.wait, LAUNCHES, 1)
        elif party == "target":
            self.target.close()
            await asyncio.to_thread(self.receiving.stop, "immediate")
            await asyncio.to_thread(self.receiving.start)
            self.target = self._database(self.receiving)
        else:
            self.publisher.close()
            await asyncio.to_thread(self.publishing.kill)
            await asyncio.to_thread(self.publishing.start)
            self.publisher = self._database(self.publishing)
        self.assert_runs()

    async def change_tables(self, rng: random.Random) -> None:
        """A new table is published; and a refresh. Either may fail because a process is killed at the same time."""
        try:
            if self.extra < 3 or rng.random() < 0.7:
                self._publish_another()
            self.publisher.execute(f"INSERT INTO extra_{rng.randrange(self.extra)} VALUES (-1, 'meanwhile')")
        except psycopg.OperationalError:
            self.refreshed["server away"] += 1
        else:
            await self.refresh()

    def _publish_another(self) -> None:
        name = f"extra_{self.extra}"
        self.target.execute(f"CREATE TABLE IF NOT EXISTS {name} (id int, v text)")
        # an earlier attempt may have been completed although its caller saw an error
        if not self.publisher.value(f"SELECT to_regclass('{name}') IS NOT NULL"):
            self.publisher.execute(
                f"CREATE TABLE {name} (id int, v text); ALTER PUBLICATION extra ADD TABLE {name};"
                f"INSERT INTO {name} SELECT i, repeat('x', 200) FROM generate_series(1, 2000) AS i"
            )
        self.extra += 1

    async def refresh(self) -> bool:
        try:
            async with alter_subscription("extra", target=self.target.dsn, settings=QUICK) as subscription:
                await subscription.refresh()
        except SubscriberError as error:
            self.refreshed[type(error).__name__] += 1
            return False
        self.refreshed["done"] += 1
        return True

    async def catch_up(self) -> None:
        """All tables are synchronized, and everything committed by now is in the target, of both subscriptions."""
        lsn = self.publisher.current_lsn()
        reached = (
            "SELECT (SELECT count(*) FROM subscriber.pg_subscription_rel WHERE srsubstate NOT IN ('s', 'r')) = 0"
            f" AND (SELECT count(*) FROM subscriber.\"position\" WHERE srrelid = 0 AND remote_lsn >= '{lsn}') = 2"
        )
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while not self.target.value(reached):
            self.assert_runs()
            assert asyncio.get_running_loop().time() < deadline, f"not at {lsn}: {self.standing()}\n{self.log()}"
            await asyncio.sleep(0.05)

    def standing(self) -> dict[str, object]:
        """What waits for what."""
        sessions = (
            "SELECT application_name, state, wait_event_type, wait_event, left(query, 60) FROM pg_stat_activity WHERE datname = 'crash'"
        )
        return {
            "positions": self.target.fetch('SELECT srsubid, srrelid, remote_lsn FROM subscriber."position"'),
            "tables": self.target.fetch("SELECT srrelid::regclass, srsubstate FROM subscriber.pg_subscription_rel WHERE srsubstate <> 'r'"),
            "target": self.target.fetch(sessions),
            "locks": self.target.fetch("SELECT pid, locktype, relation::regclass, mode FROM pg_locks WHERE NOT granted"),
            "prepared": self.target.fetch("SELECT gid, prepared FROM pg_prepared_xacts"),
            "publisher": self.publisher.fetch(sessions),
            "slots": self.publisher.fetch("SELECT slot_name, active, confirmed_flush_lsn FROM pg_replication_slots"),
        }

    async def assert_same(self) -> None:
        names = [*table_names("load"), *(TableName("public", f"extra_{number}") for number in range(self.extra))]
        found = await compare(self.publisher.dsn, self.target.dsn, names)
        assert [table for table in found if not table.equal] == [], self.log()
        prepared = await compare_prepared(self.publisher.dsn, self.target.dsn)
        assert prepared.equal, prepared


@pytest.mark.crash
@pytest.mark.endurance
@pytest.mark.timeout(900)
async def test_everybody_is_killed(tmp_path: Path) -> None:
    seed = secrets.randbelow(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    scenario = LauncherScenario(tmp_path)
    try:
        await scenario.create()
        scenario.launch()
        await asyncio.to_thread(scenario.target.wait, LAUNCHES, 1)
        load = make_load(scenario.publisher, seed, reconnect=True, rate=20)
        # slots are made all the time: see let_slots_be_created
        load.held.add(Kind.TRUNCATE)
        parties = ["launcher", "target", "publisher"] * KILLS
        rng.shuffle(parties)
        async with under_load(load):
            await scenario.catch_up()
            for number, party in enumerate(parties):
                refreshing = asyncio.create_task(scenario.change_tables(rng)) if number % 3 == 0 else None
                # a random moment, not synchronisation
                await asyncio.sleep(rng.uniform(0, 0.6))
                if refreshing is not None and (party != "launcher" or rng.random() < 0.5):
                    await asyncio.wait({refreshing}, timeout=rng.uniform(0, 3))
                await scenario.kill(party)
                if refreshing is not None:
                    await refreshing
                if number % 10 == 9:
                    await scenario.catch_up()
        await load.finish()
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while not await scenario.refresh():
            assert asyncio.get_running_loop().time() < deadline, scenario.log()
        await scenario.catch_up()
        await scenario.assert_same()
        of_extra = "(SELECT oid FROM subscriber.pg_subscription WHERE subname = 'extra')"
        assert scenario.target.value(f"SELECT count(*) FROM subscriber.pg_subscription_rel WHERE srsubid = {of_extra}") == scenario.extra
        scenario.assert_runs()
        for name in ("load", "extra"):
            await drop_subscription(name, target=scenario.target.dsn, settings=QUICK)
        assert scenario.publisher.fetch("SELECT slot_name FROM pg_replication_slots") == []
        assert scenario.target.fetch("SELECT gid FROM pg_prepared_xacts") == []
        print(f"{load.report.transactions} transactions, refreshes {dict(scenario.refreshed)}, {scenario.extra} tables came")
        assert scenario.refreshed["done"] > KILLS // 4
    finally:
        scenario.end()
