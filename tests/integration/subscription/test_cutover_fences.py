"""``subscriber cutover``: what would let writers into both databases, or leave one closed."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from subscriber import ConfigurationError, SubscriberError, crash_points, create_subscription
from subscriber.subscription.cutover.cutover import abort_cutover, complete_cutover, cutover, plan_cutover
from subscriber.subscription.cutover.options import CutoverOptions
from tests.integration.subscription.test_cutover import again, left_over, moving, writes
from tests.support.database import WAIT_SECONDS, Database
from tests.support.managed import QUICK, catch_up
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


async def test_sql_that_opens_works_as_printed(publisher18_db: Database, target_db: Database) -> None:
    async with moving(publisher18_db, target_db) as name:
        await cutover(name, target=target_db.dsn, options=CutoverOptions(verify="none", way_back=False))
    opens = await complete_cutover(name, target=target_db.dsn)
    assert opens is not None
    again(publisher18_db, target_db)
    with psycopg.connect(publisher18_db.conninfo(), autocommit=True) as session:
        session.execute(opens.encode())
    assert writes(publisher18_db)
    assert publisher18_db.value("SELECT to_regclass('subscriber.fence')") is None


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


async def test_killed_before_the_first_step(publisher18_db: Database, target_db: Database) -> None:
    class Killed(BaseException):
        pass

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
