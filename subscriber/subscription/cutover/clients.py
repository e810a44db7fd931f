"""The clients of a pool: they wait while their database is switched, and no query of theirs is refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from subscriber.errors import ConfigurationError, SubscriberError
from subscriber.walreceiver.fences.pgbouncer import PgBouncer, leads_to
from subscriber.walreceiver.session import Session

__all__ = ["PooledClients"]


class PooledClients:
    """The clients that a PgBouncer leads to one database.

    Args:
        pool: as ``--pool``; without it nothing is done.
        conninfo, title: of the database that they leave.
        tell: is told about each step.
        names: the entries of its configuration that an interrupted move has paused.
    """

    def __init__(self, pool: str | None, conninfo: str, title: str, tell: Callable[[str], None], names: Sequence[str] = ()) -> None:
        self._pool = PgBouncer.parse(pool) if pool else None
        self._conninfo = conninfo
        self._title = title
        self._tell = tell
        self._since: float | None = None
        self.names = list(names)

    async def find(self, max_downtime: float | None) -> list[str]:
        """Find the entries that lead to the source.

        Returns:
            Notes for people.

        Raises:
            ConfigurationError: there is none.
            SubscriberError: the pool or the source cannot be used.
        """
        if self._pool is None:
            return []
        async with await Session.connect(self._conninfo, application_name="subscriber cutover") as session:
            ((database,),) = await session.execute("SELECT pg_catalog.current_database()")
        known = await self._pool.databases()
        found = [each for each in known if each.database == database]
        if not found:
            listed = ", ".join(f'"{each.name}"' for each in known) or "none"
            raise ConfigurationError(
                f'PgBouncer leads no client to database "{database}", {self._title}', hint=f"its section [databases] has: {listed}"
            )
        self.names = [each.name for each in found]
        notes = [
            f'PgBouncer pools sessions of "{each.name}": it pauses when each client has disconnected. Transaction pooling pauses sooner'
            for each in found
            if each.mode == "session"
        ]
        limit = await self._pool.wait_timeout()
        if limit and (max_downtime is None or limit < max_downtime):
            notes.append(f"PgBouncer disconnects clients that wait for {limit:g} s: query_wait_timeout is less than --max-downtime")
        return notes

    async def pause(self) -> None:
        """Let them wait, when their transactions have ended.

        Raises:
            SubscriberError: the pool cannot be used.
        """
        if self._pool is None:
            return
        self._since = time.monotonic()
        await self._pool.pause(self.names, self._tell)
        self._tell(f"the clients of PgBouncer wait, after {time.monotonic() - self._since:.2f} s")

    async def lead(self) -> None:
        """Let the pool read its configuration again, which has the new address.

        Raises:
            ConfigurationError: it has not.
            SubscriberError: the pool cannot be used.
        """
        if self._pool is None:
            return
        await self._pool.reload()
        for each in await self._pool.databases():
            if each.name in self.names:
                if leads_to(each, self._conninfo):
                    raise ConfigurationError(
                        f'PgBouncer still leads "{each.name}" to {self._title}, {each.host}:{each.port}',
                        hint="write the new address into its configuration file, before or with the switch command",
                    )
                self._tell(f'PgBouncer leads "{each.name}" to {each.database} at {each.host}:{each.port}')

    async def resume(self) -> None:
        """Let them work again. May be repeated.

        Raises:
            SubscriberError: the pool cannot be used: they still wait.
        """
        if self._pool is None:
            return
        try:
            await self._pool.resume(self.names)
        except SubscriberError as error:
            error.add_note(f"clients wait until RESUME {', '.join(self.names)} in the console of PgBouncer, or until this is repeated")
            raise
        if self._since is not None:
            self._tell(f"the clients of PgBouncer waited for {time.monotonic() - self._since:.2f} s")
            self._since = None
