"""What a publisher says became of a transaction."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from subscriber.errors import PublisherUnavailable, UndecidedTransaction
from subscriber.testing.binaries import server_user
from subscriber.testing.server import EmbeddedServer
from subscriber.walreceiver.transaction_outcome import is_dropped, was_rolled_back
from tests.support.database import Database, ServerAddress, fresh_database
from tests.support.streams import streaming

XID = "SELECT pg_current_xact_id()::text::int8 % 4294967296"


async def test_of_every_kind(publisher18_db: Database) -> None:
    await check_every_kind(publisher18_db)
    await check_subtransactions(publisher18_db)


async def test_when_ids_are_used_again(make_server: Callable[..., EmbeddedServer]) -> None:
    """In the second epoch: an id that is larger than the next one is of the first."""
    server = make_server(18)
    server.stop()
    done = server_user().run(server.bindir / "pg_resetwal", "-e", "1", "-D", server.data_directory, cwd=server.base)
    assert done.returncode == 0, done.stderr
    server.start()
    with fresh_database(ServerAddress(server.dsn(), 18), "pub") as database:
        assert database.value("SELECT pg_current_xact_id()::text::int8") > 2**32
        await check_every_kind(database)
        await check_subtransactions(database)


async def check_subtransactions(database: Database) -> None:
    database.execute("CREATE TABLE subs (id int); CREATE PUBLICATION p FOR TABLE subs")
    database.execute(f"SELECT pg_create_logical_replication_slot('s_{database.name}', 'pgoutput')")
    async with streaming(database, f"s_{database.name}") as stream:
        with database.connect() as session:

            def xid(*before: str) -> int:
                for statement in before:
                    session.execute(statement.encode())
                row = session.execute("INSERT INTO subs VALUES (1) RETURNING xmin::text::int8").fetchone()
                assert row is not None
                return int(row[0])

            top = xid("BEGIN")
            child = xid("SAVEPOINT gone", "SAVEPOINT child")
            gone = xid("RELEASE child")
            # of the youngest there are it is not said yet that they ended
            kept = xid("ROLLBACK TO gone", "SAVEPOINT kept")
            asked = (child, gone, kept)
            assert {*await stream.rolled_back(top, asked)} == {child, gone}
            session.execute("COMMIT")
            assert {*await stream.rolled_back(top, asked)} == {child, gone}
            assert not await stream.rolled_back(top, [kept])
            prepared = xid("BEGIN")
            gone, kept = xid("SAVEPOINT gone"), xid("ROLLBACK TO gone", "SAVEPOINT kept")
            session.execute(f"PREPARE TRANSACTION '{database.name}'".encode())
            assert [*await stream.rolled_back(prepared, [gone, kept])] == [gone]
            database.execute(f"ROLLBACK PREPARED '{database.name}'")
            assert not await stream.rolled_back(prepared, [gone, kept])
        # the session is kept; another is opened if it is lost
        sessions = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE '%outcome%'"
        ((first,),) = database.fetch(sessions)
        database.fetch(f"SELECT pg_terminate_backend({first})")
        database.wait(f"SELECT count(*) FROM pg_stat_activity WHERE pid = {first}", 0)
        assert {*await stream.rolled_back(top, asked)} == {child, asked[1]}
        ((second,),) = database.fetch(sessions)
        assert second != first
        for unknown in (kept + 1_000_000, (kept - 2**31 - 1) % 2**32 or 1):
            with pytest.raises(UndecidedTransaction):
                await stream.rolled_back(top, [unknown])
        stream._slot_name = "none"
        with pytest.raises(UndecidedTransaction, match="another server answers, or it is a standby"):
            await stream.rolled_back(top, asked)


async def check_every_kind(database: Database) -> None:
    identifier = database.value("SELECT system_identifier::text FROM pg_control_system()")

    async def asked(xid: int, system_identifier: str = identifier, timeline: int = 1) -> bool:
        return await was_rolled_back(database.dsn, xid, system_identifier=system_identifier, timeline=timeline, application_name="test")

    committed = database.value(XID)
    with database.connect() as session:

        def begin() -> int:
            session.execute("BEGIN")
            row = session.execute(XID).fetchone()
            assert row is not None
            return int(row[0])

        running = begin()
        # the youngest there is
        assert not await asked(running)
        session.execute("ROLLBACK")
        assert await asked(running)
        prepared = begin()
        session.execute(f"PREPARE TRANSACTION '{database.name}'".encode())
        assert not await asked(prepared)
        later = database.value(XID)
        assert later > prepared
        assert not await asked(prepared)
        database.execute(f"ROLLBACK PREPARED '{database.name}'")
        assert await asked(prepared)
        # that of another server, or of another history, would be another one
        assert not await asked(prepared, system_identifier="1")
        assert not await asked(prepared, timeline=2)
        prepared = begin()
        session.execute(f"PREPARE TRANSACTION '{database.name}'".encode())
        database.execute(f"COMMIT PREPARED '{database.name}'")
        assert not await asked(prepared)
    assert not await asked(committed)
    await check_dropped_tables(database, identifier)
    # of the future, or of the epoch before
    for other in (committed + 1_000_000, 2**32 - 1, 2**31 + committed):
        assert not await asked(other)


async def check_dropped_tables(database: Database, identifier: str) -> None:
    """A table that no query sees is not dropped if the transaction that changed it may have created it."""

    async def dropped(xid: int, system_identifier: str = identifier) -> bool:
        oid = int(database.value(f"SELECT coalesce(max(oid), {seen})::text FROM pg_class WHERE relname = 'brief'"))
        return await is_dropped(database.dsn, oid, [xid], system_identifier=system_identifier, timeline=1, application_name="test")

    with database.connect() as session:
        for ending in ("COMMIT", "ROLLBACK"):
            session.execute("BEGIN; CREATE TABLE brief ()")
            row = session.execute(f"SELECT 'brief'::regclass::oid::int8, ({XID})").fetchone()
            assert row is not None
            seen, xid = row
            assert not await dropped(xid)
            session.execute(f"PREPARE TRANSACTION '{database.name}'".encode())
            assert not await dropped(xid)
            database.execute(f"{ending} PREPARED '{database.name}'")
            assert await dropped(xid) == (ending == "ROLLBACK")
            database.execute("DROP TABLE IF EXISTS brief")
            assert await dropped(xid)
            assert not await dropped(xid, system_identifier="1")
            assert not await dropped(database.value(XID) + 1_000_000)


async def test_table_whose_creation_waits_for_a_synchronous_standby(make_server: Callable[..., EmbeddedServer]) -> None:
    """The bug was that a walsender had sent the transaction already, no query saw it yet, and the table counted as dropped."""
    server = make_server(18, synchronous_standby_names="missing", synchronous_commit="local")
    with fresh_database(ServerAddress(server.dsn(), 18), "pub") as database, database.connect() as session, ThreadPoolExecutor() as threads:
        database.execute("CREATE PUBLICATION p FOR ALL TABLES")
        database.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
        session.execute("SET synchronous_commit = on")
        session.execute("BEGIN; CREATE TABLE late AS SELECT 1 AS id")
        row = session.execute(f"SELECT 'late'::regclass::oid::int8, ({XID})").fetchone()
        committing = threads.submit(session.execute, "COMMIT")
        sent = "SELECT count(*) FROM pg_logical_slot_peek_binary_changes('s', NULL, NULL, 'proto_version', '1', 'publication_names', 'p')"
        database.wait(f"{sent} WHERE get_byte(data, 0) = ascii('I')", 1)
        assert row is not None
        identifier = database.value("SELECT system_identifier::text FROM pg_control_system()")
        arguments = {"system_identifier": identifier, "timeline": 1, "application_name": "test"}
        assert not database.fetch("SELECT FROM pg_class WHERE relname = 'late'")
        assert not await is_dropped(database.dsn, row[0], [row[1]], **arguments)
        database.fetch(f"SELECT pg_cancel_backend({session.info.backend_pid})")
        committing.result()
        assert not await is_dropped(database.dsn, row[0], [row[1]], **arguments)
        database.execute("DROP TABLE late")
        assert await is_dropped(database.dsn, row[0], [row[1]], **arguments)


async def test_publisher_that_does_not_run() -> None:
    with pytest.raises(PublisherUnavailable):
        await was_rolled_back("host=127.0.0.1 port=1 dbname=x user=x", 1, system_identifier="1", timeline=1, application_name="test")
