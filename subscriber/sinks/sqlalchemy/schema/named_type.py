"""A type of PostgreSQL by its name, for casts and definitions: SQLAlchemy has classes for only some of PostgreSQL's types."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy.types import UserDefinedType

from subscriber.protocol.quoting import quote_identifier

__all__ = ["MODIFIER", "NamedType"]

MODIFIER: Final = "modifier"
"""Key of ``Column.info``: ``atttypmod`` of a reflected column."""


class NamedType(UserDefinedType[Any]):
    """``namespace.name``, with a modifier as a definition has it.

    Args:
        namespace, name: as in ``pg_type``.
        modifier: ``(10,3)``, or empty.
    """

    cache_ok = True

    def __init__(self, namespace: str, name: str, modifier: str = "") -> None:
        self.namespace = namespace
        self.name = name
        self.modifier = modifier

    def get_col_spec(self, **_: Any) -> str:
        """Return the type in SQL."""
        return f"{quote_identifier(self.namespace)}.{quote_identifier(self.name)}{self.modifier}"
