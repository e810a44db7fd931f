"""A database for one test, and what a test does with it from the outside (synchronous psycopg, autocommit)."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from subscriber.protocol.lsn import Lsn
from subscriber.testing.load.mixed_load import Kind, MixedLoad

WAIT_SECONDS = 30.0


@dataclass(frozen=True)
class ServerAddress:
    """A server, by the conninfo of a superuser."""

    conninfo: str
    version: int

    def dsn(self, dbname: str = "postgres", **params: str) -> str:
        return make_conninfo(self.conninfo, dbname=dbname, **params)


class Database:
    """One database of a server."""

    def __init__(self, server: ServerAddress, name: str) -> None:
        self.server = server
        self.name = name
        self.version = server.version
        # SQL is UTF-8 in any encoding of the database
        self._connection = psycopg.connect(self.conninfo(client_encoding="UTF8"), autocommit=True)

    @property
    def dsn(self) -> str:
        """As a URL: psycopg and asyncpg both read it."""
        parts = {key: str(value) for key, value in conninfo_to_dict(self.server.conninfo).items() if key != "dbname"}
        user, password = quote(parts.pop("user"), safe=""), quote(parts.pop("password", ""), safe="")
        address = f"{parts.pop('host', 'localhost')}:{parts.pop('port', '5432')}"
        return f"postgresql://{user}:{password}@{address}/{self.name}" + (f"?{urlencode(parts)}" if parts else "")

    def conninfo(self, **params: str) -> str:
        """As keywords and values, with others added or replaced."""
        return self.server.dsn(self.name, **params)

    def connect(self, **params: str) -> psycopg.Connection[tuple[Any, ...]]:
        """Another session, autocommit; the caller closes it."""
        return psycopg.connect(self.conninfo(**params), autocommit=True)

    def execute(self, query: str) -> None:
        """Run SQL, several statements included (then in one transaction, as psql -c does)."""
        self._connection.execute(query.encode())

    def fetch(self, query: str) -> list[tuple[Any, ...]]:
        """All rows of a query."""
        return self._connection.execute(query.encode()).fetchall()

    def stream(self, query: str) -> Iterator[tuple[Any, ...]]:
        """All rows of a query, one after another: nothing else may be asked before the last one."""
        with self._connection.cursor() as cursor:
            yield from cursor.stream(query.encode())

    def value(self, query: str) -> Any:
        """The first column of the first row."""
        return self.fetch(query)[0][0]

    def wait(self, query: str, expected: Any, timeout: float = WAIT_SECONDS) -> None:
        """Poll until ``query`` gives ``expected``: rows, or one value. Fails with what it gave last."""
        began = time.monotonic()
        while True:
            rows = self.fetch(query)
            found: Any = rows if isinstance(expected, list) else (rows[0][0] if rows else None)
            if found == expected:
                return
            waited = time.monotonic() - began
            if waited > timeout:
                raise AssertionError(f"after {timeout:g} s {query!r} gives {found!r}, not {expected!r}")
            # questions cost both processes a millisecond: what takes long is asked for less often
            time.sleep(min(max(0.02, waited / 10), 0.05))

    def current_lsn(self) -> Lsn:
        """Up to where WAL is flushed: past every commit that has returned, and no further than a walsender decodes at once."""
        return Lsn.parse(self.value("SELECT pg_current_wal_flush_lsn()::text"))

    def row_filter(self, condition: str) -> str:
        """``WHERE (condition)`` for CREATE PUBLICATION; nothing where the version has none, for tests of what is true without it, too."""
        return f"WHERE ({condition})" if self.version >= 15 else ""

    def reconnect(self) -> None:
        """A new session, after the server was restarted."""
        self._connection.close()
        self._connection = psycopg.connect(self.conninfo(client_encoding="UTF8"), autocommit=True)

    def close(self) -> None:
        self._connection.close()


def given_publisher_version() -> int | None:
    """The version of the publisher from outside, if there is one."""
    if given := os.environ.get("SUBSCRIBER_TEST_DSN"):
        with psycopg.connect(given) as connection:
            return connection.info.server_version // 10000
    return None


_sessions: dict[str, psycopg.Connection[Any]] = {}
"""One session with each server, in database postgres. A session of its own for each database would cost as much as its files."""


@atexit.register
def _close_sessions() -> None:
    for session in _sessions.values():
        session.close()


def _administrator(server: ServerAddress) -> psycopg.Connection[Any]:
    """The session with this server, or a new one if the server was restarted."""
    session = _sessions.get(server.conninfo)
    with contextlib.suppress(psycopg.OperationalError):
        if session is not None:
            session.execute("SELECT")
            return session
    if session is not None:
        session.close()
    else:
        # leaves pg_internal.init there, which the first session in each copy would make otherwise
        psycopg.connect(server.dsn("template1")).close()
    _sessions[server.conninfo] = session = psycopg.connect(server.dsn(), autocommit=True)
    return session


def drop_database(server: ServerAddress, name: str) -> None:
    """Drop a database with everything that holds it: sessions, prepared transactions, subscriptions, slots, replication origins."""
    outside = _administrator(server)
    (held,) = outside.execute(
        "SELECT EXISTS (SELECT FROM pg_prepared_xacts WHERE database = %(name)s) OR EXISTS (SELECT FROM pg_subscription AS s"
        " JOIN pg_database AS d ON d.oid = s.subdbid WHERE d.datname = %(name)s) OR EXISTS (SELECT FROM pg_replication_origin)",
        {"name": name},
    ).fetchone() or (True,)
    ours = _release(server, name) if held else []
    deadline = time.monotonic() + WAIT_SECONDS
    while outside.execute("SELECT FROM pg_replication_slots WHERE database = %s", (name,)).fetchall():
        if time.monotonic() > deadline:
            raise AssertionError(f"the slots of {name} cannot be dropped")
        outside.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,))
        with contextlib.suppress(psycopg.errors.ObjectInUse, psycopg.errors.UndefinedObject):
            outside.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = %s", (name,))
            continue
        time.sleep(0.01)
    if ours:
        outside.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,))
    _drop_origins(outside, ours, deadline)
    outside.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def _release(server: ServerAddress, name: str) -> list[int]:
    """End what can only be ended from inside. Return the oids of our subscriptions."""
    with psycopg.connect(server.dsn(name), autocommit=True) as inside:
        for (gid,) in inside.execute("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()").fetchall():
            inside.execute(sql.SQL("ROLLBACK PREPARED {}").format(gid))
        subscriptions = inside.execute(
            "SELECT subname FROM pg_subscription WHERE subdbid = (SELECT oid FROM pg_database WHERE datname = current_database())"
        ).fetchall()
        for (subscription,) in subscriptions:
            inside.execute(sql.SQL("ALTER SUBSCRIPTION {} DISABLE").format(sql.Identifier(subscription)))
            inside.execute(sql.SQL("ALTER SUBSCRIPTION {} SET (slot_name = NONE)").format(sql.Identifier(subscription)))
            inside.execute(sql.SQL("DROP SUBSCRIPTION {}").format(sql.Identifier(subscription)))
        with contextlib.suppress(psycopg.errors.UndefinedTable):
            return [oid for (oid,) in inside.execute("SELECT oid::int8 FROM subscriber.pg_subscription").fetchall()]
    return []


def _drop_origins(connection: psycopg.Connection[Any], oids: list[int], deadline: float) -> None:
    """Replication origins belong to the cluster, and each occupies one of few places."""
    ours = "|".join(map(str, oids)) or "none"
    left = "SELECT roname FROM pg_replication_origin WHERE roname ~ %s"
    while names := connection.execute(left, (f"^subscriber_({ours})(_|$)",)).fetchall():
        for (name,) in names:
            # in use until the terminated session has ended
            with contextlib.suppress(psycopg.errors.ObjectInUse, psycopg.errors.UndefinedObject):
                connection.execute("SELECT pg_replication_origin_drop(%s)", (name,))
        if time.monotonic() > deadline:
            raise AssertionError(f"the replication origins {names} cannot be dropped")
        time.sleep(0.02)


def let_slots_be_created(publisher: Database, killed: MixedLoad | None = None) -> None:
    """Until :func:`let_small_transactions_stream`; to be called before the load runs.

    A walsender of PostgreSQL 18.4 that creates a logical slot dies, and the server with it, of a transaction that is larger than
    logical_decoding_work_mem, has subtransactions and was rolled back: the stray STREAM ABORT (SEMANTICS, fact 2) finds pgoutput without
    its relation cache.

    Args:
        publisher: its database.
        killed: the load of a test that kills those who make slots, or read them. Slots that go through this while tables are truncated
            are sometimes such that their publisher cannot decode what follows: "could not map filenumber", seen rarely, with 16.14 and
            18.4. So no table is truncated at that time.
    """
    if killed is not None:
        killed.held.add(Kind.TRUNCATE)
    if publisher.version >= 18:
        publisher.execute(f"ALTER DATABASE {publisher.name} SET logical_decoding_work_mem = '64MB'")


def let_small_transactions_stream(publisher: Database, killed: MixedLoad | None = None) -> None:
    """With the server's own logical_decoding_work_mem, 64 kB; and tables are truncated again."""
    if killed is not None:
        killed.held.discard(Kind.TRUNCATE)
    publisher.execute(f"ALTER DATABASE {publisher.name} RESET logical_decoding_work_mem")


@contextlib.contextmanager
def fresh_database(server: ServerAddress, prefix: str, options: str = "") -> Iterator[Database]:
    """An empty database with a random name, made with these options of CREATE DATABASE."""
    name = f"{prefix}_{secrets.token_hex(5)}"
    copied = "STRATEGY file_copy" if server.version >= 15 else ""  # as before 15; through WAL it takes longer
    _administrator(server).execute(f"CREATE DATABASE {name} {copied} {options}".encode())
    database = Database(server, name)
    try:
        yield database
    finally:
        database.close()
        drop_database(server, name)
