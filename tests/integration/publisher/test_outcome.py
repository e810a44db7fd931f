"""What a publisher says became of a transaction."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from subscriber.errors import PublisherUnavailable
from subscriber.testing.binaries import server_user
from subscriber.testing.server import EmbeddedServer
from subscriber.walreceiver.transaction_outcome import was_rolled_back
from tests.support.database import Database, ServerAddress, fresh_database

XID = "SELECT pg_current_xact_id()::text::int8 % 4294967296"


async def test_of_every_kind(publisher18_db: Database) -> None:
    await check_every_kind(publisher18_db)


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
    # of the future, or of the epoch before
    for other in (committed + 1_000_000, 2**32 - 1, 2**31 + committed):
        assert not await asked(other)


async def test_publisher_that_does_not_run() -> None:
    with pytest.raises(PublisherUnavailable):
        await was_rolled_back("host=127.0.0.1 port=1 dbname=x user=x", 1, system_identifier="1", timeline=1, application_name="test")
