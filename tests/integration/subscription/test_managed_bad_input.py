"""Bad input to subscriptions of a catalog: one line in native's words where it has them, with the remedy, and nothing half done."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from subscriber import (
    PublisherError,
    SubscriberError,
    SubscriptionOptions,
    TargetError,
    alter_subscription,
    drop_subscription,
    reset_subscription_stats,
)
from subscriber.subscription.management.drop import remove
from subscriber.subscription.targets import open_catalog
from tests.support.database import Database
from tests.support.managed import create, launched, same
from tests.support.observation import eventually, until
from tests.support.program import slots, subscriber
from tests.support.replica import QUICK
from tests.support.roles import role

ROWS = "SELECT id, v FROM t ORDER BY id"
RELS = "SELECT srrelid::regclass::text, srsubstate::text FROM subscriber.pg_subscription_rel ORDER BY 1"
ERROR = "SELECT last_error FROM subscriber.subscription_stats JOIN subscriber.pg_subscription s ON s.oid = subid WHERE subname = '{}'"


@pytest.fixture
def publisher_and_target(publisher18_db: Database, target_db: Database) -> tuple[Database, Database]:
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE u (id int PRIMARY KEY, v text)")
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t; INSERT INTO t VALUES (1, 'a')")
    return publisher18_db, target_db


def shown_status(target: Database, name: str) -> dict[str, Any]:
    """What status says of it."""
    ended = subscriber("status", "--json", "--target", target.dsn, name)
    assert ended.status == 0, ended.errors
    (found,) = json.loads(ended.output)["subscriptions"]
    return dict(found)


async def test_slot_dropped_on_the_publisher(publisher_and_target: tuple[Database, Database], caplog: pytest.LogCaptureFixture) -> None:
    """The error says what is lost; nothing is created again, and the subscription can be dropped once it has no slot."""
    publisher, target = publisher_and_target
    name = await create(publisher, target)
    async with launched(target):
        await same(publisher, target, name, ROWS)
        await eventually(target, "SELECT count(*) FROM subscriber.pg_subscription_rel WHERE srsubstate = 'r'", 1)
        async with alter_subscription(name, target=target.dsn, settings=QUICK) as subscription:
            await subscription.disable()
        await eventually(publisher, f"SELECT active FROM pg_replication_slots WHERE slot_name = '{name}'", False)
        publisher.fetch(f"SELECT pg_drop_replication_slot('{name}')")
        publisher.execute("INSERT INTO t VALUES (2, 'lost')")
        async with alter_subscription(name, target=target.dsn, settings=QUICK) as subscription:
            await subscription.enable()
            position = subscription.definition.position
        said = f'replication slot "{name}" does not exist on the publisher any more: changes after {position} are lost'
        await until(lambda: caplog.text.count(said) > 1, "the launcher says so, and tries again")
        await eventually(target, f"SELECT position('{said}' IN ({ERROR.format(name)})) > 0", True)
        found = await asyncio.to_thread(shown_status, target, name)
        assert said in found["last_error"]
        assert "(hint: " in found["last_error"]
        assert found["publisher"] is None
        assert f'replication slot "{name}" does not exist' in found["publisher_error"]
    assert target.fetch(ROWS) == [(1, "a")]
    assert slots(publisher) == []
    with pytest.raises(PublisherError, match=f'could not drop replication slot "{name}" on publisher: .* does not exist') as caught:
        await drop_subscription(name, target=target.dsn, settings=QUICK)
    assert "alter -o slot_name=NONE" in str(caught.value.hint)
    async with alter_subscription(name, target=target.dsn, settings=QUICK) as subscription:
        await subscription.disable()
        await subscription.set({"slot_name": "none"})
    await drop_subscription(name, target=target.dsn, settings=QUICK)
    assert target.value("SELECT count(*) FROM subscriber.pg_subscription") == 0


async def test_a_drop_that_was_cut_off_behind_its_slot_is_done_again(
    publisher_and_target: tuple[Database, Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, target = publisher_and_target
    name = await create(publisher, target)
    catalog = await open_catalog(target.dsn, "test")
    try:
        async with catalog.claim(name) as definition:
            monkeypatch.setattr(type(catalog), "remove", _cut_off)
            with pytest.raises(TargetError, match="cut off"):
                await remove(catalog, definition, target=target.dsn, settings=QUICK)
    finally:
        monkeypatch.undo()
        await catalog.close()
    assert slots(publisher) == []
    await drop_subscription(name, target=target.dsn, settings=QUICK)
    assert target.value("SELECT count(*) FROM subscriber.pg_subscription") == 0


async def _cut_off(*_: object) -> None:
    raise TargetError("cut off")


async def test_a_slot_that_is_not_the_one_it_was(publisher_and_target: tuple[Database, Database]) -> None:
    """Created again by hand, under the same name: changes in between are lost, and that is an error."""
    publisher, target = publisher_and_target
    name = await create(publisher, target)
    async with launched(target):
        await same(publisher, target, name, ROWS)
    publisher.wait(f"SELECT active FROM pg_replication_slots WHERE slot_name = '{name}'", False)
    publisher.fetch(f"SELECT pg_drop_replication_slot('{name}')")
    publisher.execute("INSERT INTO t VALUES (2, 'lost')")
    publisher.fetch(f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')")
    publisher.execute("INSERT INTO t VALUES (3, 'after')")
    async with launched(target):
        await eventually(target, f"SELECT position('was advanced to' IN coalesce(({ERROR.format(name)}), '')) > 0", True)
    assert target.fetch(ROWS) == [(1, "a")]
    await drop_subscription(name, target=target.dsn, settings=QUICK)
    assert slots(publisher) == []


async def test_altered_publications(publisher_and_target: tuple[Database, Database], caplog: pytest.LogCaptureFixture) -> None:
    """A publication that was dropped: a warning that names it, at each verb and start; replication continues when it exists again."""
    publisher, target = publisher_and_target
    name = await create(publisher, target)
    async with launched(target):
        await same(publisher, target, name, ROWS)
    publisher.execute("DROP PUBLICATION pub")
    said = 'publication "pub" does not exist on the publisher'
    async with launched(target):
        await until(lambda: said in caplog.text, "the start warns")
        publisher.execute("INSERT INTO t VALUES (2, 'before')")
        publisher.execute("CREATE PUBLICATION pub FOR TABLE t, u; INSERT INTO t VALUES (3, 'after')")
        await eventually(target, "SELECT v FROM t WHERE id = 3", "after")
        # tables published since then are added by a refresh only
        assert target.fetch(RELS) == [("t", "r")]
        async with alter_subscription(name, target=target.dsn, settings=QUICK) as subscription:
            await subscription.refresh()
        publisher.execute("INSERT INTO u VALUES (1, 'u')")
        await same(publisher, target, name, "SELECT * FROM u")
    await drop_subscription(name, target=target.dsn, settings=QUICK)


async def test_verbs_name_only_the_missing_publications_that_they_are_about(
    publisher_and_target: tuple[Database, Database], caplog: pytest.LogCaptureFixture
) -> None:
    """As natively: SET and ADD those that are set and added, DROP and REFRESH none."""
    publisher, target = publisher_and_target
    name = await create(publisher, target, None, "pub", "gone")
    async with alter_subscription(name, target=target.dsn, settings=QUICK) as subscription:
        steps: tuple[tuple[Callable[[], Awaitable[None]], str | None], ...] = (
            (lambda: subscription.add_publications(["a"]), 'publication "a" does not exist on the publisher'),
            (lambda: subscription.add_publications(["b", "c"]), 'publications "b", "c" do not exist on the publisher'),
            (lambda: subscription.drop_publications(["b", "c"]), None),
            (subscription.refresh, None),
            (lambda: subscription.set_publications(["pub", "d"]), 'publication "d" does not exist on the publisher'),
        )
        for act, said in steps:
            caplog.clear()
            await act()
            assert [record.getMessage() for record in caplog.records if "exist" in record.getMessage()] == ([said] if said else [])
    await drop_subscription(name, target=target.dsn, settings=QUICK)


REFUSED = {
    "missing": ("DROP TABLE u", 'relation "public.u" does not exist', "CREATE TABLE u (id int PRIMARY KEY, v text)"),
    "a view": (
        "DROP TABLE u; CREATE VIEW u AS SELECT 1 AS id, 'x'::text AS v",
        'cannot use relation "public.u" as logical replication target',
        "DROP VIEW u; CREATE TABLE u (id int PRIMARY KEY, v text)",
    ),
}

ALONE = {
    "a column is missing": (
        "ALTER TABLE u DROP v",
        'logical replication target relation "public.u" is missing replicated column: "v"',
        "ALTER TABLE u ADD v text",
    ),
    "generated": (
        "ALTER TABLE u DROP v; ALTER TABLE u ADD v text GENERATED ALWAYS AS ('x') STORED",
        'logical replication target relation "public.u" has incompatible generated column: "v"',
        "ALTER TABLE u DROP v; ALTER TABLE u ADD v text",
    ),
}


@pytest.mark.parametrize("shape", REFUSED)
async def test_a_target_table_of_another_shape(publisher_and_target: tuple[Database, Database], shape: str) -> None:
    """create creates nothing, refresh and set_publications change nothing; once the cause is fixed, each works."""
    publisher, target = publisher_and_target
    spoil, said, mend = REFUSED[shape]
    publisher.execute("CREATE PUBLICATION more FOR TABLE u; INSERT INTO u VALUES (1, 'u')")
    target.execute(spoil)
    with pytest.raises(SubscriberError) as caught:
        await create(publisher, target, None, "pub", "more")
    assert said in str(caught.value)
    assert caught.value.hint
    assert slots(publisher) == []
    assert target.fetch("SELECT subname FROM subscriber.pg_subscription") == []
    name = await create(publisher, target)
    async with launched(target):
        await same(publisher, target, name, ROWS)
        await eventually(target, "SELECT count(*) FROM subscriber.pg_subscription_rel WHERE srsubstate = 'r'", 1)
        async with alter_subscription(name, target=target.dsn, settings=QUICK) as subscription:
            with pytest.raises(SubscriberError) as caught:
                await subscription.add_publications(["more"])
            assert said in str(caught.value)
            assert subscription.definition.publications == ("pub",)
            assert target.fetch(RELS) == [("t", "r")]
        publisher.execute("INSERT INTO t VALUES (2, 'b')")
        await same(publisher, target, name, ROWS)
        target.execute(mend)
        async with alter_subscription(name, target=target.dsn, settings=QUICK) as subscription:
            await subscription.add_publications(["more"])
        await same(publisher, target, name, "SELECT id, v FROM u")
    await drop_subscription(name, target=target.dsn, settings=QUICK)


@pytest.mark.parametrize("shape", ALONE)
async def test_table_that_does_not_fit_is_retried_alone(
    publisher_and_target: tuple[Database, Database], shape: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As natively: CREATE and REFRESH take it, its own synchronization fails until it fits, and the other tables continue."""
    publisher, target = publisher_and_target
    spoil, said, mend = ALONE[shape]
    publisher.execute("CREATE PUBLICATION more FOR TABLE u; INSERT INTO u VALUES (1, 'u')")
    target.execute(spoil)
    name = await create(publisher, target, None, "pub", "more")
    assert f"one table cannot be replicated yet: {said}" in caplog.text
    async with launched(target):
        failed = f'synchronization of table "public.u" failed, next attempt in 0.2 s: {said}'
        await until(lambda: caplog.text.count(failed) > 1, "it is retried")
        await eventually(target, RELS, [("t", "r"), ("u", "i")])
        publisher.execute("INSERT INTO t VALUES (2, 'b')")
        await eventually(target, "SELECT count(*) FROM t", 2)
        await eventually(target, f"SELECT position('{said}' IN ({ERROR.format(name)})) > 0", True)
        # it has begun nothing on the publisher
        await until(lambda: slots(publisher) == [name], "there is no slot but the subscription's")
        async with alter_subscription(name, target=target.dsn, settings=QUICK) as subscription:
            await subscription.drop_publications(["more"])
            assert target.fetch(RELS) == [("t", "r")]
            await subscription.add_publications(["more"])
            assert target.fetch(RELS) == [("t", "r"), ("u", "i")]
        target.execute(mend)
        await same(publisher, target, name, "SELECT id, v FROM u")
    await drop_subscription(name, target=target.dsn, settings=QUICK)


