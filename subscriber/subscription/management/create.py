"""CREATE SUBSCRIPTION: define a subscription in the target's catalog, create its slot and list its tables. A launcher runs it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace

from subscriber.apply.row_filters import filter_expressions
from subscriber.catalog import Catalog, Definition
from subscriber.config import NO_SLOT, Settings, SubscriptionOptions, check_slot_name
from subscriber.errors import ConfigurationError, SubscriberError
from subscriber.interfaces import TableName, TwoPhaseState
from subscriber.protocol.conninfo import StoredConninfo
from subscriber.subscription.management.drop import remove
from subscriber.subscription.setup.setup import Setup
from subscriber.subscription.spec import require_rules
from subscriber.subscription.targets import open_target, opened_catalog
from subscriber.walreceiver.session import check_conninfo

__all__ = ["check_publication_list", "create_subscription"]

_log = logging.getLogger(__name__)


async def create_subscription(
    name: str,
    *,
    connection: str,
    publications: Sequence[str],
    target: str,
    options: SubscriptionOptions | None = None,
    settings: Settings | None = None,
) -> Collection[TableName]:
    """Define a subscription in the target's catalog, as CREATE SUBSCRIPTION does.

    On return, its slot exists (unless ``connect`` or ``create_slot`` is false) and its tables are listed. If it is ``enabled``, a launcher
    (:class:`subscriber.Launcher`, ``subscriber run --target``) runs it.

    Args:
        name: unique in the target. It is also the slot's name unless ``options.slot_name`` is given.
        connection: connection string of the publisher. It is stored with its password, if any; only the catalog's owner can read it.
        publications: at least one. A publication that does not exist is a warning, as in PostgreSQL.
        target: URL or conninfo of the target.
        options: the parameters of CREATE SUBSCRIPTION.
        settings: of the process.

    Returns:
        The tables that the subscription replicates; none if ``connect`` is false.

    Raises:
        ConfigurationError: an argument is invalid, or arguments cannot be combined.
        PublisherError: the publisher rejected a request. Nothing was created, or it was removed again.
        TargetError: the target rejected a request. Nothing was created, or it was removed again.
    """
    options, settings = options or SubscriptionOptions(), settings or Settings()
    check_publication_list(publications)
    # as the launcher will use it
    connection = StoredConninfo(connection)
    check_conninfo(connection)
    filter_expressions(options)
    slot_name = None if options.slot_name == NO_SLOT else options.slot_name or name
    if slot_name is not None:
        check_slot_name(slot_name)
    require_rules(options, open_target(target, options, settings, defined=True))
    definition = Definition(
        name=name,
        enabled=options.enabled,
        conninfo=connection,
        # not noted before we create the slot; one that existed before is noted at the end. Reason: a failed create drops the noted slot
        slot_name=None,
        publications=tuple(publications),
        options=options,
        two_phase=TwoPhaseState.PENDING if options.two_phase else TwoPhaseState.DISABLED,
    )
    async with opened_catalog(target, "subscriber create") as catalog:
        await _remove_unmade(catalog, name, target, settings)
        async with catalog.create(definition) as made:
            try:
                tables = await _make(made, options, settings, target) if options.connect else ()
                found = {} if options.create_slot else {"slot_name": slot_name}
                await catalog.update(made.oid, {"made": True, "enabled": options.enabled, **found})
            except BaseException:
                await _take_back(catalog, name, target, settings)
                raise
    if not options.connect:
        _log.warning(
            "subscription was created, but is not connected (hint: To initiate replication, you must manually create the replication slot,"
            " enable the subscription, and refresh the subscription.)"
        )
    return tables


async def _make(definition: Definition, options: SubscriptionOptions, settings: Settings, target: str) -> Collection[TableName]:
    async with Setup.of_definition(definition, target, replace(options, enabled=True), settings) as setup:
        return await setup.create()


async def _take_back(catalog: Catalog, name: str, target: str, settings: Settings) -> None:
    """Remove a subscription whose creation failed. If that fails too, the next create or drop of this name removes it."""
    try:
        for found in await catalog.subscriptions():
            if found.name == name and not found.made:
                await remove(catalog, found, target=target, settings=settings)
    except SubscriberError as error:
        _log.warning('subscription "%s" was not created, but its entry could not be removed: %s', name, error.one_line())


async def _remove_unmade(catalog: Catalog, name: str, target: str, settings: Settings) -> None:
    """Remove the remains of an earlier create that was killed."""
    if any(found.name == name and not found.made and not found.claimed for found in await catalog.subscriptions()):
        async with catalog.claim(name) as found:
            if not found.made:
                await remove(catalog, found, target=target, settings=settings)


def check_publication_list(publications: Sequence[str]) -> None:
    """Check that this is a list of distinct names.

    Raises:
        ConfigurationError: with PostgreSQL's message.
    """
    if isinstance(publications, str):
        raise ConfigurationError("publications is a string", hint='give a list, as in publications=["app"]')
    if not publications:
        raise ConfigurationError("no publication to subscribe to", hint="give at least one publication")
    for name in publications:
        if publications.count(name) > 1:
            raise ConfigurationError(f'publication name "{name}" used more than once', hint="specify it once")
