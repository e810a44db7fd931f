"""``subscriber.transactions``: the publisher's transactions one by one, and acknowledging them, on live servers."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from subscriber.config import Settings, SubscriptionOptions
from subscriber.consumer.received import ReceivedMessage, ReceivedTransaction
from subscriber.consumer.transactions import transactions
from subscriber.transaction.changes import UNCHANGED
from tests.support.database import Database
from tests.support.examples import some_and_others
from tests.support.received import SMALL, SOON, TIMEOUT, Simple, changes, confirmed, cut_connection, eventually, first


@pytest.fixture
def source(publisher_db: Database) -> Database:
    publisher_db.execute("CREATE TABLE t (id int PRIMARY KEY, note text)")
    publisher_db.execute("CREATE PUBLICATION p FOR ALL TABLES")
    return publisher_db


class TestChanges:
    async def test_every_kind_of_change(self, source: Database) -> None:
        source.execute("CREATE TABLE whole (a int, b text); ALTER TABLE whole REPLICA IDENTITY FULL")
        source.execute("CREATE TABLE big (id int PRIMARY KEY, n int, data text); ALTER TABLE big ALTER COLUMN data SET STORAGE EXTERNAL")
        source.execute("CREATE TABLE child (id serial PRIMARY KEY, t int REFERENCES t)")
        async with transactions(source.conninfo(), publications=["p"]) as stream:
            source.execute("INSERT INTO t VALUES (1, 'one'), (2, NULL), (3, E'ü\n''')")
            source.execute("UPDATE t SET note = 'two' WHERE id = 2; UPDATE t SET id = 30 WHERE id = 3; DELETE FROM t WHERE id = 1")
            source.execute("INSERT INTO whole VALUES (1, NULL); UPDATE whole SET b = 'x'; DELETE FROM whole")
            source.execute("INSERT INTO big VALUES (1, 1, repeat('x', 5000))")
            source.execute("UPDATE big SET n = 2")
            source.execute("TRUNCATE t, child RESTART IDENTITY")
            source.execute("TRUNCATE t CASCADE")
            found = [(await first(stream))[1] for _ in range(7)]
        assert found == [
            [
                ("insert", "t", {"id": "1", "note": "one"}),
                ("insert", "t", {"id": "2", "note": None}),
                ("insert", "t", {"id": "3", "note": "ü\n'"}),
            ],
            [
                ("update", "t", None, None, {"id": "2", "note": "two"}),
                ("update", "t", {"id": "3"}, None, {"id": "30", "note": "ü\n'"}),
                ("delete", "t", {"id": "1"}, None),
            ],
            [
                ("insert", "whole", {"a": "1", "b": None}),
                ("update", "whole", None, {"a": "1", "b": None}, {"a": "1", "b": "x"}),
                ("delete", "whole", None, {"a": "1", "b": "x"}),
            ],
            [("insert", "big", {"id": "1", "n": "1", "data": "x" * 5000})],
            [("update", "big", None, None, {"id": "1", "n": "2", "data": UNCHANGED})],
            [("truncate", {"t", "child"}, False, True)],
            [("truncate", {"t", "child"}, True, False)],
        ]

    @pytest.mark.matrix
    async def test_properties_of_a_transaction(self, source: Database) -> None:
        source.execute("SELECT pg_replication_origin_create('upstream')")
        try:
            async with transactions(source.conninfo(), publications=["p"]) as stream:
                xid = int(source.value("WITH i AS (INSERT INTO t VALUES (1)) SELECT pg_current_xact_id()::text"))
                with source.connect() as other:
                    other.execute("SELECT pg_replication_origin_session_setup('upstream')")
                    other.execute("INSERT INTO t VALUES (2)")
                    # the origin can be dropped only when no session has it, and a session ends some time after it was closed
                    other.execute("SELECT pg_replication_origin_session_reset()")
                here, _ = await first(stream)
                there, _ = await first(stream)
            assert here.kind == "commit"
            assert here.xid == xid
            assert here.gid is None
            assert here.origin is None
            assert there.origin == "upstream"
            assert here.commit_lsn < here.end_lsn <= there.commit_lsn
            assert here.commit_time.tzinfo is UTC
            assert abs(here.commit_time - datetime.now(UTC)) < timedelta(minutes=5)
        finally:
            source.execute("SELECT pg_replication_origin_drop('upstream')")

    @pytest.mark.publisher(min=14, lacks="binary of pgoutput")
    @pytest.mark.matrix
    async def test_columns_in_binary(self, source: Database) -> None:
        async with transactions(source.conninfo(), publications=["p"], options=SubscriptionOptions(binary=True)) as stream:
            source.execute("INSERT INTO t VALUES (258, 'one'), (1, NULL)")
            _, found = await first(stream)
        assert found == [
            ("insert", "t", {"id": b"\0\0\1\2", "note": b"one"}),
            ("insert", "t", {"id": b"\0\0\0\1", "note": None}),
        ]

    @some_and_others(
        ["memory", "streaming"],
        [(SMALL, "on"), (SMALL, "off"), (64 * 1024 * 1024, "parallel")],
        [(64 * 1024 * 1024, "off"), (64 * 1024 * 1024, "on"), (SMALL, "parallel")],
    )
    async def test_large_transaction_with_aborted_subtransactions(
        self, source: Database, memory: int, streaming: Any, tmp_path: Path
    ) -> None:
        def spilled() -> bool:
            return any(tmp_path.rglob("*.spool"))

        settings = Settings(logical_decoding_work_mem=memory, spool_directory=str(tmp_path))
        options = SubscriptionOptions(streaming=streaming)
        async with transactions(source.conninfo(), publications=["p"], options=options, settings=settings) as stream:
            with source.connect() as session, session.transaction():
                session.execute("INSERT INTO t SELECT g, repeat('a', 2000) FROM generate_series(1, 1000) g")
                session.execute("SAVEPOINT a")
                session.execute("INSERT INTO t SELECT g, repeat('b', 2000) FROM generate_series(1001, 2000) g")
                session.execute("SAVEPOINT b")
                session.execute("INSERT INTO t VALUES (9000)")
                session.execute("ROLLBACK TO SAVEPOINT a")
                session.execute("INSERT INTO t SELECT g, repeat('c', 2000) FROM generate_series(2001, 2500) g")
                session.execute("RELEASE SAVEPOINT a")
            source.execute("INSERT INTO t VALUES (3000, 'after')")
            _, found = await first(stream)
            assert spilled() is (memory == SMALL)
            _, after = await first(stream)
            assert not spilled()
        expected = [(str(number), ("a" if number <= 1000 else "c") * 2000) for number in (*range(1, 1001), *range(2001, 2501))]
        assert [(change[2]["id"], change[2]["note"]) for change in found] == expected
        assert after == [("insert", "t", {"id": "3000", "note": "after"})]

    async def test_relations_of_transactions_that_are_not_read(self, source: Database, tmp_path: Path) -> None:
        settings = Settings(logical_decoding_work_mem=SMALL, spool_directory=str(tmp_path))
        async with transactions(source.conninfo(), publications=["p"], settings=settings) as stream:
            source.execute("INSERT INTO t VALUES (1, 'not read')")
            source.execute("ALTER TABLE t ADD COLUMN more int")
            source.execute("INSERT INTO t SELECT g, repeat('x', 500), g FROM generate_series(2, 1000) g")  # spilled, read in part
            source.execute("INSERT INTO t VALUES (1001, 'read', 7)")
            # ALTER TABLE is an empty transaction, which 15 and later do not send
            number = 0 if source.version >= 15 else -1
            async with asyncio.timeout(TIMEOUT):
                async for transaction in stream:
                    number += 1
                    if number == 2:
                        async for _ in transaction:
                            break
                    if number == 3:
                        assert await changes(transaction) == [("insert", "t", {"id": "1001", "note": "read", "more": "7"})]
                        break

    async def test_changes_can_be_read_again(self, source: Database) -> None:
        async with transactions(source.conninfo(), publications=["p"]) as stream:
            source.execute("INSERT INTO t VALUES (0)")
            source.execute("INSERT INTO t VALUES (1); ALTER TABLE t ADD COLUMN more int; INSERT INTO t VALUES (2, NULL, 2)")
            await first(stream)
            async with asyncio.timeout(TIMEOUT):
                async for transaction in stream:
                    found = await changes(transaction)
                    assert [list(change[2]) for change in found] == [["id", "note"], ["id", "note", "more"]]
                    assert await changes(transaction) == found
                    break

    async def test_changes_are_freed_when_the_iteration_continues(self, source: Database) -> None:
        async with transactions(source.conninfo(), publications=["p"]) as stream:
            source.execute("INSERT INTO t VALUES (1)")
            source.execute("INSERT INTO t VALUES (2)")
            one, _ = await first(stream)
            await first(stream)
            with pytest.raises(RuntimeError, match=f"transaction {one.xid} are freed"):
                await changes(one)

    @pytest.mark.publisher(min=14, lacks="logical messages in pgoutput")
    @pytest.mark.matrix
    async def test_messages(self, source: Database) -> None:
        found: list[Simple] = []
        async with transactions(source.conninfo(), publications=["p"], messages=True) as stream:
            source.execute("SELECT pg_logical_emit_message(false, 'loose', 'at once')")
            source.execute("INSERT INTO t VALUES (1); SELECT pg_logical_emit_message(true, 'bound', '\\x00ff'::bytea)")
            async with asyncio.timeout(TIMEOUT):
                async for received in stream:
                    if isinstance(received, ReceivedMessage):
                        found.append((received.kind, received.prefix, received.content))
                    else:
                        found += await changes(received)
                        break
        assert found == [
            ("message", "loose", b"at once"),
            ("insert", "t", {"id": "1", "note": None}),
            ("message", "bound", b"\x00\xff"),
        ]

    async def test_without_asking_there_are_no_messages(self, source: Database) -> None:
        async with transactions(source.conninfo(), publications=["p"]) as stream:
            source.execute("SELECT pg_logical_emit_message(false, 'loose', 'at once')")
            source.execute("SELECT pg_logical_emit_message(true, 'bound', 'x'); INSERT INTO t VALUES (1)")
            assert (await first(stream))[1] == [("insert", "t", {"id": "1", "note": None})]

    @pytest.mark.publisher(min=15, lacks="two_phase of the replication protocol")
    @pytest.mark.matrix
    async def test_prepared_transactions(self, source: Database) -> None:
        found: list[Simple] = []

        async def next_one() -> None:
            transaction, rows = await first(stream)
            found.append((transaction.kind, transaction.gid, len(rows)))
            await transaction.acknowledge()
            reached = f"SELECT confirmed_flush_lsn >= '{transaction.end_lsn}' FROM pg_replication_slots WHERE slot_name = 'two'"
            await eventually(source, reached, True)

        options = SubscriptionOptions(two_phase=True)
        async with transactions(source.conninfo(), publications=["p"], slot_name="two", options=options) as stream:
            source.execute("BEGIN; INSERT INTO t VALUES (1); PREPARE TRANSACTION 'good'")
            source.execute("BEGIN; INSERT INTO t SELECT g, repeat('x', 500) FROM generate_series(10, 500) g; PREPARE TRANSACTION 'bad'")
            # received before they end: of a transaction that is rolled back by then, the publisher sends only a part
            await next_one()
            await next_one()
            source.execute("COMMIT PREPARED 'good'")
            source.execute("ROLLBACK PREPARED 'bad'")
            source.execute("INSERT INTO t VALUES (2)")
            for _ in range(3):
                await next_one()
        assert found == [
            ("prepare", "good", 1),
            ("prepare", "bad", 491),
            ("commit prepared", "good", 0),
            ("rollback prepared", "bad", 0),
            ("commit", None, 1),
        ]

    @pytest.mark.matrix
    async def test_without_two_phase_a_prepared_transaction_comes_when_it_is_committed(self, source: Database) -> None:
        async with transactions(source.conninfo(), publications=["p"]) as stream:
            source.execute("BEGIN; INSERT INTO t VALUES (1); PREPARE TRANSACTION 'good'")
            source.execute("INSERT INTO t VALUES (2)")
            source.execute("COMMIT PREPARED 'good'")
            found = [(await first(stream))[1][0][2]["id"] for _ in range(2)]
        assert found == ["2", "1"]


class TestAcknowledging:
    async def test_moves_the_slot(self, source: Database) -> None:
        async with transactions(source.conninfo(), publications=["p"], slot_name="s", settings=SOON) as stream:
            for number in range(3):
                source.execute(f"INSERT INTO t VALUES ({number})")
            one, _ = await first(stream)
            two, _ = await first(stream)
            three, _ = await first(stream)
            await two.acknowledge()  # and with it the first
            await eventually(source, "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = 's'", str(two.end_lsn))
            assert stream.acknowledged == two.end_lsn
            await one.acknowledge()  # never back
            assert stream.acknowledged == two.end_lsn
        assert two.end_lsn <= confirmed(source, "s") < three.end_lsn

    async def test_what_is_not_acknowledged_comes_again_after_a_lost_connection(self, source: Database) -> None:
        seen = []
        async with transactions(source.conninfo(), publications=["p"], slot_name="s", settings=SOON) as stream:
            for number in range(1, 4):
                source.execute(f"INSERT INTO t VALUES ({number})")
            for _ in range(3):
                transaction, ((_, _, row),) = await first(stream)
                seen.append(row["id"])
                if row["id"] == "1":
                    await transaction.acknowledge()
            cut_connection(source)
            for _ in range(2):
                transaction, ((_, _, row),) = await first(stream)
                seen.append(row["id"])
                await transaction.acknowledge()
            source.execute("INSERT INTO t VALUES (4)")
            _, ((_, _, row),) = await first(stream)
            seen.append(row["id"])
        assert seen == ["1", "2", "3", "2", "3", "4"]

    async def test_old_object_acknowledged_after_a_lost_connection(self, source: Database) -> None:
        async with transactions(source.conninfo(), publications=["p"], slot_name="s", settings=SOON) as stream:
            source.execute("INSERT INTO t VALUES (1)")
            source.execute("INSERT INTO t VALUES (2)")
            await first(stream)
            old, _ = await first(stream)
            cut_connection(source)
            again, _ = await first(stream)
            assert again.xid < old.xid
            await old.acknowledge()
            source.execute("INSERT INTO t VALUES (3)")
            _, found = await first(stream)
            assert found == [("insert", "t", {"id": "3", "note": None})]

    async def test_survives_the_program(self, source: Database) -> None:
        settings = Settings(wal_receiver_status_interval=0)  # nothing is reported unless it has to be
        async with transactions(source.conninfo(), publications=["p"], slot_name="s", settings=settings) as stream:
            source.execute("INSERT INTO t VALUES (1)")
            source.execute("INSERT INTO t VALUES (2)")
            one, _ = await first(stream)
            await first(stream)
            await one.acknowledge()
        # leaving the block has told the publisher
        slot = f"SELECT confirmed_flush_lsn >= '{one.end_lsn}' AND NOT active FROM pg_replication_slots WHERE slot_name = 's'"
        await eventually(source, slot, True)
        source.execute("INSERT INTO t VALUES (3)")
        async with transactions(source.conninfo(), publications=["p"], slot_name="s") as stream:
            assert [(await first(stream))[1][0][2]["id"] for _ in range(2)] == ["2", "3"]

    @pytest.mark.matrix
    async def test_idle_slot_follows_a_busy_cluster(self, source: Database) -> None:
        async with transactions(source.conninfo(), publications=["p"], slot_name="s", settings=SOON) as stream:
            source.execute("INSERT INTO t VALUES (1)")
            transaction, _ = await first(stream)
            await transaction.acknowledge()
            waiting = asyncio.create_task(first(stream))
            with psycopg.connect(source.server.dsn(), autocommit=True) as elsewhere:
                elsewhere.execute("CREATE TEMP TABLE busy AS SELECT g FROM generate_series(1, 1000) g")
                elsewhere.execute("SELECT pg_logical_emit_message(true, 'busy', repeat('x', 10000))")
            target = source.current_lsn()
            await eventually(source, f"SELECT confirmed_flush_lsn >= '{target}' FROM pg_replication_slots WHERE slot_name = 's'", True)
            source.execute("INSERT INTO t VALUES (2)")
            _, found = await waiting
            assert found == [("insert", "t", {"id": "2", "note": None})]

    async def test_nothing_is_acknowledged_while_a_transaction_is_pending(self, source: Database) -> None:
        async with transactions(source.conninfo(), publications=["p"], slot_name="s", settings=SOON) as stream:
            source.execute("INSERT INTO t VALUES (1)")
            pending, _ = await first(stream)
            waiting = asyncio.create_task(first(stream))
            source.execute("CREATE TABLE unrelated ()")
            target = source.current_lsn()
            # the publisher knows that we have received all that, and still keeps it
            await eventually(source, f"SELECT write_lsn >= '{target}' FROM pg_stat_replication WHERE application_name = 's'", True)
            assert confirmed(source, "s") < pending.end_lsn
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting

    @pytest.mark.publisher(min=14, lacks="logical messages in pgoutput")
    @pytest.mark.matrix
    async def test_message_outside_transactions_is_kept_until_acknowledged(self, source: Database) -> None:
        async def next_message() -> ReceivedMessage:
            async with asyncio.timeout(TIMEOUT):
                async for received in stream:
                    if source.version < 15 and isinstance(received, ReceivedTransaction):
                        continue  # an empty one, of CREATE TABLE
                    assert isinstance(received, ReceivedMessage)
                    return received
            raise AssertionError("the stream ended")

        async with transactions(source.conninfo(), publications=["p"], slot_name="s", settings=SOON, messages=True) as stream:
            source.execute("SELECT pg_logical_emit_message(false, 'm', 'one')")
            message = await next_message()
            waiting = asyncio.create_task(next_message())
            source.execute("CREATE TABLE unrelated ()")
            received = f"SELECT write_lsn >= '{source.current_lsn()}' FROM pg_stat_replication WHERE application_name = 's'"
            await eventually(source, received, True)
            assert confirmed(source, "s") < message.lsn
            source.execute("SELECT pg_logical_emit_message(false, 'm', 'two')")
            assert [message.content, (await waiting).content] == [b"one", b"two"]
        async with transactions(source.conninfo(), publications=["p"], slot_name="s", settings=SOON, messages=True) as stream:
            again = await next_message()
            assert again.content == b"one"
            await again.acknowledge()
        async with transactions(source.conninfo(), publications=["p"], slot_name="s", settings=SOON, messages=True) as stream:
            last = await next_message()
            assert last.content == b"two"
            await last.acknowledge()
            source.execute("INSERT INTO t VALUES (1)")
            async with asyncio.timeout(TIMEOUT):
                assert isinstance(await anext(aiter(stream)), ReceivedTransaction)

    async def test_is_refused_once_the_stream_is_closed(self, source: Database) -> None:
        async with transactions(source.conninfo(), publications=["p"]) as stream:
            source.execute("INSERT INTO t VALUES (1)")
            transaction, _ = await first(stream)
        with pytest.raises(RuntimeError, match="the stream is closed"):
            await transaction.acknowledge()
