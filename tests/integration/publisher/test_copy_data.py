"""Messages of a COPY are the same, whether libpq's function is called directly or by psycopg."""

from __future__ import annotations

import _json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator

import psycopg
import pytest
from psycopg import pq

from subscriber.testing.binaries import reachable_binaries, server_user
from subscriber.walreceiver import copy_data
from subscriber.walreceiver.copy_data import drain
from tests.support.database import Database

CHUNK = 50_000


@pytest.fixture(params=["direct", "psycopg"])
def pgconn(request: pytest.FixtureRequest, publisher_db: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[pq.abc.PGconn]:
    if request.param == "psycopg":
        monkeypatch.setattr(copy_data, "_GET_COPY_DATA", 0)
    found = pq.PGconn.connect(publisher_db.dsn.encode())
    assert found.status == pq.ConnStatus.OK, found.get_error_message()
    yield found
    found.finish()


def begin(pgconn: pq.abc.PGconn, query: str) -> None:
    assert pgconn.exec_(f"COPY ({query}) TO STDOUT".encode()).status == pq.ExecStatus.COPY_OUT


def read(pgconn: pq.abc.PGconn) -> list[bytes]:
    found: list[bytes] = []
    ended = False
    while not ended:
        messages: list[bytes] = []
        ended, size = drain(pgconn, messages, CHUNK, 1)
        assert size == sum(map(len, messages))
        assert sum(map(len, messages[:-1])) < CHUNK
        found += messages
        if not ended and size < CHUNK:
            select.select([pgconn.socket], [], [])
            pgconn.consume_input()
    return found


def test_messages_of_any_size(pgconn: pq.abc.PGconn) -> None:
    sizes = [0, 1, 100, 9_000, 200_000, 0, *([30] * 5_000)]
    begin(pgconn, f"SELECT repeat('x', size) FROM unnest('{{{','.join(map(str, sizes))}}}'::int[]) AS size")
    assert read(pgconn) == [b"x" * size + b"\n" for size in sizes]
    result = pgconn.get_result()
    assert result is not None
    assert result.status == pq.ExecStatus.COMMAND_OK


def test_error_of_the_server_ends_the_stream_after_its_rows(pgconn: pq.abc.PGconn) -> None:
    begin(pgconn, "SELECT 1 / (3 - g) FROM generate_series(1, 5) AS g")
    assert read(pgconn) == [b"0\n", b"1\n"]
    result = pgconn.get_result()
    assert result is not None
    assert result.status == pq.ExecStatus.FATAL_ERROR


def test_lost_connection(pgconn: pq.abc.PGconn) -> None:
    begin(pgconn, "SELECT g FROM generate_series(1, 10000000) AS g")
    with socket.socket(fileno=os.dup(pgconn.socket)) as same:
        same.shutdown(socket.SHUT_RDWR)
    with pytest.raises(psycopg.OperationalError):
        read(pgconn)


def test_no_copy(pgconn: pq.abc.PGconn) -> None:
    with pytest.raises(psycopg.OperationalError, match="no COPY in progress"):
        read(pgconn)
    pgconn.finish()
    with pytest.raises(psycopg.OperationalError):
        read(pgconn)


def test_libpq_whose_functions_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug was that the program did not start."""
    monkeypatch.setitem(sys.modules, pq.PGconn.__module__, _json)
    assert copy_data._addresses() == (0, 0)


def test_preloaded_libpq(publisher_db: Database) -> None:
    """psycopg uses it, and not its own. The bug was a segmentation fault: the functions were those of the other one."""
    library = reachable_binaries(16, server_user()).parent / "lib" / "libpq.so.5"
    code = f"""
from psycopg import pq
from subscriber.walreceiver.copy_data import drain
assert pq.version() // 10000 == 16
pgconn, messages = pq.PGconn.connect({publisher_db.dsn!r}.encode()), []
pgconn.exec_(b"COPY (SELECT repeat('x', 100) FROM generate_series(1, 1000)) TO STDOUT")
while not drain(pgconn, messages, 50_000, 1)[0]:
    pass
assert messages == [b"x" * 100 + b"\\n"] * 1000
"""
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "LD_PRELOAD": str(library)}, check=True)
