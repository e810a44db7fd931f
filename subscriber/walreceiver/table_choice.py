"""Which tables a new publication has: patterns, as ``pg_dump --table`` and ``--exclude-table`` take them.

``*`` and ``?`` stand for characters, a dot separates the schema, and double quotes keep the case and all other characters. One rule differs
from pg_dump: a pattern without a schema means the tables of all schemas, whatever the ``search_path``.

Source: PostgreSQL manual, psql, Patterns; ``patternToSQLRegex`` of src/fe_utils/string_utils.c.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from subscriber.errors import ConfigurationError
from subscriber.protocol.quoting import quote_literal

__all__ = ["TableChoice", "pattern_condition", "pattern_parts"]

_LITERAL: Final = frozenset("|*+?()[]{}.^\\")


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


def pattern_parts(pattern: str) -> list[str]:
    """The regular expressions of a pattern: for the name, or for the schema and the name.

    Raises:
        ConfigurationError: it has no name, or more than one dot.
    """
    parts = list(_parts(pattern))
    if len(parts) > 2 or not parts[-1]:
        raise ConfigurationError(f'invalid pattern of a name: "{pattern}"', hint="give NAME or SCHEMA.NAME; *, ? and quotes as in pg_dump")
    return parts


def _parts(pattern: str) -> Iterable[str]:
    part, quoted, characters = "", False, iter(pattern.replace('""', "\0"))
    for character in characters:
        if character == '"':
            quoted = not quoted
        elif character == "\0":
            # two quotes: one within quotes, none outside
            part += '"' if quoted else ""
        elif character == "." and not quoted:
            yield part
            part = ""
        elif quoted:
            part += f"\\{character}" if character in _LITERAL or character == "$" else character
        else:
            part += {"*": ".*", "?": ".", "$": "\\$"}.get(character, character.lower())
    if quoted:
        raise ConfigurationError(f'unterminated quote in the pattern of a name: "{pattern}"', hint="close the quote")
    yield part
