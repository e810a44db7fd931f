"""The publisher of a verb: given by the command, or that of a subscription of the target."""

from __future__ import annotations

from collections.abc import Sequence

from subscriber.catalog.subscriptions import no_such_subscription
from subscriber.config import SubscriptionOptions
from subscriber.config.mapping import NO_MAPPING, TableMapping
from subscriber.errors import ConfigurationError
from subscriber.subscription.targets import observed

__all__ = ["find_publisher"]


async def find_publisher(
    name: str | None, target: str, connection: str | None, publications: Sequence[str], names: SubscriptionOptions | None = None
) -> tuple[str, Sequence[str], TableMapping]:
    """Return the connection string of the publisher, the publications, and the names of the target's tables.

    Args:
        name: of a subscription of the target, which says what is not given. None: everything is given.
        target: URL or conninfo of the target.
        connection: given.
        publications: given.
        names: given.

    Raises:
        ConfigurationError: the publisher is not known.
        TargetError: the subscription does not exist, or the target cannot be reached.
    """
    mapping = names.mapping if names is not None else NO_MAPPING
    if name is not None:
        found = await observed(target, name)
        if found is None:
            raise no_such_subscription(name)
        connection = connection or found.definition.conninfo
        publications = publications or found.definition.publications
        mapping = mapping or found.definition.options.mapping
    if connection is None:
        what = f'the publisher of subscription "{name}" is not known' if name is not None else "the publisher is not known"
        raise ConfigurationError(what, hint="give --connection")
    return connection, publications, mapping
