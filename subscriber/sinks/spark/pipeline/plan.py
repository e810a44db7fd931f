"""Planning a round: find the files of a table that its changes affect, and divide the work into units.

Files of a table have ranges of its first key column. Files whose ranges overlap form a cluster. The clusters divide all possible keys, so
that every change belongs to exactly one cluster. A cluster without changes is not read. So the work is proportional to the affected files,
not to the size of the table: changes of recent keys affect only the last files.

* Many changes without files (the first load) are divided by the keys themselves.
* A cluster that has become small is merged with its neighbour when it is affected.
* A row that moved from another key without its TOASTed values needs the old row, so the clusters of both keys form one unit. For other rows
  that moved, they form one unit too if it is not too large, because an UPDATE whose old row does not exist is skipped.
* If all files are rewritten, as after ALTER TABLE, the clusters without changes become units too.
* The whole table is one unit in these cases: the stretches of changes (see ``evolution.py``) do not all have the same first key column, the
  type of that column changed, the key has no order, or files of another writer have no range.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from subscriber.sinks.spark.merge.fold import since_truncate
from subscriber.sinks.spark.merge.key_ranges import KeyRange
from subscriber.sinks.spark.merge.keys import is_orderable, rank
from subscriber.sinks.spark.merge.work_unit import Unit
from subscriber.sinks.spark.schema.evolution import Stretch
from subscriber.sinks.spark.schema.table_schema import TableSchema
from subscriber.sinks.spark.tables.data_file import Bound

__all__ = ["BaseFile", "Plan", "TableWork", "plan_columns", "plan_table"]

_SMALL: Final = 4
"""A cluster below this part of the target is merged with its neighbour."""
_FAR: Final = 8
"""Limit of a unit's rows, in files, for joining clusters because of moved rows. Above, an UPDATE that moves a missing row inserts it."""
_LOOSE_FILES: Final = 8
"""How many small files a table without a key may have before they are merged."""


@dataclass(frozen=True, slots=True)
class BaseFile:
    """A file of the table: its rows, and its range of the first key column, or None."""

    path: str
    rows: int
    range: tuple[Bound, Bound] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TableWork:
    """The work for one table. See :class:`subscriber.sinks.spark.merge.work_unit.Unit` for the other names.

    Attributes:
        rewrite: whether all files are rewritten.
        retyped: columns that have another type in these files.
    """

    directory: str
    schema: TableSchema
    base: tuple[BaseFile, ...]
    stretches: tuple[Stretch, ...]
    after: int
    rewrite: bool = False
    retyped: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    target_rows: int = 250_000


@dataclass(frozen=True, slots=True)
class Plan:
    """The result of planning.

    Attributes:
        units: the work, in parts.
        removed: files of the table that are removed afterwards.
        cleared: whether there was a TRUNCATE among the changes.
    """

    units: tuple[Unit, ...]
    removed: tuple[str, ...]
    cleared: bool


@dataclass(slots=True)
class _Cluster:
    low: Bound
    high: Bound
    files: list[BaseFile] = field(default_factory=list)
    changes: int = 0

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)


def plan_columns(schema: TableSchema) -> list[str]:
    """The columns of changes that planning needs."""
    return ["_op", "_lsn", "_seq", "_moved", "_un", *schema.keys[:1]]


def plan_table(work: TableWork, changes: pa.Table) -> Plan:
    """Divide a table's work.

    Args:
        work: the work to do.
        changes: the changes of all stretches, in order, with the columns of :func:`plan_columns`.
    """
    changes, cleared = since_truncate(changes)
    base = () if cleared else work.base
    gone = tuple(file.path for file in work.base)
    schema = work.schema
    if not schema.keys and len(work.stretches) <= 1:
        return _without_key(work, base, changes.num_rows, cleared=cleared)
    if not _is_divisible(work) or any(file.range is None for file in base):
        return Plan((_unit(work, base, (), changes.num_rows, cleared=cleared),), gone, cleared)
    keys = changes[schema.keys[0]]
    clusters = _clusters(base) if base else _quantiles(keys, work.target_rows)
    _count(clusters, keys)
    groups = _grouped(clusters, _links(clusters, changes, keys), work.target_rows, everything=work.rewrite)
    lows = [cluster.low for cluster in clusters]
    units: list[Unit] = []
    removed: list[str] = []
    for group in groups:
        ranges = tuple(
            KeyRange(None if number == 0 else lows[number], lows[number + 1] if number + 1 < len(lows) else None) for number in group
        )
        files = [file for number in group for file in clusters[number].files]
        units.append(_unit(work, files, ranges, sum(clusters[number].changes for number in group), cleared=cleared))
        removed += [file.path for file in files]
    return Plan(tuple(units), tuple(removed) if base else gone, cleared)


def _is_divisible(work: TableWork) -> bool:
    """Whether ranges of the first key column divide the table and all its changes."""
    firsts = {work.schema.keys[:1], *(stretch.schema.keys[:1] for stretch in work.stretches)}
    if len(firsts) > 1 or not work.schema.keys or work.schema.keys[0] in work.retyped:
        return False
    return is_orderable(work.schema.current.field(work.schema.keys[0]).type)


