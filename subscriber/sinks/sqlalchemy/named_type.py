"""A type of PostgreSQL by its name, for CASTs and definitions: SQLAlchemy's own classes know some of them only."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy.types import UserDefinedType

from subscriber.protocol.quoting import quote_identifier

__all__ = ["MODIFIER", "NamedType"]

MODIFIER: Final = "modifier"
"""Key of ``Column.info``: ``atttypmod`` of a column that is there."""


class NamedType(UserDefinedType[Any]):
    """``namespace.name``, with a modifier as it is written in a definition.

    Args:
        namespace, name: as in ``pg_type``.
        modifier: ``(10,3)``, or nothing.
    """

    cache_ok = True

    def __init__(self, namespace: str, name: str, modifier: str = "") -> None:
        self.namespace = namespace
        self.name = name
        self.modifier = modifier

    def get_col_spec(self, **_: Any) -> str:
        """As SQL."""
        return f"{quote_identifier(self.namespace)}.{quote_identifier(self.name)}{self.modifier}"
