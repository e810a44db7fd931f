"""A slot that its publisher can no more decode.

Seen, rarely, with slots made under load. Here the publisher's catalog is made to disagree with its WAL by hand: rows of a table still go
into the file that it had before a commit that names another one.
"""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from subscriber import Until
from subscriber.errors import PublisherError
from tests.database import WAIT_SECONDS, Database
from tests.integration.replica import replica, subscription_of

TABLE = "CREATE TABLE t (id int, v text)"
ALL = "SELECT * FROM t ORDER BY id"
HELD = 7
ROWS = f"""
INSERT INTO t SELECT i, repeat('x', 1000) || CASE WHEN i = 2 THEN pg_advisory_xact_lock({HELD})::text ELSE '' END
FROM generate_series(2, 400) AS i
"""
WAITS = "SELECT count(*)::int FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


def make_undecodable(publisher: Database) -> None:
    """Its slots cannot go on behind this, though its tables are well."""
    with publisher.connect() as session, publisher.connect() as holder:
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
async def test_says_what_remains_and_goes_on_trying(
    publisher_db: Database, target_db: Database, caplog: pytest.LogCaptureFixture, streaming: str
) -> None:
    prepare(publisher_db, target_db)
    async with replica(publisher_db, target_db, streaming=streaming) as running:
        await running.caught_up()
        await asyncio.to_thread(make_undecodable, publisher_db)
        caplog.clear()

        def told() -> list[logging.LogRecord]:
            return [record for record in caplog.records if "nor can it without streaming" in record.getMessage()]

        async with asyncio.timeout(WAIT_SECONDS):
            while len(told()) < 3:
                await asyncio.sleep(0.05)
        error = running.subscription.status.last_error
        assert isinstance(error, PublisherError)
        assert "could not map file" in str(error)
        assert "make it anew" in str(error.hint)
        assert {record.levelname for record in told()} == {"ERROR"}
        # its pauses are those of what somebody has to mend
        assert all("next attempt in 0.2 s" in record.getMessage() for record in told())
        assert target_db.fetch(ALL) == [(1, "copied")]


async def test_a_run_that_ends_ends_with_it(publisher_db: Database, target_db: Database) -> None:
    prepare(publisher_db, target_db)
    async with replica(publisher_db, target_db) as running:
        await running.caught_up()
    make_undecodable(publisher_db)
    with pytest.raises(PublisherError, match="nor can it without streaming") as caught:
        await subscription_of(publisher_db, target_db).run(until=Until())
    assert "make it anew" in str(caught.value.hint)
    assert target_db.fetch(ALL) == [(1, "copied")]