def _unit(work: TableWork, base: Sequence[BaseFile], ranges: Sequence[KeyRange], changes: int, *, cleared: bool) -> Unit:
    return Unit(
        directory=work.directory,
        schema=work.schema,
        base=tuple(file.path for file in base),
        stretches=work.stretches,
        after=work.after,
        ranges=tuple(ranges),
        cleared=cleared,
        dropped=work.dropped,
        added=work.added,
        target_rows=work.target_rows,
        rows=sum(file.rows for file in base) + changes,
    )


def _without_key(work: TableWork, base: Sequence[BaseFile], changes: int, *, cleared: bool) -> Plan:
    small = [file for file in base if file.rows < work.target_rows // _SMALL]
    taken = list(base) if work.rewrite else small if len(small) >= _LOOSE_FILES else []
    removed = work.base if cleared else taken
    return Plan((_unit(work, taken, (), changes, cleared=cleared),), tuple(file.path for file in removed), cleared)


def _clusters(base: Sequence[BaseFile]) -> list[_Cluster]:
    found: list[_Cluster] = []
    for file in sorted(base, key=lambda file: file.range or ((0,), (0,))):
        assert file.range is not None
        low, high = file.range
        if found and low <= found[-1].high:
            found[-1].high = max(found[-1].high, high)
        else:
            found.append(_Cluster(low, high))
        found[-1].files.append(file)
    return found


def _place(lows: Sequence[Bound], key: Bound) -> int:
    return max(bisect_right(lows, key) - 1, 0)


def _count(clusters: Sequence[_Cluster], keys: pa.ChunkedArray) -> None:
    """Count the changes in each cluster."""
    lows = [cluster.low for cluster in clusters]
    known = pc.drop_null(keys)
    known = known.take(pc.sort_indices(known))
    # the first cluster also takes the keys below it
    starts = [0, *(bisect_left(known, low, key=lambda value: rank(value.as_py())) for low in lows[1:]), len(known)]
    for cluster, (start, end) in zip(clusters, pairwise(starts), strict=True):
        cluster.changes = end - start
    if keys.null_count:
        clusters[_place(lows, rank(None))].changes += keys.null_count


def _links(clusters: Sequence[_Cluster], changes: pa.Table, keys: pa.ChunkedArray) -> list[tuple[int, int, bool]]:
    """Pairs of clusters between which a row moved, and whether the new row needs values of the old one."""
    rows = pc.indices_nonzero(changes["_moved"])
    if not len(rows):
        return []
    lows = [cluster.low for cluster in clusters]
    needing = pc.is_valid(changes["_un"].take(rows)).to_pylist()
    before, after = keys.take(pc.subtract(rows.cast(pa.int64()), 1)).to_pylist(), keys.take(rows).to_pylist()
    found = {(_place(lows, rank(old)), _place(lows, rank(new)), needs) for old, new, needs in zip(before, after, needing, strict=True)}
    return sorted(found)


def _grouped(
    clusters: Sequence[_Cluster], links: Sequence[tuple[int, int, bool]], target: int, *, everything: bool = False
) -> list[list[int]]:
    """Numbers of the clusters that are touched, or all, in groups that are one unit each."""
    owner = list(range(len(clusters)))
    sizes = [cluster.rows + cluster.changes for cluster in clusters]
    together = list(sizes)

    def root(number: int) -> int:
        while owner[number] != number:
            owner[number] = owner[owner[number]]
            number = owner[number]
        return number

    def join(one: int, other: int, most: int | None = None) -> None:
        first, second = sorted((root(one), root(other)))
        if first != second and (most is None or together[first] + together[second] <= most):
            owner[second] = first
            together[first] += together[second]

    for one, other, needs in links:
        if needs:
            join(one, other)
    for one, other, _ in links:
        join(one, other, target * _FAR)
    for number, cluster in enumerate(clusters):
        if not (cluster.changes or everything) or sizes[number] >= target // _SMALL:
            continue
        near = [neighbour for neighbour in (number - 1, number + 1) if 0 <= neighbour < len(clusters)]
        fitting = [neighbour for neighbour in near if sizes[neighbour] + sizes[number] <= target]
        if fitting:
            join(number, min(fitting, key=lambda neighbour: sizes[neighbour]))
    groups: dict[int, list[int]] = {}
    for number in range(len(clusters)):
        groups.setdefault(root(number), []).append(number)
    return [group for group in groups.values() if everything or any(clusters[number].changes for number in group)]


def _quantiles(keys: pa.ChunkedArray, target: int) -> list[_Cluster]:
    """Ranges with about equal counts of changes, for a table without files."""
    known = pc.drop_null(keys)  # NULLs go with the first range
    parts = max(-(-len(known) // target), 1)
    ordered = known.take(pc.sort_indices(known)) if parts > 1 else known
    cuts = {rank(ordered[len(ordered) * number // parts].as_py()) for number in range(1, parts)}
    return [_Cluster(low, low) for low in sorted({rank(None), *cuts})]
