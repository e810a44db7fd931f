"""subscriber.testing.demonstration.target: what a demonstration asks of a target and what it takes away again."""

from __future__ import annotations

import asyncpg
import pytest

from subscriber.config import SubscriptionOptions
from subscriber.errors import ConfigurationError, TargetUnavailable
from subscriber.sinks.postgres.catalog.schema import ensure_catalog
from subscriber.sinks.postgres.catalog.subscriptions import own_subscription
from subscriber.sinks.postgres.session.catalog_reader import CatalogReader
from subscriber.testing.demonstration.target import forget_subscription, inspect_database
from tests.support.database import Database


async def subscribe(target: Database, name: str) -> int:
    """Leave in the target what a subscription of this name would; return its oid."""
    connection = await asyncpg.connect(target.dsn)
    try:
        await ensure_catalog(connection)
        oid = await own_subscription(CatalogReader(connection), name, SubscriptionOptions(), known=False)
    finally:
        await connection.close()
    target.execute(f"INSERT INTO subscriber.\"position\" VALUES ({oid}, 0, 'slot', '1', 1, '0/1')")
    target.execute(f"INSERT INTO subscriber.pg_subscription_rel VALUES ({oid}, 1, 'public', 't', 'r', '0/1')")
    return oid


async def test_says_what_there_is(target_db: Database) -> None:
    facts = await inspect_database(target_db.dsn)
    assert facts.description.startswith("PostgreSQL 18")
    assert f'database "{target_db.name}"' in facts.description
    assert facts.two_phase
    assert not facts.had_catalog
    await subscribe(target_db, "mine")
    assert (await inspect_database(target_db.dsn)).had_catalog


async def test_no_password_is_shown(target_db: Database) -> None:
    password = target_db.dsn.split(":")[2].split("@")[0]
    facts = await inspect_database(target_db.dsn)
    assert password not in facts.description
    with pytest.raises(TargetUnavailable) as caught:
        await inspect_database(f"postgresql://me:secret@127.0.0.1:1/{target_db.name}")
    assert "secret" not in caught.value.one_line()
    with pytest.raises(ConfigurationError) as refused:
        await inspect_database("ftp://me:secret@nowhere")
    assert "secret" not in refused.value.one_line()


async def test_removes_one_subscription_and_its_prepared_transactions(target_db: Database) -> None:
    mine, others = await subscribe(target_db, "mine"), await subscribe(target_db, "other's")
    target_db.execute("CREATE TABLE t (id int)")
    for oid in (mine, others):
        target_db.execute(f"BEGIN; INSERT INTO t VALUES (1); PREPARE TRANSACTION 'pg_gid_{oid}_700'")
    await forget_subscription(target_db.dsn, "mine", had_catalog=False)
    assert target_db.fetch("SELECT subname FROM subscriber.pg_subscription") == [("other's",)]
    assert target_db.fetch('SELECT srsubid::bigint FROM subscriber."position"') == [(others,)]
    assert target_db.fetch("SELECT srsubid::bigint FROM subscriber.pg_subscription_rel") == [(others,)]
    prepared = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
    assert target_db.fetch(prepared) == [(f"pg_gid_{others}_700",)]


@pytest.mark.parametrize("had_catalog", [False, True])
async def test_the_catalog_goes_if_it_was_not_there_before(target_db: Database, had_catalog: bool) -> None:
    await forget_subscription(target_db.dsn, "mine", had_catalog=False)  # nothing is there: nothing to do
    await subscribe(target_db, "mine")
    await forget_subscription(target_db.dsn, "mine", had_catalog=had_catalog)
    assert target_db.value("SELECT to_regnamespace('subscriber') IS NOT NULL") is had_catalog
