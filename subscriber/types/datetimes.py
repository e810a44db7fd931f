"""Dates, times and intervals: convert the binary format to PostgreSQL's own ISO text, and texts to Python objects.

Values that Python cannot hold (infinity, years before 1 and after 9999, 24:00) stay text. A timestamp with time zone is in UTC.

Sources: ``date_out``, ``EncodeDateTime``, ``EncodeInterval`` (datestyle ISO, intervalstyle postgres), ``date_send`` and its siblings.
"""

from __future__ import annotations

import datetime
from struct import Struct
from typing import Final

__all__ = [
    "date_text",
    "date_value",
    "interval_text",
    "time_text",
    "time_value",
    "timestamp_text",
    "timestamp_value",
    "timestamptz_canonical",
    "timestamptz_text",
    "timestamptz_value",
    "timetz_text",
    "timetz_value",
]

_INT32: Final = Struct(">i")
_INT64: Final = Struct(">q")
_TIMETZ: Final = Struct(">qi")
_INTERVAL: Final = Struct(">qii")

_INT32_ENDS: Final = {2**31 - 1: "infinity", -(2**31): "-infinity"}
_INT64_ENDS: Final = {2**63 - 1: "infinity", -(2**63): "-infinity"}
_INTERVAL_ENDS: Final = {
    (2**63 - 1, 2**31 - 1, 2**31 - 1): "infinity",
    (-(2**63), -(2**31), -(2**31)): "-infinity",
}

_SECOND: Final = 1_000_000
_DAY: Final = 86_400 * _SECOND
_EPOCH_ORDINAL: Final = datetime.date(2000, 1, 1).toordinal()
_ERA_DAYS: Final = 146_097
"""Days of 400 years, after which the calendar repeats."""


def date_value(data: bytes) -> datetime.date | str:
    """From text."""
    text = data.decode("ascii")
    if len(text) != 10:
        return text
    return datetime.date.fromisoformat(text)


def time_value(data: bytes) -> datetime.time | str:
    """From text."""
    text = data.decode("ascii")
    if text.startswith("24"):
        return text
    return datetime.time.fromisoformat(_six_digits(text))


def timetz_value(data: bytes) -> datetime.time | str:
    """From text."""
    return time_value(data)


def timestamp_value(data: bytes) -> datetime.datetime | str:
    """From text."""
    text = data.decode("ascii")
    if len(text) < 19 or text[10] != " " or text.endswith("BC"):
        return text
    return datetime.datetime.fromisoformat(_six_digits(text))


def timestamptz_value(data: bytes) -> datetime.datetime | str:
    """From text; in UTC."""
    value = timestamp_value(data)
    if isinstance(value, str):
        return value
    try:
        return value.astimezone(datetime.UTC)
    except OverflowError:
        return data.decode("ascii")


def timestamptz_canonical(data: bytes) -> str:
    """Convert the text of a time in any zone to its text in UTC."""
    text = data.decode("ascii")
    if text.endswith(("+00", "infinity")):
        return text
    value = timestamptz_value(data)
    if isinstance(value, str):
        return value
    return f"{value:%Y-%m-%d %H:%M:%S}".rjust(19, "0") + _fraction(value.microsecond) + "+00"


def _six_digits(text: str) -> str:
    """Fill up fractions of a second: PostgreSQL writes up to six digits, Python reads three or six."""
    point = text.find(".")
    if point < 0:
        return text
    end = point + 1
    while end < len(text) and text[end].isdigit():
        end += 1
    return text[:end].ljust(point + 7, "0") + text[end:]


def date_text(data: bytes) -> str:
    """From the binary format: days since 2000-01-01."""
    (days,) = _INT32.unpack(data)
    if days in _INT32_ENDS:
        return _INT32_ENDS[days]
    date, era = _date(days)
    return date + era


def _date(days: int) -> tuple[str, str]:
    """Return the date, and ``' BC'`` or an empty string."""
    eras, rest = divmod(days + _EPOCH_ORDINAL - 1, _ERA_DAYS)
    date = datetime.date.fromordinal(rest + 1)
    year = date.year + 400 * eras
    era = ""
    if year <= 0:
        year, era = 1 - year, " BC"
    return f"{year:04d}-{date.month:02d}-{date.day:02d}", era


def _fraction(microseconds: int) -> str:
    return f".{microseconds:06d}".rstrip("0") if microseconds else ""


def _clock(microseconds: int) -> str:
    seconds, fraction = divmod(microseconds, _SECOND)
    minutes, second = divmod(seconds, 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour:02d}:{minute:02d}:{second:02d}{_fraction(fraction)}"


def time_text(data: bytes) -> str:
    """From the binary format: microseconds since midnight."""
    return _clock(_INT64.unpack(data)[0])


def timetz_text(data: bytes) -> str:
    """From the binary format: microseconds since midnight, and seconds west of Greenwich."""
    clock, west = _TIMETZ.unpack(data)
    minutes, seconds = divmod(abs(west), 60)
    hours, minutes = divmod(minutes, 60)
    offset = f"{'-' if west > 0 else '+'}{hours:02d}"
    if seconds:
        offset += f":{minutes:02d}:{seconds:02d}"
    elif minutes:
        offset += f":{minutes:02d}"
    return _clock(clock) + offset


def timestamp_text(data: bytes) -> str:
    """From the binary format: microseconds since 2000-01-01 00:00."""
    return _timestamp(data, "")


def timestamptz_text(data: bytes) -> str:
    """From the binary format: microseconds since 2000-01-01 00:00 UTC."""
    return _timestamp(data, "+00")


def _timestamp(data: bytes, zone: str) -> str:
    (moment,) = _INT64.unpack(data)
    if moment in _INT64_ENDS:
        return _INT64_ENDS[moment]
    days, clock = divmod(moment, _DAY)
    date, era = _date(days)
    return f"{date} {_clock(clock)}{zone}{era}"


def interval_text(data: bytes) -> str:
    """From the binary format: microseconds, days, months."""
    clock, days, months = fields = _INTERVAL.unpack(data)
    if fields in _INTERVAL_ENDS:
        return _INTERVAL_ENDS[fields]
    years, months = _towards_zero(months, 12)
    parts = []
    negative = False
    for number, unit in ((years, "year"), (months, "mon"), (days, "day")):
        if number:
            # a sign is written if the previous part has the other one
            plus = "+" if negative and number > 0 else ""
            parts.append(f"{plus}{number} {unit}{'' if number == 1 else 's'}")
            negative = number < 0
    if clock or not parts:
        sign = "-" if clock < 0 else "+" if negative else ""
        parts.append(sign + _clock(abs(clock)))
    return " ".join(parts)


def _towards_zero(number: int, divisor: int) -> tuple[int, int]:
    quotient = abs(number) // divisor
    quotient = quotient if number >= 0 else -quotient
    return quotient, number - quotient * divisor
