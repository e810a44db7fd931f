"""The databases of SQLAlchemy as a kind of target: see :mod:`subscriber.catalog.target_kind`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from subscriber.catalog import Catalog, Definition, Observation
from subscriber.catalog.snapshot_requests import Requests, StoredRequests
from subscriber.catalog.store import Store
from subscriber.catalog.verifications import StoredVerifications, Verifications
from subscriber.config import Settings, SubscriptionOptions
from subscriber.errors import ConfigurationError
from subscriber.interfaces import PublishedTable, Sink, TableName
from subscriber.interfaces.schema import SchemaProgress, Section
from subscriber.interfaces.sequences import PublishedSequence, SequenceResult
from subscriber.interfaces.table_schema import DatabaseSchema, SchemaDifference
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.required_packages import requiring

if TYPE_CHECKING:
    from subscriber.sinks.sqlalchemy.snapshots import SnapshotSessions

__all__ = ["SqlAlchemyKind"]

_EXTRAS: Final = {"sqlite": "sqlite", "mysql": "mysql", "mariadb": "mysql"}
"""The extra that installs the driver of each kind of database."""


class SqlAlchemyKind:
    """``sqlite:///file.db``, ``mariadb://…``, and every URL whose scheme has no kind of its own."""

    noun = "a database of SQLAlchemy"
    repairs = True

    def sink(self, target: str, options: SubscriptionOptions, settings: Settings, *, defined: bool) -> Sink:
        if settings.schema_change == "follow" and target.partition("://")[0].lower().partition("+")[0] not in _EXTRAS:
            raise ConfigurationError(
                "schema_change = follow is not available for this kind of database", hint="use schema_change = add, error or ignore"
            )
        with _requiring(target):
            from subscriber.sinks.sqlalchemy.sink import SqlAlchemySink  # noqa: PLC0415 -- its drivers come with an extra

            return SqlAlchemySink(target, options=options, settings=settings, defined=defined)

    async def open_catalog(self, target: str, application_name: str) -> Catalog:
        with _requiring(target):
            from subscriber.sinks.sqlalchemy.catalog.subscriptions import SqlAlchemyCatalog  # noqa: PLC0415 -- as above

            return await SqlAlchemyCatalog.open(target)

    async def observe(self, target: str) -> Sequence[Observation]:
        with _requiring(target):
            from subscriber.sinks.sqlalchemy.catalog.subscriptions import observe  # noqa: PLC0415 -- as above

            return await observe(target)

    async def copy_schema(
        self, target: str, tables: Sequence[PublishedTable], schema: DatabaseSchema, sections: Sequence[Section], progress: SchemaProgress
    ) -> list[str]:
        with _requiring(target):
            from subscriber.sinks.sqlalchemy.schema_objects import copy_schema  # noqa: PLC0415 -- as above

            return await copy_schema(target, tables, schema, sections, progress)

    async def compare_schema(self, target: str, tables: Sequence[PublishedTable], schema: DatabaseSchema) -> list[SchemaDifference]:
        with _requiring(target):
            from subscriber.sinks.sqlalchemy.schema_objects import compare_schema  # noqa: PLC0415 -- as above

            return await compare_schema(target, tables, schema)

    async def set_sequences(
        self, target: str, sequences: Sequence[PublishedSequence], *, force: bool, dry_run: bool
    ) -> list[SequenceResult]:
        with _requiring(target):
            from subscriber.sinks.sqlalchemy.sequences import set_sequences  # noqa: PLC0415 -- as above

            return await set_sequences(target, sequences, force=force, dry_run=dry_run)

    @contextlib.asynccontextmanager
    async def compared(self, target: str, name: str, jobs: int) -> AsyncIterator[_ComparedDatabase]:
        async with contextlib.AsyncExitStack() as stack:
            with _requiring(target):
                from subscriber.sinks.sqlalchemy.catalog.subscriptions import SqlAlchemyCatalog  # noqa: PLC0415 -- as above
                from subscriber.sinks.sqlalchemy.snapshots import SnapshotSessions  # noqa: PLC0415 -- as above

                catalog = await SqlAlchemyCatalog.open(target)
            stack.push_async_callback(catalog.close)
            definition = await catalog.find(name)
            sessions = await stack.enter_async_context(SnapshotSessions.open(target, jobs))
            yield _ComparedDatabase(sessions, catalog.store, definition)


class _ComparedDatabase:
    """See :class:`subscriber.catalog.target_kind.ComparedTarget`. Its sessions begin their own snapshots, if the database has any."""

    def __init__(self, sessions: SnapshotSessions, store: Store, definition: Definition) -> None:
        self.definition = definition
        self.requests: Requests = StoredRequests(store, definition.oid, definition.name)
        self.has_snapshots = sessions.has_snapshots
        self.verifications: Verifications = StoredVerifications(store, definition.oid)
        self._sessions = sessions

    async def begin(self, answer: Mapping[str, Any], application_name: str) -> None:
        await self._sessions.begin()

    async def snapshot(self, lsn: Lsn, tables: Collection[TableName], waiting: Callable[[str], None]) -> SnapshotSessions:
        return self._sessions


def _requiring(target: str) -> contextlib.AbstractContextManager[None]:
    kind = target.partition("://")[0].lower()
    return requiring(f'a target of kind "{kind}"', _EXTRAS.get(kind.partition("+")[0], "sqlalchemy"))
