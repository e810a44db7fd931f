"""``subscriber cutover``: what would let writers into both databases, or leave one closed."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from subscriber import ConfigurationError, SubscriberError, create_subscription
from subscriber.protocol.session_name import session_name
from subscriber.subscription.cutover.cutover import complete_cutover, cutover, open_target, plan_cutover
from subscriber.subscription.cutover.options import CutoverOptions
from subscriber.walreceiver.fences import foreign_sessions
from subscriber.walreceiver.fences.fence_row import State
from subscriber.walreceiver.fences.foreign_sessions import ForeignSessions
from subscriber.walreceiver.publisher_subscriptions import subscribed_tables
from subscriber.walreceiver.session import Session
from tests.integration.subscription.test_cutover import QUICKLY, again, left_over, moving, own_fence, writes
from tests.support.database import WAIT_SECONDS, Database
from tests.support.managed import catch_up
from tests.support.proxy import proxy_of
from tests.support.replica import QUICK
from tests.support.roles import role


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
    ours, theirs = own_fence(publisher18_db), own_fence(publisher18_db, "theirs")
    attempt = (await theirs.begin("read-only", {})).attempt
    await theirs.close(attempt)
    with pytest.raises(ConfigurationError, match="the old database was closed by another cutover"):
        await ours.begin("read-only", {})
    with pytest.raises(ConfigurationError, match="the old database was closed by another cutover"):
        await ours.bar("read-only", "1")
    await theirs.advance(attempt, State.LEFT)
    assert await ours.row() is None
    for change in (ours.close, ours.undo, ours.forget):
        with pytest.raises(ConfigurationError, match="the old database was opened meanwhile"):
            await change(attempt)
    for change in (theirs.close, theirs.undo, theirs.forget):
        with pytest.raises(ConfigurationError, match="writers have left the old database"):
            await change(attempt)
    assert not await ours.open(State.KEPT)
    assert not writes(publisher18_db, query="CREATE TABLE t ()")
    await theirs.advance(attempt, State.KEPT)
    assert await ours.open(State.KEPT)
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


async def test_a_database_that_was_closed_in_another_way(publisher18_db: Database, target_db: Database) -> None:
    async with moving(publisher18_db, target_db) as name:
        with pytest.raises(ConfigurationError, match="the switch command failed"):
            await cutover(name, target=target_db.dsn, options=CutoverOptions(verify="none", switch="false"))
        again(publisher18_db, target_db)
        assert not writes(target_db)
        await cutover(name, target=target_db.dsn, options=CutoverOptions(verify="none", fence="revoke"))
        again(publisher18_db, target_db)
        assert (writes(publisher18_db), writes(target_db)) == (True, True), "a superuser is not kept out by revoke"


async def test_time_is_up_before_the_first_step(publisher18_db: Database, target_db: Database) -> None:
    async with moving(publisher18_db, target_db) as name:
        with pytest.raises(ConfigurationError, match="time was up during step close_destination"):
            await cutover(name, target=target_db.dsn, options=CutoverOptions(verify="none", max_downtime=0.0001))
        again(publisher18_db, target_db)
        assert left_over(publisher18_db, target_db, name) == []
        with pytest.raises(ConfigurationError, match="must be positive"):
            CutoverOptions(max_downtime=-1.0)


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


async def test_session_that_does_not_finish_connecting(publisher18_db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_sessions, "_ENDING_SECONDS", 0.5)
    waiting = "SELECT pid FROM pg_locks WHERE relation = 'pg_db_role_setting'::regclass AND NOT granted"
    with publisher18_db.connect(application_name="ours blocker") as blocker:
        closed = own_fence(publisher18_db)
        await closed.bar("read-only", "1")
        session = await closed._connect("cutover")
        # a session reads its settings while it holds the lock on its database
        blocker.execute("BEGIN; LOCK pg_catalog.pg_db_role_setting IN ACCESS EXCLUSIVE MODE")
        connecting = subprocess.Popen([sys.executable, "-c", f"import psycopg; psycopg.connect({publisher18_db.conninfo()!r})"])
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                # a worker of autovacuum may start, too
                while not any(b" startup" in Path(f"/proc/{pid}/cmdline").read_bytes() for (pid,) in blocker.execute(waiting)):
                    await asyncio.sleep(0.05)
                with pytest.raises(ConfigurationError, match=r"session \d+ in the old database is still connecting for 0.5 s"):
                    await closed._foreign.end(session)
        finally:
            blocker.execute("ROLLBACK")
            assert connecting.wait(WAIT_SECONDS) == 0
            await session.close()


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
        assert 'unlogged tables are not replicated, and their rows not moved (--unlogged moves them): "public.scratch"' in lines
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
            found = await ForeignSessions("", [name], roles=[user or ""], names=[]).find(session)
            shown = await session.execute(
                f"SELECT application_name FROM pg_stat_activity WHERE pid IN ({', '.join(each.pid for each in found)})"
                " AND application_name <> ''"
            )
    assert ("another",) in shown
    assert not {(called,) for called in names} & set(shown)


async def test_privileges_of_roles_that_are_renamed_or_dropped(publisher18_db: Database) -> None:
    # the bug was that a database could not be opened again: a role of its grants did not exist any more
    closed = own_fence(publisher18_db)
    publisher18_db.execute("CREATE TABLE t ()")
    with role(publisher18_db) as renamed:
        with role(publisher18_db) as dropped:
            for each in (renamed, dropped):
                publisher18_db.execute(f"GRANT CONNECT ON DATABASE {publisher18_db.name} TO {each.name}")
            publisher18_db.execute(f"REVOKE CONNECT ON DATABASE {publisher18_db.name} FROM PUBLIC")
            await closed.bar("revoke", "1")
            publisher18_db.reconnect()
        publisher18_db.execute(f"ALTER ROLE {renamed.name} RENAME TO {renamed.name}_new")
        await closed.open(State.BARRED)
        assert publisher18_db.value(f"SELECT has_database_privilege('{renamed.name}_new', current_database(), 'CONNECT')")
        assert publisher18_db.fetch(
            "SELECT a.privilege_type FROM pg_database, aclexplode(datacl) AS a WHERE datname = current_database() AND grantee = 0"
        ) == [("TEMPORARY",)]
        publisher18_db.execute(f"ALTER ROLE {renamed.name}_new RENAME TO {renamed.name}")


async def test_server_behind_a_pooler(publisher18_db: Database, target_db: Database) -> None:
    async with moving(publisher18_db, target_db) as name:
        with psycopg.connect(target_db.dsn) as session:
            address = session.info.hostaddr or session.info.host, session.info.port
        with proxy_of(*address, pools=True) as proxy:
            target = psycopg.conninfo.make_conninfo(target_db.dsn, host="127.0.0.1", hostaddr="127.0.0.1", port=proxy.port)
            with pytest.raises(ConfigurationError, match="the new database is reached through a connection pooler"):
                await cutover(name, target=target, options=QUICKLY)
