"""What a target knows of a subscription, for those who look."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from subscriber.abc import Retry, TableEntry, TableName, WorkerActivity, WorkerDetails
from subscriber.catalog.definition import Definition
from subscriber.protocol.lsn import Lsn

__all__ = ["ApplierObservation", "Observation", "TableObservation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableObservation:
    """One table of a subscription.

    Attributes:
        table: its name.
        entry: its state, as ``pg_subscription_rel`` has it.
        worker: what its synchronization reports, if it runs.
        retry: its latest synchronization, if that failed and is made again.
    """

    table: TableName
    entry: TableEntry
    worker: WorkerActivity | None = None
    retry: Retry | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplierObservation:
    """Who applies what a subscription has landed, in a target where these are two programs.

    Attributes:
        pid: of the process; None: it does not run.
        host: where it runs.
        engine: how.
        lsn: up to where everything is applied, and published; None: nothing is.
        waiting_batches, waiting_bytes: of what was landed and is not applied. Copies of tables are not counted.
        waiting_since: when the first transaction of these was committed, seconds since 1970; None: nothing waits.
        last_error: the latest error, one line.
        last_error_time: when.
    """

    pid: int | None = None
    host: str | None = None
    engine: str | None = None
    lsn: Lsn | None = None
    waiting_batches: int = 0
    waiting_bytes: int = 0
    waiting_since: float | None = None
    last_error: str | None = None
    last_error_time: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Everything that a target knows of one subscription.

    Attributes:
        definition: its ``conninfo`` is None also where the looking role may not read it.
        pid: of the apply worker's session in the target; None: no process runs it.
        worker: what the apply worker reports.
        tables: by name.
        counters: those of pg_stat_subscription_stats, by their names.
        stats_reset: when they were reset.
        last_error: the latest error of its workers, one line.
        last_error_time: when.
        applier: where landing and applying are two programs, the other one.
        details: what the apply worker reported last, also if it does not run any more.
        by_command_line: its command line defines it, as far as the looking role can see.
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
    def left_out(self) -> Mapping[TableName, str]:
        """Published tables that the latest run did not replicate, each with the reason, without those that were added since."""
        added = {table.table for table in self.tables}
        return {table: reason for table, reason in self.details.left_out.items() if table not in added}
