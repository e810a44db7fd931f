"""Record real pgoutput of every message type: ``make golden``, or ``python -m tests.golden.capture [VERSION…]``.

For each server version, starts a server with a small logical_decoding_work_mem, runs one scenario, follows its slots with
START_REPLICATION once for each set of options, and writes a recording (``subscriber/recording``) for each into this directory. To be run
again only when the scenario is changed. Nothing is confirmed to the server, so that each slot can be followed again.

What makes a transaction large without making the files large is not published: from 15 on the column ``wide.filler``, before that a table.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import psycopg

from subscriber.interfaces import ReplicationStream
from subscriber.protocol.capabilities import Capabilities, StreamOptions, capabilities
from subscriber.protocol.frames import PAYLOAD, StandbyStatusUpdate, XLogData, decode_frame, encode_frame
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.recording.file import RecordedSession, Recorder, read_recording
from subscriber.recording.streams import RecordedStream, sessions
from subscriber.testing.server import EmbeddedServer
from subscriber.walreceiver.connection import WalReceiverConnection

DIRECTORY: Final = Path(__file__).parent
VERSIONS: Final = (13, 14, 15, 16, 17, 18)

Connection = psycopg.Connection[tuple[object, ...]]


@dataclass(frozen=True)
class Capture:
    """One recording of each version from ``since`` on.

    Attributes:
        name: of the file.
        slot: to follow.
        options: of START_REPLICATION.
        since: the first version that knows the options; 13 does not know ``messages``.
    """

    name: str
    slot: str
    options: StreamOptions
    since: int

    @property
    def until(self) -> bytes:
        """The note of the row whose transaction is the last one."""
        return b"after" if self.slot == "stray" else b"the end"


_PLAIN: Final = StreamOptions(
    protocol_version=1,
    streaming="off",
    two_phase=False,
    origin=None,
    publications=("golden", "golden_identities"),
    binary=False,
    messages=False,
)
_ALL: Final = replace(_PLAIN, protocol_version=4, streaming="parallel", two_phase=True, messages=True)
_CAPTURES: Final = (
    Capture("proto1", "plain", replace(_PLAIN, messages=True), 13),
    Capture("proto1-binary", "plain", replace(_PLAIN, binary=True), 14),
    Capture("proto2-streaming", "plain", replace(_ALL, protocol_version=2, streaming="on", two_phase=False), 14),
    Capture("proto3-two_phase", "two_phase", replace(_ALL, protocol_version=3, streaming="off"), 15),
    Capture("proto3-streaming-two_phase", "two_phase", replace(_ALL, protocol_version=3, streaming="on"), 15),
    Capture("proto4-streaming-two_phase", "two_phase", replace(_ALL, streaming="on"), 16),
    Capture("proto4-parallel-two_phase", "two_phase", _ALL, 16),
    Capture("proto4-parallel-binary", "plain", replace(_ALL, two_phase=False, binary=True), 16),
    Capture("proto4-parallel-origin_none", "plain", replace(_ALL, two_phase=False, messages=False, origin="none"), 16),
    Capture("stray-proto1", "stray", _PLAIN, 13),
    Capture("stray-proto4-parallel", "stray", replace(_ALL, two_phase=False, messages=False), 16),
)


def captures(version: int) -> list[Capture]:
    """The recordings of a version."""
    messages = capabilities(version * 10000).messages
    found = [each for each in _CAPTURES if version >= each.since]
    return [replace(each, options=replace(each.options, messages=each.options.messages and messages)) for each in found]


SCHEMA: Final = """
CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy');
CREATE DOMAIN positive AS int CHECK (value > 0);
CREATE TABLE plain (id int PRIMARY KEY, note text, mood mood, size positive);
CREATE TABLE "Größe – 表" ("ключ" int PRIMARY KEY, "a ""quoted"" name" varchar(20));
CREATE TABLE types (
    id bigint PRIMARY KEY, flag boolean, small smallint, real8 double precision, exact numeric(20, 5), at timestamptz, day date,
    clock time, took interval, document jsonb, numbers int[], bytes bytea, key uuid, feeling mood, span int4range, address inet,
    code char(5), bits bit(3), acl aclitem);
