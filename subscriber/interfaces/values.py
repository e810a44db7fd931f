"""The values of the interfaces: names, states, positions, batches, counters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Literal

from subscriber.config import CopyData
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.quoting import quote_identifier

if TYPE_CHECKING:
    # `subscriber status` needs none of these
    from subscriber.errors import RelationError
    from subscriber.protocol.messages import Relation
    from subscriber.transaction.model import Transaction
    from subscriber.types.pg_type import TypeFact

__all__ = [
    "CATALOG_SCHEMA",
    "ApplyStatistics",
    "Batch",
    "CopyFormat",
    "Finding",
    "Position",
    "PublishedTable",
    "RelationGate",
    "SubscriptionState",
    "SyncMode",
    "TableEntry",
    "TableName",
    "TableState",
    "TargetActivity",
    "TwoPhaseState",
    "WorkerActivity",
    "everything_applies",
]


CATALOG_SCHEMA: Final = "subscriber"
"""The schema of the subscriber's own tables in a target. A publisher that is also a target has it too. It is never replicated."""


@dataclass(frozen=True, slots=True, order=True)
class TableName:
    """A schema-qualified name: the target's, where the subscription gives a table another one (``map``)."""

    namespace: str
    name: str

    @property
    def pair(self) -> tuple[str, str]:
        """Schema and name."""
        return self.namespace, self.name

    @property
    def quoted(self) -> str:
        """The name in SQL."""
        return f"{quote_identifier(self.namespace)}.{quote_identifier(self.name)}"

    def __str__(self) -> str:
        return f"{self.namespace}.{self.name}"


class TableState(StrEnum):
    """``pg_subscription_rel.srsubstate``, with the values of PostgreSQL, and one more."""

    INIT = "i"
    """Nothing copied."""
    DATASYNC = "d"
    """A copy is in progress. After a crash it starts from the beginning."""
    FINISHEDCOPY = "f"
    """Copied; its own slot catches up. It is never copied again."""
    SYNCDONE = "s"
    """Caught up to the entry's LSN. The apply worker applies transactions whose final LSN is at or past it."""
    READY = "r"
    """The apply worker applies its changes."""
    PARKED = "p"
    """Its changes are left out from the entry's LSN on, because the target rejected one. Not a state of PostgreSQL's."""


class TwoPhaseState(StrEnum):
    """``pg_subscription.subtwophasestate``, as in PostgreSQL: DISABLED, PENDING, ENABLED."""

    DISABLED = "d"
    PENDING = "p"
    """Requested; becomes enabled once all tables are ready."""
    ENABLED = "e"


@dataclass(frozen=True, slots=True)
class Position:
    """The durable position of the target, and the system and timeline that the LSN belongs to.

    Attributes:
        slot_name: the slot that the publisher keeps for it.
        system_identifier: of the publisher, from IDENTIFY_SYSTEM.
        timeline: of the publisher.
        lsn: everything up to there is applied.
    """

    slot_name: str
    system_identifier: str
    timeline: int
    lsn: Lsn


class SyncMode(StrEnum):
    """What the synchronization of a table does with rows that the target has."""

    COPY = "c"
    """They stay. The publisher's rows are added."""
    RECONCILE = "r"
    """They are compared with the publisher's rows, and only what differs is written."""
    REPLACE = "w"
    """They are replaced by the publisher's, range by range, without a comparison."""


