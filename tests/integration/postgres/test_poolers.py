"""PgBouncer before the target and the publisher. With transaction pooling its sessions are shared with the application's."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from subscriber import ConfigurationError, PublisherError, SchemaOptions, SubscriberError, TableName, copy_schema, verify
from subscriber.schema.inspection import SchemaScope
from subscriber.schema.postgres import inspect_target
from subscriber.sinks.postgres.catalog.subscriptions import PostgresCatalog, observe
from subscriber.sinks.postgres.sequences import set_sequences
from subscriber.sinks.postgres.session.target import Target
from subscriber.sinks.postgres.snapshots import read_snapshot
from subscriber.testing.binaries import find_binaries
from subscriber.walreceiver.connection import WalReceiverConnection
from subscriber.walreceiver.session import Session
from tests.support.database import Database
from tests.support.pgbouncer import pgbouncer
from tests.support.replica import replica, subscription_of

TABLES = "CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE child (id int PRIMARY KEY, parent int REFERENCES t)"
SETTINGS = "SELECT name, setting FROM pg_settings WHERE source = 'session' ORDER BY 1"
SHARED = "is behind a connection pooler with transaction pooling"


def settings_of(url: str) -> list[tuple[Any, ...]]:
    """What is set in the sessions that the application gets from the pool."""
    found = []
    sessions = [psycopg.connect(url) for _ in range(5)]
    for session in sessions:
        found += session.execute(SETTINGS).fetchall()
    for session in sessions:
        session.close()
    return sorted(set(found))


@pytest.mark.parametrize("round_robin", ["0", "1"])
async def test_target_behind_transaction_pooling(publisher18_db: Database, target_db: Database, round_robin: str) -> None:
    publisher18_db.execute(f"{TABLES}; INSERT INTO t VALUES (1); CREATE PUBLICATION pub FOR ALL TABLES")
    target_db.execute(TABLES)
    with pgbouncer(target_db, "transaction", server_round_robin=round_robin) as url:
        before = settings_of(url)
        with psycopg.connect(url, autocommit=True) as application:
            application.execute("INSERT INTO t VALUES (2)")
            with pytest.raises(ConfigurationError, match=f"the target {SHARED}.*settings and locks") as found:
                await subscription_of(publisher18_db, target_db, target_url=url).run()
            assert "pool_mode = session" in str(found.value.hint)
            with pytest.raises(psycopg.errors.ForeignKeyViolation):
                application.execute("INSERT INTO child VALUES (1, 100)")
        for refused in (
            Target(url).connect("x"),
            PostgresCatalog.open(url, "x"),
            observe(url),
            set_sequences(url, [], force=False, dry_run=False),
            inspect_target(url, SchemaScope()),
            read_snapshot(url, None, 1, application_name="x").__aenter__(),
        ):
            with pytest.raises(ConfigurationError, match=SHARED):
                await refused
        assert settings_of(url) == before
    assert target_db.value("SELECT to_regnamespace('subscriber') IS NULL")


async def test_target_behind_statement_pooling(target_db: Database) -> None:
    with pgbouncer(target_db, "statement") as url, pytest.raises(SubscriberError, match="statement pooling"):
        await Target(url).connect("x")


async def test_target_behind_session_pooling(publisher18_db: Database, target_db: Database) -> None:
    publisher18_db.execute(f"{TABLES}; INSERT INTO t VALUES (1); CREATE PUBLICATION pub FOR ALL TABLES")
    target_db.execute(TABLES)
    with pgbouncer(target_db, "session", server_reset_query="DISCARD ALL") as url:
        before = settings_of(url)
        async with replica(publisher18_db, target_db, target_url=url) as found:
            await found.caught_up()
            publisher18_db.execute("INSERT INTO t VALUES (2)")
            assert await found.same("SELECT id FROM t ORDER BY 1") == [(1,), (2,)]
            report = await verify(
                found.subscription.name, target=url, connection=publisher18_db.conninfo(), tables=[TableName("public", "t")]
            )
            assert report.equal
        assert settings_of(url) == before


@pytest.mark.parametrize("pool_mode", ["transaction", "session"])
async def test_publisher_behind_a_pooler(publisher18_db: Database, pool_mode: str) -> None:
    """PgBouncer before 1.24 refuses replication connections in any mode. Verbs that need none work in session pooling."""
    with pgbouncer(publisher18_db, pool_mode) as url:
        before = settings_of(url)
        with pytest.raises(PublisherError):
            await WalReceiverConnection.connect(url, application_name="x")
        if pool_mode == "session":
            async with await Session.connect(url, application_name="x") as session, await session.sibling("y") as other:
                assert await other.execute("SHOW datestyle") == [("ISO, YMD",)]
        else:
            with pytest.raises(ConfigurationError, match=f"the publisher {SHARED}"):
                await Session.connect(url, application_name="x")
        assert settings_of(url) == before


async def test_schema_copy_behind_a_pooler(publisher18_db: Database, target_db: Database) -> None:
    """The bug was that pg_dump got its settings in the startup packet, which PgBouncer refuses."""
    publisher18_db.execute(TABLES)
    for name, value in (("standard_conforming_strings", "off"), ("lc_monetary", "'C.utf8'")):
        publisher18_db.execute(f"ALTER DATABASE {publisher18_db.name} SET {name} = {value}")
    options = SchemaOptions(bindir=str(find_binaries(18)))
    with pgbouncer(publisher18_db, "session") as url:
        await copy_schema(connection=url, target=target_db.dsn, options=options)
        assert target_db.value("SELECT count(*) FROM child") == 0
        for create, drop, setting in (
            (r"FUNCTION f() RETURNS text LANGUAGE sql AS $$SELECT '\n'$$", "FUNCTION f()", "standard_conforming_strings"),
            ("TABLE paid (price money DEFAULT 5)", "TABLE paid", "lc_monetary"),
        ):
            publisher18_db.execute(f"CREATE {create}")
            with pytest.raises(ConfigurationError, match=f"pg_dump cannot set {setting} through a connection pooler") as found:
                await copy_schema(connection=url, target=target_db.dsn, options=options)
            assert "connect to the publisher itself" in str(found.value.hint)
            publisher18_db.execute(f"DROP {drop}")
