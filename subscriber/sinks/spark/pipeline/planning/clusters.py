"""Clusters: files of a table whose ranges of the first key column overlap.

The clusters of a table divide all possible keys, so that every change belongs to exactly one of them. Clusters that must be worked on
together form a group, which becomes one unit of work (``plan.py``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from subscriber.sinks.spark.merge.keys import rank
from subscriber.sinks.spark.pipeline.planning.table_work import BaseFile
from subscriber.sinks.spark.tables.data_file import Bound

__all__ = [
    "SMALL",
    "Cluster",
    "KeysOf",
    "OrderedKeys",
    "cluster_of",
    "clusters_of",
    "count_changes",
    "divided_clusters",
    "divided_keys",
    "grouped",
    "moved_rows",
]

KeysOf = Callable[[Sequence[BaseFile]], pa.ChunkedArray]
"""Gives some keys of files, by which their rows are divided."""

SMALL: Final = 4
"""A cluster below this part of the target is merged with its neighbour."""
_FAR: Final = 8
"""Limit of a unit's rows, in files, for joining clusters because of moved rows. Above, an UPDATE that moves a missing row inserts it."""


@dataclass(slots=True)
class Cluster:
    """Files whose ranges overlap, and the changes of keys there.

    Attributes:
        needed: whether it is worked on even without changes.
        part: how many rows it has of files that are in several clusters, approximately.
    """

    low: Bound
    high: Bound
    files: list[BaseFile] = field(default_factory=list)
    changes: int = 0
    needed: bool = False
    part: int = 0

    @property
    def rows(self) -> int:
        return sum(file.live for file in self.files) + self.part


def clusters_of(base: Sequence[BaseFile]) -> list[Cluster]:
    found: list[Cluster] = []
    for file in sorted(base, key=lambda file: file.range or ((0,), (0,))):
        assert file.range is not None
        low, high = file.range
        if found and low <= found[-1].high:
            found[-1].high = max(found[-1].high, high)
        else:
            found.append(Cluster(low, high))
        found[-1].files.append(file)
    return found


def divided_clusters(
    clusters: Sequence[Cluster], target: int, keys_of: KeysOf, *, everything: bool
) -> tuple[list[Cluster], list[BaseFile]]:
    """Divide clusters that are worked on and too large for a task. Also return their files, which are in several clusters then."""
    found: list[Cluster] = []
    spread: list[BaseFile] = []
    for cluster in clusters:
        cuts: list[Bound] = []
        if (cluster.changes or everything) and cluster.rows > target * _FAR:
            found_cuts = OrderedKeys(keys_of(cluster.files)).cuts(-(-cluster.rows // (target * _FAR // 2)))
            cuts = sorted(bound for bound in found_cuts if bound > cluster.low)
        if not cuts:
            found.append(cluster)
            continue
        spread += cluster.files
        part = cluster.rows // (len(cuts) + 1)
        found += [Cluster(low, high, part=part) for low, high in pairwise([cluster.low, *cuts, cluster.high])]
    return found, spread


def cluster_of(lows: Sequence[Bound], key: Bound) -> int:
    return max(bisect_right(lows, key) - 1, 0)


class OrderedKeys:
    """The keys of changes, in order."""

    def __init__(self, keys: pa.ChunkedArray) -> None:
        known = pc.drop_null(keys)
        self._keys = known.take(pc.sort_indices(known))
        self.nulls = keys.null_count

    def place(self, low: Bound, *, after: bool = False) -> int:
        """How many keys are below a key, or up to it."""
        find = bisect_right if after else bisect_left
        return find(self._keys, low, key=lambda value: rank(value.as_py()))

    def cuts(self, parts: int) -> set[Bound]:
        """Keys that divide all of them into parts of about equal size."""
        return {rank(self._keys[len(self) * number // parts].as_py()) for number in range(1, parts)} if len(self) else set()

    def __len__(self) -> int:
        return len(self._keys)

    def count(self, file: BaseFile) -> int:
        """How many changes have keys in a file's range."""
        assert file.range is not None
        low, high = file.range
        return self.place(high, after=True) - self.place(low) + (self.nulls if low == rank(None) else 0)


def count_changes(clusters: Sequence[Cluster], keys: OrderedKeys) -> None:
    """Count the changes in each cluster."""
    lows = [cluster.low for cluster in clusters]
    # the first cluster also takes the keys below it
    starts = [0, *map(keys.place, lows[1:]), len(keys)]
    for cluster, (start, end) in zip(clusters, pairwise(starts), strict=True):
        cluster.changes = end - start
    if keys.nulls:
        clusters[cluster_of(lows, rank(None))].changes += keys.nulls


def moved_rows(clusters: Sequence[Cluster], changes: pa.Table, keys: pa.ChunkedArray) -> list[tuple[int, int, bool]]:
    """Pairs of clusters between which a row moved, and whether the new row needs values of the old one."""
    if not len(changes) or not len(rows := pc.indices_nonzero(changes["_moved"])):  # see fold.since_truncate
        return []
    lows = [cluster.low for cluster in clusters]
    needing = pc.is_valid(changes["_un"].take(rows)).to_pylist()
    before, after = keys.take(pc.subtract(rows.cast(pa.int64()), 1)).to_pylist(), keys.take(rows).to_pylist()
    pairs = zip(before, after, needing, strict=True)
    return sorted({(cluster_of(lows, rank(old)), cluster_of(lows, rank(new)), needs) for old, new, needs in pairs})


def grouped(
    clusters: Sequence[Cluster], links: Sequence[tuple[int, int, bool]], target: int, *, everything: bool = False
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
        if not (cluster.changes or everything) or sizes[number] >= target // SMALL:
            continue
        near = [neighbour for neighbour in (number - 1, number + 1) if 0 <= neighbour < len(clusters)]
        fitting = [neighbour for neighbour in near if sizes[neighbour] + sizes[number] <= target]
        if fitting:
            join(number, min(fitting, key=lambda neighbour: sizes[neighbour]))
    groups: dict[int, list[int]] = {}
    for number in range(len(clusters)):
        groups.setdefault(root(number), []).append(number)
    return [
        group for group in groups.values() if everything or any(clusters[number].changes or clusters[number].needed for number in group)
    ]


def divided_keys(keys: OrderedKeys, target: int) -> list[Cluster]:
    """Ranges with about equal counts of changes, for a table without files. NULLs go with the first range."""
    return [Cluster(low, low) for low in sorted({rank(None), *keys.cuts(-(-len(keys) // target))})]
