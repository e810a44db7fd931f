"""Types of the catalog's columns that no database has."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from sqlalchemy import String, Text, TypeDecorator

from subscriber.protocol.lsn import Lsn

if TYPE_CHECKING:
    from sqlalchemy import Dialect

__all__ = ["LsnText", "Names"]


class LsnText(TypeDecorator[Any]):
    """An LSN as PostgreSQL writes it."""

    impl = String(17)
    cache_ok = True

    def process_bind_param(self, value: Lsn | None, dialect: Dialect) -> str | None:
        """To the database."""
        return None if value is None else str(value)

    def process_result_value(self, value: object, dialect: Dialect) -> Lsn | None:
        """From the database."""
        return None if value is None else Lsn.parse(str(value))


class Names(TypeDecorator[Any]):
    """Several names, as a JSON array."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: tuple[str, ...] | None, dialect: Dialect) -> str | None:
        """To the database."""
        return None if value is None else json.dumps(list(value))

    def process_result_value(self, value: object, dialect: Dialect) -> tuple[str, ...] | None:
        """From the database."""
        return None if value is None else tuple(json.loads(str(value)))
