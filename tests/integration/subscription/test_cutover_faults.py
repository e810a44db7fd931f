"""``subscriber cutover``: processes that are killed, two at once, and databases that cannot be reached."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import threading
from pathlib import Path

import psycopg
import pytest

from subscriber import ConfigurationError, PublisherUnavailable, SubscriberError, SubscriptionInUse, crash_points, drop_subscription
from subscriber.subscription.cutover import link, move
from subscriber.subscription.cutover.cutover import abort_cutover, complete_cutover, cutover, open_target, roll_back
from subscriber.subscription.cutover.options import CutoverOptions
from subscriber.walreceiver.fences.foreign_sessions import ForeignSessions
from subscriber.walreceiver.session import Row, Session
from tests.integration.subscription.test_cutover import QUICKLY, again, left_over, moving, writes
from tests.support.database import WAIT_SECONDS, Database
from tests.support.managed import catch_up, launched
from tests.support.program import subscriber
from tests.support.proxy import proxy_of


class Killed(BaseException):
    """The end of a process, for a test: nothing catches it."""


async def test_killed_before_the_first_step(publisher18_db: Database, target_db: Database) -> None:
    def kill(point: str) -> None:
        if point == "cutover.step":
            raise Killed

    async with moving(publisher18_db, target_db) as name:
        with pytest.raises(Killed), crash_points.watched(kill):
            await cutover(name, target=target_db.dsn, options=CutoverOptions(verify="none", switch="false"))
        assert publisher18_db.fetch("SELECT state FROM subscriber.fence") == [("begun",)]
        assert writes(publisher18_db)
        publisher18_db.execute("CREATE TABLE more (id int PRIMARY KEY); ALTER PUBLICATION pub ADD TABLE more")
        with pytest.raises(ConfigurationError, match="the interrupted cutover has a switch command, which is not stored"):
            await cutover(name, target=target_db.dsn, options=QUICKLY)
        with pytest.raises(ConfigurationError, match="not part of the subscription"):
            await cutover(name, target=target_db.dsn, options=CutoverOptions(verify="none", switch=""))
        assert left_over(publisher18_db, target_db, name) == []


async def test_killed_while_the_server_closes_the_database(publisher18_db: Database, target_db: Database) -> None:
    # a server ends a statement also when its client is gone
    waiting = "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted"
    async with moving(publisher18_db, target_db) as name:
        with publisher18_db.connect(application_name=f"{name} ours") as blocker:
            blocker.execute(f"BEGIN; ALTER DATABASE {publisher18_db.name} SET default_transaction_read_only = off")
            command = [sys.executable, "-m", "subscriber", "cutover", name, "--target", target_db.dsn, "--verify", "none"]
            process = subprocess.Popen(command)
            async with asyncio.timeout(2 * WAIT_SECONDS):
                while blocker.execute(waiting).fetchone() != (True,):
                    assert process.poll() is None, "the command has ended"
                    await asyncio.sleep(0.1)
            process.kill()
            process.wait()
            await abort_cutover(name, target=target_db.dsn)
            blocker.execute("ROLLBACK")
        # a session that was left would close the database now
        publisher18_db.wait(f"SELECT count(*) FROM pg_stat_activity WHERE application_name = '{name} cutover'", 0)
        again(publisher18_db, target_db)
        assert writes(publisher18_db)
        assert left_over(publisher18_db, target_db, name) == []


def end_cutover(publisher: Database, name: str) -> None:
    """End the session of a cutover that has its lock."""
    with psycopg.connect(publisher.server.dsn(), autocommit=True) as session:
        ended = session.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE application_name = %s", [f"{name} cutover lock"]
        )
        assert ended.fetchall() == [(True,)]


async def test_another_process_continues_a_cutover_that_still_runs(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    # the first process has lost its session, and its lock, while its switch command runs. The bug was that it opened the old database
    gate = f"mkdir {tmp_path}/first 2>/dev/null || exit 0; while [ ! -e {tmp_path}/go ]; do sleep 0.02; done"
    async with moving(publisher18_db, target_db) as name:
        first = asyncio.create_task(cutover(name, target=target_db.dsn, options=CutoverOptions(verify="none", switch=gate)))
        try:
            async with asyncio.timeout(2 * WAIT_SECONDS):
                while not (tmp_path / "first").exists():
                    assert not first.done(), await first
                    await asyncio.sleep(0.02)
            end_cutover(publisher18_db, name)
            with pytest.raises(ConfigurationError, match="has a switch command, which is not stored"):
                await cutover(name, target=target_db.dsn)
            await cutover(name, target=target_db.dsn, options=CutoverOptions(switch="true"))
            (tmp_path / "go").touch()
            with pytest.raises(SubscriberError, match="writers were let into the new database"):
                await first
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        again(publisher18_db, target_db)
        assert (writes(publisher18_db), writes(target_db)) == (False, True)
        assert publisher18_db.value(f"SELECT count(*) FROM subscriber.pg_subscription WHERE subname = '{name}_back'") == 1


@pytest.mark.parametrize("step", [pytest.param("close_destination", marks=pytest.mark.endurance), "way_back"])
async def test_process_that_continues_after_another_one_has_finished(step: str, publisher18_db: Database, target_db: Database) -> None:
    # the bugs were that it closed the database that writers use, and that it made the way back again, from a later LSN: what was written
    # before was not in the old database
    stopped, go, points = threading.Event(), threading.Event(), itertools.count(1)

    def stop(point: str) -> None:
        # after the beginning, each step has two points; seven steps are before the way back
        at = {"close_destination": 4, "way_back": 16}[step]
        if point == "cutover.step" and threading.current_thread() is not threading.main_thread() and next(points) == at:
            stopped.set()
            go.wait()

    async with moving(publisher18_db, target_db) as name:
        with crash_points.watched(stop):
            first = asyncio.create_task(asyncio.to_thread(lambda: asyncio.run(cutover(name, target=target_db.dsn, options=QUICKLY))))
            try:
                assert await asyncio.to_thread(stopped.wait, WAIT_SECONDS)
                publisher18_db.reconnect()
                state = {"close_destination": "begun", "way_back": "closed"}[step]
                assert publisher18_db.fetch("SELECT state FROM subscriber.fence") == [(state,)]
                end_cutover(publisher18_db, name)
                await cutover(name, target=target_db.dsn, options=QUICKLY)
                assert writes(target_db, query="INSERT INTO t (v) VALUES ('early')")
            finally:
                go.set()
                await asyncio.wait({first})
        with pytest.raises(SubscriberError, match=r"writers (were let into|use) the new database"):
            await first
        again(publisher18_db, target_db)
        assert (writes(publisher18_db), writes(target_db)) == (False, True)
        async with launched(publisher18_db):
            await asyncio.to_thread(catch_up, target_db, publisher18_db, f"{name}_back")
        assert publisher18_db.value("SELECT count(*) FROM t WHERE v = 'early'") == 1


async def test_killed_when_the_way_into_the_target_was_free(publisher18_db: Database, target_db: Database) -> None:
    def kill(point: str) -> None:
        if point == "cutover.left":
            raise Killed

    async with moving(publisher18_db, target_db) as name:
        with pytest.raises(Killed), crash_points.watched(kill):
            await cutover(name, target=target_db.dsn, options=QUICKLY)
        publisher18_db.reconnect()
        assert publisher18_db.fetch("SELECT state FROM subscriber.fence") == [("left",)]
        with pytest.raises(ConfigurationError, match="writers were let into the new database: there is nothing to undo"):
            await abort_cutover(name, target=target_db.dsn)
        with pytest.raises(ConfigurationError, match=f'a cutover of subscription "{name}" is under way'):
            await drop_subscription(name, target=target_db.dsn)
        await cutover(name, target=target_db.dsn)
        again(publisher18_db, target_db)
        assert (writes(publisher18_db), writes(target_db)) == (False, True)


async def test_complete_is_killed_at_every_step(publisher18_db: Database, target_db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_LAUNCHER_SECONDS", 0.3)
    left = 0

    def kill(_: str) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise Killed

    async with moving(publisher18_db, target_db) as name:
        await cutover(name, target=target_db.dsn, options=QUICKLY)
        again(publisher18_db, target_db)
        origins = [
            (database, f"^subscriber_{database.value('SELECT oid FROM subscriber.pg_subscription')}(_|$)")
            for database in (publisher18_db, target_db)
        ]
        async with launched(publisher18_db):
            await asyncio.to_thread(catch_up, target_db, publisher18_db, f"{name}_back")
            with pytest.raises(SubscriptionInUse, match="a launcher uses the catalog of the old database"):
                await complete_cutover(name, target=target_db.dsn)
    again(publisher18_db, target_db)
    # begun; the catalog of the old database; the subscription; its catalog. What was dropped is not dropped again
    for point in (1, 3, 1, 1):
        left = point
        with pytest.raises(Killed), crash_points.watched(kill):
            await complete_cutover(name, target=target_db.dsn)
    for database, origin in origins:
        database.reconnect()
        assert database.fetch(f"SELECT roname FROM pg_replication_origin WHERE roname ~ '{origin}'") == []
        assert database.value("SELECT to_regnamespace('subscriber')") is None
        assert database.fetch("SELECT slot_name FROM pg_replication_slots WHERE database = current_database()") == []
    assert target_db.fetch("SELECT pubname FROM pg_publication") == []
    assert not writes(publisher18_db)
    with pytest.raises(SubscriberError, match="does not exist"):
        await complete_cutover(name, target=target_db.dsn)


async def test_target_that_does_not_answer(
    publisher18_db: Database, target_db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the bug was that undoing waited for it without end, while writers were kept out of both databases
    monkeypatch.setattr(move, "_REST_SECONDS", 0.5)
    with psycopg.connect(target_db.dsn) as session:
        address = session.info.hostaddr or session.info.host, session.info.port
    async with moving(publisher18_db, target_db) as name:
        with proxy_of(*address) as proxy:
            switch = f"touch {tmp_path}/begun; sleep 60"
            options = CutoverOptions(verify="none", switch=switch, max_downtime=5.0, way_back=False)
            target = psycopg.conninfo.make_conninfo(target_db.dsn, host="127.0.0.1", hostaddr="127.0.0.1", port=proxy.port)
            moved = asyncio.create_task(cutover(name, target=target, options=options))
            async with asyncio.timeout(WAIT_SECONDS):
                while not (tmp_path / "begun").exists():
                    assert not moved.done(), await moved
                    await asyncio.sleep(0.02)
                proxy.freeze(all_later=True)
                with pytest.raises(SubscriberError, match="time was up during step switch: --max-downtime is 5 s") as caught:
                    await moved
            assert "not everything could be undone" in caught.value.one_line()
            assert "the new database did not answer within 0.5 s" in caught.value.one_line()
            publisher18_db.reconnect()
            assert writes(publisher18_db)
        await abort_cutover(name, target=target_db.dsn)
        again(publisher18_db, target_db)
        assert (writes(publisher18_db), writes(target_db)) == (True, False), "the command may have led writers to the target"


async def test_killed_before_sessions_of_the_closed_database_are_ended(
    publisher18_db: Database, target_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the bug was that the repeated command found an open database, and left sessions that stay read-only
    sessions: list[psycopg.Connection] = []

    async def killed(*_: object, **__: object) -> None:
        raise Killed

    def opened(database: Database) -> None:
        with pytest.raises(psycopg.OperationalError):
            sessions.pop().execute("SELECT 1")
        assert database.value("SELECT to_regclass('subscriber.fence')") is None

    def connect(database: Database) -> None:
        sessions.append(psycopg.connect(database.conninfo(), autocommit=True))
        assert sessions[-1].execute("SHOW default_transaction_read_only").fetchone() == ("on",)

    def kill(point: str) -> None:
        if point == "cutover.left":
            connect(target_db)
            monkeypatch.setattr(ForeignSessions, "end", killed)

    async with moving(publisher18_db, target_db) as name:
        with pytest.raises(Killed), crash_points.watched(kill):
            await cutover(name, target=target_db.dsn, options=QUICKLY)
        monkeypatch.undo()
        # the bug was that views were not refreshed if the process was killed after it had let writers in
        for database in (publisher18_db, target_db):
            database.reconnect()
            database.execute("SET default_transaction_read_only = off")
            database.execute("CREATE MATERIALIZED VIEW m AS SELECT count(*) FROM t")
        said: list[str] = []

        def refreshed(text: str) -> None:
            if "materialized view public.m" in text:
                raise Killed

        with pytest.raises(Killed):
            await cutover(name, target=target_db.dsn, tell=refreshed)
        await cutover(name, target=target_db.dsn, tell=said.append)
        assert any("materialized view public.m refreshed" in text for text in said), said
        target_db.reconnect()
        opened(target_db)
        await roll_back(name, target=target_db.dsn)
        connect(target_db)
        monkeypatch.setattr(ForeignSessions, "end", killed)
        with pytest.raises(Killed):
            await open_target(name, target=target_db.dsn)
        monkeypatch.undo()
        await open_target(name, target=target_db.dsn)
        again(publisher18_db, target_db)
        opened(target_db)
        with pytest.raises(ConfigurationError, match="the new database is not closed"):
            await open_target(name, target=target_db.dsn)


def reachable(database: Database, answer: str) -> None:
    with psycopg.connect(database.server.dsn(), autocommit=True) as server:
        server.execute(f"ALTER DATABASE {database.name} ALLOW_CONNECTIONS {answer}".encode())
        server.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = %s AND application_name LIKE '%% cutover'",
            [database.name],
        )


async def cut_off(name: str, publisher: Database, target: Database) -> None:
    """Let a cutover lose its publisher, when both databases are closed."""
    points = itertools.count(1)

    def cut(point: str) -> None:
        # close_source was made
        if point == "cutover.step" and next(points) == 7:
            reachable(publisher, "false")

    with pytest.raises(SubscriberError, match="is not currently accepting connections"), crash_points.watched(cut):
        await cutover(name, target=target.dsn, options=QUICKLY)
    target.reconnect()


async def test_undone_while_the_publisher_cannot_be_reached(publisher18_db: Database, target_db: Database) -> None:
    # the bug was that the next call continued what could not be undone
    async with moving(publisher18_db, target_db) as name:
        said: list[str] = []
        try:
            await cut_off(name, publisher18_db, target_db)
            with pytest.raises(SubscriberError, match="is not currently accepting connections"):
                await abort_cutover(name, target=target_db.dsn)
        finally:
            reachable(publisher18_db, "true")
        assert not writes(publisher18_db)
        with pytest.raises(ConfigurationError, match="the switch command failed"):
            await cutover(name, target=target_db.dsn, options=CutoverOptions(verify="none", switch="false"), tell=said.append)
        assert said[0] == "an interrupted cutover is undone, and begins again"
        assert said[1].startswith("writers can use the old database again, and were stopped for ")
        again(publisher18_db, target_db)
        assert writes(publisher18_db)
        await open_target(name, target=target_db.dsn)
        target_db.reconnect()
        assert left_over(publisher18_db, target_db, name) == []


async def test_slot_that_is_lost(publisher18_db: Database, target_db: Database) -> None:
    # as after a failover of the publisher. The bug was that it waited for the slot until the end of --max-downtime
    points = itertools.count(1)

    def lose(point: str) -> None:
        # close_source was made
        if point == "cutover.step" and next(points) == 7:
            slot = f"FROM pg_replication_slots WHERE slot_name = '{name}'"
            with psycopg.connect(publisher18_db.server.dsn(), autocommit=True) as server:
                server.execute(f"SELECT pg_terminate_backend(active_pid, 10000) {slot} AND active".encode())
                server.execute(f"SELECT pg_drop_replication_slot(slot_name) {slot}".encode())

    async with moving(publisher18_db, target_db) as name:
        with pytest.raises(SubscriberError, match=f'replication slot "{name}" does not exist') as caught, crash_points.watched(lose):
            await asyncio.wait_for(cutover(name, target=target_db.dsn, options=QUICKLY), WAIT_SECONDS)
        assert "everything was undone: writers use the old database" in caught.value.one_line()
        again(publisher18_db, target_db)
        assert left_over(publisher18_db, target_db, name) == []


async def test_publisher_that_is_lost_for_good(publisher18_db: Database, target_db: Database) -> None:
    # as the manual says
    async with moving(publisher18_db, target_db) as name:
        try:
            await cut_off(name, publisher18_db, target_db)
            with pytest.raises(SubscriberError, match="drop replication slot"):
                await drop_subscription(name, target=target_db.dsn)
            for arguments in (("alter", name, "--disable"), ("alter", name, "-o", "slot_name=NONE"), ("drop", name)):
                done = await asyncio.to_thread(subscriber, *arguments, "--target", target_db.dsn)
                assert done.status == 0, done.errors
            with target_db.connect(application_name="person") as session:
                opens = f"ALTER DATABASE {target_db.name} RESET default_transaction_read_only"
                session.execute(f"BEGIN READ WRITE; {opens}; DROP TABLE subscriber.fence; COMMIT")
            target_db.reconnect()
            assert writes(target_db)
        finally:
            reachable(publisher18_db, "true")
            with psycopg.connect(publisher18_db.conninfo(), autocommit=True) as session:
                session.execute(f"SELECT pg_terminate_backend(active_pid, 10000) FROM pg_replication_slots WHERE slot_name = '{name}'")
                session.execute(f"SELECT pg_drop_replication_slot('{name}')")


async def test_table_that_the_last_change_parks(publisher18_db: Database, target_db: Database) -> None:
    """It is found also if no rows are compared: the new database does not have the change."""
    inserted: list[str] = []

    def insert(point: str) -> None:
        if point == "cutover.step" and not inserted:
            inserted.append(point)
            publisher18_db.execute("INSERT INTO t VALUES (1000, 'rejected')")

    async with moving(publisher18_db, target_db) as name:
        for option in ("on_error=park", "park_after=1"):
            done = await asyncio.to_thread(subscriber, "alter", name, "--target", target_db.dsn, f"-o{option}")
            assert done.status == 0, done.errors
        target_db.execute("ALTER TABLE t ADD CONSTRAINT few CHECK (id < 1000)")
        with pytest.raises(ConfigurationError, match=r"table public\.t is parked since ") as caught, crash_points.watched(insert):
            await cutover(name, target=target_db.dsn, options=QUICKLY)
        assert caught.value.__notes__[0].startswith("everything was undone")
        again(publisher18_db, target_db)
        assert (writes(publisher18_db), inserted) == (True, ["cutover.step"])
        assert left_over(publisher18_db, target_db, name) == []


async def test_session_whose_first_statement_fails_is_closed(
    publisher18_db: Database, target_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug was that it stayed connected."""
    execute = Session.execute

    async def lost(session: Session, query: str, *values: str) -> list[Row]:
        if query.startswith("SET default_transaction_read_only"):
            raise PublisherUnavailable("cut by the test")
        return await execute(session, query, *values)

    back = link.BackLink(
        "back", publisher=target_db.dsn, target=publisher18_db.dsn, admin=target_db.dsn, target_admin=publisher18_db.dsn, tables=[]
    )
    monkeypatch.setattr(Session, "execute", lost)
    with pytest.raises(PublisherUnavailable, match="cut by the test") as caught:
        await back.remove()
    target_db.wait("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'back cutover'", 0)
    assert caught.value.__traceback__ is not None, "its frames hold the session"
