"""The applier: turns what was landed into Delta tables, in rounds.

A round takes the waiting manifests and divides the work of all tables into units (``plan.py``). An engine does the work (``engines.py``).
The round commits each table, and publishes one cut of all of them (``snapshots.py``). These rules make the result exact after any crash:

* A table's commit contains its LSN (``delta.py``). If a table was committed in a round that crashed, the next round applies only what is
  after that LSN. Files that its units wrote and no commit names have no effect.
* A round ends no earlier than the LSN of any table, so that the cut it publishes is consistent.
* A table that is still being synchronized is not part of it. Its first commit takes its copy, its own batches, and what the apply worker
  landed since. The table is not published until the cut has reached the LSN at which it was handed over.
* Landed files are removed once the cut is published and the change log has them (``change_log.py``).
* A table that cannot be continued (:class:`TableStopped`) leaves the cut, and the others continue. Its landed changes are kept for the
  grace time. Within it, the table continues once the reason is gone; later it must be copied again. This also applies to a removed table
  with landed changes, because it may be added again without a copy.

A lake has only one applier. It has its own lock, besides the subscriber's.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

import pyarrow.compute as pc

from subscriber.abc import TableName, TableState
from subscriber.errors import SubscriberError, SubscriptionInUse, TargetError
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.sinks.spark.catalog.lake import LANDING, Lake, LakeTable, copy_directory
from subscriber.sinks.spark.catalog.snapshots import Cut, CutTable, StoppedTable, forget_cuts, read_cut, restore_cut, write_cut
from subscriber.sinks.spark.copy.copy_document import read_copy
from subscriber.sinks.spark.files.errors import arrow_errors
from subscriber.sinks.spark.files.file_lock import FileLock
from subscriber.sinks.spark.files.location import table_directory
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.landing.manifest import Manifest, ManifestsRead, check_files, read_manifests
from subscriber.sinks.spark.maintenance.change_log import ChangeLog
from subscriber.sinks.spark.maintenance.retention import remove_unneeded_files
from subscriber.sinks.spark.merge.key_ranges import read_range
from subscriber.sinks.spark.merge.row_matching import MissingRows
from subscriber.sinks.spark.pipeline.applier_status import ApplierStatus
from subscriber.sinks.spark.pipeline.engines import COMMITS_AT_ONCE, Engine, TableRound
from subscriber.sinks.spark.pipeline.pending_changes import PendingChanges, copied_changes, read_work
from subscriber.sinks.spark.pipeline.plan import BaseFile, Plan, TableWork, plan_table
from subscriber.sinks.spark.pipeline.row_identity import RowIdentityCheck, TableBefore, columns_before
from subscriber.sinks.spark.schema.evolution import absent_columns, dropped_columns, evolved_schema, retyped_columns, stretches
from subscriber.sinks.spark.schema.table_schema import TableSchema
from subscriber.sinks.spark.tables.column_declarations import ColumnDeclarations, DeclaredColumns
from subscriber.sinks.spark.tables.column_mapping import ROUND_DIRECTORY
from subscriber.sinks.spark.tables.delta import CommitConflict, LakeDelta, commit_note, with_added
from subscriber.sinks.spark.tables.foreign_commits import (
    COPY_AGAIN,
    TableStopped,
    copy_application,
    first_version,
    require_no_foreign_changes,
    require_published_version,
)

__all__ = ["Applier", "ApplierSettings"]

_log = logging.getLogger(__name__)

_ATTEMPTS: Final = 5
"""How often a round is planned before it fails, if other writers commit to its tables in the meantime."""
_LOOK_SECONDS: Final = 10.0
"""Interval of looking for commits of other writers while nothing is landed."""
_UNREADABLE: Final = re.compile("feature|protocol|unsupported", re.IGNORECASE)
"""In delta-rs' errors about tables that it cannot read."""
_PATH: Final = re.compile(r"\S*/\S*")
_FORGET_EVERY: Final = 100
_UNANSWERED: Final = 16
_FIRST_SWEEP_SECONDS: Final = 60.0
"""Time until the first sweep. It is short, so that a program that is often restarted also sweeps."""
_SYNCHRONIZED: Final = frozenset({TableState.SYNCDONE, TableState.READY})


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplierSettings:
    """Settings of the applier.

    Attributes:
        target_rows: rows that a file should have.
        round_bytes: landed bytes after which a round takes no more manifests.
        log_files: number of landed files after which the change log takes them, and they are removed.
        sweep_seconds: interval of the search for files that are no longer needed.
        grace_hours: how long to keep files that readers may still have open; at most 48.
        cuts: how many published cuts are stored for readers of earlier states.
    """

    target_rows: int = 250_000
    round_bytes: int = 512 * 1024**2
    log_files: int = 200
    sweep_seconds: float = 3600.0
    grace_hours: int = 24
    cuts: int = 1000


