"""The error for a value that cannot be read or stored. It never contains the value."""

from __future__ import annotations

__all__ = ["ValueRefused"]


class ValueRefused(ValueError):
    """A value cannot be read, or the target cannot hold it.

    Attributes:
        column: the column of the value, or None if it is not known yet.
        hint: what to do about it, one sentence, or None.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.column: str | None = None
        self.hint = hint
