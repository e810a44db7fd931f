"""PgBouncer's admin console: let clients wait while their database is switched.

PAUSE waits until no client uses a server connection: until the end of each transaction, with session pooling until each client disconnects.
Clients that begin something meanwhile wait until RESUME. A database stays paused if the process that has paused it is killed.

PAUSE closes a server connection whose login is under way, and remembers that as a failed login of the pool (``per_loop_pause`` in
src/janitor.c, ``disconnect_server`` in src/objects.c). After RESUME it refuses each query that begins before another login succeeds
(``check_fast_fail``), and tries that after ``server_login_retry``, 15 seconds. So:

- PAUSE is sent when no login is under way. One can still begin in that instant. It is seen, because SHOW POOLS and PAUSE are sent
  together: PgBouncer runs both before it does anything else.
- If PAUSE interrupted a login, RESUME is sent together with SUSPEND: PgBouncer logs in for the clients that wait, and reads no query of
  others. A second RESUME follows as soon as there is a server connection.

Source: PgBouncer manual, usage (Admin console).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from subscriber.errors import ConfigurationError, PublisherUnavailable, SubscriberError
from subscriber.protocol.quoting import quote_identifier, quote_literal
from subscriber.threads import to_its_end
from subscriber.walreceiver.session import Session

__all__ = ["PgBouncer", "Pooled", "leads_to"]

_PREFIX: Final = "pgbouncer:"
_EXAMPLE: Final = "give its console, as in --pool 'pgbouncer:host=pool1 port=6432 user=admin'"
_LOOK: Final = 0.05
_TELL_SECONDS: Final = 2.0
_HEADER: Final = 5
_FIELD: Final = 18
"""Bytes of a field of RowDescription after its name."""
_LOOK_SHORT: Final = 0.01
_LOGIN_LOOKS: Final = 5
"""While clients wait for further server connections, one login follows the other, with short gaps."""
_LOGIN_SECONDS: Final = 2.0
_SUSPEND_SECONDS: Final = 5.0
"""Meanwhile the clients of all databases wait. After ``suspend_timeout``, PgBouncer would disconnect those that it cannot suspend."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """An entry of the section [databases].

    Attributes:
        name: under which clients connect.
        host, port, database: where it leads.
        mode: of pooling.
        paused: whether clients wait.
    """

    name: str
    host: str
    port: str
    database: str
    mode: str
    paused: bool

    @property
    def address(self) -> list[str]:
        """Where it leads, as a value of JSON."""
        return [self.host, self.port, self.database]


class _Console(Session):
    """A session with the admin console, which knows no SQL."""

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self._connection = connection
        self.pgconn = connection.pgconn

    async def _configure(self) -> None:
        pass

    async def table(self, command: str) -> list[dict[str, str]]:
        """The rows of a SHOW."""
        result = await self.query(command)
        names = [(result.fname(column) or b"").decode() for column in range(result.nfields)]
        rows = (tuple(self._text(result.get_value(row, column)) or "" for column in range(result.nfields)) for row in range(result.ntuples))
        return [dict(zip(names, row, strict=True)) for row in rows]

    async def together(self, first: str, *others: str) -> list[dict[str, str]]:
        """Run commands with nothing in between, unless the session is encrypted: libpq sends none before the last is answered.

        Returns:
            The rows of the first. The last is not waited for, and the session cannot be used any more.
        """
        if self.pgconn.ssl_in_use:
            rows = await self.table(first)
            for command in others[:-1]:
                await self.execute(command)
            self.pgconn.send_query(others[-1].encode())
            await self.flush()
            return rows
        with socket.socket(fileno=os.dup(self.pgconn.socket)) as plain:
            plain.setblocking(False)
            loop, received = asyncio.get_running_loop(), b""
            await loop.sock_sendall(plain, b"".join(_message(each) for each in (first, *others)))
            while (answer := _rows(received)) is None:
                if not (more := await loop.sock_recv(plain, 1 << 16)):
                    raise PublisherUnavailable("PgBouncer closed the connection")
                received += more
        return answer


def _message(command: str) -> bytes:
    text = command.encode() + b"\0"
    return b"Q" + (len(text) + 4).to_bytes(4) + text


def _rows(received: bytes) -> list[dict[str, str]] | None:
    """The rows of a query from the messages of its answer; None: it is not complete. An error has no rows."""
    names, rows = list[str](), list[dict[str, str]]()
    while len(received) >= _HEADER:
        length = 1 + int.from_bytes(received[1:_HEADER])
        message, body = received[:1], received[_HEADER:length]
        if len(received) < length:
            return None
        if message == b"Z":
            return rows
        if message == b"T":
            fields, names = body[2:], []
            while fields:
                name, _, rest = fields.partition(b"\0")
                names.append(name.decode())
                fields = rest[_FIELD:]
        elif message == b"D":
            fields, values = body[2:], list[str]()
            while fields:
                size = max(int.from_bytes(fields[:4], signed=True), 0)
                values.append(fields[4 : 4 + size].decode())
                fields = fields[4 + size :]
            rows.append(dict(zip(names, values, strict=True)))
        received = received[length:]
    return None


class PgBouncer:
    """A PgBouncer.

    Args:
        conninfo: of its admin console.
    """

    def __init__(self, conninfo: str) -> None:
        self._conninfo = conninfo
        self._whole: set[str] = set()
        """The entries whose PAUSE has interrupted no login."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """From ``pgbouncer:CONNINFO``. The database is ``pgbouncer`` if the string names none.

        Raises:
            ConfigurationError: it is not that.
        """
        if not text.startswith(_PREFIX):
            raise ConfigurationError("unknown kind of pool", hint=_EXAMPLE)
        conninfo = text.removeprefix(_PREFIX)
        try:
            given = conninfo_to_dict(conninfo)
        except psycopg.Error:
            # its text may hold a password
            raise ConfigurationError("the connection string of --pool cannot be parsed", hint=_EXAMPLE) from None
        return cls(conninfo if given.get("dbname") else make_conninfo(conninfo, dbname="pgbouncer"))

    async def _console(self) -> _Console:
        try:
            return await _Console.connect(self._conninfo, application_name="subscriber cutover")
        except SubscriberError as error:
            raise ConfigurationError(
                f"the admin console of PgBouncer cannot be used: {error}",
                hint=f"connect as one of its admin_users: {_EXAMPLE}",
            ) from error

    async def databases(self) -> list[Pooled]:
        """All entries.

        Raises:
            SubscriberError: the console cannot be used.
        """
        async with await self._console() as console:
            mode = next((row["value"] for row in await console.table("SHOW CONFIG") if row["key"] == "pool_mode"), "session")
            return [
                Pooled(row["name"], row["host"], row["port"], row["database"], row["pool_mode"] or mode, row["paused"] == "1")
                for row in await console.table("SHOW DATABASES")
                if row["name"] != "pgbouncer"
            ]

    async def wait_timeout(self) -> float:
        """How many seconds a client may wait; 0: no limit."""
        async with await self._console() as console:
            found = next((row["value"] for row in await console.table("SHOW CONFIG") if row["key"] == "query_wait_timeout"), "0")
        return float(found)

    async def pause(self, names: Sequence[str], tell: Callable[[str], None], own: list[str]) -> None:
        """Let clients wait, and wait for the end of their transactions. What it waits for is told, also if it is cancelled.

        Args:
            names: of the entries.
            tell: is told what it waits for.
            own: gets the names of the entries that this call pauses.

        Raises:
            SubscriberError: PgBouncer rejected PAUSE, or another session resumed an entry.
        """
        async with await self._console() as console, await self._console() as watching:
            pausing = asyncio.create_task(self._pause(console, names, own))
            told = asyncio.get_running_loop().time() + _TELL_SECONDS
            try:
                while not (await asyncio.wait({pausing}, timeout=_LOOK))[0]:
                    if asyncio.get_running_loop().time() >= told and (busy := await self._busy(watching, names)):
                        tell(f"PgBouncer waits for the transactions of {busy}")
                        told += _TELL_SECONDS
                await pausing
            finally:
                pausing.cancel()
                with contextlib.suppress(asyncio.CancelledError, SubscriberError):
                    await pausing

    async def _pause(self, console: _Console, names: Sequence[str], own: list[str]) -> None:
        paused = {each.name for each in await self.databases() if each.paused}
        for name in names:
            if name not in paused:
                await self._no_login(console, name)
                own.append(name)
                command = f"PAUSE {quote_identifier(name)}"
                self._whole.discard(name)
                async with await self._console() as both:
                    if not _logging_in(await both.together("SHOW POOLS", command), name):
                        self._whole.add(name)
                # again, to wait for it
                await console.execute(command)

    @staticmethod
    async def _no_login(console: _Console, name: str) -> None:
        """Wait until PgBouncer does not log in to a server, but not for long: it may do that all the time."""
        now = asyncio.get_running_loop().time
        until, quiet = now() + _LOGIN_SECONDS, 0
        while quiet < _LOGIN_LOOKS and now() < until:
            quiet = 0 if _logging_in(await console.table("SHOW POOLS"), name) else quiet + 1
            await asyncio.sleep(_LOOK_SHORT)

    async def _busy(self, console: _Console, names: Sequence[str]) -> str:
        clients = {row["ptr"]: row for row in await console.table("SHOW CLIENTS")}
        found = []
        for server in await console.table("SHOW SERVERS"):
            if server["database"] in names and server["state"] == "active":
                client = clients.get(server["link"], {})
                program = f' "{client["application_name"]}"' if client.get("application_name") else ""
                pid = f" (server process {server['remote_pid']})" if server.get("remote_pid", "0") != "0" else ""
                found.append(f'client{program} at {client.get("addr", "?")}:{client.get("port", "?")} of role "{server["user"]}"{pid}')
        return ", ".join(sorted(found))

    async def reload(self) -> None:
        """Let it read its configuration file again."""
        async with await self._console() as console:
            await console.execute("RELOAD")

    async def resume(self, names: Sequence[str]) -> None:
        """Let clients work again. May be repeated."""
        paused = {each.name for each in await self.databases() if each.paused}
        commands = [f"RESUME {quote_identifier(name)}" for name in names if name in paused]
        async with await self._console() as console:
            if paused.intersection(names) <= self._whole:
                for command in commands:
                    await console.execute(command)
            else:
                await to_its_end(self._log_in(console, names, commands))

    async def _log_in(self, console: _Console, names: Sequence[str], commands: Sequence[str]) -> None:
        """Resume when PgBouncer remembers a failed login: suspend it until there is a connection for clients that wait."""
        config = {row["key"]: row["value"] for row in await console.table("SHOW CONFIG")}
        limit = min(_SUSPEND_SECONDS, float(config["suspend_timeout"]) / 2 or _SUSPEND_SECONDS)
        await console.execute("SET server_login_retry = '0'")
        try:
            async with await self._console() as suspending:
                await suspending.together(*commands, "SUSPEND")
                now = asyncio.get_running_loop().time
                until = now() + limit
                while now() < until and _without_server(await console.table("SHOW POOLS"), names):  # noqa: ASYNC110 (another process)
                    await asyncio.sleep(_LOOK_SHORT)
                with contextlib.suppress(SubscriberError):
                    # it cannot suspend while another database is paused, for example
                    await console.execute("RESUME")
        finally:
            await console.execute(f"SET server_login_retry = {quote_literal(config['server_login_retry'])}")


def _logging_in(pools: Sequence[dict[str, str]], name: str) -> bool:
    return any(row["database"] == name and row["sv_login"] != "0" for row in pools)


def _without_server(pools: Sequence[dict[str, str]], names: Sequence[str]) -> bool:
    """Whether clients wait, and there is no server connection for them."""
    return any(
        row["database"] in names
        and row["cl_waiting"] != "0"
        and not any(int(number) for column, number in row.items() if column.startswith("sv_") and column != "sv_login")
        for row in pools
    )


def leads_to(entry: Pooled, conninfo: str) -> bool:
    """Whether an entry has the address of a connection string. Two names of one server look different."""
    try:
        known = conninfo_to_dict(conninfo)
    except psycopg.Error:
        # a URL of another kind of database
        return False
    hosts = {str(known.get(name) or "") for name in ("host", "hostaddr")} - {""}
    return entry.database == known.get("dbname") and entry.host in hosts and entry.port == str(known.get("port") or "5432")