async def test_table_that_does_not_fit_and_is_not_copied_stops_all(
    publisher_and_target: tuple[Database, Database], caplog: pytest.LogCaptureFixture
) -> None:
    """As natively. The bug was a warning that one table cannot be replicated yet."""
    publisher, target = publisher_and_target
    spoil, said, mend = ALONE["a column is missing"]
    publisher.execute("CREATE PUBLICATION more FOR TABLE u")
    target.execute(spoil)
    name = await create(publisher, target, None, "pub", "more", options=SubscriptionOptions(copy_data=False))
    assert f"replication will stop at the first change that this affects: {said}" in caplog.text
    assert "cannot be replicated yet" not in caplog.text
    async with launched(target):
        await eventually(target, RELS, [("t", "r"), ("u", "r")])
        publisher.execute("INSERT INTO u VALUES (1, 'u'); INSERT INTO t VALUES (2, 'b')")
        await eventually(target, f"SELECT position('{said}' IN ({ERROR.format(name)})) > 0", True)
        assert target.fetch(ROWS) == []
        target.execute(mend)
        await eventually(target, ROWS, [(2, "b")])
    await drop_subscription(name, target=target.dsn, settings=QUICK)


async def test_right_that_only_a_change_needs_stops_all(
    publisher_and_target: tuple[Database, Database], caplog: pytest.LogCaptureFixture
) -> None:
    """The copy needs INSERT only. The bug was a warning that one table cannot be replicated yet."""
    publisher, target = publisher_and_target
    publisher.execute("CREATE PUBLICATION more FOR TABLE u; INSERT INTO u VALUES (1, 'u')")
    with role(target, "NOLOGIN") as owner:
        target.execute(f"ALTER TABLE u OWNER TO {owner.name}; REVOKE UPDATE, DELETE ON u FROM {owner.name}")
        name = await create(publisher, target, None, "pub", "more")
        said = f'role "{owner.name}" lacks UPDATE, DELETE on table "public.u" of the target'
        assert f"replication will stop at the first change that this affects: {said}" in caplog.text
        assert "cannot be replicated yet" not in caplog.text
        async with launched(target):
            await eventually(target, RELS, [("t", "r"), ("u", "r")])
            assert target.fetch("SELECT * FROM u") == [(1, "u")]
            publisher.execute("UPDATE u SET v = 'changed'; INSERT INTO t VALUES (2, 'b')")
            await eventually(target, f"SELECT position('permission denied for table u' IN ({ERROR.format(name)})) > 0", True)
            assert target.fetch(ROWS) == [(1, "a")]
            target.execute(f"GRANT UPDATE ON u TO {owner.name}")
            await eventually(target, ROWS, [(1, "a"), (2, "b")])
        await drop_subscription(name, target=target.dsn, settings=QUICK)


