"""Types for columns of the catalog that databases lack."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from sqlalchemy import String, Text, TypeDecorator

from subscriber.protocol.lsn import Lsn

if TYPE_CHECKING:
    from sqlalchemy import Dialect

__all__ = ["LsnText", "Names"]


class LsnText(TypeDecorator[Any]):
    """An LSN, stored as PostgreSQL writes it."""

    impl = String(17)
    cache_ok = True

    def process_bind_param(self, value: Lsn | None, dialect: Dialect) -> str | None:
        """Convert a value for the database."""
        return None if value is None else str(value)

    def process_result_value(self, value: object, dialect: Dialect) -> Lsn | None:
        """Convert a value of the database."""
        return None if value is None else Lsn.parse(str(value))


class Names(TypeDecorator[Any]):
    """Several names, stored as a JSON array."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: tuple[str, ...] | None, dialect: Dialect) -> str | None:
        """Convert a value for the database."""
        return None if value is None else json.dumps(list(value))

    def process_result_value(self, value: object, dialect: Dialect) -> tuple[str, ...] | None:
        """Convert a value of the database."""
        return None if value is None else tuple(json.loads(str(value)))
