"""WAL that a publisher cannot decode: never, or only with other options.

A slot that cannot continue was seen, rarely, where slots were created under load. Here the publisher's catalog is made to disagree with
its WAL by hand: rows of a table still go into the file that it had before a commit that names another one.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import psycopg
import pytest

import subscriber
from subscriber import SubscriptionOptions, Until
from subscriber.errors import PublisherError
from subscriber.subscription.run import slot_follower
from tests.support.database import WAIT_SECONDS, Database
from tests.support.observation import eventually
from tests.support.replica import replica, subscription_of

TABLE = "CREATE TABLE t (id int, v text)"
ALL = "SELECT * FROM t ORDER BY id"
HELD = 7
ROWS = f"""
INSERT INTO t SELECT i, repeat('x', 1000) || CASE WHEN i = 2 THEN pg_advisory_xact_lock({HELD})::text ELSE '' END
FROM generate_series(2, 400) AS i
"""
WAITS = "SELECT count(*)::int FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"

Connection = psycopg.Connection[tuple[Any, ...]]


def make_undecodable(publisher: Database, open_in: Connection | None = None) -> None:
    """Its slots cannot continue after this, though its tables are intact; unless it stays open in a session, and is rolled back."""
    with publisher.connect() as own, publisher.connect() as holder:
        session = open_in or own
        if open_in is not None:
            session.execute("BEGIN")
        holder.execute(f"SELECT pg_advisory_lock({HELD})".encode())
        writer = threading.Thread(target=session.execute, args=(ROWS.encode(),))
        writer.start()
        publisher.wait(WAITS, 1)
        publisher.execute("UPDATE pg_class SET relfilenode = (relfilenode::bigint + 1000000)::oid WHERE relname = 't'")
        holder.execute(f"SELECT pg_advisory_unlock({HELD})".encode())
        writer.join()
    publisher.execute("UPDATE pg_class SET relfilenode = (relfilenode::bigint - 1000000)::oid WHERE relname = 't'")


def prepare(publisher: Database, target: Database) -> None:
    for database in (publisher, target):
        database.execute(TABLE)
    publisher.execute("INSERT INTO t VALUES (1, 'copied'); CREATE PUBLICATION pub FOR TABLE t")


@pytest.mark.parametrize("streaming", ["parallel", "off"])
async def test_names_the_remedy_and_keeps_retrying(
    publisher_db: Database, target_db: Database, caplog: pytest.LogCaptureFixture, streaming: str
) -> None:
    prepare(publisher_db, target_db)
    async with replica(publisher_db, target_db, streaming=streaming) as running:
        await running.caught_up()
        await asyncio.to_thread(make_undecodable, publisher_db)
        caplog.clear()

        def errors() -> list[logging.LogRecord]:
            return [record for record in caplog.records if "not even without streaming" in record.getMessage()]

        async with asyncio.timeout(WAIT_SECONDS):
            while len(errors()) < 3:
                await asyncio.sleep(0.05)
        error = running.subscription.status.last_error
        assert isinstance(error, PublisherError)
        assert "could not map file" in str(error)
        assert "again with a copy" in str(error.hint)
        assert {record.levelname for record in errors()} == {"ERROR"}
        # its pauses are those of an error that has to be fixed
        assert all("next attempt in 0.2 s" in record.getMessage() for record in errors())
        assert target_db.fetch(ALL) == [(1, "copied")]


async def test_run_until_caught_up_ends_with_the_decoding_error(publisher_db: Database, target_db: Database) -> None:
    prepare(publisher_db, target_db)
    async with replica(publisher_db, target_db) as running:
        await running.caught_up()
    make_undecodable(publisher_db)
    with pytest.raises(PublisherError, match="not even without streaming") as caught:
        await subscription_of(publisher_db, target_db).run(until=Until())
    assert "again with a copy" in str(caught.value.hint)
    assert target_db.fetch(ALL) == [(1, "copied")]


# --- what 18 cannot decode with little memory


def prepare_tables(publisher: Database, target: Database) -> None:
    for database in (publisher, target):
        database.execute("CREATE TABLE u (id int PRIMARY KEY, v text)")
    publisher.execute("INSERT INTO u VALUES (1, 'there'), (2, 'there'); CREATE PUBLICATION pub FOR TABLE u")


def roll_back_a_long_value(publisher: Database) -> None:
    """A prepared transaction that 18 has to decode when it was rolled back already.

    Memory gets short in the middle of the long value: what the publisher has of the whole transaction is forgotten, while what is still to
    come of the subtransaction is not.
    """
    value = "(SELECT string_agg(md5(g::text), '') FROM generate_series(1, 2500) AS g)"
    # what it knows of the tables from here it needs not look up in the aborted transaction, which it would notice
    publisher.execute(f"UPDATE u SET v = {value} WHERE id = 2")
    publisher.execute(f"""
        BEGIN; INSERT INTO u SELECT g, repeat('x', 500) FROM generate_series(1001, 1060) AS g;
        SAVEPOINT s; INSERT INTO u VALUES (5, {value}); RELEASE s; PREPARE TRANSACTION '{publisher.name}'
    """)
    publisher.execute(f"ROLLBACK PREPARED '{publisher.name}'")
    publisher.execute("UPDATE u SET v = 'behind' WHERE id = 1")


@pytest.mark.parametrize("streaming", ["parallel", "off"])
async def test_a_long_value_of_what_was_rolled_back(
    publisher18_db: Database, target_db: Database, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, streaming: str
) -> None:
    """The bug of 18 was seen once, under kills: a native subscription retries for ever."""
    monkeypatch.setattr(slot_follower, "_CAUTIOUS_SECONDS", 1.0)
    prepare_tables(publisher18_db, target_db)
    async with replica(publisher18_db, target_db, two_phase=True, streaming=streaming) as running:
        await running.caught_up()
        await eventually(target_db, "SELECT subtwophasestate::text FROM subscriber.pg_subscription", "e")
    roll_back_a_long_value(publisher18_db)
    async with replica(publisher18_db, target_db, two_phase=True, streaming=streaming) as running:
        assert len(await running.same("SELECT id, md5(v) FROM u ORDER BY id")) == 2
        assert "got sequence entry" in caplog.text
        # it streams again
        pid = f"SELECT pid FROM pg_stat_replication WHERE application_name = '{running.subscription.name}'"
        cautious = publisher18_db.value(pid)
        publisher18_db.execute("INSERT INTO u VALUES (3, 'later')")
        await eventually(publisher18_db, f"SELECT count(*) FROM ({pid}) AS found WHERE pid <> {cautious}", 1)
        assert len(await running.same("SELECT id, md5(v) FROM u ORDER BY id")) == 3
        assert caplog.text.count("asking the publisher to send only complete transactions") == 1
        # once is enough: what follows is not requested again
        assert caplog.text.count("got sequence entry") == 1


@pytest.mark.matrix
async def test_open_transaction_that_cannot_be_decoded(
    publisher_db: Database, target_db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """A cautious stream passes over it and stays cautious: another stream would reach it again with its next rows, from its beginning."""
    prepare(publisher_db, target_db)
    with publisher_db.connect() as session:
        async with replica(publisher_db, target_db, streaming="on") as running:
            await running.caught_up()
            await asyncio.to_thread(make_undecodable, publisher_db, session)
            for number in range(1001, 1006):
                session.execute("INSERT INTO t SELECT i, repeat('y', 1000) FROM generate_series(2000, 2200) AS i")
                publisher_db.execute(f"INSERT INTO t VALUES ({number}, 'other')")
                await running.caught_up()
            session.execute("ROLLBACK")
            publisher_db.execute("INSERT INTO t VALUES (1006, 'other')")
            assert len(await running.same(ALL)) == 7
    # where it does not stream there is nothing to be asked for
    assert caplog.text.count("asking the publisher to send only complete transactions") == (1 if publisher_db.version >= 14 else 0)


async def test_a_long_value_in_transactions(publisher18_db: Database, target_db: Database) -> None:
    prepare_tables(publisher18_db, target_db)
    publisher18_db.execute(f"SELECT pg_create_logical_replication_slot('{publisher18_db.name}', 'pgoutput', false, true)")
    roll_back_a_long_value(publisher18_db)
    found = []
    async with subscriber.transactions(
        publisher18_db.conninfo(),
        publications=["pub"],
        slot_name=publisher18_db.name,
        options=SubscriptionOptions(two_phase=True),
        until_caught_up=True,
    ) as stream:
        async for transaction in stream:
            found.append(transaction.kind)
            await transaction.acknowledge()
    assert found == ["commit", "prepare", "rollback prepared", "commit"]


async def test_transactions_that_cannot_be_decoded(publisher_db: Database, target_db: Database) -> None:
    prepare(publisher_db, target_db)
    publisher_db.execute(f"SELECT pg_create_logical_replication_slot('{publisher_db.name}', 'pgoutput')")
    make_undecodable(publisher_db)

    async def follow() -> None:
        async with subscriber.transactions(publisher_db.conninfo(), publications=["pub"], slot_name=publisher_db.name) as stream:
            async for transaction in stream:
                await transaction.acknowledge()

    with pytest.raises(PublisherError, match="not even without streaming"):
        await asyncio.wait_for(follow(), WAIT_SECONDS)
