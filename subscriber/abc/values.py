"""What passes through the seams: names, states, positions, batches, counters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal

from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.messages import Relation
from subscriber.transaction.model import Transaction
from subscriber.types.facts import TypeFact

__all__ = [
    "CATALOG_SCHEMA",
    "ApplyStatistics",
    "Batch",
    "Capabilities",
    "CopyFormat",
    "Finding",
    "Position",
    "PublishedTable",
    "RelationGate",
    "SnapshotOrder",
    "SubscriptionState",
    "TableEntry",
    "TableName",
    "TableState",
    "TargetActivity",
    "TwoPhaseState",
    "WorkerActivity",
]


CATALOG_SCHEMA: Final = "subscriber"
"""The schema of our own tables in a target. A publisher that is itself a target has it too: it is never replicated."""


@dataclass(frozen=True, slots=True, order=True)
class TableName:
    """Schema-qualified name; publisher and target use the same one."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}.{self.name}"


class TableState(StrEnum):
    """``pg_subscription_rel.srsubstate``, as native."""

    INIT = "i"
    """Nothing copied."""
    DATASYNC = "d"
    """A copy is under way: after a crash it starts from zero."""
    FINISHEDCOPY = "f"
    """Copied; its own slot catches up. Never copied again."""
    SYNCDONE = "s"
    """Caught up to the entry's LSN; the apply worker applies transactions whose final LSN is at or past it."""
    READY = "r"
    """In the apply worker's hands."""


class TwoPhaseState(StrEnum):
    """``pg_subscription.subtwophasestate``, as native."""

    DISABLED = "d"
    PENDING = "p"
    """Asked for; becomes enabled once all tables are ready."""
    ENABLED = "e"


@dataclass(frozen=True, slots=True)
class Position:
    """Up to where the target has everything, durably; and whose WAL the LSN belongs to."""

    slot_name: str
    system_identifier: str
    timeline: int
    lsn: Lsn


@dataclass(frozen=True, slots=True)
class TableEntry:
    """State of one table of the subscription. ``lsn`` belongs to SYNCDONE and READY, else None."""

    state: TableState
    lsn: Lsn | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionState:
    """What the sink's catalog holds of the subscription.

    ``oid`` is unique in the target's cluster: names of slots and prepared transactions are made with it.
    ``target_identifier`` tells this target from every other one that may use the same publisher.
    ``slot_name`` is None until the slot's creation was begun; ``position`` is None until it was done.
    ``managed``: the catalog defines it, with the publisher's connection string; else its command line does.
    ``pending_refresh``: the publications were changed, and the tables have to follow, with a copy (True) or without (False).
    ``generation`` grows with every verb that claims it: what was known of an earlier one holds no longer.
    ``skip_lsn`` is the finish LSN of a transaction to be skipped, or INVALID_LSN.
    ``taken``: the target has what ends up to there, though it is not the position yet, and passes over it when it comes again: no table may
    be handed over to the apply worker below it. INVALID_LSN: no further than the position.
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
    pending_refresh: bool | None = None
    skip_lsn: Lsn = INVALID_LSN
    taken: Lsn = INVALID_LSN


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedTable:
    """One table of the subscribed publications as the publisher's catalog describes it.

    Attributes:
        name: what its changes are sent as (the partitioned root under publish_via_partition_root).
        relation_id: its oid at the publisher.
        kind: ``pg_class.relkind``: ``r`` ordinary, ``p`` partitioned.
        columns: published columns in order; generated ones only where the publisher sends them.
        key_columns: columns of the replica identity (empty for nothing or a missing key; all for full).
        replica_identity: ``pg_class.relreplident``.
        row_filters: the publications' row filters as SQL expressions to be OR'ed; empty: the whole table.
        size: bytes of its heap (of all partitions together), 0 if unknown.
        estimated_rows: ``reltuples``, or None if never analyzed.
        generated: of ``columns``, those that are generated at the publisher.
        column_types: type oid a column, in the order of ``columns``.
        column_modifiers: ``atttypmod`` a column, likewise.
        not_null: columns that are NOT NULL there.
        primary_key: columns of its primary key in the key's order, if all of them are published; else empty.
        types: what the publisher's catalog says of all types of the columns that are not built in, and of what those are made of.
        changes: whether UPDATE or DELETE of it is published (``publish``).
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotOrder:
    """A table's published rows under an exported snapshot, for whoever reads them by sessions of his own.

    Attributes:
        snapshot_name: for SET TRANSACTION SNAPSHOT, while the session that exported it lives.
        connection: keywords and values for libpq: the server that exported it; without any password.
        setup: statements that make values as unambiguous as in a session of ours; before the transaction begins.
        sources: what to select from, ``FROM … WHERE …``: the parts that together are the table's rows, none twice.
        checks: a query a source, for the transaction that reads it: a name may come to stand for another table. It gives one row of two
            truth values. Before the source is read, the first has to be true, and behind it, in the same transaction, both; if they are
            not, all that was read is of no use.
        consistent_point: the snapshot holds what was committed before.
    """

    snapshot_name: str
    connection: str
    setup: tuple[str, ...]
    sources: tuple[str, ...]
    checks: tuple[str, ...]
    consistent_point: Lsn


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, found before it does harm.

    Attributes:
        severity: ``error``: replication will not work; ``warning``: it will, with a restriction or until something happens.
        message: what, one line.
        hint: the remedy.
        table: the published table that it is about; None: it is about no table, or about several.
        alone: the error keeps only this table from being synchronized, or its changes from being applied: it refuses no verb and no run.
            The table's own synchronization meets it, and retries until it is fixed.
        stops: with ``alone``, whether replication of all tables stops at the first change that the error affects. ``without_copy``: only if
            the table is not copied; otherwise its synchronization keeps its changes back.
    """

    severity: Literal["error", "warning"]
    message: str
    hint: str
    table: TableName | None = None
    alone: bool = False
    stops: Literal["never", "without_copy", "always"] = "never"

    @property
    def refuses(self) -> bool:
        """Whether nothing can be made as long as this is so."""
        return self.severity == "error" and not self.alone


@dataclass(frozen=True, slots=True)
class TargetActivity:
    """What the target does for the sessions of a sink, as another session sees it.

    Attributes:
        idle: seconds for which it has done nothing for the sessions that apply; infinite without such a session.
        tables_idle: the same for the sessions of table synchronizations.
        waits: one sentence for each session that waits for a lock, with who holds it. The same wait is the same text each time.
    """

    idle: float
    tables_idle: float = math.inf
    waits: tuple[str, ...] = ()


class CopyFormat(StrEnum):
    """Format of COPY's data, passed through as it came."""

    TEXT = "text"
    BINARY = "binary"


