"""Connect to the target with two drivers, psycopg and asyncpg.

psycopg gets the target's connection string unchanged: libpq resolves hosts, service files, password files, environment variables and
defaults. asyncpg supports less of this, so it gets the parameters that libpq has resolved for its connection. Thus both drivers connect to
the same server, also if the string names several hosts, and both use every source of parameters that libpq has.

A parameter that asyncpg does not support is ignored if it only tunes the connection, and rejected if it protects the connection.

Source: PostgreSQL manual, 32.1.2 (Parameter Key Words).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import traceback
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from subscriber.errors import CANNOT_CONNECT_NOW, REQUIRE_AUTH_HINT, ConfigurationError, TargetError, TargetUnavailable, connection_hint
from subscriber.protocol.conninfo import StoredConninfo, secured
from subscriber.protocol.session_settings import BACKEND_PID, Run, pin, settle, shared_session
from subscriber.sinks.postgres.session.postgres_errors import translated
from subscriber.sinks.postgres.session.settings import CHECK_CLIENT, no_replica
from subscriber.waits import awaiting

if TYPE_CHECKING:
    import asyncpg

__all__ = ["Target", "asyncpg_arguments"]

_NOTHING_MORE: Final[Mapping[str, str]] = {}
_PLANNED_ONCE: Final[Mapping[str, str]] = {"plan_cache_mode": "force_generic_plan"}
"""asyncpg prepares its statements. They read catalogs, and to plan one of them takes ten times as long as to run it."""
_NO_PRIVILEGE: Final = "42501"
_NO_ROWS: Final = "SELECT 0"
_APPLIES: Final = "session_replication_role"
_SET_ROLE: Final = "SET session_replication_role = replica"
"""A statement of its own: extensions of managed services let a role that is no superuser run SET, but not set_config."""
_CHECKS_CLIENTS: Final = 140000
_CONNECT_TIMEOUT: Final = 30.0
_REQUIRES_AUTHENTICATION: Final = 160000
"""The version of libpq that has require_auth."""
_REMEMBERED: Final = 1000

_IN_DSN: Final = (
    "sslmode",
    "sslcert",
    "sslkey",
    "sslrootcert",
    "sslcrl",
    "sslpassword",
    "sslnegotiation",
    "ssl_min_protocol_version",
    "ssl_max_protocol_version",
    "krbsrvname",
    "gsslib",
)
"""asyncpg reads these parameters from a DSN, with libpq's names and meanings."""

_PROTECTING: Final = {
    "channel_binding": frozenset({"", "disable", "prefer"}),
    "gssencmode": frozenset({"", "disable", "prefer"}),
    "requirepeer": frozenset({""}),
    "sslcrldir": frozenset({""}),
    "sslcertmode": frozenset({"", "allow", "disable"}),
    "sslrootcert": None,
    "scram_client_key": frozenset({""}),
    "scram_server_key": frozenset({""}),
    "oauth_issuer": frozenset({""}),
}
"""Parameters with a protection that asyncpg does not have, and their values that require no protection. None: all but ``system``."""

_PERMANENT = re.compile(
    r"authentication|no pg_hba\.conf entry|does not exist|not permitted|no password supplied|is not currently accepting|certificate"
    r"|does not support SSL|SSL error: .*\balert\b",
)
_MISTAKEN = re.compile(
    r"invalid (?:integer|port|[a-z_]+ value)|out of range for connection option|must be|could not match|Servname not supported"
)
_PASSING = re.compile(r"the database system is (?:starting up|shutting down|in recovery mode|not (?:yet )?accepting connections)")
_TOO_MANY = re.compile(r"too many (?:clients|connections)|remaining connection slots")
_OPTION_NAME = re.compile(
    r'invalid (?:connection option|URI query parameter): ?"?(?P<name>[A-Za-z_]{1,40})"?|invalid connection option "(?P<other>\w{1,40})"'
)


