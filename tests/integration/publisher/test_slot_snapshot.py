"""The snapshot that a table's copy begins with cannot always be made: the publisher says so, and the next attempt finds it otherwise."""

from __future__ import annotations

import asyncio
import logging

import pytest

from tests.support.database import WAIT_SECONDS, Database
from tests.support.replica import replica

TOO_LARGE = "initial slot snapshot too large"
# more than a snapshot has room for: the transactions that max_connections and max_prepared_transactions allow, and some
ABORTED = """
DO $$ BEGIN FOR i IN 1..2000 LOOP
    BEGIN INSERT INTO other VALUES (i); RAISE division_by_zero; EXCEPTION WHEN division_by_zero THEN NULL; END;
END LOOP; END $$
"""
BEGIN = "BEGIN; INSERT INTO other VALUES (0)"
XID = "SELECT pg_current_xact_id()::text"
WAITS_FOR = "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND transactionid::text = '{}')"


async def test_too_many_subtransactions(publisher_db: Database, target_db: Database, caplog: pytest.LogCaptureFixture) -> None:
    """A slot starts when what ran at its creation has ended, twice over; what runs then, or was rolled back since, is in its snapshot."""
    for database in (publisher_db, target_db):
        database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    publisher_db.execute("INSERT INTO t VALUES (1); CREATE PUBLICATION pub FOR TABLE t; CREATE TABLE other (id int)")
    slot = f"given_{publisher_db.name}"
    publisher_db.execute(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")

    def warnings() -> list[logging.LogRecord]:
        return [record for record in caplog.records if TOO_LARGE in record.getMessage()]

    async def until_waited_for(xid: str) -> None:
        await asyncio.to_thread(publisher_db.wait, WAITS_FOR.format(xid), True)

    with publisher_db.connect() as first, publisher_db.connect() as second, publisher_db.connect() as last:
        first.execute(BEGIN.encode())
        waited = str(first.execute(XID).fetchall()[0][0])
        async with replica(publisher_db, target_db, slot_name=slot, create_slot=False) as running:
            await until_waited_for(waited)
            second.execute(BEGIN.encode())
            waited = str(second.execute(XID).fetchall()[0][0])
            first.execute("COMMIT")
            await until_waited_for(waited)
            last.execute(BEGIN.encode())
            publisher_db.execute(ABORTED)
            publisher_db.execute("INSERT INTO other VALUES (0)")
            second.execute("COMMIT")
            async with asyncio.timeout(WAIT_SECONDS):
                while not warnings():
                    await asyncio.sleep(0.02)
            last.execute("ROLLBACK")
            await running.caught_up()
            await asyncio.to_thread(target_db.wait, "SELECT * FROM t", [(1,)])
    assert {record.levelname for record in warnings()} == {"WARNING"}
