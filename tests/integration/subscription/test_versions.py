"""Every version of PostgreSQL on either side, by whole subscriptions: what is agreed on with it, and that rows arrive."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from subscriber.testing.server import EmbeddedServer
from tests.support.database import Database, ServerAddress
from tests.support.observation import PREPARED, all_ready, eventually, target_gid
from tests.support.replica import QUICK, Replica, replica

pytestmark = pytest.mark.matrix

# the manual's list of pgoutput's options, by the version that brought them; what native asks for if it wants all of them
PUBLICATIONS = """publication_names '"pub"'"""
NEGOTIATED = {
    13: f"proto_version '1', {PUBLICATIONS}",
    14: f"proto_version '2', streaming 'on', {PUBLICATIONS}, binary 'true'",
    15: f"proto_version '3', streaming 'on', two_phase 'on', {PUBLICATIONS}, binary 'true'",
    16: f"proto_version '4', streaming 'parallel', two_phase 'on', origin 'none', {PUBLICATIONS}, binary 'true'",
}
TABLES = "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE whole (a int, b numeric); ALTER TABLE whole REPLICA IDENTITY FULL"
T = "SELECT id, md5(v) FROM t ORDER BY id"
WHOLE = "SELECT a, b::text FROM whole ORDER BY a, b"  # NaN is not itself in Python


def set_up(publisher: Database, target: Database) -> None:
    for database in (publisher, target):
        database.execute(TABLES)
    publisher.execute("INSERT INTO t SELECT g, 'copied' FROM generate_series(1, 1000) AS g; INSERT INTO whole VALUES (1, 1.50), (1, NULL)")
    publisher.execute("CREATE PUBLICATION pub FOR ALL TABLES")


def write(publisher: Database, first: int) -> None:
    """Changes of every kind, and a transaction larger than the publisher's memory with a part that is rolled back."""
    publisher.execute(
        f"INSERT INTO t VALUES ({first}, NULL); UPDATE t SET v = 'changed' WHERE id % 100 = 0; DELETE FROM t WHERE id % 70 = 0"
    )
    publisher.execute(f"UPDATE t SET id = {first + 1} WHERE id = {first}; UPDATE whole SET b = b + 1; DELETE FROM whole WHERE b IS NULL")
    with publisher.connect() as session:
        session.execute("BEGIN")
        session.execute(f"INSERT INTO t SELECT g, repeat('x', 500) FROM generate_series({first + 10}, {first + 409}) AS g".encode())
        session.execute("SAVEPOINT a")
        session.execute("UPDATE t SET v = repeat('gone', 200)")
        session.execute("ROLLBACK TO a")
        session.execute("TRUNCATE whole; INSERT INTO whole VALUES (2, 'NaN'), (2, 'NaN'), (3, NULL); DELETE FROM whole WHERE a = 3; COMMIT")


async def equal(found: Replica) -> None:
    assert len(await found.same(T)) > 1000
    assert len(await found.same(WHOLE)) == 2
    assert found.subscription.status.last_error is None


def prepared(publisher: Database, number: int) -> int:
    """Prepare a transaction; return its xid."""
    with publisher.connect() as session:
        session.execute("BEGIN")
        session.execute(f"INSERT INTO t VALUES ({number}, 'prepared')".encode())
        row = session.execute("SELECT pg_current_xact_id()::text::int8 % 4294967296").fetchone()
        assert row is not None
        session.execute(f"PREPARE TRANSACTION '{publisher.name} {number}'".encode())
    return int(row[0])


async def test_the_highest_protocol_is_spoken(
    make_server: Callable[..., EmbeddedServer], publisher_version: int, target_db: Database, tmp_path: Path
) -> None:
    """A subscription that wants all there is gets what its publisher has, and rows arrive by it."""
    server = make_server(publisher_version, log_replication_commands="on")
    expected = NEGOTIATED[min(publisher_version, 16)]
    two_phase = "two_phase" in expected
    with contextlib.closing(Database(ServerAddress(server.dsn(), publisher_version), "postgres")) as publisher:
        set_up(publisher, target_db)
        settings = replace(QUICK, logical_decoding_work_mem=64 * 1024, spool_directory=str(tmp_path))
        wanted = {"streaming": "parallel", "two_phase": True, "binary": True, "origin": "none", "failover": True, "settings": settings}
        async with replica(publisher, target_db, **wanted) as first:
            await all_ready(first)
            # where it cannot be had it stays pending, until the publisher is upgraded
            await eventually(target_db, "SELECT subtwophasestate::text FROM subscriber.pg_subscription", "e" if two_phase else "p")
            write(publisher, 10_000)
            xid = prepared(publisher, 20_001)
            await equal(first)
            # an older publisher sends it when it is committed, natively too
            assert target_db.fetch(PREPARED) == ([(target_gid(target_db, xid),)] if two_phase else [])
        publisher.execute(f"COMMIT PREPARED '{publisher.name} 20001'")
        write(publisher, 30_000)
        async with replica(publisher, target_db, **wanted) as second:
            await equal(second)
            assert target_db.value("SELECT v FROM t WHERE id = 20001") == "prepared"
            assert target_db.fetch(PREPARED) == []
        started = re.findall(r'START_REPLICATION SLOT "replica_postgres" LOGICAL \S+ \((.*)\)', server.log())
        assert started[-1] == expected
        # and there is no higher one
        highest = int(expected.split("'")[1])
        slot = "SELECT pg_create_logical_replication_slot('look', 'pgoutput')"
        look = "SELECT FROM pg_logical_slot_peek_binary_changes('look', NULL, NULL, 'publication_names', 'pub', 'proto_version', '{}')"
        publisher.execute(slot)
        publisher.execute(look.format(highest))
        with pytest.raises(psycopg.Error, match=rf"only supports? protocol {highest} or lower"):
            publisher.execute(look.format(highest + 1))


async def test_into_every_version(publisher18_db: Database, any_target_db: Database, tmp_path: Path) -> None:
    """Copy, follow, stop, resume, with large and with prepared transactions."""
    publisher, target = publisher18_db, any_target_db
    set_up(publisher, target)
    settings = replace(QUICK, logical_decoding_work_mem=64 * 1024, spool_directory=str(tmp_path))
    async with replica(publisher, target, two_phase=True, streaming="parallel", settings=settings) as first:
        await all_ready(first)
        await eventually(target, "SELECT subtwophasestate::text FROM subscriber.pg_subscription", "e")
        write(publisher, 10_000)
        await equal(first)
        committed, rolled_back = prepared(publisher, 20_000), prepared(publisher, 20_001)
        await first.caught_up()
        assert target.fetch(PREPARED) == sorted((target_gid(target, xid),) for xid in (committed, rolled_back))
    publisher.execute(f"COMMIT PREPARED '{publisher.name} 20000'")
    publisher.execute(f"ROLLBACK PREPARED '{publisher.name} 20001'")
    write(publisher, 30_000)
    async with replica(publisher, target, two_phase=True, streaming="parallel", settings=settings) as second:
        await equal(second)
        assert second.subscription.status.tables.keys() == first.subscription.status.tables.keys()
        assert target.fetch(PREPARED) == []
        assert target.fetch("SELECT id FROM t WHERE id IN (20000, 20001)") == [(20000,)]
