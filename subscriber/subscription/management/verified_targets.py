"""The kinds of targets that ``verify`` can read, each as of one LSN.

The process that runs the subscription takes a snapshot of PostgreSQL, and exports it. Sessions with SQLite or MariaDB begin their own ones
while apply is held. A lake publishes a snapshot of the batches that were landed up to the LSN. Other databases are read in two passes
(:mod:`subscriber.subscription.management.second_pass`).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Protocol

from subscriber.catalog import Definition
from subscriber.catalog.snapshot_requests import Requests, RequestState, SnapshotRequest, StoredRequests, not_ready
from subscriber.catalog.store import Store
from subscriber.protocol.lsn import Lsn
from subscriber.subscription.management.snapshot_request import Asker, PublisherSide
from subscriber.subscription.targets import (
    is_lake,
    open_compared_lake,
    open_snapshot_sessions,
    open_store,
    read_postgres_snapshot,
    uses_sqlalchemy,
)
from subscriber.verification.model import Progress
from subscriber.verification.sides import Side
from subscriber.verification.targets import OtherTarget, PostgresTarget, TargetSnapshot

if TYPE_CHECKING:
    from subscriber.sinks.spark.reading.compared_lake import ComparedLake
    from subscriber.sinks.sqlalchemy.snapshots import SnapshotSessions

__all__ = ["VerifiedTarget", "open_verified_target"]


class VerifiedTarget(Protocol):
    """A target, and how its snapshot is opened. The methods are called in this order.

    Attributes:
        definition: of the subscription.
        requests: to the process that runs it.
        has_snapshots: False: the target is read while transactions are applied, and what differs is compared again.
        store: its catalog, where it remembers which tables were equal; None: it cannot compare only what has changed since.
    """

    definition: Definition
    requests: Requests
    has_snapshots: bool
    store: Store | None

    async def open(self, asker: Asker, request: SnapshotRequest, application_name: str) -> None:
        """Open the snapshot, or what is needed for it. Apply may be held until this has ended."""
        ...

    async def snapshot(self, side: PublisherSide, progress: Progress) -> TargetSnapshot:
        """Return the snapshot. Apply has continued."""
        ...


@contextlib.asynccontextmanager
async def open_verified_target(name: str, target: str, jobs: int) -> AsyncIterator[VerifiedTarget]:
    """Open the target of a subscription.

    Args:
        name: of the subscription.
        target: URL or conninfo of the target.
        jobs: how many sessions read it.

    Raises:
        ConfigurationError: this kind of target cannot be verified.
        TargetError: the subscription does not exist, or the target cannot be reached.
    """
    if is_lake(target):
        lake = open_compared_lake(target)
        yield _Lake(lake, await lake.find(name))
        return
    async with contextlib.AsyncExitStack() as stack:
        store, find = await stack.enter_async_context(open_store(target, "subscriber verify"))
        definition = await find(name)
        if uses_sqlalchemy(target):
            sessions = await stack.enter_async_context(open_snapshot_sessions(target, jobs))
            yield _Other(sessions, store, definition)
        else:
            yield _Postgres(target, jobs, stack, store, definition)


class _Postgres:
    def __init__(self, target: str, jobs: int, stack: contextlib.AsyncExitStack, store: Store, definition: Definition) -> None:
        self.definition = definition
        self.requests: Requests = StoredRequests(store, definition.oid, definition.name)
        self.has_snapshots = True
        self.store: Store | None = store
        self._target = target
        self._jobs = jobs
        self._stack = stack
        self._opened: PostgresTarget

    async def open(self, asker: Asker, request: SnapshotRequest, application_name: str) -> None:
        name = request.answer["target_snapshot"]
        reading = read_postgres_snapshot(self._target, name, self._jobs, application_name=application_name)
        self._opened = PostgresTarget(Side(await self._stack.enter_async_context(reading)))

    async def snapshot(self, side: PublisherSide, progress: Progress) -> TargetSnapshot:
        return self._opened


class _Other:
    def __init__(self, sessions: SnapshotSessions, store: Store, definition: Definition) -> None:
        self.definition = definition
        self.requests: Requests = StoredRequests(store, definition.oid, definition.name)
        self.has_snapshots = sessions.has_snapshots
        self.store: Store | None = None
        self._sessions = sessions

    async def open(self, asker: Asker, request: SnapshotRequest, application_name: str) -> None:
        await self._sessions.begin()
        await asker.say(request, only_from=RequestState.HELD, to=RequestState.OPENED)

    async def snapshot(self, side: PublisherSide, progress: Progress) -> TargetSnapshot:
        return OtherTarget(self._sessions)


class _Lake:
    def __init__(self, lake: ComparedLake, definition: Definition) -> None:
        self.definition = definition
        self.requests: Requests = lake.requests
        self.has_snapshots = True
        self.store: Store | None = None
        self._lake = lake
        self._landed: Lsn

    async def open(self, asker: Asker, request: SnapshotRequest, application_name: str) -> None:
        self._landed = Lsn.parse(request.answer["target_snapshot"])

    async def snapshot(self, side: PublisherSide, progress: Progress) -> TargetSnapshot:
        entries = await self.requests.entries()
        ready = entries.keys() - not_ready(entries, entries, side.lsn).keys()
        return OtherTarget(await self._lake.published(self._landed, side.lsn, ready, progress.waiting))
