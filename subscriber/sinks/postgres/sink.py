"""The PostgreSQL sink: the interface of this package for the apply worker."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence

from subscriber.catalog.definition import require_name
from subscriber.catalog.subscriptions import require_unclaimed
from subscriber.config import RULES, Settings, SubscriptionOptions
from subscriber.interfaces import (
    ApplyStatistics,
    Finding,
    PublishedTable,
    Query,
    TargetActivity,
)
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.postgres.apply.rule_needs import rules_refused
from subscriber.sinks.postgres.catalog.schema import ensure_catalog
from subscriber.sinks.postgres.catalog.session_rows import SessionRows
from subscriber.sinks.postgres.catalog.store import PostgresStore
from subscriber.sinks.postgres.catalog.subscriptions import own_subscription
from subscriber.sinks.postgres.catalog.target_identity import require_own_target
from subscriber.sinks.postgres.checks import check_target, querying, subscription_exists
from subscriber.sinks.postgres.opened_postgres_sink import OpenedPostgresSink, PostgresTarget
from subscriber.sinks.postgres.parallel.sessions import ParallelSessions, raise_fence
from subscriber.sinks.postgres.session.activity import Watcher
from subscriber.sinks.postgres.session.apply_session import ApplySession
from subscriber.sinks.postgres.session.catalog_reader import CatalogReader
from subscriber.sinks.postgres.session.locks import take, writer_number
from subscriber.sinks.postgres.session.origins import origin_name, sweep_origins
from subscriber.sinks.postgres.session.settings import apply_settings

__all__ = ["PostgresSink"]


class PostgresSink:
    """A :class:`subscriber.interfaces.Sink` for PostgreSQL 13 to 18.

    Args:
        target: libpq URL or conninfo of the target database.
        options: options of the subscription.
        settings: settings of the process.
        defined: the subscription was created by a verb, and must not be created by :meth:`open`.

    Raises:
        ConfigurationError: ``target`` is neither a URL nor a conninfo.
    """

    supports_two_phase = True
    logs_conflicts = True
    conflict_rules = RULES
    has_apply_workers = True

    def __init__(self, target: str, *, options: SubscriptionOptions, settings: Settings, defined: bool = False) -> None:
        self._shared = PostgresTarget(target, options)
        self._target = self._shared.applying
        self._watcher: Watcher | None = None
        self._options = options
        self._workers = settings.apply_workers
        self._defined = defined
        # true after this process has seen the subscription: if it is missing later, it was dropped, and must not be created again
        self._known = defined
        self._found: str | None = None

    @property
    def statistics(self) -> ApplyStatistics:
        """Counters since the sink was created."""
        return self._shared.statistics

    async def exists(self, name: str) -> bool:
        """Whether the target's catalog has the subscription. See :meth:`subscriber.interfaces.Sink.exists`."""
        require_name(name)
        found = await subscription_exists(self._target, name)
        self._known = found or self._defined
        self._found = name if found else None
        return found

    async def open(self, name: str, on_durable: Callable[[Lsn], None]) -> OpenedPostgresSink:
        """See :meth:`subscriber.interfaces.Sink.open`.

        Raises:
            SubscriptionChanged: it was dropped or renamed since it was created.
            ConfigurationError: its rows are a copy of another target's.
            TargetUnavailable, TargetError, SubscriptionInUse
        """
        require_name(name)
        watcher = self._watcher = Watcher(name, self._target, self._shared.copying)
        origins, level = self._shared.origins, self._options.synchronous_commit
        async with contextlib.AsyncExitStack() as opening:
            # each is closed even if the close of another one is cancelled
            opening.push_async_callback(watcher.close)
            session = await ApplySession.connect(self._target, application_name=name, synchronous_commit=level)
            opening.push_async_callback(session.close)
            reader = await self._connect_reader(session, name)
            opening.push_async_callback(reader.close)
            await ensure_catalog(reader.connection)
            oid = await own_subscription(reader, name, self._options, known=self._known)
            async with reader.transaction() as execute:
                await require_own_target(execute, oid, name)
            ended = await take(session.fetch, writer_number(oid), f'subscription "{name}"', lost=self._target.lost())
            if not self._defined:
                await require_unclaimed(PostgresStore(reader), oid, name)
            await reader.read_owner(oid)
            fence, also_ended = await raise_fence(session, oid)
            await session.carry_origin(origins, origin_name(oid))
            if (refused := await rules_refused(session.fetch, self._shared.rules, without_origin=session.origin is None)) is not None:
                raise refused
            if self._shared.log is not None:
                await self._shared.log.open(session.fetch, name)
            if session.origin is not None:
                await sweep_origins(session.fetch, oid)
            rows = SessionRows(session, oid)
            state = await rows.subscription()
            if state.position is not None and (ended or also_ended or not session.commits_are_durable):
                # an earlier process may have committed the position without a flush; the position returned here will be acknowledged
                async with session.transaction():
                    await rows.move_position(state.position.lsn)
            opening.pop_all()
        self._known = True
        parallel = ParallelSessions(
            self._target,
            reader,
            origins,
            oid=oid,
            name=name,
            synchronous_commit=level,
            fence=fence,
            origin=session.origin is not None,
            kept=max(2, self._workers),
        )
        return OpenedPostgresSink(
            self._shared,
            session,
            reader,
            watcher=watcher,
            state=state,
            parallel=parallel,
            workers=self._workers,
            on_durable=on_durable,
        )

    async def _connect_reader(self, session: ApplySession, name: str) -> CatalogReader:
        # this session creates the catalog, which must be on disk
        return CatalogReader(await self._target.connect_asyncpg(session.connection, name, apply_settings("local", catalog=True)))

    async def activity(self) -> TargetActivity:
        """See :meth:`subscriber.interfaces.WatchedSink.activity`."""
        return await self._watcher.activity() if self._watcher is not None else TargetActivity(math.inf)

    def abort(self) -> None:
        """See :meth:`subscriber.interfaces.AbortableSink.abort`."""
        for target in (self._shared.applying, self._shared.copying):
            target.abort()

    async def check(self, tables: Sequence[PublishedTable], *, two_phase: bool) -> list[Finding]:
        """Problems that the subscription would have in the target. See :meth:`subscriber.interfaces.Sink.check`.

        Raises:
            TargetUnavailable: the target cannot be reached.
        """
        return await check_target(
            self._target,
            tables,
            two_phase=two_phase,
            as_owner=self._shared.as_owner,
            origin_none=self._options.origin == "none",
            asynchronous=self._options.synchronous_commit == "off",
            parks=self._options.on_error == "park",
            rules=self._shared.rules,
            log=self._shared.log,
            workers=self._workers,
            name=self._found,
        )

    def querying(self) -> contextlib.AbstractAsyncContextManager[Query]:
        """See :meth:`subscriber.interfaces.PostgresDatabase.querying`."""
        return querying(self._target)
