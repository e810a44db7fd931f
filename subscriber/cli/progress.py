"""Progress of table copies, for people."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from subscriber.apply.progress import CopyProgress, Quiet
from subscriber.cli.output import say
from subscriber.interfaces import TableName
from subscriber.printable import printable

if TYPE_CHECKING:
    from tqdm import tqdm

__all__ = ["Bars", "Lines", "copy_progress"]


def copy_progress() -> CopyProgress:
    """Progress bars if stderr is a terminal and tqdm is installed (``pg-subscriber[progress]``). Else nothing is shown."""
    if sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None:
        return Bars()
    return Quiet()


class Bars:
    """One progress bar for each table, on stderr. Needs tqdm."""

    def __init__(self) -> None:
        from tqdm import tqdm  # noqa: PLC0415 -- an optional dependency

        self._make = tqdm
        self._bars: dict[TableName, tqdm[Any]] = {}
        self._line: tqdm[Any] | None = None

    def started(self, table: TableName, estimated_rows: int | None) -> None:
        """Add a bar, or reset the table's bar to zero."""
        if table in self._bars:
            self._bars[table].reset(estimated_rows)
        else:
            self._bars[table] = self._make(desc=printable(str(table)), total=estimated_rows, unit=" rows", unit_scale=True, file=sys.stderr)

    def advanced(self, table: TableName, rows: int) -> None:
        if table in self._bars:
            self._bars[table].update(rows)

    def finished(self, table: TableName) -> None:
        bar = self._bars.pop(table, None)
        if bar is not None:
            bar.total = bar.n
            bar.refresh()
            bar.close()

    def note(self, line: str) -> None:
        """Show a line about all copies below the bars."""
        if self._line is None:
            self._line = self._make(total=0, bar_format="{desc}", file=sys.stderr)
        self._line.set_description_str(printable(line))

    def close(self) -> None:
        """Close the unfinished bars, so that the next output begins on its own line. Idempotent."""
        while self._bars:
            self._bars.popitem()[1].close()
        if self._line is not None:
            self._line.close()
            self._line = None


class Lines:
    """One line on stdout for each copied table, for use without a terminal."""

    def __init__(self) -> None:
        self._rows: dict[TableName, int] = {}

    def started(self, table: TableName, estimated_rows: int | None) -> None:
        """Count from zero."""
        self._rows[table] = 0

    def advanced(self, table: TableName, rows: int) -> None:
        self._rows[table] = self._rows.get(table, 0) + rows

    def finished(self, table: TableName) -> None:
        say(f"   {printable(str(table)):<40} {self._rows.pop(table, 0):>10,} rows")
