"""One libpq connection to the publisher. It never blocks the event loop.

psycopg connects: it parses any conninfo, tries each host, and resolves names off the loop. After that this module talks to
``psycopg.pq`` itself. It uses the simple query protocol (a walsender accepts no other), COPY OUT and COPY BOTH. Values of rows are
parameters of the extended query protocol, so that no statement holds them.

Settings are made after connecting, unless a pooler shares the session: see :mod:`subscriber.protocol.session_settings`.

If a call is cancelled or fails while the server is busy, the connection can only be closed (:meth:`Session.close`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import traceback
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, Self

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from subscriber.errors import ConfigurationError, PublisherError
from subscriber.protocol.capabilities import Capabilities, capabilities
from subscriber.protocol.conninfo import StoredConninfo, secured
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.session_name import session_name
from subscriber.protocol.session_settings import BACKEND_PID, READING, Run, pin, settle, shared_session
from subscriber.waits import awaiting
from subscriber.walreceiver.publisher_errors import connect_error, connection_lost, conninfo_error, result_error

__all__ = ["Row", "Session", "check_conninfo", "with_keywords", "with_password"]

Row = tuple[str | None, ...]

_OF_ONE_SESSION: Final = frozenset({"replication", "client_encoding", "service", "target_session_attrs", "load_balance_hosts"})
_CANCEL_SECONDS: Final = 2.0
_REQUIRES_AUTHENTICATION: Final = 160000
"""The version of libpq that has require_auth."""
# a slot that is created waits for WAL, on a standby for as long as the primary writes nothing
_WORKING: Final = """
SELECT FROM pg_catalog.pg_stat_activity
WHERE pid = {} AND (wait_event_type IS DISTINCT FROM 'Client' OR pg_catalog.lower(wait_event) = 'walsenderwaitforwal')
"""
_COPY_STATES: Final = frozenset({pq.ExecStatus.COPY_OUT, pq.ExecStatus.COPY_BOTH})
_GOOD_STATES: Final = frozenset({pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK, pq.ExecStatus.EMPTY_QUERY})


class Session:
    """A connection for queries. One call at a time.

    Attributes:
        capabilities: the abilities of the publisher's version.
        pooled: whether it goes through a connection pooler.
    """

    reads_rows = False
    """Whether queries read rows of tables, so that the text of an error may hold values."""

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self._connection = connection
        self.pgconn = connection.pgconn
        self.capabilities: Capabilities = capabilities(self.pgconn.server_version)
        self.pooled = False

    @classmethod
    async def connect(cls, conninfo: str, *, application_name: str, replication: bool = False) -> Self:
        """Connect.

        Args:
            conninfo: any connection string that libpq accepts.
            application_name: used unless ``conninfo`` or PGAPPNAME sets one.
            replication: connect as a walsender of the database.

        Raises:
            ConfigurationError: the connection string cannot be parsed, or a pooler shares the session with other clients.
            PublisherUnavailable: a retry may succeed.
            PublisherError: unknown database or user, wrong password, missing privilege, or a server that is too old.
        """
        params = _parameters(conninfo, application_name, replication=replication)
        connection = await _connected(**params)
        try:
            session = cls(connection)
            await session._configure()
        except BaseException:
            await connection.close()
            raise
        return session

    async def _configure(self) -> None:
        if not await self.execute(pin(self.pgconn.backend_pid, READING)):
            self.pooled = True
            pid = await settle(self._number, self._another, "publisher")
            if not await self.execute(pin(pid, READING)):
                raise shared_session("publisher")

    async def _number(self, query: str) -> int:
        ((number,),) = await self.execute(query)
        return int(number or 0)

    @contextlib.asynccontextmanager
    async def _another(self) -> AsyncIterator[Run]:
        other = Session(await _connected(conninfo=self._same_server()))
        try:
            await other.execute("BEGIN")
            yield other._number
            await other.execute("ROLLBACK")
        finally:
            await other.close()

    async def execute(self, query: str, *values: str) -> list[Row]:
        """Run SQL or a replication command by the simple query protocol. Return the last result's rows as text.

        Args:
            query: several statements, or with ``values`` one.
            values: its parameters $1, $2 and so on: then the extended query protocol is used.

        Raises:
            PublisherError: or a subclass, by SQLSTATE.
        """
        result = await self.query(query, values)
        return [tuple(self._text(result.get_value(row, column)) for column in range(result.nfields)) for row in range(result.ntuples)]

    @staticmethod
    def _text(value: bytes | None) -> str | None:
        return None if value is None else value.decode(errors="surrogateescape")

    async def query(self, query: str, values: Sequence[str] = ()) -> pq.abc.PGresult:
        """Run a query as :meth:`execute`, but return libpq's result. The result of a COPY is returned as soon as it has started."""
        try:
            if values:
                self.pgconn.send_query_params(query.encode(), [value.encode(errors="surrogateescape") for value in values])
            else:
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
            raise PublisherError("the publisher returned no result")
        if last.status not in _GOOD_STATES | _COPY_STATES:
            raise result_error(last, rows=self.reads_rows)
        return last

    async def result(self) -> pq.abc.PGresult | None:
        """Wait for the next result of the current query; None after the last."""
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
            if await session.execute(BACKEND_PID) != [(str(session.pgconn.backend_pid),)]:
                # a pooler gives PIDs of its own: nothing is known of this session
                return True
            return bool(await session.execute(_WORKING.format(self.pgconn.backend_pid)))
        finally:
            await session.close()

    async def flush(self) -> None:
        """Send libpq's output buffer."""
        while self.pgconn.flush():
            await self.writable()

    async def readable(self) -> None:
        """Wait until the socket is readable or closed."""
        loop = asyncio.get_running_loop()
        descriptor = self.pgconn.socket
        ready = asyncio.Event()
        loop.add_reader(descriptor, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(descriptor)

    async def writable(self) -> None:
        """Wait until the socket is writable."""
        loop = asyncio.get_running_loop()
        descriptor = self.pgconn.socket
        ready = asyncio.Event()
        loop.add_writer(descriptor, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_writer(descriptor)

    async def _cancel(self) -> None:
        # otherwise the server would continue, and for example create a slot a minute later that is not used
        with contextlib.suppress(psycopg.Error, TimeoutError):
            async with asyncio.timeout(_CANCEL_SECONDS):
                await self._connection.cancel_safe(timeout=_CANCEL_SECONDS)

    def address(self, conninfo: str, options: str = "") -> str:
        """Return the connection string, without any password, for another session with this very server.

        Args:
            conninfo: of this session.
            options: for the server, after those that the string or PGOPTIONS has.
        """
        params: dict[str, Any] = conninfo_to_dict(conninfo)
        if params.get("hostaddr"):
            # the host's name need not be known to the resolver
            params["hostaddr"] = self.pgconn.hostaddr.decode()
        for name in ("password", "sslpassword", "target_session_attrs", "load_balance_hosts"):
            params.pop(name, None)
        params |= {"host": self.pgconn.host.decode(), "port": self.pgconn.port.decode()}
        params |= {"dbname": self.pgconn.db.decode(), "user": self.pgconn.user.decode()}
        if options:
            params["options"] = f"{self.pgconn.options.decode()} {options}".strip()
        return make_conninfo(**params)

    @property
    def required_authentication(self) -> str:
        """The parameter require_auth of this session; empty if this libpq does not have it."""
        found = (option.val for option in self.pgconn.info if option.keyword == b"require_auth")
        return (next(found, None) or b"").decode()

    async def sibling(self, role: str) -> Session:
        """Open another session for queries with this very server.

        Args:
            role: its purpose, which becomes part of its application_name.

        Raises:
            PublisherUnavailable, PublisherError: as :meth:`connect`.
        """
        params = conninfo_to_dict(self._same_server())
        name = str(params.pop("application_name", None) or params.pop("fallback_application_name", ""))
        return await Session.connect(make_conninfo("", **params, application_name=session_name(name, role)), application_name=name)

    def _same_server(self) -> str:
        """The connection string, with any password, for another session with this very server."""
        found = {option.keyword.decode(): option.val.decode() for option in self.pgconn.info if option.val is not None}
        params = {name: value for name, value in found.items() if name not in _OF_ONE_SESSION}
        params |= {"host": self.pgconn.host.decode(), "hostaddr": self.pgconn.hostaddr.decode(), "port": self.pgconn.port.decode()}
        return make_conninfo(**params)

    async def is_standby(self) -> bool:
        """Whether the server is in recovery."""
        return await self.execute("SELECT pg_catalog.pg_is_in_recovery()") == [("t",)]

    async def current_wal_lsn(self) -> Lsn:
        """The end of the server's WAL: the flushed position (a walsender sends no more), or on a standby the replayed one."""
        ((position,),) = await self.execute(
            "SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()"
            " ELSE pg_catalog.pg_current_wal_flush_lsn() END"
        )
        return Lsn.parse(position or "0/0")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Disconnect, in any state. Idempotent."""
        await self._connection.close()


async def _connected(**params: Any) -> psycopg.AsyncConnection[Any]:
    try:
        with awaiting(None):
            return await psycopg.AsyncConnection.connect(autocommit=True, **params)
    except psycopg.Error as error:
        raise connect_error(error) from error
    except UnicodeError:
        # from the resolver, for a host from PGHOST or a service file
        raise _no_host_name() from None
    except asyncio.CancelledError as error:
        # psycopg does not close the connection. The frames of the traceback refer to it for as long as the cancelled task is kept
        traceback.clear_frames(error.__traceback__)
        raise


def with_password(conninfo: str, password: str) -> str:
    """The connection string with a password, unless it has one, or takes everything from a service.

    Raises:
        ConfigurationError: it cannot be parsed.
    """
    params = _parsed(conninfo)
    return conninfo if params.get("password") or params.get("service") else make_conninfo(conninfo, password=password)


def with_keywords(conninfo: str, **keywords: str) -> str:
    """The connection string with these keywords in place of those that it has.

    Raises:
        ConfigurationError: it cannot be parsed.
    """
    _parsed(conninfo)
    return make_conninfo(conninfo, **keywords)


def check_conninfo(conninfo: str) -> None:
    """Check that libpq can parse the connection string. Does not connect.

    Raises:
        ConfigurationError: it cannot.
    """
    _parameters(conninfo, "", replication=True)


def _parsed(conninfo: str) -> dict[str, Any]:
    try:
        return conninfo_to_dict(conninfo)
    except psycopg.Error as error:
        raise conninfo_error(error, conninfo) from None  # its text may hold a password
    except UnicodeError:
        raise ConfigurationError("invalid connection string: it is not UTF-8", hint="encode it as UTF-8") from None


def _parameters(conninfo: str, application_name: str, *, replication: bool) -> dict[str, Any]:
    params = _parsed(conninfo)
    if "@" in str(params.get("host", "")):
        raise ConfigurationError("invalid connection string: there is an @ in the host name", hint="write an @ in user or password as %40")
    try:
        for host in str(params.get("host", "")).split(","):
            host.encode("idna" if not host.startswith("/") else "utf-8")
    except UnicodeError:
        raise _no_host_name() from None
    params = secured(params, stored=isinstance(conninfo, StoredConninfo), environment=os.environ)
    if pq.version() < _REQUIRES_AUTHENTICATION:
        params.pop("require_auth", None)
    params["client_encoding"] = "UTF8"
    params.setdefault("fallback_application_name", application_name)
    if replication:
        params["replication"] = "database"
    return params


def _no_host_name() -> ConfigurationError:
    return ConfigurationError(
        "invalid connection string: a host name is not valid",
        hint="example: host=db1.example.com; no part between dots may be empty or longer than 63 bytes",
    )
