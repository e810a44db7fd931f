"""Planning a round: which files of a table its changes touch, and how that work is divided.

Files of a table hold ranges of its first key column. Files whose ranges overlap are one cluster; clusters divide all possible keys between
them, so that every change belongs to exactly one, and one without changes is not read. Work stays in proportion to the files that are
touched, not to the table: changes of recent keys touch the last files, whatever its size.

* Many changes and no files (the first load) are divided by the keys themselves.
* A cluster that has become small is merged with its neighbour when it is touched.
* A row that moved from another key without bringing its TOASTed values needs the row it was: the clusters of both keys are one unit.
* Where the key has no order, or files of somebody else's have no range, the whole table is one unit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from subscriber.sinks.spark.fold import since_truncate
from subscriber.sinks.spark.keys import Bound, is_orderable, rank
from subscriber.sinks.spark.merge import KeyRange, Unit
from subscriber.sinks.spark.schema import TableSchema

__all__ = ["BaseFile", "Plan", "TableWork", "plan_columns", "plan_table"]

_SMALL: Final = 4
"""A cluster below this part of the target is merged with its neighbour."""
_LOOSE_FILES: Final = 8
"""How many small files a table without a key may gather."""


@dataclass(frozen=True, slots=True)
class BaseFile:
    """A file of the table: rows, and its range of the first key column, None if it has none."""

    path: str
    rows: int
    range: tuple[Bound, Bound] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TableWork:
    """What is to be done to one table; see :class:`subscriber.sinks.spark.merge.Unit` for the names."""

    directory: str
    schema: TableSchema
    base: tuple[BaseFile, ...]
    changes: tuple[str, ...]
    after: int
    rewrite: bool = False
    dropped: tuple[str, ...] = ()
    target_rows: int = 250_000


@dataclass(frozen=True, slots=True)
class Plan:
    """Units, and the table's files that are gone after them."""

    units: tuple[Unit, ...]
    removed: tuple[str, ...]


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
    """The columns of changes that a plan looks at."""
    return ["_op", "_lsn", "_moved", "_un", *schema.keys[:1]]


def plan_table(work: TableWork, changes: pa.Table) -> Plan:
    """Divide a table's work.

    Args:
        work: what there is.
        changes: all changes, in order, with the columns of :func:`plan_columns`.
    """
    changes, cleared = since_truncate(changes)
    base = () if cleared else work.base
    gone = tuple(file.path for file in work.base)
    schema = work.schema
    if not schema.keys:
        return _without_key(work, base, cleared=cleared)
    key_type = schema.current.field(schema.keys[0]).type
    if not is_orderable(key_type) or any(file.range is None for file in base) or work.rewrite:
        return Plan((_unit(work, base, (), cleared=cleared),), gone)
    keys = changes[schema.keys[0]]
    clusters = _clusters(base) if base else _quantiles(keys, work.target_rows)
    _count(clusters, keys)
    groups = _grouped(clusters, _links(clusters, changes, keys), work.target_rows)
    lows = [cluster.low for cluster in clusters]
    units: list[Unit] = []
    removed: list[str] = []
    for group in groups:
        ranges = tuple(
            KeyRange(None if number == 0 else lows[number], lows[number + 1] if number + 1 < len(lows) else None) for number in group
        )
        files = [file for number in group for file in clusters[number].files]
        units.append(_unit(work, files, ranges, cleared=cleared))
        removed += [file.path for file in files]
    return Plan(tuple(units), tuple(removed) if base else gone)


def _unit(work: TableWork, base: Sequence[BaseFile], ranges: Sequence[KeyRange], *, cleared: bool) -> Unit:
    return Unit(
        directory=work.directory,
        schema=work.schema,
        base=tuple(file.path for file in base),
        changes=work.changes,
        after=work.after,
        ranges=tuple(ranges),
        cleared=cleared,
        dropped=work.dropped,
        target_rows=work.target_rows,
    )


def _without_key(work: TableWork, base: Sequence[BaseFile], *, cleared: bool) -> Plan:
    small = [file for file in base if file.rows < work.target_rows // _SMALL]
    taken = list(base) if work.rewrite else small if len(small) >= _LOOSE_FILES else []
    removed = work.base if cleared else taken
    return Plan((_unit(work, taken, (), cleared=cleared),), tuple(file.path for file in removed))


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
    lows = [cluster.low for cluster in clusters]
    counted = pc.value_counts(keys)
    values, counts = counted.field("values").to_pylist(), counted.field("counts").to_pylist()
    for value, count in zip(values, counts, strict=True):
        clusters[_place(lows, rank(value))].changes += count


def _links(clusters: Sequence[_Cluster], changes: pa.Table, keys: pa.ChunkedArray) -> list[tuple[int, int]]:
    """Pairs of clusters between which a row moved that needs what it was."""
    if changes["_un"].null_count == changes.num_rows:
        return []
    rows = pc.indices_nonzero(pc.and_(changes["_moved"], pc.is_valid(changes["_un"]))).to_pylist()
    lows = [cluster.low for cluster in clusters]
    return [(_place(lows, rank(keys[row - 1].as_py())), _place(lows, rank(keys[row].as_py()))) for row in rows]


def _grouped(clusters: Sequence[_Cluster], links: Sequence[tuple[int, int]], target: int) -> list[list[int]]:
    """Numbers of the clusters that are touched, in groups that are one unit each."""
    owner = list(range(len(clusters)))

    def root(number: int) -> int:
        while owner[number] != number:
            number = owner[number]
        return number

    def join(one: int, other: int) -> None:
        owner[max(root(one), root(other))] = min(root(one), root(other))

    for one, other in links:
        join(one, other)
    sizes = [cluster.rows + cluster.changes for cluster in clusters]
    for number, cluster in enumerate(clusters):
        if not cluster.changes or sizes[number] >= target // _SMALL:
            continue
        near = [neighbour for neighbour in (number - 1, number + 1) if 0 <= neighbour < len(clusters)]
        fitting = [neighbour for neighbour in near if sizes[neighbour] + sizes[number] <= target]
        if fitting:
            join(number, min(fitting, key=lambda neighbour: sizes[neighbour]))
    groups: dict[int, list[int]] = {}
    for number in range(len(clusters)):
        groups.setdefault(root(number), []).append(number)
    return [group for group in groups.values() if any(clusters[number].changes for number in group)]


def _quantiles(keys: pa.ChunkedArray, target: int) -> list[_Cluster]:
    """Where there are no files yet: ranges with about as many changes each."""
    known = pc.drop_null(keys)  # NULLs go with the first range
    parts = max(-(-len(known) // target), 1)
    ordered = known.take(pc.sort_indices(known)) if parts > 1 else known
    cuts = {rank(ordered[len(ordered) * number // parts].as_py()) for number in range(1, parts)}
    return [_Cluster(low, low) for low in sorted({rank(None), *cuts})]
