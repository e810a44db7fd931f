"""History tables: they keep what the current state of a table loses (see ``versions.py``).

A history table is derived from the change log, in a Delta table of its own. Its commits state in Delta's ``txn`` up to which LSN of the log
they go. So each change is applied exactly once, and the table can be derived again at any time: if its directory is removed, it is built
from the whole log. A table that gets a history later gets all of it, as far as the log goes back.

In a round, the tables are committed first. Then the logs of tables with a history get the changes of the round, and the histories follow.
So the published snapshot has the history at the same LSN as the table. A history that cannot be continued leaves the snapshot alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from subscriber.errors import TargetError
from subscriber.interfaces import TableName
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.sinks.spark.catalog.history import HISTORY_COLUMNS, history_name
from subscriber.sinks.spark.catalog.lake import Lake
from subscriber.sinks.spark.catalog.snapshots import Snapshot, SnapshotTable, StoppedTable
from subscriber.sinks.spark.files.file_errors import arrow_errors
from subscriber.sinks.spark.files.location import table_directory
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.maintenance.change_log import ChangeLog
from subscriber.sinks.spark.maintenance.log_files import RewrittenFiles, read_identity, rewrite_files, runs_of_small_files, with_identity
from subscriber.sinks.spark.merge.key_ranges import read_range
from subscriber.sinks.spark.merge.parquet import read_changes
from subscriber.sinks.spark.merge.units import changes_between, write_history_unit
from subscriber.sinks.spark.merge.versions import history_schema
from subscriber.sinks.spark.merge.work_unit import Unit
from subscriber.sinks.spark.pipeline.engines.engine import Engine
from subscriber.sinks.spark.pipeline.planning.plan import plan_table
from subscriber.sinks.spark.pipeline.planning.table_work import BaseFile, TableWork, plan_columns
from subscriber.sinks.spark.pipeline.stopped_tables import stopping
from subscriber.sinks.spark.schema.arrow_columns import nullable
from subscriber.sinks.spark.schema.evolution import Stretch, retyped_columns
from subscriber.sinks.spark.schema.table_schema import LakeColumn, TableSchema, folded_name, own_columns
from subscriber.sinks.spark.tables.column_statistics import LogFile, files_of_log, null_counts
from subscriber.sinks.spark.tables.delta import LakeDelta, commit_note
from subscriber.sinks.spark.tables.file_check import again_later, checking_files, is_due
from subscriber.sinks.spark.tables.foreign_commits import require_no_foreign_log_changes
from subscriber.sinks.spark.tables.table_errors import CommitConflict, TableStopped, remedy

__all__ = ["HistoryTables", "history_documents"]

_log = logging.getLogger(__name__)

_STEP_FILES: Final = 8
"""Rows of the log that one commit applies, in files of the target size. A transaction is never divided."""
_SMALL_FILES: Final = 64
"""Compaction starts at this number of small files with ended versions."""


@dataclass(slots=True)
class _Work:
    """One commit of a history table.

    Attributes:
        schema, columns: of the replicated table, and of the history table.
        after, until: it applies the changes between these LSNs.
        removed: files that it replaces.
        rewritten: files with ended versions that get new types.
        overwrite: whether types change.
    """

    delta: LakeDelta
    schema: TableSchema
    columns: pa.Schema
    after: Lsn
    until: Lsn
    units: Sequence[Unit]
    removed: Sequence[str]
    rewritten: list[RewrittenFiles] = field(default_factory=list)
    overwrite: bool = False


class HistoryTables:
    """The history tables of a lake. ``files``: sizes of the files that the last :meth:`apply` wrote, by the histories' names."""

    def __init__(self, storage: Storage, engine: Engine, log: ChangeLog, target_rows: int, retain_hours: int) -> None:
        self._storage = storage
        self._engine = engine
        self._log = log
        self._target_rows = target_rows
        self._files: dict[tuple[str, str | None], dict[str, BaseFile]] = {}
        self._retain_hours = retain_hours
        self._stopped: dict[str, TableStopped] = {}
        self.opened: dict[str, LakeDelta] = {}
        self.files: dict[TableName, list[int]] = {}

    def apply(
        self, lake: Lake, kept: Collection[TableName], snapshot: Snapshot, left_out: Mapping[str, TableStopped]
    ) -> tuple[dict[TableName, SnapshotTable], dict[TableName, TableStopped]]:
        """Bring the histories of the tables in a snapshot that is not published yet to its LSN.

        Those in the directories ``left_out``, or with a log there, are not continued in this round.

        Returns:
            The history tables for the snapshot, by their names; and the errors of those that cannot be continued.

        Raises:
            CommitConflict: another writer committed to a history table, or to a log, in the meantime.
        """
        found: dict[TableName, SnapshotTable] = {}
        stopped: dict[TableName, TableStopped] = {}
        self.files = {}
        tables = {name: lake.state.tables[name] for name in kept if name in snapshot.tables}
        logs = {name: table_directory("log", name, table.id) for name, table in tables.items()}
        errors = {name: left_out[directory] for name, directory in logs.items() if directory in left_out}
        if wanted := {name: table for name, table in tables.items() if name not in errors}:
            errors |= self._log.append(lake, wanted, snapshot.landed)
        for name, table in tables.items():
            as_name = history_name(name, lake.state.tables)
            with stopping(as_name, stopped):
                if name in errors:
                    raise errors[name]
                if (error := left_out.get(table_directory("history", name, table.id))) is not None:
                    raise error
                reached = self._log.reached(name, table)
                if reached is not None:
                    found[as_name] = self._continued(lake, (name, as_name), *reached)
        return found, stopped

    def _continued(self, lake: Lake, names: tuple[TableName, TableName], log: LakeDelta, reached: Lsn) -> SnapshotTable:
        directory = table_directory("history", names[0], lake.state.tables[names[0]].id)
        delta = self.opened.setdefault(directory, LakeDelta(self._storage, directory, self._retain_hours))
        if (stop := self._stopped.get(directory)) is not None and not is_due(stop):
            raise stop  # without reading files in each round
        try:
            with checking_files(self._storage, log, delta), arrow_errors(self._storage.what(directory)):
                return self._followed(lake, names, (log, delta), reached)
        except CommitConflict:
            raise
        except TargetError as found:
            stop = found if isinstance(found, TableStopped) else TableStopped(str(found), hint=found.hint)
            self._stopped[directory] = again_later(stop)
            raise

    def _followed(self, lake: Lake, names: tuple[TableName, TableName], deltas: tuple[LakeDelta, LakeDelta], reached: Lsn) -> SnapshotTable:
        (name, as_name), (log, delta) = names, deltas
        app = f"{lake.applications}{lake.state.tables[name].id}-history"
        delta.load()
        if delta.is_there:
            self._require_usable(lake, delta)
            delta.make_durable()
        while (after := delta.applied(app) or INVALID_LSN) < reached:
            work = self._planned(name, log, delta, after, reached)
            self.files.setdefault(as_name, []).extend(self._commit(work, app, f"history of {name} up to {work.until}"))
            self._merge_small(delta, work.schema, app, work.until)
        delta.make_durable()
        return SnapshotTable(delta.directory, delta.version, after)

    def _require_usable(self, lake: Lake, delta: LakeDelta) -> None:
        if not set(HISTORY_COLUMNS.names) <= set(delta.schema.names):
            raise TableStopped(f"history table {delta.uri} has no versions of rows", hint=remedy(delta.directory))
        require_no_foreign_log_changes(delta, lake.applications, "history table")
        if (reason := delta.unwritable(columns=True)) is not None:
            raise TableStopped(f"history table {delta.uri} has what cannot be written: {reason}", hint=remedy(delta.directory))

    def _step(self, log: LakeDelta, after: Lsn, reached: Lsn) -> tuple[list[LogFile], Lsn]:
        """The next part of a change log: files in order, and the LSN of its last changes."""
        rows_of = log.files()
        files = [file for file in files_of_log(log) if file.last > after]
        rows = 0
        for file in files:
            rows += rows_of[file.path]
            if rows >= self._target_rows * _STEP_FILES:
                reached = min(reached, Lsn(file.last))
                break
        return [file for file in files if file.first <= reached], reached

    def _planned(self, name: TableName, log: LakeDelta, delta: LakeDelta, after: Lsn, reached: Lsn) -> _Work:
        """The next commit that brings a history table to what its log has reached."""
        files, until = self._step(log, after, reached)
        schema = _log_schema(name, log)
        if not files:
            return _Work(delta, schema, history_schema(schema), after, until, (), ())
        identities = self._identities(name, log, files)
        schema = with_identity(schema, identities[-1])
        stretches = [
            Stretch(tuple(f"{log.directory}/{file.path}" for _, file in group), with_identity(schema, identity), ())
            for identity, group in groupby(zip(identities, files, strict=True), key=lambda one: one[0])
        ]
        columns = plan_columns(schema)
        parts = [read_changes(self._storage, stretch.files, schema, 0, columns) for stretch in stretches]
        changes = changes_between(pa.concat_tables(parts), int(after), int(until))
        is_truncate = pc.equal(changes["_op"], "t")
        retyped = retyped_columns(delta.schema, schema) if delta.is_there else ()
        work = TableWork(
            directory=delta.directory,
            schema=schema,
            base=self._base(delta, schema.first_key) if delta.is_there else (),
            stretches=tuple(stretches),
            after=int(after),
            # a TRUNCATE ends all versions
            rewrite=bool(retyped) or bool(pc.any(is_truncate).as_py()),
            retyped=retyped,
            target_rows=self._target_rows,
        )
        plan = plan_table(work, changes.filter(pc.invert(is_truncate)))
        units = [replace(unit, until=int(until)) for unit in plan.units]
        found = _Work(delta, schema, history_schema(schema), after, until, units, plan.removed)
        if retyped:
            found.overwrite = True
            ended = delta.files().keys() - {file.path for file in work.base}
            found.rewritten = [RewrittenFiles(directory=delta.directory, files=(path,), schema=found.columns) for path in sorted(ended)]
        return found

    def _identities(self, name: TableName, log: LakeDelta, files: Sequence[LogFile]) -> list[dict[bytes, bytes]]:
        """The replica identity of each file. A file that another program has optimized gets that of the next one."""
        found: list[dict[bytes, bytes]] = []
        for file in reversed(files):
            identity = read_identity(self._storage, f"{log.directory}/{file.path}") or (found[-1] if found else {})
            if not identity:
                raise TableStopped(
                    f'the change log of table "{name}" does not state which columns identify a row',
                    hint="the history begins with the next change of the table",
                )
            found.append(identity)
        return found[::-1]

    def _base(self, delta: LakeDelta, key: str | None) -> tuple[BaseFile, ...]:
        """The files with rows that may change."""
        known = self._files.get((delta.directory, key), {})
        files: dict[str, BaseFile] = {}
        current = null_counts(delta.add_actions(), "_end_lsn")
        for path, rows in delta.files().items():
            if current.get(path) == 0:
                continue
            files[path] = known.get(path) or BaseFile(path, rows, read_range(self._storage, f"{delta.directory}/{path}", key))
        self._files[delta.directory, key] = files
        return tuple(files.values())

    def _commit(self, work: _Work, application: str, what: str) -> list[int]:
        """Write and commit. Return the sizes of the new files."""
        if not work.delta.is_there:
            work.delta.create(work.columns)
        elif not work.overwrite:
            work.delta.add_columns(work.columns)
        added = self._engine.each(rewrite_files, work.rewritten, [0] * len(work.rewritten), what)
        for files in self._engine.each(write_history_unit, work.units, [unit.rows for unit in work.units], what):
            added += files
        note = commit_note("history", work.until, work.after or None)
        work.delta.commit(added, work.removed, application, work.until, note=note, overwrite=work.columns if work.overwrite else None)
        return [file.size for file in added]

    def _merge_small(self, delta: LakeDelta, schema: TableSchema, application: str, end: Lsn) -> None:
        """Compaction of the files with ended versions."""
        current, rows_of = null_counts(delta.add_actions(), "_end_lsn"), delta.files()
        small = [(path, rows) for path, rows in rows_of.items() if current[path] == 0 and rows < self._target_rows // 4]
        if len(small) < _SMALL_FILES:
            return
        taken = max(runs_of_small_files(small, self._target_rows), key=len)
        keys = [key for key in schema.keys if not pa.types.is_nested(schema.current.field(key).type)]
        columns = nullable(delta.schema)
        rows = sum(rows_of[path] for path in taken)
        work = RewrittenFiles(directory=delta.directory, files=tuple(taken), schema=columns, order=(*keys, "_lsn"), rows=rows)
        added = self._engine.each(rewrite_files, [work], [rows], f"compact {delta.directory}")
        delta.commit(added, taken, application, end, note=commit_note("compact", end), same_rows=True)


def _log_schema(name: TableName, log: LakeDelta) -> TableSchema:
    columns = tuple(LakeColumn(one.name, one.name, one.type, key=False) for one in own_columns(log.schema))
    taken = next((one.name for one in columns if folded_name(one.name) in HISTORY_COLUMNS.names), None)
    if taken is not None:
        raise TableStopped(f'table "{name}" has a column "{taken}", which its history needs', hint="rename the column, or keep no history")
    return TableSchema(name, "d", columns)


def history_documents(stopped: Mapping[TableName, TableStopped], snapshot: Snapshot, landed: Lsn) -> dict[TableName, StoppedTable]:
    """What the next snapshot says about histories that cannot be continued. The change log keeps what they lack."""
    found: dict[TableName, StoppedTable] = {}
    for name, error in stopped.items():
        known = snapshot.stopped.get(name)
        text = error.one_line()
        if known is None:
            known = StoppedTable(last=snapshot.tables.get(name), generation=0, lsn=landed, kept=False, since=time.time(), error=text)
            _log.error('table "%s" left the published snapshot: %s', name, text)
        found[name] = replace(known, error=text)
    return found
