"""Quoting for SQL, and for the commands of the replication protocol.

The walsender's scanner (``repl_scanner.l``) knows only ``"identifiers"`` and ``'strings'``, with the quote doubled. It knows neither
backslash escapes nor ``E''`` strings, which SQL needs for a backslash whatever ``standard_conforming_strings`` is.
"""

from __future__ import annotations

from subscriber.errors import ConfigurationError

__all__ = ["quote_identifier", "quote_literal", "quote_string"]


def quote_identifier(name: str) -> str:
    """Quote a name.

    Raises:
        ConfigurationError: the name is empty or holds a null character.
    """
    if not name:
        raise ConfigurationError("zero-length delimited identifier", hint="a name needs at least one character")
    return '"' + _without_null(name).replace('"', '""') + '"'


def quote_literal(text: str) -> str:
    """Quote a string for SQL.

    Raises:
        ConfigurationError: the string holds a null character.
    """
    return f"E{quote_string(text.replace(chr(92), chr(92) * 2))}" if "\\" in text else quote_string(text)


def quote_string(text: str) -> str:
    """Quote a string for a replication command.

    Raises:
        ConfigurationError: the string holds a null character.
    """
    return "'" + _without_null(text).replace("'", "''") + "'"


def _without_null(text: str) -> str:
    if "\0" in text:
        raise ConfigurationError("a name or value cannot hold a null character")
    return text
