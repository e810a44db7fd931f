"""The change log: an append-only Delta table for each table, with all landed changes in order. Then the landed files are removed.

Its rows are those of the landing files (see ``table_schema.py``). Rows of the copy have the LSN of its snapshot. With ``_op``, ``_lsn``,
``_seq`` and ``_ts``, slowly changing dimensions of type 2 can be built from it. Each append states in Delta's ``txn`` up to which LSN the
log is complete.

The last manifest always remains, because the chain of manifests continues from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from subscriber.abc import TableName, TableState
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.sinks.spark.catalog.lake import LANDING, Lake, LakeTable, copy_directory
from subscriber.sinks.spark.catalog.snapshots import Snapshot
from subscriber.sinks.spark.copy.copy_document import TableCopy, read_copy
from subscriber.sinks.spark.files.location import table_directory
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.landing.manifest import LandedFile, Manifest, ManifestsRead, manifest_name, read_manifests
from subscriber.sinks.spark.landing.zone import batch_end
from subscriber.sinks.spark.merge.parquet import conformed, read_changes
from subscriber.sinks.spark.schema.evolution import evolved_schema, retyped_columns
from subscriber.sinks.spark.schema.table_schema import META_NAMES, TableSchema
from subscriber.sinks.spark.tables.column_mapping import ROUND_DIRECTORY, new_names, renamed_file, resolve_fields
from subscriber.sinks.spark.tables.data_file import DataFile, file_statistics
from subscriber.sinks.spark.tables.delta import FileRanges, LakeDelta, commit_note
from subscriber.sinks.spark.tables.foreign_commits import require_no_foreign_log_changes

__all__ = ["ChangeLog", "log_order"]

_SMALL_FILES: Final = 64
"""Compaction starts at this number of files with less than a quarter of the target."""
_FEW_FILES: Final = 4
"""Fewer neighbouring files than this are not compacted, because that would save little."""


class ChangeLog:
    """Writes the change logs of a lake, see the module.

    Args:
        storage: of the lake.
        lake: its documents.
        logs: a cache of open Delta tables, by directory. The caller keeps it.
        read: a cache of manifests. The caller keeps it.
        target_rows: rows that a file should have.
        retain_hours: how long versions that were replaced can be read.

    Attributes:
        written: bytes of the files that it wrote.
    """

    def __init__(
        self, storage: Storage, lake: Lake, logs: dict[str, LakeDelta], *, read: ManifestsRead, target_rows: int, retain_hours: int = 24
    ) -> None:
        self._storage = storage
        self._lake = lake
        self._logs = logs
        self._manifests = read
        self._target_rows = target_rows
        self._retain_hours = retain_hours
        self.written = 0

    def compact(self, snapshot: Snapshot, since: Lsn, enough: int, is_applied: Callable[[TableName, LakeTable], bool]) -> Lsn:
        """Append the changes of the snapshot that the logs lack, if more than ``enough`` files wait. Then remove landed files.

        Returns:
            The LSN up to which the logs have all changes.

        Args:
            snapshot: the published snapshot.
            since: what the last call returned.
            enough: number of files.
            is_applied: whether a table has its copy. In the snapshot, the same name may be the table from before it was copied again.

        Raises:
            TargetError: the log cannot be written. Nothing is removed.
        """
        manifests = read_manifests(self._storage, LANDING, read=self._manifests, until=snapshot.landed)
        waiting = sum(len(manifest.files) for manifest in manifests if manifest.end > since)
        state = self._lake.state
        tables = {name: table for name, table in state.tables.items() if _has_copy(snapshot, name, table, is_applied)}
        # a copy that a later copy replaced before it was applied is no longer needed either
        left = [table for name, table in state.removed.items() if table.until is not None and (name in tables or is_applied(name, table))]
        copies = [table for table in (*tables.values(), *left) if table.generation and self._storage.files(copy_directory(table))]
        if waiting <= enough and not copies:
            return since
        for name, table in state.removed.items():
            if table.until is not None:
                theirs = [manifest for manifest in manifests if manifest.end <= table.until]
                self._append(name, table, theirs, min(snapshot.landed, table.until))
        for name, table in tables.items():
            before = state.removed.get(name)
            since = (before.until or INVALID_LSN) if before is not None else INVALID_LSN
            self._append(name, table, [manifest for manifest in manifests if manifest.end > since], snapshot.landed)
        for table in copies:
            self._storage.remove_directory(copy_directory(table))
        # the last one remains, and those that a stopped table still needs
        first = next(
            (manifest.end for manifest in manifests if manifest.end > snapshot.needed), manifests[-1].end if manifests else INVALID_LSN
        )
        removable = [manifest for manifest in manifests if manifest.end < first]
        for manifest in removable:
            # the manifest first: files that no manifest names are ignored
            self._storage.delete([manifest_name(LANDING, manifest.end)])
            self._storage.delete([file.path for file in manifest.files])
        if manifests:
            # files of an applier that was killed between the two deletions
            ends = [(file.name, batch_end(file.name)) for file in self._storage.files(LANDING)]
            self._storage.delete(f"{LANDING}/{name}" for name, end in ends if end is not None and end < first)
        return snapshot.landed

    def _append(self, name: TableName, table: LakeTable, manifests: Sequence[Manifest], end: Lsn) -> None:
        directory = table_directory("log", name, table.id)
        log = self._logs.setdefault(directory, LakeDelta(self._storage, directory, self._retain_hours))
        there = log.load()
        if there:
            self._require_ours(log)
        log.make_durable()
        application = f"subscriber-{self._lake.target_identifier}-{table.id}-{table.generation}-log"
        done = log.applied(application) if there else None
        # the log may have what was landed before the table was copied again, under the application of an earlier copy
        after = self._logged(log, table) if there else INVALID_LSN
        landed = [
            (file, manifest.end) for manifest in manifests if manifest.end > after for file in manifest.files if file.table_id == table.id
        ]
        files: list[tuple[LandedFile, Lsn | None]] = []
        copied = read_copy(self._storage, copy_directory(table)) if done is None and table.generation else None
        if copied is not None:
            files += [(file, None) for file, manifest_end in landed if manifest_end <= copied.lsn]
            files += [(file, copied.lsn) for file in copied.files]
            files += [(_in_the_table(name, table, copied, file), copied.lsn) for file in copied.base or ()]
            own_manifests = read_manifests(self._storage, copy_directory(table))
            files += [(file, None) for manifest in own_manifests for file in manifest.files]
            # readers rely on the log's stated LSN. The copy may be ahead of what was landed for all tables
            end = max(end, copied.lsn, *(manifest.end for manifest in own_manifests))
        end = max(end, done or INVALID_LSN)
        files += [(file, None) for file, manifest_end in landed if copied is None or manifest_end > copied.lsn]
        if not files and copied is None:
            return
        own = _own_columns(log) if there else None
        described = [*([copied.schema] if copied is not None else []), *(file.schema for file, _ in files)]
        found = dict(zip(described, resolve_fields(own.names if own is not None else (), described), strict=True))
        files = [(self._renamed(file, found[file.schema]), lsn) for file, lsn in files]
        schema = evolved_schema(own, [found[one] for one in described])
        present = log.schema if there else None
        if not there:
            log.create(pa.schema([field.with_nullable(True) for field in schema.landing]))
        overwrite = None
        added: list[DataFile] = []
        removed: list[str] = []
        if present is not None and retyped_columns(present, schema):
            overwrite = pa.schema([field.with_nullable(True) for field in schema.landing])
            removed = list(log.files())
            added += [self._rewritten(log, path, schema) for path in removed]
        elif present is not None:
            log.add_columns(schema.landing)
            self._require_ours(log)
        added += self._written(log, files, schema, int(after))
        if any(file.path.startswith(ROUND_DIRECTORY) for file, _ in files):
            self._storage.remove_directory(ROUND_DIRECTORY)
        log.commit(added, removed, application, end, note=commit_note("append", end, done), overwrite=overwrite)
        self._require_ours(log)
        self._merge_small(log, application, end)

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

    def _merge_small(self, log: LakeDelta, application: str, end: Lsn) -> None:
        """Compaction: rewrite many small files as one. Most reads of a log read all of it.

        Only neighbouring files are merged, because the order of rows is that of their files.
        """
        rows_of = log.files()
        runs: list[list[str]] = [[]]
        for file in sorted(log.ranges(("_lsn", "_seq")), key=log_order):
            if rows_of[file.path] >= self._target_rows // 4:
                runs.append([])
                continue
            if sum(rows_of[path] for path in runs[-1]) >= self._target_rows:
                runs.append([])
            runs[-1].append(file.path)
        if sum(map(len, runs)) < _SMALL_FILES:
            return
        taken = max(runs, key=len)
        if len(taken) < _FEW_FILES:
            return
        schema = pa.schema([field.with_nullable(True) for field in log.schema])
        rows = pa.concat_tables([conformed(self._read(log, path), schema) for path in taken])
        rows = rows.sort_by([("_lsn", "ascending"), ("_seq", "ascending")])
        log.commit([self._write(log, rows)], taken, application, end, note=commit_note("compact", end), same_rows=True)

    def _read(self, log: LakeDelta, path: str) -> pa.Table:
        with self._storage.reading(path):
            return pq.read_table(f"{log.directory}/{path}", filesystem=self._storage.filesystem, partitioning=None)

    def _written(self, log: LakeDelta, files: Sequence[tuple[LandedFile, Lsn | None]], schema: TableSchema, after: int) -> list[DataFile]:
        found: list[DataFile] = []
        parts: list[pa.Table] = []
        for number, (file, lsn) in enumerate(files):
            rows = read_changes(self._storage, [file.path], schema, after if lsn is None else 0)
            if lsn is not None:
                rows = _copied(rows, lsn)
            parts.append(rows)
            if sum(part.num_rows for part in parts) >= self._target_rows or number == len(files) - 1:
                gathered = pa.concat_tables(parts)
                parts = []
                if gathered.num_rows:
                    found.append(self._write(log, gathered))
        return found

    def _rewritten(self, log: LakeDelta, path: str, schema: TableSchema) -> DataFile:
        return self._write(log, conformed(self._read(log, path), schema.landing))

    def _write(self, log: LakeDelta, rows: pa.Table) -> DataFile:
        path = f"part-{uuid4().hex}.parquet"
        pending = self._storage.create(f"{log.directory}/{path}")
        try:
            with self._storage.reading(path):
                pq.write_table(rows, pending.stream, compression="zstd", use_dictionary=["_op"])
                size = pending.commit()
        except BaseException:
            pending.discard()
            raise
        self.written += size
        return DataFile(path=path, size=size, rows=rows.num_rows, stats=file_statistics(rows), low=None, high=None)


def _has_copy(snapshot: Snapshot, name: TableName, table: LakeTable, is_applied: Callable[[TableName, LakeTable], bool]) -> bool:
    if table.entry.state is TableState.INIT:
        return False  # the stop, or the version in the snapshot, is of the removed table
    stop = snapshot.stopped.get(name)
    if stop is not None and stop.last is not None:
        return stop.generation == table.generation  # even if another program has removed the table
    return (stop is not None or name in snapshot.tables) and is_applied(name, table)


def _in_the_table(name: TableName, table: LakeTable, copied: TableCopy, file: DataFile) -> LandedFile:
    """A base file that executors wrote, as a landed file. It still exists, because the log is written before it is removed."""
    path = f"{table_directory('tables', name, table.id)}/{file.path}"
    return LandedFile(table_id=table.id, path=path, rows=file.rows, size=file.size, schema=copied.schema)


def _copied(rows: pa.Table, lsn: Lsn) -> pa.Table:
    """Set the metadata of copied rows, with the LSN of the snapshot. Base files lack the metadata columns that landed files have."""
    values = {"_op": "c", "_lsn": int(lsn), "_seq": 0, "_xid": 0, "_moved": False}
    for name, value in values.items():
        position = rows.schema.get_field_index(name)
        field = rows.schema.field(position)
        rows = rows.set_column(position, field, pa.array([value], field.type).take(pa.array([0] * rows.num_rows, pa.int64())))
    return rows


def log_order(file: FileRanges) -> tuple[int, int, int]:
    """The sort key of a file in a log: by ``_lsn``, and within one transaction by ``_seq``."""
    return (*file.bounds["_lsn"], file.bounds["_seq"][0])


def _own_columns(log: LakeDelta) -> pa.Schema:
    return pa.schema([field for field in log.schema if field.name not in META_NAMES])