class Applier:
    """The applier of one lake, see the module.

    Args:
        storage: of the lake.
        engine: does the work.
        settings: of the applier.

    Attributes:
        missing: counts of changes that found no row, since this object was created.
    """

    def __init__(self, storage: Storage, engine: Engine, settings: ApplierSettings | None = None) -> None:
        self._storage = storage
        self._engine = engine
        self._settings = settings or ApplierSettings()
        self._row_identity = RowIdentityCheck(storage)
        self._declarations = ColumnDeclarations(storage)
        self._files: dict[tuple[str, str | None], dict[str, BaseFile]] = {}
        self.missing = MissingRows()
        self._status = ApplierStatus(storage, engine.name)
        self._deltas: dict[str, LakeDelta] = {}
        self._logs: dict[str, LakeDelta] = {}
        self._read = ManifestsRead()
        self._copied: dict[str, int] = {}  # tables that executors copied, with the version that has the copy, until a cut has it
        self._seen: tuple[dict[TableName, LakeTable], list[tuple[TableName, LakeTable, Lsn]]] | None = None
        self._published = 0
        self._next_look = 0.0
        self._logged = INVALID_LSN
        self._refused: dict[tuple[str, str, int], TableStopped] = {}  # by commits, until the table has another version
        self._next_sweep = time.monotonic() + _FIRST_SWEEP_SECONDS
        # the cut that was published at the last look, and the cuts that this applier tried to publish since. Empty: unknown
        self._mine: tuple[Cut | None, ...] = ()
        self._is_locked = storage.root is not None
        path = storage.root / "applier.lock" if storage.root is not None else None
        self._lock = FileLock(path, f"the lake in {storage.place} already has an applier", "stop the other applier first")

    def open(self) -> None:
        """Take the lock of the lake's only applier.

        Raises:
            SubscriptionInUse: the lake has an applier.
            TargetError: there is no lake.
        """
        if Lake.find(self._storage) is None:
            raise TargetError(f"there is no lake in {self._storage.place}", hint="`subscriber run --target spark://…` creates one")
        self._lock.take()
        self._mine = ()
        if not self._is_locked:
            restore_cut(self._storage)
        self._storage.remove_directory(ROUND_DIRECTORY)
        self._status.begin()

    def _require_alone(self) -> Cut | None:
        """Read the published cut. Without a lock, check that this applier has published or read it before."""
        cut = read_cut(self._storage)
        known = cut in self._mine
        if not self._is_locked and self._mine and cut is not None and not known:
            text = f"the lake in {self._storage.place} has another applier, which published in the meantime"
            raise SubscriptionInUse(
                text, hint="stop one of them; if there is only one, the object store stored a cut late: start the applier again"
            )
        # the cuts that it tried to publish after this one may still appear
        self._mine = (cut, *self._mine[self._mine.index(cut) + 1 :]) if known else (cut,)
        return cut

    def failed(self, error: SubscriberError) -> None:
        """Report a failed attempt in ``applier.json``."""
        self._status.failed(error.one_line(), self.missing)

    def close(self) -> None:
        """Release the lock."""
        self._lock.give_back()

    def run_round(self) -> Cut | None:
        """Run one round, a micro-batch: apply what is waiting.

        Returns:
            The cut that was published. None if there was nothing to do.

        Raises:
            TargetError, DataLossError: nothing of this round is published.
        """
        attempts = 0
        while True:
            try:
                return self._round()
            except CommitConflict:
                attempts += 1
                if attempts == _ATTEMPTS:
                    raise
                _log.info("another writer committed to a table in the meantime: the round is planned again")
            except TableStopped as error:
                if error.refused is None or error.refused in self._refused:
                    raise
                self._refused[error.refused] = error

    def _round(self) -> Cut | None:
        # the position is read before the manifests, so everything that it covers is among them. The catalog is read after them: a table is
        # in the catalog before anything is landed for it, so this round knows every table that has rows among them
        position = self._lake().position
        cut = self._require_alone()
        kept, manifests = self._manifests(cut)
        lake = self._lake()
        known = position.lsn if position is not None else INVALID_LSN
        tables = {name: table for name, table in lake.state.tables.items() if table.entry.state in _SYNCHRONIZED}
        left = _left(lake)
        seen = (tables, left)
        if cut is not None and not manifests and known <= cut.lsn and seen == self._seen and time.monotonic() < self._next_look:
            return None
        self._next_look = time.monotonic() + _LOOK_SECONDS
        left = [one for one in left if self._waits(*one, cut, manifests)]
        stopped: dict[TableName, TableStopped] = {}
        all_of = tables | {name: table for name, table, _ in left}
        for name, table in all_of.items():
            with _stopping(name, stopped):
                _load(self._delta(name, table))
        loaded = {name: table for name, table in all_of.items() if name not in stopped}
        first = kept[0].previous if kept else None
        if cut is not None and not kept and cut.needed < cut.landed:
            first = cut.landed  # they are gone
        stopped |= self._stops(lake, loaded, cut, first)
        going = {name: table for name, table in tables.items() if name not in stopped}
        taken = self._taken(lake, going, manifests)
        landed = taken[-1].end if taken else (cut.landed if cut is not None else INVALID_LSN)
        end = landed
        if len(taken) == len(manifests):
            end = max(end, known, cut.lsn if cut is not None else INVALID_LSN)
        waiting: list[TableRound] = []
        for name, table, until in [*((name, table, end) for name, table in going.items()), *(one for one in left if one[0] not in stopped)]:
            with _stopping(name, stopped):
                work = self._work(lake, name, table, [manifest for manifest in (*kept, *taken) if manifest.end <= until], min(end, until))
                waiting += [work] if work is not None else []
        if waiting:
            self._apply(waiting)
            self._storage.remove_directory(ROUND_DIRECTORY)
            # MERGE INTO may have continued from a commit that another writer made in the meantime
            stopped |= self._stops(lake, {name: table for name, table in tables.items() if name not in stopped}, cut)
        continued = self._cut(lake, {name: table for name, table in tables.items() if name not in stopped}, end, landed)
        published = replace(continued, stopped=self._stopped(all_of, stopped, cut))
        if published != cut:
            self._require_alone()
            if published not in self._mine:
                # the store may publish it without giving an answer, and even later
                self._mine = (self._mine[0], *(*self._mine[1:], published)[-_UNANSWERED:])
            write_cut(self._storage, published)
            self._mine = (published,)
            self._published += 1
            if self._published % _FORGET_EVERY == 0:
                forget_cuts(self._storage, self._settings.cuts)
        self._status.tell(self.missing)
        self._seen = seen if len(taken) == len(manifests) else None
        changed = bool(waiting) or cut is None or (published.tables, published.stopped) != (cut.tables, cut.stopped) or bool(taken)
        return published if changed else None

    def _lake(self) -> Lake:
        lake = Lake.find(self._storage)
        if lake is None:
            raise TargetError(f"there is no lake in {self._storage.place}", hint="check whether its directory was removed or unmounted")
        return lake

    def tidy(self, *, now: bool = False) -> None:
        """Append to the change log up to the published cut if enough files wait, and remove the landed files that are no longer needed.

        Args:
            now: append even if few files wait.

        Raises:
            TargetError: a file cannot be read, written or removed. Nothing is removed that is still needed.
        """
        lake, cut = Lake.find(self._storage), read_cut(self._storage)
        if lake is None or cut is None:
            return
        log = ChangeLog(self._storage, lake, self._logs, read=self._read, target_rows=self._settings.target_rows)
        with arrow_errors(self._storage.what("log")):
            enough = 0 if now else self._settings.log_files
            self._logged = log.compact(cut, self._logged, enough, lambda name, table: self._is_applied(lake, name, table))
        if time.monotonic() >= self._next_sweep:
            # if the published version of a table is the newest one, its files are not removed
            published = {table.path: table.version for table in cut.tables.values()}
            names = [*lake.state.tables.items(), *lake.state.removed.items()]
            stopped = {self._delta(name, table).directory for name, table in names if name in cut.stopped}
            opened = (*self._deltas.values(), *self._logs.values())
            known = [delta for delta in opened if delta.directory not in stopped and _is_readable(delta)]
            tables = [delta for delta in known if published.get(delta.directory, delta.version) == delta.version]
            if count := remove_unneeded_files(self._storage, lake, tables, self._settings.grace_hours):
                _log.info("removed %d files that are no longer needed", count)
            self._next_sweep = time.monotonic() + self._settings.sweep_seconds

    # --- other writers

    def _stops(
        self, lake: Lake, tables: Mapping[TableName, LakeTable], cut: Cut | None, kept: Lsn | None = None
    ) -> dict[TableName, TableStopped]:
        """The tables that cannot be continued. For stopped ones, landed changes after ``kept`` are kept."""
        found: dict[TableName, TableStopped] = {}
        for name, table in tables.items():
            with _stopping(name, found):
                stop = _stop(cut, name, table)
                if stop is not None:
                    if not stop.kept:
                        raise TableStopped(stop.error)
                    if kept is not None and kept > stop.lsn:
                        raise TableStopped(f'landed changes of table "{name}" from {stop.lsn} to {kept} are gone', hint=COPY_AGAIN)
                    self._require_ours(lake, name, table, cut, stop.last)
                else:
                    self._require_ours(lake, name, table, cut, cut.tables.get(name) if cut is not None else None)
        return found

    def _require_ours(self, lake: Lake, name: TableName, table: LakeTable, cut: Cut | None, known: CutTable | None) -> None:
        delta, application = self._delta(name, table), _application(lake, table)
        applied = delta.applied(application)
        if cut is None or known is None or known.path != delta.directory:
            if applied is not None and delta.directory not in self._copied:
                self._copied[delta.directory] = first_version(delta, application)
            if delta.directory in self._copied:
                self._require_ours_since(lake, table, delta, self._copied[delta.directory])
            return
        self._copied.pop(delta.directory, None)
        # a copy that was made since replaces what was there, with all later changes to it
        if not (table.generation and (applied is None or applied > cut.lsn)):
            require_published_version(delta, known, applied)
        if delta.is_there and not (table.generation and applied is None):
            self._require_ours_since(lake, table, delta, known.version)

    def _require_ours_since(self, lake: Lake, table: LakeTable, delta: LakeDelta, version: int) -> None:
        # applications begin with this prefix for every number that the table of this name ever had
        require_no_foreign_changes(delta, version, f"subscriber-{lake.target_identifier}-", _application(lake, table))

    def _is_applied(self, lake: Lake, name: TableName, table: LakeTable) -> bool:
        """Whether the table has been committed since its last copy. False if it cannot be read."""
        delta = self._delta(name, table)
        return _is_readable(delta) and delta.applied(_application(lake, table)) is not None

    # --- what waits

    def _manifests(self, cut: Cut | None) -> tuple[list[Manifest], list[Manifest]]:
        """Those up to the cut that are kept for stopped tables, and those after it."""
        landed = cut.landed if cut is not None else INVALID_LSN
        found = read_manifests(self._storage, LANDING, landed, anchor=landed, read=self._read)
        kept: list[Manifest] = []
        if cut is not None and cut.needed < landed:
            kept = read_manifests(self._storage, LANDING, cut.needed, read=self._read, until=landed)
        check_files(self._storage, LANDING, [*kept, *found])
        return kept, found

    def _taken(self, lake: Lake, tables: dict[TableName, LakeTable], manifests: list[Manifest]) -> list[Manifest]:
        reached = [(self._delta(name, table).applied(_application(lake, table)), table.entry.lsn) for name, table in tables.items()]

        def may_end(lsn: Lsn) -> bool:
            """Whether no table would be ahead of a cut at ``lsn``. A table that is handed over later is not in the cut."""
            return all(applied is None or applied <= lsn or _is_ahead(handed, lsn) for applied, handed in reached)

        taken: list[Manifest] = []
        size = 0
        for manifest in manifests:
            if size >= self._settings.round_bytes and may_end(taken[-1].end):
                break
            taken.append(manifest)
            size += sum(file.size for file in manifest.files)
        return taken

    def _delta(self, name: TableName, table: LakeTable) -> LakeDelta:
        directory = table_directory("tables", name, table.id)
        return self._deltas.setdefault(directory, LakeDelta(self._storage, directory))

    def _waits(self, name: TableName, table: LakeTable, until: Lsn, cut: Cut | None, manifests: Sequence[Manifest]) -> bool:
        """Whether a removed table is stopped, or may have changes that wait."""
        if _stop(cut, name, table) is not None or (table.generation and self._storage.files(copy_directory(table))):
            return True
        return any(file.table_id == table.id for manifest in manifests if manifest.end <= until for file in manifest.files)

    # --- one table

    def _work(self, lake: Lake, name: TableName, table: LakeTable, taken: Sequence[Manifest], end: Lsn) -> TableRound | None:
        with arrow_errors(self._storage.what(table_directory("tables", name, table.id))):
            return self._planned(lake, name, table, taken, end)

    def _planned(self, lake: Lake, name: TableName, table: LakeTable, taken: Sequence[Manifest], end: Lsn) -> TableRound | None:
        delta = self._delta(name, table)
        application = _application(lake, table)
        if delta.is_there and (refused := self._refused.get((delta.directory, application, delta.version))) is not None:
            raise refused
        applied = delta.applied(application)
        # a copy replaces the rows of the table; a table that is not copied keeps them
        replaced = applied is None and table.generation > 0 and not self._registered(lake, table, delta)
        source = copied_changes(self._storage, copy_directory(table), table) if applied is None else PendingChanges(applied)
        source.add([file for manifest in taken if manifest.end > source.reached for file in manifest.files if file.table_id == table.id])
        source.reached = max(source.reached, end)
        if not source.schemas:
            return None
        present = delta.schema if delta.is_there else None
        source.rename(self._storage, present.names if present is not None and not replaced else ())
        schema = evolved_schema(None if replaced else present, source.schemas)
        dropped = dropped_columns(schema, source.schemas[-1])
        added = set(absent_columns(schema, source.schemas))
        base: tuple[BaseFile, ...] = ()
        retyped: tuple[str, ...] = ()
        valued: set[str] = set()
        rewrite = False
        if present is not None and not replaced:
            base = self._base(delta, _first_key(schema))
            retyped = retyped_columns(present, schema)
            # a round that was killed may have left a column in which no row has a value yet
            empty = {field for field in added if field in present.names and not delta.has_values(field)}
            valued = set(present.names) - empty
            rewrite = bool(retyped) or bool(added & valued)
            added |= delta.added | (set(schema.arrow.names) - set(present.names))
        described = list(zip(source.files, source.described, strict=True))
        overwrite = schema.current if replaced or retyped else None
        if overwrite is not None:
            overwrite = with_added(overwrite, added)
        work = TableWork(
            directory=delta.directory,
            schema=schema,
            base=base,
            stretches=stretches(schema, valued, described),
            after=0 if applied is None else int(applied),
            rewrite=rewrite,
            retyped=retyped,
            dropped=dropped,
            added=tuple(sorted(added)),
            target_rows=self._settings.target_rows,
        )
        work, changes = read_work(self._storage, work, source, ROUND_DIRECTORY)
        known = self._declarations.find(delta.directory, application, applied)
        before = TableBefore(directory=delta.directory)
        if present is not None and not replaced:
            copied = source.schemas[0] if applied is None and table.generation else None
            before = TableBefore(
                directory=delta.directory,
                files=tuple(file.path for file in base if file.rows),
                columns=columns_before(known.schema if known is not None else copied, present),
                late=delta.added,
                doubtful=known.doubtful if known is not None else frozenset(),
            )
        truncated = pc.any(pc.equal(changes["_op"], "t")).as_py() or False
        identity = self._row_identity.look(before, schema, described, work.after, truncated=truncated)
        if identity.lost is not None and table.until is None:
            raise TableStopped(identity.lost, hint=COPY_AGAIN)
        declared = known, DeclaredColumns(source.reached, source.schemas[-1], identity.doubtful)
        plan = plan_table(work, changes) if work.stretches or work.rewrite else Plan((), (), cleared=False)
        found = TableRound(name, application, delta, source, work, plan, overwrite, declared)
        self._require_writable(found)
        return found

    def _require_writable(self, work: TableRound) -> None:
        if not work.delta.is_there:
            return
        reason = self._engine.refuses(work)
        new = set(work.task.schema.current.names) - set(work.delta.schema.names) or set(work.task.added) - work.delta.added
        if reason is None and (new or work.overwrite is not None):
            # delta-rs changes the columns for all engines
            reason = work.delta.unwritable(columns=True)
        if reason is not None:
            raise TableStopped(
                f"Delta table {work.delta.uri} has what engine {self._engine.name} cannot write: {reason}",
                hint="remove that from the table (ALTER TABLE … DROP FEATURE or UNSET TBLPROPERTIES), or let Spark with Delta's jar apply",
            )

    def _registered(self, lake: Lake, table: LakeTable, delta: LakeDelta) -> bool:
        """Whether the table begins with files that executors wrote. If so, add them to the table with the first commit of its copy."""
        copied = read_copy(self._storage, copy_directory(table)) if table.generation else None
        if copied is None or copied.base is None:
            return False
        application = _application(lake, table)
        if delta.applied(copy_application(application)) is None:
            if not delta.is_there:
                delta.create(copied.schema.current)
            note = commit_note("copy", copied.lsn)
            delta.commit(copied.base, (), copy_application(application), copied.lsn, note=note, overwrite=copied.schema.current)
        # no cut has the table yet, so its commits are checked from this version on
        self._copied[delta.directory] = first_version(delta, application)
        self._require_ours_since(lake, table, delta, self._copied[delta.directory])
        return True

    def _base(self, delta: LakeDelta, key: str | None) -> tuple[BaseFile, ...]:
        known = self._files.get((delta.directory, key), {})
        files: dict[str, BaseFile] = {}
        for path, rows in delta.files().items():
            file = known.get(path)
            files[path] = file or BaseFile(path, rows, read_range(self._storage, f"{delta.directory}/{path}", key))
        self._files[delta.directory, key] = files
        return tuple(files.values())

    # --- doing and committing

    def _apply(self, works: Sequence[TableRound]) -> None:
        with ThreadPoolExecutor(COMMITS_AT_ONCE) as pool:
            list(pool.map(self._prepare, works))
        for work, done in zip(works, self._engine.apply(works), strict=True):
            known = self._files.setdefault((work.delta.directory, _first_key(work.task.schema)), {})
            for file in done.files:
                range_ = (file.low, file.high) if file.low is not None and file.high is not None else None
                known[file.path] = BaseFile(file.path, file.rows, range_)
            self.missing.add(done.missing)
            _log.debug('table "%s" is at %s', work.name, work.source.reached)

    def _prepare(self, work: TableRound) -> None:
        if not work.delta.is_there:
            work.delta.create(work.task.schema.current)
        elif work.overwrite is None:
            work.delta.add_columns(work.task.schema.current)
        if work.overwrite is None:
            work.delta.mark_added(work.task.added)
        self._declarations.keep(work.delta.directory, work.application, *work.declared)

    def _cut(self, lake: Lake, tables: Mapping[TableName, LakeTable], end: Lsn, landed: Lsn) -> Cut:
        found: dict[TableName, CutTable] = {}
        for name, table in tables.items():
            delta = self._delta(name, table)
            applied = delta.applied(_application(lake, table))
            if applied is not None and not _is_ahead(table.entry.lsn, end):
                delta.make_durable()
                found[name] = CutTable(delta.directory, delta.version, applied)
        return Cut(end, landed, found)

    def _stopped(
        self, tables: Mapping[TableName, LakeTable], stopped: Mapping[TableName, TableStopped], cut: Cut | None
    ) -> dict[TableName, StoppedTable]:
        found: dict[TableName, StoppedTable] = {}
        for name, error in stopped.items():
            table, now = tables[name], time.time()
            stop = _stop(cut, name, table)
            if stop is None:
                last = cut.tables.get(name) if cut is not None else None
                if last is not None and last.path != self._delta(name, table).directory:
                    last = None
                # every round applies all that it takes to the tables that are not stopped
                lsn = max(table.entry.lsn or table.added, cut.landed if cut is not None else INVALID_LSN)
                stop = StoppedTable(last=last, generation=table.generation, lsn=lsn, kept=True, since=now, error="")
                what = 'table "%s" left the published snapshot' if table.until is None else 'removed table "%s" lacks landed changes'
                _log.error(f"{what}: %s", name, error.one_line())
            told = error.one_line()
            if stop.kept and now > stop.since + self._settings.grace_hours * 3600:
                stop = replace(stop, kept=False)
                told = f"{told}; changes of more than {self._settings.grace_hours} hours are not kept: {COPY_AGAIN}"
            found[name] = replace(stop, error=told)
        return found


