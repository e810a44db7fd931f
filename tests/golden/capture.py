"""Capture real pgoutput bytes of every message type: ``python -m tests.golden.capture``.

Starts a PostgreSQL 18 and a 16 with a small logical_decoding_work_mem, runs one scenario on each, reads it through
``pg_logical_slot_peek_binary_changes`` once for each set of options, and writes a file for each into this directory:
comment lines that begin with ``#``, then one message a line in hexadecimal. To be run again only when the scenario is changed.

What makes a transaction large without making the files large: ``wide.filler`` is not published.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import psycopg
from psycopg.rows import scalar_row

from subscriber.testing.server import EmbeddedServer

DIRECTORY: Final = Path(__file__).parent
VERSIONS: Final = (18, 16)
PUBLICATION: Final = "golden"

Options = Mapping[str, str]
Connection = psycopg.Connection[tuple[object, ...]]

# name of the file, slot, options except publication_names
CAPTURES: Final[Sequence[tuple[str, str, Options]]] = (
    ("proto1", "plain", {"proto_version": "1", "messages": "true"}),
    ("proto1-binary", "plain", {"proto_version": "1", "binary": "true"}),
    ("proto2-streaming", "plain", {"proto_version": "2", "streaming": "on", "messages": "true"}),
    ("proto3-two_phase", "two_phase", {"proto_version": "3", "two_phase": "on", "messages": "true"}),
    ("proto3-streaming-two_phase", "two_phase", {"proto_version": "3", "streaming": "on", "two_phase": "on", "messages": "true"}),
    ("proto4-streaming-two_phase", "two_phase", {"proto_version": "4", "streaming": "on", "two_phase": "on", "messages": "true"}),
    ("proto4-parallel-two_phase", "two_phase", {"proto_version": "4", "streaming": "parallel", "two_phase": "on", "messages": "true"}),
    ("proto4-parallel-binary", "plain", {"proto_version": "4", "streaming": "parallel", "binary": "true", "messages": "true"}),
    ("proto4-parallel-origin_none", "plain", {"proto_version": "4", "streaming": "parallel", "origin": "none"}),
    ("stray-proto1", "stray", {"proto_version": "1"}),
    ("stray-proto4-parallel", "stray", {"proto_version": "4", "streaming": "parallel"}),
)

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
CREATE TABLE wide (id int PRIMARY KEY, filler text);
ALTER TABLE wide ALTER COLUMN filler SET STORAGE PLAIN;
CREATE PUBLICATION golden FOR TABLE plain, "Größe – 表", types, toasted, full_identity, parent, child, wide (id);
CREATE PUBLICATION golden_identities FOR TABLE index_identity, no_identity;
SELECT pg_replication_origin_create('upstream');
"""


def large(first: int) -> str:
    """Twelve rows of 7 kB each: more than logical_decoding_work_mem."""
    return f"INSERT INTO wide SELECT g, repeat('x', 7000) FROM generate_series({first}, {first + 11}) g;"


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


def peek(connection: Connection, slot: str, options: Options) -> list[bytes]:
    """All messages of a slot; it stays where it is."""
    pairs = [text for pair in {**options, "publication_names": f"{PUBLICATION},golden_identities"}.items() for text in pair]
    with connection.cursor(row_factory=scalar_row) as cursor:
        query = "SELECT data FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, VARIADIC %s::text[])"
        return [bytes(data) for data in cursor.execute(query, (slot, pairs)).fetchall()]


def create_slot(connection: Connection, name: str, *, two_phase: bool = False) -> None:
    """Make a slot that sees everything from here on."""
    connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput', false, %s)", (name, two_phase))


def capture(version: int) -> None:
    """Capture one server version."""
    settings = {"timezone": "UTC", "logical_decoding_work_mem": "64kB"}
    with EmbeddedServer.create(version, settings=settings) as server, psycopg.connect(server.dsn(), autocommit=True) as connection:
        run(connection, SCHEMA)
        create_slot(connection, "plain")
        create_slot(connection, "two_phase", two_phase=True)
        scenario(server.dsn())
        create_slot(connection, "stray")
        stray_abort(connection)
        row = connection.execute("SHOW server_version").fetchone()
        assert row is not None
        for name, slot, options in CAPTURES:
            until = None if slot == "stray" else "the end"
            write(f"pg{version}-{name}", f"{row[0]}", options, cut(peek(connection, slot, options), until))


def cut(messages: list[bytes], until: str | None) -> list[bytes]:
    """The messages up to the commit of the transaction that inserted this note: later messages belong to another capture."""
    if until is None:
        return messages
    last = next(number for number, message in enumerate(messages) if message[:1] == b"I" and until.encode() in message)
    return messages[: last + 2]


def write(name: str, server_version: str, options: Options, messages: list[bytes]) -> None:
    """Write one file."""
    lines = [
        f"# pgoutput of PostgreSQL {server_version}, captured by tests/golden/capture.py",
        f"# options: {', '.join(f'{key}={value}' for key, value in options.items())}",
        "# one message a line",
        *(message.hex() for message in messages),
    ]
    (DIRECTORY / f"{name}.hex").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    for server in VERSIONS:
        capture(server)
