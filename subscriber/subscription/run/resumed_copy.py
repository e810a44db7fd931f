"""Resume a copy that was interrupted: compare what it has left with a new snapshot, and copy what differs.

The snapshot of the interrupted copy is gone. Its rows in the target are those of an older moment, so some of them may have changed. The
table is divided into ranges of its key, as for a verification. The checksum of each range is computed on both sides: on the publisher under
the new snapshot, in the target over the rows that the copy has left. A range without rows in the target is copied. Of a range that differs
in few rows, these are copied; else the whole range, also if there are many such ranges. All rows that differ are deleted first. Then what
is missing is copied, each range in its own transaction. So the next interruption loses only what was not committed, and in the end the
table holds exactly the rows of the new snapshot.

This needs a key whose first column both servers sort in the same way, and rows that lie in about the order of the key
(``pg_stats.correlation``): otherwise each range has rows from all over the table, and half of a copy leaves half of each range. It also
needs the publisher's statistics (ANALYZE). Other tables are copied from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from subscriber.apply.table_synchronization import CopyPart, Replacement, ResumedRange
from subscriber.interfaces import Condition, KeptRows, PublishedTable
from subscriber.verification.compare import TableComparison
from subscriber.verification.model import Quiet, RowKind, TableReport, VerificationLimits
from subscriber.verification.parts import Part
from subscriber.verification.postgres_table import PostgresTable
from subscriber.verification.sides import Rate, Side
from subscriber.verification.tables import KeyRanges, Pair, describe, divide, may_have_ranges, pair
from subscriber.walreceiver.copying.snapshot import ExportedSnapshot

__all__ = ["resumed_ranges"]

_MOST_KEYS: Final = 1000
"""So many rows of a range are replaced one by one."""
_MOST_CHARACTERS: Final = 10_000_000
"""All rows that are replaced one by one, by the length of their keys: these are kept until all ranges are compared."""

Rows = Callable[[int], None]


async def resumed_ranges(
    snapshot: ExportedSnapshot, table: PublishedTable, kept: KeptRows, read: Callable[[Condition], CopyPart], kept_rows: Rows
) -> Sequence[ResumedRange] | None:
    """Divide a table whose copy was interrupted.

    Args:
        snapshot: the new one.
        table: as published.
        kept: the rows that the copy has left.
        read: makes the copy of the publisher's rows that satisfy a condition.
        kept_rows: called with the number of rows that are not copied again.

    Returns:
        Its ranges; None: it has no such ranges.

    Raises:
        PublisherError, TargetError: a query was rejected, or a session was lost.
    """
    if not may_have_ranges(table):
        return None
    async with snapshot.reader() as reader:
        here, there = await describe(reader.execute, table.name), await describe(kept.query, table.name)
        planned = pair(table, here, there) if here is not None and there is not None else ""
        if isinstance(planned, str):
            return None
        plan = await divide(reader.execute, planned, 1)
    if not isinstance(plan, KeyRanges) or len(plan.parts) < 2:
        return None
    copy = _ResumedCopy(snapshot, table, planned, kept, Side([kept.query]), read, kept_rows)
    return [partial(copy.compare, part) for part in plan.parts]


@dataclass(slots=True)
class _ResumedCopy:
    """See :func:`resumed_ranges`. ``side`` has the target's session, ``free`` is what is left of ``_MOST_CHARACTERS``."""

    snapshot: ExportedSnapshot
    table: PublishedTable
    planned: Pair
    kept: KeptRows
    side: Side
    read: Callable[[Condition], CopyPart]
    kept_rows: Rows
    free: int = field(default_factory=lambda: _MOST_CHARACTERS)

    async def compare(self, part: Part) -> Replacement | None:
        """Find out what must be copied of a range."""
        target = self.planned.target
        within = part.condition
        has_rows = f"SELECT EXISTS (SELECT FROM {target.relation}{target.where(within.sql(), self.kept.condition)})::text"  # noqa: S608
        ((found,),) = await self.side.run(has_rows, *within.values)
        if found == "true":
            report = TableReport(self.table.name)
            keys = await self._differing(part, report)
            if report.equal:
                self.kept_rows(report.publisher_rows)
                return None
            size = sum(len(value) for key in keys for value in key)
            if not report.more and size <= self.free:
                self.free -= size
                self.kept_rows(report.publisher_rows - sum(each.kind is not RowKind.EXTRA for each in report.differences))
                return Replacement(target.has_key(keys), self.read(self.planned.publisher.has_key(keys)))
        return Replacement(within if found == "true" else None, self.read(within))

    async def _differing(self, part: Part, report: TableReport) -> Sequence[Sequence[str]]:
        async with self.snapshot.reader() as reader:
            comparison = TableComparison(
                PostgresTable(self.planned.publisher, Side([reader.execute])),
                PostgresTable(self.planned.target, self.side, condition=self.kept.condition),
                key=self.planned.publisher.key,
                columns=self.table.columns,
                limits=VerificationLimits(jobs=1, max_differences=_MOST_KEYS),
                rate=Rate(None),
                progress=Quiet(),
                report=report,
            )
            await comparison.run(KeyRanges((part,)))
        # a key has no NULL
        return [[value or "" for value in key] for key in comparison.keys]
