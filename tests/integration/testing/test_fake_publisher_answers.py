"""The same commands and queries for a real server and for the fake publisher: both give the same answers and the same errors.

LSNs, names of snapshots and the system identifier are left out. What only a server has (physical replication, SQL) is not asked for.
"""

from __future__ import annotations

import asyncio
import re
from itertools import zip_longest
from typing import Any, Final

import pytest
from psycopg import generators, pq, waiting

from subscriber.testing.fake_publisher import FakePublisher
from tests.support.database import Database

LOGICAL: Final = "CREATE_REPLICATION_SLOT s LOGICAL pgoutput"
START: Final = "START_REPLICATION SLOT s LOGICAL 0/0"
APP: Final = "proto_version '1', publication_names 'app'"
COMMANDS: Final = [
    ("IDENTIFY_SYSTEM",),
    ("identify_system",),
    ("IDENTIFY_SYSTEM;",),
    ("IDENTIFY_SYSTEM now",),
    ("SHOW server_encoding",),
    ("SHOW nothing_like_that",),
    ("SHOW",),
    ("TIMELINE_HISTORY 1",),
    ("TIMELINE_HISTORY 0",),
    ("TIMELINE_HISTORY 99",),
    ("TIMELINE_HISTORY x",),
    ("TIMELINE_HISTORY",),
    (LOGICAL, "DROP_REPLICATION_SLOT s"),
    (f"{LOGICAL} NOEXPORT_SNAPSHOT", LOGICAL, f"{LOGICAL} NOEXPORT_SNAPSHOT", "DROP_REPLICATION_SLOT s WAIT"),
    ("CREATE_REPLICATION_SLOT s TEMPORARY LOGICAL pgoutput EXPORT_SNAPSHOT",),
    ("CREATE_REPLICATION_SLOT s TEMPORARY LOGICAL pgoutput USE_SNAPSHOT",),
    ("CREATE_REPLICATION_SLOT s TEMPORARY LOGICAL pgoutput (SNAPSHOT 'use')",),
    ("CREATE_REPLICATION_SLOT s TEMPORARY LOGICAL pgoutput (SNAPSHOT 'nothing')",),
    ("CREATE_REPLICATION_SLOT s TEMPORARY LOGICAL pgoutput (SNAPSHOT 'bad')",),
    ("CREATE_REPLICATION_SLOT s TEMPORARY LOGICAL pgoutput (SNAPSHOT)",),
    ("CREATE_REPLICATION_SLOT s TEMPORARY LOGICAL pgoutput (SNAPSHOT 'nothing', SNAPSHOT 'nothing')",),
    ("CREATE_REPLICATION_SLOT s TEMPORARY LOGICAL pgoutput (SNAPSHOT 'nothing', TWO_PHASE)",),
    ("CREATE_REPLICATION_SLOT s TEMPORARY LOGICAL pgoutput (SNAPSHOT 'nothing', TWO_PHASE 'maybe')",),
    ("CREATE_REPLICATION_SLOT s TEMPORARY LOGICAL pgoutput (SNAPSHOT 'nothing', TWO_PHASE false)",),
    ("CREATE_REPLICATION_SLOT s TEMPORARY LOGICAL pgoutput (SNAPSHOT 'nothing', FAILOVER)",),
    ("CREATE_REPLICATION_SLOT s LOGICAL pgoutput (SNAPSHOT 'nothing', FAILOVER)", "DROP_REPLICATION_SLOT s"),
    ("CREATE_REPLICATION_SLOT s LOGICAL pgoutput (RESERVE_WAL)",),
    ("CREATE_REPLICATION_SLOT s LOGICAL pgoutput (other)",),
    ("CREATE_REPLICATION_SLOT s LOGICAL pgoutput TWO_PHASE", "DROP_REPLICATION_SLOT s"),
    ("CREATE_REPLICATION_SLOT s LOGICAL pgoutput NOEXPORT_SNAPSHOT EXPORT_SNAPSHOT",),
    ("CREATE_REPLICATION_SLOT s LOGICAL pgoutput nonsense",),
    ("CREATE_REPLICATION_SLOT s LOGICAL nonsense",),
    ("CREATE_REPLICATION_SLOT s LOGICAL",),
    ("CREATE_REPLICATION_SLOT s",),
    ("CREATE_REPLICATION_SLOT LOGICAL pgoutput",),
    ("CREATE_REPLICATION_SLOT 's' LOGICAL pgoutput",),
    ('CREATE_REPLICATION_SLOT "Bad" LOGICAL pgoutput',),
    ('CREATE_REPLICATION_SLOT "bad-name" LOGICAL pgoutput',),
    ('CREATE_REPLICATION_SLOT "" LOGICAL pgoutput',),
    (f"CREATE_REPLICATION_SLOT {'s' * 70} LOGICAL pgoutput", f"DROP_REPLICATION_SLOT {'s' * 63}"),
    ("CREATE_REPLICATION_SLOT UPPER LOGICAL pgoutput", "DROP_REPLICATION_SLOT upper"),
    ("BEGIN", f"{LOGICAL} USE_SNAPSHOT", "COMMIT", "DROP_REPLICATION_SLOT s"),
    ("BEGIN ISOLATION LEVEL REPEATABLE READ", f"{LOGICAL} USE_SNAPSHOT", "COMMIT", "DROP_REPLICATION_SLOT s"),
    ("BEGIN ISOLATION LEVEL REPEATABLE READ", "SELECT 1", f"{LOGICAL} USE_SNAPSHOT", "ROLLBACK"),
    ("BEGIN READ ONLY ISOLATION LEVEL REPEATABLE READ", f"{LOGICAL} USE_SNAPSHOT", "COMMIT", "DROP_REPLICATION_SLOT s"),
    ("BEGIN", LOGICAL, "SELECT 1", "IDENTIFY_SYSTEM", "SHOW server_encoding", "COMMIT"),
    ("DROP_REPLICATION_SLOT s",),
    ("DROP_REPLICATION_SLOT s WAIT",),
    ("DROP_REPLICATION_SLOT s NOW",),
    ("DROP_REPLICATION_SLOT",),
    ("READ_REPLICATION_SLOT s",),
    (f"{LOGICAL} NOEXPORT_SNAPSHOT", "READ_REPLICATION_SLOT s", "DROP_REPLICATION_SLOT s"),
    ("ALTER_REPLICATION_SLOT s (FAILOVER)",),
    (
        f"{LOGICAL} NOEXPORT_SNAPSHOT",
        "ALTER_REPLICATION_SLOT s (FAILOVER)",
        "ALTER_REPLICATION_SLOT s (FAILOVER 'maybe')",
        "ALTER_REPLICATION_SLOT s (FAILOVER true, FAILOVER false)",
        "ALTER_REPLICATION_SLOT s (TWO_PHASE)",
        "ALTER_REPLICATION_SLOT s (other)",
        "ALTER_REPLICATION_SLOT s ()",
        "ALTER_REPLICATION_SLOT s",
        "DROP_REPLICATION_SLOT s",
    ),
    ("CREATE_REPLICATION_SLOT s TEMPORARY LOGICAL pgoutput NOEXPORT_SNAPSHOT", "ALTER_REPLICATION_SLOT s (FAILOVER)"),
    (f"{START} ({APP})",),
    (f'START_REPLICATION SLOT "bad-name" LOGICAL 0/0 ({APP})',),
    (f"START_REPLICATION LOGICAL 0/0 ({APP})",),
    ("START_REPLICATION SLOT s LOGICAL",),
    ("START_REPLICATION SLOT s LOGICAL 0",),
    ("START_REPLICATION SLOT s LOGICAL x/0",),
    ("START_REPLICATION SLOT s LOGICAL 0/123456789A",),
    (f"{START} ({APP}",),
    (f"{START} {APP}",),
    (f"{START} ({APP},)",),
    *(
        ("CREATE_REPLICATION_SLOT s TEMPORARY LOGICAL pgoutput NOEXPORT_SNAPSHOT", f"{START} {options}".rstrip())
        for options in (
            "",
            "()",
            "(publication_names 'app')",
            "(proto_version '1')",
            "(proto_version '', publication_names 'app')",
            "(proto_version 1, publication_names 'app')",
            "(proto_version 'x', publication_names 'app')",
            "(proto_version '-1', publication_names 'app')",
            "(proto_version '0', publication_names 'app')",
            "(proto_version '99', publication_names 'app')",
            "(proto_version '99999999999999999999', publication_names 'app')",
            "(proto_version '5000000000', publication_names 'app')",
            "(proto_version '1', publication_names '')",
            "(proto_version '1', publication_names 'a b')",
            "(proto_version '1', publication_names 'a,,b')",
            "(proto_version '1', publication_names '\"a')",
            "(proto_version '1', publication_names 'a,')",
            f"({APP}, proto_version '1')",
            f"({APP}, publication_names 'app')",
            f"({APP}, other 'x')",
            f"({APP}, OTHER)",
            f"({APP}, binary 'maybe')",
            f"({APP}, binary, binary)",
            f"({APP}, messages 'maybe')",
            f"({APP}, streaming 'on')",
            f"({APP}, streaming 'maybe')",
            f"({APP}, streaming 'parallel')",
            "(proto_version '2', publication_names 'app', streaming 'parallel')",
            f"({APP}, two_phase 'on')",
            f"({APP}, two_phase 'maybe')",
            f"({APP}, origin 'some')",
        )
    ),
    ("BEGIN", f"{START} ({APP})", "ROLLBACK"),
    ("",),
    (";",),
    ("BEGIN", "BEGIN", "COMMIT", "COMMIT", "ROLLBACK"),
    ("SAVEPOINT a",),
    ("BEGIN", "SAVEPOINT a", "RELEASE SAVEPOINT b", "SELECT 1", "ROLLBACK TO SAVEPOINT a", "SELECT 1", "COMMIT"),
    ("ROLLBACK TO SAVEPOINT a",),
    ("RELEASE SAVEPOINT a",),
    ("SET nothing_like_that = 1",),
    ("SET application_name = 'x'", "SHOW application_name"),
    ("SET TRANSACTION SNAPSHOT 'bogus'",),
    ("BEGIN ISOLATION LEVEL REPEATABLE READ", "SET TRANSACTION SNAPSHOT '00000003-00000001-1'", "ROLLBACK"),
    ("SELECT 1; SELECT 1",),
    ("SELECT 1; SELECT pg_drop_replication_slot('s'); SELECT 1",),
    ("SELECT current_database()", "SELECT pg_is_in_recovery()", "SELECT pg_current_wal_lsn()"),
]
QUERIES: Final = [
    ("IDENTIFY_SYSTEM",),
    (LOGICAL,),
    ("SELECT * FROM pg_create_logical_replication_slot('s', 'pgoutput')", "SELECT pg_drop_replication_slot('s')"),
    ("SELECT pg_create_logical_replication_slot('s', 'pgoutput')", "SELECT slot_name FROM pg_replication_slots"),
    ("SELECT pg_create_logical_replication_slot('s', 'pgoutput')",),
    (
        "SELECT slot_name FROM pg_replication_slots WHERE slot_name = 's'",
        "SELECT slot_name FROM pg_replication_slots WHERE slot_name = 'x'",
    ),
    ("SELECT pg_drop_replication_slot('s')", "SELECT pg_drop_replication_slot('s')", "SELECT slot_name FROM pg_replication_slots"),
    ("SELECT * FROM pg_create_logical_replication_slot('s', 'pgoutput', true)", "SELECT pg_drop_replication_slot('s')"),
    ("SELECT * FROM pg_create_logical_replication_slot('Bad', 'pgoutput')",),
    ("SELECT * FROM pg_create_logical_replication_slot('s', 'nonsense')",),
    ("SELECT * FROM pg_catalog.pg_create_logical_replication_slot('s', 'pgoutput', false, false)",),
    ("SELECT pg_catalog.pg_drop_replication_slot('s')",),
]
NOT_COMPARED: Final = {
    # a truncated identifier
    "42622",
    # the library of a plugin: 18.6, 17.11 and 16.15 have a list of allowed ones
    "42501",
    "58P01",
}
LEFT_OUT: Final = (
    (re.compile(r"\b[0-9A-F]+/[0-9A-F]+\b"), "LSN"),
    (re.compile(r"\b[0-9A-F]{8}-[0-9A-F]{8}-\d\b"), "SNAPSHOT"),
    (re.compile(r"\b7\d{18}\b"), "SYSTEM"),
)
FIELDS: Final = {
    "severity": pq.DiagnosticField.SEVERITY_NONLOCALIZED,
    "sqlstate": pq.DiagnosticField.SQLSTATE,
    "message": pq.DiagnosticField.MESSAGE_PRIMARY,
    "detail": pq.DiagnosticField.MESSAGE_DETAIL,
    "hint": pq.DiagnosticField.MESSAGE_HINT,
}


