"""A MariaDB database for one test, and what a test does with it from the outside (PyMySQL, autocommit)."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pymysql

from subscriber.testing.mariadb import EmbeddedMariaDB
from tests.support.database import WAIT_SECONDS


class MariaDatabase:
    """One database of a server. Its session is opened again after the server was restarted."""

    def __init__(self, server: EmbeddedMariaDB, name: str) -> None:
        self.server = server
        self.name = name
        self._connection: pymysql.Connection[pymysql.cursors.Cursor] | None = None

    @property
    def url(self) -> str:
        return self.server.url(self.name)

    def connect(self) -> pymysql.Connection[pymysql.cursors.Cursor]:
        """Another session, autocommit; the caller closes it."""
        return pymysql.connect(
            host=self.server.host,
            port=self.server.port,
            user=self.server.user,
            password=self.server.password,
            database=self.name,
            charset="utf8mb4",
            autocommit=True,
        )

    def _session(self) -> pymysql.Connection[pymysql.cursors.Cursor]:
        if self._connection is not None:
            try:
                self._connection.ping(reconnect=False)
            except pymysql.Error:
                # lost; what there is of it was closed by that
                self._connection = None
        if self._connection is None:
            self._connection = self.connect()
        return self._connection

    def execute(self, query: str, values: Sequence[object] | None = None) -> None:
        """Run one statement."""
        self.fetch(query, values)

    def fetch(self, query: str, values: Sequence[object] | None = None) -> list[tuple[Any, ...]]:
        """All rows of a query."""
        with self._session().cursor() as cursor:
            cursor.execute(query, values)
            return list(cursor.fetchall())

    def value(self, query: str) -> Any:
        """The first column of the first row."""
        return self.fetch(query)[0][0]

    def wait(self, query: str, expected: Any, timeout: float = WAIT_SECONDS) -> None:
        """Poll until ``query`` gives ``expected``: rows, or one value. Fails with what it gave last."""
        deadline = time.monotonic() + timeout
        while True:
            rows = self.fetch(query)
            found: Any = rows if isinstance(expected, list) else (rows[0][0] if rows else None)
            if found == expected:
                return
            if time.monotonic() > deadline:
                raise AssertionError(f"after {timeout:g} s {query!r} gives {found!r}, not {expected!r}")
            time.sleep(0.02)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


@contextlib.contextmanager
def fresh_mariadb_database(server: EmbeddedMariaDB) -> Iterator[MariaDatabase]:
    """An empty database with a random name."""
    name = f"tgt_{secrets.token_hex(5)}"
    server.create_database(name)
    database = MariaDatabase(server, name)
    try:
        yield database
    finally:
        for (session,) in database.fetch("SELECT id FROM information_schema.processlist WHERE db = %s AND id <> connection_id()", [name]):
            with contextlib.suppress(pymysql.err.OperationalError):  # it has ended
                database.execute(f"KILL {session}")
        database.execute(f"DROP DATABASE `{name}`")
        database.close()
