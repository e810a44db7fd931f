"""How far the copies of a migration are, in bytes, and when they may end."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from subscriber.apply.progress import CopyProgress
from subscriber.interfaces import TableName
from subscriber.walreceiver.table_sizes import TableSize

__all__ = ["CopyEstimate", "shown_bytes", "shown_seconds"]

_TELL_SECONDS: Final = 60.0
_SAMPLE_SECONDS: Final = 5.0
_SAMPLES: Final = 60
"""The rate is that of the last five minutes."""


class CopyEstimate:
    """A :class:`subscriber.apply.progress.CopyProgress` that counts bytes: of a table, in proportion to its rows.

    Args:
        name: of the subscription; the launcher puts it before the names of tables.
        other: is told, too.

    Attributes:
        waits: why copies do not begin; None: they do.
    """

    def __init__(self, name: str, other: CopyProgress) -> None:
        self._prefix = f"{name}: "
        self._other = other
        self._sizes: Mapping[TableName, TableSize] = {}
        self._rows: dict[TableName, int] = {}
        self._done = set[TableName]()
        self._samples = deque[tuple[float, float]](maxlen=_SAMPLES)
        self.waits: str | None = None

    def plan(self, sizes: Mapping[TableName, TableSize], done: set[TableName]) -> None:
        """Count these tables, of which some are copied already."""
        self._sizes = sizes
        self._done |= done

    def _own(self, table: TableName) -> TableName:
        return TableName(table.namespace.removeprefix(self._prefix), table.name)

    def started(self, table: TableName, estimated_rows: int | None) -> None:
        """Count from zero."""
        self._rows[self._own(table)] = 0
        self._other.started(table, estimated_rows)

    def advanced(self, table: TableName, rows: int) -> None:
        """Count further rows."""
        own = self._own(table)
        self._rows[own] = self._rows.get(own, 0) + rows
        self._other.advanced(table, rows)

    def finished(self, table: TableName) -> None:
        """All rows of a table are copied."""
        self._done.add(self._own(table))
        self._other.finished(table)

    @property
    def total(self) -> int:
        """Bytes of all tables."""
        return sum(size.bytes for size in self._sizes.values())

    @property
    def copied(self) -> float:
        """Bytes that are copied, about."""
        return sum(size.bytes * self._share(name, size) for name, size in self._sizes.items())

    def _share(self, name: TableName, size: TableSize) -> float:
        if name in self._done:
            return 1.0
        return min(self._rows.get(name, 0) / size.rows, 1.0) if size.rows else 0.0

    def sample(self, now: float) -> None:
        """Note how much is copied now."""
        self._samples.append((now, self.copied))

    @property
    def rate(self) -> float:
        """Bytes per second of late."""
        if len(self._samples) < 2:
            return 0.0
        (began, before), (now, copied) = self._samples[0], self._samples[-1]
        return max(copied - before, 0.0) / max(now - began, 1e-9)

    @property
    def line(self) -> str:
        """The progress for people."""
        total, copied, rate = self.total, self.copied, self.rate
        done = sum(name in self._done for name in self._sizes)
        tables = f"{done:,} of {len(self._sizes):,} tables"
        share = f"{shown_bytes(copied)} of about {shown_bytes(total)} ({copied / total:.0%})" if total else "nothing"
        left = f", {shown_bytes(rate)}/s, about {shown_seconds((total - copied) / rate)} left" if rate else ""
        return f"copying: {tables}, {share}{left}{f'; {self.waits}' if self.waits else ''}"

    async def run(self, tell: Callable[[str], None], seconds: float = _TELL_SECONDS) -> None:
        """Tell how far the copies are, once in so many seconds, until cancelled."""
        told = time.monotonic()
        while True:
            now = time.monotonic()
            self.sample(now)
            if now - told >= seconds:
                told = now
                tell(self.line)
            await asyncio.sleep(min(_SAMPLE_SECONDS, seconds))


def shown_bytes(number: float) -> str:
    """Such as ``1.2 GB``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "bytes" or number >= 100 else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TB"


def shown_seconds(seconds: float) -> str:
    """Such as ``2 h 20 min``."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes / 60 / 24:.1f} days"