RelationGate = Callable[[Relation, Lsn], bool]
"""``gate(relation, final_lsn)``: shall changes of this relation, in a transaction with this final LSN, be applied?

False for tables that are not of the subscription, or whose own synchronization still does that work. The answer for one pair does not
change while a batch is applied.
"""


@dataclass(frozen=True, slots=True)
class Batch:
    """Committed transactions to be applied in this order as one; it ends at a commit."""

    transactions: tuple[Transaction, ...]
    gate: RelationGate

    @property
    def end_lsn(self) -> Lsn:
        """The position once the batch is durable."""
        return self.transactions[-1].end_lsn


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a sink can do; the compliance suite demands what is declared. Nothing asks for a sink by its name."""

    transactional: bool = True
    """Data and position become durable together."""
    two_phase: bool = False
    """Prepared transactions of the publisher are kept until their COMMIT PREPARED."""
    prepares_in_target: bool = False
    """They are prepared in the target itself, as it has transactions of that kind: what it has against their changes it says at once."""
    truncate: bool = True
    creates_tables: bool = False
    """It makes published tables that are missing, where ``Settings.create_tables`` says so."""
    follows_columns: bool = False
    """It does about columns that were added on the publisher what ``Settings.schema_change`` says."""
    upserts: bool = False
    """An INSERT of a key that is there overwrites the row, where ``Settings.insert_conflict`` says so."""
    any_key: bool = False
    """Any unique key of the target that lies within the publisher's replica identity finds a row. Else the primary key, or the
    target's own replica identity, as natively."""
    parallel_copy: bool = False
    """:meth:`TableSink.copy` may run several times at once for one table."""
    parallel_apply: bool = False
    """Streamed transactions can be applied before their end: :meth:`Sink.open_parallel`."""
    described: bool = False
    """It needs to know what the publisher's catalog says of the tables: :meth:`Sink.describe_tables`."""
    given_tables: bool = True
    """Its tables are there before, as somebody made them: what they lack is found, what they have more is left alone. Else it makes
    them itself, of what is described."""
    constraints: bool = True
    """Its tables refuse keys that are there, NULL where it is not allowed, and texts that are none of their type."""
    shared_tables: bool = True
    """Others may write into its tables as well."""
    several_subscriptions: bool = True
    """One target holds any number of subscriptions."""
    binary: bool = True
    """It takes values in the binary format."""
    counts_missing: bool = True
    """Rows that a change did not find are in :attr:`Sink.statistics`. Else somebody else applies, and counts."""
    copies_visible: bool = True
    """Rows are seen once they are copied. Else not before the table is in the apply worker's hands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerActivity:
    """What one worker does, as pg_stat_subscription shows it, and ours behind it.

    Attributes:
        table: whose synchronization it is; None: the apply worker.
        received, latest_end: up to where changes were received; what was last reported to the publisher as durable.
        sent_at, received_at, reported_at: when the publisher sent the last message; when it came; when we reported last. Seconds since
            1970, or None.
        applied, flushed: visible in the target; durable there.
        transactions, changes: applied since the process started.
        transactions_per_second, changes_per_second: over the last seconds.
        copied_rows: of a copy under way.
        estimated_rows: of its table, None if unknown.
        details: :class:`subscriber.abc.WorkerDetails` as JSON, or None.
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
    """Counters since the sink was opened, for status and tests. Names are those of pg_stat_subscription_stats where it has them."""

    transactions: int = 0
    parallel_transactions: int = 0
    """Those of them that were applied while they were streamed."""
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
    skipped_tables: set[str] = field(default_factory=set)
