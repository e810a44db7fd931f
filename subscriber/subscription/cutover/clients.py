"""The clients of a pool: they wait while their database is switched, and no query of theirs is refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from subscriber.errors import ConfigurationError, SubscriberError
from subscriber.walreceiver.fences.pgbouncer import PgBouncer, Pooled, leads_to
from subscriber.walreceiver.session import Session

__all__ = ["PooledClients"]


class PooledClients:
    """The clients that a PgBouncer leads to one database.

    Args:
        pool: as ``--pool``; without it nothing is done.
        conninfo, title: of the database that they leave.
        destination: connection string, or URL, of the other one.
        tell: is told about each step.
        addresses: of the entries of its configuration that an interrupted move has paused, by name. Others mean none.
    """

    def __init__(
        self, pool: str | None, conninfo: str, title: str, destination: str, tell: Callable[[str], None], *, addresses: Any = None
    ) -> None:
        self._pool = PgBouncer.parse(pool) if pool else None
        self._conninfo = conninfo
        self._title = title
        self._destination = destination
        self._tell = tell
        self._since: float | None = None
        self.addresses: dict[str, list[str]] = addresses if isinstance(addresses, dict) else {}
        self._own: list[str] = []

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
        self.addresses = {each.name: each.address for each in found}
        notes = [
            f'PgBouncer pools sessions of "{each.name}": it pauses when each client has disconnected. Transaction pooling pauses sooner'
            for each in found
            if each.mode == "session"
        ]
        limit = await self._pool.wait_timeout()
        if limit and (max_downtime is None or limit < max_downtime):
            notes.append(f"PgBouncer disconnects clients that wait for {limit:g} s (query_wait_timeout): use a smaller --max-downtime")
        return notes

    async def pause(self) -> None:
        """Let them wait, when their transactions have ended.

        Raises:
            SubscriberError: the pool cannot be used.
        """
        if self._pool is None:
            return
        self._since = time.monotonic()
        await self._pool.pause(list(self.addresses), self._tell, self._own)
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
        hint = "write the new address into its configuration file, before or with the switch command"
        found = {each.name: each for each in await self._pool.databases()}
        for name in self.addresses:
            each = found.get(name)
            if each is None:
                raise ConfigurationError(f'PgBouncer has no entry "{name}" any more', hint=hint)
            if self._leads_to_source(each) and not leads_to(each, self._destination):
                raise ConfigurationError(f'PgBouncer still leads "{name}" to {self._title}, {each.host}:{each.port}', hint=hint)
            self._tell(f'PgBouncer leads "{name}" to {each.database} at {each.host}:{each.port}')

    def _leads_to_source(self, entry: Pooled) -> bool:
        """Whether its address is unchanged, or is the source's. Other names of the same server are not recognized."""
        return entry.address == self.addresses.get(entry.name) or leads_to(entry, self._conninfo)

    async def resume(self) -> None:
        """Let them work again. May be repeated.

        Raises:
            SubscriberError: the pool cannot be used: they still wait.
        """
        await self._resume(self.addresses)

    async def resume_own(self) -> None:
        """As :meth:`resume`, but only for entries that this process has paused."""
        await self._resume(self._own)

    async def resume_back(self) -> None:
        """As :meth:`resume`, but only those that lead to the source, which has taken writers again. Others still wait.

        Raises:
            ConfigurationError: there are others.
            SubscriberError: as :meth:`resume`.
        """
        if self._pool is None or not self.addresses:
            return
        if changed := await self._changed(self._pool):
            # its file may have the old address again
            await self._pool.reload()
            changed = await self._changed(self._pool)
        await self._resume(self.addresses.keys() - changed)
        if changed:
            raise ConfigurationError(
                f"PgBouncer does not lead its clients of {', '.join(sorted(changed))} to {self._title}: they still wait",
                hint="write the old address back into its configuration file, RELOAD, then --abort",
            )

    async def _changed(self, pool: PgBouncer) -> set[str]:
        return self.addresses.keys() - {each.name for each in await pool.databases() if self._leads_to_source(each)}

    async def _resume(self, names: Iterable[str]) -> None:
        if self._pool is None:
            return
        names = sorted(names)
        try:
            await self._pool.resume(names)
        except SubscriberError as error:
            error.add_note(f"clients wait until RESUME {', '.join(names)} in the console of PgBouncer, or until this is repeated")
            raise
        if self._since is not None:
            self._tell(f"the clients of PgBouncer waited for {time.monotonic() - self._since:.2f} s")
            self._since = None
