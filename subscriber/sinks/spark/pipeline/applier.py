"""The applier: what was landed becomes Delta tables, in rounds.

A round takes the manifests that wait, divides the work of all tables into units (``plan.py``), has them done (``engines.py``), commits each
table, and publishes one cut of all of them (``snapshots.py``). What makes it exact, whatever crashes when:

* A table's commit says up to which LSN it is (``delta.py``). A table that was committed in a round that crashed takes only what is behind
  that from the next one; what its units wrote and no commit names is nothing.
* A round ends no earlier than any table is already, so that the cut it publishes is one.
* A table that is still being synchronized has no part in it. Its first commit takes its copy, its own batches, and what the apply worker
  landed since, together; until the cut has reached the LSN at which it was handed over it is not published.
* Landed files go once the cut is published and the change log has them (``change_log.py``).

One applier a lake: a lock of its own, beside the subscriber's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow.compute as pc

from subscriber.abc import TableName, TableState
from subscriber.errors import SubscriberError, SubscriptionInUse, TargetError
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.sinks.spark.catalog.lake import LANDING, Lake, LakeTable, copy_directory
from subscriber.sinks.spark.catalog.snapshots import Cut, CutTable, forget_cuts, read_cut, restore_cut, write_cut
from subscriber.sinks.spark.copy.copy_document import read_copy
from subscriber.sinks.spark.files.errors import arrow_errors
from subscriber.sinks.spark.files.location import table_directory
from subscriber.sinks.spark.files.lock import FileLock
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.landing.manifest import Manifest, ManifestsRead, check_files, read_manifests
from subscriber.sinks.spark.maintenance.change_log import ChangeLog
from subscriber.sinks.spark.maintenance.retention import remove_unneeded_files
from subscriber.sinks.spark.merge.key_ranges import read_range
from subscriber.sinks.spark.merge.row_matching import MissingRows
from subscriber.sinks.spark.pipeline.applier_status import ApplierStatus
from subscriber.sinks.spark.pipeline.engines import Engine, TableRound
from subscriber.sinks.spark.pipeline.pending_changes import PendingChanges, copied_changes, read_work
from subscriber.sinks.spark.pipeline.plan import BaseFile, Plan, TableWork, plan_table
from subscriber.sinks.spark.pipeline.row_identity import RowIdentityCheck, TableBefore, columns_before
from subscriber.sinks.spark.schema.evolution import absent_columns, dropped_columns, evolved_schema, retyped_columns, stretches
from subscriber.sinks.spark.schema.table_schema import TableSchema
from subscriber.sinks.spark.tables.column_declarations import ColumnDeclarations, DeclaredColumns
from subscriber.sinks.spark.tables.column_mapping import ROUND_DIRECTORY
from subscriber.sinks.spark.tables.delta import LakeDelta, with_added
from subscriber.sinks.spark.tables.foreign_commits import (
    COPY_AGAIN,
    copied_version,
    copy_application,
    require_no_foreign_commits,
    require_published_version,
)

__all__ = ["Applier", "ApplierSettings"]

_log = logging.getLogger(__name__)

_FORGET_EVERY: Final = 100
_UNANSWERED: Final = 16
_FIRST_SWEEP_SECONDS: Final = 60.0
"""After its beginning: programs that are started again and again sweep, too."""
_SYNCHRONIZED: Final = frozenset({TableState.SYNCDONE, TableState.READY})


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplierSettings:
    """Settings of the applier.

    Attributes:
        target_rows: of a file.
        round_bytes: landed bytes after which a round takes no more manifests.
        log_files: landed files after which the change log takes them, and they go.
        sweep_seconds: how often files that are no longer needed are looked for.
        grace_hours: how long files that readers may still have open stay; at most 48.
        cuts: how many published cuts are remembered for readers of the past.
    """

    target_rows: int = 250_000
    round_bytes: int = 512 * 1024**2
    log_files: int = 200
    sweep_seconds: float = 3600.0
    grace_hours: int = 24
    cuts: int = 1000


class Applier:
    """See the module.

    Args:
        storage: the lake's.
        engine: does the work.
        settings: how.

    Attributes:
        missing: changes that found no row, since it was made.
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
        self._copied: dict[str, int] = {}  # tables that executors copied, and the version that has the copy, until a cut has it
        self._seen: tuple[dict[TableName, LakeTable], list[tuple[TableName, LakeTable, Lsn]]] | None = None
        self._published = 0
        self._next_sweep = time.monotonic() + _FIRST_SWEEP_SECONDS
        # what was published when it last looked, and what it tried since, which may be published yet; none: that is not known
        self._mine: tuple[Cut | None, ...] = ()
        self._is_locked = storage.root is not None
        path = storage.root / "applier.lock" if storage.root is not None else None
        self._lock = FileLock(path, f"the lake in {storage.place} has an applier already", "stop that one first")

    def open(self) -> None:
        """Take the lock of the lake's only applier.

        Raises:
            SubscriptionInUse: there is one.
            TargetError: there is no lake.
        """
        if Lake.find(self._storage) is None:
            raise TargetError(f"there is no lake in {self._storage.place}", hint="subscriber run --target spark://… makes one")
        self._lock.take()
        self._mine = ()
        if not self._is_locked:
            restore_cut(self._storage)
        self._storage.remove_directory(ROUND_DIRECTORY)
        self._status.begin()

    def _require_alone(self) -> Cut | None:
        """Read the published cut. Without a lock, check that it is one that this applier has published or read."""
        cut = read_cut(self._storage)
        known = cut in self._mine
        if not self._is_locked and self._mine and cut is not None and not known:
            text = f"the lake in {self._storage.place} has another applier, which published meanwhile"
            raise SubscriptionInUse(text, hint="stop one of them; if there is one only, the store took a cut late: start it again")
        # what it tried to publish after this one may be published yet
        self._mine = (cut, *self._mine[self._mine.index(cut) + 1 :]) if known else (cut,)
        return cut

    def failed(self, error: SubscriberError) -> None:
        """Report a failed attempt in ``applier.json``."""
        self._status.failed(error.one_line(), self.missing)

    def close(self) -> None:
        """Give the lock back."""
        self._lock.give_back()

    def run_round(self) -> Cut | None:
        """Apply what waits: one micro-batch.

        Returns:
            The cut that was published; None: there was nothing to do.

        Raises:
            TargetError, DataLossError: nothing of this round is published.
        """
        # the position is read before the manifests: whatever it covers is among them. The catalog is read after them: a table is in it
        # before anything is landed for it, so that of every table whose rows are among them this round knows
        position = self._lake().position
        cut = self._require_alone()
        manifests = self._manifests(cut)
        lake = self._lake()
        known = position.lsn if position is not None else INVALID_LSN
        tables = {name: table for name, table in lake.state.tables.items() if table.entry.state in _SYNCHRONIZED}
        seen = (tables, _left(lake))
        if cut is not None and not manifests and known <= cut.lsn and seen == self._seen:
            return None
        self._require_ours(lake, tables, cut)
        taken = self._taken(lake, tables, manifests)
        landed = taken[-1].end if taken else (cut.landed if cut is not None else INVALID_LSN)
        end = landed
        if len(taken) == len(manifests):
            end = max(end, known, cut.lsn if cut is not None else INVALID_LSN)
        works = [self._work(lake, name, table, taken, end) for name, table in tables.items()]
        for name, table, until in _left(lake):
            works.append(self._work(lake, name, table, [manifest for manifest in taken if manifest.end <= until], min(end, until)))
        waiting = [work for work in works if work is not None]
        if waiting:
            self._apply(waiting)
            self._storage.remove_directory(ROUND_DIRECTORY)
            # MERGE INTO may have continued from a commit that another writer made meanwhile
            self._require_ours(lake, tables, cut)
        published = self._cut(lake, tables, end, landed)
        if published != cut:
            self._require_alone()
            if published not in self._mine:
                # it may be published though the store gives no answer, and later, too
                self._mine = (self._mine[0], *(*self._mine[1:], published)[-_UNANSWERED:])
            write_cut(self._storage, published)
            self._mine = (published,)
            self._published += 1
            if self._published % _FORGET_EVERY == 0:
                forget_cuts(self._storage, self._settings.cuts)
        self._status.tell(self.missing)
        self._seen = seen if len(taken) == len(manifests) else None
        changed = bool(waiting) or cut is None or published.tables != cut.tables or bool(taken)
        return published if changed else None

    def _lake(self) -> Lake:
        lake = Lake.find(self._storage)
        if lake is None:
            raise TargetError(f"there is no lake in {self._storage.place}", hint="was it removed?")
        return lake

    def tidy(self, *, now: bool = False) -> None:
        """Append to the change log up to the published cut if enough files wait, and remove the landed files that are no longer needed.

        Args:
            now: whatever has gathered.

        Raises:
            TargetError: nothing is removed that is still needed.
        """
        lake, cut = Lake.find(self._storage), read_cut(self._storage)
        if lake is None or cut is None:
            return
        log = ChangeLog(self._storage, lake, self._logs, read=self._read, target_rows=self._settings.target_rows)
        with arrow_errors(self._storage.what("log")):
            log.compact(cut, 0 if now else self._settings.log_files, lambda name, table: self._is_applied(lake, name, table))
        if time.monotonic() >= self._next_sweep:
            # the cut that is published has the newest versions: whatever they have is no file of these
            tables = [delta for delta in (*self._deltas.values(), *self._logs.values()) if delta.load()]
            if count := remove_unneeded_files(self._storage, lake, tables, self._settings.grace_hours):
                _log.info("removed %d files that are no longer needed", count)
            self._next_sweep = time.monotonic() + self._settings.sweep_seconds

    def _require_ours(self, lake: Lake, tables: Mapping[TableName, LakeTable], cut: Cut | None) -> None:
        for name, table in tables.items():
            known = cut.tables.get(name) if cut is not None else None
            delta = self._delta(name, table)
            if cut is None or known is None or known.path != delta.directory:
                if delta.directory in self._copied:
                    self._require_ours_since(lake, table, delta, self._copied[delta.directory])
                continue
            self._copied.pop(delta.directory, None)
            applied = delta.applied(_application(lake, table))
            # a copy that was made since replaces what was there, and what became of it
            if not (table.generation and (applied is None or applied > cut.lsn)):
                require_published_version(delta, known, applied)
            if delta.is_there and not (table.generation and applied is None):
                self._require_ours_since(lake, table, delta, known.version)

    def _require_ours_since(self, lake: Lake, table: LakeTable, delta: LakeDelta, version: int) -> None:
        # whatever number the table of this name had then
        require_no_foreign_commits(self._storage, delta, version, f"subscriber-{lake.target_identifier}-", _application(lake, table))

    def _is_applied(self, lake: Lake, name: TableName, table: LakeTable) -> bool:
        """Whether the table has been committed since its last copy."""
        return self._delta(name, table).applied(_application(lake, table)) is not None

    # --- what waits

    def _manifests(self, cut: Cut | None) -> list[Manifest]:
        landed = cut.landed if cut is not None else INVALID_LSN
        found = read_manifests(self._storage, LANDING, landed, anchor=landed, read=self._read)
        check_files(self._storage, LANDING, found)
        return found

    def _taken(self, lake: Lake, tables: dict[TableName, LakeTable], manifests: list[Manifest]) -> list[Manifest]:
        reached = [(self._delta(name, table).applied(_application(lake, table)), table.entry.lsn) for name, table in tables.items()]

        def may_end(lsn: Lsn) -> bool:
            """Whether a cut at ``lsn`` would have no table that is ahead of it. A table that is handed over later is not in it."""
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
        delta = self._deltas.setdefault(directory, LakeDelta(self._storage, directory))
        delta.load()
        return delta

    # --- one table

    def _work(self, lake: Lake, name: TableName, table: LakeTable, taken: Sequence[Manifest], end: Lsn) -> TableRound | None:
        with arrow_errors(self._storage.what(table_directory("tables", name, table.id))):
            return self._planned(lake, name, table, taken, end)

    def _planned(self, lake: Lake, name: TableName, table: LakeTable, taken: Sequence[Manifest], end: Lsn) -> TableRound | None:
        delta = self._delta(name, table)
        application = _application(lake, table)
        applied = delta.applied(application)
        # a copy replaces what the table had; a table that is not copied keeps it
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
            # a round that was killed may have left a column that nothing has a value in yet
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
        found = self._row_identity.look(before, schema, described, work.after, truncated=truncated)
        if found.lost is not None and table.until is None:
            raise TargetError(found.lost, hint=COPY_AGAIN)
        declared = known, DeclaredColumns(source.reached, source.schemas[-1], found.doubtful)
        plan = plan_table(work, changes) if work.stretches or work.rewrite else Plan((), (), cleared=False)
        return TableRound(name, application, delta, source, work, plan, overwrite, declared)

    def _registered(self, lake: Lake, table: LakeTable, delta: LakeDelta) -> bool:
        """Whether the table begins with files that executors wrote. If so, add them to the table, as the first commit of its copy."""
        copied = read_copy(self._storage, copy_directory(table)) if table.generation else None
        if copied is None or copied.base is None:
            return False
        application = _application(lake, table)
        if delta.applied(copy_application(application)) is None:
            if not delta.is_there:
                delta.create(copied.schema.current)
            delta.commit(copied.base, (), copy_application(application), copied.lsn, overwrite=copied.schema.current)
        # no cut has it yet, from which on its commits would be looked at
        self._copied[delta.directory] = copied_version(self._storage, delta, application)
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
        for work in works:
            if not work.delta.is_there:
                work.delta.create(work.task.schema.current)
            elif work.overwrite is None:
                work.delta.add_columns(work.task.schema.current)
            if work.overwrite is None:
                work.delta.mark_added(work.task.added)
            self._declarations.keep(work.delta.directory, work.application, *work.declared)
        for work, done in zip(works, self._engine.apply(works), strict=True):
            known = self._files.setdefault((work.delta.directory, _first_key(work.task.schema)), {})
            for file in done.files:
                range_ = (file.low, file.high) if file.low is not None and file.high is not None else None
                known[file.path] = BaseFile(file.path, file.rows, range_)
            self.missing.add(done.missing)
            _log.debug('table "%s" is at %s', work.name, work.source.reached)

    def _cut(self, lake: Lake, tables: dict[TableName, LakeTable], end: Lsn, landed: Lsn) -> Cut:
        found: dict[TableName, CutTable] = {}
        for name, table in tables.items():
            delta = self._delta(name, table)
            applied = delta.applied(_application(lake, table))
            if applied is not None and not _is_ahead(table.entry.lsn, end):
                delta.make_durable()
                found[name] = CutTable(delta.directory, delta.version, applied)
        return Cut(end, landed, found)


def _is_ahead(handed: Lsn | None, end: Lsn) -> bool:
    return handed is not None and handed > end


def _left(lake: Lake) -> list[tuple[TableName, LakeTable, Lsn]]:
    """Removed tables with landed changes that must still be applied, and the LSN up to which."""
    found: list[tuple[TableName, LakeTable, Lsn]] = []
    for name, table in lake.state.removed.items():
        now = lake.state.tables.get(name)
        # a copy that is finished replaces all of it
        if table.until is not None and (now is None or now.entry.state not in _SYNCHRONIZED):
            found.append((name, table, table.until))
    return found


def _first_key(schema: TableSchema) -> str | None:
    return schema.keys[0] if schema.keys else None


def _application(lake: Lake, table: LakeTable) -> str:
    return f"subscriber-{lake.target_identifier}-{table.id}-{table.generation}"
