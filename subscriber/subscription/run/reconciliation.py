"""Reconcile a table: compare the rows of the target with a snapshot of the publisher, and replace only what differs.

The table is divided into ranges of its key, as for a verification. The checksum of each range is computed on both sides. A range that
differs is divided until the rows are named. If few rows differ, these are replaced; else the whole range is. Each replacement is one
transaction of the target: it deletes rows, and stores those of the publisher. So readers see the rows before it or after it, and never a
part of them.

*Progress is in the rows.* An interruption loses the snapshot, and rows that were equal may have changed since. So the next attempt compares
all ranges with its own snapshot. What was written before is equal then, and costs a checksum only.

*Unique values.* A row may have a unique value that another row of the target still has, which is replaced later. Such a replacement is put
off. At the end, those that were put off are made again, one by one as long as most of them succeed, and then all in one transaction.

*Tables that have no such ranges.* A table with a key that only this program can order, or whose rows do not lie in the key's order, is read
once and compared by bits of the rows' hashes. If many rows differ, it is divided into ranges of its key anyway, which are read through an
index; without such ranges, all its rows are replaced in one transaction. A table without a key is compared as a multiset, and replaced as a
whole if it differs. So is a table whose key the target stores as another value or text, because its keys name no rows on both sides.

*An interrupted copy* is resumed in the same way: only rows that it has stored are compared and deleted. This needs ranges of a key in the
order of the rows: otherwise half of a copy leaves half of each range, and it is faster to copy again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed
from functools import partial
from typing import Final

from subscriber import crash_points
from subscriber.apply.tables.table_synchronization import CopyPart, ReconciledRows
from subscriber.errors import RelationError, TargetError
from subscriber.interfaces import (
    ComparedTables,
    Condition,
    CopyFormat,
    PublishedTable,
    ReplacedKeys,
    ReplacedRange,
    Replacement,
    ReplacingSink,
    SyncMode,
    TargetRows,
)
from subscriber.rate_limit import RateLimit
from subscriber.verification.compare import TableComparison
from subscriber.verification.model import Quiet, TableReport, VerificationLimits
from subscriber.verification.parts import WHOLE, Key, Part
from subscriber.verification.sides import Rate, Side, together
from subscriber.verification.tables import Blocks, KeyRanges, key_ranges, may_have_ranges
from subscriber.verification.targets import OtherTarget, PlannedTable, PostgresTarget
from subscriber.waits import moved
from subscriber.walreceiver.copying.rows_by_key import Operators, key_operators, rows_by_key
from subscriber.walreceiver.copying.snapshot import SnapshotReader
from subscriber.walreceiver.copying.table_copy import lock_query

__all__ = ["reconcile"]

Rows = Sequence[Sequence[str | None]]
Count = Callable[[int], None]

_RANGE_KEYS: Final = 10_000
"""So many rows of a range are replaced one by one, or one of :data:`_FEW`."""
_FEW: Final = 20
_TABLE_KEYS: Final = 100_000
"""So many of a table that is compared as a whole."""
_READS: Final = 4
_ROWS: Final = 500
"""Rows in one transaction, if they are named by their keys."""
_FIRST_ROWS: Final = 16
"""Rows in the first one, until their size is known."""
_GROWTH: Final = 4
_BYTES: Final = 8 * 1024**2
"""Rows that are larger are replaced by fewer at a time."""
_IN_THE_WAY: Final = "23"
_DEADLOCK: Final = "40P01"


async def reconcile(
    readers: Sequence[SnapshotReader],
    table: PublishedTable,
    sink: ReplacingSink,
    rows: TargetRows | ComparedTables,
    *,
    copy_format: CopyFormat,
    read: Callable[[Condition, Count], CopyPart],
    verify: Callable[[SnapshotReader], Awaitable[None]],
    advanced: Count,
    mode: SyncMode,
    limit: RateLimit,
    expects: bool = False,
    one_transaction: bool = False,
) -> ReconciledRows | None:
    """Make the target's rows equal to those of the snapshot.

    Args:
        readers: sessions in a snapshot of the publisher. So many ranges are worked on at once.
        table: as published.
        sink: the table's, in DATASYNC; or a group's.
        rows: the target's rows, with as many sessions.
        copy_format: of the rows of a range.
        read: makes the copy of the publisher's rows that satisfy a condition, which calls a function with the number of rows read.
        verify: raises an error if a session does not see the publisher's rows, because the table was rewritten or renamed.
        advanced: called with the number of rows that are done.
        mode: in mode COPY, ``rows`` are those of a copy that was interrupted; else they are all rows of the table.
        limit: of the bytes of the publisher's rows that are compared or read. Compared rows have the average size of the table's.
        expects: the rows probably differ. Then they are read once less.
        one_transaction: all replacements are in one transaction of the target, which the first error ends.

    Returns:
        What was done. None: nothing was done, because it is faster to copy again. Only in mode COPY.

    Raises:
        SubscriberError: of the publisher or the target.
    """
    if mode is SyncMode.COPY and not may_have_ranges(table):
        return None
    for reader in readers:
        # until the end of these transactions, the table cannot be rewritten or renamed
        await reader.execute(lock_query(table))
    await verify(readers[0])
    turn = asyncio.Lock()
    publisher = Side([*(reader.execute for reader in readers[1:]), partial(_in_turn, turn, readers[0])])
    target = PostgresTarget(Side(rows.queries), rows.condition) if isinstance(rows, TargetRows) else OtherTarget(rows)
    limits = VerificationLimits(jobs=len(readers))
    planned = await target.plan(table, publisher, limits)
    if isinstance(planned, PlannedTable) and planned.key and not planned.same_keys:
        # the target stores other keys than the publisher has: they name no row on both sides
        planned = await target.plan(changed(table, primary_key=(), key_columns=()), publisher, limits)
    if isinstance(planned, str):
        raise RelationError(f'table "{table.name}" cannot be reconciled: {planned}', hint="correct the target's table")
    plan = planned.plan
    if mode is SyncMode.COPY and (isinstance(plan, Blocks) or len(plan.parts) == 1):
        return None
    crash_points.reached("reconcile.planned")
    replacements = _Replacements(
        sink,
        table,
        tuple(planned.key),
        copy_format=copy_format,
        read=read,
        named=readers[0],
        turn=turn,
        advanced=advanced,
        limit=limit,
        may_delay=not one_transaction,
    )
    width = table.size / table.estimated_rows if table.estimated_rows else 0.0
    work = _Comparisons(planned, publisher, replacements, mode, rate=_ComparedRows(limit, width), expects=expects)
    await (work.whole(plan) if isinstance(plan, Blocks) or not planned.key else work.ranges(plan.parts))
    await replacements.finish()
    written = replacements.written
    kept = work.compared + replacements.copied - written
    return ReconciledRows(kept=kept, compared=work.compared, written=written, deleted=replacements.deleted)


async def _in_turn(turn: asyncio.Lock, reader: SnapshotReader, sql: str, /, *values: str) -> Rows:
    async with turn:
        return await reader.execute(sql, *values)


class _ComparedRows(Rate):
    """Counts rows as bytes. A row counts as ``width`` bytes."""

    def __init__(self, limit: RateLimit, width: float) -> None:
        super().__init__(None)
        self._limit = limit
        self._width = width

    async def spend(self, rows: int) -> None:
        await self._limit.spend(round(rows * self._width))


class _Comparisons:
    """Finds what differs in one table.

    Args:
        planned: the table on both sides.
        publisher: the sessions there.
        replacements: of the rows that differ.
        mode: see :func:`reconcile`.
        rate: limits the rows that are compared.
        expects: see :func:`reconcile`.

    Attributes:
        compared: how many rows of the publisher were compared.
    """

    def __init__(
        self, planned: PlannedTable, publisher: Side, replacements: _Replacements, mode: SyncMode, *, rate: Rate, expects: bool
    ) -> None:
        self._planned = planned
        self._publisher = publisher
        self._replacements = replacements
        self._mode = mode
        self._rate = rate
        self._each = 1
        self._expects = expects
        self.compared = 0

    async def ranges(self, parts: Sequence[Part]) -> None:
        """Compare ranges of the key, several at once."""
        self._each = max(self._planned.rows // len(parts), 1)
        waiting = iter(parts)
        await together([self._take(waiting) for _ in range(self._publisher.sessions)])

    async def _take(self, parts: Iterator[Part]) -> None:
        expects = self._each if self._expects else 0
        most = min(max(_RANGE_KEYS, self._each // _FEW), _TABLE_KEYS)
        for part in parts:
            # a copy that was interrupted has no rows of most ranges
            absent = self._mode is SyncMode.COPY and (await self._planned.target.checksum(part))[0] == 0
            if absent or self._mode is SyncMode.REPLACE:
                await self._replacements.replace_range(part)
                continue
            comparison, more, there = await self._find(KeyRanges((part,)), most, 1, expects=expects)
            expects = self._each if more or comparison.keys else 0
            if more:
                await self._replacements.replace_range(part, there=there)
            else:
                await self._replacements.replace_keys(comparison.keys)

    async def whole(self, plan: KeyRanges | Blocks) -> None:
        """Compare a table that has no key, or whose rows are not in the key's order."""
        there: int | None = None
        if self._mode is not SyncMode.REPLACE:
            comparison, more, there = await self._find(plan, _TABLE_KEYS, self._publisher.sessions)
            if not more and (self._planned.key or not any(comparison.alone)):
                await self._replacements.replace_keys(comparison.keys)
                return
        parts = await self._divided()
        if len(parts) > 1:
            self.compared = 0
            await self.ranges(parts)
        else:
            await self._replacements.replace_range(WHOLE, there=there)

    async def _divided(self) -> Sequence[Part]:
        """The ranges of the key, although the rows are not in its order; one: there are none."""
        planned = self._planned
        rows = max(planned.rows, self.compared)
        found = await key_ranges(self._publisher.run, planned.publisher.sql, planned.ordered, planned.bound_type, rows, any_order=True)
        return found.parts if found is not None else (WHOLE,)

    async def _find(self, plan: KeyRanges | Blocks, most: int, jobs: int, *, expects: int = 0) -> tuple[TableComparison, bool, int]:
        """Compare some rows. Return also whether more of them differ than were named, and how many rows the target has."""
        report = TableReport(self._planned.name)
        comparison = TableComparison(
            self._planned.publisher,
            self._planned.target,
            key=self._planned.key,
            columns=self._planned.columns,
            limits=VerificationLimits(jobs=jobs, max_differences=most, max_reads=_READS),
            rate=self._rate,
            progress=Quiet(),
            report=report,
        )
        await comparison.find(plan, expects=expects)
        self.compared += report.publisher_rows
        self._replacements.advanced(report.publisher_rows)
        return comparison, report.more or len(comparison.keys) >= most, report.target_rows


