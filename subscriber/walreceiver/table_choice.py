"""Which tables a new publication has: patterns (:func:`subscriber.config.table_names.pattern_parts`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from subscriber.config.table_names import pattern_parts
from subscriber.protocol.quoting import quote_literal

__all__ = ["TableChoice", "pattern_condition"]


@dataclass(frozen=True, slots=True)
class TableChoice:
    """Patterns of tables. Empty: all tables.

    Attributes:
        tables: only tables that match one of these.
        exclude_tables: not these. They win.
    """

    tables: Sequence[str] = ()
    exclude_tables: Sequence[str] = ()

    def __post_init__(self) -> None:
        for pattern in (*self.tables, *self.exclude_tables):
            pattern_condition(pattern)

    @property
    def is_all(self) -> bool:
        """Whether nothing was chosen."""
        return not (self.tables or self.exclude_tables)


def pattern_condition(pattern: str) -> str:
    """SQL of whether a relation ``c`` of a schema ``n`` matches.

    Raises:
        ConfigurationError: it has no name, or more than one dot.
    """
    parts = pattern_parts(pattern)
    conditions = [f"c.relname OPERATOR(pg_catalog.~) {_regex(parts[-1])}"]
    if len(parts) == 2:
        conditions.append(f"n.nspname OPERATOR(pg_catalog.~) {_regex(parts[0])}")
    return f"({' AND '.join(conditions)})"


def _regex(text: str) -> str:
    return f'{quote_literal(f"^({text})$")} COLLATE pg_catalog."default"'