class _Session(psycopg.AsyncConnection[tuple[Any, ...]]):
    """A session that can be cut while another task waits for it."""

    _cancelling: asyncio.Timeout | None = None

    async def cancel_safe(self, *, timeout: float = 30.0) -> None:
        # what psycopg calls when a task that waits for an answer is cancelled: through another connection, which may get no answer either
        try:
            async with asyncio.timeout(timeout) as self._cancelling:
                await super().cancel_safe(timeout=timeout)
        except TimeoutError:
            raise TimeoutError("the server does not answer") from None  # psycopg logs it
        finally:
            self._cancelling = None

    def abort(self) -> None:
        """Who waits for the server sees the end of the connection."""
        if self._cancelling is not None and not self._cancelling.expired():
            self._cancelling.reschedule(asyncio.get_running_loop().time())
        # not closed: the event loop waits for this file descriptor
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.pgconn.socket)) as same:
            same.shutdown(socket.SHUT_RDWR)


class Target:
    """The target database. ``conninfo`` is a libpq URL or a string of keywords and values.

    Raises:
        ConfigurationError: it is neither. The error does not show the text, which may contain a password.
    """

    def __init__(self, conninfo: str) -> None:
        self.conninfo = conninfo
        self._sessions: list[_Session] = []
        self._readers: list[asyncpg.Connection[asyncpg.Record]] = []
        self._pids: deque[int] = deque(maxlen=_REMEMBERED)
        try:
            parameters = conninfo_to_dict(conninfo)
        except psycopg.ProgrammingError as error:
            raise ConfigurationError(
                _bad_conninfo(str(error)),
                hint="for example postgresql://user@host:5432/dbname, sqlite:///file.db, mariadb://user@host/dbname, spark:///directory",
            ) from None
        except UnicodeError:
            raise ConfigurationError("invalid connection string of the target: it is not UTF-8", hint="encode it as UTF-8") from None
        if "@" in str(parameters.get("host", ""))[1:]:
            # most likely it is a part of the password, and must not be shown
            raise ConfigurationError(
                "invalid connection string of the target: there is an @ in the host name", hint="write an @ in user or password as %40"
            )
        parameters = secured(parameters, stored=isinstance(conninfo, StoredConninfo), environment=os.environ)
        if pq.version() < _REQUIRES_AUTHENTICATION:
            parameters.pop("require_auth", None)
        self._secured = make_conninfo(**{name: str(value) for name, value in parameters.items() if value is not None})
        if str(parameters.get("replication", "off")).lower() not in {"off", "false", "no", "0"}:
            raise ConfigurationError(
                "invalid connection string of the target: it asks for a replication connection", hint="omit replication="
            )

    async def connect(self, application_name: str, settings: Mapping[str, str] = _NOTHING_MORE) -> psycopg.AsyncConnection[tuple[Any, ...]]:
        """Connect through libpq, with autocommit and client_encoding UTF8, and make the settings of every session.

        Args:
            application_name: used unless the connection string or PGAPPNAME sets one.
            settings: more settings.

        Raises:
            ConfigurationError: a parameter has an invalid value, or a pooler shares the session with other clients.
            TargetUnavailable: the server does not answer, or does not accept connections now.
            TargetError: the server rejects the user or the database.
        """
        connection = await self._connect(fallback_application_name=application_name)
        self._sessions = [*self.sessions(), connection]
        self._pids.append(connection.info.backend_pid)
        try:
            with _explained(settings, connection.info.user):
                await self._configure(connection, settings)
                if _APPLIES in settings:
                    await connection.execute(_SET_ROLE)
                if _APPLIES in settings and connection.info.server_version >= _CHECKS_CLIENTS:
                    with contextlib.suppress(psycopg.errors.InvalidParameterValue):
                        await connection.execute(CHECK_CLIENT)
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _configure(self, connection: psycopg.AsyncConnection[tuple[Any, ...]], settings: Mapping[str, str]) -> None:
        async def run(query: str) -> int:
            ((number,),) = await (await connection.execute(query.encode())).fetchall()
            return int(number)

        async def done(pid: int) -> bool:
            cursor = await connection.execute(pin(pid, _without_role(settings)).encode())
            cursor.nextset()
            return cursor.rowcount > 0

        @contextlib.asynccontextmanager
        async def another() -> AsyncIterator[Run]:
            pgconn = connection.pgconn
            same = {"host": pgconn.host.decode(), "hostaddr": pgconn.hostaddr.decode(), "port": pgconn.port.decode()}
            other = await self._connect(**same)
            try:
                await other.execute("BEGIN")

                async def elsewhere(query: str) -> int:
                    ((number,),) = await (await other.execute(query.encode())).fetchall()
                    return int(number)

                yield elsewhere
                await other.execute("ROLLBACK")
            finally:
                await other.close()

        if not await done(connection.info.backend_pid) and not await done(await settle(run, another, "target")):
            raise shared_session("target")

    async def _connect(self, **parameters: str) -> _Session:
        try:
            with awaiting(None):
                return await _Session.connect(
                    make_conninfo(self._secured, client_encoding="UTF8", **parameters), autocommit=True, prepare_threshold=None
                )
        except psycopg.Error as error:
            text = " ".join(str(error).split())
            if _MISTAKEN.search(text):
                raise ConfigurationError(
                    f"invalid connection string of the target: {text}", hint="correct the parameter that it names"
                ) from None
            raise _refusal(text) from None
        except UnicodeError:
            # error of the resolver: a label that is empty or longer than 63 bytes
            raise ConfigurationError(
                "invalid connection string of the target: a host name is not valid",
                hint="example: host=db1.example.com; no part between dots may be empty or longer than 63 bytes",
            ) from None
        except asyncio.CancelledError as error:
            # psycopg does not close the connection. The frames of the traceback refer to it for as long as the cancelled task is kept
            traceback.clear_frames(error.__traceback__)
            raise

    def sessions(self) -> list[_Session]:
        """The open sessions of :meth:`connect`."""
        return [session for session in self._sessions if not session.closed]

    def abort(self) -> None:
        """Cut all sessions, because the server does not answer: what waits for it ends."""
        for session in self.sessions():
            session.abort()
        for reader in self._readers:
            reader.terminate()

    def reader_pids(self) -> list[int]:
        """PIDs of the open sessions of :meth:`connect_asyncpg`."""
        return [reader.get_server_pid() for reader in self._readers if not reader.is_closed()]

    def lost(self) -> set[int]:
        """PIDs of the latest sessions that are closed on this side. In the server they may still exist."""
        return set(self._pids) - {session.info.backend_pid for session in self.sessions()} - set(self.reader_pids())

    async def connect_asyncpg(
        self,
        like: psycopg.AsyncConnection[tuple[Any, ...]],
        application_name: str,
        settings: Mapping[str, str] = _NOTHING_MORE,
    ) -> asyncpg.Connection[asyncpg.Record]:
        """Connect through asyncpg to the server of ``like``, with the same user and database. Make the settings of every session.

        Args:
            like: a session of :meth:`connect`: no pooler shares it with other clients.
            application_name: used unless the connection string or PGAPPNAME sets one.
            settings: more settings.

        Raises:
            TargetUnavailable, TargetError: as in :meth:`connect`.
            ConfigurationError: the connection string requires a protection that asyncpg does not have, or a file cannot be read.
        """
        # loaded by what needs it: that takes as long as some commands
        import asyncpg  # noqa: PLC0415

        from subscriber.sinks.postgres.session.authentication import connect_asyncpg  # noqa: PLC0415 -- as above

        pgconn = like.pgconn
        parameters = {option.keyword.decode(): option.val.decode() for option in pgconn.info if option.val is not None}
        parameters |= {
            "host": pgconn.host.decode(),
            "port": pgconn.port.decode(),
            "dbname": pgconn.db.decode(),
            "user": pgconn.user.decode(),
        }
        # the address of the existing connection: a name may have several
        parameters["hostaddr"] = parameters.get("hostaddr", "") and pgconn.hostaddr.decode()
        parameters["password"] = pgconn.password.decode()
        arguments = asyncpg_arguments(parameters, application_name)
        with translated():
            try:
                reader = await connect_asyncpg(arguments, parameters.get("require_auth", ""))
            except OSError as error:
                if isinstance(error, ConnectionError) and "SSL" in str(error):
                    # asyncpg says so whatever else happened: libpq has just connected to this server in the same way
                    raise TargetUnavailable("the target closed a connection while it was opened", hint="is it shutting down?") from error
                if error.filename is None:
                    raise
                raise ConfigurationError(
                    f'"{error.filename}" cannot be read: {error.strerror}',
                    hint="HOME must be a directory that the user who runs this can read: asyncpg looks there for TLS certificates",
                ) from error
        self._readers = [*(other for other in self._readers if not other.is_closed()), reader]
        self._pids.append(reader.get_server_pid())
        try:
            wanted = {**_PLANNED_ONCE, **_without_role(settings)}
            with _explained(settings, like.info.user):
                done = await reader.execute(pin(reader.get_server_pid(), wanted))
                if done == _NO_ROWS:
                    done = await reader.execute(pin(await reader.fetchval(BACKEND_PID), wanted))
                if done == _NO_ROWS:
                    raise shared_session("target")
                if _APPLIES in settings:
                    await reader.execute(_SET_ROLE)
                if _APPLIES in settings and like.info.server_version >= _CHECKS_CLIENTS:
                    with contextlib.suppress(asyncpg.InvalidParameterValueError):
                        await reader.execute(CHECK_CLIENT)
        except BaseException:
            reader.terminate()
            raise
        return reader


