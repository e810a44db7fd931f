"""The changes of one table in order: from its change log, and then from landed files that are not yet in the log.

Each change has the LSN of its transaction's end. So a range of LSNs is a range of changes, wherever they are stored. When landed files
move to the log during a read, the rest of the range is located again. Rows of an initial copy have the LSN of its snapshot. A table that is
being copied has no changes, because its log begins with the copy. A table that was removed and is copied again has the earlier changes once
its log has the new copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from subscriber.errors import TargetError, TargetUnavailable
from subscriber.interfaces import TableName, TableState
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.sinks.spark.catalog.lake import LANDING, Lake, LakeTable, copy_directory
from subscriber.sinks.spark.copy.copied_rows import read_copy
from subscriber.sinks.spark.files.file_errors import arrow_errors
from subscriber.sinks.spark.files.location import table_directory
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.landing.manifest import Manifest, manifest_ends, read_manifests
from subscriber.sinks.spark.merge.parquet import conformed
from subscriber.sinks.spark.schema.arrow_columns import nullable
from subscriber.sinks.spark.schema.arrow_types import widened
from subscriber.sinks.spark.schema.evolution import evolved_schema
from subscriber.sinks.spark.schema.table_schema import own_columns
from subscriber.sinks.spark.tables.column_mapping import new_names, renamed_rows, resolve_fields
from subscriber.sinks.spark.tables.column_statistics import files_of_log
from subscriber.sinks.spark.tables.delta_reader import DeltaReader

__all__ = ["Changes", "Piece"]

_ATTEMPTS: Final = 10
"""How many attempts in a row may find landed files removed. Each time, the log has their changes."""
_UNFINISHED: Final = frozenset({TableState.INIT, TableState.DATASYNC})


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a range that can be read independently: after ``start``, up to ``end``.

    ``file`` is one of the log, relative to the lake. None: everything that is in the range at the time of reading.
    """

    start: int
    end: int
    file: str | None = None


@dataclass(frozen=True, slots=True)
class _Known:
    """The current state of a table.

    Attributes:
        removed: whether it no longer belongs to the subscription.
        reached: the log has everything up to here.
        begun: whether there are changes after that, which can be read as landed.
        added: no change before this LSN is missing, even if the changes have not begun.
    """

    table: LakeTable
    removed: bool
    log: DeltaReader | None
    reached: Lsn
    begun: bool
    added: Lsn


