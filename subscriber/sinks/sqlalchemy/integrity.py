"""Values in the catalog that this program never writes. Its tables are ordinary ones, and hands reach them.

Such a value is found where it is read, and is the error of its subscription alone: it names the thing and the remedy.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from sqlalchemy import Table

from subscriber.abc import TableEntry, TableState, TwoPhaseState
from subscriber.errors import TargetError
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.sqlalchemy.tables import Unknown

__all__ = ["known_lsn", "known_names", "known_table_entry", "known_two_phase", "unknown_lsn", "unknown_names", "unknown_value"]

_SHOWN: Final = 40
_WITH_LSN: Final = frozenset({TableState.SYNCDONE, TableState.READY})


def unknown_value(table: Table, column: str, value: object, known: Collection[str]) -> TargetError:
    """The error for a value that nothing of ours writes."""
    text = "NULL" if value is None else " ".join(str(value).split())
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return TargetError(
        f'column "{column}" of {table.fullname} in the target has the unknown value ' + (shown if value is None else f'"{shown}"'),
        hint=f"UPDATE {table.fullname} there: it can be {', '.join(known)}",
    )


def unknown_lsn(table: Table, column: str, value: object) -> TargetError:
    """The same, in a column of LSNs."""
    return unknown_value(table, column, value, ["an LSN such as 0/0"])


def unknown_names(table: Table, column: str, value: object) -> TargetError:
    """The same, in a column of names."""
    return unknown_value(table, column, value, ['a JSON array of names such as ["pub"]'])


def known_lsn(table: Table, column: str, value: Lsn | Unknown | None) -> Lsn:
    """A column of LSNs that are never NULL.

    Raises:
        TargetError: it is none.
    """
    if isinstance(value, Lsn):
        return value
    raise unknown_lsn(table, column, value)


def known_names(table: Table, column: str, value: tuple[str, ...] | Unknown | None) -> tuple[str, ...]:
    """A column of names, never NULL.

    Raises:
        TargetError: they are none.
    """
    if isinstance(value, tuple):
        return value
    raise unknown_names(table, column, value)


def known_two_phase(table: Table, value: str) -> TwoPhaseState:
    """``subtwophasestate``.

    Raises:
        TargetError: it is not known.
    """
    try:
        return TwoPhaseState(value)
    except ValueError:
        raise unknown_value(table, "subtwophasestate", value, sorted(state.value for state in TwoPhaseState)) from None


def known_table_entry(table: Table, state: str, lsn: Lsn | Unknown | None) -> TableEntry:
    """``srsubstate`` and ``srsublsn``.

    Raises:
        TargetError: one of them is not known.
    """
    try:
        known = TableState(state)
    except ValueError:
        raise unknown_value(table, "srsubstate", state, ["i", "d", "f", "s", "r"]) from None
    if known not in _WITH_LSN or lsn is None:
        return TableEntry(known)
    return TableEntry(known, known_lsn(table, "srsublsn", lsn))