def plain(data: bytes | None) -> str | None:
    if data is None:
        return None
    text = data.decode()
    for pattern, name in LEFT_OUT:
        text = pattern.sub(name, text)
    return text


def error_of(result: pq.abc.PGresult) -> dict[str, str]:
    """The fields of an error or a notice that are compared."""
    found = {name: text for name, field in FIELDS.items() if (text := plain(result.error_field(field)))}
    return {} if found.get("sqlstate") in NOT_COMPARED else found


def answers(conninfo: str, commands: tuple[str, ...]) -> list[Any]:
    """Each result of each command: its status, fields, rows and tag, or its error; then the state of the transaction and the notices."""
    # the functions of libpq that wait would not let the fake publisher run meanwhile
    connection = waiting.wait_conn(generators.connect(conninfo))
    notices: list[dict[str, str]] = []
    connection.notice_handler = lambda result: notices.append(error_of(result))
    found: list[Any] = []
    try:
        for command in commands:
            connection.send_query(command.encode())
            for result in waiting.wait(generators.execute(connection), connection.socket):
                status = pq.ExecStatus(result.status)
                columns = [(result.fname(place), result.ftype(place)) for place in range(result.nfields)]
                rows = [[plain(result.get_value(row, place)) for place in range(result.nfields)] for row in range(result.ntuples)]
                found.append((command, status.name, error_of(result), columns, rows, result.command_status))
                if status == pq.ExecStatus.COPY_BOTH:
                    return found
            found.append((command, pq.TransactionStatus(connection.transaction_status).name, *filter(None, notices)))
            notices.clear()
    finally:
        connection.finish()
    return found


@pytest.mark.timeout(240)
@pytest.mark.matrix
async def test_answers_are_the_servers(publisher_db: Database) -> None:
    publisher_db.execute("CREATE PUBLICATION app")
    different: list[str] = []
    async with FakePublisher(publisher_db.version, database=publisher_db.name) as publisher:
        publisher.create_publication("app")
        for replication, scripts in (("database", COMMANDS), ("false", QUERIES)):
            for commands in scripts:
                real = await asyncio.to_thread(answers, publisher_db.conninfo(replication=replication), commands)
                fake = await asyncio.to_thread(answers, publisher.dsn(replication=replication), commands)
                different += [f"server: {one}\n  fake: {other}" for one, other in zip_longest(real, fake) if one != other]
    assert not different, "\n".join([f"{len(different)} answers differ", *different])
