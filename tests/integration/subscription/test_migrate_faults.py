"""``subscriber migrate`` while the target's disk is full, and while both servers fail over."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable

import psycopg
import pytest

from subscriber.testing.binaries import server_user
from subscriber.testing.server import EmbeddedServer
from tests.integration.subscription.test_migrate import BINDIR, arguments
from tests.support.database import Database, ServerAddress
from tests.support.disk import Disk
from tests.support.program import running
from tests.support.row_gates import closed_gates, make_row_gate, waiting_at_gate
from tests.support.standby import standby_of

FULL = "(hint: make room on the target's disk"
QUICKLY = ("-c", "wal_retrieve_retry_interval=200ms")


def opened(stack: contextlib.ExitStack, server: EmbeddedServer, name: str) -> Database:
    """A session with a database."""
    return stack.enter_context(contextlib.closing(Database(ServerAddress(server.dsn(), server.version), name)))


def test_the_disk_of_the_target_is_full(
    publisher18_db: Database, make_server: Callable[..., EmbeddedServer], make_disk: Callable[[int], Disk]
) -> None:
    # in an index, values of this size are not compressed
    publisher18_db.execute("""
        CREATE TABLE t (id int PRIMARY KEY, v text); CREATE INDEX ON t (v);
        CREATE FUNCTION v(id int) RETURNS text LANGUAGE sql
            AS $$SELECT string_agg(md5(id::text || n), '') FROM generate_series(1, 30) AS n$$;
        INSERT INTO t SELECT id, v(id) FROM generate_series(1, 8000) AS id
    """)
    disk, server = make_disk(64), make_server()
    place = disk.path / "tablespace"
    place.mkdir(mode=0o700)
    server_user().own(place)
    with psycopg.connect(server.dsn(), autocommit=True) as session:
        session.execute(f"CREATE TABLESPACE small LOCATION '{place}'".encode())
    server.createdb("app", tablespace="small")
    with contextlib.ExitStack() as stack:
        target = opened(stack, server, "app")
        disk.fill(4_000_000)
        with running(*arguments(publisher18_db, target, *QUICKLY), loud=True) as program:
            program.says(FULL)
            disk.make_room()
            # for the rest of the table, and not for its index
            disk.fill(14_000_000)
            program.says("indexes: ")
            program.says(FULL, 2)
            disk.make_room()
            program.says("ready for the cutover")
            disk.fill(200_000)
            publisher18_db.execute("INSERT INTO t SELECT id, v(id) FROM generate_series(9001, 12000) AS id")
            program.says(FULL, program.errors.count(FULL) + 1)
            disk.make_room()
            target.wait("SELECT count(*)::int FROM t", 11_000)
            program.send(signal.SIGTERM)
            assert program.ended().status == 0
        assert "copy: " in program.errors
        query = "SELECT md5(string_agg(v, '' ORDER BY id)) FROM t"
        assert target.fetch(query) == publisher18_db.fetch(query)


@pytest.mark.endurance
def test_both_servers_fail_over_during_the_copy(make_server: Callable[..., EmbeddedServer]) -> None:
    servers = [make_server(), make_server()]
    for server in servers:
        server.createdb("pub")
    with contextlib.ExitStack() as stack:
        source, target = (opened(stack, server, "pub") for server in servers)
        source.execute("CREATE TABLE t (id int PRIMARY KEY, v int); CREATE INDEX ON t (v)")
        source.execute("INSERT INTO t SELECT g, g FROM generate_series(1, 20000) AS g")
        target.execute("CREATE TABLE t (id int PRIMARY KEY, v int)")
        make_row_gate(target, "t", "NEW.id = 15000", 77)
        standbys = [stack.enter_context(standby_of(server)) for server in servers]
        new_source, new_target = (opened(stack, server, "pub") for server in standbys)
        addresses = []
        for server, standby in zip(servers, standbys, strict=True):
            hosts = f"127.0.0.1:{server.port},127.0.0.1:{standby.port}"
            addresses.append(f"postgresql://postgres:{server.password}@{hosts}/pub?target_session_attrs=read-write")
        command = ["migrate", "move", "--from", addresses[0], "--to", addresses[1], "--bindir", BINDIR, "-o", "failover=true", *QUICKLY]

        def fails_over(number: int, old: Database, new: Database) -> None:
            new.wait(f"SELECT pg_last_wal_replay_lsn() >= '{old.current_lsn()}'", True)
            servers[number].stop("immediate")
            new.execute("SELECT pg_promote()")

        with closed_gates(target, 77), running(*command, loud=True) as program:
            target.wait(waiting_at_gate(77), 1)
            synced = "SELECT FROM pg_replication_slots WHERE slot_name = 'move' AND synced AND NOT temporary"
            while not new_source.fetch(synced):
                # what the standby needs to take over the slot
                source.execute("SELECT pg_log_standby_snapshot()")
                lsn = source.current_lsn()
                source.wait(f"SELECT confirmed_flush_lsn >= '{lsn}' FROM pg_replication_slots WHERE slot_name = 'move'", True)
                new_source.wait(f"SELECT pg_last_wal_replay_lsn() >= '{lsn}'", True)
                new_source.execute("SELECT pg_sync_replication_slots()")
            fails_over(0, source, new_source)
            new_source.execute("INSERT INTO t VALUES (20001, 1)")
            target.wait(waiting_at_gate(77), 1)
            fails_over(1, target, new_target)
            program.says("ready for the cutover")
            new_source.execute("INSERT INTO t VALUES (20002, 1)")
            new_target.wait("SELECT count(*)::int FROM t", 20_002)
            program.send(signal.SIGTERM)
            assert program.ended().status == 0
        query = "SELECT sum(id), sum(v) FROM t"
        assert new_target.fetch(query) == new_source.fetch(query)
