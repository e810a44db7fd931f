"""PostgreSQL as a kind of target: see :mod:`subscriber.catalog.target_kind`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from subscriber.catalog import Catalog, Definition, Observation
from subscriber.catalog.store import Store
from subscriber.config import Settings, SubscriptionOptions
from subscriber.errors import ConfigurationError
from subscriber.interfaces import Query, Sink, TableName
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.required_packages import requiring

if TYPE_CHECKING:
    from subscriber.catalog.snapshot_requests import Requests
    from subscriber.catalog.verifications import Verifications
    from subscriber.interfaces.sequences import PublishedSequence, SequenceResult

__all__ = ["PostgresKind"]

_NEEDS: Final = ("a PostgreSQL target", "postgres")


class PostgresKind:
    """``postgresql://…``, ``postgres://…``, and libpq's keywords and values. pg_dump copies the schema (:mod:`subscriber.schema`)."""

    noun = "a PostgreSQL database"
    repairs = True
    publishes = True

    def sink(self, target: str, options: SubscriptionOptions, settings: Settings, *, defined: bool) -> Sink:
        _require_native(settings)
        with requiring(*_NEEDS):
            import asyncpg  # noqa: F401, PLC0415 -- each run needs it, but not at once

            from subscriber.sinks.postgres.sink import PostgresSink  # noqa: PLC0415 -- its drivers come with an extra
        return PostgresSink(target, options=options, settings=settings, defined=defined)

    async def open_catalog(self, target: str, application_name: str) -> Catalog:
        with requiring(*_NEEDS):
            from subscriber.sinks.postgres.catalog.subscriptions import PostgresCatalog  # noqa: PLC0415 -- as above
        return await PostgresCatalog.open(target, application_name)

    async def observe(self, target: str) -> Sequence[Observation]:
        with requiring(*_NEEDS):
            from subscriber.sinks.postgres.catalog.subscriptions import observe  # noqa: PLC0415 -- as above
        return await observe(target)

    async def set_sequences(
        self, target: str, sequences: Sequence[PublishedSequence], *, force: bool, dry_run: bool
    ) -> list[SequenceResult]:
        with requiring(*_NEEDS):
            from subscriber.sinks.postgres.sequences import set_sequences  # noqa: PLC0415 -- as above
        return await set_sequences(target, sequences, force=force, dry_run=dry_run)

    @contextlib.asynccontextmanager
    async def compared(self, target: str, name: str, jobs: int) -> AsyncIterator[_ComparedDatabase]:
        with requiring(*_NEEDS):
            from subscriber.sinks.postgres.catalog.subscriptions import PostgresCatalog  # noqa: PLC0415 -- as above
        async with contextlib.AsyncExitStack() as stack:
            catalog = await PostgresCatalog.open(target, "subscriber verify")
            stack.push_async_callback(catalog.close)
            yield _ComparedDatabase(target, jobs, stack, catalog.store, await catalog.find(name))


class _ComparedDatabase:
    """See :class:`subscriber.catalog.target_kind.ComparedTarget`. The process that runs the subscription exports the snapshot."""

    has_snapshots = True

    def __init__(self, target: str, jobs: int, stack: contextlib.AsyncExitStack, store: Store, definition: Definition) -> None:
        from subscriber.catalog.snapshot_requests import StoredRequests  # noqa: PLC0415 -- only comparisons need it
        from subscriber.catalog.verifications import StoredVerifications  # noqa: PLC0415 -- as above

        self.definition = definition
        self.requests: Requests = StoredRequests(store, definition.oid, definition.name)
        self.verifications: Verifications = StoredVerifications(store, definition.oid)
        self._target = target
        self._jobs = jobs
        self._stack = stack
        self._queries: Sequence[Query] = ()

    async def begin(self, answer: Mapping[str, Any], application_name: str) -> None:
        from subscriber.sinks.postgres.snapshots import read_snapshot  # noqa: PLC0415 -- as above

        reading = read_snapshot(self._target, answer["target_snapshot"], self._jobs, application_name=application_name)
        self._queries = await self._stack.enter_async_context(reading)

    async def snapshot(self, lsn: Lsn, tables: Collection[TableName], waiting: Callable[[str], None]) -> Sequence[Query]:
        return self._queries


def _require_native(settings: Settings) -> None:
    if settings.create_tables:
        raise ConfigurationError(
            "create_tables is not available for a PostgreSQL target: its tables must be those of the publisher",
            hint="copy them with pg_dump --schema-only | psql",
        )
    if (value := settings.schema_change) not in ("error", "add", "follow"):
        given = f"schema_change = {value}" if isinstance(value, str) else "a function for schema_change"
        raise ConfigurationError(
            f"{given} is not available for a PostgreSQL target, which behaves as a native subscription", hint="use error or add or follow"
        )
