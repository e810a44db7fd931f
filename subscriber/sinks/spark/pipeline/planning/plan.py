"""Planning a round: find the files of a table that its changes affect, and divide the work into units.

Files of a table have ranges of its first key column. Files whose ranges overlap form a cluster. The clusters divide all possible keys, so
that every change belongs to exactly one cluster. A cluster without changes is not read. So the work is proportional to the affected files,
not to the size of the table: changes of recent keys affect only the last files.

* A unit rewrites a file, or keeps it and marks its replaced and deleted rows in its deletion vector, if these are few; the new rows are
  a small file then. Small files may belong to several clusters. They are merged once there are many.
* Many changes without files (the first load) are divided by the keys themselves. So is a cluster that is too large for a task: then each
  of its units reads the files that it shares with others.
* A cluster that has become small is merged with its neighbour when it is affected.
* A row that moved from another key without its TOASTed values needs the old row, so the clusters of both keys form one unit. For other rows
  that moved, they form one unit too if it is not too large, because an UPDATE whose old row does not exist is skipped.
* If all files are rewritten, as after ALTER TABLE, the clusters without changes become units too.
* The whole table is one unit in these cases: the stretches of changes (see ``evolution.py``) do not all have the same first key column, the
  type of that column changed, the key has no order, or files of another writer have no range.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import pyarrow as pa

from subscriber.sinks.spark.merge.fold import since_truncate
from subscriber.sinks.spark.merge.key_ranges import KeyRange
from subscriber.sinks.spark.merge.keys import is_orderable
from subscriber.sinks.spark.merge.work_unit import Unit, UnitFile
from subscriber.sinks.spark.pipeline.planning.clusters import (
    SMALL,
    KeysOf,
    OrderedKeys,
    cluster_of,
    clusters_of,
    count_changes,
    divided_clusters,
    divided_keys,
    grouped,
    moved_rows,
)
from subscriber.sinks.spark.pipeline.planning.table_work import BaseFile, TableWork
from subscriber.sinks.spark.tables.data_file import Bound

__all__ = ["Plan", "plan_table"]

_LOOSE_FILES: Final = 8
"""How many small files a table without a key may have before they are merged."""
_SMALL_FILES: Final = 16
"""How many small files a table with a key, or a cluster of it, may have before they are merged."""
_DELETED_PART: Final = 4
"""A file is rewritten once one of this many of its rows is deleted."""
_TINY_BYTES: Final = 32 * 1024
"""A file up to this size is rewritten: marking its rows would save little."""
_KEY_PART: Final = 8
"""Reading the keys of this many rows takes as long as rewriting one row."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The units of a table, the files that they replace, and whether there was a TRUNCATE among the changes."""

    units: tuple[Unit, ...]
    removed: tuple[str, ...]
    cleared: bool


