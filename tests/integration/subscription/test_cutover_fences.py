"""``subscriber cutover``: what would let writers into both databases, or leave one closed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import subprocess
import sys
import threading
from pathlib import Path

import psycopg
import pytest

from subscriber import ConfigurationError, SubscriberError, SubscriptionInUse, crash_points, create_subscription, drop_subscription
from subscriber.protocol.session_name import session_name
from subscriber.subscription.cutover import link, record
from subscriber.subscription.cutover.cutover import abort_cutover, complete_cutover, cutover, open_target, plan_cutover, roll_back
from subscriber.subscription.cutover.options import CutoverOptions
from subscriber.walreceiver import fence
from subscriber.walreceiver.foreign_sessions import ForeignSessions
from subscriber.walreceiver.publisher_subscriptions import subscribed_tables
from subscriber.walreceiver.session import Session
from tests.integration.subscription.test_cutover import again, left_over, moving, writes
from tests.support.database import WAIT_SECONDS, Database
from tests.support.frozen_proxy import frozen_proxy
from tests.support.managed import QUICK, catch_up, launched
from tests.support.program import subscriber
from tests.support.roles import role

QUICKLY = CutoverOptions(verify="none")


async def test_sessions_that_the_role_cannot_see(publisher18_db: Database, target_db: Database) -> None:
    # without pg_read_all_stats, the server hides when and what another role's session is
    async with moving(publisher18_db, target_db) as name:
        with role(publisher18_db, "LOGIN REPLICATION IN ROLE pg_signal_backend") as admin, role(publisher18_db) as writer:
            publisher18_db.execute(
                f"GRANT ALL ON t TO {writer.name}; GRANT CREATE ON DATABASE {publisher18_db.name} TO {admin.name};"
                f" ALTER DATABASE {publisher18_db.name} OWNER TO {admin.name}"
            )
            session = psycopg.connect(writer.conninfo, autocommit=True)
            try:
                lines = await plan_cutover(name, target=target_db.dsn, publisher_admin=admin.conninfo)
                with contextlib.suppress(SubscriberError):
                    await cutover(name, target=target_db.dsn, publisher_admin=admin.conninfo, options=QUICKLY)
                publisher18_db.reconnect()
                assert publisher18_db.value("SHOW default_transaction_read_only") == "off", (
                    "it was closed, and this session can still write"
                )
                session.execute("UPDATE t SET v = 'kept' WHERE id = 1")
                assert any(line.startswith("error: ") and "pg_read_all_stats" in line for line in lines), lines
            finally:
                session.close()
                publisher18_db.reconnect()
                publisher18_db.execute(f"ALTER DATABASE {publisher18_db.name} OWNER TO CURRENT_USER")


async def test_role_with_its_own_default(publisher18_db: Database, target_db: Database) -> None:
    async with moving(publisher18_db, target_db) as name:
        with role(publisher18_db) as writer:
            publisher18_db.execute(f"ALTER ROLE {writer.name} SET default_transaction_read_only = off")
            text = f'role "{writer.name}" has its own default_transaction_read_only'
            with pytest.raises(ConfigurationError, match=text):
                await cutover(name, target=target_db.dsn, options=QUICKLY)


async def test_another_subscription_has_closed_the_database(publisher18_db: Database, target_db: Database) -> None:
    async with moving(publisher18_db, target_db) as name:
        for database in (publisher18_db, target_db):
            database.execute("CREATE TABLE other (id int PRIMARY KEY)")
        publisher18_db.execute("CREATE PUBLICATION second FOR TABLE other")
        second = f"{name}_2"
        await create_subscription(
            second, connection=publisher18_db.conninfo(), publications=["second"], target=target_db.dsn, settings=QUICK
        )
        await asyncio.to_thread(catch_up, publisher18_db, target_db, second)
        await cutover(name, target=target_db.dsn, options=QUICKLY)
        with pytest.raises(ConfigurationError) as caught:
            await cutover(second, target=target_db.dsn, options=CutoverOptions(verify="none", switch="false"))
        again(publisher18_db, target_db)
        assert (writes(publisher18_db), writes(target_db)) == (False, True)
        assert "the old database is closed already" in caught.value.one_line()


async def test_two_cutovers_close_the_database_at_the_same_time(publisher18_db: Database) -> None:
    # the bug was that each took the fence for its own: one opened what the other had closed, or ended without its steps when the other had
    async def run(*_: object) -> None:
        pass

    user = publisher18_db.value("SELECT current_user")
    ours, theirs = (
        fence.Fence(publisher18_db.conninfo(), slot, "the old database", slot=slot, others=[], roles=[user], names=[], run=run)
        for slot in ("ours", "theirs")
    )
    await theirs.close("read-only")
    with pytest.raises(ConfigurationError, match="the old database was closed by another cutover"):
        await ours.close("read-only")
    await theirs.leave()
    assert (await ours.is_closed(), await ours.is_owned(), await theirs.is_owned()) == (True, False, True)
    assert (await ours.has_left(), await theirs.has_left()) == (False, True)
    assert not await ours.leave()
    assert not await ours.open(undo=True)
    assert not writes(publisher18_db, query="CREATE TABLE t ()")
    assert await theirs.open()
    assert writes(publisher18_db, query="CREATE TABLE t ()")
    publisher18_db.reconnect()


async def test_sql_that_opens_works_as_printed(publisher18_db: Database, target_db: Database) -> None:
    async with moving(publisher18_db, target_db) as name:
        # it is not the way back
        target_db.execute(f'CREATE PUBLICATION "{name}_back"')
        await cutover(name, target=target_db.dsn, options=CutoverOptions(verify="none", way_back=False))
    opens = await complete_cutover(name, target=target_db.dsn)
    assert opens is not None
    target_db.reconnect()
    assert target_db.fetch("SELECT pubname FROM pg_publication") == [(f"{name}_back",)]
    again(publisher18_db, target_db)
    with psycopg.connect(publisher18_db.conninfo(), autocommit=True) as session:
        session.execute(opens.encode())
    assert writes(publisher18_db)
    assert publisher18_db.value("SELECT to_regnamespace('subscriber')") is None


async def test_a_database_that_was_closed_in_another_way(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    async with moving(publisher18_db, target_db) as name:
        with pytest.raises(ConfigurationError, match="the switch command failed"):
            await cutover(name, target=target_db.dsn, options=CutoverOptions(verify="none", switch="false"))
        log = tmp_path / "log"
        command = f"command:echo $SUBSCRIBER_FENCE $SUBSCRIBER_DATABASE >> {log}"
        await cutover(name, target=target_db.dsn, options=CutoverOptions(verify="none", fence=command))
        ran = log.read_text().splitlines()
        assert ran.count("close new") == ran.count("open new"), ran


async def test_time_is_up_before_the_first_step(publisher18_db: Database, target_db: Database) -> None:
    async with moving(publisher18_db, target_db) as name:
        with pytest.raises(ConfigurationError, match="the maximum"):
            await cutover(name, target=target_db.dsn, options=CutoverOptions(verify="none", max_downtime=0.0001))
        again(publisher18_db, target_db)
        assert left_over(publisher18_db, target_db, name) == []
        with pytest.raises(ConfigurationError, match="must be positive"):
            CutoverOptions(max_downtime=-1.0)


class Killed(BaseException):
    """The end of a process, for a test: nothing catches it."""


async def test_killed_before_the_first_step(publisher18_db: Database, target_db: Database) -> None:
    def kill(point: str) -> None:
        if point == "cutover.step":
            raise Killed

    async with moving(publisher18_db, target_db) as name:
        with pytest.raises(Killed), crash_points.watched(kill):
            await cutover(name, target=target_db.dsn, options=CutoverOptions(verify="none", switch="false"))
        assert target_db.fetch("SELECT step FROM subscriber.cutover") == [("plan",)]
        publisher18_db.execute("CREATE TABLE more (id int PRIMARY KEY); ALTER PUBLICATION pub ADD TABLE more")
        with pytest.raises(ConfigurationError, match="not part of the subscription"):
            await cutover(name, target=target_db.dsn, options=QUICKLY)


async def test_source_is_opened_meanwhile(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    sql = f"BEGIN READ WRITE; DROP TABLE subscriber.fence; ALTER DATABASE {publisher18_db.name} RESET default_transaction_read_only; COMMIT"
    (tmp_path / "open.py").write_text(f"import psycopg\npsycopg.connect({publisher18_db.conninfo()!r}, autocommit=True).execute({sql!r})\n")
    async with moving(publisher18_db, target_db) as name:
        with pytest.raises(ConfigurationError, match="was opened meanwhile"):
            await cutover(name, target=target_db.dsn, options=CutoverOptions(verify="none", switch=f"{sys.executable} {tmp_path}/open.py"))
        again(publisher18_db, target_db)
        assert (writes(publisher18_db), writes(target_db)) == (True, False)


async def test_superuser_revokes_what_another_role_granted(publisher18_db: Database, target_db: Database) -> None:
    async with moving(publisher18_db, target_db) as name:
        with role(publisher18_db) as first, role(publisher18_db) as second:
            publisher18_db.execute(
                f"GRANT CONNECT ON DATABASE {publisher18_db.name} TO {first.name} WITH GRANT OPTION; SET ROLE {first.name};"
                f" GRANT CONNECT ON DATABASE {publisher18_db.name} TO {second.name}; RESET ROLE"
            )
            lines = await plan_cutover(name, target=target_db.dsn, options=CutoverOptions(fence="revoke"))
            assert any("was granted by role" in line for line in lines), lines
            publisher18_db.execute(
                f"SET ROLE {first.name}; REVOKE CONNECT ON DATABASE {publisher18_db.name} FROM {second.name}; RESET ROLE"
            )


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


async def test_own_default_of_a_database_comes_back(publisher18_db: Database, target_db: Database) -> None:
    settings = (
        "SELECT unnest(setconfig) FROM pg_db_role_setting JOIN pg_database d ON d.oid = setdatabase AND setrole = 0"
        " WHERE datname = current_database() ORDER BY 1"
    )
    async with moving(publisher18_db, target_db) as name:
        for database in (publisher18_db, target_db):
            database.execute(f"ALTER DATABASE {database.name} SET default_transaction_read_only = false")
            database.execute(f"ALTER DATABASE {database.name} SET work_mem = '5MB'")
        before = publisher18_db.fetch(settings)
        with pytest.raises(ConfigurationError, match="the switch command failed"):
            await cutover(name, target=target_db.dsn, options=CutoverOptions(verify="none", switch="false"))
        again(publisher18_db, target_db)
        assert publisher18_db.fetch(settings) == before
        await open_target(name, target=target_db.dsn)
        target_db.reconnect()
        assert target_db.fetch(settings) == before
        publisher18_db.execute(f"ALTER DATABASE {publisher18_db.name} SET default_transaction_read_only = on")
        with pytest.raises(ConfigurationError, match="the old database has default_transaction_read_only = on already"):
            await cutover(name, target=target_db.dsn, options=QUICKLY)


def end_cutover(target: Database) -> None:
    """End the session of a cutover that has its lock."""
    locked = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = %s)"
    with psycopg.connect(target.server.dsn(), autocommit=True) as session:
        ended = session.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'subscriber cutover'"
            f" AND pid IN ({locked})".encode(),
            [target.name],
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
            end_cutover(target_db)
            await cutover(name, target=target_db.dsn)
            (tmp_path / "go").touch()
            with pytest.raises(SubscriberError, match="writers were let into the new database"):
                await first
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        again(publisher18_db, target_db)
        assert (writes(publisher18_db), writes(target_db)) == (False, True)
        assert publisher18_db.value(f"SELECT count(*) FROM subscriber.pg_subscription WHERE subname = '{name}_back'") == 1


async def test_process_that_makes_the_way_back_after_another_one_has_finished(publisher18_db: Database, target_db: Database) -> None:
    # the bug was that it made the way back again, from a later LSN: what was written before it was not in the old database
    stopped, go, points = threading.Event(), threading.Event(), itertools.count(1)

    def stop(point: str) -> None:
        # plan and six steps before it; each step has three points
        if point == "cutover.step" and threading.current_thread() is not threading.main_thread() and next(points) == 20:
            stopped.set()
            go.wait()

    async with moving(publisher18_db, target_db) as name:
        with crash_points.watched(stop):
            first = asyncio.create_task(asyncio.to_thread(lambda: asyncio.run(cutover(name, target=target_db.dsn, options=QUICKLY))))
            try:
                assert await asyncio.to_thread(stopped.wait, WAIT_SECONDS)
                target_db.reconnect()
                assert target_db.fetch("SELECT step FROM subscriber.cutover WHERE ended_at IS NULL AND step <> 'plan'") == [("way_back",)]
                end_cutover(target_db)
                await cutover(name, target=target_db.dsn)
                assert writes(target_db, query="INSERT INTO t (v) VALUES ('early')")
            finally:
                go.set()
                await asyncio.wait({first})
        with pytest.raises(SubscriberError, match="writers were let into the new database"):
            await first
        again(publisher18_db, target_db)
        assert (writes(publisher18_db), writes(target_db)) == (False, True)
        async with launched(publisher18_db):
            await asyncio.to_thread(catch_up, target_db, publisher18_db, f"{name}_back")
        assert publisher18_db.value("SELECT count(*) FROM t WHERE v = 'early'") == 1


async def test_killed_when_the_way_into_the_target_was_free(publisher18_db: Database, target_db: Database) -> None:
    # the fence of the old database knows it, and the record does not
    def kill(point: str) -> None:
        if point == "cutover.left":
            raise Killed

    async with moving(publisher18_db, target_db) as name:
        with pytest.raises(Killed), crash_points.watched(kill):
            await cutover(name, target=target_db.dsn, options=QUICKLY)
        target_db.reconnect()
        assert target_db.fetch("SELECT FROM subscriber.cutover WHERE step IN ('open', 'abort')") == []
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
    # the publication dropped; the catalog of the old database; the subscription; its catalog. What was dropped is not dropped again
    for point in (2, 3, 3, 1):
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
    monkeypatch.setattr(record, "_SECONDS", 0.5)
    with psycopg.connect(target_db.dsn) as session:
        address = session.info.hostaddr or session.info.host, session.info.port
    async with moving(publisher18_db, target_db) as name:
        with frozen_proxy(*address) as proxy:
            switch = f"touch {tmp_path}/begun; sleep 60"
            options = CutoverOptions(verify="none", switch=switch, max_downtime=5.0, way_back=False)
            target = psycopg.conninfo.make_conninfo(target_db.dsn, host="127.0.0.1", hostaddr="127.0.0.1", port=proxy.port)
            moved = asyncio.create_task(cutover(name, target=target, options=options))
            async with asyncio.timeout(WAIT_SECONDS):
                while not (tmp_path / "begun").exists():
                    assert not moved.done(), await moved
                    await asyncio.sleep(0.02)
                proxy.freeze()
                with pytest.raises(SubscriberError, match="writers were stopped for 5 s, the maximum") as caught:
                    await moved
            assert "not everything could be undone" in caught.value.one_line()
            assert "the target's catalog did not answer within 0.5 s" in caught.value.one_line()
            publisher18_db.reconnect()
            assert writes(publisher18_db)
        await abort_cutover(name, target=target_db.dsn)
        again(publisher18_db, target_db)
        assert (writes(publisher18_db), writes(target_db)) == (True, False), "the command may have led writers to the target"


async def test_session_that_does_not_finish_connecting(publisher18_db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence, "_ENDING_SECONDS", 0.5)
    starting = "SELECT count(*) FROM pg_locks WHERE relation = 'pg_db_role_setting'::regclass AND NOT granted"
    connecting: list[subprocess.Popen[bytes]] = []
    with publisher18_db.connect(application_name="ours blocker") as blocker:

        async def run(_: str, variables: dict[str, str]) -> None:
            # a session reads its settings while it holds the lock on its database
            blocker.execute("BEGIN; LOCK pg_catalog.pg_db_role_setting IN ACCESS EXCLUSIVE MODE")
            connecting.append(subprocess.Popen([sys.executable, "-c", f"import psycopg; psycopg.connect({publisher18_db.conninfo()!r})"]))
            async with asyncio.timeout(WAIT_SECONDS):
                while blocker.execute(starting).fetchone() != (1,):
                    await asyncio.sleep(0.05)

        ((user,),) = blocker.execute("SELECT current_user").fetchall()
        closed = fence.Fence(publisher18_db.conninfo(), "ours", "the old database", slot="ours", others=[], roles=[user], names=[], run=run)
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                with pytest.raises(ConfigurationError, match=r"session \d+ in the old database is still connecting for 0.5 s"):
                    await closed.close("command:true")
        finally:
            blocker.execute("ROLLBACK")
            for process in connecting:
                assert process.wait(WAIT_SECONDS) == 0


async def test_writers_that_no_fence_keeps_out(publisher18_db: Database, target_db: Database) -> None:
    async with moving(publisher18_db, target_db) as name:
        target_db.execute("CREATE PUBLICATION feed FOR TABLE t")
        publisher18_db.execute("CREATE UNLOGGED TABLE scratch (id int); ALTER PUBLICATION pub SET TABLE t WHERE (id > 0)")
        publisher18_db.execute("SELECT lo_create(0)")
        publisher18_db.execute(
            f"CREATE SUBSCRIPTION feed CONNECTION '{target_db.conninfo()}' PUBLICATION feed WITH (create_slot = false, enabled = false,"
            " slot_name = NONE, copy_data = false)"
        )
        lines = await plan_cutover(name, target=target_db.dsn)
        assert 'unlogged tables are not replicated, and their rows not moved: "public.scratch"' in lines
        assert any("large objects are not replicated" in line for line in lines), lines
        assert "rows of table public.t that its row filter leaves out are not moved" in lines
        assert not [line for line in lines if line.startswith("error: ")], lines
        publisher18_db.execute("ALTER SUBSCRIPTION feed SET (slot_name = 'missing')")
        publisher18_db.execute("ALTER SUBSCRIPTION feed ENABLE")
        lines = await plan_cutover(name, target=target_db.dsn)
        assert any('error: subscription "feed" in the old database writes into tables that are moved' in line for line in lines), lines
        assert not any("background worker" in line for line in lines), lines


async def test_role_that_is_no_superuser_sees_subscriptions(publisher_db: Database) -> None:
    # the bug was that PostgreSQL 13 let only superusers read what was asked for, and the answer was that there are none
    publisher_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    publisher_db.execute("CREATE PUBLICATION pub FOR TABLE t")
    with psycopg.connect(publisher_db.conninfo(), autocommit=True) as session:
        name = f"feed_{publisher_db.name}"
        session.execute(f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')".encode())
        session.execute(
            f"CREATE SUBSCRIPTION {name} CONNECTION '{publisher_db.conninfo()}' PUBLICATION pub WITH (create_slot = false, enabled = false,"
            " copy_data = false)".encode()
        )
    try:
        with role(publisher_db, "LOGIN") as reader:
            async with await Session.connect(reader.conninfo, application_name="subscriber test") as found:
                assert [
                    (str(each.table), each.subscription, each.slot_name, each.enabled) for each in await subscribed_tables(found, ["pub"])
                ] == [("public.t", name, name, False)]
    finally:
        publisher_db.execute(f"ALTER SUBSCRIPTION {name} SET (slot_name = NONE)")
        publisher_db.execute(f"DROP SUBSCRIPTION {name}")
        publisher_db.execute(f"SELECT pg_drop_replication_slot('{name}')")


async def test_own_sessions_with_a_long_name(publisher18_db: Database) -> None:
    name = "a_subscription_whose_name_leaves_no_room_for_all_roles"
    names = [session_name(name, role) for role in ("ours", "parallel apply")]
    assert [called.startswith(f"{name} ") for called in names] == [True, False]
    with contextlib.ExitStack() as stack:
        for called in [*names, "another"]:
            stack.enter_context(publisher18_db.connect(application_name=called))
        async with await Session.connect(publisher18_db.conninfo(), application_name="subscriber test") as session:
            ((user,),) = await session.execute("SELECT current_user")
            found = await ForeignSessions([name], roles=[user or ""], names=[]).find(session)
            shown = await session.execute(
                f"SELECT application_name FROM pg_stat_activity WHERE pid IN ({', '.join(each.pid for each in found)})"
                " AND application_name <> ''"
            )
    assert ("another",) in shown
    assert not {(called,) for called in names} & set(shown)


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
            monkeypatch.setattr(fence.Fence, "_end_others", killed)

    async with moving(publisher18_db, target_db) as name:
        with pytest.raises(Killed), crash_points.watched(kill):
            await cutover(name, target=target_db.dsn, options=QUICKLY)
        monkeypatch.undo()
        await cutover(name, target=target_db.dsn)
        target_db.reconnect()
        opened(target_db)
        await roll_back(name, target=target_db.dsn)
        connect(target_db)
        monkeypatch.setattr(fence.Fence, "_end_others", killed)
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


@pytest.mark.parametrize("by", ["cutover", "abort"])
async def test_undone_while_the_publisher_cannot_be_reached(by: str, publisher18_db: Database, target_db: Database) -> None:
    # the bug was that nothing remembered it: the next call continued the cutover
    async with moving(publisher18_db, target_db) as name:
        try:
            await cut_off(name, publisher18_db, target_db)
            if by == "abort":
                # as after a kill
                target_db.execute("BEGIN READ WRITE; DELETE FROM subscriber.cutover WHERE step = 'abort'; COMMIT")
                with pytest.raises(SubscriberError, match="is not currently accepting connections"):
                    await abort_cutover(name, target=target_db.dsn)
        finally:
            reachable(publisher18_db, "true")
        assert not writes(publisher18_db)
        with pytest.raises(ConfigurationError, match="an earlier attempt was interrupted, and is undone now"):
            await cutover(name, target=target_db.dsn)
        again(publisher18_db, target_db)
        assert (writes(publisher18_db), left_over(publisher18_db, target_db, name)) == (True, [])


async def test_privileges_of_roles_that_are_renamed_or_dropped(publisher18_db: Database) -> None:
    # the bug was that a database could not be opened again: a role of its grants did not exist any more
    async def run(*_: object) -> None:
        pass

    user = publisher18_db.value("SELECT current_user")
    closed = fence.Fence(publisher18_db.conninfo(), "ours", "the old database", slot="ours", others=[], roles=[user], names=[], run=run)
    publisher18_db.execute("CREATE TABLE t ()")
    with role(publisher18_db) as renamed:
        with role(publisher18_db) as dropped:
            for each in (renamed, dropped):
                publisher18_db.execute(f"GRANT CONNECT ON DATABASE {publisher18_db.name} TO {each.name}")
            publisher18_db.execute(f"REVOKE CONNECT ON DATABASE {publisher18_db.name} FROM PUBLIC")
            await closed.close("revoke")
            publisher18_db.reconnect()
        publisher18_db.execute(f"ALTER ROLE {renamed.name} RENAME TO {renamed.name}_new")
        await closed.open()
        assert publisher18_db.value(f"SELECT has_database_privilege('{renamed.name}_new', current_database(), 'CONNECT')")
        assert publisher18_db.fetch(
            "SELECT a.privilege_type FROM pg_database, aclexplode(datacl) AS a WHERE datname = current_database() AND grantee = 0"
        ) == [("TEMPORARY",)]
        publisher18_db.execute(f"ALTER ROLE {renamed.name}_new RENAME TO {renamed.name}")


async def test_server_behind_a_pooler(publisher18_db: Database, target_db: Database) -> None:
    async with moving(publisher18_db, target_db) as name:
        with psycopg.connect(target_db.dsn) as session:
            address = session.info.hostaddr or session.info.host, session.info.port
        with frozen_proxy(*address, pools=True) as proxy:
            target = psycopg.conninfo.make_conninfo(target_db.dsn, host="127.0.0.1", hostaddr="127.0.0.1", port=proxy.port)
            with pytest.raises(ConfigurationError, match="the new database is reached through a connection pooler"):
                await cutover(name, target=target, options=QUICKLY)


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
            with pytest.raises(ConfigurationError, match="a cutover of subscription"):
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
