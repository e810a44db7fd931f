"""Plans what is appended to the change log of one table: its files and columns. Also finds small files that should be compacted."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

import pyarrow as pa

from subscriber.interfaces import TableName
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.sinks.spark.catalog.lake import Lake, LakeTable, copy_directory
from subscriber.sinks.spark.copy.copied_rows import read_copy
from subscriber.sinks.spark.files.file_errors import arrow_errors
from subscriber.sinks.spark.files.location import table_directory
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.landing.manifest import LandedFile, Manifest, check_files, read_manifests
from subscriber.sinks.spark.maintenance.log_files import Copied, LogPart, RewrittenFiles, read_identity, runs_of_small_files
from subscriber.sinks.spark.schema.arrow_columns import nullable
from subscriber.sinks.spark.schema.evolution import evolved_schema, retyped_columns
from subscriber.sinks.spark.schema.table_schema import TableSchema, own_columns
from subscriber.sinks.spark.tables.column_mapping import new_names, renamed_file, resolve_fields
from subscriber.sinks.spark.tables.column_statistics import files_of_log
from subscriber.sinks.spark.tables.delta import LakeDelta
from subscriber.sinks.spark.tables.file_check import checking_files, require_files
from subscriber.sinks.spark.tables.foreign_commits import require_no_foreign_log_changes
from subscriber.sinks.spark.tables.table_errors import LostLog

__all__ = ["Append", "AppendPlanner"]

_SMALL_FILES: Final = 64
"""Compaction starts at this number of files with less than a quarter of the target."""
_FEW_FILES: Final = 4
"""Fewer neighbouring files than this are not compacted, because that would save little."""


_Source = tuple[LandedFile, Copied | None]
"""A file of changes, and the copy that it is of, if it is of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """A planned append to the log of a table.

    Attributes:
        copy: the directory of the table's copy.
        application, done, end: commits it; the LSN of its last commit, and of this one.
        overwrite: the new columns, if all files of the log are replaced.
        rewritten, parts: the files of the log that are written again, and the new ones.
    """

    name: TableName
    copy: str
    log: LakeDelta
    application: str
    done: Lsn | None
    end: Lsn
    overwrite: pa.Schema | None
    rewritten: Sequence[RewrittenFiles]
    parts: Sequence[LogPart]


