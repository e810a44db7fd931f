"""Types of the catalog's columns. Its tables are ordinary ones, and hands reach them: what is none of a column's values is read as such.

SQLite keeps a text in a column of any type, and every database has a text in a column of texts.
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any, ClassVar, Final

from sqlalchemy import BigInteger, Boolean, Double, String, Text, TypeDecorator

from subscriber.protocol.lsn import INVALID_LSN, Lsn

if TYPE_CHECKING:
    from sqlalchemy import Dialect

__all__ = ["CatalogType", "Flag", "LsnText", "Names", "Seconds", "Unknown", "Whole"]

_LAST_SECOND: Final = 253_402_300_799
"""Of year 9999."""


class Unknown(str):
    """What a column holds, and is none of its values: whoever reads it says so, where it is known whose it is."""

    __slots__ = ()


class CatalogType(TypeDecorator[Any]):
    """One of the types here.

    Attributes:
        known: what a value can be, for messages.
        default: stands for a value that is none.
    """

    impl: Any = Text
    cache_ok = True
    known: ClassVar[str]
    default: ClassVar[object]


class LsnText(CatalogType):
    """An LSN as PostgreSQL writes it."""

    impl = String(17)
    cache_ok = True
    known = "an LSN such as 0/0"
    default = INVALID_LSN

    def process_bind_param(self, value: Lsn | Unknown | None, dialect: Dialect) -> str | None:
        """To the database."""
        return None if value is None else str(value)

    def process_result_value(self, value: object, dialect: Dialect) -> Lsn | Unknown | None:
        """From the database."""
        try:
            return None if value is None else Lsn.parse(str(value))
        except ValueError:
            return Unknown(value)


class Names(CatalogType):
    """Several names, as a JSON array."""

    impl = Text
    cache_ok = True
    known = 'a JSON array of names such as ["pub"]'
    default = ()

    def process_bind_param(self, value: tuple[str, ...] | Unknown | None, dialect: Dialect) -> str | None:
        """To the database."""
        return None if value is None else json.dumps(list(value))

    def process_result_value(self, value: object, dialect: Dialect) -> tuple[str, ...] | Unknown | None:
        """From the database."""
        if value is None:
            return None
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(str(value))
            if isinstance(found, list) and all(isinstance(name, str) for name in found):
                return tuple(found)
        return Unknown(value)


class Whole(CatalogType):
    """A whole number."""

    impl = BigInteger
    cache_ok = True
    known = "a whole number"
    default = 0

    def process_result_value(self, value: object, dialect: Dialect) -> int | Unknown | None:
        """From the database."""
        return value if value is None or isinstance(value, int) else Unknown(value)


class Seconds(CatalogType):
    """A number: seconds since 1970, or a rate."""

    impl = Double
    cache_ok = True
    known = "a number"
    default = 0.0

    def process_result_value(self, value: object, dialect: Dialect) -> float | Unknown | None:
        """From the database."""
        if value is None or (isinstance(value, int | float) and abs(value) <= _LAST_SECOND):
            return value
        return Unknown(value)


class _AsItIs(Boolean):
    """SQLAlchemy's takes whatever is not zero for true."""

    def result_processor(self, dialect: Dialect, coltype: object) -> None:
        """Nothing is done about it."""


class Flag(CatalogType):
    """Yes or no."""

    impl = _AsItIs
    cache_ok = True
    known = "0 or 1"
    default = False

    def process_result_value(self, value: object, dialect: Dialect) -> bool | Unknown | None:
        """From the database."""
        if value is None:
            return None
        return bool(value) if value in {0, 1} else Unknown(value)