CREATE TABLE toasted (id int PRIMARY KEY, n int, big text);
ALTER TABLE toasted ALTER COLUMN big SET STORAGE EXTERNAL;
CREATE TABLE full_identity (a int, b text);
ALTER TABLE full_identity REPLICA IDENTITY FULL;
CREATE TABLE index_identity (a int NOT NULL UNIQUE, b text);
ALTER TABLE index_identity REPLICA IDENTITY USING INDEX index_identity_a_key;
CREATE TABLE no_identity (a int);
ALTER TABLE no_identity REPLICA IDENTITY NOTHING;
CREATE TABLE parent (id serial PRIMARY KEY);
CREATE TABLE child (id serial PRIMARY KEY, parent_id int REFERENCES parent);
{wide}
CREATE PUBLICATION golden FOR TABLE plain, "Größe – 表", types, toasted, full_identity, parent, child, {published};
CREATE PUBLICATION golden_identities FOR TABLE index_identity, no_identity;
SELECT pg_replication_origin_create('upstream');
"""

COLUMN_LIST: Final = """
CREATE TABLE wide (id int PRIMARY KEY, filler text DEFAULT repeat('x', 7000));
ALTER TABLE wide ALTER COLUMN filler SET STORAGE PLAIN;
"""
NO_COLUMN_LIST: Final = """
CREATE TABLE wide (id int PRIMARY KEY);
CREATE TABLE filler (filler text DEFAULT repeat('x', 7000));
ALTER TABLE filler ALTER COLUMN filler SET STORAGE PLAIN;
CREATE FUNCTION fill() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN INSERT INTO filler DEFAULT VALUES; RETURN NEW; END';
CREATE TRIGGER fill BEFORE INSERT ON wide FOR EACH ROW EXECUTE FUNCTION fill();
"""


def schema(publisher: Capabilities) -> str:
    """The tables and publications."""
    wide, published = (COLUMN_LIST, "wide (id)") if publisher.column_lists else (NO_COLUMN_LIST, "wide")
    return SCHEMA.format(wide=wide, published=published)


def large(first: int) -> str:
    """Twelve rows of 7 kB each: more than logical_decoding_work_mem."""
    return f"INSERT INTO wide (id) SELECT generate_series({first}, {first + 11});"


ORDINARY: Final = (
    # in one row values, in one NULLs, in one special values; aclitem has no binary format
    """INSERT INTO types VALUES (1, true, -7, 1.5, 12345.67890, '2024-02-29 12:34:56.789+00', '2024-02-29', '23:59:59.5',
       '1 mon 2 days 3 s', '{"a": [1, null, "ü"]}', '{1,NULL,3}', '\\x00ff10', '123e4567-e89b-12d3-a456-426614174000', 'happy', '[1,5)',
       '10.0.0.1/8', 'ab', B'101', '=r/postgres');
       INSERT INTO types (id) VALUES (2);
       INSERT INTO types (id, real8, exact, at, day) VALUES (3, 'NaN', 'NaN', 'infinity', '0044-03-15 BC');""",
    "INSERT INTO plain VALUES (1, 'one', 'ok', 1), (2, '', NULL, NULL), (3, E'tab\\tand\\nnewline \\\\ ü 表', 'sad', 3);",
    """INSERT INTO "Größe – 表" VALUES (1, 'x'); UPDATE "Größe – 表" SET "ключ" = 2; DELETE FROM "Größe – 表";""",
    "INSERT INTO toasted VALUES (1, 1, repeat('0123456789', 230));",
    "UPDATE toasted SET n = 2;",  # 'u'
    "UPDATE plain SET id = 30 WHERE id = 3;",  # 'K'
    "UPDATE plain SET note = 'two' WHERE id = 2; DELETE FROM plain WHERE id = 30;",
    # 'O'
    "INSERT INTO full_identity VALUES (1, 'x'), (NULL, NULL); UPDATE full_identity SET b = 'y' WHERE a = 1; DELETE FROM full_identity;",
    "INSERT INTO index_identity VALUES (1, 'x'); UPDATE index_identity SET a = 2; DELETE FROM index_identity;"
    "INSERT INTO no_identity VALUES (1);",
    "INSERT INTO parent DEFAULT VALUES; INSERT INTO child (parent_id) VALUES (1);",
    "TRUNCATE parent RESTART IDENTITY CASCADE;",
    "TRUNCATE full_identity;",
    "SELECT pg_logical_emit_message(true, 'transactional', '\\x00ff'::bytea);",
    "SELECT pg_logical_emit_message(false, 'at once', 'text'); INSERT INTO plain VALUES (4, 'after the message', 'ok', 4);",
    "SAVEPOINT a; INSERT INTO plain VALUES (5); ROLLBACK TO a;"
    "INSERT INTO plain VALUES (6); SAVEPOINT b; INSERT INTO plain VALUES (7); RELEASE b;",
)

EVERYTHING_STREAMED: Final = f"""
    INSERT INTO plain VALUES (100, 'streamed', 'ok', 1);
    INSERT INTO toasted VALUES (100, 1, NULL);
    INSERT INTO full_identity VALUES (100, 'streamed');
    UPDATE plain SET note = 'changed' WHERE id = 100;
    UPDATE plain SET id = 101 WHERE id = 100;
    UPDATE full_identity SET b = 'changed';
    UPDATE toasted SET n = 3 WHERE id = 1;
    DELETE FROM full_identity;
    DELETE FROM plain WHERE id = 101;
    TRUNCATE child, parent RESTART IDENTITY;
    SELECT pg_logical_emit_message(true, 'in a stream', 'content');
    SELECT pg_logical_emit_message(false, 'out of the stream', 'content');
    {large(1000)}
    SAVEPOINT a;
    {large(1100)}
    SAVEPOINT b;
    {large(1200)}
    ROLLBACK TO b;
    {large(1300)}
    RELEASE a;
    INSERT INTO plain VALUES (102, 'last of the stream', NULL, NULL);