@dataclass(slots=True)
class AppendPlanner:
    """Plans appends to the change logs of a lake. The caller keeps the opened logs, by directory, and the tables with stopped ones."""

    _storage: Storage
    _lake: Lake
    _logs: dict[str, LakeDelta]
    _stopped: Container[TableName]
    _target_rows: int
    _retain_hours: int

    def log(self, name: TableName, table: LakeTable) -> LakeDelta:
        directory = table_directory("log", name, table.id)
        return self._logs.setdefault(directory, LakeDelta(self._storage, directory, self._retain_hours))

    def plan(self, name: TableName, table: LakeTable, manifests: Sequence[Manifest], end: Lsn) -> Append | None:
        """Plan an append. None: there is nothing to append."""
        log = self.log(name, table)
        with checking_files(self._storage, log, copy=copy_directory(table)), arrow_errors(self._storage.what(log.directory)):
            return self._planned(log, name, table, manifests, end)

    def _planned(self, log: LakeDelta, name: TableName, table: LakeTable, manifests: Sequence[Manifest], end: Lsn) -> Append | None:
        there = log.load()
        if there:
            self.require_ours(log)
            if name in self._stopped:
                require_files(self._storage, log)  # they may have been the reason
        log.make_durable()
        application = self._lake.log_applications(table)[-1]
        done = log.applied(application) if there else None
        # the log may have what was landed before the table was copied again, under the application of an earlier copy
        after = self.reached(log, table) if there else INVALID_LSN
        landed = [
            (file, manifest.end) for manifest in manifests if manifest.end > after for file in manifest.files if file.table_id == table.id
        ]
        sources: list[_Source] = []
        copy = read_copy(self._storage, copy_directory(table)) if done is None and table.generation else None
        if copy is None and not after and (landed or table.until is None) and self._had_log(name, table):
            raise LostLog(log.uri)
        copied = Copied(copy.lsn, int(copy.started * 1_000_000)) if copy is not None else None
        if copy is not None:
            sources += [(file, None) for file, manifest_end in landed if manifest_end <= copy.lsn]
            sources += [(file, copied) for file in copy.files]
            own_manifests = read_manifests(self._storage, copy_directory(table))
            own_files = [file for manifest in own_manifests for file in manifest.files]
            check_files(self._storage, copy_directory(table), [*copy.files, *own_files])
            sources += [(file, None) for file in own_files]
            # readers rely on the log's stated LSN. The copy may be ahead of what was landed for all tables
            end = max(end, copy.lsn, *(manifest.end for manifest in own_manifests))
        end = max(end, done or INVALID_LSN)
        sources += [(file, None) for file, manifest_end in landed if copy is None or manifest_end > copy.lsn]
        if not sources and copy is None:
            return None
        present = log.schema if there else None
        own = own_columns(present) if present is not None else None
        described = [*([copy.schema] if copy is not None else []), *(file.schema for file, _ in sources)]
        found = dict(zip(described, resolve_fields(own.names if own is not None else (), described), strict=True))
        sources = [(self._renamed(file, found[file.schema]), of) for file, of in sources]
        schema = evolved_schema(own, [found[one] for one in described])
        columns = nullable(schema.landing)
        overwrite = None
        rewritten: list[RewrittenFiles] = []
        if present is None:
            log.create(columns)
        elif retyped_columns(present, schema):
            overwrite = columns
            rewritten = [
                RewrittenFiles(directory=log.directory, files=(path,), schema=columns, metadata=self._identity(log, path), rows=rows)
                for path, rows in log.files().items()
            ]
        else:
            log.add_columns(schema.landing)
            self.require_ours(log)
        parts = _log_parts(log.directory, sources, schema, int(after), self._target_rows)
        if copied is not None and not any(part.clears for part in parts):
            # a copy without files begins with a t, too
            parts.insert(0, LogPart(directory=log.directory, schema=schema, files=(), copied=copied, clears=True, rows=1))
        return Append(
            name=name,
            copy=copy_directory(table),
            log=log,
            application=application,
            done=done,
            end=end,
            overwrite=overwrite,
            rewritten=rewritten,
            parts=parts,
        )

    def _had_log(self, name: TableName, table: LakeTable) -> bool:
        """Whether a table's log began with its copy, if the copy is no longer there: copies are removed when the logs have them."""
        now = self._lake.state.tables.get(name)
        if table.until is not None and now is not None and now.is_synchronized:
            return False  # the log begins with a later copy
        return table.generation > 0 and table.is_synchronized

    def reached(self, log: LakeDelta, table: LakeTable) -> Lsn:
        """The LSN up to which the log has a table's landed changes, from any of its copies."""
        return max(log.applied(application) or INVALID_LSN for application in self._lake.log_applications(table))

    def _renamed(self, file: LandedFile, schema: TableSchema) -> LandedFile:
        names = new_names(file.schema, schema)
        return replace(file, path=renamed_file(self._storage, file.path, names), schema=schema) if names else file

    def require_ours(self, log: LakeDelta) -> None:
        """Check the log after each load. From then on only a commit of ours can succeed."""
        require_no_foreign_log_changes(log, self._lake.applications)

    def small_files(self, log: LakeDelta) -> RewrittenFiles | None:
        """Many small files, to be compacted into one. None: there are too few. Most reads of a log read all of it.

        Only neighbouring files are merged, because the order of rows is that of their files. Delta's own OPTIMIZE does not keep it.
        """
        rows_of = log.files()
        files = [(file.path, rows_of[file.path]) for file in files_of_log(log)]
        runs = list(runs_of_small_files(files, self._target_rows))
        if sum(map(len, runs)) < _SMALL_FILES:
            return None
        longest = max(runs, key=len)
        identities = [(self._identity(log, path), path) for path in longest]
        groups = [(metadata, [path for _, path in group]) for metadata, group in groupby(identities, key=lambda one: one[0])]
        metadata, taken = max(groups, key=lambda group: len(group[1]))
        if len(taken) < _FEW_FILES:
            return None
        schema = nullable(log.schema)
        rows = sum(rows_of[path] for path in taken)
        return RewrittenFiles(
            directory=log.directory, files=tuple(taken), schema=schema, order=("_lsn", "_seq"), metadata=metadata, rows=rows
        )

    def _identity(self, log: LakeDelta, path: str) -> dict[bytes, bytes]:
        return read_identity(self._storage, f"{log.directory}/{path}")


def _log_parts(directory: str, sources: Sequence[_Source], schema: TableSchema, after: int, target_rows: int) -> list[LogPart]:
    """The files for changes, in order. The changes of a file have one replica identity, and are of one copy or none."""
    parts: list[LogPart] = []
    for file, copied in sources:
        described = schema.with_identity(file.schema.identity, file.schema.keys)
        before = parts[-1] if parts else None
        if before is not None and (before.copied, before.schema) == (copied, described) and before.rows < target_rows:
            parts[-1] = replace(before, files=(*before.files, file.path), rows=before.rows + file.rows)
            continue
        parts.append(
            LogPart(
                directory=directory,
                schema=described,
                files=(file.path,),
                copied=copied,
                clears=copied is not None and (before is None or before.copied is None),
                after=after if copied is None else 0,
                rows=file.rows,
            )
        )
    return parts
