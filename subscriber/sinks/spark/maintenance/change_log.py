"""The change log: an append-only Delta table for each table, with all landed changes in order. Then the landed files are removed.

Its rows are those of the landing files (see ``table_schema.py``). Rows of a copy have the LSN of its snapshot. A copy begins with a
``t``, because it replaces what was there. Each append states in Delta's ``txn`` up to which LSN the log is
complete. ``log_files.py`` writes its files, in threads or on executors; this module decides which, and commits.

A log that cannot be continued gets nothing more, for example because another writer changed its rows, or because a file is missing. The
landed files of its table, and the manifests that name them, are kept until it can, which is tried every minute; the other logs continue.

The last manifest always remains, because the chain of manifests continues from it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from subscriber import crash_points
from subscriber.errors import TargetError
from subscriber.interfaces import TableName, TableState
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.sinks.spark.catalog.lake import LANDING, Lake, LakeTable, copy_directory
from subscriber.sinks.spark.catalog.snapshots import Snapshot
from subscriber.sinks.spark.files.file_errors import arrow_errors
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.landing.manifest import Manifest, ManifestsRead, manifest_name, read_manifests
from subscriber.sinks.spark.landing.zone import batch_of
from subscriber.sinks.spark.maintenance.append_planner import Append, AppendPlanner
from subscriber.sinks.spark.maintenance.log_files import LogPart, RewrittenFiles, Workers, rewrite_files, write_log_part
from subscriber.sinks.spark.session.jobs import job_name
from subscriber.sinks.spark.tables.column_mapping import ROUND_DIRECTORY
from subscriber.sinks.spark.tables.data_file import DataFile
from subscriber.sinks.spark.tables.delta import COMMITS_AT_ONCE, LakeDelta, commit_note
from subscriber.sinks.spark.tables.file_check import again_later, checking_files, is_due, require_copy, require_files, require_no_own_error
from subscriber.sinks.spark.tables.table_errors import CommitConflict, DamagedCopy, TableStopped

__all__ = ["ChangeLog"]

_logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_Work = TypeVar("_Work", RewrittenFiles, LogPart)


class ChangeLog:
    """Writes the change logs of a lake, see the module. It lives as long as the applier.

    Attributes:
        opened: the Delta tables, by directory. ``stopped``: the logs that cannot be continued, by table.
        written: bytes of the files that it wrote.
    """

    _lake: Lake
    _planner: AppendPlanner

    def __init__(
        self, storage: Storage, workers: Workers, read: ManifestsRead, *, target_rows: int, retain_hours: int, log_seconds: float
    ) -> None:
        self._log_seconds = log_seconds
        self._storage = storage
        self._workers = workers
        self._manifests = read
        self._target_rows = target_rows
        self._retain_hours = retain_hours
        self._complete = INVALID_LSN  # the logs have all changes up to here
        self._since: float | None = None  # files wait
        self.opened: dict[str, LakeDelta] = {}
        self.stopped: dict[TableName, TableStopped] = {}
        self.written = 0

    def _follow(self, lake: Lake, landed: Lsn) -> list[Manifest]:
        """Take the documents of the lake, and return the manifests up to an LSN."""
        self._lake = lake
        self._planner = AppendPlanner(self._storage, lake, self.opened, self.stopped, self._target_rows, self._retain_hours)
        return read_manifests(self._storage, LANDING, read=self._manifests, until=landed)

    def compact(self, lake: Lake, snapshot: Snapshot, enough: int, is_applied: Callable[[TableName, LakeTable], bool | None]) -> None:
        """Append what the logs lack of the published snapshot, if more than ``enough`` files wait, or if they wait for too long.

        Then remove landed files and copies. ``is_applied``: whether a table has its copy. None: there is no Delta table. It raises
        TableStopped if the table cannot be read. In the snapshot, the same name may be the table from before it was copied again.
        """
        manifests = self._follow(lake, snapshot.landed)
        waiting = sum(len(manifest.files) for manifest in manifests if manifest.end > self._complete)
        state = self._lake.state
        unknown: set[int] = set()

        def has_its_copy(name: TableName, table: LakeTable) -> bool | None:
            try:
                return is_applied(name, table)
            except TableStopped:
                # its log continues, unless a copy waits that the table may lack
                if table.is_synchronized and not self._storage.files(copy_directory(table)):
                    return True
                unknown.add(table.id)
                return False

        tables = {name: table for name, table in state.tables.items() if _has_copy(snapshot, name, table, has_its_copy)}
        kept = frozenset(unknown)
        # a copy that a later copy replaced before it was applied is no longer needed either
        left = [
            (name, table)
            for name, table in state.removed.items()
            if table.until is not None and (name in tables or has_its_copy(name, table))
        ]
        found = [(name, table, self._storage.files(copy_directory(table))) for name, table in (*tables.items(), *left) if table.generation]
        copies = [(name, table) for name, table, files in found if files]
        for name in self.stopped.keys() - state.tables.keys() - state.removed.keys():
            del self.stopped[name]
        retried = any(map(is_due, self.stopped.values()))
        due = {name: len(files) for name, _, files in found if files and name not in self.stopped}
        waiting, now = waiting + sum(due.values()), time.monotonic()
        self._since = (self._since or now) if waiting else None
        late = now - (self._since or now) >= self._log_seconds
        # with Spark each append is a job, so copies wait while more tables are copied; not if the next copy replaces one that the log lacks
        may_wait = any(not table.is_synchronized for table in state.tables.values()) and due.keys().isdisjoint(state.removed)
        if waiting <= enough and not late and not retried and (may_wait or not due):
            return
        self._since = None
        errors = self._append(state.removed, tables, manifests, snapshot.landed)
        for name in sorted({*state.removed, *tables}):
            self._note(name, tables.get(name), errors.get(name))
        crash_points.reached("publishing.log_written")
        for name, table in copies:
            if name not in self.stopped:
                self._storage.remove_directory(copy_directory(table))
        self._remove_landed(manifests, snapshot.needed, kept)
        self._complete = snapshot.landed

    def _note(self, name: TableName, table: LakeTable | None, error: TableStopped | None) -> None:
        """Note whether the log of a table can be continued."""
        if error is None:
            self.stopped.pop(name, None)
            return
        known, table = self.stopped.get(name), table or self._lake.state.removed[name]
        if known is error:
            return  # it was not tried again
        # open it again: it may have been read before it was damaged
        del self.opened[self._planner.log(name, table).directory]
        self.stopped[name] = again_later(error)
        if known is None or known.one_line() != error.one_line():
            _logger.error('the change log of table "%s" gets nothing more: %s', name, error.one_line())

    def _remove_landed(self, manifests: Sequence[Manifest], needed: Lsn, kept_tables: frozenset[int]) -> None:
        """Remove landed files that are in the tables and in the logs. A file of an applier that was killed amid this goes, too.

        Stopped tables need the files after ``needed``. The logs of ``kept_tables`` cannot be written yet.
        """
        if not manifests:
            return
        state = self._lake.state
        stopped = {table.id for name in self.stopped for table in (state.tables.get(name), state.removed.get(name)) if table is not None}
        stopped |= kept_tables
        last = manifests[-1].end
        first = next((manifest.end for manifest in manifests if manifest.end > needed), last)
        kept = next((one.end for one in manifests if any(file.table_id in stopped for file in one.files)), last)
        # manifests first: files that no manifest names are ignored
        self._storage.delete(manifest_name(LANDING, one.end) for one in manifests if one.end < min(first, kept))
        crash_points.reached("publishing.manifests_removed")
        for file in self._storage.files(LANDING):
            if (batch := batch_of(file.name)) is not None:
                end, table_id = batch
                if end < first and (end < kept or table_id not in stopped):
                    self._storage.delete([f"{LANDING}/{file.name}"])

    def append(self, lake: Lake, tables: Mapping[TableName, LakeTable], landed: Lsn) -> dict[TableName, TableStopped]:
        """Append the changes of tables up to the end of a manifest. Return the errors of logs that cannot be continued.

        The tables have been committed since their last copies.
        """
        return self._append(tables, tables, self._follow(lake, landed), landed)

    def reached(self, name: TableName, table: LakeTable) -> tuple[LakeDelta, Lsn] | None:
        """A table's log after :meth:`append`, and the LSN that it has reached. None: it has no log yet."""
        log = self._planner.log(name, table)
        return (log, self._planner.reached(log, table)) if log.is_there else None

    def _append(
        self, removed: Iterable[TableName], tables: Mapping[TableName, LakeTable], manifests: Sequence[Manifest], landed: Lsn
    ) -> dict[TableName, TableStopped]:
        """Append the changes of removed tables, then of those that may continue their logs. Return the errors of logs that cannot."""
        before = self._lake.state.removed
        wanted = []
        for name in removed:
            table = before.get(name)
            if table is not None and table.until is not None:
                theirs = [manifest for manifest in manifests if manifest.end <= table.until]
                wanted.append((name, table, theirs, min(landed, table.until)))
        errors = self._append_to_logs(wanted)
        failed = [name for name, error in errors.items() if name in tables and error is not self.stopped.get(name)]
        for name in [name for name in failed if isinstance(errors[name], DamagedCopy)]:
            _logger.warning('the change log of table "%s" begins again: %s', name, errors.pop(name))
        wanted = []
        for name, table in tables.items():
            since = (before[name].until or INVALID_LSN) if name in before else INVALID_LSN
            if name not in errors:
                wanted.append((name, table, [manifest for manifest in manifests if manifest.end > since], landed))
        return errors | self._append_to_logs(wanted)

    def _append_to_logs(self, wanted: Sequence[tuple[TableName, LakeTable, Sequence[Manifest], Lsn]]) -> dict[TableName, TableStopped]:
        """Append to several logs. The files of all of them are written together, because with Spark each call of the workers is a job."""
        errors: dict[TableName, TableStopped] = {}
        for name, *_ in wanted:
            stop = self.stopped.get(name)
            if stop is not None and not is_due(stop):
                errors[name] = stop
        wanted = [one for one in wanted if one[0] not in errors]

        def isolated(name: TableName, step: Callable[..., _Result], *arguments: Any) -> _Result | None:
            try:
                return step(*arguments)
            except TableStopped as error:
                errors[name] = error
            except CommitConflict:
                raise
            except TargetError as error:
                errors[name] = again_later(TableStopped(str(error), hint=error.hint))
            return None

        def together(
            step: Callable[[Sequence[Append]], list[_Result]], appends: Sequence[Append], reading: Collection[TableName]
        ) -> tuple[Sequence[Append], list[_Result]]:
            """Take a step for several logs. If it fails, repeat it without those of ``reading``, whose files it reads, that are damaged."""
            try:
                return appends, step(appends)
            except TargetError as error:
                for append in appends:
                    isolated(append.name, require_copy, self._storage, append.copy, error)
                    isolated(append.name, require_no_own_error, append.log, error)
                    if append.name in reading:
                        isolated(append.name, require_files, self._storage, append.log, error)
                sound = [append for append in appends if append.name not in errors]
                if len(sound) == len(appends):
                    raise
            return sound, step(sound)

        with ThreadPoolExecutor(COMMITS_AT_ONCE) as pool:
            planned = [one for one in pool.map(lambda one: isolated(one[0], self._planner.plan, *one), wanted) if one is not None]
            if not planned:
                return errors
            appends, added = together(self._write, planned, {append.name for append in planned if append.rewritten})
            small = pool.map(lambda append, files: isolated(append.name, self._committed, append, files), appends, added)
            works = {append.name: work for append, work in zip(appends, small, strict=True) if work is not None}

            def merged(appends: Sequence[Append]) -> list[DataFile]:
                what = job_name("compact change logs", [append.name for append in appends])
                return self._each(rewrite_files, [works[append.name] for append in appends], what)

            appends, files = together(merged, [append for append in appends if append.name in works], works)
            list(pool.map(lambda append, file: isolated(append.name, self._compacted, append, works[append.name], file), appends, files))
        return errors

    def _write(self, appends: Sequence[Append]) -> list[list[DataFile]]:
        """Write the files of several appends. Return those of each."""
        what = job_name("append to change logs", [one.name for one in appends], to=max((one.end for one in appends), default=None))
        rewritten = iter(self._each(rewrite_files, [one for append in appends for one in append.rewritten], what))
        parts = [part for append in appends for part in append.parts]
        written = iter(self._each(write_log_part, parts, what))
        if any(path.startswith(ROUND_DIRECTORY) for part in parts for path in part.files):
            self._storage.remove_directory(ROUND_DIRECTORY)
        return [
            [next(rewritten) for _ in append.rewritten] + [file for _ in append.parts if (file := next(written)) is not None]
            for append in appends
        ]

    def _each(self, function: Callable[[Storage, _Work], _Result], items: Sequence[_Work], what: str) -> list[_Result]:
        found = self._workers.each(function, items, [item.rows for item in items], what)
        self.written += sum(file.size for file in found if isinstance(file, DataFile))
        return found

    def _committed(self, append: Append, added: Sequence[DataFile]) -> RewrittenFiles | None:
        """Commit an append. Return the files that should be compacted. None: there are too few."""
        log, end = append.log, append.end
        removed = [path for one in append.rewritten for path in one.files]
        with checking_files(self._storage, log), arrow_errors(self._storage.what(log.directory)):
            log.commit(added, removed, append.application, end, note=commit_note("append", end, append.done), overwrite=append.overwrite)
            crash_points.reached("publishing.log_committed")
            self._planner.require_ours(log)
            return self._planner.small_files(log)

    def _compacted(self, append: Append, work: RewrittenFiles, file: DataFile) -> None:
        """Commit a compaction."""
        note = commit_note("compact", append.end)
        with checking_files(self._storage, append.log):
            append.log.commit([file], work.files, append.application, append.end, note=note, same_rows=True)


def _has_copy(snapshot: Snapshot, name: TableName, table: LakeTable, is_applied: Callable[[TableName, LakeTable], bool | None]) -> bool:
    if table.entry.state is TableState.INIT:
        return False  # the stop, or the version in the snapshot, is of the removed table
    stop = snapshot.stopped.get(name)
    if stop is not None and stop.last is not None:
        # the last version may be of the time before the copy. If another program has removed the table, the copy is of no use
        return stop.generation == table.generation and is_applied(name, table) in {True, None}
    return (stop is not None or name in snapshot.tables) and bool(is_applied(name, table))