"""


def scenario(dsn: str) -> None:
    """Run everything that the captures are to show."""
    with psycopg.connect(dsn, autocommit=True) as first, psycopg.connect(dsn, autocommit=True) as second:
        for statements in ORDINARY:
            transaction(first, statements)
        transaction(first, EVERYTHING_STREAMED)
        transaction(first, f"{large(2000)} INSERT INTO plain VALUES (200);", end="ROLLBACK")
        interleaved(first, second)
        replicated(first, "INSERT INTO plain VALUES (300, 'from elsewhere', 'ok', 1);")
        replicated(first, large(3000))
        prepared(first)
        transaction(first, "INSERT INTO plain VALUES (999, 'the end', 'happy', 9);")


def transaction(connection: Connection, statements: str, *, end: str = "COMMIT") -> None:
    """Run statements as one transaction."""
    run(connection, f"BEGIN; {statements}")
    run(connection, end)


def run(connection: Connection, statements: str) -> None:
    """Run statements as they are; bytes, because they are not literals for the type checker."""
    connection.execute(statements.encode())


def interleaved(first: Connection, second: Connection) -> None:
    """Two streamed transactions at the same time, and a small one that commits between their blocks."""
    first.execute("BEGIN")
    run(first, large(2100))
    second.execute("BEGIN")
    run(second, large(2200))
    run(first, large(2300))
    run(second, large(2400))
    second.execute("COMMIT")
    run(first, large(2500))
    transaction(second, "INSERT INTO plain VALUES (201, 'between', NULL, NULL);")
    first.execute("COMMIT")


def replicated(connection: Connection, statements: str) -> None:
    """Run statements as a subscriber would that received them from another publisher."""
    connection.execute("SELECT pg_replication_origin_session_setup('upstream')")
    connection.execute("BEGIN")
    connection.execute("SELECT pg_replication_origin_xact_setup('16/B374D848', '2024-01-01 00:00:00+00')")
    run(connection, statements)
    connection.execute("COMMIT")
    connection.execute("SELECT pg_replication_origin_session_reset()")


def prepared(connection: Connection) -> None:
    """Prepared transactions: committed and rolled back, small and streamed, with a block before an aborted subtransaction."""
    cases = (
        ("small, committed", "INSERT INTO plain VALUES (400, 'prepared', 'ok', 1);", "COMMIT"),
        ("small, rolled back", "INSERT INTO plain VALUES (401, 'prepared', 'ok', 1);", "ROLLBACK"),
        ("large, committed ü", f"{large(4000)} SAVEPOINT a; {large(4100)} ROLLBACK TO a; INSERT INTO plain VALUES (402);", "COMMIT"),
        ("large, rolled back", large(4200), "ROLLBACK"),
    )
    for gid, statements, end in cases:
        transaction(connection, statements, end=f"PREPARE TRANSACTION '{gid}'")
        run(connection, f"{end} PREPARED '{gid}'")


def stray_abort(connection: Connection) -> None:
    """A rolled-back transaction that spilled and had a subtransaction in memory: 18 sends a STREAM ABORT of it, streaming or not."""
    rows = "INSERT INTO plain SELECT g, repeat('y', 200) FROM generate_series(5000, 9000) g;"
    transaction(connection, f"SAVEPOINT a; INSERT INTO plain VALUES (500); RELEASE a; {rows}", end="ROLLBACK")
    transaction(connection, "INSERT INTO plain VALUES (501, 'after', NULL, NULL);")


def create_slot(connection: Connection, name: str, *, two_phase: bool = False) -> None:
    """Make a slot that sees everything from here on."""
    # 13 has no fourth argument
    connection.execute(f"SELECT pg_create_logical_replication_slot(%s, 'pgoutput', false{', true' if two_phase else ''})", (name,))


def capture(version: int) -> None:
    """Capture one server version."""
    settings = {"timezone": "UTC", "logical_decoding_work_mem": "64kB"}
    publisher = capabilities(version * 10000)
    with EmbeddedServer.create(version, settings=settings) as server, psycopg.connect(server.dsn(), autocommit=True) as connection:
        run(connection, schema(publisher))
        create_slot(connection, "plain")
        if publisher.two_phase:
            create_slot(connection, "two_phase", two_phase=True)
        scenario(server.dsn())
        create_slot(connection, "stray")
        stray_abort(connection)
        for each in captures(version):
            path = recording(version, each.name)
            path.unlink(missing_ok=True)
            with contextlib.closing(Recorder(path)) as recorder:
                asyncio.run(record(server.dsn(), each, recorder))
            path.chmod(0o644)


async def record(dsn: str, wanted: Capture, recorder: Recorder) -> None:
    """Follow a slot up to the commit of the last transaction. Later messages belong to another capture."""
    async with await WalReceiverConnection.connect(dsn, application_name="golden") as connection:
        identity = await connection.identify_system()
        source = await connection.start_replication(wanted.slot, INVALID_LSN, wanted.options)
        recorder.session(
            RecordedSession(
                server_version=connection.server_version,
                system_identifier=identity.system_identifier,
                timeline=identity.timeline,
                slot_name=wanted.slot,
                start_lsn=INVALID_LSN,
                options=dict(wanted.options.pairs()),
            )
        )
        async with asyncio.timeout(60):
            end = await received(source, wanted.until, recorder)
            status = StandbyStatusUpdate(end, INVALID_LSN, INVALID_LSN, 0, reply_requested=False)
            await RecordedStream(source, recorder).send(encode_frame(status))
            await source.close()


async def received(source: ReplicationStream, until: bytes, recorder: Recorder) -> Lsn:
    """Record what comes, up to the commit of the transaction that inserts this note. Return the last LSN."""
    last = False
    while True:
        for frame in await source.receive():
            recorder.received([frame])
            message = frame[PAYLOAD:]
            last |= message[:1] == b"I" and until in message
            if last and message[:1] == b"C":
                return decode_frame(frame).end_lsn


def recording(version: int, name: str) -> Path:
    """The file of a capture."""
    return DIRECTORY / f"pg{version}-{name}.rec"


def read(version: int, name: str) -> tuple[RecordedSession, list[bytes]]:
    """Read a recording: its session, and the payloads of its messages."""
    with recording(version, name).open("rb") as file:
        ((session, received),) = ((session, list(received)) for session, received in sessions(read_recording(file)))
    frames = [decode_frame(each.content) for each in received]
    return session, [frame.payload for frame in frames if isinstance(frame, XLogData)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", type=int, nargs="*", metavar="VERSION", help=f"default: {VERSIONS}")
    for given in parser.parse_args().versions or VERSIONS:
        capture(given)
