"""Log errors that are repeated less and less often."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from subscriber.waits import FIRST_SECONDS, MOST_SECONDS

__all__ = ["RepeatedErrors"]

_ALL_OF: Final = 3
"""So many times an error is logged each time."""
_FORGET_SECONDS: Final = 60.0
_NUMBER: Final = re.compile(r'("[^"]*")|\b[0-9A-F]*[0-9][0-9A-F./]*')


class RepeatedErrors:
    """Logs errors that are retried. One that is repeated is logged less and less often, with the number of times in between.

    Args:
        log: the logger. What is left out is logged there for debugging.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._known: dict[str, _Repeated] = {}

    def tell(self, level: int, error: str, line: str, extra: Mapping[str, Any] | None = None) -> None:
        """Log an error.

        Args:
            level: of the line.
            error: identifies it. Numbers and LSNs in it do not count, those in quoted names do.
            line: the line.
            extra: fields of the record (:mod:`subscriber.log_fields`).
        """
        now = time.monotonic()
        self._known = {key: each for key, each in self._known.items() if now - each.last < _FORGET_SECONDS}
        found = self._known.setdefault(_NUMBER.sub(lambda found: found[1] or "0", error), _Repeated(now, now))
        found.last = now
        found.count += 1
        if found.count > _ALL_OF and now < found.due:
            found.left_out += 1
            self._log.debug("%s", line, extra=extra)
            return
        again = f" (and {found.left_out} times since the last such line)" if found.left_out else ""
        self._log.log(level, "%s%s", line, again, extra=extra)
        found.left_out = 0
        found.due = now + min(max(now - found.first, FIRST_SECONDS), MOST_SECONDS)


@dataclass(slots=True)
class _Repeated:
    """An error that was logged, and when it came for the first and last time."""

    first: float
    last: float
    due: float = 0.0
    count: int = 0
    left_out: int = 0
