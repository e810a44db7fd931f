"""A catalog that this program does not know: every verb, run and status refuse in one line with a hint, and change nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from subscriber import (
    Launcher,
    SubscriberError,
    Subscription,
    SubscriptionOptions,
    alter_subscription,
    check,
    drop_subscription,
)
from subscriber.sinks.postgres.catalog.schema import VERSION
from subscriber.sinks.sqlalchemy.catalog.subscriptions import SqlAlchemyCatalog
from subscriber.subscription.management.status import State, subscription_status
from tests.integration.sqlalchemy.test_catalog import defined
from tests.support.database import Database
from tests.support.managed import create, launched, same
from tests.support.program import slots, subscriber
from tests.support.replica import QUICK
from tests.support.sqlalchemy_targets import sqlite_target

ROWS = "SELECT id FROM t ORDER BY id"
RELATIONS = "SELECT relname::text FROM pg_class WHERE relnamespace = 'subscriber'::regnamespace AND relkind = 'r' ORDER BY 1"
ORIGINS = "SELECT roname FROM pg_replication_origin WHERE roname LIKE 'subscriber%' ORDER BY 1"

# statement, what is said
BREAKS = {
    "DELETE FROM subscriber.version": 'table "subscriber.version" of the target is empty',
    "UPDATE subscriber.version SET version = 99": (
        f'schema "subscriber" of the target has version 99, but this program needs version {VERSION}'
    ),
}
MEND = f"DELETE FROM subscriber.version; INSERT INTO subscriber.version VALUES ({VERSION})"


def contents(publisher: Database, target: Database) -> dict[str, Any]:
    """All that a refused verb must not have touched."""
    found: dict[str, Any] = {"slots": slots(publisher), "origins": target.fetch(ORIGINS), "rows": target.fetch(ROWS)}
    for (name,) in target.fetch(RELATIONS):
        found[name] = sorted(map(repr, target.fetch(f'SELECT * FROM subscriber."{name}"')))
    return found


async def altered(target: Database, name: str) -> None:
    async with alter_subscription(name, target=target.dsn, settings=QUICK) as subscription:
        await subscription.disable()


def verbs(publisher: Database, target: Database, name: str) -> dict[str, Callable[[], Awaitable[object]]]:
    """Everything that opens the catalog."""
    by_command_line = Subscription(
        f"other_{name}", connection=publisher.conninfo(), publications=["pub"], target=target.dsn, settings=QUICK
    )
    return {
        "create": lambda: create(publisher, target, f"another_{name}"),
        "alter": lambda: altered(target, name),
        "drop": lambda: drop_subscription(name, target=target.dsn, settings=QUICK),
        "run": Launcher(target.dsn, settings=QUICK).run,
        "run --connection": by_command_line.run,
        "status": lambda: subscription_status(target.dsn),
    }


async def test_every_verb_refuses_another_version(publisher18_db: Database, target_db: Database) -> None:
    publisher, target = publisher18_db, target_db
    for database in (publisher, target):
        database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    publisher.execute("CREATE PUBLICATION pub FOR TABLE t; INSERT INTO t VALUES (1)")
    assert await subscription_status(target.dsn) == []
    assert not target.value("SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = 'subscriber')"), "status makes nothing"
    name = await create(publisher, target)
    async with launched(target):
        await same(publisher, target, name, ROWS)
    for breaking, said in BREAKS.items():
        target.execute(breaking)
        before = contents(publisher, target)
        for verb, act in verbs(publisher, target, name).items():
            with pytest.raises(SubscriberError) as caught:
                await act()
            assert str(caught.value) == said, verb
            assert caught.value.hint, verb
            assert contents(publisher, target) == before, (verb, said)
        found = await check(name, connection=publisher.conninfo(), publications=["pub"], target=target.dsn)
        assert [(finding.severity, finding.message) for finding in found] == [("error", said)]
        assert contents(publisher, target) == before, ("check", said)
        target.execute(MEND)
    # a missing table is an error without a traceback
    target.execute("ALTER TABLE subscriber.worker RENAME TO gone")
    ended = await asyncio.to_thread(subscriber, "status", "--target", target.dsn)
    assert (ended.status, ended.output) == (1, "")
    assert len(ended.errors.splitlines()) == 1
    assert '"subscriber.worker" does not exist (hint: restore the schema subscriber from a backup' in ended.errors
    target.execute("ALTER TABLE subscriber.gone RENAME TO worker")
    # nothing is left of all that
    publisher.execute("INSERT INTO t VALUES (2)")
    async with launched(target):
        assert await same(publisher, target, name, ROWS) == [(1,), (2,)]
    await drop_subscription(name, target=target.dsn, settings=QUICK)
    assert slots(publisher) == []


async def test_value_that_is_not_known(publisher18_db: Database, target_db: Database) -> None:
    publisher, target = publisher18_db, target_db
    for database in (publisher, target):
        database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    publisher.execute("CREATE PUBLICATION pub FOR TABLE t")
    name = await create(publisher, target)
    target.execute("ALTER TABLE subscriber.pg_subscription DROP CONSTRAINT pg_subscription_subtwophasestate_check")
    target.execute("UPDATE subscriber.pg_subscription SET subtwophasestate = 'z'")
    said = "the catalog in the target holds a value in pg_subscription that this program does not know: 'z' is not a valid TwoPhaseState"
    line = f"subscriber: {said} (hint: restore the catalog from a backup)\n"
    for arguments in (("status",), ("drop", name), ("run",)):
        ended = await asyncio.to_thread(subscriber, *arguments, "--target", target.dsn)
        assert (ended.status, ended.output, ended.errors) == (1, "", line)
    status = json.loads((await asyncio.to_thread(subscriber, "status", "--json", "--target", target.dsn)).output)
    assert status["error"]["message"] == said
    target.execute("UPDATE subscriber.pg_subscription SET subtwophasestate = 'd'")
    await drop_subscription(name, target=target.dsn, settings=QUICK)
    assert slots(publisher) == []


@pytest.mark.parametrize(
    ("table", "column", "value", "said"),
    [
        ("pg_subscription", "subskiplsn", "zz", 'invalid input syntax for type pg_lsn: "zz" (example: 16/B374D848)'),
        ("pg_subscription", "subpublications", "{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("pg_subscription", "subtwophasestate", "z", "'z' is not a valid TwoPhaseState"),
        ("pg_subscription_rel", "srsubstate", "q", "'q' is not a valid TableState"),
    ],
)
async def test_value_that_is_not_known_in_a_file(tmp_path: Path, table: str, column: str, value: str, said: str) -> None:
    target = sqlite_target(tmp_path / "copy.db")
    catalog = await SqlAlchemyCatalog.open(target.url)
    async with catalog.create(defined("one")) as made:
        pass
    await catalog.close()
    columns = "srsubid, srrelid, srnspname, srrelname, srsubstate"
    target.execute(f"INSERT INTO subscriber_pg_subscription_rel ({columns}) VALUES ({made.oid}, 20000, 'public', 't', 'i')")
    target.execute(f"UPDATE subscriber_{table} SET {column} = '{value}'")
    ended = await asyncio.to_thread(subscriber, "status", "--target", target.url)
    said = f"the catalog in the target holds a value in {table} that this program does not know: {said}"
    assert (ended.status, ended.errors) == (1, f"subscriber: {said} (hint: restore the catalog from a backup)\n")


async def test_schema_with_other_tables(publisher18_db: Database, target_db: Database) -> None:
    """The catalog's tables may share a schema of this name with other tables."""
    target_db.execute("CREATE SCHEMA subscriber; CREATE TABLE subscriber.letters (id int PRIMARY KEY)")
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t")
    name = await create(publisher18_db, target_db, options=SubscriptionOptions(enabled=False))
    (found,) = await subscription_status(target_db.dsn, [name])
    assert found.state is State.DISABLED
    await drop_subscription(name, target=target_db.dsn, settings=QUICK)