@contextlib.contextmanager
def _stopping(name: TableName, stopped: dict[TableName, TableStopped]) -> Iterator[None]:
    try:
        yield
    except TableStopped as error:
        stopped[name] = error


def _load(delta: LakeDelta) -> bool:
    try:
        return delta.load()
    except TargetError as error:
        # paths in delta-rs' text may have these words too, and so may the lines of a stack trace below it
        told = str(error.__cause__).partition("\n")[0].replace(delta.uri, "")
        if _UNREADABLE.search(_PATH.sub("", told)):
            raise TableStopped(f"{error}", hint="remove the feature from the table: ALTER TABLE … DROP FEATURE") from error
        raise


def _is_readable(delta: LakeDelta) -> bool:
    """Load a table. False if there is none, or if delta-rs cannot read it."""
    try:
        return _load(delta)
    except TableStopped:
        return False


def _stop(cut: Cut | None, name: TableName, table: LakeTable) -> StoppedTable | None:
    stop = cut.stopped.get(name) if cut is not None else None
    return stop if stop is not None and stop.generation == table.generation else None


def _is_ahead(handed: Lsn | None, end: Lsn) -> bool:
    return handed is not None and handed > end


def _left(lake: Lake) -> list[tuple[TableName, LakeTable, Lsn]]:
    """Removed tables with landed changes that must still be applied, each with the LSN up to which."""
    found: list[tuple[TableName, LakeTable, Lsn]] = []
    for name, table in lake.state.removed.items():
        now = lake.state.tables.get(name)
        # a finished copy replaces all rows of the removed table
        if table.until is not None and (now is None or now.entry.state not in _SYNCHRONIZED):
            found.append((name, table, table.until))
    return found


def _first_key(schema: TableSchema) -> str | None:
    return schema.keys[0] if schema.keys else None


def _application(lake: Lake, table: LakeTable) -> str:
    return f"subscriber-{lake.target_identifier}-{table.id}-{table.generation}"