async def test_names_that_already_exist(publisher_and_target: tuple[Database, Database]) -> None:
    publisher, target = publisher_and_target
    publisher.execute("CREATE PUBLICATION more FOR TABLE u")
    disabled = SubscriptionOptions(enabled=False)
    first = await create(publisher, target, options=disabled)
    second = await create(publisher, target, f"{first}_2", "more", options=disabled)
    for attempt in (create(publisher, target, first), _renamed(target, second, first)):
        with pytest.raises(TargetError) as caught:
            await attempt
        assert str(caught.value) == f'subscription "{first}" already exists'
        assert caught.value.hint
    # an existing slot belongs to someone: it stays, and nothing else is left
    publisher.fetch(f"SELECT pg_create_logical_replication_slot('{first}_3', 'pgoutput')")
    with pytest.raises(SubscriberError, match=f'replication slot "{first}_3" already exists'):
        await create(publisher, target, f"{first}_3")
    with pytest.raises(SubscriberError, match="is empty or longer than 63 bytes"):
        await _renamed(target, second, "ü" * 32)
    assert target.fetch("SELECT subname FROM subscriber.pg_subscription ORDER BY 1") == [(first,), (second,)]
    assert slots(publisher) == [first, second, f"{first}_3"]
    for name in (first, second):
        await drop_subscription(name, target=target.dsn, settings=QUICK)
    assert slots(publisher) == [f"{first}_3"]


