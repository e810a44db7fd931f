"""What `subscriber.protocol.commands` writes, read by real walsenders: grammar, quoting, options; and frames both ways."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Iterator

import pytest
from psycopg import pq
from psycopg.pq.abc import PGconn

from subscriber.config import SubscriptionOptions
from subscriber.protocol import commands
from subscriber.protocol.capabilities import Capabilities, capabilities, negotiate
from subscriber.protocol.decoder import Decoder
from subscriber.protocol.frames import PrimaryKeepalive, StandbyStatusUpdate, XLogData, decode_frame, encode_frame
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Insert, LogicalMessage, Message
from subscriber.protocol.quoting import quote_identifier
from tests.support.database import WAIT_SECONDS, Database

HOSTILE_NAMES = ["plain", 'quo"te', "com,ma", "it's", "back\\slash", "Größe 表", " blank ", "a;b", "x" * 63]


@contextlib.contextmanager
def connected(database: Database) -> Iterator[PGconn]:
    connection = pq.PGconn.connect(database.conninfo(replication="database", client_encoding="UTF8").encode())
    assert connection.status == pq.ConnStatus.OK, connection.error_message
    try:
        yield connection
    finally:
        connection.finish()


@pytest.fixture
def walsender(publisher_db: Database) -> Iterator[PGconn]:
    with connected(publisher_db) as connection:
        yield connection


@pytest.fixture
def caps(walsender: PGconn) -> Capabilities:
    return capabilities(walsender.server_version)


def run(connection: PGconn, command: str) -> list[list[str | None]]:
    result = connection.exec_(command.encode())
    assert result.status in {pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK}, (command, result.error_message)
    rows = [[result.get_value(row, column) for column in range(result.nfields)] for row in range(result.ntuples)]
    return [[None if value is None else value.decode() for value in row] for row in rows]


def start(connection: PGconn, command: str) -> None:
    result = connection.exec_(command.encode())
    assert result.status == pq.ExecStatus.COPY_BOTH, (command, result.error_message)


def frames(connection: PGconn) -> Iterator[XLogData | PrimaryKeepalive]:
    """Frames as they come, until nothing came for too long."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        length, data = connection.get_copy_data(1)
        assert length >= 0, connection.error_message
        if length:
            yield decode_frame(bytes(data))
        else:
            select.select([connection.socket], [], [], 1.0)
            connection.consume_input()
    raise AssertionError("what was waited for did not come")


def messages_until(connection: PGconn, count: int, kind: type[Message]) -> list[Message]:
    decoder = Decoder()
    found: list[Message] = []
    for frame in frames(connection):
        if isinstance(frame, XLogData):
            found.append(decoder.decode(frame.payload))
            if sum(isinstance(message, kind) for message in found) == count:
                break
    return found


def slot_row(database: Database, name: str, columns: str) -> tuple[object, ...]:
    return database.fetch(f"SELECT {columns} FROM pg_replication_slots WHERE slot_name = '{name}'")[0]


@pytest.mark.matrix
def test_identify_and_show(walsender: PGconn, publisher_db: Database) -> None:
    ((system_identifier, timeline, position, database),) = run(walsender, commands.identify_system())
    assert system_identifier == str(publisher_db.value("SELECT system_identifier FROM pg_control_system()"))
    assert (timeline, database) == ("1", publisher_db.name)
    assert position is not None
    assert Lsn.parse(position) > 0
    assert run(walsender, commands.show("wal_level")) == [["logical"]]


@pytest.mark.matrix
def test_timeline_history_is_understood(walsender: PGconn) -> None:
    result = walsender.exec_(commands.timeline_history(1).encode())
    assert b"syntax error" not in result.error_message  # a new cluster has no such file


@pytest.mark.parametrize("snapshot", ["nothing", "export"])
@pytest.mark.matrix
def test_create_and_drop_slot(walsender: PGconn, caps: Capabilities, publisher_db: Database, snapshot: commands.SnapshotAction) -> None:
    # a key word of the grammar as a name
    ((name, position, exported, plugin),) = run(walsender, commands.create_replication_slot(caps, "temporary", snapshot=snapshot))
    assert (name, plugin) == ("temporary", "pgoutput")
    assert position is not None
    assert Lsn.parse(position) > 0
    assert (exported is not None) == (snapshot == "export")
    assert slot_row(publisher_db, "temporary", "temporary") == (False,)
    if publisher_db.version >= 14:
        assert slot_row(publisher_db, "temporary", "two_phase") == (False,)
    assert run(walsender, commands.drop_replication_slot("temporary", wait=True)) == []
    assert publisher_db.value("SELECT count(*) FROM pg_replication_slots WHERE slot_name = 'temporary'") == 0


@pytest.mark.matrix
def test_slot_with_the_transaction_s_snapshot(walsender: PGconn, caps: Capabilities, publisher_db: Database) -> None:
    publisher_db.execute("CREATE TABLE t (a int)")
    run(walsender, "BEGIN READ ONLY ISOLATION LEVEL REPEATABLE READ")
    run(walsender, commands.create_replication_slot(caps, "s_use", snapshot="use", temporary=True))
    publisher_db.execute("INSERT INTO t VALUES (1)")
    assert run(walsender, "SELECT count(*) FROM t") == [["0"]]
    run(walsender, "COMMIT")
    assert slot_row(publisher_db, "s_use", "temporary") == (True,)


