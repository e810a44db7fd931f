"""A second session that reads catalogs while the apply session is busy, and the session of the verbs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from subscriber.errors import TargetError, TargetUnavailable
from subscriber.sinks.postgres.session.libpq_session import LibpqSession
from subscriber.sinks.postgres.session.postgres_errors import translated

if TYPE_CHECKING:
    import asyncpg

__all__ = ["CatalogQueries", "CatalogReader", "CatalogSession", "Execute"]

CatalogSession: TypeAlias = "asyncpg.Connection[asyncpg.Record] | LibpqSession"

_LAST_SECONDS: Final = 1.0
"""Time limit for a ROLLBACK, and for the end of the session, so that a target that does not answer cannot block the end of a report."""

_OWNER: Final = """
SELECT r.rolname::text AS owner, r.rolname = current_user AS own
FROM subscriber.pg_subscription s LEFT JOIN pg_catalog.pg_roles r ON r.rolname = s.subowner WHERE s.oid = $1::int8::oid
"""


class Execute(Protocol):
    """Runs one query in the session and returns its rows."""

    def __call__(self, query: str, /, *args: object) -> Awaitable[Sequence[Sequence[Any]]]:
        """Raises TargetError, or a subclass."""
        ...


class CatalogQueries(Protocol):
    """Reads catalogs. ``owner``: as :attr:`CatalogReader.owner`."""

    @property
    def owner(self) -> str | None: ...

    async def fetch(self, query: str, *parameters: object) -> list[dict[str, Any]]:
        """Run a query and return its rows by column name."""
        ...


class CatalogReader:
    """Runs one query at a time.

    Attributes:
        owner: the role with whose privileges the subscription changes tables; None: the session's own role.
    """

    def __init__(self, connection: CatalogSession) -> None:
        self.connection = connection
        self.owner: str | None = None
        self._turn = asyncio.Lock()

    async def fetch(self, query: str, *parameters: object) -> list[dict[str, Any]]:
        """Run a query and return its rows by column name.

        Raises:
            TargetUnavailable: the connection was lost.
            TargetError: the server rejected the query.
        """
        async with self._turn:
            if self.connection.is_closed():
                raise TargetUnavailable("the session with the target was lost", hint="the connection is retried")
            try:
                with translated():
                    return [dict(row.items()) for row in await self.connection.fetch(query, *parameters)]
            except TargetUnavailable:
                # asyncpg may still consider it usable
                self.connection.terminate()
                raise

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Execute]:
        """A transaction for several queries. No other query of the session runs between them.

        Raises:
            TargetUnavailable: the connection was lost.
            TargetError: the server rejected a query.
        """
        async with self._turn:
            if self.connection.is_closed():
                raise TargetUnavailable("the session with the target was lost", hint="the connection is retried")
            # not asyncpg's transaction(): after a cancelled BEGIN, it takes every later transaction for a part of the one that was begun
            try:
                with translated():
                    try:
                        await self.connection.execute("BEGIN")
                        yield self._execute
                        await self.connection.execute("COMMIT")
                    except BaseException:
                        await self.roll_back()
                        raise
            except TargetUnavailable:
                # asyncpg may still consider it usable
                self.connection.terminate()
                raise

    async def roll_back(self) -> None:
        """Roll back within a short time limit, because the caller's own may be over. An error is not raised: it ends the session."""
        try:
            async with asyncio.timeout(_LAST_SECONDS):
                with translated():
                    await self.connection.execute("ROLLBACK")
        except (TargetError, TimeoutError):
            self.connection.terminate()
        except BaseException:
            self.connection.terminate()
            raise

    async def _execute(self, query: str, /, *args: object) -> Sequence[Sequence[Any]]:
        with translated():
            return [tuple(row.values()) for row in await self.connection.fetch(query, *args)]

    async def ping(self, seconds: float) -> None:
        """Check that the session is alive.

        Raises:
            TargetUnavailable: the session is lost, or did not answer in time. It cannot be used any more.
        """
        try:
            async with asyncio.timeout(seconds):
                await self.fetch("SELECT 1")
        except TimeoutError:
            self.connection.terminate()
            raise TargetUnavailable(
                f"the target did not answer within {seconds:.0f} s", hint="check the network connection to the target"
            ) from None

    async def read_owner(self, oid: int) -> None:
        """Read the owner of a subscription (``pg_subscription.subowner``).

        Raises:
            TargetError: the role was dropped.
            TargetUnavailable: the connection was lost.
        """
        (found,) = await self.fetch(_OWNER, oid)
        if found["owner"] is None:
            raise TargetError(
                "the owner of the subscription was dropped", sqlstate="42704", hint="set a new owner: `subscriber alter NAME --owner ROLE`"
            )
        self.owner = None if found["own"] else found["owner"]

    def storable(self, text: str) -> str:
        """Escape characters that the database's encoding may lack. The text of an error may contain the publisher's language."""
        connection = self.connection
        encoding = connection.server_encoding if isinstance(connection, LibpqSession) else connection.get_settings().server_encoding
        codec = "utf-8" if encoding == "UTF8" else "ascii"
        return text.encode(codec, "backslashreplace").decode(codec)

    async def close(self) -> None:
        """Disconnect, with a Terminate message if the server still answers."""
        with contextlib.suppress(TargetError), translated():
            await self.connection.close(timeout=_LAST_SECONDS)
