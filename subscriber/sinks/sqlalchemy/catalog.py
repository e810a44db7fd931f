"""A subscription's definition as its row of ``pg_subscription``, both ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from subscriber.abc import TwoPhaseState
from subscriber.catalog import Definition
from subscriber.config import STORED, SubscriptionOptions
from subscriber.errors import ConfigurationError, TargetError
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.sqlalchemy.catalog_types import Unknown
from subscriber.sinks.sqlalchemy.integrity import understood_row, unknown_value
from subscriber.sinks.sqlalchemy.tables import CatalogTables

__all__ = ["definition", "option_values", "require_name", "row_values"]

_COLUMNS: Final[Mapping[str, str]] = {
    "name": "subname",
    "enabled": "subenabled",
    "conninfo": "subconninfo",
    "slot_name": "subslotname",
    "publications": "subpublications",
    "two_phase": "subtwophasestate",
    "skip_lsn": "subskiplsn",
    "made": "submade",
    "pending_refresh": "subrefresh",
    **{name: each.column for name, each in STORED.items()},
}
_NAME_BYTES: Final = 63

# column -> values that it can have, that of a row which cannot be understood first
_WORDS: Final[Mapping[str, Sequence[str]]] = {
    **{each.column: each.stored_words for each in STORED.values() if each.type.words},
    "subtwophasestate": ("d", "p", "e"),
}


def require_name(name: str) -> None:
    """Refuse a subscription name that PostgreSQL's own catalog could not hold: status and tools shall show the same everywhere.

    Raises:
        ConfigurationError: it is empty, too long, or holds a null character.
    """
    if not name or "\0" in name or len(name.encode("utf-8", "replace")) > _NAME_BYTES:
        shown = name.replace("\0", "?")
        raise ConfigurationError(f'subscription name "{shown}" is empty or longer than {_NAME_BYTES} bytes', hint="choose another name")


def row_values(changes: Mapping[str, Any]) -> dict[str, Any]:
    """New values of a definition's attributes, or of its options', by name → values of columns."""
    return {_COLUMNS[name]: _value(name, value) for name, value in changes.items()}


def option_values(options: SubscriptionOptions) -> dict[str, Any]:
    """The columns that show a subscription's parameters."""
    return row_values({name: getattr(options, name) for name in STORED})


def _value(name: str, value: Any) -> Any:
    if name in STORED:
        return STORED[name].stored(value)
    match name:
        case "two_phase":
            return TwoPhaseState(value).value
        case "publications":
            return tuple(value)
        case _:
            return value


def definition(tables: CatalogTables, given: Mapping[str, Any], position: Lsn | Unknown | None, *, claimed: bool) -> Definition:
    """The other way. A row that a hand made senseless is a definition with a problem.

    Args:
        tables: of the catalog.
        given: row of ``pg_subscription``, by column.
        position: up to where the target has everything.
        claimed: whether a verb is at work on it.
    """
    row, known_position, error = _understood(tables, given, position)
    two_phase = TwoPhaseState(row["subtwophasestate"])
    values = {name: each.loaded(row[each.column]) for name, each in STORED.items()}
    return Definition(
        oid=row["oid"],
        name=row["subname"],
        enabled=row["subenabled"],
        conninfo=row["subconninfo"],
        slot_name=row["subslotname"],
        publications=row["subpublications"],
        options=SubscriptionOptions(two_phase=two_phase is not TwoPhaseState.DISABLED, **values),
        two_phase=two_phase,
        skip_lsn=row["subskiplsn"],
        position=known_position,
        made=row["submade"],
        generation=row["subgeneration"],
        pending_refresh=row["subrefresh"],
        claimed=claimed,
        problem=None if error is None else str(error),
        remedy=None if error is None else error.hint,
    )


def _understood(
    tables: CatalogTables, given: Mapping[str, Any], position: Lsn | Unknown | None
) -> tuple[dict[str, Any], Lsn | None, TargetError | None]:
    """Row and position with a default for each value that is not known, and the first of those as an error."""
    table = tables.pg_subscription
    row, error = understood_row(table, given)
    for column, words in _WORDS.items():
        if row[column] not in words:
            error = error or unknown_value(table, column, row[column], sorted(words))
            row[column] = words[0]
    found, unknown = understood_row(tables.position, {"remote_lsn": position})
    return row, None if unknown else found["remote_lsn"], error or unknown
