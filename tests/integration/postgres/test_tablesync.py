"""The PostgreSQL sink: one table's synchronization, and crashes in it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import asyncpg
import psycopg
import pytest

from subscriber.errors import (
    ApplyError,
    ProtocolError,
    PublisherUnavailable,
    RelationError,
    SubscriptionInUse,
    TargetError,
    TargetUnavailable,
)
from subscriber.interfaces import CopyFormat, Position, TableEntry, TableName, TableState
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.postgres.copy.postgres_table_sink import PostgresTableSink
from tests.support.database import WAIT_SECONDS, Database
from tests.support.observation import lock_refused
from tests.support.sink_postgres import Feed, Remote, opened

T = TableName("public", "t")
AT = Position("pg_1_sync_2_3", "7000000000000000001", 1, Lsn(0x1100))


@asynccontextmanager
async def syncing(database: Database, table: TableName = T) -> AsyncIterator[tuple[Feed, PostgresTableSink]]:
    async with opened(database) as feed:
        if table not in await feed.opened.tables():
            await feed.opened.add_tables([table], TableEntry(TableState.INIT))
        sink = feed.opened.open_table(table)
        try:
            yield feed, sink
        finally:
            await sink.close()


async def text(*rows: Iterable[object]) -> AsyncIterator[bytes]:
    for row in rows:
        yield "\t".join("\\N" if value is None else str(value) for value in row).encode() + b"\n"


def state(database: Database) -> str:
    found = database.value("SELECT srsubstate::text FROM subscriber.pg_subscription_rel")
    assert isinstance(found, str)
    return found


@pytest.mark.matrix
async def test_from_init_to_ready(any_target_db: Database) -> None:
    any_target_db.execute("CREATE TABLE t (extra int DEFAULT 5, v text, id int PRIMARY KEY)")
    remote = Remote("t", "*id", "v")
    async with syncing(any_target_db) as (feed, sink):
        assert await sink.begin() == TableEntry(TableState.INIT)
        assert sink.relation_id == any_target_db.value("SELECT 't'::regclass::oid::int8")
        await sink.start_copy()
        assert state(any_target_db) == "d"
        await sink.copy(["id", "v"], CopyFormat.TEXT, text((1, "a"), (2, None)))
        await sink.finish_copy(AT)
        assert state(any_target_db) == "f"
        assert await sink.position() == AT
        await sink.close()

        assert await sink.begin() == TableEntry(TableState.FINISHEDCOPY)
        feed.lsn = int(AT.lsn) - 0x100 - 0x30
        already = feed.transaction(remote.relation, remote.insert(1, "part of the snapshot"))
        later = feed.transaction(remote.relation, remote.insert(3, "c"), remote.update(1, "b"))
        await sink.apply(feed.batch(already, later))
        assert (await sink.position()).lsn == later.end_lsn
        await sink.finish_sync(Lsn(0x5000))
        assert any_target_db.fetch("SELECT id, v, extra FROM t ORDER BY id") == [(1, "b", 5), (2, None, 5), (3, "c", 5)]
        assert await feed.opened.tables() == {T: TableEntry(TableState.SYNCDONE, Lsn(0x5000))}
        assert any_target_db.value('SELECT count(*) FROM subscriber."position" WHERE srrelid <> 0') == 0
        assert await sink.begin() == TableEntry(TableState.SYNCDONE, Lsn(0x5000))
        await feed.opened.set_ready({T: Lsn(0x5000)})
        assert await sink.begin() == TableEntry(TableState.READY, Lsn(0x5000))
        assert any_target_db.value("SELECT count(*) FROM subscriber.copy_part") == 0


async def test_calls_out_of_turn(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    async with syncing(target_db) as (feed, sink):
        with pytest.raises(TargetUnavailable):
            await sink.start_copy()
        await sink.begin()
        with pytest.raises(TargetError, match="has no position of its own"):
            await sink.position()
        with pytest.raises(TargetError, match="is not in state DATASYNC"):
            await sink.finish_copy(AT)
        with pytest.raises(TargetError, match="is not in state FINISHEDCOPY"):
            await sink.finish_sync(Lsn(1))
        assert target_db.value('SELECT count(*) FROM subscriber."position" WHERE srrelid <> 0') == 0
        await sink.start_copy()
        await sink.finish_copy(AT)
        with pytest.raises(TargetError, match="is already copied"):
            await sink.start_copy()
        with pytest.raises(RelationError, match=r'relation "public\.nowhere" does not exist'):
            await feed.opened.open_table(TableName("public", "nowhere")).begin()
        target_db.execute("CREATE TABLE other (id int)")
        other = feed.opened.open_table(TableName("public", "other"))
        with pytest.raises(RelationError, match=r'table "public\.other" is not part of the subscription'):
            await other.begin()
        await other.close()


async def test_parts_side_by_side(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    async with syncing(target_db) as (_, sink):
        await sink.begin()
        await sink.start_copy()
        meeting = asyncio.Barrier(3)

        async def part(first: int) -> AsyncIterator[bytes]:
            await meeting.wait()  # all are open at the same time
            for number in range(first, 3000, 3):
                yield b"%d\tx\n" % number

        await asyncio.gather(*(sink.copy(["id", "v"], CopyFormat.TEXT, part(first)) for first in range(3)))
        assert target_db.value("SELECT count(*) FROM subscriber.copy_part") == 3
        await sink.finish_copy(AT)
        assert target_db.value("SELECT count(*) FROM t") == 3000
        assert target_db.value("SELECT count(*) FROM subscriber.copy_part") == 0


async def test_binary_rows_identity_and_triggers(any_target_db: Database) -> None:
    any_target_db.execute("""
        CREATE TABLE t (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v text, j jsonb, doubled int GENERATED ALWAYS AS (id * 2) STORED);
        CREATE TABLE seen (n int);
        CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO public.seen VALUES (NEW.id); RETURN NEW; END $$;
        CREATE TRIGGER ordinary AFTER INSERT ON t FOR EACH ROW EXECUTE FUNCTION note();
        CREATE TABLE source AS SELECT n AS id, 'v' || n AS v, jsonb_build_object('n', n) AS j FROM generate_series(1, 100) n
    """)

    async def copied() -> AsyncIterator[bytes]:
        async with (
            await psycopg.AsyncConnection.connect(any_target_db.conninfo()) as connection,
            connection.cursor().copy("COPY source TO STDOUT (FORMAT binary)") as copy,
        ):
            async for data in copy:
                yield bytes(data)

    async with syncing(any_target_db) as (_, sink):
        await sink.begin()
        await sink.start_copy()
        await sink.copy(["id", "v", "j"], CopyFormat.BINARY, copied())
        await sink.finish_copy(AT)
    assert any_target_db.fetch("SELECT count(*), sum(doubled) FROM t JOIN source USING (id, v, j)") == [(100, 10100)]
    assert any_target_db.value("SELECT count(*) FROM seen") == 0


@pytest.mark.parametrize("partitioned", [False, True])
async def test_crash_after_some_parts_undoes_exactly_those(target_db: Database, partitioned: bool) -> None:
    if partitioned:
        target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)")
        target_db.execute("CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (50); CREATE TABLE t2 PARTITION OF t DEFAULT")
    else:
        target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE heir () INHERITS (t)")
    target_db.execute("INSERT INTO t VALUES (1000, 'was there before')")
    async with syncing(target_db) as (feed, sink):
        await sink.begin()
        await sink.start_copy()
        await sink.copy(["id", "v"], CopyFormat.TEXT, text((1, "a"), (60, "b")))
        await sink.copy(["id", "v"], CopyFormat.TEXT, text((2, "a"), (61, "b")))
        with pytest.raises(ApplyError):
            await sink.copy(["id", "v"], CopyFormat.TEXT, text((3, "a"), (3, "b")))
        target_db.execute("INSERT INTO t VALUES (1001, 'came beside')")
        assert target_db.value("SELECT count(*) FROM t") == 6
        await sink.close()
        await feed.reopen()

        successor = feed.opened.open_table(T)
        assert await successor.begin() == TableEntry(TableState.INIT)
        assert target_db.fetch("SELECT id FROM t ORDER BY id") == [(1000,), (1001,)]
        assert (state(target_db), target_db.value("SELECT count(*) FROM subscriber.copy_part")) == ("i", 0)
        await successor.start_copy()
        await successor.copy(["id", "v"], CopyFormat.TEXT, text((1, "a"), (60, "b")))
        await successor.finish_copy(AT)
        await successor.close()
        assert target_db.fetch("SELECT id FROM t ORDER BY id") == [(1,), (60,), (1000,), (1001,)]


async def test_backend_killed_in_the_middle_of_a_copy(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    async with syncing(target_db) as (_, sink):
        await sink.begin()
        await sink.start_copy()
        await sink.copy(["id", "v"], CopyFormat.TEXT, text((-1, "")))

        terminate = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'COPY%' AND state = 'active'"

        async def endless() -> AsyncIterator[bytes]:
            number = 0
            while True:
                yield b"".join(b"%d\t%s\n" % (number + more, b"x" * 100) for more in range(100))
                number += 100
                if number == 20_000:
                    # asyncpg sends rows before the target has begun the COPY
                    async with asyncio.timeout(30):
                        while not (found := target_db.fetch(terminate)):
                            await asyncio.sleep(0.01)
                    assert found == [(True,)]
                await asyncio.sleep(0)

        with pytest.raises(TargetUnavailable):
            await sink.copy(["id", "v"], CopyFormat.TEXT, endless())
        assert await sink.begin() == TableEntry(TableState.INIT)
        assert target_db.value("SELECT count(*) FROM t") == 0


async def test_session_of_a_copy_that_cannot_be_closed(target_db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are committed by then. The bug was that the driver's error ended the run."""

    async def fails(*_: object, **__: object) -> None:
        raise asyncpg.InternalClientError("cannot switch to state 12; another operation (2) is in progress")

    target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    async with syncing(target_db) as (_, sink):
        await sink.begin()
        await sink.start_copy()
        with monkeypatch.context() as patch:
            patch.setattr(asyncpg.Connection, "close", fails)
            await sink.copy(["id"], CopyFormat.TEXT, text((1,)))
        await sink.finish_copy(AT)
        assert target_db.fetch("SELECT id FROM t") == [(1,)]


