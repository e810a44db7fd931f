"""A catalog that a hand broke: every verb, run and status say one line with the remedy, and leave everything as it was."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
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
from subscriber.sinks.postgres.catalog import VERSION
from subscriber.sinks.postgres.integrity import COLUMNS
from subscriber.subscription.observing import State, SubscriptionStatus, subscription_status
from tests.database import Database
from tests.integration.managed import QUICK, create, launched, same
from tests.integration.observed import eventually, until
from tests.integration.program import slots, subscriber

ROWS = "SELECT id FROM t ORDER BY id"
RELATIONS = "SELECT relname::text FROM pg_class WHERE relnamespace = 'subscriber'::regnamespace AND relkind = 'r' ORDER BY 1"
ORIGINS = "SELECT roname FROM pg_replication_origin WHERE roname LIKE 'subscriber%' ORDER BY 1"

# what breaks it, what mends it, what is said
BREAKS = {
    "no version": (
        "ALTER TABLE subscriber.version RENAME TO gone",
        "ALTER TABLE subscriber.gone RENAME TO version",
        'table "subscriber.version" of the target is missing',
    ),
    "version without rows": (
        "DELETE FROM subscriber.version",
        f"INSERT INTO subscriber.version VALUES ({VERSION})",
        'table "subscriber.version" of the target is empty',
    ),
    "two versions": (
        "INSERT INTO subscriber.version VALUES (0)",
        "DELETE FROM subscriber.version WHERE version = 0",
        'table "subscriber.version" of the target is broken',
    ),
    "later version": (
        "UPDATE subscriber.version SET version = 99",
        f"UPDATE subscriber.version SET version = {VERSION}",
        f'schema "subscriber" of the target has version 99, this program knows versions up to {VERSION}',
    ),
    "no worker": (
        "ALTER TABLE subscriber.worker RENAME TO gone",
        "ALTER TABLE subscriber.gone RENAME TO worker",
        'table "subscriber.worker" of the target is missing',
    ),
    "no view": (
        "ALTER VIEW subscriber.pg_stat_subscription RENAME TO gone",
        "ALTER VIEW subscriber.gone RENAME TO pg_stat_subscription",
        'view "subscriber.pg_stat_subscription" of the target is missing',
    ),
    "no column": (
        'ALTER TABLE subscriber."position" RENAME timeline TO gone',
        'ALTER TABLE subscriber."position" RENAME gone TO timeline',
        'column "timeline" of table "subscriber.position" of the target is missing',
    ),
}


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


async def test_columns_are_those_of_a_new_catalog(any_target_db: Database) -> None:
    await subscription_status(any_target_db.dsn)
    assert not any_target_db.value("SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = 'subscriber')"), "status makes nothing"
    with pytest.raises(SubscriberError, match="does not exist"):
        await drop_subscription("absent", target=any_target_db.dsn)
    found: dict[str, set[str]] = {}
    query = (
        "SELECT c.relname::text, a.attname::text FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 "
        "WHERE c.relnamespace = 'subscriber'::regnamespace AND c.relkind IN ('r', 'v')"
    )
    for relation, column in any_target_db.fetch(query):
        found.setdefault(relation, set()).add(column)
    assert found == {relation: set(columns) for relation, columns in COLUMNS.items()}


async def test_every_verb_refuses_a_broken_catalog(publisher18_db: Database, target_db: Database) -> None:
    publisher, target = publisher18_db, target_db
    for database in (publisher, target):
        database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    publisher.execute("CREATE PUBLICATION pub FOR TABLE t; INSERT INTO t VALUES (1)")
    name = await create(publisher, target)
    async with launched(target):
        await same(publisher, target, name, ROWS)
    for breaking, mending, said in BREAKS.values():
        target.execute(breaking)
        before = contents(publisher, target)
        for verb, act in verbs(publisher, target, name).items():
            with pytest.raises(SubscriberError) as caught:
                await act()
            assert str(caught.value) == said, verb
            assert caught.value.hint, verb
            assert "\n" not in caught.value.one_line()
            assert contents(publisher, target) == before, (verb, said)
        found = await check(name, connection=publisher.conninfo(), publications=["pub"], target=target.dsn)
        assert [(finding.severity, finding.message) for finding in found] == [("error", said)]
        assert contents(publisher, target) == before, ("check", said)
        target.execute(mending)
    # as a person sees it
    target.execute(BREAKS["no worker"][0])
    for arguments in (("drop", name), ("run",)):
        ended = subscriber(*arguments, "--target", target.dsn)
        assert (ended.status, ended.output) == (1, "")
        assert len(ended.errors.splitlines()) == 1
        assert BREAKS["no worker"][2] in ended.errors
        assert "hint: restore the schema subscriber from a backup" in ended.errors
    told = json.loads(subscriber("status", "--json", "--target", target.dsn).output)
    assert told["error"]["message"] == BREAKS["no worker"][2]
    target.execute(BREAKS["no worker"][1])
    # nothing is left of all that
    publisher.execute("INSERT INTO t VALUES (2)")
    async with launched(target):
        assert await same(publisher, target, name, ROWS) == [(1,), (2,)]
    await drop_subscription(name, target=target.dsn, settings=QUICK)
    assert slots(publisher) == []


async def test_broken_while_it_runs(publisher18_db: Database, target_db: Database, caplog: pytest.LogCaptureFixture) -> None:
    """The launcher and its worker say what is missing, and go on when it is there again."""
    publisher, target = publisher18_db, target_db
    for database in (publisher, target):
        database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    publisher.execute("CREATE PUBLICATION pub FOR TABLE t; INSERT INTO t VALUES (1)")
    name = await create(publisher, target)
    async with launched(target):
        await same(publisher, target, name, ROWS)
        target.execute('ALTER TABLE subscriber."position" RENAME TO gone')
        publisher.execute("INSERT INTO t VALUES (2)")
        missing = 'table "subscriber.position" of the target is missing (hint: restore the schema subscriber from a backup'
        await until(lambda: f'subscription "{name}": {missing}' in caplog.text, "the worker says so")
        await until(lambda: f"the catalog cannot be opened: {missing}" in caplog.text, "the launcher says so")
        assert target.fetch(ROWS) == [(1,)]
        target.execute('ALTER TABLE subscriber.gone RENAME TO "position"')
        assert await same(publisher, target, name, ROWS) == [(1,), (2,)]
    for record in caplog.records:
        assert "compare the target's table" not in record.getMessage()
    await drop_subscription(name, target=target.dsn, settings=QUICK)


async def state_of(target: Database, name: str) -> SubscriptionStatus:
    (found,) = await subscription_status(target.dsn, [name])
    return found


UNKNOWN = {
    "substream": ("'x'", "p", "f, p, t"),
    "subtwophasestate": ("'z'", "d", "d, e, p"),
    "subsynccommit": ("'fast'", "off", "local, off, on, remote_apply, remote_write"),
    "suborigin": ("'some'", "any", "any, none"),
    "subbinary": ("NULL", "f", "true, false"),
}


async def test_values_that_nothing_of_ours_writes(publisher18_db: Database, target_db: Database, caplog: pytest.LogCaptureFixture) -> None:
    """They are the trouble of that subscription, in every verb; the others go on."""
    publisher, target = publisher18_db, target_db
    for database in (publisher, target):
        database.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (id int PRIMARY KEY)")
    publisher.execute("CREATE PUBLICATION pub FOR TABLE t; CREATE PUBLICATION more FOR TABLE u; INSERT INTO t VALUES (1)")
    name, sound = await create(publisher, target), await create(publisher, target, f"sound_{publisher.name}", "more")
    target.execute(
        "ALTER TABLE subscriber.pg_subscription DROP CONSTRAINT pg_subscription_substream_check, "
        "DROP CONSTRAINT pg_subscription_subtwophasestate_check, ALTER subbinary DROP NOT NULL"
    )
    async with launched(target):
        await same(publisher, target, name, ROWS)
        for number, (column, (value, good, known)) in enumerate(UNKNOWN.items()):
            target.execute(f"UPDATE subscriber.pg_subscription SET {column} = {value} WHERE subname = '{name}'")
            shown = value.replace("'", '"')
            said = f'column "{column}" of subscriber.pg_subscription in the target has the unknown value {shown}'
            hint = f"UPDATE subscriber.pg_subscription there: it can be {known}"
            await until(lambda: f'subscription "{name}" is not run: {said} (hint: {hint})' in caplog.text, f"{said} is logged")  # noqa: B023
            worker = f"SELECT count(*) FROM subscriber.pg_stat_subscription WHERE subname = '{name}' AND pid IS NOT NULL"
            await eventually(target, worker, 0)
            before = contents(publisher, target)["pg_subscription"]
            for act in (altered(target, name), drop_subscription(name, target=target.dsn, settings=QUICK)):
                with pytest.raises(SubscriberError) as caught:
                    await act
                assert caught.value.one_line() == f'subscription "{name}" cannot be used: {said} (hint: {hint})'
            assert contents(publisher, target)["pg_subscription"] == before
            assert slots(publisher) == sorted([name, sound])
            broken = await state_of(target, name)
            assert (broken.state, broken.observation.definition.problem) == (State.BROKEN, said)
            publisher.execute(f"INSERT INTO u VALUES ({number})")
            await same(publisher, target, sound, "SELECT id FROM u ORDER BY id")
            target.execute(f"UPDATE subscriber.pg_subscription SET {column} = '{good}' WHERE subname = '{name}'")
            publisher.execute(f"INSERT INTO t VALUES ({10 + number})")
            await same(publisher, target, name, ROWS)
    ended = subscriber("status", "--target", target.dsn)
    assert "problem" not in ended.output
    # of one of its tables
    target.execute("ALTER TABLE subscriber.pg_subscription_rel DROP CONSTRAINT pg_subscription_rel_srsubstate_check")
    target.execute("UPDATE subscriber.pg_subscription_rel SET srsubstate = 'q' WHERE srrelid = 't'::regclass")
    said = 'column "srsubstate" of subscriber.pg_subscription_rel in the target has the unknown value "q"'
    before = contents(publisher, target)
    with pytest.raises(SubscriberError) as caught:
        await drop_subscription(name, target=target.dsn, settings=QUICK)
    assert str(caught.value) == said
    after = contents(publisher, target)
    # a claim makes a new generation of the subscription: all that it does
    assert {**after, "pg_subscription": 0} == {**before, "pg_subscription": 0}
    ended = subscriber("status", "--target", target.dsn)
    assert ended.status == 0
    assert f"{name}: broken" in ended.output
    assert f"  problem       {said} (hint: " in ended.output
    target.execute("UPDATE subscriber.pg_subscription_rel SET srsubstate = 'r' WHERE srrelid = 't'::regclass")
    for each in (name, sound):
        await drop_subscription(each, target=target.dsn, settings=QUICK)
    assert slots(publisher) == []


async def test_schema_that_is_somebody_elses_is_not_taken_for_a_catalog(publisher18_db: Database, target_db: Database) -> None:
    """Tables of other names are nobody's business; ours may stand beside them."""
    target_db.execute("CREATE SCHEMA subscriber; CREATE TABLE subscriber.letters (id int PRIMARY KEY)")
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t")
    name = await create(publisher18_db, target_db, options=SubscriptionOptions(enabled=False))
    assert (await state_of(target_db, name)).state is State.DISABLED
    await drop_subscription(name, target=target_db.dsn, settings=QUICK)
