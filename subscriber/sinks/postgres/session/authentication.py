"""``require_auth`` for asyncpg, which sends a password in whatever way the server asks for it.

asyncpg has no hook for that. It writes to a transport, so it gets one that looks at the first message of type ``p``, which is its answer to
the server's request, before it is sent: SASL's names the mechanism and never has the password. All others would be the password itself, or
a hash that is as good as it. Once the session is open, a server that asked for no answer is known too.

Source: PostgreSQL manual, 54.7 (Message Formats: PasswordMessage, SASLInitialResponse); libpq, check_expected_areq of fe-auth.c.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import asyncpg
import asyncpg.connect_utils

from subscriber.errors import REQUIRE_AUTH_HINT, TargetError
from subscriber.protocol.conninfo import SCRAM

__all__ = ["connect_asyncpg"]

_PASSWORD: Final = b"p"
_SASL: Final = b"SCRAM-SHA-256\0"
_HEADER: Final = 5
_MD5: Final = b"md5"
_MD5_BYTES: Final = _HEADER + 36
"""``md5``, 32 digits and the zero byte."""


class _TlsRequest(asyncpg.connect_utils.TLSUpgradeProto):
    """asyncpg's wait for the answer to its request for TLS.

    If an attempt to connect is cancelled just before that wait, no code retrieves the error, and asyncio prints it. This class does.
    """

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if not self.on_data.cancelled():
            self.on_data.exception()


asyncpg.connect_utils.TLSUpgradeProto = _TlsRequest  # type: ignore[misc]


async def connect_asyncpg(arguments: dict[str, Any], require_auth: str) -> asyncpg.Connection[asyncpg.Record]:
    """Connect. ``require_auth``: as libpq has it.

    Raises:
        TargetError: the server uses a method that is not allowed. It has no password.
    """
    loop = _Loop(asyncio.get_running_loop(), require_auth)
    try:
        connection: asyncpg.Connection[asyncpg.Record] = await asyncpg.connect(**{**arguments, "loop": loop})
    except Exception:
        if loop.refused is not None:
            raise loop.refused from None
        raise
    if loop.answered is None and not _allows(require_auth, "none"):
        connection.terminate()
        raise _refusal(require_auth, "did not ask for authentication")
    return connection


def _allows(require_auth: str, method: str) -> bool:
    """Whether libpq's ``require_auth`` allows a method: a list of methods, or of methods that are not allowed, each with ``!``."""
    words = [word.strip() for word in require_auth.split(",") if word.strip()]
    return not words or (f"!{method}" not in words if words[0].startswith("!") else method in words)


def _refusal(require_auth: str, did: str) -> TargetError:
    return TargetError(
        f'could not connect to the target: authentication method requirement "{require_auth}" failed: the server {did}',
        hint=REQUIRE_AUTH_HINT,
    )


class _Loop:
    """The event loop, as asyncpg sees it: all transports are watched.

    Attributes:
        answered: the method of the first answer to a request for authentication; None: there was none.
        refused: why an answer was not sent.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, require_auth: str) -> None:
        self._loop = loop
        self._require_auth = require_auth
        self.answered: str | None = None
        self.refused: TargetError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    async def create_connection(self, factory: Callable[[], Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        transport, protocol = await self._loop.create_connection(lambda: _Watched(factory(), self), *args, **kwargs)
        return _Transport(transport, self), protocol.inner

    async def create_unix_connection(self, factory: Callable[[], Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        transport, protocol = await self._loop.create_unix_connection(lambda: _Watched(factory(), self), *args, **kwargs)
        return _Transport(transport, self), protocol.inner

    async def start_tls(self, transport: Any, *args: Any, **kwargs: Any) -> Any:
        found = await self._loop.start_tls(transport.inner, *args, **kwargs)
        return None if found is None else _Transport(found, self)

    def check(self, data: bytes) -> None:
        """Look at what asyncpg sends.

        Raises:
            TargetError: it is an answer that is not allowed.
        """
        if data[:1] != _PASSWORD:
            return
        if data.startswith(_SASL, _HEADER):
            method, asked = SCRAM, "SASL authentication"
        elif len(data) == _MD5_BYTES and data.startswith(_MD5, _HEADER):
            method, asked = "md5", "a hashed password"
        else:
            method, asked = "password", "a cleartext password"
        if not _allows(self._require_auth, method):
            self.refused = _refusal(self._require_auth, f"asked for {asked}")
            raise self.refused
        self.answered = method


class _Transport:
    """A transport whose writes are checked."""

    def __init__(self, inner: Any, loop: _Loop) -> None:
        self.inner = inner
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def write(self, data: Any) -> None:
        if self._loop.answered is None:
            try:
                self._loop.check(bytes(data[: _MD5_BYTES + 1]))
            except TargetError:
                self.inner.abort()
                return
        self.inner.write(data)


class _Watched(asyncio.Protocol):
    """asyncpg's protocol, which gets a watched transport."""

    def __init__(self, inner: Any, loop: _Loop) -> None:
        self.inner = inner
        self._loop = loop
        # not looked up for each piece of data
        self.data_received = inner.data_received  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.inner.connection_made(_Transport(transport, self._loop))

    def connection_lost(self, exc: Exception | None) -> None:
        self.inner.connection_lost(exc)

    def eof_received(self) -> bool | None:
        return bool(self.inner.eof_received())

    def pause_writing(self) -> None:
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        self.inner.resume_writing()
