"""The log sequence number and the PostgreSQL epoch.

Source: PostgreSQL manual, ``pg_lsn`` Type (8.20) and Streaming Replication Protocol (times are microseconds
since 2000-01-01 00:00 UTC).
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final, Self

__all__ = ["INVALID_LSN", "POSTGRES_EPOCH", "Lsn", "datetime_from_postgres", "kept_in_years"]

POSTGRES_EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)

_TEXT = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})", re.ASCII)
_MAX: Final = 0xFFFF_FFFF_FFFF_FFFF


class Lsn(int):
    """A position in the write-ahead log: an unsigned 64-bit integer shown as ``XXXXXXXX/XXXXXXXX``.

    It is an int, so it compares and subtracts as one. The difference of two LSNs is a number of bytes.
    """

    __slots__ = ()

    def __new__(cls, value: int = 0) -> Self:  # noqa: D102
        if not 0 <= value <= _MAX:
            raise ValueError(f"an LSN is an unsigned 64-bit integer, not {int(value)}")
        return super().__new__(cls, value)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text form of ``pg_lsn``, for example ``16/B374D848``.

        Raises:
            ValueError: the text is not an LSN.
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ValueError(f'invalid input syntax for type pg_lsn: "{text}" (example: 16/B374D848)')
        return cls(int(match[1], 16) << 32 | int(match[2], 16))

    def __str__(self) -> str:
        return f"{self >> 32:X}/{self & 0xFFFF_FFFF:X}"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def __repr__(self) -> str:
        return f"Lsn('{self}')"


INVALID_LSN: Final = Lsn(0)
"""PostgreSQL's InvalidXLogRecPtr: no position."""


def datetime_from_postgres(microseconds: int) -> datetime:
    """Turn microseconds since the PostgreSQL epoch into an aware datetime (UTC).

    Raises:
        OverflowError: the moment is outside Python's years 1 to 9999.
    """
    return POSTGRES_EPOCH + timedelta(microseconds=microseconds)


_MICROSECOND: Final = timedelta(microseconds=1)
_FIRST: Final = (datetime(1, 1, 2, tzinfo=UTC) - POSTGRES_EPOCH) // _MICROSECOND
_LAST: Final = (datetime(9999, 12, 31, tzinfo=UTC) - POSTGRES_EPOCH) // _MICROSECOND


def kept_in_years(microseconds: int) -> int:
    """Return the time, clamped to the years 1 to 9999, which any target can store.

    No real clock is outside these years. A publisher with a wrong clock must not stop its changes.
    """
    return min(max(microseconds, _FIRST), _LAST)
