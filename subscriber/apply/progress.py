"""The interface for programs that show the progress of table copies. The command line shows bars on a terminal."""

from __future__ import annotations

from typing import Protocol

from subscriber.interfaces import TableName

__all__ = ["CopyProgress", "Quiet"]


class CopyProgress(Protocol):
    """Receives the progress of every table copy. Calls come from the event loop and must not block."""

    def started(self, table: TableName, estimated_rows: int | None) -> None:
        """A copy starts. It may be a repetition after a failure."""
        ...

    def advanced(self, table: TableName, rows: int) -> None:
        """So many further rows were read."""
        ...

    def finished(self, table: TableName) -> None:
        """All rows are in the target."""
        ...


class Quiet:
    """Ignores all calls."""

    def started(self, table: TableName, estimated_rows: int | None) -> None:
        """Nothing."""

    def advanced(self, table: TableName, rows: int) -> None:
        """Nothing."""

    def finished(self, table: TableName) -> None:
        """Nothing."""
