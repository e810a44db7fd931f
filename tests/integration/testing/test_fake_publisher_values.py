"""The same rows on a real server and on the fake publisher: both store, send and refuse the same values, and send the same bytes.

The transaction ids, oids, LSNs and times are left out. A streamed transaction is put together; where its blocks end depends on memory.
"""

from __future__ import annotations

from typing import Any, Final

import psycopg
import pytest

from subscriber.errors import ConfigurationError
from subscriber.protocol.capabilities import StreamOptions, capabilities
from subscriber.protocol.encoder import encode
from subscriber.protocol.messages import Begin, Commit, Message, Relation, StreamAbort, StreamCommit, StreamStart, StreamStop, Type
from subscriber.testing.fake_publisher import FakePublisher
from tests.integration.testing.test_fake_publisher_differential import WORK_MEM, received
from tests.support.database import Database

VALUES: Final = {
    "bool": ("t", "TRUE", " yes ", "of", "0", "x", ""),
    "smallint": ("1", " +7 ", "-0", "32767", "32768", "1.5", "x"),
    "integer": ("2147483647", "-2147483649", ""),
    "bigint": ("9223372036854775807", "9223372036854775808"),
    "numeric": ("1", "1.50", "1e3", "1.5e-3", ".5", "-0.00", "NaN", "123456789012345678901234567890", "x"),
    "numeric(6,2)": ("1", "1.005", "-1.005", "9999.99", "9999.995", "-0.001", "NaN", "1e5"),
    "numeric(3)": ("1.5", "2.5", "999.5"),
    "real": ("1", "0.1", "1e5", "1e6", "123456", "1234567", "1e-4", "1e-5", "-0", "Infinity", "NaN", "3.4e38", "1e39", "x"),
    "double precision": ("1", "0.1", "1e14", "1e15", "123456789012345678", "1e-4", "1e-5", "1.5e-7", "-0", "-Infinity", "NaN", "x"),
    "text": ("", " a ", "ä"),
    "varchar(3)": ("abc", "abc  ", "ab", "abcd", "äöü"),
    "char(4)": ("", "a", "abcd", "abcd   ", "abcde", "ä"),
    "uuid": ("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "{A0EEBC999C0B4EF8BB6D6BB9BD380A11}", "x"),
    "date": ("2020-02-29", "infinity"),
    "timestamp": ("2020-01-01 00:00:00.5", "2020-01-01 00:00:00"),
    "timestamp(3)": ("2020-01-01 00:00:00.123",),
    "timestamptz": ("2020-01-01 00:00:00+00",),
    "time": ("24:00:00",),
    "bytea": ("\\x00ff",),
    "jsonb": ('{"a": 1}',),
    "int[]": ("{1,NULL}",),
}
COLUMNS: Final = {f"c{place}": declared for place, declared in enumerate(VALUES)}


def options(version: int, **more: Any) -> StreamOptions:
    caps = capabilities(version * 10000)
    given: dict[str, Any] = {"streaming": "off", "two_phase": False, "origin": None, "binary": False, "messages": False} | more
    return StreamOptions(protocol_version=caps.protocol_version, publications=("app",), **given)


async def both(database: Database, publisher: FakePublisher, chosen: StreamOptions) -> tuple[list[Message], list[Message]]:
    """What both send."""
    return (
        await received(database.conninfo(), chosen, database.current_lsn()),
        await received(publisher.dsn(), chosen, publisher.wal.end),
    )


def plain(messages: list[Message]) -> list[bytes]:
    """The bytes of the messages, with numbers for xids and oids; without the blocks of streams, LSNs and times."""
    numbers: dict[tuple[str, int], int] = {}
    found = []
    for message in messages:
        if isinstance(message, StreamStart | StreamStop | Begin | Commit | StreamCommit | StreamAbort):
            if not isinstance(message, StreamStart | StreamStop):
                found.append(type(message).__name__.encode())
            continue
        changed: Any = message
        for name in ("xid", "relation_id"):
            value = getattr(changed, name, None)
            if value is not None:
                number = numbers.setdefault((name, value), len(numbers) + 1)
                changed = type(changed)(**{each: number if each == name else getattr(changed, each) for each in fields_of(changed)})
        found.append(encode(changed))
    return found


def fields_of(message: Any) -> list[str]:
    return list(getattr(message, "__dataclass_fields__", None) or message.__slots__)


async def test_values_are_brought_to_their_types(publisher_db: Database) -> None:
    listed = ", ".join(f"{name} {declared}" for name, declared in COLUMNS.items())
    publisher_db.execute(f"CREATE TABLE kinds (id int PRIMARY KEY, {listed}); CREATE PUBLICATION app FOR TABLE kinds")
    publisher_db.execute("SELECT pg_create_logical_replication_slot('differential', 'pgoutput')")
    different: list[str] = []
    async with FakePublisher(publisher_db.version) as publisher:
        publisher.create_table("kinds", {"id": "int"} | COLUMNS, key=["id"])
        publisher.create_publication("app", "kinds")
        await publisher.create_slot("differential")
        number = 0
        for name, declared in COLUMNS.items():
            for value in VALUES[declared]:
                number += 1
                real = fake = None
                try:
                    with publisher_db.connect() as session:
                        session.execute(f"INSERT INTO kinds (id, {name}) VALUES ({number}, '{value}')")
                except psycopg.Error as error:
                    real = error.diag.message_primary
                try:
                    async with publisher.transaction() as t:
                        t.insert("kinds", id=number, **{name: value})
                except ConfigurationError as error:
                    fake = str(error)
                if real != fake:
                    different.append(f"{declared} {value!r}: the server says {real}, the fake publisher {fake}")
        assert not different, "\n".join(different)
        for binary in (False, True) if publisher_db.version >= 14 else (False,):
            if binary:
                rows = [dict(row) for row in publisher.rows("kinds")]
                publisher_db.execute("UPDATE kinds SET id = id + 1000")
                async with publisher.transaction() as t:
                    for row in rows:
                        t.update("kinds", {"id": row["id"]}, id=int(row["id"] or 0) + 1000)
            server, ours = await both(publisher_db, publisher, options(publisher_db.version, binary=binary))
            assert plain(ours) == plain(server)
    publisher_db.execute("SELECT pg_drop_replication_slot('differential')")


@pytest.mark.publisher(min=14, lacks="streaming of running transactions")
@pytest.mark.matrix
async def test_streamed_transactions_describe_their_tables(publisher_db: Database) -> None:
    """Each streamed transaction has its own Relation message, even if the client knows the table; and again after an abort."""
    publisher_db.execute("CREATE TABLE t (id int PRIMARY KEY, a text); CREATE PUBLICATION app FOR TABLE t")
    publisher_db.execute("SELECT pg_create_logical_replication_slot('differential', 'pgoutput')")
    rows = "INSERT INTO t SELECT n, repeat('x', 1000) FROM generate_series({}, {}) AS n"
    async with FakePublisher(publisher_db.version, logical_decoding_work_mem=WORK_MEM) as publisher:
        publisher.create_table("t", {"id": "int", "a": "text"}, key=["id"])
        publisher.create_publication("app", "t")
        await publisher.create_slot("differential")
        publisher_db.execute("INSERT INTO t VALUES (0, 'known')")
        async with publisher.transaction() as t:
            t.insert("t", id=0, a="known")
        for start in (1000, 2000):
            with publisher_db.connect() as session, session.transaction():
                session.execute(rows.format(start, start + 299))
                session.execute("SAVEPOINT a")
                session.execute(rows.format(start + 300, start + 599))
                session.execute("ROLLBACK TO a")
                session.execute(rows.format(start + 600, start + 899))
            async with publisher.transaction() as t:
                t.insert("t", [{"id": start + n, "a": "x" * 1000} for n in range(300)])
                with t.savepoint():
                    t.insert("t", [{"id": start + n, "a": "x" * 1000} for n in range(300, 600)])
                    t.rollback_savepoint()
                t.insert("t", [{"id": start + n, "a": "x" * 1000} for n in range(600, 900)])
        publisher_db.execute("INSERT INTO t VALUES (1, 'still known')")
        async with publisher.transaction() as t:
            t.insert("t", id=1, a="still known")
        server, ours = await both(publisher_db, publisher, options(publisher_db.version, streaming="on"))
    assert any(isinstance(message, StreamStart) for message in server)
    assert plain_kinds(ours) == plain_kinds(server)
    publisher_db.execute("SELECT pg_drop_replication_slot('differential')")


def plain_kinds(messages: list[Message]) -> list[str]:
    """What comes, with runs of rows as one."""
    found: list[str] = []
    for message in messages:
        name = type(message).__name__
        if not isinstance(message, StreamStart | StreamStop | Type) and (not found or found[-1] != name or isinstance(message, Relation)):
            found.append(name)
    return found
