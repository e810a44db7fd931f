"""Make subscriptions and targets of what a configuration file says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

from subscriber.apply.progress import CopyProgress
from subscriber.config import Settings, SubscriptionOptions
from subscriber.config.file.configuration import ConfiguredSubscription, ConfiguredTarget
from subscriber.errors import ConfigurationError
from subscriber.subscription.subscription import Subscription
from subscriber.subscription.targets import is_plugin, is_postgres
from subscriber.walreceiver.session import check_conninfo, with_password

__all__ = ["connection_of", "options_of", "settings_of", "subscription_of", "url_of"]

_USER: Final = re.compile(r"(\w[\w+.-]*://[^/?#@:\s]+)(@.*)", re.DOTALL)


def subscription_of(
    configured: ConfiguredSubscription, options: Mapping[str, str], settings: Mapping[str, str], progress: CopyProgress | None
) -> Subscription:
    """Make a subscription. ``options`` and ``settings``: those of the command line, which come first.

    Raises:
        ConfigurationError: it cannot run as it is configured.
    """
    try:
        return Subscription(
            configured.name,
            connection=connection_of(configured),
            publications=configured.publications,
            target=url_of(configured.target),
            options=options_of(configured, options),
            settings=settings_of({**configured.settings, **settings}),
            progress=progress,
        )
    except ConfigurationError as error:
        error.add_note(f"in subscriptions.{configured.name}")
        raise


def options_of(configured: ConfiguredSubscription, more: Mapping[str, str]) -> SubscriptionOptions:
    """The parameters. ``more``: those of the command line."""
    return SubscriptionOptions.parse(f"{name}={text}" for name, text in {**configured.options, **more}.items())


def settings_of(texts: Mapping[str, str]) -> Settings:
    """The settings, from their texts."""
    return Settings.parse(f"{name}={text}" for name, text in texts.items())


def connection_of(configured: ConfiguredSubscription) -> str:
    """The publisher's connection string, with its password.

    Raises:
        ConfigurationError: it cannot be parsed, or it has a password already.
    """
    found = _with_password(f"subscriptions.{configured.name}", "connection", configured.connection, configured.password)
    check_conninfo(found)
    return found


def url_of(target: ConfiguredTarget) -> str:
    """The target's URL, with its password.

    Raises:
        ConfigurationError: it has a password already or no user, or an output plugin is named.
    """
    where = f"targets.{target.name}"
    if is_plugin(target.url):
        raise ConfigurationError(
            f"{where}: an output plugin has no catalog and is not available in a configuration file",
            hint="use subscriber run --connection … --publication … --target plugin:…",
        )
    if target.password is None or is_postgres(target.url):
        return _with_password(where, "url", target.url, target.password)
    user = _USER.fullmatch(target.url)
    if user is None:
        raise ConfigurationError(
            f"{where}: the url has no user for the password, or a password of its own", hint="as in mariadb://user@host/db"
        )
    return f"{user[1]}:{quote(target.password, safe='')}{user[2]}"


def _with_password(where: str, key: str, conninfo: str, password: str | None) -> str:
    if password is None:
        return conninfo
    found = with_password(conninfo, password)
    if found == conninfo:
        raise ConfigurationError(f"{where}: {key} has a password or a service, and there is a password", hint="keep one of them")
    return found