def plan_table(work: TableWork, changes: pa.Table, keys_of: KeysOf | None = None) -> Plan:
    """Divide a table's work.

    Args:
        work: of the table.
        changes: those of all stretches, in order, with the columns of :func:`plan_columns`.
        keys_of: see :data:`subscriber.sinks.spark.pipeline.planning.clusters.KeysOf`. None: files that overlap form one unit.
    """
    changes, cleared = since_truncate(changes)
    if cleared and work.feed:
        work = replace(work, rewrite=True)  # the feed has the rows that TRUNCATE deletes
    base = () if cleared and not work.feed else work.base
    gone = tuple(file.path for file in work.base)
    schema = work.schema
    if not schema.keys and len(work.stretches) <= 1:
        return _without_key(work, base, changes.num_rows, cleared=cleared)
    if not _is_divisible(work) or any(file.range is None for file in base):
        hits = _spread(base, changes.num_rows)
        files = _files(work, base, (), hits)
        unit = _unit(work, base, files, (), changes.num_rows, cleared=cleared)
        return Plan((unit,), gone if cleared else _rewritten([unit]), cleared)
    keys = changes[schema.keys[0]]
    small = [file for file in base if work.marks and file.rows < work.target_rows // SMALL]
    large = [file for file in base if file not in small]
    ordered = OrderedKeys(keys)
    clusters = clusters_of(large) if large else divided_keys(ordered, work.target_rows)
    count_changes(clusters, ordered)
    clusters, spread = divided_clusters(clusters, work.target_rows, keys_of, everything=work.rewrite) if keys_of else (clusters, [])
    count_changes(clusters, ordered)
    lows = [cluster.low for cluster in clusters]
    wide = [*small, *spread]
    spans = {file.path: _span(lows, file) for file in wide}
    merged = _merged_files([file for file in small if spans[file.path][0] < spans[file.path][1]])
    hits = _hits(spread, ordered) if work.marks else {}
    merged |= {file.path for file in spread if not work.marks or (hits[file.path] and _is_rewritten(file, hits[file.path]))}
    for path in merged:
        for number in range(spans[path][0], spans[path][1] + 1):
            clusters[number].needed = True
    groups = grouped(clusters, moved_rows(clusters, changes, keys), work.target_rows, everything=work.rewrite)
    units: list[Unit] = []
    for group in groups:
        ranges = tuple(
            KeyRange(None if number == 0 else lows[number], lows[number + 1] if number + 1 < len(lows) else None) for number in group
        )
        own = [file for number in group for file in clusters[number].files]
        members = {*group}
        shared: list[BaseFile] = []
        for file in wide:
            span = {*range(spans[file.path][0], spans[file.path][1] + 1)}
            if span <= members:
                own.append(file)
            elif span & members:
                shared.append(file)
        hits = _hits((*own, *shared), ordered)
        files = [*_files(work, own, shared, hits, merged)]
        count = sum(clusters[number].changes for number in group)
        units.append(_unit(work, (*own, *shared), files, ranges, count, cleared=cleared))
    return Plan(tuple(units), _rewritten(units) if base else gone, cleared)


def _files(
    work: TableWork, own: Sequence[BaseFile], shared: Sequence[BaseFile], hits: Mapping[str, int], merged: Collection[str] = ()
) -> list[UnitFile]:
    """The files that a unit reads: its own, and ``shared`` ones, which belong to other units too.

    ``hits``: the estimated number of changes in each file. ``merged``: those that are merged now because they are in several clusters.
    """
    if not work.marks:
        return [file.read() for file in own] + [file.read(shared=True) for file in shared if file.path in merged]
    target = work.target_rows // SMALL
    small = [file for file in own if file.rows < target]
    rewritten = {file.path for file in own if hits[file.path] and _is_rewritten(file, hits[file.path])}
    large = any(file.path in rewritten for file in own if file.rows >= target)
    rewritten |= {file.path for file in small} if large else _merged_files(small)
    rewritten |= {file.path for file in own if file.path in merged}
    found = [file.read() for file in own if file.path in rewritten]
    found += [file.read(shared=True) for file in shared if file.path in merged]
    return found + [
        file.read(kept=True) for file in (*own, *shared) if file.path not in rewritten and file.path not in merged and hits[file.path]
    ]


def _is_rewritten(file: BaseFile, hits: int) -> bool:
    return file.size <= _TINY_BYTES or (file.deleted + hits) * _DELETED_PART >= file.rows


def _merged_files(small: Sequence[BaseFile]) -> set[str]:
    """Which small files are merged now: if there are many, those of similar size. So a row is rewritten only a few times."""
    if len(small) <= _SMALL_FILES:
        return set()
    ordered = sorted(small, key=lambda file: file.live)
    taken, rows = set[str](), 0
    for file in ordered:
        if len(taken) >= _SMALL_FILES // 2 and file.live > rows:
            break
        taken.add(file.path)
        rows += file.live
    return taken


def _hits(files: Sequence[BaseFile], keys: OrderedKeys) -> dict[str, int]:
    """Estimate the changes in each file. Files whose ranges overlap share the changes in proportion to their rows."""
    found: dict[str, int] = {}
    for file in files:
        assert file.range is not None
        low, high = file.range
        rows = sum(other.live for other in files if other.range is not None and other.range[0] <= high and other.range[1] >= low)
        found[file.path] = -(-keys.count(file) * file.live // max(rows, 1))
    return found


def _rewritten(units: Sequence[Unit]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(file.path for unit in units for file in unit.base if not file.kept))


def _spread(base: Sequence[BaseFile], changes: int) -> dict[str, int]:
    """Estimate the changes in each file, if their keys are unknown."""
    rows = max(sum(file.live for file in base), 1)
    return {file.path: -(-changes * file.live // rows) for file in base}


def _span(lows: Sequence[Bound], file: BaseFile) -> tuple[int, int]:
    """The first and the last cluster whose keys a file may have."""
    assert file.range is not None
    return cluster_of(lows, file.range[0]), cluster_of(lows, file.range[1])


def _is_divisible(work: TableWork) -> bool:
    """Whether ranges of the first key column divide the table and all its changes."""
    firsts = {work.schema.keys[:1], *(stretch.schema.keys[:1] for stretch in work.stretches)}
    if len(firsts) > 1 or not work.schema.keys or work.schema.keys[0] in work.retyped:
        return False
    return is_orderable(work.schema.current.field(work.schema.keys[0]).type)


def _unit(
    work: TableWork, base: Sequence[BaseFile], files: Sequence[UnitFile], ranges: Sequence[KeyRange], changes: int, *, cleared: bool
) -> Unit:
    """A unit. ``base``: all files in its ranges."""
    rows = {file.path: file.rows for file in base}
    return Unit(
        directory=work.directory,
        schema=work.schema,
        stretches=work.stretches,
        after=work.after,
        dropped=work.dropped,
        target_rows=work.target_rows,
        feed=work.feed,
        base=tuple(files),
        ranges=tuple(ranges),
        cleared=cleared,
        rows=sum(rows[file.path] // (_KEY_PART if file.kept else 1) for file in files) + changes,
    )


def _without_key(work: TableWork, base: Sequence[BaseFile], changes: int, *, cleared: bool) -> Plan:
    small = [file for file in base if file.rows < work.target_rows // SMALL]
    taken = list(base) if work.rewrite else small if len(small) >= _LOOSE_FILES else []
    removed = work.base if cleared else taken
    unit = _unit(work, taken, [file.read() for file in taken], (), changes, cleared=cleared)
    return Plan((unit,), tuple(file.path for file in removed), cleared)
