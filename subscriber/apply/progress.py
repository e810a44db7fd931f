"""Who wants to see tables being copied implements this; the command line does with bars on a terminal."""

from __future__ import annotations

from typing import Protocol

from subscriber.abc import TableName

__all__ = ["CopyProgress", "Quiet"]


class CopyProgress(Protocol):
    """Told about every table copy. Calls come from the event loop and must not block."""

    def started(self, table: TableName, estimated_rows: int | None) -> None:
        """A copy starts, perhaps again after a failure."""
        ...

    def advanced(self, table: TableName, rows: int) -> None:
        """So many rows more were read."""
        ...

    def finished(self, table: TableName) -> None:
        """All rows are in the target."""
        ...


class Quiet:
    """Shows nothing."""

    def started(self, table: TableName, estimated_rows: int | None) -> None:
        """Nothing."""

    def advanced(self, table: TableName, rows: int) -> None:
        """Nothing."""

    def finished(self, table: TableName) -> None:
        """Nothing."""