async def _renamed(target: Database, old: str, new: str) -> None:
    async with alter_subscription(old, target=target.dsn, settings=QUICK) as subscription:
        await subscription.rename(new)


async def test_statistics_are_reset_for_one_or_for_all(publisher_and_target: tuple[Database, Database]) -> None:
    publisher, target = publisher_and_target
    publisher.execute("CREATE PUBLICATION more FOR TABLE u")
    disabled = SubscriptionOptions(enabled=False)
    names = [await create(publisher, target, options=disabled)]
    names.append(await create(publisher, target, f"{names[0]}_2", "more", options=disabled))
    counted = "SELECT apply_error_count::int, confl_update_missing::int, stats_reset IS NULL FROM subscriber.pg_stat_subscription_stats"
    target.execute("UPDATE subscriber.subscription_stats SET apply_error_count = 3, confl_update_missing = 4")
    target.fetch(f"SELECT subscriber.pg_stat_reset_subscription_stats(oid) FROM subscriber.pg_subscription WHERE subname = '{names[0]}'")
    assert target.fetch(f"{counted} ORDER BY subname") == [(0, 0, False), (3, 4, True)]
    target.fetch("SELECT subscriber.pg_stat_reset_subscription_stats(NULL)")
    assert target.fetch(f"{counted} ORDER BY subname") == [(0, 0, False), (0, 0, False)]
    target.execute("UPDATE subscriber.subscription_stats SET apply_error_count = 3, confl_update_missing = 4, stats_reset = NULL")
    await reset_subscription_stats(names[1], target=target.dsn)
    assert target.fetch(f"{counted} ORDER BY subname") == [(3, 4, True), (0, 0, False)]
    with pytest.raises(TargetError, match=r'^subscription "gone" does not exist$'):
        await reset_subscription_stats("gone", target=target.dsn)
    for name in names:
        await drop_subscription(name, target=target.dsn, settings=QUICK)