async def test_data_of_a_copy_that_fail(target_db: Database, caplog: pytest.LogCaptureFixture) -> None:
    """The bug was that the log had an error of asyncio too: an exception of the driver that was never retrieved."""

    async def failing() -> AsyncIterator[bytes]:
        yield b"1\n"
        raise PublisherUnavailable("lost the connection to the publisher")

    target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    async with syncing(target_db) as (_, sink):
        await sink.begin()
        await sink.start_copy()
        with pytest.raises(PublisherUnavailable):
            await sink.copy(["id"], CopyFormat.TEXT, failing())
        await asyncio.sleep(0)
        gc.collect()
    assert [record for record in caplog.records if record.name == "asyncio"] == []
    assert target_db.fetch("SELECT id FROM t") == []


async def test_control_session_killed(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    async with syncing(target_db) as (feed, sink):
        await sink.begin()
        await sink.start_copy()
        await sink.copy(["id", "v"], CopyFormat.TEXT, text((1, "")))
        pid = sink._control.connection.info.backend_pid
        target_db.execute(f"SELECT pg_terminate_backend({pid})")
        with pytest.raises(TargetUnavailable):
            await sink.finish_copy(AT)
        assert await sink.begin() == TableEntry(TableState.INIT)
        assert target_db.value("SELECT count(*) FROM t") == 0
        assert feed.opened.session.usable


async def test_part_of_a_dead_process_commits_nothing_after_its_successor_began(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    async with syncing(target_db) as (feed, zombie):
        await zombie.begin()
        await zombie.start_copy()
        # it loses its lock, but lives on
        target_db.execute(f"SELECT pg_terminate_backend({zombie._control.connection.info.backend_pid})")
        successor = feed.opened.open_table(T)
        assert await successor.begin() == TableEntry(TableState.INIT)
        await successor.start_copy()
        lost, zombie._session = zombie._session, feed.opened.session  # only to make another connection with
        with pytest.raises(TargetUnavailable, match="was begun again by another process"):
            await zombie.copy(["id", "v"], CopyFormat.TEXT, text((1, "zombie")))
        zombie._session = lost
        await successor.copy(["id", "v"], CopyFormat.TEXT, text((1, "successor")))
        await successor.finish_copy(AT)
        await successor.close()
        assert target_db.fetch("SELECT * FROM t") == [(1, "successor")]


@pytest.mark.parametrize("ends_by_itself", [True, False])
async def test_undoing_waits_for_a_part_that_is_still_being_written(
    target_db: Database, ends_by_itself: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ends_by_itself:
        monkeypatch.setattr("subscriber.sinks.postgres.session.locks._WAIT", WAIT_SECONDS)
        monkeypatch.setattr("subscriber.sinks.postgres.session.locks._COMMIT_SECONDS", WAIT_SECONDS)
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    async with syncing(target_db) as (feed, old):
        await old.begin()
        await old.start_copy()
        writing, finish = asyncio.Event(), asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield b"1\tx\n"
            writing.set()
            await finish.wait()

        copying = asyncio.create_task(old.copy(["id", "v"], CopyFormat.TEXT, slow()))
        await writing.wait()
        target_db.execute(f"SELECT pg_terminate_backend({old._control.connection.info.backend_pid})")
        successor = feed.opened.open_table(T)
        beginning = asyncio.create_task(successor.begin())
        await lock_refused(target_db)
        assert not beginning.done()
        assert state(target_db) == "d"
        if ends_by_itself:
            finish.set()
            await copying
        # else its process is as good as dead
        assert await asyncio.wait_for(beginning, WAIT_SECONDS) == TableEntry(TableState.INIT)
        assert target_db.value("SELECT count(*) FROM t") == 0
        finish.set()
        if not ends_by_itself:
            with pytest.raises(TargetUnavailable):
                await copying
        await successor.close()


async def test_second_synchronization_of_a_table(target_db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subscriber.sinks.postgres.session.locks._WAIT", 0.3)
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    async with syncing(target_db) as (feed, sink):
        await sink.begin()
        second = feed.opened.open_table(T)
        with pytest.raises(SubscriptionInUse, match=r'synchronization of table "public\.t" is active for PID'):
            await second.begin()
        await sink.close()
        assert await second.begin() == TableEntry(TableState.INIT)
        await second.close()


async def test_refused_rows(any_target_db: Database) -> None:
    any_target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v int CHECK (v < 10))")
    async with syncing(any_target_db) as (_, sink):
        await sink.begin()
        await sink.start_copy()
        cases = [
            (text((1, 1), (1, 2)), "23505", 'duplicate key value violates unique constraint "t_pkey"', ""),
            (text((1, 1), (2, "S3CRET")), "22P02", "invalid text representation (SQLSTATE 22P02)", ' column "v"'),
            (text((1, 99)), "23514", 'new row for relation "t" violates check constraint "t_v_check"', ""),
            (text((1, 1, "S3CRET")), "22P04", "bad copy file format (SQLSTATE 22P04)", ""),
        ]
        for data, sqlstate, message, column in cases:
            with pytest.raises(ApplyError) as caught:
                await sink.copy(["id", "v"], CopyFormat.TEXT, data)
            assert (caught.value.sqlstate, str(caught.value)) == (sqlstate, message)
            assert f'while copying table "public.t"{column}' in caught.value.one_line()
            assert "S3CRET" not in caught.value.one_line()
        with pytest.raises(RelationError, match='column "nope" of relation "t" does not exist'):
            await sink.copy(["id", "nope"], CopyFormat.TEXT, text((1, 1)))
        assert any_target_db.value("SELECT count(*) FROM t") == 0


async def test_error_of_the_rows_source_passes_through(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")

    async def broken() -> AsyncIterator[bytes]:
        yield b"1\n"
        raise ProtocolError("the publisher's end")

    async with syncing(target_db) as (_, sink):
        await sink.begin()
        await sink.start_copy()
        with pytest.raises(ProtocolError, match="the publisher's end"):
            await sink.copy(["id"], CopyFormat.TEXT, broken())
        assert target_db.value("SELECT count(*) FROM t") == 0
        await sink.copy(["id"], CopyFormat.TEXT, text((1,)))


async def test_row_level_security_and_ownership(target_db: Database) -> None:
    target_db.execute("""
        CREATE ROLE t_owner; CREATE TABLE t (id int PRIMARY KEY, who text);
        CREATE FUNCTION who() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.who := current_user; RETURN NEW; END $$;
        CREATE TRIGGER who BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION who(); ALTER TABLE t ENABLE ALWAYS TRIGGER who;
        ALTER TABLE t OWNER TO t_owner; ALTER TABLE t ENABLE ROW LEVEL SECURITY; ALTER TABLE t FORCE ROW LEVEL SECURITY
    """)
    try:
        async with syncing(target_db) as (_, sink):
            await sink.begin()
            await sink.start_copy()
            with pytest.raises(RelationError, match='user "t_owner" cannot replicate into relation with row-level security enabled: "t"'):
                await sink.copy(["id"], CopyFormat.TEXT, text((1,)))
            target_db.execute("ALTER TABLE t NO FORCE ROW LEVEL SECURITY")
            await sink.copy(["id"], CopyFormat.TEXT, text((1,)))
            assert target_db.fetch("SELECT who FROM t") == [("t_owner",)]
            # undone as the owner, too
            await sink.close()
            assert await sink.begin() == TableEntry(TableState.INIT)
            assert target_db.value("SELECT count(*) FROM t") == 0
    finally:
        target_db.execute("DROP OWNED BY t_owner; DROP ROLE t_owner")
