"""The status of a subscription, and the condition that ends a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from subscriber.apply.apply_times import ApplyTimes
from subscriber.apply.tables.table_synchronization import ReconciledRows
from subscriber.catalog.verifications import TableVerification
from subscriber.errors import SubscriberError
from subscriber.interfaces import ApplyStatistics, RelayLogDetails, Retry, TableEntry, TableName, WorkerState
from subscriber.protocol.lsn import INVALID_LSN, Lsn

__all__ = ["Status", "TableCopy", "Until"]


@dataclass(frozen=True, slots=True)
class Until:
    """The condition that ends :meth:`Subscription.run`.

    With an ``lsn``, the run ends when everything up to it is in the target. Without one, it ends when it has caught up with the publisher
    as of the start of the run. In both cases all tables are synchronized, and no table is ahead of the others, as one may be directly
    after its copy.

    If a published table is not replicated at the end, the run raises a RelationError that names it. ``allow_missing_tables`` accepts that.
    It also raises one if a table is parked.
    """

    lsn: Lsn | None = None
    allow_missing_tables: bool = False


@dataclass(frozen=True, slots=True)
class TableCopy:
    """Progress of the copy of one table.

    Attributes:
        rows: rows read so far.
        estimated_rows: the estimated total, or None.
        done: whether all rows are in the target.
        reconciled: what was done, if the table was not copied, but compared.
    """

    rows: int
    estimated_rows: int | None
    done: bool
    reconciled: ReconciledRows | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The status of a run. The LSNs are those of the standby status update: received >= applied >= flushed.

    Attributes:
        received: the last LSN received from the publisher.
        applied: changes up to here are visible in the target.
        flushed: changes up to here are durable in the target.
        state: what the run does.
        retry: with state RETRYING, the failed attempt.
        publisher_lsn: the end of the publisher's WAL, as far as known.
        streaming: whether there is a connection that follows the slot.
        tables: the subscription's tables with their states.
        copies: the tables that were copied since the subscription object was created.
        copying: whether a table is being synchronized, or waits for its turn, and its latest attempt did not fail.
        copies_begin: when ``copy_window`` opens, in seconds since 1970, if a table waits for that.
        table_retries: the failed synchronizations of tables that are retried.
        left_out: published tables that the subscription does not replicate, each with the reason.
        last_error: the latest error of this run, even if its cause was fixed since.
        latest_error: the latest error since the subscription object was created, also of an earlier run.
        last_error_time: when it occurred, in seconds since 1970.
        limited: whether changes wait because of ``max_apply_rate``.
        lag_seconds: how long ago the publisher's WAL ended where the target is durable now; 0: no later WAL is known; None: not measured.
        times: how long changes take, counted since the subscription object was created.
        statistics: counted since the subscription object was created.
        last_message: when the publisher last sent something, in seconds since 1970. None without a stream.
        relay_log: the relay log of this run; None: there is none.
        verifications: with ``verify_interval``, the last verification of each table.
    """

    received: Lsn = INVALID_LSN
    applied: Lsn = INVALID_LSN
    flushed: Lsn = INVALID_LSN
    state: WorkerState = WorkerState.CONNECTING
    retry: Retry | None = None
    publisher_lsn: Lsn = INVALID_LSN
    streaming: bool = False
    tables: dict[TableName, TableEntry] = field(default_factory=dict)
    copies: dict[TableName, TableCopy] = field(default_factory=dict)
    copying: bool = False
    copies_begin: float | None = None
    table_retries: dict[TableName, Retry] = field(default_factory=dict)
    left_out: dict[TableName, str] = field(default_factory=dict)
    last_error: SubscriberError | None = None
    latest_error: SubscriberError | None = None
    last_error_time: float | None = None
    limited: bool = False
    lag_seconds: float | None = None
    times: ApplyTimes = field(default_factory=ApplyTimes)
    statistics: ApplyStatistics = field(default_factory=ApplyStatistics)
    last_message: float | None = None
    relay_log: RelayLogDetails | None = None
    verifications: dict[TableName, TableVerification] = field(default_factory=dict)
