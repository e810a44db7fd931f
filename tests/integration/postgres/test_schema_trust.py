"""The schema ``subscriber`` that another role has made: nothing of it runs with the rights of this program."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psycopg
import pytest

from subscriber import ConfigurationError, TableName, TargetError, drop_subscription, verify
from subscriber.sinks.postgres.catalog.subscriptions import PostgresCatalog, observe
from subscriber.subscription.run_status import Until
from subscriber.walreceiver.fences.fence import Fence
from tests.support.database import Database
from tests.support.replica import replica, subscription_of
from tests.support.roles import role

EVIL = """
CREATE SCHEMA subscriber;
CREATE FUNCTION subscriber.evil() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN EXECUTE pg_catalog.format('ALTER ROLE %I SUPERUSER', TG_ARGV[0]); RETURN NEW; END $$;
CREATE TABLE subscriber.{table};
CREATE TRIGGER t BEFORE INSERT OR UPDATE ON subscriber.{name} FOR EACH ROW EXECUTE FUNCTION subscriber.evil({role});
GRANT ALL ON SCHEMA subscriber TO PUBLIC; GRANT ALL ON ALL TABLES IN SCHEMA subscriber TO PUBLIC;
"""
FENCE = 'fence (owner text PRIMARY KEY, kind text, before text, "left" bool)'
VERSION = "version (version integer PRIMARY KEY)"


@contextlib.contextmanager
def evil_schema(database: Database, table: str) -> Iterator[str]:
    """A schema of a role that may only create schemas. It gives the role."""
    with role(database) as evil:
        database.execute(f"GRANT CREATE ON DATABASE {database.name} TO {evil.name}")
        try:
            with psycopg.connect(evil.conninfo, autocommit=True) as session:
                session.execute(EVIL.format(table=table, name=table.split(maxsplit=1)[0], role=evil.name).encode())
            yield evil.name
            assert not database.value(f"SELECT rolsuper FROM pg_roles WHERE rolname = '{evil.name}'")
        finally:
            database.execute(f"DROP OWNED BY {evil.name} CASCADE")


async def test_catalog_of_another_role(target_db: Database) -> None:
    with evil_schema(target_db, VERSION) as evil, pytest.raises(TargetError, match=f'"subscriber" of the target belongs to role "{evil}"'):
        await PostgresCatalog.open(target_db.dsn, "test")
    await (await PostgresCatalog.open(target_db.dsn, "test")).close()


async def test_fence_of_another_role(publisher18_db: Database) -> None:
    user = publisher18_db.value("SELECT current_user")
    fence = Fence(publisher18_db.conninfo(), "ours", "the old database", owner="ours", names=[], roles=[user])
    with evil_schema(publisher18_db, FENCE) as evil:
        for use in (lambda: fence.bar("read-only", "1"), fence.row, fence.open):
            with pytest.raises(ConfigurationError, match=f'of the old database belongs to role "{evil}", which is not trusted'):
                await use()
    await fence.bar("read-only", "1")
    publisher18_db.reconnect()
    assert await fence.open("barred")
    publisher18_db.reconnect()


async def test_view_in_place_of_a_table(target_db: Database) -> None:
    await (await PostgresCatalog.open(target_db.dsn, "test")).close()
    target_db.execute("ALTER TABLE subscriber.worker RENAME TO moved; CREATE VIEW subscriber.worker AS TABLE subscriber.moved")
    with pytest.raises(TargetError, match=r'relation "subscriber\.worker" of the target is not the table'):
        await observe(target_db.dsn)


async def test_roles_that_are_trusted(target_db: Database) -> None:
    """The database's owner and this session's own groups, for a role without more rights; a superuser trusts no other role."""
    with role(target_db) as ours, role(target_db) as group:
        target_db.execute(f"GRANT {group.name} TO {ours.name}; GRANT CREATE ON DATABASE {target_db.name} TO {group.name}")
        target_db.execute(f"CREATE SCHEMA subscriber AUTHORIZATION {group.name}")
        await (await PostgresCatalog.open(ours.conninfo, "test")).close()
        with pytest.raises(TargetError, match="is not trusted"):
            await PostgresCatalog.open(target_db.dsn, "test")
        target_db.execute(f"DROP OWNED BY {group.name}, {ours.name} CASCADE")


async def test_superuser_and_the_subscriptions_of_another_role(publisher18_db: Database, target_db: Database) -> None:
    """What the error says works: run, verify and drop."""
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    publisher18_db.execute("INSERT INTO t VALUES (1, 'copied'); CREATE PUBLICATION pub FOR TABLE t")
    source = publisher18_db.conninfo()
    with role(target_db) as plain:
        target_db.execute(f"GRANT CREATE ON DATABASE {target_db.name} TO {plain.name}; ALTER TABLE t OWNER TO {plain.name}")
        target_db.execute(f"GRANT SET ON PARAMETER session_replication_role TO {plain.name}")
        await subscription_of(publisher18_db, target_db, target_url=plain.conninfo).run(Until())
        found = subscription_of(publisher18_db, target_db)
        for refused in (
            lambda: found.run(Until()),
            lambda: verify(found.name, target=target_db.dsn, connection=source),
            lambda: drop_subscription(found.name, target=target_db.dsn, connection=source),
        ):
            with pytest.raises(TargetError, match=f'belongs to role "{plain.name}"') as error:
                await refused()
            assert f"role \"{plain.name}\", connect as that role, or act for it with options='-c role=…'" in str(error.value.hint)
        acting = target_db.conninfo(options=f"-c role={plain.name}")
        async with replica(publisher18_db, target_db, target_url=acting) as again:
            publisher18_db.execute("INSERT INTO t VALUES (2, 'followed')")
            await again.same("SELECT * FROM t ORDER BY id")
            assert (await verify(found.name, target=acting, connection=source, tables=[TableName("public", "t")])).equal
        assert target_db.fetch(
            f"SELECT count(*) FROM pg_class WHERE relnamespace = 'subscriber'::regnamespace AND relowner <> '{plain.name}'::regrole"
        ) == [(0,)]
        await drop_subscription(found.name, target=acting, connection=source)
        target_db.execute(f"REVOKE SET ON PARAMETER session_replication_role FROM {plain.name}; DROP OWNED BY {plain.name} CASCADE")
