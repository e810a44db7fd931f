"""Values that nothing of ours writes, in one subscription's rows: that one is broken, and says where; the others go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from subscriber import Lsn, SubscriptionOptions, TableName, TableState, TargetError, reset_subscription_stats, subscription_status
from subscriber.abc import Position, TableEntry, TwoPhaseState, WorkerActivity
from subscriber.catalog import Definition
from subscriber.config import Settings
from subscriber.sinks.sqlalchemy.sink import SqlAlchemySink
from subscriber.sinks.sqlalchemy.subscriptions import SqlAlchemyCatalog
from subscriber.subscription.observing import State
from tests.integration.program import subscriber
from tests.integration.sqlalchemy_targets import OtherTarget, sqlite_target

LSN = "an LSN such as 0/0"
NAMES = 'a JSON array of names such as ["pub"]'
NUMBER, FLAG = "a whole number", "0 or 1"
# table, column, value, what it can be
UNKNOWN = [
    ("pg_subscription", "subskiplsn", "zz", LSN),
    ("pg_subscription", "substream", "x", "f, p, t"),
    ("pg_subscription", "subtwophasestate", "q", "d, e, p"),
    ("pg_subscription", "subsynccommit", "never", "local, off, on, remote_apply, remote_write"),
    ("pg_subscription", "suborigin", "mine", "any, none"),
    ("pg_subscription", "subpublications", "pub", NAMES),
    ("pg_subscription", "subpublications", "[1]", NAMES),
    ("position", "remote_lsn", "0-0", LSN),
    ("pg_subscription_rel", "srsubstate", "Z", "i, d, f, s, r"),
    ("pg_subscription_rel", "srsublsn", "??", LSN),
    ("pg_subscription_rel", "srrelid", "x", NUMBER),
    ("pg_subscription", "subgeneration", "1.5", NUMBER),
    ("pg_subscription", "subenabled", "yes", FLAG),
    ("pg_subscription", "subbinary", "7", FLAG),
    ("pg_subscription", "subrefresh", "x", FLAG),
]
OPENS = {"substream", "subsynccommit", "suborigin"}
"""They are the run's own, not the stored ones."""


def sink(target: OtherTarget) -> SqlAlchemySink:
    return SqlAlchemySink(target.url, options=SubscriptionOptions(), settings=Settings(), defined=True)


async def begin(opened: SqlAlchemySink) -> None:
    """As a run does."""
    await opened.open("one", lambda _: None)
    await opened.tables()


@pytest.fixture
async def target(tmp_path: Path) -> AsyncIterator[OtherTarget]:
    """Subscriptions ``one`` and ``other``, each with a table and a position."""
    found = sqlite_target(tmp_path / "replica.db")
    found.execute("CREATE TABLE t (id int PRIMARY KEY)")
    catalog = await SqlAlchemyCatalog.open(found.url, "test")
    for name in ("one", "other"):
        definition = Definition(
            name=name,
            enabled=False,
            conninfo="host=127.0.0.1 port=1",
            slot_name=None,
            publications=("pub",),
            options=SubscriptionOptions(),
            two_phase=TwoPhaseState.DISABLED,
        )
        async with catalog.create(definition) as made:
            await catalog.update(made.oid, {"made": True})
        opened = sink(found)
        await opened.open(name, lambda _: None)
        await opened.set_position(Position("slot", "7", 1, Lsn(0x1000)))
        await opened.add_table(TableName("public", "t"), TableEntry(TableState.READY, Lsn(0x1000)))
        await opened.close()
    yield found
    await catalog.close()


@pytest.mark.parametrize(("table", "column", "value", "known"), UNKNOWN)
async def test_unknown_values(target: OtherTarget, table: str, column: str, value: str, known: str) -> None:
    """The bug was that each of these ended every verb, status and the launcher of all subscriptions in a traceback."""
    oid = target.fetch(f"SELECT oid FROM {target.ours('pg_subscription')} WHERE subname = 'one'")[0][0]
    owner = "oid" if table == "pg_subscription" else "srsubid"
    target.execute(f"UPDATE {target.ours(table)} SET {column} = '{value}' WHERE {owner} = {oid}")
    said = f'column "{column}" of {target.ours(table)} in the target has the unknown value "{value}"'
    hint = f"UPDATE {target.ours(table)} there: it can be {known}"
    one, other = await subscription_status(target.url)
    assert (one.state, one.observation.definition.problem, one.observation.definition.remedy) == (State.BROKEN, said, hint)
    assert (other.state, other.observation.definition.problem) == (State.DISABLED, None)
    catalog = await SqlAlchemyCatalog.open(target.url, "test")
    try:
        problems = {found.name: found.problem for found in await catalog.subscriptions()}
        if table == "pg_subscription_rel":
            assert problems == {"one": None, "other": None}
        else:
            assert problems == {"one": said, "other": None}
            with pytest.raises(TargetError) as refused:
                async with catalog.claim("one"):
                    pass
            assert refused.value.one_line() == f'subscription "one" cannot be used: {said} (hint: {hint})'
        async with catalog.claim("other") as claimed:
            assert claimed.name == "other"
    finally:
        await catalog.close()
    opened = sink(target)
    try:
        if column in OPENS:
            await begin(opened)
        else:
            with pytest.raises(TargetError) as refused:
                await begin(opened)
            assert refused.value.one_line() == f"{said} (hint: {hint})"
    finally:
        await opened.close()


