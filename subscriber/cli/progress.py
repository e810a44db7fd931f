"""Table copies as a person sees them."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from subscriber.abc import TableName
from subscriber.apply.progress import CopyProgress, Quiet
from subscriber.cli.output import say
from subscriber.printable import printable

if TYPE_CHECKING:
    from tqdm import tqdm

__all__ = ["Bars", "Lines", "copy_progress"]


def copy_progress() -> CopyProgress:
    """A bar a table on stderr if that is a terminal and tqdm is installed (``pg-subscriber[progress]``); else nothing is shown."""
    if sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None:
        return Bars()
    return Quiet()


class Bars:
    """A progress bar a table, on stderr. Needs tqdm."""

    def __init__(self) -> None:
        from tqdm import tqdm  # noqa: PLC0415 -- an optional dependency

        self._make = tqdm
        self._bars: dict[TableName, tqdm[Any]] = {}

    def started(self, table: TableName, estimated_rows: int | None) -> None:
        """A new bar, or the table's own from zero."""
        if table in self._bars:
            self._bars[table].reset(estimated_rows)
        else:
            self._bars[table] = self._make(desc=printable(str(table)), total=estimated_rows, unit=" rows", unit_scale=True, file=sys.stderr)

    def advanced(self, table: TableName, rows: int) -> None:
        """Move it."""
        if table in self._bars:
            self._bars[table].update(rows)

    def finished(self, table: TableName) -> None:
        """Full, whatever was estimated; the line stays."""
        bar = self._bars.pop(table, None)
        if bar is not None:
            bar.total = bar.n
            bar.refresh()
            bar.close()

    def close(self) -> None:
        """Leave those that are not full as they are; what is said next begins on a line of its own. Idempotent."""
        while self._bars:
            self._bars.popitem()[1].close()


class Lines:
    """A line on stdout for each table that is copied, for where there is no terminal."""

    def __init__(self) -> None:
        self._rows: dict[TableName, int] = {}

    def started(self, table: TableName, estimated_rows: int | None) -> None:
        """Count from zero."""
        self._rows[table] = 0

    def advanced(self, table: TableName, rows: int) -> None:
        """Count."""
        self._rows[table] = self._rows.get(table, 0) + rows

    def finished(self, table: TableName) -> None:
        """Say it."""
        say(f"   {printable(str(table)):<40} {self._rows.pop(table, 0):>10,} rows")