@dataclass(frozen=True, slots=True)
class TableEntry:
    """State of one table of the subscription. ``lsn`` is set for SYNCDONE, READY and PARKED, else None.

    ``mode`` has a meaning in INIT and DATASYNC. A target that does not store it copies the table. A PARKED table has the ``error`` that
    the target rejected it with, one line, and the time in seconds since 1970 (``since``).
    """

    state: TableState
    lsn: Lsn | None = None
    mode: SyncMode = SyncMode.COPY
    error: str | None = None
    since: float | None = None

    @property
    def is_synchronized(self) -> bool:
        """Whether the table is SYNCDONE or READY."""
        return self.state in {TableState.SYNCDONE, TableState.READY}


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionState:
    """The subscription as stored in the sink's catalog.

    ``oid`` is unique in the target's cluster, and part of the names of slots and prepared transactions.
    ``target_identifier`` distinguishes this target from every other one that may use the same publisher.
    ``slot_name`` is None until the creation of the slot begins; ``position`` is None until it is done.
    ``managed``: the catalog defines the subscription, with its connection string; otherwise its command line does.
    ``pending_refresh``: the publications were changed and the tables must be refreshed, with this ``copy_data``.
    ``generation`` grows each time a verb claims the subscription. State read under an earlier generation is outdated.
    ``skip_lsn`` is the finish LSN of the transaction to skip, or INVALID_LSN.
    ``taken``: the target has applied everything that ends up to there, although the position is lower, and skips it when it comes again.
    No table may be handed over to the apply worker below it. INVALID_LSN: nothing beyond the position.
    """

    oid: int
    name: str
    target_identifier: str
    slot_name: str | None
    publications: tuple[str, ...]
    two_phase: TwoPhaseState
    position: Position | None
    managed: bool = False
    generation: int = 0
    pending_refresh: CopyData | None = None
    skip_lsn: Lsn = INVALID_LSN
    taken: Lsn = INVALID_LSN


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedTable:
    """One published table as the publisher's catalog describes it.

    Attributes:
        name: the name in its changes (that of the partitioned root under publish_via_partition_root).
        relation_id: its oid on the publisher.
        kind: ``pg_class.relkind``: ``r`` ordinary, ``p`` partitioned.
        columns: published columns in order. Generated columns only if the publisher sends them.
        key_columns: columns of the replica identity (none for NOTHING or a missing key; all for FULL).
        replica_identity: ``pg_class.relreplident``.
        row_filters: the publications' row filters as SQL expressions, combined with OR; empty: the whole table.
        size: bytes of its heap (of all partitions together), 0 if unknown.
        estimated_rows: ``reltuples``, or None if never analyzed.
        generated: those of ``columns`` that are generated on the publisher.
        column_types: type oid of each column, in the order of ``columns``.
        column_modifiers: ``atttypmod`` of each column, in the same order.
        not_null: columns that are NOT NULL there.
        primary_key: columns of its primary key in the key's order, if all of them are published; else empty.
        types: the catalog entries of all column types that are not built in, and of their parts.
        changes: whether its UPDATEs or DELETEs are published (``publish``).
        all_changes: whether both are.
        own_name: its name on the publisher, if the subscription gives it another one. Then all names here are the target's, except those
            in ``row_filters``. None: the same.
        own_columns: the names of ``columns`` on the publisher, if the subscription renames some. Empty: the same.
    """

    name: TableName
    relation_id: int
    kind: str
    columns: tuple[str, ...]
    key_columns: tuple[str, ...]
    replica_identity: str
    row_filters: tuple[str, ...] = ()
    size: int = 0
    estimated_rows: int | None = None
    generated: tuple[str, ...] = ()
    column_types: tuple[int, ...] = ()
    column_modifiers: tuple[int, ...] = ()
    not_null: frozenset[str] = frozenset()
    primary_key: tuple[str, ...] = ()
    types: tuple[TypeFact, ...] = ()
    changes: bool = True
    all_changes: bool = True
    own_name: TableName | None = None
    own_columns: tuple[str, ...] = ()

    @property
    def publisher_name(self) -> TableName:
        """Its name on the publisher."""
        return self.own_name or self.name

    @property
    def publisher_columns(self) -> tuple[str, ...]:
        """The names of its columns on the publisher."""
        return self.own_columns or self.columns

    @property
    def renamed(self) -> Mapping[str, str]:
        """The publisher's name of each column, if some are renamed; else empty."""
        return dict(zip(self.columns, self.own_columns, strict=True)) if self.own_columns else {}


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem, found before it does harm.

    Attributes:
        severity: ``error``: replication will not work; ``warning``: it works with a restriction, or until something happens.
        message: the problem, one line.
        hint: how to fix it.
        table: the published table; None: the problem concerns no table, or several.
        alone: the error affects only the synchronization or the changes of this table. It does not prevent any verb or run: the table's
            own synchronization reports it, and retries until it is fixed.
        stops: with ``alone``, whether the first affected change stops the replication of all tables. ``without_copy``: only if the table
            is not copied; otherwise its synchronization holds its changes back.
    """

    severity: Literal["error", "warning"]
    message: str
    hint: str
    table: TableName | None = None
    alone: bool = False
    stops: Literal["never", "without_copy", "always"] = "never"

    @classmethod
    def revoked(cls, function: str, place: str, without: str | None) -> Finding:
        """The role may not use a function, which all roles may use by default. ``without``: what a run does instead; None: nothing."""
        message = f"permission denied for function {function} {place}"
        hint = "GRANT EXECUTE ON FUNCTION … TO the role"
        return cls("error", message, hint) if without is None else cls("warning", f"{message}: {without}", hint)

    @classmethod
    def of(cls, error: RelationError) -> Finding:
        """The finding of an error that a run would raise."""
        return cls("error", str(error), error.hint or "")

    @property
    def refuses(self) -> bool:
        """Whether this prevents creating or running the subscription until it is fixed."""
        return self.severity == "error" and not self.alone


@dataclass(frozen=True, slots=True)
class TargetActivity:
    """The work of the target for a sink's sessions, as another session sees it.

    Attributes:
        idle: seconds without work for the sessions that apply; infinite without such a session.
        tables_idle: the same for the sessions of table synchronizations.
        waits: one sentence for each session that waits for a lock, with the holder of the lock. The same wait always has the same text.
    """

    idle: float
    tables_idle: float = math.inf
    waits: tuple[str, ...] = ()


class CopyFormat(StrEnum):
    """Format of COPY data: ``text`` or ``binary``. The data is passed on unchanged."""

    TEXT = "text"
    BINARY = "binary"


RelationGate = Callable[["Relation", Lsn], bool | None]
"""``gate(relation, final_lsn)``: whether to apply changes of this relation in a transaction with this final LSN.

