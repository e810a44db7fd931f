"""``copy_window``: the hours of the day in which copies of tables may begin."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta, tzinfo
from typing import Final, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from subscriber.config.reading import OptionType
from subscriber.errors import ConfigurationError

__all__ = ["COPY_WINDOW", "CopyWindow"]

_WINDOW: Final = re.compile(r"(\d\d?):(\d\d)\s*-\s*(\d\d?):(\d\d)(?:\s+([A-Za-z0-9_+/-]+))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class CopyWindow:
    """Some hours of each day, which may pass midnight. They are those of the zone's clock, also when it is put forward or back.

    Attributes:
        begin: the first moment that is in it.
        end: the first moment that is not in it any more.
        zone: name of the time zone.
    """

    begin: time
    end: time
    zone: str = "UTC"

    @classmethod
    def parse(cls, name: str, text: str) -> Self:
        """Read ``HH:MM-HH:MM`` or ``HH:MM-HH:MM ZONE``.

        Raises:
            ConfigurationError: it is something else.
        """
        match = _WINDOW.fullmatch(text.strip())
        hint = "as in 22:00-06:00, or 22:00-06:00 Europe/Paris; without a time zone it is UTC"
        try:
            if match is None:
                raise ValueError
            begin = time(int(match[1]), int(match[2]))
            end = time(0) if (match[3], match[4]) == ("24", "00") else time(int(match[3]), int(match[4]))
        except ValueError:
            raise ConfigurationError(f'invalid value for parameter "{name}": "{text}"', hint=hint) from None
        if begin == end:
            raise ConfigurationError(
                f'parameter "{name}" has a window without an hour: "{text}"', hint=f"{hint}; none: copies may always begin"
            )
        zone = match[5] or "UTC"
        try:
            _zone(zone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ConfigurationError(
                f'time zone "{zone}" of parameter "{name}" is not known',
                hint=f"{hint}; a system without zones gets them by: pip install tzdata",
            ) from None
        return cls(begin, end, zone)

    def __str__(self) -> str:
        return f"{self.begin:%H:%M}-{self.end:%H:%M} {self.zone}"

    @property
    def _zone(self) -> tzinfo:
        try:
            return _zone(self.zone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            return UTC  # it was known where it was given

    def opens(self, now: float) -> float | None:
        """When copies may begin. None: they may now.

        Args:
            now: in seconds since 1970, as the result.
        """
        local = datetime.fromtimestamp(now, self._zone)
        clock = local.time().replace(tzinfo=None)
        inside = self.begin <= clock < self.end if self.begin < self.end else clock >= self.begin or clock < self.end
        if inside:
            return None
        day = local.date() if clock < self.begin else local.date() + timedelta(days=1)
        opens = datetime.combine(day, self.begin, local.tzinfo)
        # in the hour that the clock shows twice, it may be the second time
        return opens.timestamp() if opens.timestamp() > now else opens.replace(fold=1).timestamp()


def _zone(name: str) -> tzinfo:
    # UTC needs no database of time zones, which small containers lack
    return UTC if name == "UTC" else ZoneInfo(name)


def _parse(name: str, text: str) -> str:
    return "" if text.strip().lower() in {"", "none"} else str(CopyWindow.parse(name, text))


COPY_WINDOW: Final = OptionType(name="HH:MM-HH:MM [time zone]", parse=_parse)
"""A window as a text; empty: copies may always begin."""
