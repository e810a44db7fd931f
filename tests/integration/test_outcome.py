"""What a publisher says became of a transaction."""

from __future__ import annotations

import pytest

from subscriber.errors import PublisherUnavailable
from subscriber.walreceiver.outcome import was_rolled_back
from tests.database import Database

XID = "SELECT pg_current_xact_id()::text::int8 % 4294967296"


async def test_of_every_kind(publisher_db: Database) -> None:
    async def asked(xid: int) -> bool:
        return await was_rolled_back(publisher_db.dsn, xid, system_identifier=identifier, timeline=1, application_name="test")

    identifier = publisher_db.value("SELECT system_identifier::text FROM pg_control_system()")
    committed = publisher_db.value(XID)
    with publisher_db.connect() as session, publisher_db.connect() as other:

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
        session.execute(f"PREPARE TRANSACTION '{publisher_db.name}'".encode())
        assert not await asked(prepared)
        later = other.execute(XID).fetchone()
        assert later is not None
        assert not await asked(prepared)
        publisher_db.execute(f"ROLLBACK PREPARED '{publisher_db.name}'")
        assert await asked(prepared)
        # that of another server, or of another history, would be another one
        for other_identifier, timeline in (("1", 1), (identifier, 2)):
            assert not await was_rolled_back(
                publisher_db.dsn, prepared, system_identifier=other_identifier, timeline=timeline, application_name="test"
            )
        prepared = begin()
        session.execute(f"PREPARE TRANSACTION '{publisher_db.name}'".encode())
        publisher_db.execute(f"COMMIT PREPARED '{publisher_db.name}'")
        assert not await asked(prepared)
    assert not await asked(committed)
    # one of the future, and of the epoch before
    for other_xid in (committed + 1_000_000, 4294967295, 2**31 + committed):
        assert not await asked(other_xid)


async def test_nobody_there(publisher_db: Database) -> None:
    with pytest.raises(PublisherUnavailable):
        await was_rolled_back("host=127.0.0.1 port=1 dbname=x user=x", 1, system_identifier="1", timeline=1, application_name="test")
