"""The PostgreSQL sink: its catalog, its lock, its connections."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlencode

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from subscriber.catalog.store import Row
from subscriber.config import Settings, SubscriptionOptions
from subscriber.errors import (
    ConfigurationError,
    SubscriberError,
    SubscriptionChanged,
    SubscriptionInUse,
    TargetError,
    TargetUnavailable,
)
from subscriber.interfaces import Position, SubscriptionState, TableEntry, TableName, TableState, TwoPhaseState, WorkerActivity
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.postgres.catalog.schema import VERSION
from subscriber.sinks.postgres.catalog.store import PostgresStore
from subscriber.sinks.postgres.catalog.subscriptions import PostgresCatalog, observe
from subscriber.sinks.postgres.session.target import Target, asyncpg_arguments
from subscriber.sinks.postgres.sink import PostgresSink
from tests.support.database import WAIT_SECONDS, Database
from tests.support.sink_postgres import NAME, START, Feed, Remote, opened


async def state_of(database: Database, name: str = NAME) -> SubscriptionState:
    feed = Feed(database)
    feed.opened = await feed.sink.open(name, feed.durable.append)
    state = feed.opened.state
    await feed.opened.close()
    return state


@pytest.mark.matrix
async def test_stored_state_is_read_back(any_target_db: Database) -> None:
    feed = Feed(any_target_db)
    feed.opened = await feed.sink.open(NAME, feed.durable.append)
    state = feed.opened.state
    assert (state.name, state.slot_name, state.publications, state.two_phase, state.position) == (
        NAME,
        None,
        (),
        TwoPhaseState.DISABLED,
        None,
    )
    assert state.target_identifier == any_target_db.value("SELECT system_identifier::text FROM pg_control_system()")
    assert state.oid >= 16384
    with pytest.raises(TargetError, match="has no position"):
        await feed.apply()
    await feed.opened.begin_slot("slot", ["p1", "p 2"], TwoPhaseState.PENDING)
    again = await reopened(feed)
    assert (again.oid, again.slot_name, again.publications, again.two_phase, again.position) == (
        state.oid,
        "slot",
        ("p1", "p 2"),
        TwoPhaseState.PENDING,
        None,
    )
    position = Position("slot", "123", 2, Lsn.parse("1/2"))
    await feed.opened.set_position(position)
    await feed.opened.set_publications(["p3"])
    await feed.opened.set_two_phase(TwoPhaseState.ENABLED)
    again = await reopened(feed)
    assert (again.publications, again.two_phase, again.position) == (("p3",), TwoPhaseState.ENABLED, position)
    await feed.opened.set_position(Position("slot", "123", 3, Lsn.parse("1/9")))
    assert (await reopened(feed)).position == Position("slot", "123", 3, Lsn.parse("1/9"))
    await feed.opened.close()
    await feed.opened.close()


async def reopened(feed: Feed) -> SubscriptionState:
    await feed.opened.close()
    feed.sink = feed.new_sink()
    feed.opened = await feed.sink.open(NAME, feed.durable.append)
    return feed.opened.state


async def test_oids_are_the_clusters(target_db: Database) -> None:
    first, second = await state_of(target_db, "a"), await state_of(target_db, "b")
    target_db.execute("CREATE SUBSCRIPTION native CONNECTION '' PUBLICATION p WITH (connect = false)")
    native = target_db.value("SELECT oid::int8 FROM pg_subscription WHERE subname = 'native'")
    assert first.oid < second.oid < native
    assert target_db.value("SELECT count(*) FROM pg_largeobject_metadata") == 0


async def test_catalog_made_by_many_at_once(target_db: Database) -> None:
    states = await asyncio.gather(*(state_of(target_db, f"s{number % 4}") for number in range(8)))
    # two sinks open the same name: the later one waits, and finds the lock free
    assert target_db.value("SELECT count(*) FROM subscriber.pg_subscription") == 4
    assert len({state.oid for state in states}) == 4
    assert target_db.fetch("SELECT version FROM subscriber.version") == [(VERSION,)]


async def test_later_catalog_is_refused(target_db: Database) -> None:
    await state_of(target_db)
    target_db.execute("UPDATE subscriber.version SET version = 99")
    with pytest.raises(TargetError, match=f'schema "subscriber" of the target has version 99, but this program needs version {VERSION}'):
        await state_of(target_db)


async def test_schema_made_by_the_administrator_is_used(target_db: Database) -> None:
    target_db.execute("CREATE SCHEMA subscriber")
    assert (await state_of(target_db)).name == NAME


@pytest.mark.parametrize("name", ["", "x" * 64, "ä" * 32, "a\0b"])
async def test_names_that_cannot_be(target_db: Database, name: str) -> None:
    with pytest.raises(ConfigurationError, match="subscription name"):
        await state_of(target_db, name)


async def test_tables(target_db: Database) -> None:
    target_db.execute(
        'CREATE SCHEMA "S"; CREATE TABLE a (id int); CREATE TABLE "S"."B" (id int) PARTITION BY LIST (id); CREATE VIEW v AS TABLE a'
    )
    a, b = TableName("public", "a"), TableName("S", "B")
    async with opened(target_db) as feed:
        await feed.opened.add_tables([a], TableEntry(TableState.INIT))
        await feed.opened.add_tables([b], TableEntry(TableState.READY))
        assert await feed.opened.tables() == {a: TableEntry(TableState.INIT), b: TableEntry(TableState.READY)}
        failed = await feed.opened.add_tables([TableName("public", "nowhere"), TableName("public", "v")], TableEntry(TableState.INIT))
        nowhere, view = [str(error) for error in failed.values()]
        assert 'relation "public.nowhere" does not exist' in nowhere
        assert 'cannot use relation "public.v" as logical replication target' in view
        target_db.execute("UPDATE subscriber.pg_subscription_rel SET srsubstate = 's', srsublsn = '0/99' WHERE srrelid = 'a'::regclass")
        assert (await feed.opened.tables())[a] == TableEntry(TableState.SYNCDONE, Lsn(0x99))
        await feed.opened.set_ready({a: Lsn(0x99)})
        await feed.reopen()
        assert (await feed.opened.tables())[a] == TableEntry(TableState.READY, Lsn(0x99))
        target_db.execute('DROP TABLE "S"."B"')
        assert set(await feed.opened.tables()) == {a}
        assert target_db.value("SELECT count(*) FROM subscriber.pg_subscription_rel") == 1
        await feed.opened.remove_table(b)
        await feed.opened.remove_table(a)
        assert await feed.opened.tables() == {}


async def test_dropped_table_leaves_no_position_behind(target_db: Database, caplog: pytest.LogCaptureFixture) -> None:
    """Its position kept the slot of its synchronization, and that the publisher's WAL."""
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    name = TableName("public", "t")
    async with opened(target_db) as feed:
        await feed.opened.add_tables([name], TableEntry(TableState.INIT))
        work = feed.opened.open_table(name)
        await work.begin()
        await work.start_copy()
        await work.finish_copy(Position("of_the_table", "7000000000000000001", 1, START))
        await work.close()
        assert await feed.opened.slot_names() == {"slot", "of_the_table"}
        target_db.execute("DROP TABLE t")
        await feed.opened.report([], None)
        assert await feed.opened.tables() == {}
        assert await feed.opened.slot_names() == {"slot"}
        assert caplog.text.count('table "public.t" was dropped in the target: it leaves the subscription') == 1


