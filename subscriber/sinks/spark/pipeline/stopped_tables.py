"""Stopped tables: those that the applier cannot continue, while it continues the others.

A stopped table leaves the snapshot. Its landed changes are kept for the retention time. Within it, the table continues once the reason is
gone; later it must be copied again. A table that a round leaves out, because another writer commits to it all the time, is stopped until
the next round. All this also applies to a removed table with landed changes, because it may be added again without a copy.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from subscriber.interfaces import TableName
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.catalog.lake import Lake, LakeTable
from subscriber.sinks.spark.catalog.snapshots import Snapshot, SnapshotTable, StoppedTable
from subscriber.sinks.spark.pipeline.open_tables import OpenTables
from subscriber.sinks.spark.tables.file_check import checking_files
from subscriber.sinks.spark.tables.foreign_commits import first_version, require_no_foreign_changes, require_published_version
from subscriber.sinks.spark.tables.table_errors import COPY_AGAIN, TableStopped, with_names

__all__ = ["StopChecks", "stop_of", "stopped_documents", "stopping"]

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def stopping(name: TableName, stopped: dict[TableName, TableStopped]) -> Iterator[None]:
    """Collect the error of a block that concerns one table only."""
    try:
        yield
    except TableStopped as error:
        stopped[name] = error


def stop_of(snapshot: Snapshot, name: TableName, table: LakeTable) -> StoppedTable | None:
    """The stop of a table in a snapshot. A stop of an earlier copy of the table has ended."""
    stop = snapshot.stopped.get(name)
    return stop if stop is not None and stop.generation == table.generation else None


@dataclass(slots=True)
class StopChecks:
    """Finds the tables that cannot be continued. ``begun`` has those that no snapshot has yet, with the version that began them."""

    tables: OpenTables
    begun: dict[str, int] = field(default_factory=dict)

    def find(
        self, lake: Lake, tables: Mapping[TableName, LakeTable], snapshot: Snapshot, kept: Lsn | None = None
    ) -> dict[TableName, TableStopped]:
        """The tables that cannot be continued. For stopped ones, landed changes after ``kept`` are kept."""
        found: dict[TableName, TableStopped] = {}
        for name, table in tables.items():
            with stopping(name, found), checking_files(self.tables.storage, self.tables.of(name, table)):
                stop = stop_of(snapshot, name, table)
                if table.gap is not None:
                    raise TableStopped(table.gap, hint=COPY_AGAIN)
                if stop is not None:
                    if not stop.kept:
                        raise TableStopped(stop.error)
                    if kept is not None and kept > stop.lsn:
                        raise TableStopped(f'landed changes of table "{name}" from {stop.lsn} to {kept} are gone', hint=COPY_AGAIN)
                self._require_ours(lake, name, table, snapshot, stop.last if stop is not None else snapshot.tables.get(name))
        return found

    def _require_ours(self, lake: Lake, name: TableName, table: LakeTable, snapshot: Snapshot, known: SnapshotTable | None) -> None:
        delta, app = self.tables.of(name, table), lake.application(table)
        applied = delta.applied(app)
        if known is None or known.path != delta.directory:
            if applied is not None and delta.directory not in self.begun:
                self.begun[delta.directory] = first_version(delta, app)
            since = self.begun.get(delta.directory)
        else:
            self.begun.pop(delta.directory, None)
            # a copy that was made since replaces what was there, with all later changes to it
            if not (table.generation and (applied is None or applied > snapshot.lsn)):
                require_published_version(delta, known, applied)
            since = None if table.generation and applied is None else known.version
        if delta.is_there and since is not None:
            # applications begin with this prefix for every number that the table of this name ever had
            require_no_foreign_changes(delta, since, lake.applications, app)


def stopped_documents(
    lake: Lake,
    open_tables: OpenTables,
    tables: Mapping[TableName, LakeTable],
    stopped: Mapping[TableName, TableStopped],
    snapshot: Snapshot,
    *,
    retain_hours: int,
) -> dict[TableName, StoppedTable]:
    """What the next snapshot says about stopped tables, after the published one."""
    found: dict[TableName, StoppedTable] = {}
    for name, error in stopped.items():
        table, now, text = tables[name], time.time(), with_names(error.one_line(), lake, name)
        stop = stop_of(snapshot, name, table)
        if stop is None:
            last = snapshot.tables.get(name)
            if last is not None and last.path != open_tables.of(name, table).directory:
                last = None
            # every round applies all that it takes to the tables that are not stopped
            lsn = max(table.entry.lsn or table.added, snapshot.landed)
            stop = StoppedTable(last=last, generation=table.generation, lsn=lsn, kept=True, since=now, error="")
            what = 'table "%s" left the published snapshot' if table.until is None else 'removed table "%s" lacks landed changes'
            _log.error(f"{what}: %s", name, text)
        if stop.kept and now > stop.since + retain_hours * 3600:
            stop = replace(stop, kept=False)
            text = f"{text}; changes of more than {retain_hours} hours are not kept: {with_names(COPY_AGAIN, lake, name)}"
        found[name] = replace(stop, error=text)
    return found
