"""``verify``: compare the rows of both sides at one LSN while replication runs, and repair those that differ."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from subscriber.apply.row_filters import copied_rows
from subscriber.catalog.snapshot_requests import RequestState, not_ready
from subscriber.catalog.target_kind import ComparedKind, ComparedTarget
from subscriber.catalog.verifications import Systems, TableVerification
from subscriber.errors import ConfigurationError, PublisherUnavailable, SubscriberError, TargetUnavailable
from subscriber.interfaces import PublishedTable, TableEntry, TableName
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.session_name import session_name
from subscriber.subscription.comparison.second_pass import FirstPass, compare_again
from subscriber.subscription.comparison.snapshot_request import Asker, PublisherSide, publisher_sessions
from subscriber.subscription.targets import required_ability
from subscriber.verification.compare import TableComparison
from subscriber.verification.model import Progress, Quiet, TableReport, VerificationLimits, VerificationReport
from subscriber.verification.postgres_table import PostgresTable
from subscriber.verification.sides import Rate, Side
from subscriber.verification.tables import row_key, was_rewritten_query
from subscriber.verification.targets import OtherTarget, PostgresTarget, TargetSnapshot
from subscriber.walreceiver.copying.snapshot import SnapshotReader
from subscriber.walreceiver.publication import published_tables

__all__ = ["last_verifications", "verify"]


async def verify(
    name: str,
    *,
    target: str,
    connection: str | None = None,
    tables: Sequence[TableName] = (),
    limits: VerificationLimits | None = None,
    progress: Progress | None = None,
    changed: bool = False,
    repaired: Sequence[TableVerification] = (),
) -> VerificationReport:
    """Compare the tables of a running subscription with the publisher's, both as of one LSN.

    Args:
        name: of the subscription.
        target: URL or conninfo of the target.
        connection: connection string of the publisher, for a subscription that its command line defines.
        tables: only these. Empty: all tables of the subscription.
        limits: how much to do.
        progress: is told about the progress.
        changed: read only what changed since the last verification that found the table equal, where that is possible. The result is as
            sure as that of a whole comparison.
        repaired: earlier results (``VerificationReport.results``) whose differences were all repaired since. With ``changed``, only what
            changed since then is read of these tables.

    Returns:
        What was found. Differences are no error.

    Raises:
        ConfigurationError: no connection string is known; a table is not published; or this kind of target cannot be verified.
        TargetError: the subscription does not exist or does not run, or the target cannot be read.
        SubscriptionInUse: another process verifies the subscription.
        PublisherError: the publisher cannot be read.
    """
    began = time.monotonic()
    limits = limits or VerificationLimits()
    kind = required_ability(target, ComparedKind, "cannot be compared with the publisher", "compare it with queries of your own")
    async with kind.compared(target, name, limits.jobs) as found:
        conninfo = connection or found.definition.conninfo
        if conninfo is None:
            raise ConfigurationError(f'the publisher of subscription "{name}" is not known', hint="give --connection")
        run = _Verification(found, limits, progress or Quiet())
        async with run.snapshots(conninfo, tables) as opened:
            reports = await run.compare(opened, tables, changed=changed, repaired=repaired)
        if not found.has_snapshots:
            await run.compare_again(conninfo)
        stored = await run.save(opened, reports)
        systems = await found.verifications.systems() if found.verifications is not None else Systems("", "")
    return VerificationReport(
        subscription=name,
        lsn=opened.lsn if found.has_snapshots else None,
        held_seconds=opened.held_seconds,
        tables=reports,
        seconds=time.monotonic() - began,
        publisher_system=systems.publisher,
        target_system=systems.target,
        results=stored,
    )


async def last_verifications(name: str, *, target: str) -> Mapping[TableName, TableVerification]:
    """Read the stored result of each table's last verification.

    Raises:
        ConfigurationError, TargetError: as :func:`verify`.
    """
    kind = required_ability(target, ComparedKind, "cannot be compared with the publisher", "compare it with queries of your own")
    async with kind.compared(target, name, 1) as found:
        return await found.verifications.read() if found.verifications is not None else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """Both snapshots.

    Attributes:
        lsn: of both.
        publisher: the sessions there.
        target: the snapshot there.
        entries: the states of the tables.
        published: the tables of the publications.
        xmins: of both sides: all transactions below have ended before the snapshots.
        held_seconds: how long apply was held.
    """

    lsn: Lsn
    publisher: Side
    target: TargetSnapshot
    entries: Mapping[TableName, TableEntry]
    published: Sequence[PublishedTable]
    xmins: tuple[int, int]
    held_seconds: float


class _Verification:
    """One verification.

    Args:
        target: what is compared with the publisher.
        limits: what to do at most.
        progress: is told about it.
    """

    def __init__(self, target: ComparedTarget, limits: VerificationLimits, progress: Progress) -> None:
        self._target = target
        self._definition = target.definition
        self._limits = limits
        self._progress = progress
        self._rate = Rate(limits.max_rate)
        self._first: list[FirstPass] = []

    @contextlib.asynccontextmanager
    async def snapshots(self, conninfo: str, wanted: Sequence[TableName]) -> AsyncIterator[_Opened]:
        """Open snapshots of both sides at one LSN."""
        definition, jobs = self._definition, self._limits.jobs
        called = session_name(definition.name, "verify")
        async with contextlib.AsyncExitStack() as stack:
            asker = Asker(self._target.requests, definition.name, self._progress)
            async with asker, asker.ask({"kind": "snapshot"}) as request:
                side = PublisherSide.of(request.answer)
                await self._target.begin(request.answer, called)
                if request.state is RequestState.HELD:
                    await asker.say(request, only_from=RequestState.HELD, to=RequestState.OPENED)
                readers = await stack.enter_async_context(publisher_sessions(conninfo, side.name, jobs, application_name=called))
                held = await asker.held_seconds(request.number)
                await asker.say(request, only_from=RequestState.OPENED, to=RequestState.DONE)
            entries = await self._target.requests.entries()
            ready = entries.keys() - not_ready(entries, entries, side.lsn).keys()
            found = await self._target.snapshot(side.lsn, ready, self._progress.waiting)
            yield _Opened(
                lsn=side.lsn,
                publisher=Side([reader.read for reader in readers]),
                target=PostgresTarget(Side(found)) if isinstance(found, Sequence) else OtherTarget(found),
                entries=entries,
                published=[copied_rows(table, definition.options) for table in await self._published(readers[0], wanted)],
                xmins=(side.xmin, int(request.answer.get("target_xmin", 0))),
                held_seconds=held,
            )

    async def _published(self, reader: SnapshotReader, wanted: Sequence[TableName]) -> Sequence[PublishedTable]:
        # a single table is described at once, however many the publications have
        return await published_tables(
            reader, self._definition.publications, *(wanted if len(wanted) == 1 else ()), mapping=self._definition.options.mapping
        )

    async def compare(
        self, opened: _Opened, wanted: Sequence[TableName], *, changed: bool, repaired: Sequence[TableVerification]
    ) -> list[TableReport]:
        """Compare the tables, several at once."""
        tables = _chosen(opened.published, wanted)
        since = await self._equal_before(tables, repaired) if changed else {}
        left_out = not_ready(opened.entries, [table.name for table in tables], opened.lsn)
        rows = sum(table.estimated_rows or 0 for table in tables)
        self._progress.opened(opened.lsn, opened.held_seconds, len(tables), rows)
        await opened.target.describe([table for table in tables if table.name not in left_out], opened.publisher)
        # the largest first, so that all sessions end at about the same time
        waiting = iter(sorted(tables, key=lambda table: -table.size))
        reports: list[TableReport] = []

        async def work() -> None:
            for table in waiting:
                report = TableReport(table.name, left_out=left_out.get(table.name))
                if report.left_out is None:
                    await self._compare(opened, table, report, since.get(table.name))
                reports.append(report)
                self._progress.finished(report)

        tasks = [asyncio.create_task(work()) for _ in range(self._limits.jobs)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return sorted(reports, key=lambda report: report.table)

    async def _compare(self, opened: _Opened, table: PublishedTable, report: TableReport, since: TableVerification | None) -> None:
        began = time.monotonic()
        try:
            report.left_out = await self._compare_rows(opened, table, report, since)
        except (PublisherUnavailable, TargetUnavailable):
            raise
        except SubscriberError as error:
            # of this table: a missing privilege, or a column that was dropped meanwhile. Others can still be compared
            report.left_out = error.one_line()
        report.seconds = time.monotonic() - began

    async def _compare_rows(
        self, opened: _Opened, table: PublishedTable, report: TableReport, since: TableVerification | None
    ) -> str | None:
        """Compare the rows of one table. Return why it cannot be compared, or None."""
        planned = await opened.target.plan(table, opened.publisher, self._limits)
        if isinstance(planned, str):
            return planned
        report.key, report.columns, report.row_filters = tuple(planned.key), tuple(planned.columns), tuple(table.row_filters)
        report.same_keys = planned.same_keys

        def comparing(publisher: PostgresTable, report: TableReport) -> TableComparison:
            return TableComparison(
                publisher,
                planned.target,
                key=planned.key,
                columns=planned.columns,
                limits=self._limits,
                rate=self._rate,
                progress=self._progress,
                report=report,
            )

        comparison = comparing(planned.publisher, report)
        found = None
        if since is not None and planned.changed is not None:
            found = await planned.changed.differing((since.publisher_xmin, since.target_xmin))
        if since is not None and found is not None:
            keys, (report.publisher_rows, report.target_rows) = found
            report.changed_only, report.whole_lsn = True, since.whole_lsn
            report.ranges, report.differing_ranges = 1, int(bool(keys))
            await comparison.name_keys(keys)
        else:
            await comparison.run(planned.plan)
        ((rewritten,),) = await opened.publisher.run(was_rewritten_query(table.publisher_name))
        if rewritten == "true" or not await opened.target.is_intact(table):
            return "it was truncated or rewritten while it was compared: verify it again"
        if report.differing_ranges:
            self._first.append(FirstPass(report=report, planned=planned, comparison=comparison, again=comparing))
        return None

    async def compare_again(self, conninfo: str) -> None:
        """Make the second pass over the tables that differ, one after another."""
        called = session_name(self._definition.name, "verify")
        async with Asker(self._target.requests, self._definition.name, self._progress) as asker:
            for found in self._first:
                await compare_again(found, asker, conninfo, self._limits, called)

    async def _equal_before(
        self, tables: Sequence[PublishedTable], repaired: Sequence[TableVerification]
    ) -> dict[TableName, TableVerification]:
        """The last verification of each table after which it was equal, if its published columns and rows are still the same."""
        stored = self._target.verifications
        known = await stored.read() if stored is not None else {}
        equal = {name: found for name, found in known.items() if found.equal} | {found.table: found for found in repaired if not found.more}
        return {
            table.name: found for table in tables if (found := equal.get(table.name)) is not None and found.compared == _compared(table)
        }

    async def save(self, opened: _Opened, reports: Sequence[TableReport]) -> list[TableVerification]:
        """Store the results of the tables that were compared."""
        published = {table.name: table for table in opened.published}
        found = [_result(report, published[report.table], opened) for report in reports if report.left_out is None]
        if self._target.verifications is not None:
            await self._target.verifications.save(found)
        return found


def _result(report: TableReport, table: PublishedTable, opened: _Opened) -> TableVerification:
    differences = sum(each.count for each in report.differences)
    return TableVerification(
        table=table.name,
        lsn=opened.lsn,
        whole_lsn=report.whole_lsn or opened.lsn,
        verified_at=time.time(),
        row_count=report.publisher_rows,
        differences=differences,
        more=report.more or not (report.equal or differences),
        seconds=report.seconds,
        compared=_compared(table),
        publisher_xmin=opened.xmins[0],
        target_xmin=opened.xmins[1],
    )


def _compared(table: PublishedTable) -> str:
    """Identify what a verification of this table compares: after a change of it, old rows may differ without having been written."""
    what = json.dumps([sorted(table.columns), sorted(table.row_filters), row_key(table)])
    return hashlib.md5(what.encode(), usedforsecurity=False).hexdigest()


def _chosen(published: Sequence[PublishedTable], wanted: Sequence[TableName]) -> Sequence[PublishedTable]:
    if not wanted:
        return published
    known = {table.name: table for table in published}
    for name in wanted:
        if name not in known:
            raise ConfigurationError(f'table "{name}" is not published', hint="`subscriber status` lists the tables of a subscription")
    return [known[name] for name in sorted(set(wanted))]
