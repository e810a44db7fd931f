"""The names of Spark jobs: tables, LSNs and phase, as the Spark UI and the event log show them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from subscriber.protocol.lsn import Lsn

__all__ = ["job_name"]

_LENGTH: Final = 200
"""Of the tables' names, in characters."""


def job_name(phase: str, tables: Iterable[object], after: Lsn | None = None, to: Lsn | None = None) -> str:
    """What a job does in a phase for these tables: with the changes after an LSN, up to another."""
    names = [str(table) for table in tables]
    shown: list[str] = []
    for name in names:
        if shown and len(", ".join([*shown, name])) > _LENGTH:
            break
        shown.append(name)
    more = f" and {len(names) - len(shown)} more" if len(shown) < len(names) else ""
    lsns = "" if to is None else f", up to {to}" if after is None else f", {after} to {to}"
    return f"{phase}: {', '.join(shown)}{more}{lsns}"