class _Replacements:
    """Replaces rows of one table.

    Args:
        sink: the table's.
        table: as published.
        key: the columns that identify a row.
        copy_format: of the rows of a range.
        read: see :func:`reconcile`.
        named: reads rows by their keys.
        turn: held while it reads.
        advanced: see :func:`reconcile`.
        limit: see there.
        may_delay: a replacement that fails may be made again later.

    Attributes:
        written: how many rows were written.
        copied: how many of them were not compared.
        deleted: how many rows were deleted, and not written again under the same key.
    """

    def __init__(
        self,
        sink: ReplacingSink,
        table: PublishedTable,
        key: tuple[str, ...],
        *,
        copy_format: CopyFormat,
        read: Callable[[Condition, Count], CopyPart],
        named: SnapshotReader,
        turn: asyncio.Lock,
        advanced: Count,
        limit: RateLimit,
        may_delay: bool,
    ) -> None:
        self._may_delay = may_delay
        self._limit = limit
        self._sink = sink
        self._table = table
        self._key = key
        self._format = copy_format
        self._read = read
        self._named = named
        self._turn = turn
        self._batch = min(_FIRST_ROWS, _ROWS)
        self._operators: Operators | None = None
        self._delayed: list[_Counted] = []
        self.advanced = advanced
        self.written = self.copied = self.deleted = 0

    async def replace_range(self, part: Part, *, there: int | None = None) -> None:
        """Replace all rows of a range. ``there``: how many the target has, if they were compared."""
        counted = _Counted(compared=there is not None, deleted=there or 0)

        def count(rows: int) -> None:
            counted.rows += rows
            if not counted.compared and counted.rows > counted.shown:
                self.advanced(counted.rows - counted.shown)
                counted.shown = counted.rows

        counted.replacement = ReplacedRange(self._key, part.column, part.low, part.high, self._read(part.condition, count))
        await self._replace(counted)

    async def replace_keys(self, keys: Sequence[Key]) -> None:
        """Replace the rows with these keys."""
        begin = 0
        while begin < len(keys):
            some = keys[begin : begin + self._batch]
            counted = _Counted(compared=True)
            counted.replacement = ReplacedKeys(self._key, some, partial(self._rows, some, counted))
            await self._replace(counted)
            begin += len(some)

    async def _rows(self, keys: Sequence[Key], counted: _Counted) -> Rows:
        whole = [tuple(value for value in key if value is not None) for key in keys if None not in key]
        if not whole:
            return ()
        async with self._turn:
            if self._operators is None:
                self._operators = await key_operators(self._named, self._table)
            rows = await rows_by_key(self._named, self._table, self._key, whole, by_text=True, operators=self._operators)
        counted.rows, counted.deleted = len(rows), len(whole) - len(rows)
        size = sum(len(value or "") for row in rows for value in row)
        await self._limit.spend(size)
        fit = len(whole) * _BYTES // max(size, 1)
        self._batch = max(min(fit, len(whole) * _GROWTH, _ROWS), 1)
        return rows

    async def _replace(self, counted: _Counted) -> None:
        if not await self._make([counted]):
            self._delayed.append(counted)
        moved()

    async def _make(self, some: Sequence[_Counted], *, last: bool = False) -> bool:
        """Make replacements in one transaction. False: a row that another replacement may remove is in the way."""
        for each in some:
            each.rows = 0
        try:
            await self._sink.replace([each.replacement for each in some if each.replacement], self._table.columns, self._format)
        except TargetError as error:
            state = error.sqlstate or ""
            if last or not self._may_delay or not (state.startswith(_IN_THE_WAY) or state == _DEADLOCK):
                raise
            return False
        for each in some:
            self.written += each.rows
            self.copied += 0 if each.compared else each.rows
            self.deleted += each.deleted
        crash_points.reached("reconcile.replaced")
        return True

    async def finish(self) -> None:
        """Make the replacements that were put off: one by one, as long as most of them succeed, and then all in one transaction."""
        waiting = self._delayed
        while waiting:
            left = [each for each in waiting if not await self._make([each])]
            moved()
            if len(left) > len(waiting) // 2:
                await self._make(left, last=True)
                return
            waiting = left


@dataclass(slots=True)
class _Counted:
    """A replacement, and what its latest attempt has done.

    Attributes:
        compared: its rows were compared before.
        replacement: it.
        rows: how many rows were read for it.
        deleted: how many rows it deletes, without those that it writes again under the same key.
        shown: how many of them the progress has.
    """

    compared: bool
    replacement: Replacement | None = None
    rows: int = 0
    deleted: int = 0
    shown: int = 0
