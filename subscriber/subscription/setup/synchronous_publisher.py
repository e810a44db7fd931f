"""Detect that commits on the publisher wait for a subscription (``synchronous_standby_names``).

They would return although the changes of a parked table are nowhere but on the publisher.
"""

from __future__ import annotations

import re
from typing import Final

from subscriber.interfaces import Finding
from subscriber.protocol.quoting import quote_literal
from subscriber.walreceiver.session import Session

__all__ = ["find_synchronous", "names_in", "own_names"]

_NAME: Final = re.compile(r'"((?:[^"]|"")*)"|([^\s,()"]+)')
_METHOD: Final = re.compile(r"\s*(?:(?:ANY|FIRST)\s+)?\d+\s*\((.*)\)\s*", re.IGNORECASE | re.DOTALL)


async def find_synchronous(session: Session, name: str) -> list[Finding]:
    """Return an error if commits on the publisher wait for the subscription with this name.

    Raises:
        PublisherError: the publisher cannot be queried.
    """
    ((setting,),) = await session.execute("SELECT pg_catalog.current_setting('synchronous_standby_names')")
    if names_in(setting or "").isdisjoint({*await own_names(session, name), "*"}):
        return []
    return [
        Finding(
            "error",
            f'on_error = park cannot be used: commits on the publisher wait for subscription "{name}" (synchronous_standby_names),'
            " also if they change a table that is parked",
            "remove it from synchronous_standby_names, or use on_error = retry",
        )
    ]


async def own_names(session: Session, name: str) -> set[str]:
    """The names that the publisher may know the subscription by, as :func:`names_in` returns them.

    The publisher shortens an ``application_name``, and replaces characters. The connection string may set one.

    Raises:
        PublisherError: the publisher cannot be queried.
    """
    setting = f"pg_catalog.set_config('application_name', {quote_literal(name)}, true)"
    rows = await session.execute(f"SELECT pg_catalog.current_setting('application_name'), {setting}")
    return {_folded(each or "") for each in rows[0]}


def names_in(setting: str) -> set[str]:
    """The names in a value of ``synchronous_standby_names``. ASCII letters are in lower case: the publisher compares without their case."""
    method = _METHOD.fullmatch(setting)
    listed = setting if method is None else method[1]
    return {_folded(quoted.replace('""', '"') or bare) for quoted, bare in _NAME.findall(listed)}


def _folded(name: str) -> str:
    return "".join(each.lower() if each.isascii() else each for each in name)
