"""The publisher of a verb: given by the command, or that of a subscription of the target."""

from __future__ import annotations

from collections.abc import Sequence

from subscriber.config import SubscriptionOptions
from subscriber.config.mapping import NO_MAPPING, TableMapping
from subscriber.errors import ConfigurationError, TargetError
from subscriber.subscription.targets import observe_target

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
        definitions = {each.definition.name: each.definition for each in await observe_target(target)}
        if name not in definitions:
            raise TargetError(
                f'subscription "{name}" does not exist', sqlstate="42704", hint="`subscriber status` lists the existing subscriptions"
            )
        connection = connection or definitions[name].conninfo
        publications = publications or definitions[name].publications
        mapping = mapping or definitions[name].options.mapping
    if connection is None:
        what = f'the publisher of subscription "{name}" is not known' if name is not None else "the publisher is not known"
        raise ConfigurationError(what, hint="give --connection")
    return connection, publications, mapping
