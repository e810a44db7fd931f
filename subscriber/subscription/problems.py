"""Everything that would go wrong with a subscription, said before it does. Changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from subscriber.abc import Finding, Sink
from subscriber.config import Settings, SubscriptionOptions
from subscriber.subscription.targets import open_target
from subscriber.walreceiver.checks import check_publisher
from subscriber.walreceiver.connection import WalReceiverConnection
from subscriber.walreceiver.publication import published_tables

__all__ = ["check", "find_problems"]


async def find_problems(
    connection: WalReceiverConnection,
    sink: Sink,
    *,
    publications: Sequence[str],
    slot_name: str,
    options: SubscriptionOptions,
    settings: Settings,
) -> tuple[list[Finding], list[Finding]]:
    """Look at the publisher, and at the target.

    Raises:
        PublisherError, TargetError: one of the two cannot be looked at.
    """
    publisher = await check_publisher(
        connection, publications, slot_name, copy_data=options.copy_data, sync_workers=settings.max_sync_workers_per_subscription
    )
    tables = await published_tables(connection, publications)
    return publisher, await sink.check(tables, two_phase=options.two_phase)


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
        ConfigurationError, PublisherError, TargetError: one of the two cannot be looked at.
    """
    options, settings = options or SubscriptionOptions(), settings or Settings()
    sink = open_target(target, options, settings) if isinstance(target, str) else target
    session = await WalReceiverConnection.connect(connection, application_name=name)
    try:
        publisher, found = await find_problems(
            session, sink, publications=publications, slot_name=options.slot_name or name, options=options, settings=settings
        )
    finally:
        await session.close()
    return [*publisher, *found]
