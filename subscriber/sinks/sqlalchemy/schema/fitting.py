"""Checks whether a value fits into a column. Each function returns the value as a parameter for the driver, or raises ValueRefused."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final

from sqlalchemy import types as sql

from subscriber.types import ValueRefused

__all__ = [
    "exact_in",
    "finite",
    "fitting_date",
    "fitting_decimal",
    "fitting_moment",
    "fitting_time",
    "fraction_digits",
    "in_int8",
    "integral",
    "nan_as_text",
]

_INT8_MAX: Final = 2**63 - 1
_INT8_MIN: Final = -(2**63)
_TEXT_REMEDY: Final = "make the column a text column in the target"


def _refuse(what: str) -> ValueRefused:
    return ValueRefused(what, hint=_TEXT_REMEDY)


def in_int8(value: int) -> int:
    """The value, if it fits into the 64 bits of an integer of SQLite."""
    if not _INT8_MIN <= value <= _INT8_MAX:
        raise _refuse("a number of more than 64 bits in an integer column")
    return value


def integral(value: Decimal) -> int:
    """A numeric as an integer."""
    if not value.is_finite() or value != value.to_integral_value():
        raise _refuse("a numeric that is not a whole number in an integer column")
    return in_int8(int(value))


def nan_as_text(value: float) -> float | str:
    """The value for SQLite: the text ``NaN`` for a NaN."""
    # SQLite converts a NaN to NULL; every column except in a STRICT table stores this text unchanged
    return "NaN" if math.isnan(value) else value


def finite(value: float) -> float:
    """The value, if it is not NaN or infinity."""
    if not math.isfinite(value):
        raise _refuse("NaN or infinity in a floating point column")
    return value


def exact_in(largest: int) -> Callable[[int], float]:
    """Return a function that converts an integer to a float. ``largest``: up to it, the float format has all integers exactly."""

    def check(value: int) -> float:
        if not -largest <= value <= largest:
            raise _refuse("an integer that has no exact floating point number in a floating point column")
        return float(value)

    return check


def fitting_decimal(column_type: sql.TypeEngine[Any]) -> Callable[[Any], object]:
    """Return a function that checks that a DECIMAL column will not round a number."""
    precision = getattr(column_type, "precision", None) or 10
    scale = getattr(column_type, "scale", None) or 0

    def check(value: Any) -> object:
        number = Decimal(value)
        if not number.is_finite():
            raise _refuse("NaN or infinity in a decimal column")
        # MySQL rounds a number with more decimal places without an error
        _, digits, exponent = number.as_tuple()
        assert isinstance(exponent, int)
        text = "".join(map(str, digits))
        significant = text.rstrip("0")
        behind = -(exponent + len(text) - len(significant)) if significant else 0
        before = number.adjusted() + 1 if significant else 0
        if behind > scale or before > precision - scale:
            raise _refuse(f"a numeric of more digits than DECIMAL({precision},{scale}) holds")
        return number

    return check


def fraction_digits(column_type: sql.TypeEngine[Any]) -> int:
    """How many fractional digits of a second a column stores. MySQL rounds further digits without an error."""
    digits = getattr(column_type, "fsp", 6)
    return 0 if digits is None else int(digits)


def _seconds(microsecond: int, digits: int) -> None:
    if microsecond % 10 ** (6 - digits):
        raise _refuse(f"a time with more than {digits} digits of a second")


def fitting_date(value: datetime.date | str) -> datetime.date:
    """The date, if Python can represent it."""
    if isinstance(value, str):
        raise _refuse("infinity, or a year before 1 or after 9999, in a date column")
    return value


def fitting_time(digits: int) -> Callable[[Any], object]:
    """Return a function that checks that a time has at most this number of fractional digits."""

    def check(value: datetime.time | str) -> object:
        # 24:00:00 is a text: MySQL accepts it, as a duration
        if not isinstance(value, str):
            _seconds(value.microsecond, digits)
        return value

    return check


def fitting_moment(digits: int) -> Callable[[Any], object]:
    """Return a function that checks that Python can represent a timestamp, with at most this number of fractional digits.

    The function returns it without its zone, which must be UTC.
    """

    def check(value: datetime.datetime | str) -> object:
        if isinstance(value, str):
            raise _refuse("infinity, or a year before 1 or after 9999, in a datetime column")
        _seconds(value.microsecond, digits)
        return value.replace(tzinfo=None)

    return check
