"""The interface of a kind of target: what the URLs of one scheme mean, and what the verbs can do with such a target.

A package registers a class as an entry point of the group ``subscriber.targets``. Its name is the scheme in lower case, without a driver
(``mysql`` for ``mysql+asyncmy://…``). It is called without arguments. What verbs besides ``run`` need are abilities: a kind has one by
implementing its methods. PostgreSQL, SQLAlchemy's databases and lakes are registered in the same way.

A kind imports a driver when a method needs it, so that ``subscriber --help`` and another kind do not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from subscriber.catalog.definition import Definition
from subscriber.catalog.interface import Catalog
from subscriber.catalog.observation import Observation
from subscriber.config import Settings, SubscriptionOptions
from subscriber.interfaces import ComparedTables, PublishedTable, Query, Sink, TableName
from subscriber.protocol.lsn import Lsn

if TYPE_CHECKING:
    # of verbs that compare and migrate
    from subscriber.catalog.snapshot_requests import Requests
    from subscriber.catalog.verifications import Verifications
    from subscriber.interfaces.schema import SchemaProgress, Section
    from subscriber.interfaces.sequences import PublishedSequence, SequenceResult
    from subscriber.interfaces.table_schema import DatabaseSchema, SchemaDifference

__all__ = ["CatalogKind", "ComparedKind", "ComparedTarget", "PublishingKind", "SchemaKind", "SequencesKind", "TargetKind"]


class TargetKind(Protocol):
    """One kind of target. Its methods get the target's URL as the user wrote it.

    All methods raise ConfigurationError if the URL is invalid or a required package is not installed. Those that connect raise
    TargetUnavailable and TargetError, too.
    """

    @property
    def noun(self) -> str:
        """The kind in messages, such as "a lake"."""
        ...

    def sink(self, target: str, options: SubscriptionOptions, settings: Settings, *, defined: bool) -> Sink:
        """Make the sink. It does not connect yet.

        Args:
            target: the URL.
            options: of the subscription.
            settings: of the process. Reject those that do not apply to this kind.
            defined: whether the target's catalog defines the subscription. Then the sink does not create one that was dropped or renamed.
        """
        ...


@runtime_checkable
class CatalogKind(Protocol):
    """Its targets store definitions of subscriptions: ``create``, ``alter``, ``drop``, ``status``, and ``run`` without a connection."""

    async def open_catalog(self, target: str, application_name: str) -> Catalog:
        """Connect to the catalog. Create the catalog if it does not exist."""
        ...

    async def observe(self, target: str) -> Sequence[Observation]:
        """Read what the target knows of its subscriptions, sorted by name. Nothing is created."""
        ...


@runtime_checkable
class SchemaKind(Protocol):
    """Its targets have tables with keys and indexes: ``schema copy`` and ``schema diff``."""

    async def copy_schema(
        self, target: str, tables: Sequence[PublishedTable], schema: DatabaseSchema, sections: Sequence[Section], progress: SchemaProgress
    ) -> list[str]:
        """Create what the target lacks. Return what was left out, one line each.

        Args:
            target: the URL.
            tables: as published.
            schema: of these tables on the publisher.
            sections: which parts.
            progress: told about each object.
        """
        ...

    async def compare_schema(self, target: str, tables: Sequence[PublishedTable], schema: DatabaseSchema) -> list[SchemaDifference]:
        """Compare the schema of the publisher with the target's."""
        ...


@runtime_checkable
class SequencesKind(Protocol):
    """Its targets give numbers to new rows, so that an application can use them: ``sequences sync``, ``migrate``, ``cutover``."""

    async def set_sequences(
        self, target: str, sequences: Sequence[PublishedSequence], *, force: bool, dry_run: bool
    ) -> list[SequenceResult]:
        """Set the target's sequences to those of the publisher.

        Args:
            target: the URL.
            sequences: as the publisher has them.
            force: also set a sequence back that is ahead.
            dry_run: change nothing.
        """
        ...


@runtime_checkable
class PublishingKind(Protocol):
    """Its targets are PostgreSQL databases: pg_dump copies their schema, and they can be publishers, as after a cutover.

    Attributes:
        publishes: True.
    """

    publishes: bool


class ComparedTarget(Protocol):
    """A subscription's target that ``verify`` compares with the publisher. The methods are called in this order, each once.

    Attributes:
        definition: of the subscription.
        requests: to the process that runs it.
        has_snapshots: False: the rows are read while transactions are applied, and what differs is compared again.
        verifications: the stored result of each table's last verification. None: this kind of target does not store them.
    """

    definition: Definition
    requests: Requests
    has_snapshots: bool
    verifications: Verifications | None

    async def begin(self, answer: Mapping[str, Any], application_name: str) -> None:
        """Take a snapshot, or open the one that the process has exported. At this moment the target has the transactions up to one LSN.

        Apply waits for some seconds at most, unless the sink exports snapshots (:class:`subscriber.interfaces.ExportingSink`).

        Args:
            answer: of the process; ``target_snapshot`` is what the sink has exported.
            application_name: for sessions.
        """
        ...

    async def snapshot(self, lsn: Lsn, tables: Collection[TableName], waiting: Callable[[str], None]) -> Sequence[Query] | ComparedTables:
        """Return the snapshot: sessions with a PostgreSQL database, which computes the hashes itself, or the tables of another target.

        Args:
            lsn: of the snapshot.
            tables: those that are synchronized there.
            waiting: told about a long wait.
        """
        ...


@runtime_checkable
class ComparedKind(Protocol):
    """Its targets can be read: ``verify``. The opened sink must be a :class:`subscriber.catalog.snapshot_requests.RequestedSink`.

    Attributes:
        repairs: whether the opened sink is a :class:`subscriber.interfaces.RepairingSink`: ``verify --repair``.
    """

    repairs: bool

    def compared(self, target: str, name: str, jobs: int) -> AbstractAsyncContextManager[ComparedTarget]:
        """Open the target of a subscription.

        Args:
            target: the URL.
            name: of the subscription.
            jobs: how many sessions read it.

        Raises:
            TargetError: the subscription does not exist.
        """
        ...
