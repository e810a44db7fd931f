"""PgBouncer's admin console: let clients wait while their database is switched.

PAUSE waits until no client uses a server connection: until the end of each transaction, with session pooling until each client disconnects.
Clients that begin something meanwhile wait until RESUME. A database stays paused if the process that has paused it is killed.

PAUSE closes a server connection whose login is under way, and remembers that as a failed login (``per_loop_pause`` in src/janitor.c,
``disconnect_server`` in src/objects.c). After RESUME it refuses queries then ("server login has been failing"), and lets other clients
wait for ``server_login_retry``, 15 seconds. So PAUSE is sent when no login is under way.

Source: PgBouncer manual, usage (Admin console).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from subscriber.errors import ConfigurationError, SubscriberError
from subscriber.protocol.quoting import quote_identifier
from subscriber.walreceiver.session import Session

__all__ = ["PgBouncer", "Pooled", "leads_to"]

_PREFIX: Final = "pgbouncer:"
_EXAMPLE: Final = "give its console, as in --pool 'pgbouncer:host=pool1 port=6432 user=admin'"
_LOOK: Final = 0.05
_TELL_SECONDS: Final = 2.0
_LOGIN_LOOK: Final = 0.01
_LOGIN_LOOKS: Final = 5
"""While clients wait for further server connections, one login follows the other, with short gaps."""
_LOGIN_SECONDS: Final = 10.0


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


class PgBouncer:
    """A PgBouncer.

    Args:
        conninfo: of its admin console.
    """

    def __init__(self, conninfo: str) -> None:
        self._conninfo = conninfo

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
            ConfigurationError: PgBouncer logs in to the server all the time.
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
                await console.execute(f"PAUSE {quote_identifier(name)}")

    @staticmethod
    async def _no_login(console: _Console, name: str) -> None:
        now = asyncio.get_running_loop().time
        until, quiet = now() + _LOGIN_SECONDS, 0
        while quiet < _LOGIN_LOOKS:
            pools = await console.table("SHOW POOLS")
            quiet = 0 if any(row["database"] == name and row["sv_login"] != "0" for row in pools) else quiet + 1
            if not quiet and now() > until:
                raise ConfigurationError(
                    f'PgBouncer logs in to the server of "{name}" all the time: PAUSE would interrupt that, and refuse queries',
                    hint="try again when fewer sessions begin; SHOW SERVERS shows those in state new; server_lifetime may be too short",
                )
            await asyncio.sleep(_LOGIN_LOOK)

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
        async with await self._console() as console:
            for name in names:
                if name in paused:
                    await console.execute(f"RESUME {quote_identifier(name)}")


def leads_to(entry: Pooled, conninfo: str) -> bool:
    """Whether an entry has the address of a connection string. Two names of one server look different."""
    try:
        known = conninfo_to_dict(conninfo)
    except psycopg.Error:
        # a URL of another kind of database
        return False
    hosts = {str(known.get(name) or "") for name in ("host", "hostaddr")} - {""}
    return entry.database == known.get("dbname") and entry.host in hosts and entry.port == str(known.get("port") or "5432")