STATISTICS = [
    ("subscription_stats", "confl_insert_exists", NUMBER),
    ("subscription_stats", "stats_reset", "a number"),
    ("subscription_stats", "last_error_time", "a number"),
]


@pytest.mark.parametrize(("table", "column", "known"), STATISTICS)
async def test_senseless_statistics(target: OtherTarget, table: str, column: str, known: str) -> None:
    """The bug was that status ended in a traceback."""
    oid = target.fetch(f"SELECT oid FROM {target.ours('pg_subscription')} WHERE subname = 'one'")[0][0]
    target.execute(f"UPDATE {target.ours(table)} SET {column} = 'zz' WHERE subid = {oid}")
    one, other = await subscription_status(target.url)
    assert one.observation.definition.remedy == f"UPDATE {target.ours(table)} there: it can be {known}"
    assert (one.state, other.state) == (State.BROKEN, State.DISABLED)
    assert (one.observation.stats_reset, one.observation.last_error_time) == (None, None)
    # it is about what was counted only
    opened = sink(target)
    await begin(opened)
    await opened.close()
    await reset_subscription_stats("one", target=target.url)
    (one, _) = await subscription_status(target.url)
    assert one.state is (State.BROKEN if column == "last_error_time" else State.DISABLED)


async def test_senseless_reports_of_workers(target: OtherTarget) -> None:
    """They are written anew within a second, and make nothing broken meanwhile."""
    opened = sink(target)
    await begin(opened)
    await opened.report([WorkerActivity(received=Lsn(1), transactions=3, sent_at=1.0)], None)
    columns = ["pid", "last_msg_send_time", "transactions", "changes_per_second", "copied_rows", "received_lsn"]
    target.execute(f"UPDATE {target.ours('worker')} SET " + ", ".join(f"{column} = 'zz'" for column in columns))
    one, other = await subscription_status(target.url)
    assert (one.observation.definition.problem, other.observation.definition.problem) == (None, None)
    assert one.observation.pid is None
    assert one.observation.worker == WorkerActivity()
    assert (await asyncio.to_thread(subscriber, "status", f"--target={target.url}", "--json")).status == 0
    await opened.report([WorkerActivity(received=Lsn(1))], None)
    one, _ = await subscription_status(target.url)
    assert one.observation.pid is not None
    await opened.close()


async def test_an_oid_that_is_none(target: OtherTarget) -> None:
    target.execute(f"UPDATE {target.ours('pg_subscription')} SET oid = 'zz' WHERE subname = 'one'")
    target.execute(
        f"UPDATE {target.ours('position')} SET srsubid = 'zz' WHERE srsubid = (SELECT min(srsubid) FROM {target.ours('position')})"
    )
    said = f'column "oid" of {target.ours("pg_subscription")} in the target has the unknown value "zz"'
    one, other = await subscription_status(target.url)
    assert (one.state, one.observation.definition.problem, other.state) == (State.BROKEN, said, State.DISABLED)
    catalog = await SqlAlchemyCatalog.open(target.url, "test")
    try:
        async with catalog.claim("other"):
            pass
        with pytest.raises(TargetError) as refused:
            async with catalog.claim("one"):
                pass
        assert said in refused.value.one_line()
    finally:
        await catalog.close()
    opened = sink(target)
    with pytest.raises(TargetError) as refused:
        await begin(opened)
    assert refused.value.one_line() == f"{said} (hint: UPDATE {target.ours('pg_subscription')} there: it can be {NUMBER})"
    await opened.close()


async def test_a_counter_that_is_none(target: OtherTarget) -> None:
    target.execute(f"UPDATE {target.ours('version')} SET next_oid = 'zz'")
    opened = SqlAlchemySink(target.url, options=SubscriptionOptions(), settings=Settings())
    with pytest.raises(TargetError) as refused:
        await opened.open("third", lambda _: None)
    assert f"UPDATE {target.ours('version')} there: it can be a number above all oids there and 16384" in refused.value.one_line()
    await opened.close()
    opened = sink(target)
    await begin(opened)
    await opened.close()


async def test_a_timeline_that_is_none(target: OtherTarget) -> None:
    target.execute(f"UPDATE {target.ours('position')} SET timeline = 'zz'")
    opened = sink(target)
    with pytest.raises(TargetError) as refused:
        await begin(opened)
    said = f'column "timeline" of {target.ours("position")} in the target has the unknown value "zz"'
    assert refused.value.one_line() == f"{said} (hint: UPDATE {target.ours('position')} there: it can be {NUMBER})"
    await opened.close()


async def test_it_is_said_in_one_line(target: OtherTarget) -> None:
    target.execute(f"UPDATE {target.ours('pg_subscription')} SET subpublications = '{{' WHERE subname = 'one'")
    said = f'column "subpublications" of {target.ours("pg_subscription")} in the target has the unknown value "{{"'
    done = await asyncio.to_thread(subscriber, "status", f"--target={target.url}")
    assert (done.status, done.errors) == (0, "")
    assert "one: broken" in done.output
    assert f"  problem       {said} (hint: " in done.output
    assert "other: disabled" in done.output
    done = await asyncio.to_thread(subscriber, "drop", "one", f"--target={target.url}")
    assert done.status == 1
    assert done.errors.startswith(f'subscriber: subscription "one" cannot be used: {said} (hint: ')
    assert len(done.errors.splitlines()) == 1
