"""``subscriber cutover --pool``: clients behind PgBouncer wait for seconds, and none of their queries is refused."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.pq import TransactionStatus
from psycopg.rows import dict_row

from subscriber import ConfigurationError, SubscriberError, crash_points
from subscriber.subscription.cutover.cutover import abort_cutover, cutover, open_target, plan_cutover, rehearse_cutover, roll_back
from subscriber.subscription.cutover.options import CutoverOptions
from subscriber.testing.pgbouncer import Pool, entry
from subscriber.walreceiver.fences import pgbouncer
from subscriber.walreceiver.fences.pgbouncer import PgBouncer
from tests.integration.subscription.test_cutover import again, left_over, moving
from tests.integration.subscription.test_cutover_faults import Killed
from tests.support.database import WAIT_SECONDS, Database
from tests.support.managed import catch_up, launched
from tests.support.pgbouncer import pool

CLIENTS = 4


class Application:
    """Clients that insert rows, each in one session that it keeps.

    Attributes:
        written: how many transactions were acknowledged.
        refused: the errors of all others.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self.written = 0
        self.refused: list[str] = []
        self._threads = [threading.Thread(target=self._write) for _ in range(CLIENTS)]

    def __enter__(self) -> Application:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _write(self) -> None:
        with psycopg.connect(self._url, autocommit=True, prepare_threshold=None, application_name="app") as session:
            while not self._stop.wait(0.02):
                try:
                    session.execute("INSERT INTO t (v) VALUES ('app')")
                    self.written += 1
                except psycopg.Error as error:
                    self.refused.append(str(error))
                    return

    async def writes(self) -> None:
        """Wait until all clients write."""
        until = self.written + 5 * CLIENTS
        async with asyncio.timeout(WAIT_SECONDS):
            while self.written < until:
                assert self.refused == []
                await asyncio.sleep(0.02)


def command(found: Pool, publisher: Database, target: Database) -> str:
    """A switch command that writes the new address into the configuration file."""
    program = (
        "import os, pathlib, re, sys; file = pathlib.Path(sys.argv[1]); back = os.environ['SUBSCRIBER_DIRECTION'] == 'back';"
        f"file.write_text(re.sub('^{publisher.name} = .*$', sys.argv[2 + back], file.read_text(), flags=re.M))"
    )
    lines = entry(publisher.name, target.conninfo()), entry(publisher.name, publisher.conninfo())
    return shlex.join([sys.executable, "-c", program, str(found.file), *lines])


def reload(found: Pool, before: str, after: str) -> None:
    """Change its configuration."""
    found.file.write_text(found.file.read_text().replace(before, after))
    with psycopg.connect(found.admin, autocommit=True) as session:
        session.execute("RELOAD")


def paused(found: Pool) -> bool:
    with psycopg.connect(found.admin, autocommit=True) as session:
        cursor = session.execute("SHOW DATABASES")
        assert cursor.description is not None
        column = [each.name for each in cursor.description].index("paused")
        return any(str(row[column]) == "1" for row in cursor)


