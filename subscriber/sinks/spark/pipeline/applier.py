"""The applier: turns what was landed into Delta tables, in rounds.

A round takes the waiting manifests and plans the work of each table, in units (``table_planner.py``). An engine does the work
(``engines/``). The round commits each table, and publishes one snapshot of all of them (``publisher.py``). These rules make the result
exact after any crash:

* A table's commit contains its LSN (``delta.py``). If a table was committed in a round that crashed, the next round applies only what is
  after that LSN. Files that its units wrote and no commit names have no effect.
* A round ends no earlier than the LSN of any table, so that the snapshot it publishes is consistent. If tables are ahead of the published
  snapshot, because a round failed or was killed between its commits, the next round takes only what brings the others to their LSN.
* A table that is still being synchronized is not part of it. Its first commit takes its copy, its own batches, and what the apply worker
  landed since. The table is not published until the snapshot has reached the LSN at which it was handed over.
* Landed files are removed once the snapshot is published and the change log has them (``change_log.py``).
* A table that cannot be continued leaves the snapshot, and the others continue (``stopped_tables.py``). So does, for one round, a table
  to which another writer commits faster than the round can be planned.

A lake has only one applier. It has its own lock, besides the subscriber's.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final

from subscriber import crash_points
from subscriber.errors import DataLossError, SubscriberError, TargetError
from subscriber.interfaces import TableName
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.sinks.spark.catalog.history import read_histories
from subscriber.sinks.spark.catalog.lake import APPLIER_LOCK, LANDING, Lake, LakeTable, copy_directory
from subscriber.sinks.spark.catalog.requests import read_boundary
from subscriber.sinks.spark.catalog.snapshots import Snapshot, SnapshotTable, read_snapshot
from subscriber.sinks.spark.files.file_errors import arrow_errors
from subscriber.sinks.spark.files.file_lock import FileLock
from subscriber.sinks.spark.files.location import table_directory
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.landing.manifest import Manifest, ManifestsRead, check_files, read_manifests
from subscriber.sinks.spark.maintenance.change_log import ChangeLog
from subscriber.sinks.spark.maintenance.retention import isolated, remove_unneeded_files
from subscriber.sinks.spark.merge.row_matching import MissingRows
from subscriber.sinks.spark.pipeline.applier_settings import ApplierSettings
from subscriber.sinks.spark.pipeline.applier_status import ROUND, ApplierStatus
from subscriber.sinks.spark.pipeline.engines.engine import Engine, TableFailed, TableRound
from subscriber.sinks.spark.pipeline.history import HistoryTables, history_documents
from subscriber.sinks.spark.pipeline.maintenance_room import MaintenanceRoom
from subscriber.sinks.spark.pipeline.open_tables import OpenTables, is_readable
from subscriber.sinks.spark.pipeline.pace import Waiting
from subscriber.sinks.spark.pipeline.progress import ApplierProgress, RoundProgress, as_line
from subscriber.sinks.spark.pipeline.publisher import SnapshotPublisher
from subscriber.sinks.spark.pipeline.round_input import SynchronizedTables, is_ahead, synchronized_tables, taken_manifests
from subscriber.sinks.spark.pipeline.stopped_tables import StopChecks, stop_of, stopped_documents, stopping
from subscriber.sinks.spark.pipeline.table_planner import TablePlanner
from subscriber.sinks.spark.tables.column_mapping import ROUND_DIRECTORY
from subscriber.sinks.spark.tables.delta import COMMITS_AT_ONCE, LakeDelta
from subscriber.sinks.spark.tables.file_check import again_later
from subscriber.sinks.spark.tables.table_errors import CommitConflict, TableStopped, with_names

__all__ = ["Applier", "ApplierSettings"]

_log = logging.getLogger(__name__)

_ATTEMPTS: Final = 5
"""How often a table is planned in a round before it is left out, if other writers commit to it in the meantime."""
_FAILURES: Final = 2
"""How often a table is written in a round before it is stopped, if that fails. The error may be one of a moment."""
_LOOK_SECONDS: Final = 10.0
"""Interval of looking for commits of other writers while nothing is landed."""
_FIRST_SWEEP_SECONDS: Final = 60.0
"""Time until the first sweep. It is short, so that a program that is often restarted also sweeps."""


class Applier:
    """The applier of one lake, see the module. ``missing`` counts changes that found no row. ``is_remote``: in an object store."""

    def __init__(self, storage: Storage, engine: Engine, settings: ApplierSettings | None = None) -> None:
        self._storage = storage
        self._engine = engine
        self._settings = settings or ApplierSettings()
        self.missing = MissingRows()
        self.is_remote = storage.root is None
        self.progress = ApplierProgress(storage.place, engine.name, self._settings.freshness)
        self._status = ApplierStatus(storage, self.progress, self.missing)
        self._tables = OpenTables(storage, self._settings.retain_hours)
        self._checks = StopChecks(self._tables)
        self._planner = TablePlanner(storage, self._tables, engine, self._settings)
        self._publisher = SnapshotPublisher(storage, self._settings.retain_hours)
        self._room = MaintenanceRoom(storage)
        self._read = ManifestsRead()
        self._log = ChangeLog(
            storage,
            engine,
            self._read,
            target_rows=self._settings.target_rows,
            retain_hours=self._settings.retain_hours,
            log_seconds=self._settings.log_seconds,
        )
        self._history = HistoryTables(storage, engine, self._log, self._settings.target_rows, self._settings.retain_hours)
        self._seen: SynchronizedTables | None = None
        self._next_look = 0.0
        self._published: Snapshot | None = None
        self._looked = 0.0  # what waits was landed after this
        self._unswept: dict[str, str] = {}
        self._next_sweep = time.monotonic() + _FIRST_SWEEP_SECONDS
        self._lock = FileLock(
            storage.local(APPLIER_LOCK), f"the lake in {storage.place} already has an applier", "stop the other applier first"
        )

    def open(self) -> None:
        """Take the lock of the lake's only applier. Raises SubscriptionInUse if it has one, and TargetError if there is no lake."""
        lake = Lake.find(self._storage)
        if lake is None:
            raise TargetError(f"there is no lake in {self._storage.place}", hint="`subscriber run --target spark://…` creates one")
        self._lock.take()
        self._publisher.forget()
        self._storage.remove_directory(ROUND_DIRECTORY)
        self.progress.begin(lake.target_identifier, self._status.begin())
        self._log.stopped.update((name, again_later(TableStopped(error), 0.0)) for name, error in self._status.stopped_logs.items())
        self.progress.stopped_logs = self._status.stopped_logs
        self._status.tell()

    def failed(self, error: SubscriberError | None, what: str = ROUND) -> None:
        """Report a failed attempt of something in ``applier.json``. None: it succeeded, so an earlier error of it is no longer told."""
        self._status.failed(what, None if error is None else error.one_line())

    def close(self) -> None:
        """Report the end, and release the lock."""
        self._status.end()
        self._lock.give_back()

    def waiting(self) -> Waiting | None:
        """What waits for the next round. None: nothing.

        Raises:
            TargetError, DataLossError: the landing zone cannot be read, or lacks a batch.
        """
        snapshot, now = self._published, time.monotonic()
        if snapshot is None or self._seen is None:
            return Waiting(-math.inf)  # a round looks at everything
        lake = self._lake()
        found = read_manifests(self._storage, LANDING, snapshot.landed, anchor=snapshot.landed, read=self._read)
        if not found and lake.position_lsn <= snapshot.lsn and synchronized_tables(lake) == self._seen:
            self._looked = now
            return Waiting(-math.inf) if now >= self._next_look else None
        if found and read_boundary(self._storage) in {manifest.end for manifest in found}:
            return Waiting(-math.inf)  # a verification waits for the snapshot there
        return Waiting(self._looked - (found[0].gathering if found else 0.0), sum(manifest.size for manifest in found))

    def room(self) -> float:
        """How many seconds the next round should wait, because another program rewrites files of a table."""
        return self._room.seconds(self._tables.opened.values())

    def run_round(self) -> Snapshot | None:
        """Run one round, a micro-batch: apply what is waiting.

        Returns:
            The snapshot that was published. None if there was nothing to do.

        Raises:
            TargetError, DataLossError: nothing of this round is published.
        """
        conflicts, failures = Counter[str](), Counter[str]()
        left_out: dict[str, TableStopped] = {}
        while True:
            try:
                return self._round(left_out)
            except CommitConflict as error:
                conflicts[error.directory] += 1
                if conflicts[error.directory] == _ATTEMPTS:
                    left_out[error.directory] = TableStopped(f"{error} ({_ATTEMPTS} times)", hint=error.hint)
                elif conflicts[error.directory] > _ATTEMPTS:
                    raise
                _log.info("the round is planned again: %s", error)
            except DataLossError:
                self._publisher.read()  # another applier may have published, and removed landed files
                raise
            except TableFailed as error:
                for failed in (error, *error.others):
                    directory = failed.work.delta.directory
                    failures[directory] += 1
                    if failures[directory] >= _FAILURES and not self._planner.refuse(self._planner.failed(failed)):
                        raise failed from failed.error
                    _log.info("the round is planned again: %s", failed.one_line())
            except TableStopped as error:
                if not self._planner.refuse(error):
                    raise

    def _round(self, left_out: Mapping[str, TableStopped]) -> Snapshot | None:
        done, looked = self.progress.start(), time.monotonic()
        with done.phase("latestOffset"):
            # the position is read before the manifests, so everything that it covers is among them. The catalog is read after them: a
            # table is in the catalog before anything is landed for it, so this round knows every table that has rows among them
            known = self._lake().position_lsn
            snapshot = self._publisher.read()
            is_first = snapshot.publication is None
            kept, manifests = self._manifests(snapshot)
            # after the manifests, see requests.py
            boundary = read_boundary(self._storage) if manifests else INVALID_LSN
            lake = self._lake()
        self._published = snapshot
        tables, left = seen = synchronized_tables(lake)
        if not manifests and known <= snapshot.lsn and seen == self._seen and time.monotonic() < self._next_look:
            self._looked = looked
            return None
        self._next_look = time.monotonic() + _LOOK_SECONDS
        with done.phase("queryPlanning"):
            left = [one for one in left if self._waits(*one, snapshot, manifests)]
            stopped: dict[TableName, TableStopped] = {}
            all_of = tables | {name: table for name, table, _ in left}
            for name, table in all_of.items():
                with stopping(name, stopped):
                    if (error := left_out.get(self._tables.of(name, table).directory)) is not None:
                        raise error
                    self._tables.load(name, table, snapshot.last(name))
            loaded = {name: table for name, table in all_of.items() if name not in stopped}
            first = kept[0].previous if kept else None
            if not kept and snapshot.needed < snapshot.landed:
                first = snapshot.landed  # they are gone
            stopped |= self._checks.find(lake, loaded, snapshot, first)
            going = {name: table for name, table in tables.items() if name not in stopped}
            reached = [(name, table, self._tables.of(name, table).applied(lake.application(table))) for name, table in going.items()]
            limits = self._settings.round_bytes, self._engine.round_rows
            taken = taken_manifests(manifests, reached, snapshot, boundary, limits)
            landed = taken[-1].end if taken else snapshot.landed
            end = max(landed, known, snapshot.lsn) if len(taken) == len(manifests) else landed
            waiting: list[TableRound] = []
            both = [*((name, table, end) for name, table in going.items()), *(one for one in left if one[0] not in stopped)]
            for name, table, until in both:
                began = time.monotonic()
                with stopping(name, stopped):
                    theirs = [manifest for manifest in (*kept, *taken) if manifest.end <= until]
                    work = self._planner.plan(lake, name, table, theirs, min(end, until), published=snapshot.last(name))
                    if work is not None:
                        waiting.append(work)
                        done.of(name).seconds += time.monotonic() - began
        if waiting:
            with done.phase("addBatch"):
                self._apply(waiting, done)
            self._storage.remove_directory(ROUND_DIRECTORY)
            # MERGE INTO may have continued from a commit that another writer made in the meantime
            stopped |= self._checks.find(lake, {name: table for name, table in tables.items() if name not in stopped}, snapshot)
        with done.phase("commitOffsets"):
            continued = self._snapshot(lake, {name: table for name, table in tables.items() if name not in stopped}, end, landed)
        with done.phase("addBatch"):
            histories, stopped_histories = self._histories(lake, continued, done, left_out)
        with done.phase("commitOffsets"):
            documents = stopped_documents(lake, self._tables, all_of, stopped, snapshot, retain_hours=self._settings.retain_hours)
            documents |= history_documents(stopped_histories, snapshot, landed)
            published = replace(continued, tables={**continued.tables, **histories}, stopped=documents)
            if is_first or published != snapshot:
                crash_points.reached("publishing.committed")
                published = self._publisher.publish(published)
                crash_points.reached("publishing.published")
        self._published, self._looked = published, looked
        self._seen = seen if len(taken) == len(manifests) else None
        changed = is_first or bool(waiting or taken) or (published.tables, published.stopped) != (snapshot.tables, snapshot.stopped)
        self.progress.stopped = {name: stop.error for name, stop in published.stopped.items()}
        if changed:
            done.start, done.end = snapshot.lsn, end
            done.take(taken, manifests, {table.id: name for name, table in all_of.items()})
            event = self.progress.end(done)
            if _log.isEnabledFor(logging.DEBUG):
                _log.debug("progress: %s", as_line(event))
        self._status.tell()
        return published if changed else None

    def _lake(self) -> Lake:
        lake = Lake.find(self._storage)
        if lake is None:
            raise TargetError(f"there is no lake in {self._storage.place}", hint="check whether its directory was removed or unmounted")
        return lake

    def tidy(self, *, now: bool = False) -> int:
        """Append to the change log up to the published snapshot, if enough files wait or ``now``. Return the number of bytes.

        Remove landed files that are no longer needed. After an error, nothing is removed that is still needed.
        """
        lake, snapshot = Lake.find(self._storage), read_snapshot(self._storage)
        if lake is None or snapshot is None:
            return 0
        before = self._log.written
        with arrow_errors(self._storage.what("log")):
            enough = 0 if now else self._settings.log_files
            self._log.compact(lake, snapshot, enough, lambda name, table: self._tables.is_applied(lake, name, table))
        self.progress.stopped_logs = {name: with_names(stop.one_line(), lake, name) for name, stop in self._log.stopped.items()}
        self._status.tell()
        if time.monotonic() >= self._next_sweep:
            self._sweep(lake, snapshot)
            self._next_sweep = time.monotonic() + self._settings.sweep_seconds
        self.progress.totals.written["log"] = self._log.written
        return self._log.written - before

    def _sweep(self, lake: Lake, snapshot: Snapshot) -> None:
        names = [*lake.state.tables.items(), *lake.state.removed.items()]
        stopped = {self._tables.of(name, table).directory for name, table in names if name in snapshot.stopped}
        stopped |= {table_directory("log", name, table.id) for name, table in names if name in self._log.stopped}
        # if the published version of a table is the newest one, its files are not removed
        published = {table.path: table.version for table in snapshot.tables.values()}
        tables: list[LakeDelta] = []
        errors: dict[str, TargetError] = {}
        for delta in (*self._tables.opened.values(), *self._log.opened.values(), *self._history.opened.values(), self._publisher.delta):
            with isolated(self._storage, delta.directory, errors):
                if delta.directory not in stopped and is_readable(delta) and published.get(delta.directory, delta.version) == delta.version:
                    tables.append(delta)
        if count := remove_unneeded_files(self._storage, lake, tables, self._settings.retain_hours, errors):
            _log.info("removed %d files that are no longer needed", count)
        for directory, error in errors.items():
            if self._unswept.get(directory) != str(error):
                _log.error("files that are no longer needed remain: %s", error.one_line())
                self.failed(error, "sweep")
        if not errors:
            self.failed(None, "sweep")
        self._unswept = {directory: str(error) for directory, error in errors.items()}

    def _histories(
        self, lake: Lake, snapshot: Snapshot, progress: RoundProgress, left_out: Mapping[str, TableStopped]
    ) -> tuple[dict[TableName, SnapshotTable], dict[TableName, TableStopped]]:
        found = self._history.apply(lake, read_histories(self._storage), snapshot, left_out)
        self.progress.totals.written["log"] = self._log.written
        for name, files in self._history.files.items():
            table = progress.of(name)
            table.files, table.written = len(files), sum(files)
        return found

    def _manifests(self, snapshot: Snapshot) -> tuple[list[Manifest], list[Manifest]]:
        """Those up to the snapshot that are kept for stopped tables, and those after it."""
        landed, kept = snapshot.landed, list[Manifest]()
        found = read_manifests(self._storage, LANDING, landed, anchor=landed, read=self._read)
        if snapshot.needed < landed:
            kept = read_manifests(self._storage, LANDING, snapshot.needed, read=self._read, until=landed)
        check_files(self._storage, LANDING, (file for manifest in (*kept, *found) for file in manifest.files))
        return kept, found

    def _waits(self, name: TableName, table: LakeTable, until: Lsn, snapshot: Snapshot, manifests: Sequence[Manifest]) -> bool:
        """Whether a removed table is stopped, or may have changes that wait."""
        if stop_of(snapshot, name, table) is not None or (table.generation and self._storage.files(copy_directory(table))):
            return True
        return any(file.table_id == table.id for manifest in manifests if manifest.end <= until for file in manifest.files)

    def _apply(self, works: Sequence[TableRound], progress: RoundProgress) -> None:
        merged: list[LakeDelta] = []
        try:
            with ThreadPoolExecutor(COMMITS_AT_ONCE) as pool:
                list(pool.map(self._planner.prepare, works))
            before = [work.delta.version for work in works]
            merged = [work.delta for work in works if self._engine.merges(work)]
            results = self._engine.apply(works)
        except TargetError as error:
            self._room.know(merged)
            if isinstance(error, TableFailed):
                for one in (error, *error.others):
                    self._planner.require_files(one.work, one.error)
            elif not isinstance(error, CommitConflict | TableStopped):
                for work in works:
                    self._planner.require_files(work, error)
            raise
        for work, version, done in zip(works, before, results, strict=True):
            self._planner.remember(work, done)
            self.missing.add(done.missing)
            table = progress.of(work.name)
            table.files, table.written = work.delta.written(version, work.application)
            table.seconds += done.seconds
            _log.debug('table "%s" is at %s', work.name, work.source.reached)

    def _snapshot(self, lake: Lake, tables: Mapping[TableName, LakeTable], end: Lsn, landed: Lsn) -> Snapshot:
        found: dict[TableName, SnapshotTable] = {}
        for name, table in tables.items():
            delta = self._tables.of(name, table)
            applied = delta.applied(lake.application(table))
            if applied is not None and not is_ahead(table, end):
                delta.make_durable()
                found[name] = SnapshotTable(delta.directory, delta.version, applied)
        return Snapshot(end, landed, found)
