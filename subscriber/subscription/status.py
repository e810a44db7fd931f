"""What a subscription tells of itself, and how far it is asked to go."""

from __future__ import annotations

from dataclasses import dataclass, field

from subscriber.abc import ApplyStatistics, Retry, TableEntry, TableName, WorkerState
from subscriber.errors import SubscriberError
from subscriber.protocol.lsn import INVALID_LSN, Lsn

__all__ = ["Status", "TableCopy", "Until"]


@dataclass(frozen=True, slots=True)
class Until:
    """When :meth:`Subscription.run` ends by itself.

    With an ``lsn``, it ends when everything up to there is in the target. Without one, it ends when it has caught up with the publisher
    as of the start of the run. In both cases all tables are synchronized, and none is ahead of the others, as a table is directly after
    its copy.

    If a published table is not replicated then, the run ends with a RelationError that names it; ``allow_missing_tables`` accepts that.
    """

    lsn: Lsn | None = None
    allow_missing_tables: bool = False


@dataclass(frozen=True, slots=True)
class TableCopy:
    """How far the copy of one table is.

    Attributes:
        rows: read so far.
        estimated_rows: how many there may be, or None.
        done: all of them are in the target.
    """

    rows: int
    estimated_rows: int | None
    done: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The status of a run. LSNs are those of the standby status update: received >= applied >= flushed.

    Attributes:
        received: the last LSN from the publisher.
        applied: up to here, changes are visible in the target.
        flushed: up to here, changes are durable in the target.
        state: what the run does.
        retry: with state RETRYING, the attempt that failed.
        publisher_lsn: where the publisher's WAL ends, as far as it is known.
        streaming: whether there is a connection that follows the slot.
        tables: the subscription's tables with their states.
        copies: the tables that were copied since the subscription object was created.
        left_out: published tables that the subscription does not replicate, each with the reason.
        last_error: the latest error of this run, even if its cause was fixed since.
        statistics: counted since the subscription object was created.
        last_message: when the publisher last sent something, in seconds since 1970; None without a stream.
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
    left_out: dict[TableName, str] = field(default_factory=dict)
    last_error: SubscriberError | None = None
    statistics: ApplyStatistics = field(default_factory=ApplyStatistics)
    last_message: float | None = None
