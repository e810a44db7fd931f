"""One libpq connection to the publisher, driven from asyncio without ever blocking the loop.

psycopg connects (it knows every conninfo, tries each host, resolves names off the loop); after that the conversation is ours, on
``psycopg.pq``: the simple query protocol, which is all that a walsender speaks, COPY OUT and COPY BOTH.

Settings are made by SQL after the connection is there, not by ``options`` in the startup packet as native does: so the caller's own
``options`` (in the string, in PGOPTIONS or in a service file) stay untouched. They are those that make values unambiguous
(libpqwalreceiver.c), an empty search_path, and no timeout that could cut a long copy or an idle snapshot (as pg_dump does). JIT is off:
to compile a query about the catalogs of thousands of tables takes longer than the query.

A call that is cancelled or fails while the server is busy leaves the connection unusable except for :meth:`Session.close`.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Final, Self

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from subscriber.errors import ConfigurationError, PublisherError
from subscriber.protocol.capabilities import Capabilities, capabilities
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.session_name import session_name
from subscriber.waits import awaiting
from subscriber.walreceiver.failures import connect_error, connection_lost, conninfo_error, result_error

__all__ = ["SETUP", "Row", "Session", "check_conninfo"]

Row = tuple[str | None, ...]

SETUP: Final = (
    "SELECT pg_catalog.set_config('search_path', '', false)",
    """SELECT pg_catalog.set_config(s.name, v.setting, false)
  FROM (VALUES ('DateStyle', 'ISO'), ('IntervalStyle', 'postgres'), ('extra_float_digits', '3'), ('TimeZone', 'UTC'),
               ('bytea_output', 'hex'), ('statement_timeout', '0'), ('lock_timeout', '0'), ('idle_in_transaction_session_timeout', '0'),
               ('idle_session_timeout', '0'), ('transaction_timeout', '0'), ('jit', 'off')) AS v (name, setting)
  JOIN pg_catalog.pg_settings AS s ON s.name = v.name""",
)
"""The settings of every session with the publisher."""
_OF_ONE_SESSION: Final = frozenset({"replication", "client_encoding", "service", "target_session_attrs", "load_balance_hosts"})
_CANCEL_SECONDS: Final = 2.0
_WORKING: Final = "SELECT FROM pg_catalog.pg_stat_activity WHERE pid = {} AND wait_event_type IS DISTINCT FROM 'Client'"
_COPY_STATES: Final = frozenset({pq.ExecStatus.COPY_OUT, pq.ExecStatus.COPY_BOTH})
_GOOD_STATES: Final = frozenset({pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK, pq.ExecStatus.EMPTY_QUERY})


class Session:
    """A connection for queries. One caller at a time.

    Attributes:
        capabilities: what the publisher can do, by its version.
    """

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self._connection = connection
        self.pgconn = connection.pgconn
        self.capabilities: Capabilities = capabilities(self.pgconn.server_version)

    @classmethod
    async def connect(cls, conninfo: str, *, application_name: str, replication: bool = False) -> Self:
        """Connect.

        Args:
            conninfo: anything libpq takes.
            application_name: unless ``conninfo`` or PGAPPNAME names one.
            replication: as a walsender of the database.

        Raises:
            ConfigurationError: the connection string cannot be read.
            PublisherUnavailable: waiting may mend it.
            PublisherError: no such database or user, wrong password, no privilege, too old a server.
        """
        params = _parameters(conninfo, application_name, replication=replication)
        try:
            with awaiting(None):
                connection = await psycopg.AsyncConnection.connect(autocommit=True, **params)
        except psycopg.Error as error:
            raise connect_error(error) from error
        except UnicodeError:
            # of the resolver, about a host that came from elsewhere (PGHOST, a service file)
            raise _no_host_name() from None
        try:
            session = cls(connection)
            await session.execute(";".join(SETUP))
        except BaseException:
            await connection.close()
            raise
        return session

    async def execute(self, query: str) -> list[Row]:
        """Run SQL or a replication command by the simple query protocol and return the last result's rows as text.

        Raises:
            PublisherError: or one of its kin, by SQLSTATE.
        """
        result = await self.query(query)
        return [tuple(self._text(result.get_value(row, column)) for column in range(result.nfields)) for row in range(result.ntuples)]

    @staticmethod
    def _text(value: bytes | None) -> str | None:
        return None if value is None else value.decode(errors="surrogateescape")

    async def query(self, query: str) -> pq.abc.PGresult:
        """As :meth:`execute`, but give libpq's result; that of a COPY comes as soon as it has begun."""
        try:
            self.pgconn.send_query(query.encode())
            await self.flush()
            last: pq.abc.PGresult | None = None
            while (result := await self.result()) is not None:
                if last is None or last.status in _GOOD_STATES:
                    last = result
                if result.status in _COPY_STATES:
                    break
        except psycopg.Error as error:
            raise connection_lost(error) from error
        except asyncio.CancelledError:
            await self._cancel()
            raise
        if last is None:
            raise PublisherError("the publisher gave no result")
        if last.status not in _GOOD_STATES | _COPY_STATES:
            raise result_error(last)
        return last

    async def result(self) -> pq.abc.PGresult | None:
        """Wait for the next result of the query under way; None after the last."""
        while self.pgconn.is_busy():
            await self.more()
        return self.pgconn.get_result()

    async def more(self) -> None:
        """Wait for more of the answer to the query under way."""
        with awaiting(self):
            await self.readable()
        self.pgconn.consume_input()

    async def is_working(self) -> bool:
        """Whether the server is at work on the query under way, or waits for something else than this client.

        Raises:
            PublisherUnavailable, PublisherError: as :meth:`connect`.
        """
        session = await self.sibling("watch")
        try:
            return bool(await session.execute(_WORKING.format(self.pgconn.backend_pid)))
        finally:
            await session.close()

    async def flush(self) -> None:
        """Send what libpq holds."""
        while self.pgconn.flush():
            await self.writable()

    async def readable(self) -> None:
        """Wait until the socket has something to read, or ended."""
        loop = asyncio.get_running_loop()
        descriptor = self.pgconn.socket
        ready = asyncio.Event()
        loop.add_reader(descriptor, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(descriptor)

    async def writable(self) -> None:
        """Wait until the socket takes more."""
        loop = asyncio.get_running_loop()
        descriptor = self.pgconn.socket
        ready = asyncio.Event()
        loop.add_writer(descriptor, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_writer(descriptor)

    async def _cancel(self) -> None:
        # without it the server would go on: a slot would still be created, a minute later, for nobody
        with contextlib.suppress(psycopg.Error, TimeoutError):
            async with asyncio.timeout(_CANCEL_SECONDS):
                await self._connection.cancel_safe(timeout=_CANCEL_SECONDS)

    def address(self, conninfo: str) -> str:
        """The connection string for another session with this very server, without any password.

        Args:
            conninfo: of this session.
        """
        params: dict[str, Any] = conninfo_to_dict(conninfo)
        for name in ("password", "sslpassword", "hostaddr", "target_session_attrs", "load_balance_hosts"):
            params.pop(name, None)
        params |= {"host": self.pgconn.host.decode(), "port": self.pgconn.port.decode()}
        params |= {"dbname": self.pgconn.db.decode(), "user": self.pgconn.user.decode()}
        return make_conninfo(**params)

    async def sibling(self, role: str) -> Session:
        """Another session, for queries, with this very server.

        Args:
            role: what it is for; part of its application_name.

        Raises:
            PublisherUnavailable, PublisherError: as :meth:`connect`.
        """
        found = {option.keyword.decode(): option.val.decode() for option in self.pgconn.info if option.val is not None}
        params = {name: value for name, value in found.items() if name not in _OF_ONE_SESSION}
        params |= {"host": self.pgconn.host.decode(), "hostaddr": self.pgconn.hostaddr.decode(), "port": self.pgconn.port.decode()}
        name = found.get("application_name") or found.get("fallback_application_name", "")
        params["application_name"] = session_name(name, role)
        return await Session.connect(make_conninfo(**params), application_name=name)

    async def current_wal_lsn(self) -> Lsn:
        """Where its WAL ends now: flushed (no walsender sends more), or replayed on a standby."""
        ((position,),) = await self.execute(
            "SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()"
            " ELSE pg_catalog.pg_current_wal_flush_lsn() END"
        )
        return Lsn.parse(position or "0/0")

    async def close(self) -> None:
        """Disconnect, whatever state it is in. Idempotent."""
        await self._connection.close()


def check_conninfo(conninfo: str) -> None:
    """See whether libpq can read it. Nothing is connected.

    Raises:
        ConfigurationError: it cannot.
    """
    _parameters(conninfo, "", replication=True)


def _parameters(conninfo: str, application_name: str, *, replication: bool) -> dict[str, Any]:
    try:
        params: dict[str, Any] = conninfo_to_dict(conninfo)
    except psycopg.Error as error:
        raise conninfo_error(error, conninfo) from None  # its text may hold a password
    except UnicodeError:
        raise ConfigurationError("invalid connection string: it holds bytes that are not UTF-8", hint="write them as UTF-8") from None
    if "@" in str(params.get("host", "")):
        raise ConfigurationError("invalid connection string: there is an @ in the host name", hint="write an @ in user or password as %40")
    try:
        for host in str(params.get("host", "")).split(","):
            host.encode("idna" if not host.startswith("/") else "utf-8")
    except UnicodeError:
        raise _no_host_name() from None
    params["client_encoding"] = "UTF8"
    params.setdefault("fallback_application_name", application_name)
    if replication:
        params["replication"] = "database"
    return params


def _no_host_name() -> ConfigurationError:
    return ConfigurationError(
        "invalid connection string: a host name that cannot be one",
        hint="as in host=db1.example.com: no part between dots is empty or longer than 63 bytes",
    )
