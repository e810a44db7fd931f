"""A target with a catalog: a :class:`subscriber.catalog.store.Store`.

Most databases do not tell a session that a row has changed: :meth:`SqlAlchemyStore.wait` is a short pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Final

from subscriber.catalog.model import Table
from subscriber.catalog.store import LAUNCHER_KEY, Plus, Row, writer_key
from subscriber.errors import TargetUnavailable
from subscriber.sinks.sqlalchemy.catalog.rows import SqlAlchemyRows
from subscriber.sinks.sqlalchemy.catalog_tables import FENCE, OF_SUBSCRIPTION, PREPARED_TABLES, PREPARED_TRANSACTION
from subscriber.sinks.sqlalchemy.session.database import Database
from subscriber.sinks.sqlalchemy.session.locks import Locks

__all__ = ["SqlAlchemyStore"]

_LOOK_SECONDS: Final = 0.25


class SqlAlchemyStore:
    """See :class:`subscriber.catalog.store.Store`.

    Args:
        database: the target.
        locks: the locks that this store takes.
    """

    def __init__(self, database: Database, locks: Locks) -> None:
        self.database = database
        self._locks = locks
        self._launches = False

    @property
    def tables(self) -> Sequence[Table]:
        return OF_SUBSCRIPTION

    @property
    def prepared_tables(self) -> Sequence[Table]:
        return PREPARED_TABLES

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[SqlAlchemyRows]:
        async with self.database.writing() as connection:
            yield SqlAlchemyRows(connection)

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[SqlAlchemyRows]:
        async with self.database.reading() as connection:
            yield SqlAlchemyRows(connection)

    async def take_lock(self, key: str, what: str, wait: float | None = None, *, lost: int | None = None) -> None:
        await self._locks.take(key, what, wait, lost=lost)
        self._launches = self._launches or key == LAUNCHER_KEY

    @property
    def session_number(self) -> int | None:
        return self._locks.number

    async def release_lock(self, key: str) -> None:
        await self._locks.release(key)

    @property
    def has_locks(self) -> bool:
        return self._locks.exist

    async def held_locks(self, keys: Collection[str]) -> Collection[str]:
        return {key for key in keys if await self._locks.held(key)}

    async def live_workers(self, workers: Sequence[Row]) -> Mapping[tuple[int, int], int | None]:
        """Return the workers of those subscriptions whose writer's lock is held, each with the id of its process."""
        running = await self.held_locks({writer_key(row["subid"]) for row in workers})
        return {(row["subid"], row["relid"]): row["pid"] for row in workers if writer_key(row["subid"]) in running}

    async def shut_out(self, oid: int) -> None:
        """Raise the fence: even a writer that has lost its lock without noticing can write nothing more."""
        async with self.transaction() as rows:
            await rows.update(FENCE, {"srsubid": oid}, {"token": Plus(1)})

    async def prepared_transactions(self, oid: int) -> Sequence[str]:
        async with self.reading() as rows:
            found = await rows.select(PREPARED_TRANSACTION, {"srsubid": oid, "complete": True})
        return [row["gid"] for row in sorted(found, key=lambda row: int(row["prepare_time"]))]

    async def notify(self) -> None:
        """Do nothing: :meth:`wait` is a short pause."""

    async def wait(self, timeout: float) -> None:
        """Pause for a short time.

        Raises:
            TargetUnavailable: this store took the launcher's lock and has lost it.
        """
        await asyncio.sleep(min(timeout, _LOOK_SECONDS))
        if self._launches and not await self.held_locks([LAUNCHER_KEY]):
            raise TargetUnavailable(
                "the session with the target's catalog was lost", hint="temporary error; if it persists, check that the target runs"
            )

    def now(self) -> float:
        return time.time()

    async def close(self) -> None:
        try:
            await self._locks.close()
        finally:
            await self.database.close()
