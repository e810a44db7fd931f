"""What is said of a value that cannot be had. Never with the value itself."""

from __future__ import annotations

__all__ = ["ValueRefused"]


class ValueRefused(ValueError):
    """A value that cannot be read, or that what it is for cannot hold.

    Attributes:
        column: whose value it is, or None where that is not known yet.
        hint: what to do about it, one sentence, or None.
    """

    def __init__(self, message: str, *, column: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.column = column
        self.hint = hint
