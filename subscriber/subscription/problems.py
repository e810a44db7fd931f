"""Everything that would go wrong with a subscription, said before it does. Changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from subscriber.abc import Finding, Sink, TableName
from subscriber.apply.spool import SpoolDirectory
from subscriber.config import NO_SLOT, Settings, SubscriptionOptions, check_slot_name
from subscriber.errors import ConfigurationError, TargetError, TargetUnavailable
from subscriber.protocol.session_name import session_name
from subscriber.subscription.identity import find_same_database
from subscriber.subscription.loops import find_loops
from subscriber.subscription.targets import open_target
from subscriber.walreceiver.checks import check_publisher
from subscriber.walreceiver.connection import WalReceiverConnection
from subscriber.walreceiver.large_rows import find_large_rows
from subscriber.walreceiver.publication import published_tables

__all__ = ["check", "check_options", "find_problems", "tell"]

_log = logging.getLogger(__name__)


def check_options(publications: Sequence[str], slot_name: str, options: SubscriptionOptions, sink: Sink) -> None:
    """See whether they make sense together, before anything is looked at.

    Raises:
        ConfigurationError: they do not.
    """
    if not publications:
        raise ConfigurationError("no publication to subscribe to", hint="give at least one publication")
    if not options.connect or not options.enabled:
        word = "enabled" if options.connect else "connect"
        raise ConfigurationError(f"{word} = false is not allowed for run", hint="omit the parameter")
    check_slot_name(slot_name)
    if options.two_phase and not sink.capabilities.two_phase:
        raise ConfigurationError("this kind of target cannot hold prepared transactions", hint="use two_phase = false")


async def find_problems(
    connection: WalReceiverConnection,
    sink: Sink,
    *,
    known: bool,
    publications: Sequence[str],
    slot_name: str,
    options: SubscriptionOptions,
    settings: Settings,
    later: bool = False,
) -> tuple[list[Finding], list[Finding]]:
    """Look at the publisher, and at the target.

    Args:
        connection: to the publisher.
        sink: the target.
        known: whether the target knows the subscription already, so that the slot is its own.
        publications: to be subscribed to.
        slot_name: the subscription's.
        options: of the subscription.
        settings: how many tables are synchronized at once.
        later: what is to be made by others, publications and a slot, may also be made later.

    Returns:
        The publisher's findings, and the target's. If none of the tables fits, a run would do nothing, and no error is ``alone``; with
        ``later`` the tables may be changed later, too.

    Raises:
        PublisherError, TargetError: one of the two cannot be looked at.
        SpoolError: there is no place for large transactions.
    """
    await SpoolDirectory.probe(settings.spool_directory)
    tables = await published_tables(connection, publications)
    publisher = await check_publisher(
        connection,
        publications,
        tables,
        None if slot_name == NO_SLOT else slot_name,
        copy_data=options.copy_data,
        only_local=options.origin == "none",
        sync_workers=settings.max_sync_workers_per_subscription,
        missing="warning" if later else "error",
    )
    if not known and (options.create_slot or not later):
        publisher += await _first_slot(connection, slot_name, options)
    publisher += await find_loops(connection, sink, publications, options)
    publisher += await find_large_rows(connection, tables, settings.logical_decoding_work_mem)
    target = await sink.check(tables, two_phase=options.two_phase)
    misfits = {finding.table for finding in (*publisher, *target) if finding.severity == "error"}
    if not later and misfits >= {table.name for table in tables}:
        return _together(publisher), _together(target)
    return publisher, target


def _together(findings: Sequence[Finding]) -> list[Finding]:
    return [replace(finding, alone=False) for finding in findings]


def tell(findings: Sequence[Finding], *, copy_data: bool, misfits: int = logging.WARNING) -> set[TableName]:
    """Log what refuses nothing.

    Args:
        findings: all.
        copy_data: whether the tables are copied.
        misfits: level of the tables that cannot be replicated yet.

    Returns:
        These tables.
    """
    tables = set[TableName]()
    for finding in findings:
        if finding.refuses:
            continue
        level, consequence = logging.WARNING, ""
        if finding.severity == "error" and (finding.stops == "always" or (finding.stops == "without_copy" and not copy_data)):
            # as natively
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
        # a transaction prepared before a table's copy and committed behind its handover would be seen by neither
        message = f'replication slot "{name}" sends prepared transactions: tables cannot be copied under it'
        return [Finding("error", message, "use copy_data = false, or omit create_slot = false")]
    return []


async def _is_known(sink: Sink, name: str) -> bool:
    try:
        return await sink.exists(name)
    except TargetUnavailable:
        raise
    except TargetError:
        # a catalog that cannot be used is among the target's findings, with all the others
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
    """What :meth:`Subscription.run` would meet, for the same arguments as :class:`Subscription`'s.

    Returns:
        Errors and warnings, those of the publisher first; empty if nothing was found.

    Raises:
        ConfigurationError: arguments that cannot be used together.
        PublisherError, TargetError: one of the two cannot be looked at.
        SpoolError: there is no place for large transactions.
    """
    options, settings = options or SubscriptionOptions(), settings or Settings()
    sink = open_target(target, options, settings) if isinstance(target, str) else target
    check_options(publications, options.slot_name or name, options, sink)
    session = await WalReceiverConnection.connect(connection, application_name=session_name(name, "check"))
    try:
        same = await find_same_database(session, sink)
        publisher, found = await find_problems(
            session,
            sink,
            known=await _is_known(sink, name),
            publications=publications,
            slot_name=options.slot_name or name,
            options=options,
            settings=settings,
        )
    finally:
        await session.close()
    return [*same, *publisher, *found]