async def test_second_writer_is_told_who_the_first_is(target_db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subscriber.sinks.postgres.session.locks._WAIT", 0.3)
    async with opened(target_db) as feed:
        pid = feed.opened.session.connection.info.backend_pid
        with pytest.raises(SubscriptionInUse, match=f'subscription "{NAME}" is active for PID {pid}'):
            await state_of(target_db)
        # another subscription is another matter
        assert (await state_of(target_db, "other")).oid != feed.oid
        with target_db.connect() as elsewhere:
            elsewhere.execute("SELECT pg_advisory_lock(1)")
            assert feed.opened.session.usable
    assert (await state_of(target_db)).oid == feed.oid


async def test_successor_of_a_killed_process_waits_for_its_backend(target_db: Database, tmp_path: Path) -> None:
    """A process is killed while its backend waits for a lock: the successor opens once that backend has noticed."""
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    await state_of(target_db)
    script = tmp_path / "holder.py"
    script.write_text(f"""
import asyncio
from tests.support.sink_postgres import Feed, Remote
class Target:
    dsn = {target_db.dsn!r}
async def main():
    feed = Feed(Target())
    await feed.open()
    remote = Remote("t", "*id")
    await feed.apply(remote.relation, remote.insert(1))
asyncio.run(main())
""")
    with target_db.connect() as blocker:
        blocker.execute("BEGIN; LOCK TABLE t")
        process = subprocess.Popen([sys.executable, str(script)], cwd=Path(__file__).parents[3], env={**os.environ, "PYTHONPATH": "."})
        try:
            target_db.wait("SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 't'::regclass", 1)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        started = time.monotonic()
        async with opened(target_db) as feed:
            assert time.monotonic() - started < 10
            blocker.execute("COMMIT")
            assert target_db.fetch("SELECT id FROM t") == []
            remote = Remote("t", "*id")
            await feed.apply(remote.relation, remote.insert(2))
            assert target_db.fetch("SELECT id FROM t") == [(2,)]


async def test_cancelled_apply_breaks_the_session_and_loses_nothing(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    remote = Remote("t", "*id")
    async with opened(target_db) as feed:
        with target_db.connect() as blocker:
            blocker.execute("BEGIN; LOCK TABLE t")
            applying = asyncio.create_task(feed.apply(remote.relation, remote.insert(1)))
            async with asyncio.timeout(20):
                while not target_db.value("SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 't'::regclass"):
                    await asyncio.sleep(0.01)
            applying.cancel()
            with pytest.raises(asyncio.CancelledError):
                await applying
            with pytest.raises(TargetUnavailable, match="interrupted"):
                await feed.opened.advance(Lsn(0x9999))
        await feed.reopen()
        # whether it took effect is open; the position tells
        applied = feed.position() != START
        assert target_db.fetch("SELECT id FROM t") == ([(1,)] if applied else [])
        await feed.apply(remote.relation, remote.insert(2))
        assert target_db.fetch("SELECT id FROM t WHERE id = 2") == [(2,)]


async def test_position_that_vanished(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    remote = Remote("t", "*id")
    async with opened(target_db) as feed:
        target_db.execute('DELETE FROM subscriber."position"')
        with pytest.raises(TargetUnavailable, match="the target does not have position 0/1000 of subscription"):
            await feed.apply(remote.relation, remote.insert(1))
        with pytest.raises(TargetError, match="the target has no position of subscription"):
            await feed.opened.advance(Lsn(0x9999))
        assert target_db.fetch("SELECT id FROM t") == []


@pytest.mark.parametrize(
    "target",
    [
        "host=localhost password='S3CRET",
        "host=localhost nonsense=S3CRET",
        "postgresql://u:S3CRET@h/d?nonsense=1",
        "S3CRET",
        "replication=database",
    ],
)
def test_bad_targets(target: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        PostgresSink(target, options=SubscriptionOptions(), settings=Settings())
    assert "S3CRET" not in caught.value.one_line()


async def test_targets_that_do_not_answer(target_db: Database) -> None:
    feed = Feed(target_db)
    wrong = {
        "postgresql://user:S3CRET@127.0.0.1:notaport/db": ConfigurationError,
        "host=localhost sslmode=nonsense password=S3CRET": ConfigurationError,
        "host=127.0.0.1 port=1 dbname=x user=x": TargetUnavailable,
        target_db.server.dsn("nowhere"): TargetError,
        target_db.conninfo(password="S3CRET"): TargetError,
        target_db.conninfo(user="nobody_of_this_name"): TargetError,
    }
    for target, expected in wrong.items():
        with pytest.raises(SubscriberError) as caught:
            await feed.new_sink(target).open(NAME, feed.durable.append)
        assert type(caught.value) is expected
        assert "S3CRET" not in caught.value.one_line()


async def test_too_many_connections_is_worth_waiting_for(target_db: Database) -> None:
    target_db.execute(f"CREATE ROLE few LOGIN PASSWORD 'pw' CONNECTION LIMIT 0; ALTER DATABASE {target_db.name} CONNECTION LIMIT 1")
    try:
        with pytest.raises(TargetUnavailable):
            await Feed(target_db).new_sink(target_db.conninfo(user="few", password="pw")).open(NAME, lambda _lsn: None)
    finally:
        target_db.execute(f"ALTER DATABASE {target_db.name} CONNECTION LIMIT -1; DROP ROLE few")


async def test_every_way_to_name_a_target(target_db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    parts = {key: str(value) for key, value in conninfo_to_dict(target_db.conninfo()).items()}
    service, passfile = tmp_path / "service.conf", tmp_path / "passfile"
    service.write_text(
        f"[here]\nhost={parts['host']}\nport={parts['port']}\ndbname={target_db.name}\nuser={parts['user']}\napplication_name=named\n"
    )
    passfile.write_text(f"*:*:*:*:{parts.get('password', '')}\n")
    passfile.chmod(0o600)
    monkeypatch.setenv("PGSERVICEFILE", str(service))
    monkeypatch.setenv("PGPASSFILE", str(passfile))
    password = {"password": parts["password"]} if "password" in parts else {}
    hosts = {"host": f"127.0.0.1,{parts['host']}", "port": f"1,{parts['port']}", "dbname": target_db.name, "user": parts["user"]}
    targets = [
        "service=here",
        "postgresql:///?service=here",
        "postgresql:///?" + urlencode({**hosts, **password, "target_session_attrs": "read-write"}),
        f"host={parts['host']} port={parts['port']} dbname={target_db.name} user={parts['user']} passfile={passfile}",
        "service=here hostaddr=127.0.0.1 connect_timeout=7 keepalives=1 keepalives_idle=3 tcp_user_timeout=9000 sslmode=prefer",
        "service=here options='-c application_name=by_option -c work_mem=1234kB'",
    ]
    for number, target in enumerate(targets):
        feed = Feed(target_db)
        feed.sink = feed.new_sink(target)
        feed.lsn += number * 0x10000
        await feed.open()
        remote = Remote("t", "*id")
        await feed.apply(remote.relation, remote.insert(number))
        reader = feed.opened.reader
        assert (await reader.fetch("SELECT current_database()::text AS name"))[0]["name"] == target_db.name
        if "work_mem" in target:
            assert (await reader.fetch("SHOW work_mem"))[0]["work_mem"] == "1234kB"
        await feed.opened.close()
    assert target_db.value("SELECT count(*) FROM t") == len(targets)


async def test_home_that_cannot_be_read_is_named(target_db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    home = "/" + "too_long" * 40  # as a directory of another user, which root could read
    dsn = target_db.conninfo(hostaddr="127.0.0.1")
    monkeypatch.setenv("HOME", home)
    with pytest.raises(ConfigurationError, match=f'"{home}.*" cannot be read: File name too long') as raised:
        await Feed(target_db).new_sink(dsn).open(NAME, lambda _lsn: None)
    assert "HOME" in str(raised.value.hint)


@pytest.mark.parametrize("parameter", ["channel_binding=require", "gssencmode=require", "sslrootcert=system"])
async def test_protection_that_asyncpg_lacks_is_refused(target_db: Database, parameter: str) -> None:
    name, _, value = parameter.partition("=")
    base = {"host": "localhost", "port": "5432", "dbname": "d", "user": "u", "password": "S3CRET"}
    assert asyncpg_arguments(base, "app")["host"] == "localhost"
    with pytest.raises(ConfigurationError, match=name) as caught:
        asyncpg_arguments({**base, name: value}, "app")
    assert "S3CRET" not in caught.value.one_line()


async def test_sessions_are_named_and_end_with_the_sink(target_db: Database) -> None:
    async with opened(target_db):
        names = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'sub'"
        assert target_db.value(names) == 2
    target_db.wait(names, 0)
    with psycopg.connect(target_db.conninfo()):
        assert target_db.value(names) == 0


async def test_parameters_of_the_command_line_are_shown(target_db: Database) -> None:
    """The latest one: the next run with other parameters is of the same subscription."""
    shown = "SELECT oid::int, subbinary, substream FROM subscriber.pg_subscription"
    oid = (await state_of(target_db)).oid
    assert target_db.fetch(shown) == [(oid, False, "p")]
    sink = PostgresSink(target_db.dsn, options=SubscriptionOptions(binary=True, streaming="on"), settings=Settings())
    assert await sink.exists(NAME)
    await (await sink.open(NAME, lambda _: None)).close()
    assert target_db.fetch(shown) == [(oid, True, "t")]


async def test_first_report_is_written_while_status_is_read(target_db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(target_db) as feed:
        live_workers = PostgresStore.live_workers

        async def report_first(store: PostgresStore, workers: Sequence[Row]) -> Mapping[tuple[int, int], int | None]:
            await feed.opened.report([WorkerActivity()], None)
            return await live_workers(store, workers)

        monkeypatch.setattr(PostgresStore, "live_workers", report_first)
        assert [found.worker is None for found in await observe(target_db.dsn)] == [True]
        assert [found.worker is None for found in await observe(target_db.dsn)] == [False]


async def test_dropped_and_opened_again(target_db: Database) -> None:
    """An entry that was dropped is not created again: no process would run it, and its name would be taken."""
    sink = PostgresSink(target_db.dsn, options=SubscriptionOptions(), settings=Settings())
    opened = await sink.open(NAME, lambda _: None)
    target_db.execute("DELETE FROM subscriber.pg_subscription")
    await opened.close()
    with pytest.raises(SubscriptionChanged, match="was dropped or renamed"):
        await sink.open(NAME, lambda _: None)
    assert target_db.fetch("SELECT count(*) FROM subscriber.pg_subscription") == [(0,)]


async def test_verbs_open_one_session(target_db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug was that each of them first connected through libpq, only to find out how asyncpg has to connect."""

    async def refuse(*_: object) -> None:
        raise AssertionError("a second session")

    with monkeypatch.context() as patched:
        patched.setattr(Target, "connect_asyncpg", refuse)
        catalog = await PostgresCatalog.open(target_db.dsn, "test")
        assert await catalog.subscriptions() == []
        assert await observe(target_db.dsn) == []
        await catalog.close()
    # a launcher waits for notifications, which psycopg does not read between two queries
    catalog = await PostgresCatalog.open(target_db.dsn, "test")
    await catalog.become_launcher()
    target_db.execute("NOTIFY subscriber")
    async with asyncio.timeout(WAIT_SECONDS):
        await catalog.wait(2 * WAIT_SECONDS)
    await catalog.close()
