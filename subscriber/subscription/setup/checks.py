"""Checks that find the problems of a subscription before it runs. They change nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from subscriber.apply.all_changes import find_archives, find_own_rows
from subscriber.apply.receiving.spool import SpoolDirectory
from subscriber.config import NO_SLOT, ConflictRules, CopyData, Settings, SubscriptionOptions
from subscriber.errors import ConfigurationError, TargetError, TargetUnavailable
from subscriber.interfaces import Finding, PublishedTable, Sink, TableName
from subscriber.recording.relay_directory import probe_relay_log
from subscriber.subscription.setup.encodings import find_encodings
from subscriber.subscription.setup.mapped_tables import find_mapping_problems
from subscriber.subscription.setup.replication_loops import find_loops
from subscriber.subscription.setup.row_filters import find_filter_problems
from subscriber.subscription.setup.same_database import find_same_database
from subscriber.subscription.setup.synchronous_publisher import find_synchronous
from subscriber.subscription.spec import RunSpec
from subscriber.subscription.targets import has_schema
from subscriber.walreceiver.checks import check_publisher
from subscriber.walreceiver.connection import WalReceiverConnection
from subscriber.walreceiver.copying.large_rows import find_large_rows
from subscriber.walreceiver.mapped_tables import mapped_tables
from subscriber.walreceiver.publication import missing_publications, published_tables

__all__ = ["check", "find_problems", "tell"]

_log = logging.getLogger(__name__)


async def find_problems(connection: WalReceiverConnection, spec: RunSpec, *, known: bool) -> tuple[list[Finding], list[Finding]]:
    """Check publisher and target. If the target's catalog defines the subscription, publications may also be created later.

    Args:
        connection: to the publisher.
        spec: the subscription.
        known: whether the target already has the subscription, so that the slot is its own.

    Returns:
        The publisher's findings, and the target's. If none of the tables can be replicated, a run would do nothing, so no error counts as
        ``alone``. In the target's catalog this does not apply, because the tables may also be changed later.

    Raises:
        PublisherError, TargetError: one of the two cannot be queried.
        SpoolError: there is no space for large transactions, or for the relay log.
    """
    options, settings, publications = spec.options, spec.settings, spec.publications
    await SpoolDirectory.probe(settings.spool_directory)
    if settings.relay_log is not None:
        await probe_relay_log(settings.relay_log)
    everything = await published_tables(connection, publications)
    wrong = find_mapping_problems(options.mapping, everything)
    if any(finding.severity == "error" for finding in wrong):
        # nothing can be said about the target's tables
        return [*wrong, *find_filter_problems(options, everything)], []
    tables = mapped_tables(everything, options.mapping)
    publisher = await check_publisher(
        connection,
        publications,
        tables,
        None if spec.slot_name == NO_SLOT else spec.slot_name,
        options=options,
        settings=settings,
        missing="warning" if spec.managed else "error",
    )
    if not known and (options.create_slot or not spec.managed):
        publisher += await _first_slot(connection, spec.slot_name, options)
    publisher += _rules_without_tables(options, everything)
    publisher += [*wrong, *find_filter_problems(options, everything)]
    if options.copy_data == "reconcile" and not known:
        publisher += [*find_archives(tables), *find_own_rows(options.origin)]
    if options.on_error == "park":
        publisher += await find_synchronous(connection, spec.name)
        publisher += find_own_rows(options.origin) if options.park_retry else []
    publisher += await find_loops(connection, spec)
    publisher += await find_large_rows(connection, tables, settings.logical_decoding_work_mem)
    target = await spec.sink.check(tables, two_phase=options.two_phase)
    misfits = {finding.table for finding in (*publisher, *target) if finding.severity == "error"}
    if not spec.managed and misfits >= {table.name for table in tables}:
        return _together(publisher), _together(target)
    return publisher, target


def _rules_without_tables(options: SubscriptionOptions, tables: Sequence[PublishedTable]) -> list[Finding]:
    published = {table.name for table in tables}
    return [
        Finding("warning", f"conflict rule of table {table}: the table is not published", "correct its name, or add it to the publication")
        for table in (TableName(*each) for each in ConflictRules.read(str(options.conflict)).tables)
        if table not in published
    ]


def _together(findings: Sequence[Finding]) -> list[Finding]:
    return [replace(finding, alone=False) for finding in findings]


def tell(findings: Sequence[Finding], *, copy_data: CopyData, misfits: int = logging.WARNING) -> set[TableName]:
    """Log the findings that do not refuse the subscription.

    Args:
        findings: all findings.
        copy_data: whether the tables are copied.
        misfits: log level for tables that cannot be replicated yet.

    Returns:
        The tables that cannot be replicated yet.
    """
    tables = set[TableName]()
    for finding in findings:
        if finding.refuses:
            continue
        level, consequence = logging.WARNING, ""
        if finding.severity == "error" and (finding.stops == "always" or (finding.stops == "without_copy" and not copy_data)):
            # as in PostgreSQL
            consequence = "replication will stop at the first change that this affects: "
        elif finding.severity == "error":
            level, consequence = misfits, "one table cannot be replicated yet: "
            tables |= {finding.table} if finding.table else set()
        _log.log(level, "%s%s (hint: %s)", consequence, finding.message, finding.hint)
    return tables


async def _first_slot(connection: WalReceiverConnection, name: str, options: SubscriptionOptions) -> list[Finding]:
    slot = await connection.slot(name)
    if slot is None:
        if options.create_slot:
            return []
        message = f'replication slot "{name}" does not exist on the publisher'
        return [Finding("error", message, "create it, or omit create_slot = false")]
    if options.create_slot:
        message = f'replication slot "{name}" already exists on the publisher, but the target has no record of it'
        hint = "use another name, drop the slot if it is not needed, or use create_slot = false to start at its position"
        return [Finding("error", message, hint)]
    if slot.two_phase and options.copy_data:
        # a transaction that is prepared before a table's copy and committed after its handover would be in neither
        message = f'replication slot "{name}" sends prepared transactions: tables cannot be copied under it'
        return [Finding("error", message, "use copy_data = false, or omit create_slot = false")]
    return []


async def _is_known(sink: Sink, name: str) -> bool:
    try:
        return await sink.exists(name)
    except TargetUnavailable:
        raise
    except TargetError:
        # an unusable catalog is one of the target's findings, and is reported with the others
        return True


async def check(
    name: str,
    *,
    connection: str,
    publications: Sequence[str],
    target: str | Sink,
    options: SubscriptionOptions | None = None,
    settings: Settings | None = None,
) -> list[Finding]:
    """Find the problems that :meth:`Subscription.run` would have. The arguments are those of :class:`Subscription`.

    Returns:
        Errors and warnings, those of the publisher first. Empty if nothing was found.

    Raises:
        ConfigurationError: arguments cannot be combined.
        PublisherError, TargetError: one of the two cannot be queried.
        SpoolError: there is no space for large transactions.
    """
    from subscriber.subscription.setup.schema_differences import difference_findings, find_differences  # noqa: PLC0415 -- not for a run

    spec = RunSpec.of_arguments(name, connection=connection, publications=publications, target=target, options=options, settings=settings)
    async with await spec.connect("check") as session:
        same = await find_same_database(session, spec.sink)
        publisher, found = await find_problems(session, spec, known=await _is_known(spec.sink, name))
        publisher += await find_encodings(session, spec.sink)
        if isinstance(target, str) and has_schema(target) and not same and not await missing_publications(session, publications):
            try:
                found += difference_findings(await find_differences(session, target, publications, mapping=spec.options.mapping))
            except ConfigurationError:
                # two tables with one name, which the findings have
                if not spec.options.mapping:
                    raise
    return [*same, *publisher, *found]
