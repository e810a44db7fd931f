"""Names of tables in options: ``KEY.SCHEMA.TABLE=VALUE``. They are written as in SQL: quoted, or folded to lower case."""

from __future__ import annotations

import re
from typing import Final

from subscriber.errors import ConfigurationError

__all__ = ["Name", "read_name", "written_name"]

Name = tuple[str, str]
"""Schema and name."""

_PART: Final = r'([A-Za-z_][A-Za-z0-9_$]*|"(?:[^"\0]|"")+")'
_TABLE: Final = re.compile(rf"\s*{_PART}\s*\.\s*{_PART}\s*")
_PLAIN: Final = re.compile(r"[a-z_][a-z0-9_$]*")


def read_name(text: str, example: str) -> Name:
    """Return schema and name of a table that is written as ``schema.table``.

    Args:
        text: the table.
        example: an option with such a name, for the hint.

    Raises:
        ConfigurationError: the text is not of this form.
    """
    match = _TABLE.fullmatch(text)
    if match is None:
        raise ConfigurationError(f'"{text}" is not of the form schema.table', hint=f"as in {example}")
    return _name(match[1]), _name(match[2])


def written_name(name: Name) -> str:
    """Write a table as :func:`read_name` reads it."""
    return f"{_quoted(name[0])}.{_quoted(name[1])}"


def _name(text: str) -> str:
    return text[1:-1].replace('""', '"') if text.startswith('"') else text.lower()


def _quoted(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else '"' + name.replace('"', '""') + '"'
