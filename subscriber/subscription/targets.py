"""Which sink a target's text means."""

from __future__ import annotations

import re

from subscriber.abc import Sink
from subscriber.config import Settings, SubscriptionOptions
from subscriber.errors import ConfigurationError

__all__ = ["open_target"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_POSTGRES = frozenset({"postgresql", "postgres"})


def open_target(target: str, options: SubscriptionOptions, settings: Settings) -> Sink:
    """Make the sink for a URL or conninfo. Nothing is connected yet.

    Raises:
        ConfigurationError: no sink serves this kind of URL, its driver is not installed, or the text is neither URL nor conninfo.
    """
    scheme = _SCHEME.match(target)
    if scheme is not None and scheme[1].lower() not in _POSTGRES:
        raise ConfigurationError(
            f'there is no sink for targets of kind "{scheme[1]}"',
            hint="a target is a PostgreSQL database: postgresql://user@host:5432/dbname",
        )
    try:
        from subscriber.sinks.postgres import PostgresSink  # noqa: PLC0415 -- its driver comes with an extra
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"a PostgreSQL target needs {error.name}, which is not installed", hint="pip install 'pg-subscriber[postgres]'"
        ) from error
    return PostgresSink(target, options=options, settings=settings)
