"""Values in the catalog that this program never writes. Its tables are ordinary ones, and hands reach them.

Such a value is found where it is read, and is the error of its subscription alone: it names the thing and the remedy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from sqlalchemy import RowMapping, Table

from subscriber.abc import TableEntry, TableState, TwoPhaseState
from subscriber.errors import TargetError
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.sqlalchemy.catalog_types import CatalogType, Unknown

__all__ = ["known_row", "known_table_entry", "known_two_phase", "known_value", "understood_row", "unknown_value"]

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


def unknown_in(table: Table, column: str, value: object) -> TargetError:
    """The same, where the column's type says what it can be."""
    kind = table.c[column].type
    assert isinstance(kind, CatalogType)
    return unknown_value(table, column, value, [kind.known])


def known_value(table: Table, column: str, value: Any) -> Any:
    """The value of a column of one of our own types.

    Raises:
        TargetError: it is none of that type.
    """
    if isinstance(value, Unknown):
        raise unknown_in(table, column, value)
    return value


def known_row(table: Table, row: RowMapping) -> Mapping[str, Any]:
    """A row whose values all are of their columns' types.

    Raises:
        TargetError: one of them is not.
    """
    return {str(column): known_value(table, str(column), value) for column, value in row.items()}


def understood_row(table: Table, row: Mapping[str, Any]) -> tuple[dict[str, Any], TargetError | None]:
    """A row with a default for each value that is none of its column's type, and the first of those as an error."""
    error: TargetError | None = None
    values = dict(row)
    for column, value in row.items():
        if isinstance(value, Unknown):
            kind = table.c[column].type
            assert isinstance(kind, CatalogType)
            error = error or unknown_in(table, column, value)
            values[column] = None if table.c[column].nullable else kind.default
    return values, error


def known_two_phase(table: Table, value: str) -> TwoPhaseState:
    """``subtwophasestate``.

    Raises:
        TargetError: it is not known.
    """
    try:
        return TwoPhaseState(value)
    except ValueError:
        raise unknown_value(table, "subtwophasestate", value, sorted(state.value for state in TwoPhaseState)) from None


def known_table_entry(table: Table, state: str, lsn: Lsn | None) -> TableEntry:
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
    return TableEntry(known, known_value(table, "srsublsn", lsn))