def _without_role(settings: Mapping[str, str]) -> Mapping[str, str]:
    return {name: value for name, value in settings.items() if name != _APPLIES}


@contextlib.contextmanager
def _explained(settings: Mapping[str, str], user: str) -> Iterator[None]:
    try:
        with translated():
            yield
    except TargetError as error:
        if _APPLIES in settings and error.sqlstate == _NO_PRIVILEGE:
            raise no_replica(user) from None
        raise


def _refusal(text: str) -> TargetError:
    """The error for a failed attempt to connect, from its text: libpq gives no SQLSTATE."""
    message = f"could not connect to the target: {text}"
    if _PASSING.search(text):
        return TargetUnavailable(message, sqlstate=CANNOT_CONNECT_NOW, hint="wait until it accepts connections")
    if _TOO_MANY.search(text):
        return TargetUnavailable(message, hint="end other sessions, or increase max_connections")
    if "authentication method requirement" in text:
        return TargetError(message, hint=REQUIRE_AUTH_HINT)
    if _PERMANENT.search(text):
        hint = "check user, password and database in the target's connection string, and the server's pg_hba.conf"
        return TargetError(f"could not connect to the target: {text}", hint=hint)
    return TargetUnavailable(message, hint=connection_hint(text, "check that the target runs, and host and port"))


