"""The state of a subscription as its target's catalog shows it to observers such as ``status``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from subscriber.catalog.definition import Definition
from subscriber.catalog.verifications import TableVerification
from subscriber.interfaces import Retry, TableEntry, TableName, TableState, WorkerActivity, WorkerDetails
from subscriber.protocol.lsn import Lsn

__all__ = ["ApplierObservation", "Observation", "TableObservation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableObservation:
    """One table of a subscription.

    Attributes:
        table: its name.
        entry: its state, as ``pg_subscription_rel`` has it. PARKED if the applier of a lake cannot continue it.
        worker: the latest report of its synchronization, if that runs.
        retry: the failed attempt of its synchronization, if that will be retried.
        verification: its last verification since it was synchronized, if there was one.
    """

    table: TableName
    entry: TableEntry
    worker: WorkerActivity | None = None
    retry: Retry | None = None
    verification: TableVerification | None = None

    @property
    def parked(self) -> str | None:
        """Since when its changes are left out, and why; None: they are not."""
        if self.entry.state is not TableState.PARKED:
            return None
        when = "" if self.entry.since is None else f"{datetime.fromtimestamp(self.entry.since, UTC):%Y-%m-%d %H:%M:%S%z}, "
        return f"since {when}{self.entry.lsn}: {self.entry.error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplierObservation:
    """The applier of a target in which one program lands batches and another one applies them.

    Attributes:
        pid: the id of its process; None: it does not run.
        host: the host on which it runs, or from which it last reported.
        last_report: when it last reported, if its lock cannot be seen: it runs on another host, or the target has no locks.
        engine: the engine that applies.
        lsn: all changes up to this LSN are applied and published; None: none are.
        waiting_batches, waiting_bytes: number and size of the landed batches that are not applied yet. Copies of tables are not counted.
        waiting_copies: number of finished copies of tables that are not in the published snapshot yet.
        waiting_since: when the first transaction in these batches was committed, seconds since 1970; None: nothing waits.
        last_error: the latest error, one line, until it has recovered.
        last_error_time: when that error occurred.
        freshness: the target in seconds (``target``), that of the last round (``last``), the number of ``rounds`` and of those that missed
            the target (``late``), and whether the maximum write rate makes rounds wait (``held``). None: unknown.
        landed_bytes: size of the landed files that this or the last process applied.
        written_bytes: bytes that it wrote to Delta tables and change logs.
        progress: the events of the last rounds, in the form of Structured Streaming's.
        stopped: change logs and histories that it cannot continue, with the reasons. Those of tables are with the tables.
    """

    pid: int | None = None
    host: str | None = None
    last_report: datetime | None = None
    engine: str | None = None
    lsn: Lsn | None = None
    waiting_batches: int = 0
    waiting_bytes: int = 0
    waiting_copies: int = 0
    waiting_since: float | None = None
    last_error: str | None = None
    last_error_time: datetime | None = None
    freshness: Mapping[str, Any] | None = None
    landed_bytes: int | None = None
    written_bytes: int | None = None
    progress: Sequence[Mapping[str, Any]] = ()
    stopped: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """All that a target's catalog stores about one subscription.

    Attributes:
        definition: its definition. ``conninfo`` is None also if the observing role may not read it.
        pid: the process id of the apply worker, as the target has it; None: no process runs the subscription, or the target has no id.
        worker: the latest report of the apply worker; None: it does not run.
        tables: its tables, sorted by name.
        counters: the counters of pg_stat_subscription_stats, by name.
        stats_reset: when the counters were reset.
        last_error: the latest error of its workers, one line.
        last_error_time: when that error occurred.
        applier: the applier, if landing and applying are two programs.
        details: the details that the apply worker reported last, even if it does not run any more.
        by_command_line: the command line of a run defines it. False if the observing role may not read ``conninfo``.
    """

    definition: Definition
    pid: int | None = None
    worker: WorkerActivity | None = None
    tables: tuple[TableObservation, ...] = ()
    counters: Mapping[str, int]
    stats_reset: datetime | None = None
    last_error: str | None = None
    last_error_time: datetime | None = None
    applier: ApplierObservation | None = None
    details: WorkerDetails = field(default_factory=WorkerDetails)
    by_command_line: bool = False

    @property
    def copies_wait(self) -> str | None:
        """For people: that copies wait for ``copy_window``, and when it opens. None: they do not wait."""
        if self.worker is None or self.details.copies_begin is None:
            return None
        opens = datetime.fromtimestamp(self.details.copies_begin, UTC).astimezone()
        return f"copies wait for copy_window ({self.definition.options.copy_window}), which opens at {opens:%Y-%m-%d %H:%M%z}"

    @property
    def left_out(self) -> Mapping[TableName, str]:
        """Published tables that the latest run left out, each with the reason, except those that were added later."""
        added = {table.table for table in self.tables}
        return {table: reason for table, reason in self.details.left_out.items() if table not in added}
