"""Compare one table: checksums of ranges, then of parts of the ranges that differ, then the rows themselves.

Only rows that differ, and those whose hashes share some bits with them, are read into this process. Memory is bounded by
``VerificationLimits.max_differences``, and by the rows of a few hundred buckets.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from subscriber.verification.model import Progress, RowDifference, RowKind, TableReport, VerificationLimits
from subscriber.verification.parts import Buckets, HashBuckets, Key, KeyBuckets, Part, Sums, TableSide, named_row
from subscriber.verification.postgres_table import PostgresTable
from subscriber.verification.sides import Rate, together
from subscriber.verification.tables import Blocks, KeyRanges

__all__ = ["TableComparison", "named_rows", "read_cells"]

_PART_ROWS: Final = 16
"""A range that differs is divided by some bits of the hash into parts of about so many rows."""
_MOST_PARTS: Final = 2**16
"""So many of these parts are in memory."""
_READ_ROWS: Final = 20_000
"""About so many rows are read at once to find those that differ."""
_CELL_KEYS: Final = 200


class TableComparison:
    """Compares one table.

    Args:
        publisher: the table there.
        target: the table there.
        key: the columns that identify a row.
        columns: the compared columns.
        limits: what to do at most.
        rate: limits the rows per second.
        progress: is told about it.
        report: gets the result.

    Attributes:
        alone: of a table without a key, the hashes of rows that only one side has, with their numbers, for the publisher and the target.
    """

    def __init__(
        self,
        publisher: PostgresTable,
        target: TableSide,
        *,
        key: Sequence[str],
        columns: Sequence[str],
        limits: VerificationLimits,
        rate: Rate,
        progress: Progress,
        report: TableReport,
    ) -> None:
        self._publisher = publisher
        self._sides: tuple[TableSide, TableSide] = (publisher, target)
        self._key = key
        self._columns = columns
        self._limits = limits
        self._rate = rate
        self._progress = progress
        self._report = report
        # of rows that differ
        self._keys: dict[Key, None] = {}
        self.alone: tuple[Counter[int], Counter[int]] = (Counter(), Counter())

    async def run(self, plan: KeyRanges | Blocks, earlier: TableComparison | None = None) -> None:
        """Compare the table.

        Args:
            plan: how the table is divided.
            earlier: of a table without a key, a comparison that found differences: only those that it found, too, are differences.

        Raises:
            SubscriberError: a server rejected a query, or a session was lost.
        """
        await self.find(plan)
        if earlier is not None:
            here, there = (own & other for own, other in zip(self.alone, earlier.alone, strict=True))
            self.alone = (here, there)
            self._report.differing_ranges = int(bool(here or there))
        if self._report.differing_ranges:
            await self._name_rows()

    async def find(self, plan: KeyRanges | Blocks, *, expects: int = 0) -> None:
        """Find the keys of the rows that differ, or of a table without a key their hashes, and describe no row.

        Args:
            plan: how the table is divided.
            expects: a range of the key with so many rows probably differs: divide it at once, which reads it once less.

        Raises:
            SubscriberError: as :meth:`run`.
        """
        if isinstance(plan, Blocks):
            await self._run_blocks(plan)
        elif expects:
            for part in plan.parts:
                await self._locate(part, expects, (self._read_publisher, self._read_target))
        else:
            await self._run_ranges(plan.parts)

    # --- ranges

    async def _run_ranges(self, parts: Sequence[Part]) -> None:
        self._report.ranges = len(parts)
        waiting = iter(parts)
        await together([self._take_ranges(waiting) for _ in range(self._limits.jobs)])

    async def _take_ranges(self, parts: Iterator[Part]) -> None:
        for part in parts:
            here, there = await together([side.checksum(part) for side in self._sides])
            self._count(here[0], there[0])
            if here != there:
                self._report.differing_ranges += 1
                await self._locate(part, max(here[0], there[0]), (_uncounted, _uncounted))
            await self._rate.spend(max(here[0], there[0]))

    async def _run_blocks(self, plan: Blocks) -> None:
        self._report.ranges = len(plan.publisher)
        parts, by = (plan.publisher, plan.target), HashBuckets(plan.mask)
        differing = _differing(*await self._sums(parts, by, (self._read_publisher, self._read_target)))
        self._report.differing_ranges += len(differing)
        await self._read_parts(parts, by, differing)

    async def _read_publisher(self, rows: int) -> None:
        self._count(rows, 0)
        await self._rate.spend(rows)

    async def _read_target(self, rows: int) -> None:
        self._count(0, rows)

    async def _sums(
        self, parts: tuple[Sequence[Part], Sequence[Part]], by: Buckets, read: Sequence[Callable[[int], Awaitable[None]]]
    ) -> tuple[Sums, Sums]:
        here, there = await together([side.checksums(own, by, counts) for side, own, counts in zip(self._sides, parts, read, strict=True)])
        return here, there

    # --- rows

    async def _locate(self, part: Part, rows: int, read: Sequence[Callable[[int], Awaitable[None]]]) -> None:
        """Find the rows that differ in a range with about so many rows."""
        if self._is_full:
            return
        parts = ((part,), (part,))
        by: Buckets | None = await self._key_buckets(part, rows)
        if by is not None:
            differing = _differing(*await self._sums(parts, by, read))
            if max(differing.values(), default=0) <= _READ_ROWS:
                await self._read_parts(parts, by, differing)
                return
            # the keys are not spread evenly
            read = (_uncounted, _uncounted)
        by = HashBuckets(_mask(rows))
        await self._read_parts(parts, by, _differing(*await self._sums(parts, by, read)))

    async def _key_buckets(self, part: Part, rows: int) -> KeyBuckets | None:
        """Divide a range of an integer column into ranges of the same width, with some rows each."""
        if part.column is None or part.type != "int8" or not isinstance(self._sides[1], PostgresTable):
            return None
        span = await self._publisher.span(part)
        if span is None:
            return None
        width = (span[1] - span[0] + 1) / min(max(rows / _PART_ROWS, 1), _MOST_PARTS)
        return KeyBuckets(part.column, max(round(math.log2(width)), 1))

    async def _read_parts(self, parts: tuple[Sequence[Part], Sequence[Part]], by: Buckets, buckets: Mapping[int, int]) -> None:
        """Read hashes and keys of the rows in some buckets. ``buckets`` has their number of rows."""
        most = self._limits.max_reads
        # each read of buckets of hashes reads all rows
        if most is not None and isinstance(by, HashBuckets) and sum(buckets.values()) > _READ_ROWS * most:
            self._report.more = True
            return
        for some in _batches(buckets):
            if self._is_full:
                return
            found = await together([side.hashes(own, by, some) for side, own in zip(self._sides, parts, strict=True)])
            integers = self._publisher.integer_keys
            for side in (0, 1):
                for name, count in (found[side] - found[1 - side]).items():
                    hashed, key = named_row(name, integers)
                    if self._key:
                        self._keys[key] = None
                    else:
                        self.alone[side][hashed] += count

    @property
    def _is_full(self) -> bool:
        found = len(self._keys) + len(self.alone[0]) + len(self.alone[1])
        if found >= self._limits.max_differences:
            self._report.more = True
        return found >= self._limits.max_differences

    @property
    def keys(self) -> Sequence[Key]:
        """Keys of the rows that differ, as far as they are named."""
        return list(self._keys)[: self._limits.max_differences]

    async def name_keys(self, keys: Iterable[Key]) -> None:
        """Describe the differences of the rows with these keys."""
        self._keys.update(dict.fromkeys(keys))
        await self._name_rows()

    async def _name_rows(self) -> None:
        most = self._limits.max_differences
        if self._key:
            keys = list(self._keys)
            for begin in range(0, min(len(keys), most), _CELL_KEYS):
                some = keys[begin : min(begin + _CELL_KEYS, most)]
                here, there = await together([read_cells(side, some, values=self._limits.show_values) for side in self._sides])
                self._report.differences += named_rows(some, here, there, key=self._key, columns=self._columns)
            self._report.more |= len(keys) > most
            return
        for side, kind in enumerate((RowKind.MISSING, RowKind.EXTRA)):
            hashes = list(self.alone[side])[:most]
            values = await self._sides[side].values(hashes) if self._limits.show_values and hashes else {}
            for hashed in hashes:
                shown = dict(zip(self._columns, values[hashed], strict=True)) if hashed in values else None
                publisher, target = (shown, None) if side == 0 else (None, shown)
                count = self.alone[side][hashed]
                self._report.differences.append(RowDifference(kind, count=count, publisher=publisher, target=target))

    def _count(self, publisher: int, target: int) -> None:
        self._report.publisher_rows += publisher
        self._report.target_rows += target
        self._progress.advanced(self._report.table, publisher)


def _mask(rows: int) -> int:
    return min(_MOST_PARTS, 1 << max(rows // _PART_ROWS, 1).bit_length()) - 1


async def _uncounted(_: int) -> None:
    """The rows were counted before."""


def _differing(here: Sums, there: Sums) -> dict[int, int]:
    """The buckets that differ, with their number of rows."""
    differ = sorted(bucket for bucket in here.keys() | there.keys() if here.get(bucket) != there.get(bucket))
    return {bucket: max(sums.get(bucket, (0, 0))[0] for sums in (here, there)) for bucket in differ}


def _batches(buckets: Mapping[int, int]) -> Iterator[list[int]]:
    batch, size = list[int](), 0
    for bucket, rows in buckets.items():
        if batch and size + rows > _READ_ROWS:
            yield batch
            batch, size = [], 0
        batch.append(bucket)
        size += rows
    if batch:
        yield batch


Cells = Mapping[Key, Sequence[Sequence[str | None]]]


async def read_cells(side: TableSide, keys: Sequence[Key], *, values: bool) -> Cells:
    """Read the rows with these keys: see :meth:`TableSide.cells`. A key with a NULL in it finds none.

    Raises:
        SubscriberError: a server rejected the query, or the session was lost.
    """
    whole = [tuple(value for value in key if value is not None) for key in keys if None not in key]
    found: dict[Key, Sequence[Sequence[str | None]]] = {}
    for begin in range(0, len(whole), _CELL_KEYS):
        found.update(await side.cells(whole[begin : begin + _CELL_KEYS], values=values))
    return found


def named_rows(keys: Sequence[Key], here: Cells, there: Cells, *, key: Sequence[str], columns: Sequence[str]) -> list[RowDifference]:
    """Compare the rows with these keys.

    Args:
        keys: the keys.
        here: the rows of the publisher.
        there: those of the target.
        key: the columns of the key.
        columns: all columns.
    """
    found: list[RowDifference] = []
    for each in sorted(keys, key=lambda values: tuple(value or "" for value in values)):
        name = dict(zip(key, each, strict=True))
        found += _compared(name, here.get(each, ()), there.get(each, ()), columns)
        if None in each:
            found.append(RowDifference(RowKind.EXTRA, name))
    return found


def _compared(
    name: Mapping[str, str | None], here: Sequence[Sequence[str | None]], there: Sequence[Sequence[str | None]], columns: Sequence[str]
) -> Iterator[RowDifference]:
    size = len(columns)

    def shown(row: Sequence[str | None]) -> Mapping[str, str | None] | None:
        # after the digests, if values were read
        return dict(zip(columns, row[size:], strict=True)) if len(row) > size else None

    for own, other in zip(here, there, strict=False):
        differing = tuple(column for number, column in enumerate(columns) if own[number] != other[number])
        if differing:
            yield RowDifference(RowKind.DIFFERENT, name, differing, publisher=shown(own), target=shown(other))
    for own in here[len(there) :]:
        yield RowDifference(RowKind.MISSING, name, publisher=shown(own))
    for other in there[len(here) :]:
        yield RowDifference(RowKind.EXTRA, name, target=shown(other))
