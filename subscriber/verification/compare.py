"""Compare one table: checksums of ranges, then of parts of the ranges that differ, then the rows themselves.

Only rows that differ, and those whose hashes share some bits with them, are read into this process. Memory is bounded by
``VerificationLimits.max_differences``, and by the rows of a few hundred buckets.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

from subscriber.verification.model import Progress, RowDifference, RowKind, TableReport, VerificationLimits
from subscriber.verification.sides import Rate, Rows, Side
from subscriber.verification.tables import Blocks, KeyRanges, Pair

__all__ = ["Memory", "TableComparison"]

T = TypeVar("T")

_PART_ROWS: Final = 100
"""A range that differs is divided by some bits of the hash into parts of about so many rows."""
_READ_ROWS: Final = 20_000
"""About so many rows are read at once to find those that differ."""
_CELL_KEYS: Final = 200

Key = tuple[str | None, ...]


class Memory(Protocol):
    """Remembers what was compared, for a verification that resumes this one."""

    def known(self, conditions: Sequence[str]) -> Mapping[int, int]:
        """The ranges that are done, by their numbers, each with its rows. Empty if these are other ranges."""
        ...

    def note(self, number: int, rows: int) -> None:
        """A range is done, and equal."""
        ...


class TableComparison:
    """Compares one table.

    Args:
        planned: the table on both sides.
        publisher, target: their sessions.
        limits: what to do at most.
        rate: limits the rows per second.
        progress: is told about it.
        report: gets the result.
        memory: remembers finished ranges; None: nothing does.
    """

    def __init__(
        self,
        planned: Pair,
        publisher: Side,
        target: Side,
        *,
        limits: VerificationLimits,
        rate: Rate,
        progress: Progress,
        report: TableReport,
        memory: Memory | None = None,
    ) -> None:
        self._sql = (planned.publisher, planned.target)
        self._sides = (publisher, target)
        self._limits = limits
        self._rate = rate
        self._progress = progress
        self._report = report
        self._memory = memory
        self._keyed = bool(planned.publisher.key)
        # rows that only one side has: with a key their keys, else their hashes
        self._keys: dict[Key, None] = {}
        self._alone: tuple[Counter[int], Counter[int]] = (Counter(), Counter())

    async def run(self, plan: KeyRanges | Blocks) -> None:
        """Compare the table.

        Raises:
            SubscriberError: a server rejected a query, or a session was lost.
        """
        if isinstance(plan, Blocks):
            await self._run_blocks(plan)
        else:
            await self._run_ranges(plan.conditions)
        if self._report.differing_ranges:
            await self._name_rows()

    # --- ranges

    def _sampled(self, conditions: Sequence[str]) -> tuple[Iterable[int], str]:
        """The ranges to compare, and a condition that selects rows in them."""
        sample, count = self._limits.sample, len(conditions)
        if sample is None or not self._keyed:
            return range(count), ""
        if count >= 100 / sample:
            return sorted(random.sample(range(count), max(round(count * sample / 100), 1))), ""
        return range(count), "sample"

    def _condition(self, side: int, condition: str, sample: str) -> str:
        if not sample:
            return condition
        assert self._limits.sample is not None
        chosen = f"({self._sql[side].key_hash} & 16383) < {round(self._limits.sample * 163.84)}"
        return f"({condition}) AND {chosen}" if condition else chosen

    async def _run_ranges(self, conditions: Sequence[str]) -> None:
        chosen, sample = self._sampled(conditions)
        done = self._memory.known(conditions) if self._memory is not None and self._limits.sample is None else {}
        self._report.ranges = len(conditions)
        for number in done.keys() & set(chosen):
            self._report.resumed_ranges += 1
            self._count(done[number], done[number])
        numbers = iter([number for number in chosen if number not in done])
        await _together([self._take_ranges(numbers, conditions, sample) for _ in range(self._limits.jobs)])

    async def _take_ranges(self, numbers: Iterator[int], conditions: Sequence[str], sample: str) -> None:
        for number in numbers:
            both = tuple(self._condition(side, conditions[number], sample) for side in (0, 1))
            (here,), (there,) = await self._both(*(sql.checksum(condition) for sql, condition in zip(self._sql, both, strict=True)))
            counts = int(here[0] or 0), int(there[0] or 0)
            self._count(*counts)
            if here == there:
                if self._memory is not None:
                    self._memory.note(number, counts[0])
            else:
                self._report.differing_ranges += 1
                await self._locate((both[0],), (both[1],), max(counts))
            await self._rate.spend(max(counts))

    async def _run_blocks(self, plan: Blocks) -> None:
        sample = "sample" if self._limits.sample is not None and self._keyed else ""
        self._report.ranges = len(plan.publisher)
        conditions = [[self._condition(side, each, sample) for each in own] for side, own in enumerate((plan.publisher, plan.target))]
        sums = await self._sums(conditions, plan.mask, counting=True)
        differing = _differing(sums)
        if differing:
            self._report.differing_ranges = len(differing)
            await self._read_parts(conditions, plan.mask, differing, max(sum(count for count, _ in side.values()) for side in sums))

    async def _sums(
        self, conditions: Sequence[Sequence[str]], mask: int, *, counting: bool
    ) -> tuple[dict[int, tuple[int, int]], dict[int, tuple[int, int]]]:
        """Count and sum by ``hash & mask`` of each side, over all its conditions."""
        sums: tuple[dict[int, tuple[int, int]], dict[int, tuple[int, int]]] = ({}, {})

        async def take(side: int, own: Iterator[str]) -> None:
            for condition in own:
                rows = 0
                for part, count, total in await self._sides[side].run(self._sql[side].checksums(condition, mask)):
                    before = sums[side].get(int(part or 0), (0, 0))
                    sums[side][int(part or 0)] = before[0] + int(count or 0), before[1] + int(total or 0)
                    rows += int(count or 0)
                if counting:
                    self._count(*((rows, 0) if side == 0 else (0, rows)))
                    await self._rate.spend(rows if side == 0 else 0)

        own = [iter(each) for each in conditions]
        await _together([take(side, own[side]) for side in (0, 1) for _ in range(self._limits.jobs)])
        return sums

    # --- rows

    async def _locate(self, publisher: Sequence[str], target: Sequence[str], rows: int) -> None:
        """Find the rows that differ in a range with so many rows."""
        if self._is_full:
            return
        mask = (1 << max(rows // _PART_ROWS, 1).bit_length()) - 1
        conditions = (publisher, target)
        await self._read_parts(conditions, mask, _differing(await self._sums(conditions, mask, counting=False)), rows)

    async def _read_parts(self, conditions: Sequence[Sequence[str]], mask: int, parts: Sequence[int], rows: int) -> None:
        many = max(_READ_ROWS * (mask + 1) // max(rows, 1), 1)
        for begin in range(0, len(parts), many):
            if self._is_full:
                return
            some = parts[begin : begin + many]
            found: list[Counter[tuple[int, Key]]] = []
            for side, sql in enumerate(self._sql):
                counter: Counter[tuple[int, Key]] = Counter()
                for condition in conditions[side]:
                    for row in await self._sides[side].run(sql.hashes(condition, mask, some)):
                        counter[int(row[0] or 0), tuple(row[1:])] += 1
                found.append(counter)
            for side in (0, 1):
                for (hashed, key), count in (found[side] - found[1 - side]).items():
                    if self._keyed:
                        self._keys[key] = None
                    else:
                        self._alone[side][hashed] += count

    @property
    def _is_full(self) -> bool:
        found = len(self._keys) + len(self._alone[0]) + len(self._alone[1])
        if found >= self._limits.max_differences:
            self._report.more = True
        return found >= self._limits.max_differences

    async def _name_rows(self) -> None:
        most = self._limits.max_differences
        if self._keyed:
            keys = list(self._keys)
            for begin in range(0, min(len(keys), most), _CELL_KEYS):
                self._report.differences += await self._cells(keys[begin : min(begin + _CELL_KEYS, most)])
            self._report.more |= len(keys) > most
            return
        for side, kind in enumerate((RowKind.MISSING, RowKind.EXTRA)):
            hashes = list(self._alone[side])[:most]
            values = await self._values(side, hashes) if self._limits.show_values and hashes else {}
            for hashed in hashes:
                shown = values.get(hashed)
                here, there = (shown, None) if side == 0 else (None, shown)
                self._report.differences.append(RowDifference(kind, count=self._alone[side][hashed], publisher=here, target=there))

    async def _values(self, side: int, hashes: Sequence[int]) -> Mapping[int, Mapping[str, str | None]]:
        sql = self._sql[side]
        names = [column.name for column in sql.columns]
        rows = await self._sides[side].run(sql.sample_values("", hashes))
        return {int(row[0] or 0): dict(zip(names, row[1:], strict=True)) for row in rows}

    async def _cells(self, keys: Sequence[Key]) -> list[RowDifference]:
        """Describe rows by their keys. What is equal meanwhile cannot be: both sides are snapshots."""
        values = self._limits.show_values
        whole = [tuple(value for value in key if value is not None) for key in keys if None not in key]
        here, there = await self._both(*(sql.cells(whole, values=values) for sql in self._sql)) if whole else ((), ())
        count = len(self._sql[0].key)
        by_key = [_by_key(rows, count) for rows in (here, there)]
        found: list[RowDifference] = []
        for key in sorted(keys, key=lambda each: tuple(value or "" for value in each)):
            name = dict(zip(self._sql[0].key, key, strict=True))
            found += self._compared(name, by_key[0].get(key, []), by_key[1].get(key, []))
            if None in key:
                found.append(RowDifference(RowKind.EXTRA, name))
        return found

    def _compared(self, name: Mapping[str, str | None], here: Rows, there: Rows) -> Iterator[RowDifference]:
        columns = [column.name for column in self._sql[0].columns]
        size = len(columns)

        def shown(row: Sequence[str | None]) -> Mapping[str, str | None] | None:
            return dict(zip(columns, row[size:], strict=True)) if self._limits.show_values else None

        for own, other in zip(here, there, strict=False):
            differing = tuple(column for number, column in enumerate(columns) if own[number] != other[number])
            if differing:
                yield RowDifference(RowKind.DIFFERENT, name, differing, publisher=shown(own), target=shown(other))
        for own in here[len(there) :]:
            yield RowDifference(RowKind.MISSING, name, publisher=shown(own))
        for other in there[len(here) :]:
            yield RowDifference(RowKind.EXTRA, name, target=shown(other))

    async def _both(self, publisher: str, target: str) -> tuple[Rows, Rows]:
        here, there = await _together([self._sides[0].run(publisher), self._sides[1].run(target)])
        return here, there

    def _count(self, publisher: int, target: int) -> None:
        self._report.publisher_rows += publisher
        self._report.target_rows += target
        self._progress.advanced(self._report.table, publisher)


def _differing(sums: tuple[Mapping[int, tuple[int, int]], Mapping[int, tuple[int, int]]]) -> list[int]:
    here, there = sums
    return sorted(part for part in here.keys() | there.keys() if here.get(part) != there.get(part))


def _by_key(rows: Rows, count: int) -> Mapping[Key, list[Sequence[str | None]]]:
    found: dict[Key, list[Sequence[str | None]]] = {}
    for row in rows:
        found.setdefault(tuple(row[:count]), []).append(row[count:])
    return found


async def _together(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all at once. If one fails, cancel the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