@pytest.mark.parametrize("snapshot", ["nothing", "export"])
def test_the_syntax_for_older_servers(walsender: PGconn, publisher_db: Database, snapshot: commands.SnapshotAction) -> None:
    # newer servers read it still
    run(walsender, commands.create_replication_slot(capabilities(130000), "s_old", snapshot=snapshot, temporary=True))
    assert slot_row(publisher_db, "s_old", "temporary, plugin") == (True, "pgoutput")


@pytest.mark.publisher(min=15, lacks="two_phase of the replication protocol")
@pytest.mark.matrix
def test_slot_with_two_phase(walsender: PGconn, caps: Capabilities, publisher_db: Database) -> None:
    run(walsender, commands.create_replication_slot(caps, "s_two", two_phase=True))
    assert slot_row(publisher_db, "s_two", "two_phase") == (True,)
    run(walsender, commands.drop_replication_slot("s_two"))


def test_failover_slot_and_alter(publisher18_db: Database) -> None:
    with connected(publisher18_db) as walsender:
        caps = capabilities(walsender.server_version)
        run(walsender, commands.create_replication_slot(caps, "s_alter", two_phase=True, failover=True))
        assert slot_row(publisher18_db, "s_alter", "failover, two_phase") == (True, True)
        run(walsender, commands.alter_replication_slot(caps, "s_alter", failover=False))
        assert slot_row(publisher18_db, "s_alter", "failover, two_phase") == (False, True)
        run(walsender, commands.alter_replication_slot(caps, "s_alter", failover=True, two_phase=False))
        assert slot_row(publisher18_db, "s_alter", "failover, two_phase") == (True, False)
        run(walsender, commands.drop_replication_slot("s_alter"))


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("streaming", ["off", "on", pytest.param("parallel", marks=pytest.mark.matrix)])
def test_start_replication_with_names_that_need_quoting(
    walsender: PGconn, caps: Capabilities, publisher_db: Database, streaming: str, binary: bool
) -> None:
    for number, name in enumerate(HOSTILE_NAMES):
        publisher_db.execute(f"CREATE TABLE t{number} (a int); CREATE PUBLICATION {quote_identifier(name)} FOR TABLE t{number}")
    run(walsender, commands.create_replication_slot(caps, "s_start", temporary=True))
    for number in range(len(HOSTILE_NAMES)):
        publisher_db.execute(f"INSERT INTO t{number} VALUES ({number})")
    publisher_db.execute("SELECT pg_logical_emit_message(false, 'prefix', 'content')")

    wanted = SubscriptionOptions.parse([f"streaming={streaming}", f"binary={binary}", "origin=none"])
    options = negotiate(caps, wanted, publications=HOSTILE_NAMES, two_phase=True, messages=True)
    start(walsender, commands.start_replication("s_start", Lsn(0), options))
    found = messages_until(walsender, *((1, LogicalMessage) if caps.messages else (len(HOSTILE_NAMES), Insert)))

    rows = [message.new for message in found if isinstance(message, Insert)]
    expected = [
        number.to_bytes(4) if binary and publisher_db.version >= 14 else str(number).encode() for number in range(len(HOSTILE_NAMES))
    ]
    assert [row.values for row in rows] == [[value] for value in expected]
    if publisher_db.version >= 14:
        assert slot_row(publisher_db, "s_start", "two_phase") == (publisher_db.version >= 15,)


@pytest.mark.matrix
def test_a_status_update_is_understood(walsender: PGconn, caps: Capabilities, publisher_db: Database) -> None:
    publisher_db.execute("CREATE TABLE t (a int); CREATE PUBLICATION p FOR TABLE t")
    run(walsender, commands.create_replication_slot(caps, "s_status"))
    publisher_db.execute("INSERT INTO t VALUES (1)")
    options = negotiate(caps, SubscriptionOptions(), publications=["p"], two_phase=False)
    start(walsender, commands.start_replication("s_status", Lsn(0), options))
    messages_until(walsender, 1, Insert)
    walsender.put_copy_data(encode_frame(StandbyStatusUpdate(Lsn(0), Lsn(0), Lsn(0), 0, reply_requested=True)))
    walsender.flush()
    keepalive = next(frame for frame in frames(walsender) if isinstance(frame, PrimaryKeepalive))
    reached = keepalive.end_lsn
    walsender.put_copy_data(encode_frame(StandbyStatusUpdate(reached, reached, Lsn(reached - 1), 0, reply_requested=False)))
    walsender.flush()
    publisher_db.wait("SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = 's_status'", str(reached))
    row = publisher_db.fetch(
        "SELECT write_lsn::text, flush_lsn::text, replay_lsn::text "
        "FROM pg_stat_replication JOIN pg_replication_slots ON active_pid = pid WHERE slot_name = 's_status'"
    )
    assert row == [(str(reached), str(reached), str(Lsn(reached - 1)))]