class Changes:
    """Reads the changes of one table, see the module."""

    def __init__(self, storage: Storage, name: TableName) -> None:
        self._storage = storage
        self._name = name
        self._latest = INVALID_LSN

    def _look(self) -> _Known:
        lake = Lake.find(self._storage)
        if lake is None:
            raise TargetError(f"there is no lake in {self._storage.place}", hint="set option path to the target of a subscription")
        table = lake.state.tables.get(self._name)
        removed = table is None
        table = table or lake.state.removed.get(self._name)
        if table is None:
            raise TargetError(f'the lake in {self._storage.place} has no table "{self._name}"', hint="set option table to schema.table")
        was = self._copied_before(lake)
        log = DeltaReader(self._storage, table_directory("log", self._name, table.id))
        there = log.load()
        found = [log.applied(application) if there else None for application in lake.log_applications(table)]
        # before a copy is done, the log has changes of earlier copies only; a table that is not copied has changes from the start
        begun = table.entry.state not in _UNFINISHED and (found[-1] is not None or not table.generation)
        added = table.added
        if was is not None and found[was.generation] is None:
            # its rows have LSNs from before the table was added again, and can only be read once the log has them
            added = was.added
        return _Known(table, removed, log if there else None, max(done or INVALID_LSN for done in found), begun, added)

    def _copied_before(self, lake: Lake) -> LakeTable | None:
        """The table before it was added again to be copied, if its earlier copy still exists.

        Call it before the log is opened, because the copy is removed once the log has it. A copy that the log never gets is removed too.
        """
        was = lake.state.removed.get(self._name) if self._name in lake.state.tables else None
        if was is None or was.until is None or not was.generation:
            return None
        return was if read_copy(self._storage, copy_directory(was)) is not None else None

    def schema(self) -> pa.Schema:
        """The columns of the changes: metadata, and the table's current columns, including those of changes not yet in the log."""
        # read the manifests first, as in latest
        manifests = read_manifests(self._storage, LANDING)
        known = self._look()
        described = [file.schema for manifest in manifests for file in manifest.files if file.table_id == known.table.id]
        if not described:
            if known.log is not None:
                return known.log.schema
            raise TargetError(f'table "{self._name}" has no change log yet', hint="start the applier: subscriber spark-apply")
        own = own_columns(known.log.schema) if known.log is not None else None
        schema = evolved_schema(own, resolve_fields(own.names if own is not None else (), described))
        return nullable(schema.landing)

    def latest(self) -> Lsn:
        """The LSN up to which changes can be read now. It never decreases."""
        # read the manifests first: if one is removed in the meantime, the log has its changes
        last = Lsn(max(manifest_ends(self._storage, LANDING), default=0))
        known = self._look()
        until = known.table.until or INVALID_LSN
        if known.removed:
            last = min(last, until)
        found = max(known.added, known.reached, last if known.begun else INVALID_LSN)
        # if a copy was begun and given up, a table that is removed returns to its state before it was added again
        self._latest = max(self._latest, found)
        return self._latest

    def pieces(self, start: Lsn, end: Lsn) -> list[Piece]:
        """Divide the range after ``start`` up to ``end``: the files of the log, in order, and the landed changes after them."""
        if end <= start:
            return []
        known = self._look()
        found = [Piece(start, min(end, known.reached), file) for file in self._log_files(known, start, min(end, known.reached))]
        if end > known.reached:
            found.append(Piece(max(start, known.reached), end))
        return found

    def _log_files(self, known: _Known, start: Lsn, end: Lsn) -> list[str]:
        if known.log is None or end <= start:
            return []
        return [f"{known.log.directory}/{file.path}" for file in files_of_log(known.log) if file.last > start and file.first <= end]

    def read(self, piece: Piece, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Read the changes of a piece, in order, with these columns."""
        if piece.file is not None:
            yield from self._rows(piece.file, piece.start, piece.end, schema, {})
            return
        start, attempts = piece.start, 0
        while start < piece.end:
            # read the manifests first, as in latest
            manifests = read_manifests(self._storage, LANDING, Lsn(start))
            known = self._look()
            reached = min(int(known.reached), piece.end)
            for file in self._log_files(known, Lsn(start), Lsn(reached)):
                yield from self._rows(file, start, reached, schema, {})
            start = max(start, reached)
            try:
                for manifest, rows in self._landed(manifests, known, start, piece.end, schema):
                    yield from rows
                    start, attempts = int(manifest.end), 0
            except TargetUnavailable:
                attempts += 1
                if attempts == _ATTEMPTS:
                    raise
                continue
            return

    def _landed(
        self, manifests: list[Manifest], known: _Known, start: int, end: int, schema: pa.Schema
    ) -> Iterator[tuple[Manifest, list[pa.RecordBatch]]]:
        for manifest in manifests:
            # the range may end within a landed batch: then the rows are filtered
            if manifest.end <= max(start, int(known.reached)) or manifest.begin >= end:
                continue
            files = [file for file in manifest.files if file.table_id == known.table.id]
            names = [new_names(file.schema, *resolve_fields(schema.names, [file.schema])) for file in files]
            # read it completely before any of it is returned: a file may be removed during the read
            yield manifest, [row for file, new in zip(files, names, strict=True) for row in self._rows(file.path, start, end, schema, new)]

    def _rows(self, path: str, start: int, end: int, schema: pa.Schema, names: Mapping[str, str]) -> Iterator[pa.RecordBatch]:
        asked = {*schema.names, "_lsn"}
        with arrow_errors(self._storage.what(path)), self._storage.parquet(path) as file:
            there = [name for name in file.schema_arrow.names if names.get(name, name) in asked]
            for batch in file.iter_batches(columns=there):
                with arrow_errors(self._storage.what(path)):  # otherwise parquet() would report a damaged file
                    table: Any = pa.Table.from_batches([renamed_rows(batch, names) if names else batch])
                    table = table.filter(pc.and_(pc.greater(table["_lsn"], start), pc.less_equal(table["_lsn"], end)))
                    if not table.num_rows:
                        continue
                    self._require_held(table.schema, schema)
                    rows = conformed(table, schema).combine_chunks().to_batches()
                yield from rows

    def _require_held(self, there: pa.Schema, wanted: pa.Schema) -> None:
        """Check that a query's columns can hold the values. A cast to a narrower type would change values, or show one in its error."""
        for field in wanted:
            if field.name in there.names and widened(there.field(field.name).type, field.type) != field.type:
                raise TargetError(
                    f'column "{field.name}" of table "{self._name}" is of another type than when the query started',
                    hint="start the query again: it takes the columns as they are now",
                )
