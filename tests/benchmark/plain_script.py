"""A plain script, as one would write it today: psycopg2's replication cursor, and each change executed when it arrives.

``python -m tests.benchmark.plain_script DSN SLOT END_LSN TARGET [many]`` applies what the slot gives up to END_LSN to table ``t`` of
TARGET, a ``sqlite:///`` or ``mariadb://`` URL. It prints the seconds, and the processor's, from its first connection to the last commit. It
is as quick as that way can be: it decodes only what the benchmark sends, commits where the publisher did, and keeps no position. With
``many`` it collects the changes of one kind in a transaction, and executes them by ``executemany``.
"""

from __future__ import annotations

import select
import sqlite3
import sys
import time
from collections.abc import Callable
from struct import Struct
from typing import Any
from urllib.parse import unquote, urlsplit

import psycopg2
import psycopg2.extras
import pymysql

_COUNT = Struct(">h").unpack_from
_LENGTH = Struct(">i").unpack_from


def _lsn(text: str) -> int:
    high, low = text.split("/")
    return (int(high, 16) << 32) + int(low, 16)


def _values(payload: bytes, position: int) -> list[str | None]:
    (count,) = _COUNT(payload, position)
    position += 2
    found: list[str | None] = []
    for _ in range(count):
        kind = payload[position]
        position += 1
        if kind == ord("n"):
            found.append(None)
            continue
        (length,) = _LENGTH(payload, position)
        position += 4
        found.append(payload[position : position + length].decode())
        position += length
    return found


def connect(url: str) -> tuple[Any, str]:
    """The connection, in which transactions begin by themselves, and the placeholder of a parameter."""
    if url.startswith("sqlite:///"):
        connection = sqlite3.connect(url.removeprefix("sqlite:///"))
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        return connection, "?"
    parts = urlsplit(url)
    return pymysql.connect(
        host=parts.hostname or "",
        port=parts.port or 0,
        user=parts.username,
        password=unquote(parts.password or ""),
        database=parts.path.lstrip("/"),
        charset="utf8mb4",
    ), "%s"


def _applier(url: str, *, many: bool) -> Callable[[bytes], bool]:
    """Carries out one message; True at a commit."""
    connection, place = connect(url)
    insert = f"INSERT INTO t (id, a, b, c) VALUES ({place}, {place}, {place}, {place})"
    update = f"UPDATE t SET a = {place}, b = {place}, c = {place} WHERE id = {place}"
    cursor = connection.cursor()
    waiting: list[list[str | None]] = []
    statement = ""

    def execute() -> None:
        if waiting:
            cursor.executemany(statement, waiting)
            waiting.clear()

    def collect(sql: str, values: list[str | None]) -> None:
        nonlocal statement
        if sql is not statement:
            execute()
            statement = sql
        waiting.append(values)

    take = collect if many else cursor.execute

    def apply(payload: bytes) -> bool:
        match payload[:1]:
            case b"I":
                take(insert, _values(payload, 6))
            case b"U":
                key, *values = _values(payload, 6)
                take(update, [*values, key])
            case b"C":
                execute()
                connection.commit()
                return True
        return False

    return apply


def main(dsn: str, slot: str, end_lsn: str, url: str, many: str = "") -> tuple[float, float]:
    """Run it; the seconds that it took, and those of the processor."""
    end = _lsn(end_lsn)
    began, processor = time.monotonic(), time.process_time()
    apply = _applier(url, many=bool(many))
    publisher = psycopg2.connect(dsn, connection_factory=psycopg2.extras.LogicalReplicationConnection)
    cursor = publisher.cursor()
    cursor.start_replication(slot_name=slot, options={"proto_version": "1", "publication_names": "pub"}, decode=False)
    while True:
        message = cursor.read_message()
        if message is None:
            if cursor.wal_end >= end:
                break
            select.select([cursor], [], [], 1.0)
        elif apply(message.payload):
            cursor.send_feedback(flush_lsn=message.wal_end)  # type: ignore[no-untyped-call]
            if message.wal_end >= end:
                break
    seconds = time.monotonic() - began, time.process_time() - processor
    cursor.send_feedback(flush_lsn=end, reply=True, force=True)  # type: ignore[no-untyped-call]
    publisher.close()
    return seconds


if __name__ == "__main__":
    sys.stdout.write("{} {}\n".format(*main(*sys.argv[1:])))
