"""Compare again what differs, for a target without snapshots.

The first pass reads the target while transactions are applied. So it finds all rows that really differ, and rows that have changed
meanwhile. The second pass looks at these rows only, at another LSN. Rows with a key are read from the target while apply is held there, so
the result is exact. A table without a key is read again as a whole, and only rows that differ both times are differences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from subscriber.catalog.snapshot_requests import RequestState, not_ready
from subscriber.subscription.comparison.snapshot_request import Asker, PublisherSide, publisher_sessions
from subscriber.verification.compare import TableComparison, named_rows, read_cells
from subscriber.verification.model import TableReport, VerificationLimits
from subscriber.verification.postgres_table import PostgresTable
from subscriber.verification.sides import Side
from subscriber.verification.tables import was_rewritten_query
from subscriber.verification.targets import PlannedTable

__all__ = ["FirstPass", "compare_again"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstPass:
    """One table in the first pass.

    Attributes:
        report: the result, which the second pass corrects.
        planned: the table.
        comparison: what found the differences.
        again: makes the same comparison with the publisher in another snapshot.
    """

    report: TableReport
    planned: PlannedTable
    comparison: TableComparison
    again: Callable[[PostgresTable, TableReport], TableComparison]


async def compare_again(found: FirstPass, asker: Asker, conninfo: str, limits: VerificationLimits, application_name: str) -> None:
    """Make the second pass of one table.

    Raises:
        TargetError, PublisherError: as :func:`subscriber.verify`.
    """
    report, planned, keys = found.report, found.planned, found.comparison.keys
    async with asker.ask({"kind": "snapshot"}) as request:
        side = PublisherSide.of(request.answer)
        there = await read_cells(planned.target, keys, values=limits.show_values)
        await asker.say(request, only_from=RequestState.HELD, to=RequestState.OPENED)
        sessions = publisher_sessions(conninfo, side.name, 1, application_name=application_name)
        async with sessions as (reader,):
            await asker.say(request, only_from=RequestState.OPENED, to=RequestState.DONE)
            publisher = planned.publisher.on(Side([reader.read]))
            if planned.key:
                here = await read_cells(publisher, keys, values=limits.show_values)
                report.differences = named_rows(keys, here, there, key=planned.key, columns=planned.columns)
            else:
                second = TableReport(report.table)
                await found.again(publisher, second).run(planned.plan, earlier=found.comparison)
                report.differences, report.more = second.differences, second.more
            ((rewritten,),) = await reader.read(was_rewritten_query(report.table))
    if rewritten == "true":
        report.left_out = "it was truncated or rewritten while it was compared: verify it again"
    elif reason := not_ready(await asker.requests.entries(), [report.table], side.lsn).get(report.table):
        report.left_out = reason
    elif not report.differences:
        report.differing_ranges = 0
        if report.more:
            report.left_out = f"more than {limits.max_differences} rows have changed while it was compared: verify it again"
