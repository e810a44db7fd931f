"""The change log: an append-only Delta table for each table, with all landed changes in order. Then the landed files are removed.

Its rows are those of the landing files (see ``table_schema.py``). Rows of a copy have the LSN of its snapshot. If the table had
earlier rows, a copy begins with a ``t``, because it replaces them. Each append states in Delta's ``txn`` up to which LSN the log is
complete. ``log_files.py`` writes its files, in threads or on executors; this module decides which, and commits.

A log that cannot be continued gets nothing more, for example because another writer changed its rows, or because a file is missing. The
landed files of its table, and the manifests that name them, are kept until it can; the other logs continue.

The last manifest always remains, because the chain of manifests continues from it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Final, TypeVar

import pyarrow as pa

from subscriber import crash_points
from subscriber.abc import TableName, TableState
from subscriber.errors import TargetError
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.sinks.spark.catalog.lake import LANDING, Lake, LakeTable, copy_directory
from subscriber.sinks.spark.catalog.snapshots import Snapshot
from subscriber.sinks.spark.copy.copy_document import read_copy
from subscriber.sinks.spark.files.errors import arrow_errors
from subscriber.sinks.spark.files.location import table_directory
from subscriber.sinks.spark.files.storage import Storage, StoredFile
from subscriber.sinks.spark.landing.manifest import (
    LandedFile,
    Manifest,
    ManifestsRead,
    check_files,
    manifest_name,
    read_manifests,
)
from subscriber.sinks.spark.landing.zone import batch_end, batch_table
from subscriber.sinks.spark.maintenance.log_files import (
    Copied,
    LogPart,
    RewrittenFiles,
    Workers,
    read_identity,
    rewrite_files,
    runs_of_small_files,
    write_log_part,
)
from subscriber.sinks.spark.maintenance.log_parts import Append, Source, clearing, in_the_table, log_parts
from subscriber.sinks.spark.schema.evolution import evolved_schema, retyped_columns
from subscriber.sinks.spark.schema.table_schema import META_NAMES, TableSchema
from subscriber.sinks.spark.session.job_names import job_name
from subscriber.sinks.spark.tables.column_mapping import ROUND_DIRECTORY, new_names, renamed_file, resolve_fields
from subscriber.sinks.spark.tables.column_statistics import FileRanges, file_ranges
from subscriber.sinks.spark.tables.data_file import DataFile
from subscriber.sinks.spark.tables.delta import COMMITS_AT_ONCE, LakeDelta, commit_note
from subscriber.sinks.spark.tables.file_check import checking_files, is_restored, require_copy, require_files
from subscriber.sinks.spark.tables.foreign_commits import require_no_foreign_log_changes
from subscriber.sinks.spark.tables.table_errors import DamagedCopy, TableStopped

__all__ = ["ChangeLog", "StoppedLog", "log_order"]

_logger = logging.getLogger(__name__)

_SMALL_FILES: Final = 64
"""Compaction starts at this number of files with less than a quarter of the target."""
_FEW_FILES: Final = 4
"""Fewer neighbouring files than this are not compacted, because that would save little."""
_WAITING_BYTES: Final = 256 * 1024**2
_WAITING_SECONDS: Final = 30.0
"""Copies of this size, and for this time, may wait for others."""
_SYNCHRONIZED: Final = frozenset({TableState.SYNCDONE, TableState.READY})
_Result = TypeVar("_Result")
_Work = TypeVar("_Work", RewrittenFiles, LogPart)


@dataclass(frozen=True, slots=True)
class StoppedLog:
    """A log that cannot be continued, and how it was when this was found.

    Attributes:
        error: the reason.
        version: of the log. None: it could not be read, or is gone.
    """

    error: TableStopped
    version: int | None = None

    def is_of_another_copy(self, table: LakeTable | None) -> bool:
        """Whether a table may continue its log, because it was copied again."""
        return table is not None and isinstance(self.error, DamagedCopy) and self.error.directory != copy_directory(table)


class ChangeLog:
    """Writes the change logs of a lake, see the module.

    Args:
        storage: of the lake.
        lake: its documents.
        workers: write the files.
        logs: a cache of open Delta tables, by directory. The caller keeps it.
        read: a cache of manifests. The caller keeps it.
        stopped: the logs that cannot be continued, by table. The caller keeps it.
        waiting: since when copies wait, by table. The caller keeps it.
        target_rows: rows that a file should have.
        retain_hours: how long versions that were replaced can be read.

    Attributes:
        written: bytes of the files that it wrote.
    """

    def __init__(
        self,
        storage: Storage,
        lake: Lake,
        workers: Workers,
        logs: dict[str, LakeDelta],
        *,
        read: ManifestsRead,
        stopped: dict[TableName, StoppedLog],
        waiting: dict[TableName, float],
        target_rows: int,
        retain_hours: int = 24,
    ) -> None:
        self._storage = storage
        self._lake = lake
        self._workers = workers
        self._logs = logs
        self._manifests = read
        self._stopped = stopped
        self._waiting = waiting
        self._target_rows = target_rows
        self._retain_hours = retain_hours
        self.written = 0

    def compact(self, snapshot: Snapshot, since: Lsn, enough: int, is_applied: Callable[[TableName, LakeTable], bool | None]) -> Lsn:
        """Append the changes of the snapshot that the logs lack, if more than ``enough`` files wait. Then remove landed files.

        Returns:
            The LSN up to which the logs have all changes.

        Args:
            snapshot: the published snapshot.
            since: what the last call returned.
            enough: number of files.
            is_applied: whether a table has its copy. None: there is no Delta table. It raises TableStopped if the table cannot be read.
                In the snapshot, the same name may be the table from before it was copied again.

        Raises:
            TargetError: the log cannot be written. Nothing is removed.
        """
        manifests = read_manifests(self._storage, LANDING, read=self._manifests, until=snapshot.landed)
        waiting = sum(len(manifest.files) for manifest in manifests if manifest.end > since)
        state = self._lake.state
        unknown: set[int] = set()

        def has_its_copy(name: TableName, table: LakeTable) -> bool | None:
            try:
                return is_applied(name, table)
            except TableStopped:
                # its log continues, unless a copy waits that the table may lack
                if table.entry.state in _SYNCHRONIZED and not self._storage.files(copy_directory(table)):
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
        for name in self._stopped.keys() - state.tables.keys() - state.removed.keys():
            del self._stopped[name]
        retried = any(stop.is_of_another_copy(tables.get(name)) or self._has_changed(name, stop) for name, stop in self._stopped.items())
        due = {name: files for name, _, files in found if files and name not in self._stopped}
        # with Spark each append is a job. So new copies wait while even more tables are being copied, unless they replace others
        copying = sum(table.entry.state not in _SYNCHRONIZED for table in state.tables.values())
        may_wait = self._are_few_and_new(due) and enough > 0 and len(due) < copying and due.keys().isdisjoint(state.removed)
        if waiting <= enough and not retried and (may_wait or not due):
            return since
        errors = self._append(state.removed, tables, manifests, snapshot.landed)
        for name in sorted({*state.removed, *tables}):
            self._note(name, tables.get(name), errors.get(name))
        crash_points.reached("publishing.log_written")
        for name, table in copies:
            if name not in self._stopped:
                self._storage.remove_directory(copy_directory(table))
        self._remove_landed(manifests, snapshot.needed, kept)
        return snapshot.landed

    def _are_few_and_new(self, copies: Mapping[TableName, Sequence[StoredFile]]) -> bool:
        # the times of the files are by the clock of the store, which may be wrong
        now = time.monotonic()
        since = {name: self._waiting.get(name, now) for name in copies}
        self._waiting.clear()
        self._waiting.update(since)
        size = sum(file.size for files in copies.values() for file in files)
        return size <= _WAITING_BYTES and all(now - _WAITING_SECONDS < began for began in since.values())

    def _note(self, name: TableName, table: LakeTable | None, error: TableStopped | None) -> None:
        """Note whether the log of a table can be continued."""
        if error is None:
            self._stopped.pop(name, None)
            return
        known, table = self._stopped.get(name), table or self._lake.state.removed[name]
        if known is not None and known.error is error:
            return  # it was not tried again
        # open it again: it may have been read before it was damaged
        del self._logs[self._log(name, table).directory]
        self._stopped[name] = StoppedLog(error, self._readable_version(name))
        if known is None or known.error.one_line() != error.one_line():
            _logger.error('the change log of table "%s" gets nothing more: %s', name, error.one_line())

    def _known(self, name: TableName) -> LakeTable:
        return self._lake.state.tables.get(name) or self._lake.state.removed[name]

    def _readable_version(self, name: TableName) -> int | None:
        log = self._log(name, self._known(name))
        try:
            return log.version if log.load() else None
        except TableStopped:
            return None

    def _has_changed(self, name: TableName, stop: StoppedLog) -> bool:
        """Whether the reason of a stop may have gone."""
        log = self._log(name, self._known(name))
        try:
            if is_restored(self._storage, stop.error):
                return True
            return not log.load() or log.version != stop.version
        except TableStopped:
            return False

    def _remove_landed(self, manifests: Sequence[Manifest], needed: Lsn, kept_tables: frozenset[int]) -> None:
        """Remove landed files that are in the tables and in the logs. A file of an applier that was killed amid this goes, too.

        Args:
            manifests: up to the snapshot.
            needed: stopped tables need the files after this LSN.
            kept_tables: the numbers of tables whose logs cannot be written yet.
        """
        if not manifests:
            return
        state = self._lake.state
        stopped = {table.id for name in self._stopped for table in (state.tables.get(name), state.removed.get(name)) if table is not None}
        stopped |= kept_tables
        last = manifests[-1].end
        first = next((manifest.end for manifest in manifests if manifest.end > needed), last)
        kept = next((one.end for one in manifests if any(file.table_id in stopped for file in one.files)), last)
        # manifests first: files that no manifest names are ignored
        self._storage.delete(manifest_name(LANDING, one.end) for one in manifests if one.end < min(first, kept))
        crash_points.reached("publishing.manifests_removed")
        for file in self._storage.files(LANDING):
            end = batch_end(file.name)
            if end is not None and end < first and (end < kept or batch_table(file.name) not in stopped):
                self._storage.delete([f"{LANDING}/{file.name}"])

    def append(self, tables: Mapping[TableName, LakeTable], landed: Lsn) -> dict[TableName, TableStopped]:
        """Append the changes of some tables up to an LSN. Return the errors of logs that cannot be continued.

        Args:
            tables: they have been committed since their last copies.
            landed: the end of a manifest.

        Raises:
            TargetError: a log cannot be written.
        """
        manifests = read_manifests(self._storage, LANDING, read=self._manifests, until=landed)
        return self._append(tables, tables, manifests, landed)

    def reached(self, name: TableName, table: LakeTable) -> tuple[LakeDelta, Lsn] | None:
        """A table's log after :meth:`append`, and the LSN that it has reached. None: it has no log yet.

        Raises:
            TargetError: it cannot be read.
        """
        log = self._log(name, table)
        return (log, self._logged(log, table)) if log.is_there else None

    def _append(
        self, removed: Iterable[TableName], tables: Mapping[TableName, LakeTable], manifests: Sequence[Manifest], landed: Lsn
    ) -> dict[TableName, TableStopped]:
        """Append the changes of tables that were removed, then those of tables that may continue their logs.

        Returns:
            The errors of logs that cannot be continued.
        """
        before = self._lake.state.removed
        wanted = []
        for name in removed:
            table = before.get(name)
            if table is not None and table.until is not None:
                theirs = [manifest for manifest in manifests if manifest.end <= table.until]
                wanted.append((name, table, theirs, min(landed, table.until)))
        errors = self._append_to_logs(wanted)
        for name in [name for name, error in errors.items() if name in tables and isinstance(error, DamagedCopy)]:
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
        for name, table, *_ in wanted:
            stop = self._stopped.get(name)
            if stop is not None and not stop.is_of_another_copy(table) and not self._has_changed(name, stop):
                errors[name] = stop.error
        wanted = [one for one in wanted if one[0] not in errors]

        def apart(name: TableName, step: Callable[..., _Result], *arguments: Any) -> _Result | None:
            try:
                return step(*arguments)
            except TableStopped as error:
                errors[name] = error
                return None

        def together(
            step: Callable[[Sequence[Append]], list[_Result]], appends: Sequence[Append], reading: Collection[TableName]
        ) -> tuple[Sequence[Append], list[_Result]]:
            """Take a step for several logs. If it fails, repeat it without those of ``reading``, whose files it reads, that are damaged."""
            try:
                return appends, step(appends)
            except TargetError as error:
                for append in appends:
                    apart(append.name, require_copy, self._storage, append.copies, error)
                    if append.name in reading:
                        apart(append.name, require_files, self._storage, append.log, error)
                sound = [append for append in appends if append.name not in errors]
                if len(sound) == len(appends):
                    raise
            return sound, step(sound)

        with ThreadPoolExecutor(COMMITS_AT_ONCE) as pool:
            planned = [one for one in pool.map(lambda one: apart(one[0], self._planned, *one), wanted) if one is not None]
            if not planned:
                return errors
            appends, added = together(self._write, planned, {append.name for append in planned if append.rewritten})
            small = pool.map(lambda append, files: apart(append.name, self._committed, append, files), appends, added)
            works = {append.name: work for append, work in zip(appends, small, strict=True) if work is not None}

            def merged(appends: Sequence[Append]) -> list[DataFile]:
                what = job_name("compact change logs", [append.name for append in appends])
                return self._each(rewrite_files, [works[append.name] for append in appends], what)

            appends, files = together(merged, [append for append in appends if append.name in works], works)
            list(pool.map(lambda append, file: apart(append.name, self._compacted, append, works[append.name], file), appends, files))
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

    def _log(self, name: TableName, table: LakeTable) -> LakeDelta:
        directory = table_directory("log", name, table.id)
        return self._logs.setdefault(directory, LakeDelta(self._storage, directory, self._retain_hours))

    def _planned(self, name: TableName, table: LakeTable, manifests: Sequence[Manifest], end: Lsn) -> Append | None:
        """Plan an append. None: there is nothing to append."""
        log = self._log(name, table)
        copies = _copies(name, table)
        with checking_files(self._storage, log, copies=copies), arrow_errors(self._storage.what(log.directory)):
            return self._planned_for(log, name, table, manifests, end)

    def _planned_for(self, log: LakeDelta, name: TableName, table: LakeTable, manifests: Sequence[Manifest], end: Lsn) -> Append | None:
        there = log.load()
        if there:
            self._require_ours(log)
            if name in self._stopped:
                require_files(self._storage, log)  # they may have been the reason
        log.make_durable()
        application = f"subscriber-{self._lake.target_identifier}-{table.id}-{table.generation}-log"
        done = log.applied(application) if there else None
        # the log may have what was landed before the table was copied again, under the application of an earlier copy
        after = self._logged(log, table) if there else INVALID_LSN
        landed = [
            (file, manifest.end) for manifest in manifests if manifest.end > after for file in manifest.files if file.table_id == table.id
        ]
        sources: list[Source] = []
        copy = read_copy(self._storage, copy_directory(table)) if done is None and table.generation else None
        copied = Copied(copy.lsn, copy.started) if copy is not None else None
        if copy is not None:
            sources += [Source(file) for file, manifest_end in landed if manifest_end <= copy.lsn]
            sources += [Source(file, copied) for file in copy.files]
            sources += [Source(in_the_table(name, table, copy, file), copied) for file in copy.base or ()]
            own_manifests = read_manifests(self._storage, copy_directory(table))
            own_files = [file for manifest in own_manifests for file in manifest.files]
            check_files(self._storage, copy_directory(table), [*copy.files, *own_files])
            sources += [Source(file) for file in own_files]
            # readers rely on the log's stated LSN. The copy may be ahead of what was landed for all tables
            end = max(end, copy.lsn, *(manifest.end for manifest in own_manifests))
        end = max(end, done or INVALID_LSN)
        sources += [Source(file) for file, manifest_end in landed if copy is None or manifest_end > copy.lsn]
        if not sources and copy is None:
            return None
        own = _own_columns(log) if there else None
        described = [*([copy.schema] if copy is not None else []), *(source.file.schema for source in sources)]
        found = dict(zip(described, resolve_fields(own.names if own is not None else (), described), strict=True))
        sources = [replace(source, file=self._renamed(source.file, found[source.file.schema])) for source in sources]
        schema = evolved_schema(own, [found[one] for one in described])
        columns = pa.schema([field.with_nullable(True) for field in schema.landing])
        present = log.schema if there else None
        overwrite = None
        rewritten: list[RewrittenFiles] = []
        if present is None:
            log.create(columns)
        elif retyped_columns(present, schema):
            overwrite = columns
            rewritten = [
                RewrittenFiles(directory=log.directory, files=(path,), schema=columns, metadata=self._metadata(log, path), rows=rows)
                for path, rows in log.files().items()
            ]
        else:
            log.add_columns(schema.landing)
            self._require_ours(log)
        parts = log_parts(log.directory, sources, schema, int(after), self._target_rows)
        before = self._lake.state.removed.get(name)
        # a history may have rows of the table before this copy, even if the log has lost them
        is_again = before is not None and before.until is not None and before.generation < table.generation
        if copied is not None and (there or is_again or any(manifest_end <= copied.lsn for _, manifest_end in landed)):
            parts = clearing(parts, log.directory, schema, copied)
        return Append(
            name=name,
            copies=_copies(name, table),
            log=log,
            application=application,
            done=done,
            end=end,
            overwrite=overwrite,
            rewritten=rewritten,
            parts=parts,
        )

    def _committed(self, append: Append, added: Sequence[DataFile]) -> RewrittenFiles | None:
        """Commit an append. Return the files that should be compacted. None: there are too few."""
        log, end = append.log, append.end
        removed = [path for one in append.rewritten for path in one.files]
        log.commit(added, removed, append.application, end, note=commit_note("append", end, append.done), overwrite=append.overwrite)
        crash_points.reached("publishing.log_committed")
        with checking_files(self._storage, log), arrow_errors(self._storage.what(log.directory)):
            self._require_ours(log)
            return self._small_files(log)

    def _logged(self, log: LakeDelta, table: LakeTable) -> Lsn:
        """The LSN up to which the log has a table's landed changes, from any of its copies."""
        applications = [f"subscriber-{self._lake.target_identifier}-{table.id}-{number}-log" for number in range(table.generation + 1)]
        return max(log.applied(application) or INVALID_LSN for application in applications)

    def _renamed(self, file: LandedFile, schema: TableSchema) -> LandedFile:
        names = new_names(file.schema, schema)
        return replace(file, path=renamed_file(self._storage, file.path, names), schema=schema) if names else file

    def _require_ours(self, log: LakeDelta) -> None:
        """Check the log after each load. From then on only a commit of ours can succeed."""
        require_no_foreign_log_changes(log, f"subscriber-{self._lake.target_identifier}-")

    def _small_files(self, log: LakeDelta) -> RewrittenFiles | None:
        """Many small files, to be compacted into one. None: there are too few. Most reads of a log read all of it.

        Only neighbouring files are merged, because the order of rows is that of their files. Delta's own OPTIMIZE does not keep it.
        """
        rows_of = log.files()
        files = [(file.path, rows_of[file.path]) for file in sorted(file_ranges(log, ("_lsn", "_seq")), key=log_order)]
        runs = list(runs_of_small_files(files, self._target_rows))
        if sum(map(len, runs)) < _SMALL_FILES:
            return None
        longest = max(runs, key=len)
        identities = [(self._metadata(log, path), path) for path in longest]
        groups = [(metadata, [path for _, path in group]) for metadata, group in groupby(identities, key=lambda one: one[0])]
        metadata, taken = max(groups, key=lambda group: len(group[1]))
        if len(taken) < _FEW_FILES:
            return None
        schema = pa.schema([field.with_nullable(True) for field in log.schema])
        rows = sum(rows_of[path] for path in taken)
        return RewrittenFiles(
            directory=log.directory, files=tuple(taken), schema=schema, order=("_lsn", "_seq"), metadata=metadata, rows=rows
        )

    def _compacted(self, append: Append, work: RewrittenFiles, file: DataFile) -> None:
        """Commit a compaction."""
        note = commit_note("compact", append.end)
        append.log.commit([file], work.files, append.application, append.end, note=note, same_rows=True)

    def _metadata(self, log: LakeDelta, path: str) -> dict[bytes, bytes]:
        identity = read_identity(self._storage, f"{log.directory}/{path}")
        return identity.metadata() if identity is not None else {}


def _has_copy(snapshot: Snapshot, name: TableName, table: LakeTable, is_applied: Callable[[TableName, LakeTable], bool | None]) -> bool:
    if table.entry.state is TableState.INIT:
        return False  # the stop, or the version in the snapshot, is of the removed table
    stop = snapshot.stopped.get(name)
    if stop is not None and stop.last is not None:
        # the last version may be of the time before the copy. If another program has removed the table, the copy is of no use
        return stop.generation == table.generation and is_applied(name, table) in {True, None}
    return (stop is not None or name in snapshot.tables) and bool(is_applied(name, table))


def log_order(file: FileRanges) -> tuple[int, int, int]:
    """The sort key of a file in a log: by ``_lsn``, and within one transaction by ``_seq``."""
    return (*file.bounds["_lsn"], file.bounds["_seq"][0])


def _copies(name: TableName, table: LakeTable) -> tuple[str, ...]:
    """The directories that the files of a table's copy are in."""
    return copy_directory(table), table_directory("tables", name, table.id)


def _own_columns(log: LakeDelta) -> pa.Schema:
    return pa.schema([field for field in log.schema if field.name not in META_NAMES])
