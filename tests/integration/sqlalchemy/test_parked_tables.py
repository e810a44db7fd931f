"""``on_error = park`` on targets of SQLAlchemy's."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import pytest

from subscriber import Launcher, SubscriberError, SubscriptionOptions, create_subscription, drop_subscription
from tests.support.database import Database
from tests.support.program import slots, subscriber
from tests.support.replica import QUICK, at_work
from tests.support.sqlalchemy_targets import OtherTarget

SETTINGS = replace(QUICK, create_tables=True)
TABLES = ("good", "taken", "nulls", "gone", "copied", "counted", "away")


def launched(target: OtherTarget) -> contextlib.AbstractAsyncContextManager[Launcher]:
    return at_work(Launcher(target.url, settings=replace(SETTINGS, create_tables=False)))


async def test_parked_and_reconciled(publisher18_db: Database, other_target: OtherTarget, caplog: pytest.LogCaptureFixture) -> None:
    """A unique key, NOT NULL, a table that is gone, a copy, and COMMIT PREPARED; the others continue, also after a restart."""
    publisher, target, name = publisher18_db, other_target, f"sub_{publisher18_db.name}"
    for table in TABLES:
        publisher.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, v int)")
    publisher.execute(
        f"CREATE PUBLICATION pub FOR TABLE {', '.join(TABLES)}; INSERT INTO counted VALUES (1, 0); INSERT INTO copied VALUES (1, 1)"
    )
    options = SubscriptionOptions.parse(["on_error=park", "park_after=2", "two_phase=true"])
    await create_subscription(
        name, connection=publisher.conninfo(), publications=["pub"], target=target.url, options=options, settings=SETTINGS
    )
    rel = target.ours("pg_subscription_rel")
    parked = f"SELECT srrelname FROM {rel} WHERE srsubstate = 'p' ORDER BY 1"
    await asyncio.to_thread(target.execute, "INSERT INTO copied VALUES (1, 5)")

    async def execute(sql: str) -> None:
        for statement in sql.split(";"):
            await asyncio.to_thread(target.execute, statement)

    async def counted(count: int) -> None:
        await asyncio.to_thread(target.wait, "SELECT v FROM counted", [(count,)])

    async with launched(target):
        await asyncio.to_thread(target.wait, parked, [("copied",)])
        await counted(0)
        await execute("INSERT INTO taken VALUES (1, 5)")
        publisher.execute(
            "BEGIN; INSERT INTO good VALUES (1, 1); INSERT INTO taken VALUES (1, 1), (2, 2); UPDATE counted SET v = 1; COMMIT"
        )
        await counted(1)
        assert target.fetch(parked) == [("copied",), ("taken",)]
        ((lsn, error, time),) = target.fetch(f"SELECT srsublsn, srerror, srerrortime FROM {rel} WHERE srrelname = 'taken'")
        assert (bool(lsn), 'relation "public.taken"' in error, time > 1e9) == (True, True, True)
        await execute("DROP TABLE gone; DROP TABLE nulls; CREATE TABLE nulls (id int PRIMARY KEY, v int NOT NULL)")
        publisher.execute("BEGIN; INSERT INTO gone VALUES (1, 1); INSERT INTO good VALUES (2, 2); UPDATE counted SET v = 2; COMMIT")
        await counted(2)
        assert target.fetch(parked) == [("copied",), ("gone",), ("taken",)]
    # the target has the state, and a parked table may be missing there; one that is dropped while nothing runs stays, and is parked, too
    await execute("DROP TABLE away")
    publisher.execute("INSERT INTO gone VALUES (2, 2); INSERT INTO taken VALUES (3, 3); INSERT INTO away VALUES (1, 1)")
    publisher.execute("UPDATE counted SET v = 3")
    async with launched(target):
        await counted(3)
        assert target.fetch(parked) == [("away",), ("copied",), ("gone",), ("taken",)]
        assert target.fetch("SELECT id, v FROM taken") == [(1, 5)]
        done = await asyncio.to_thread(subscriber, "status", f"--target={target.url}")
        assert "public.gone: parked since " in done.output
    done = await asyncio.to_thread(subscriber, "alter", name, f"--target={target.url}", "--resync=public.gone")
    assert (done.status, "when two_phase is enabled" in done.errors or 'relation "public.gone" does not exist' in done.errors) == (1, True)
    await execute("CREATE TABLE gone (id int PRIMARY KEY, v int); CREATE TABLE away (id int PRIMARY KEY, v int)")
    again = [f"--resync=public.{each}" for each in ("gone", "copied", "taken", "away")]
    for arguments in (["--disable"], ["-otwo_phase=false"], ["--enable"], again):
        done = await asyncio.to_thread(subscriber, "alter", name, f"--target={target.url}", *arguments)
        assert done.status == 0, done.errors
    async with launched(target):
        for table in ("gone", "copied", "taken", "away", "good"):
            rows = publisher.fetch(f"SELECT id, v FROM {table} ORDER BY 1")
            await asyncio.to_thread(target.wait, f"SELECT id, v FROM {table} ORDER BY 1", rows)
        await asyncio.to_thread(target.wait, f"SELECT count(*) FROM {rel} WHERE srsubstate = 'r' AND srerror IS NULL", [(len(TABLES),)])
    done = await asyncio.to_thread(subscriber, "alter", name, f"--target={target.url}", "-oon_error=retry")
    assert done.status == 0, done.errors
    # otherwise it leaves the subscription, as in PostgreSQL
    await execute("DROP TABLE away")
    publisher.execute("UPDATE counted SET v = 4")
    async with launched(target):
        await counted(4)
    assert 'table "public.away" was dropped in the target: it leaves the subscription' in caplog.text
    await drop_subscription(name, target=target.url, settings=SETTINGS)
    assert slots(publisher) == []


async def test_rejected_at_commit_prepared(publisher18_db: Database, sqlite_file: OtherTarget) -> None:
    """A stored transaction is applied without the changes of a table that is parked since its PREPARE."""
    publisher, target, name = publisher18_db, sqlite_file, f"sub_{publisher18_db.name}"
    publisher.execute("CREATE TABLE good (id int PRIMARY KEY, v int); CREATE TABLE taken (id int PRIMARY KEY, v int)")
    publisher.execute("CREATE PUBLICATION pub FOR TABLE good, taken")
    options = SubscriptionOptions.parse(["on_error=park", "park_after=1", "two_phase=true"])
    await create_subscription(
        name, connection=publisher.conninfo(), publications=["pub"], target=target.url, options=options, settings=SETTINGS
    )
    async with launched(target):
        await asyncio.to_thread(target.wait, f"SELECT subtwophasestate FROM {target.ours('pg_subscription')}", [("e",)])
        for number in (1, 2):
            publisher.execute(
                f"BEGIN; INSERT INTO good VALUES ({number}, 1); INSERT INTO taken VALUES ({number}, 1); PREPARE TRANSACTION 'g{number}'"
            )
        waiting = f"SELECT count(*) FROM {target.ours('prepared_transaction')}"
        await asyncio.to_thread(target.wait, waiting, [(2,)])
        await asyncio.to_thread(target.execute, "INSERT INTO taken VALUES (1, 5)")
        publisher.execute("COMMIT PREPARED 'g1'")
        await asyncio.to_thread(target.wait, "SELECT id FROM good", [(1,)])
        publisher.execute("COMMIT PREPARED 'g2'")
        await asyncio.to_thread(target.wait, "SELECT id FROM good ORDER BY 1", [(1,), (2,)])
        await asyncio.to_thread(target.wait, waiting, [(0,)])
        assert target.fetch("SELECT id, v FROM taken") == [(1, 5)]
    await drop_subscription(name, target=target.url, settings=SETTINGS)


async def test_trigger(publisher18_db: Database, sqlite_file: OtherTarget) -> None:
    publisher, target = publisher18_db, sqlite_file
    for table in ("t", "u"):
        publisher.execute(f"CREATE TABLE {table} (id int PRIMARY KEY)")
        target.execute(f"CREATE TABLE {table} (id int PRIMARY KEY)")
    publisher.execute("CREATE PUBLICATION pub FOR TABLE t, u")
    target.execute("CREATE TRIGGER reads AFTER INSERT ON t BEGIN SELECT count(*) FROM u; END")
    with pytest.raises(SubscriberError, match='trigger "reads" of table') as caught:
        await create_subscription(
            f"sub_{publisher.name}",
            connection=publisher.conninfo(),
            publications=["pub"],
            target=target.url,
            options=SubscriptionOptions(on_error="park"),
            settings=SETTINGS,
        )
    assert caught.value.hint == 'DROP TRIGGER "reads", or use on_error = retry'