@pytest.mark.slow
async def test_no_query_is_refused(publisher18_db: Database, target_db: Database) -> None:
    said: list[str] = []
    async with moving(publisher18_db, target_db) as name:
        publisher18_db.execute("GRANT ALL ON t TO PUBLIC")
        with pool(publisher18_db, "transaction") as found, Application(found.url) as application:
            switch, admin = command(found, publisher18_db, target_db), f"pgbouncer:{found.admin}"
            await application.writes()
            # one server can be called by many names
            ((sockets,),) = publisher18_db.fetch("SHOW unix_socket_directories")
            reload(found, "host=127.0.0.1", f"host={sockets}")
            lines = await plan_cutover(name, target=target_db.dsn, options=CutoverOptions(pool=admin))
            assert not [line for line in lines if line.startswith("error: ")], lines
            assert any("PAUSE in PgBouncer" in line for line in lines)
            steps = await rehearse_cutover(name, target=target_db.dsn, options=CutoverOptions(pool=admin))
            print(steps)
            assert list(steps) == ["sessions", "pause", "catch_up", "verify", "way_back", "sequences"]
            assert not paused(found)
            with psycopg.connect(found.admin, autocommit=True) as session:
                # what others have paused is not resumed
                session.execute(f"PAUSE {publisher18_db.name}")
                await rehearse_cutover(name, target=target_db.dsn, options=CutoverOptions(pool=admin))
                assert paused(found)
                session.execute(f"RESUME {publisher18_db.name}")
            # the command fails, or forgets the address: undone
            for wrong, text in (("false", "the switch command failed"), ("true", "PgBouncer still leads .* to the old database")):
                with pytest.raises(ConfigurationError, match=text):
                    await cutover(name, target=target_db.dsn, options=CutoverOptions(switch=wrong, pool=admin, verify="none"))
                assert not paused(found)
                await application.writes()
            # the bug was that the command said that all was undone, while clients were led to the closed new database
            reload(found, "[pgbouncer]", entry("other", publisher18_db.conninfo()) + "\n[pgbouncer]")
            before = found.file.read_text()
            with pytest.raises(SubscriberError, match='still leads "other" to the old database') as caught:
                await cutover(name, target=target_db.dsn, options=CutoverOptions(switch=switch, pool=admin, verify="none"))
            said_then = "\n".join(each.one_line() for each in (caught.value, *caught.value.also))
            assert f"PgBouncer does not lead its clients of {publisher18_db.name} to the old database: they still wait" in said_then
            assert paused(found)
            with pytest.raises(ConfigurationError, match="they still wait"):
                await abort_cutover(name, target=target_db.dsn, pool=admin)
            found.file.write_text(before)
            await abort_cutover(name, target=target_db.dsn, pool=admin)
            assert not paused(found)
            await application.writes()
            reload(found, entry("other", publisher18_db.conninfo()) + "\n", "")
            await cutover(name, target=target_db.dsn, options=CutoverOptions(switch=switch, pool=admin), tell=said.append)
            await application.writes()
            again(publisher18_db, target_db)
            count = "SELECT count(*) FROM t WHERE v = 'app'"
            assert target_db.value(count) > publisher18_db.value(count)
            async with launched(publisher18_db):
                await asyncio.to_thread(catch_up, target_db, publisher18_db, f"{name}_back")
                with pytest.raises(ConfigurationError, match="the cutover had paused a pool, which is not stored"):
                    await roll_back(name, target=target_db.dsn, options={"switch": switch})
                await roll_back(name, target=target_db.dsn, options={"switch": switch, "pool": admin}, tell=said.append)
            await application.writes()
        print(said, application.written)
        assert application.refused == []
        assert sum(text.startswith("the clients of PgBouncer waited for ") for text in said) == 2
        again(publisher18_db, target_db)
        assert abs(publisher18_db.value("SELECT count(*) FROM t WHERE v = 'app'") - application.written) == 0
        await asyncio.to_thread(catch_up, publisher18_db, target_db, name)
        rows = "SELECT * FROM t ORDER BY id"
        assert target_db.fetch(rows) == publisher18_db.fetch(rows)


