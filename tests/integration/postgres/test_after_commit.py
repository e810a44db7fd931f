"""What follows a COMMIT never counts as the failure of its transactions, and no transaction is committed twice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from subscriber.errors import TargetUnavailable
from subscriber.protocol.lsn import Lsn
from tests.support.database import Database
from tests.support.sink_postgres import Feed, Remote

_WAL_FUNCTIONS = "SELECT oid::regprocedure FROM pg_proc WHERE pronamespace = 'pg_catalog'::regnamespace AND proname ~ 'wal'"


def revoke(database: Database) -> None:
    """Nobody but a superuser may use functions of the WAL any more, as on a hardened server."""
    for (function,) in database.fetch(_WAL_FUNCTIONS):
        database.execute(f"REVOKE EXECUTE ON FUNCTION {function} FROM PUBLIC")


@pytest.fixture
def plain(target_db: Database) -> Iterator[Feed]:
    """A feed of a role that is no superuser, with ``synchronous_commit = off``, and two tables: one has no key."""
    target_db.execute(f"""
        CREATE ROLE plain_role LOGIN PASSWORD 'pw'; GRANT SET ON PARAMETER session_replication_role TO plain_role;
        GRANT CREATE ON DATABASE {target_db.name} TO plain_role; GRANT CREATE ON SCHEMA public TO plain_role; SET ROLE plain_role;
        CREATE TABLE keyless (id int); CREATE TABLE keyed (id int PRIMARY KEY); RESET ROLE
    """)
    feed = Feed(target_db, synchronous_commit="off")
    feed.target = target_db.conninfo(user="plain_role", password="pw")
    feed.sink = feed.new_sink()
    yield feed
    target_db.execute("REVOKE SET ON PARAMETER session_replication_role FROM plain_role")
    target_db.execute("DROP OWNED BY plain_role; DROP ROLE plain_role")


async def write(feed: Feed, numbers: range) -> None:
    keyless, keyed = Remote("keyless", "id", relation_id=1), Remote("keyed", "*id", relation_id=2)
    for number in numbers:
        await feed.apply(keyless.relation, keyed.relation, keyless.insert(number), keyed.insert(number))


def assert_once(feed: Feed, numbers: range) -> None:
    expected = [(number,) for number in numbers]
    assert feed.database.fetch("SELECT id FROM keyless ORDER BY id") == expected
    assert feed.database.fetch("SELECT id FROM keyed ORDER BY id") == expected
    assert feed.position() == Lsn(feed.lsn + 0x30)
    statistics = feed.sink.statistics
    assert (statistics.transactions, statistics.confl_insert_exists) == (len(numbers), 0)


async def test_role_without_wal_functions(plain: Feed) -> None:
    revoke(plain.database)
    await plain.open()
    try:
        await write(plain, range(3))
        assert_once(plain, range(3))
        # without these functions it is unknown when WAL is flushed: COMMIT itself waits, so each position is durable at once
        assert plain.durable[-1] == plain.position()
    finally:
        await plain.opened.close()


async def test_wal_functions_are_revoked_while_it_runs(plain: Feed) -> None:
    await plain.open()
    try:
        await write(plain, range(1))
        async with asyncio.timeout(20):
            while not plain.durable:
                await asyncio.sleep(0.01)
        revoke(plain.database)
        # the commit takes effect: the position, which is read when the sink is opened again, shows it
        with pytest.raises(TargetUnavailable, match="pg_current_wal_insert_lsn"):
            await write(plain, range(1, 2))
        before = plain.position()
        await plain.reopen()
        assert plain.opened.state.position is not None
        assert plain.opened.state.position.lsn == before
        await write(plain, range(2, 3))
        for table in ("keyless", "keyed"):
            assert plain.database.fetch(f"SELECT id FROM {table} ORDER BY id") == [(0,), (1,), (2,)]
        assert plain.durable[-1] == plain.position()
        assert plain.sink.statistics.confl_insert_exists == 0
    finally:
        await plain.opened.close()


async def test_position_moved_by_someone_else(plain: Feed) -> None:
    """A batch that comes again after a commit of which this session knows nothing is rolled back: the position is not as it was read."""
    await plain.open()
    try:
        await write(plain, range(1))
        plain.database.execute("""UPDATE subscriber."position" SET remote_lsn = '0/1150'""")
        with pytest.raises(TargetUnavailable, match="position"):
            await write(plain, range(1, 2))
        assert plain.database.fetch("SELECT id FROM keyless") == [(0,)]
    finally:
        await plain.opened.close()
