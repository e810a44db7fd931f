"""Detect that commits on the publisher wait for a subscription (``synchronous_standby_names``).

They would return although the changes of a parked table are nowhere but on the publisher.
"""

from __future__ import annotations

import re
from typing import Final

from subscriber.interfaces import Finding
from subscriber.walreceiver.session import Session

__all__ = ["find_synchronous", "names_in"]

_NAME: Final = re.compile(r'"((?:[^"]|"")*)"|([^\s,()"]+)')
_METHOD: Final = re.compile(r"\s*(?:(?:ANY|FIRST)\s+)?\d+\s*\((.*)\)\s*", re.IGNORECASE | re.DOTALL)


async def find_synchronous(session: Session, name: str) -> list[Finding]:
    """Return an error if commits on the publisher wait for the subscription with this name.

    Raises:
        PublisherError: the publisher cannot be queried.
    """
    ((setting,),) = await session.execute("SELECT pg_catalog.current_setting('synchronous_standby_names')")
    if names_in(setting or "").isdisjoint({name.lower(), "*"}):
        return []
    return [
        Finding(
            "error",
            f'on_error = park cannot be used: commits on the publisher wait for subscription "{name}" (synchronous_standby_names),'
            " also if they change a table that is parked",
            "remove it from synchronous_standby_names, or use on_error = retry",
        )
    ]


def names_in(setting: str) -> set[str]:
    """The names in a value of ``synchronous_standby_names``, in lower case: the publisher compares them without their case."""
    method = _METHOD.fullmatch(setting)
    listed = setting if method is None else method[1]
    return {(quoted.replace('""', '"') or bare).lower() for quoted, bare in _NAME.findall(listed)}