async def test_login_that_is_under_way(publisher18_db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    # the bug was that PAUSE interrupted it: PgBouncer refused queries after RESUME, and let others wait for 15 s
    def ask(session: psycopg.Connection[Any]) -> object:
        return session.execute("SELECT 1").fetchone()

    def asking(session: psycopg.Connection[Any]) -> asyncio.Task[object]:
        return asyncio.create_task(asyncio.to_thread(ask, session))

    async def state(wanted: Callable[[dict[str, int]], bool]) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            while not any(wanted(row) for row in watching.execute("SHOW POOLS").fetchall() if row["database"] == name):
                await asyncio.sleep(0.01)

    def shown(command: str, column: str) -> list[Any]:
        return [row[column] for row in watching.execute(command.encode()).fetchall()]

    # a login reads this table
    lock = "BEGIN; LOCK pg_catalog.pg_db_role_setting IN ACCESS EXCLUSIVE MODE"
    name, own, said = publisher18_db.name, list[str](), list[str]()
    with contextlib.ExitStack() as stack:
        found = stack.enter_context(pool(publisher18_db, "transaction"))
        first, *others = (psycopg.connect(found.url, autocommit=True, prepare_threshold=None) for _ in range(4))
        for session in (first, *others):
            stack.callback(session.close)
        # it stays connected: a suspended PgBouncer accepts no connections
        watching = stack.enter_context(psycopg.connect(found.admin, autocommit=True, prepare_threshold=None, row_factory=dict_row))
        console = PgBouncer.parse(f"pgbouncer:{found.admin}")
        # it has the only server connection
        first.execute(lock)
        second = asking(others[0])
        await state(lambda row: row["sv_login"] == 1)
        pausing = asyncio.create_task(console.pause([name], said.append, own))
        done, _ = await asyncio.wait({pausing}, timeout=0.3)
        assert not done
        assert not paused(found)
        first.execute("COMMIT")
        await pausing
        assert (own, paused(found)) == ([name], True)
        third = asking(others[1])
        await console.resume([name])
        assert [await asyncio.wait_for(each, 5) for each in (second, third)] == [(1,)] * 2
        # one begins between the last look and PAUSE
        monkeypatch.setattr(pgbouncer, "_LOGIN_SECONDS", 0.0)
        watching.execute(f"RECONNECT {name}")
        first.execute(lock)
        second = asking(others[0])
        await state(lambda row: row["sv_login"] == 1)
        pausing = asyncio.create_task(console.pause([name], said.append, own))
        await state(lambda row: row["sv_login"] == 0)
        first.execute("COMMIT")
        await pausing
        with psycopg.connect(publisher18_db.conninfo(), autocommit=True) as locking:
            locking.execute(lock)
            resuming = asyncio.create_task(console.resume([name]))
            await asyncio.wait({resuming}, timeout=1.0)
            # the next login takes time, too: clients that begin something meanwhile are not refused
            asked = [asking(each) for each in others[1:]]
            async with asyncio.timeout(WAIT_SECONDS):
                while not all(each.pgconn.transaction_status == TransactionStatus.ACTIVE for each in others[1:]):
                    assert not any(each.done() for each in asked), asked
                    await asyncio.sleep(0.01)
            await state(lambda row: row["sv_login"] == 1)
            locking.execute("COMMIT")
        assert [await asyncio.wait_for(each, 5) for each in (second, *asked)] == [(1,)] * 3
        await resuming
        config = dict(zip(shown("SHOW CONFIG", "key"), shown("SHOW CONFIG", "value"), strict=True))
        assert (config["server_login_retry"], paused(found)) == ("15", False)


@pytest.mark.endurance
async def test_transaction_that_does_not_end_and_kills(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    said: list[str] = []
    async with moving(publisher18_db, target_db) as name:
        with pool(publisher18_db, "transaction") as found, Application(found.url) as application:
            switch, admin = command(found, publisher18_db, target_db), f"pgbouncer:{found.admin}"
            with psycopg.connect(found.url, application_name="report") as waiting:
                waiting.execute("UPDATE t SET v = 'long' WHERE id = 1")
                options = CutoverOptions(switch=switch, pool=admin, max_downtime=4.0, verify="none")
                with pytest.raises(ConfigurationError, match="time was up during step pause: --max-downtime is 4 s"):
                    await cutover(name, target=target_db.dsn, options=options, tell=said.append)
                waiting.commit()
            assert any('PgBouncer waits for the transactions of client "report" at 127.0.0.1:' in text for text in said), said
            await application.writes()
            options = CutoverOptions(switch=switch, pool=admin, verify="none")
            # begun; after pause; after close_source; after the switch
            for at in (1, 7, 9, 27):
                points = itertools.count(1)

                def kill(point: str, at: int = at, points: itertools.count[int] = points) -> None:
                    if point == "cutover.step" and next(points) >= at:
                        raise Killed

                with pytest.raises(Killed), crash_points.watched(kill):
                    await cutover(name, target=target_db.dsn, options=options)
                assert paused(found) is (at > 1)
                with pytest.raises(ConfigurationError, match="the interrupted cutover has paused a pool, which is not stored"):
                    await abort_cutover(name, target=target_db.dsn)
                if at == 27:
                    # what the command has done is for its user to undo
                    subprocess.run(switch, shell=True, check=True, env={**os.environ, "SUBSCRIBER_DIRECTION": "back"})
                await abort_cutover(name, target=target_db.dsn, pool=admin)
                assert not paused(found)
                await application.writes()
                again(publisher18_db, target_db)
                if at == 27:
                    await open_target(name, target=target_db.dsn)
                    target_db.reconnect()
                assert left_over(publisher18_db, target_db, name) == []
        assert application.refused == []