False for tables that are not part of the subscription, or that are still being synchronized. None for tables that the target may lack:
those that are parked, or that the publisher has dropped. A sink need not distinguish None from False. The answer for a pair does not change
while a batch is applied.
"""


def everything_applies(_relation: Relation, _final_lsn: Lsn) -> bool:
    """A gate that lets all changes through."""
    return True


@dataclass(frozen=True, slots=True)
class Batch:
    """Committed transactions to apply in this order as one. It ends at a commit.

    Attributes:
        transactions: at least one.
        gate: whether to apply the changes of a relation.
    """

    transactions: tuple[Transaction, ...]
    gate: RelationGate

    @property
    def end_lsn(self) -> Lsn:
        """The position once the batch is durable."""
        return self.transactions[-1].end_lsn


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerActivity:
    """The activity of one worker: the columns of pg_stat_subscription, then further ones.

    Attributes:
        table: the table that it synchronizes; None: the apply worker.
        received, latest_end: position up to which changes were received; durable position last reported to the publisher.
        sent_at, received_at, reported_at: when the publisher sent the last message; when it arrived; when the worker last reported.
            Seconds since 1970, or None.
        applied, flushed: position that is visible in the target; position that is durable there.
        transactions, changes: applied since the process started.
        transactions_per_second, changes_per_second: over the last seconds.
        copied_rows: rows copied so far.
        estimated_rows: of its table, None if unknown.
        details: :class:`subscriber.interfaces.WorkerDetails` as JSON, or None.
    """

    table: TableName | None = None
    received: Lsn | None = None
    latest_end: Lsn | None = None
    sent_at: float | None = None
    received_at: float | None = None
    reported_at: float | None = None
    applied: Lsn | None = None
    flushed: Lsn | None = None
    transactions: int = 0
    changes: int = 0
    transactions_per_second: float = 0.0
    changes_per_second: float = 0.0
    copied_rows: int = 0
    estimated_rows: int | None = None
    details: str | None = None


@dataclass(slots=True)
class ApplyStatistics:
    """Counters since the sink was opened, for status and tests. They have the names of pg_stat_subscription_stats where it has them."""

    transactions: int = 0
    parallel_transactions: int = 0
    """Transactions that another session than the apply session has applied: while they were received, or as one of ``apply_workers``."""
    inserts: int = 0
    updates: int = 0
    deletes: int = 0
    truncates: int = 0
    apply_error_count: int = 0
    sync_error_count: int = 0
    confl_insert_exists: int = 0
    confl_update_origin_differs: int = 0
    confl_update_exists: int = 0
    confl_update_missing: int = 0
    confl_delete_origin_differs: int = 0
    confl_delete_missing: int = 0
    confl_multiple_unique_conflicts: int = 0
    rolled_back_changes: int = 0
    """Changes that the publisher sent although it had rolled them back. They were left out."""
    skipped_tables: set[str] = field(default_factory=set)
    tables: dict[TableName, int] = field(default_factory=dict)
    """Inserts, updates and deletes by table, where the sink counts them: PostgreSQL and SQLAlchemy do."""
    table_bytes: dict[TableName, int] = field(default_factory=dict)
    """Bytes of their messages, as the publisher sent them."""
    copied_bytes: dict[TableName, int] = field(default_factory=dict)
    """Bytes that the copy of each table has read."""

    def add(self, more: ApplyStatistics) -> None:
        """Add other counters to these."""
        for counter in _COUNTERS:
            if added := getattr(more, counter):
                setattr(self, counter, getattr(self, counter) + added)
        self.skipped_tables |= more.skipped_tables
        for name, changes in more.tables.items():
            self.tables[name] = self.tables.get(name, 0) + changes
        for name, size in more.table_bytes.items():
            self.table_bytes[name] = self.table_bytes.get(name, 0) + size

    @property
    def changes(self) -> int:
        """The number of all changes."""
        return self.inserts + self.updates + self.deletes + self.truncates


_COUNTERS: Final = tuple(each.name for each in fields(ApplyStatistics) if each.type == "int")
"""The counters that are not by table. They are found once, because each batch is added."""
