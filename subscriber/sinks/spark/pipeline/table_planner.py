"""Plans one table's part of a round: its waiting changes, its columns, its files, and the units of work."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Final

import pyarrow as pa

from subscriber.errors import TargetError
from subscriber.interfaces import TableName
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.catalog.lake import Lake, LakeTable, copy_directory
from subscriber.sinks.spark.catalog.snapshots import SnapshotTable
from subscriber.sinks.spark.files.file_errors import arrow_errors
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.landing.manifest import Manifest
from subscriber.sinks.spark.merge.key_ranges import read_range
from subscriber.sinks.spark.merge.parquet import read_base
from subscriber.sinks.spark.pipeline.applier_settings import ApplierSettings
from subscriber.sinks.spark.pipeline.engines.engine import Engine, TableFailed, TableResult, TableRound, writing
from subscriber.sinks.spark.pipeline.open_tables import OpenTables, lacks_published
from subscriber.sinks.spark.pipeline.planning.pending_changes import PendingChanges, copied_changes, read_work
from subscriber.sinks.spark.pipeline.planning.plan import Plan, plan_table
from subscriber.sinks.spark.pipeline.planning.table_work import BaseFile, TableWork
from subscriber.sinks.spark.schema.evolution import absent_columns, dropped_columns, evolved_schema, retyped_columns, stretches
from subscriber.sinks.spark.tables.column_statistics import ValueSearch
from subscriber.sinks.spark.tables.data_file import Bound
from subscriber.sinks.spark.tables.delta import LakeDelta
from subscriber.sinks.spark.tables.file_check import again_later, checking_files, is_due, require_copy, require_files
from subscriber.sinks.spark.tables.table_errors import COPY_AGAIN, DamagedTable, TableStopped

__all__ = ["TablePlanner"]

_log = logging.getLogger(__name__)


_SAMPLED_FILES: Final = 8
"""How many files of a unit that is too large are read to divide it."""


class TablePlanner:
    """Plans and prepares the tables of a round."""

    def __init__(self, storage: Storage, tables: OpenTables, engine: Engine, settings: ApplierSettings) -> None:
        self._storage = storage
        self._tables = tables
        self._engine = engine
        self._settings = settings
        self._values = ValueSearch(storage)
        self._ranges: dict[tuple[str, str | None], dict[str, tuple[Bound, Bound] | None]] = {}
        self._refused: dict[tuple[str, str, int], TableStopped] = {}  # by commits, until the table has another version

    def refuse(self, error: TableStopped) -> bool:
        """Stop a table whose commit was refused, until it has another version. False if it is already known, or not of that kind."""
        if error.refused is None or error.refused in self._refused:
            return False
        self._refused[error.refused] = error
        return True

    def failed(self, error: TableFailed) -> TableStopped:
        """The stop of a table that cannot be written. It is tried again later. If it cannot be read either, raise TableStopped."""
        delta = error.work.delta
        stop = again_later(TableStopped(str(error), hint=error.hint))
        delta.load()
        stop.refused = delta.directory, error.work.application, delta.version
        return stop

    def plan(
        self, lake: Lake, name: TableName, table: LakeTable, taken: Sequence[Manifest], end: Lsn, *, published: SnapshotTable | None
    ) -> TableRound | None:
        """Plan the work of one table, up to an LSN, unless it is already further. None: nothing waits.

        ``published`` is the table in the last snapshot that had it.

        Raises:
            TableStopped: the table cannot be continued.
        """
        delta, app = self._tables.of(name, table), lake.application(table)
        key = delta.directory, app, delta.version
        if (refused := self._refused.get(key)) is not None and not is_due(refused):
            raise refused
        self._refused.pop(key, None)
        try:
            with (
                checking_files(self._storage, delta, copy=copy_directory(table)),
                arrow_errors(self._storage.what(delta.directory)),
            ):
                return self._planned(lake, name, table, taken, end, published=published)
        except TableStopped as error:
            if error.again is not None:
                self._refused[key] = error  # do not read the file again in each round
            raise

    def _planned(
        self, lake: Lake, name: TableName, table: LakeTable, taken: Sequence[Manifest], end: Lsn, *, published: SnapshotTable | None
    ) -> TableRound | None:
        delta, app = self._tables.of(name, table), lake.application(table)
        applied = delta.applied(app)
        # a copy replaces the rows of the table; a table that is not copied keeps them
        replaced = applied is None and table.generation > 0
        if replaced:
            self._prepare_copy(lake, name, table, published)
        source = copied_changes(self._storage, copy_directory(table), table, published) if applied is None else PendingChanges(applied)
        source.add([file for manifest in taken if manifest.end > source.reached for file in manifest.files if file.table_id == table.id])
        source.reached = max(source.reached, end)
        if not source.schemas:
            return None
        present = delta.schema if delta.is_there else None
        source.rename(self._storage, present.names if present is not None and not replaced else ())
        schema = evolved_schema(None if replaced else present, source.schemas)
        dropped = dropped_columns(schema, source.schemas[-1])
        absent = set(absent_columns(schema, source.schemas))
        base: tuple[BaseFile, ...] = ()
        retyped: tuple[str, ...] = ()
        valued: set[str] = set()
        rewrite = False
        if present is not None and not replaced:
            base = self._base(delta, schema.first_key)
            retyped = retyped_columns(present, schema)
            # a round that was killed may have left a column in which no row has a value yet
            empty = {field for field in absent if field in present.names and not self._values.has_values(delta, field)}
            valued = set(present.names) - empty
            rewrite = bool(retyped) or bool(absent & valued)
        described = list(zip(source.files, source.described, strict=True))
        overwrite = schema.current if replaced or retyped else None
        there = present is not None and overwrite is None
        work = TableWork(
            directory=delta.directory,
            schema=schema,
            base=base,
            stretches=stretches(schema, valued, described),
            after=0 if applied is None else int(applied),
            rewrite=rewrite,
            retyped=retyped,
            dropped=dropped,
            target_rows=self._settings.target_rows,
            # readers take a commit with new columns as a whole
            feed=there and delta.has_feed,
            vectors=there and self._settings.vectors and name not in self._settings.without_vectors and delta.takes_vectors,
        )
        work, changes = read_work(self._storage, work, source)
        plan = plan_table(work, changes, partial(self._keys_of, work)) if work.stretches or work.rewrite else Plan((), (), cleared=False)
        found = TableRound(name, app, delta, source, work, plan, overwrite)
        self._require_writable(found)
        return found

    def _prepare_copy(self, lake: Lake, name: TableName, table: LakeTable, published: SnapshotTable | None) -> None:
        """Let a table begin again that its copy could not repair otherwise: it is damaged, or its columns cannot be written.

        Or its log lacks the published version: earlier snapshots must not read another one of that number.
        """
        delta = self._tables.of(name, table)
        try:
            reason = None
            if delta.is_there:
                delta.table_files()
                reason = "versions that were lost" if lacks_published(lake, table, delta, published) else delta.unwritable(columns=True)
        except DamagedTable:
            if not self._tables.begins_again(name, table, published):
                raise
        else:
            if reason is not None and self._tables.begins_again(name, table, published):
                _log.warning('table "%s" begins again without %s, because it was copied again', name, reason)

    def _require_writable(self, work: TableRound) -> None:
        if not work.delta.is_there:
            return
        reason = self._engine.refuses(work)
        new = set(work.task.schema.current.names) - set(work.delta.schema.names)
        if reason is None and (new or work.overwrite is not None):
            reason = self._engine.refuses_columns(work)
        if reason is not None:
            remedy = f"remove that from the table (ALTER TABLE … DROP FEATURE or UNSET TBLPROPERTIES), or {COPY_AGAIN}"
            if self._engine.name == "local" and not work.delta.is_append_only:
                remedy = f"let Spark with Delta's jar apply (`spark-apply --engine spark`), {remedy}"
            raise TableStopped(f"Delta table {work.delta.uri} has what engine {self._engine.name} cannot write: {reason}", hint=remedy)

    def _base(self, delta: LakeDelta, key: str | None) -> tuple[BaseFile, ...]:
        known = self._ranges.get((delta.directory, key), {})
        ranges: dict[str, tuple[Bound, Bound] | None] = {}
        found: list[BaseFile] = []
        for path, file in delta.table_files().items():
            ranges[path] = known[path] if path in known else read_range(self._storage, f"{delta.directory}/{path}", key)
            found.append(BaseFile(path, delta.row_count(file), ranges[path], file.size, file.vector))
        self._ranges[delta.directory, key] = ranges
        return tuple(found)

    def _keys_of(self, work: TableWork, files: Sequence[BaseFile]) -> pa.ChunkedArray:
        """The keys of some of these files, which say how the rows of all are distributed."""
        key = work.schema.keys[0]
        taken = files[:: max(len(files) // _SAMPLED_FILES, 1)]
        parts = [read_base(self._storage, work.directory, [file.read()], work.schema, [key])[key] for file in taken]
        return pa.chunked_array([chunk for part in parts for chunk in part.chunks], work.schema.current.field(key).type)

    def prepare(self, work: TableRound) -> None:
        """Create the table or its new columns, before its units run. If another writer changed it meanwhile, raise CommitConflict."""
        with writing(work):
            if not work.delta.is_there:
                work.delta.create(work.task.schema.current, work.source.begins)
            elif work.overwrite is None:
                self._engine.add_columns(work)

    def require_files(self, work: TableRound, error: TargetError) -> None:
        """If a file of the table, or of its copy, made a round fail, raise TableStopped."""
        delta = work.delta
        try:
            require_copy(self._storage, work.source.copy, error)
            require_files(self._storage, delta, error)
        except TableStopped as stop:
            delta.load()
            stop.refused = delta.directory, work.application, delta.version
            raise

    def remember(self, work: TableRound, done: TableResult) -> None:
        """Remember the ranges of new files, which need not be read from them then."""
        known = self._ranges.setdefault((work.delta.directory, work.task.schema.first_key), {})
        for file in done.files:
            known[file.path] = (file.low, file.high) if file.low is not None and file.high is not None else None