def asyncpg_arguments(parameters: Mapping[str, str], application_name: str) -> dict[str, Any]:
    """The arguments of ``asyncpg.connect``, from the parameters that libpq resolved for a connection to one host.

    Raises:
        ConfigurationError: a parameter requires a protection that asyncpg does not have.
    """
    host = parameters["host"]
    if host.startswith("@"):
        raise ConfigurationError(f'asyncpg cannot reach the abstract socket "{host}"', hint="use a directory or an IP address")
    for name, harmless in _PROTECTING.items():
        value = parameters.get(name, "")
        if (harmless is None and value == "system") or (harmless is not None and value not in harmless):
            raise ConfigurationError(
                f"asyncpg does not know the connection parameter {name}={value if harmless is None else '...'}",
                hint="omit it if you trust the target without it",
            )
    hostaddr = parameters.get("hostaddr", "")
    if hostaddr and parameters.get("sslmode") != "verify-full":
        host = hostaddr
    settings = {"application_name": parameters.get("application_name") or application_name, "client_encoding": "UTF8"}
    if parameters.get("options"):
        settings["options"] = parameters["options"]
    # in libpq, an empty value means "not given"
    dsn_parameters = {name: parameters[name] for name in _IN_DSN if parameters.get(name)}
    timeout = float(parameters.get("connect_timeout") or 0)
    return {
        "dsn": f"postgresql://?{urlencode(dsn_parameters)}" if dsn_parameters else None,
        "host": host,
        "port": int(parameters["port"]),
        "database": parameters["dbname"],
        "user": parameters["user"],
        # "" and not None: libpq has already read the password file
        "password": parameters.get("password", ""),
        "timeout": timeout if timeout > 0 else _CONNECT_TIMEOUT,
        "server_settings": settings,
    }


def _bad_conninfo(message: str) -> str:
    found = _OPTION_NAME.search(message)
    if found:
        return f'invalid connection string of the target: unknown parameter "{found["name"] or found["other"]}"'
    return "the target is not a connection string or URL of PostgreSQL"
