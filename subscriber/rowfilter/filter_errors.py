"""The error for a row filter that cannot be used, in PostgreSQL's own words where it has any."""

from __future__ import annotations

from typing import Final

from subscriber.errors import ConfigurationError

__all__ = ["MUTABLE_FUNCTION", "NOT_SIMPLE", "SYSTEM_COLUMN", "USER_TYPE", "RowFilterError", "not_allowed", "syntax_error", "unsupported"]

NOT_SIMPLE: Final = (
    "Only columns, constants, built-in operators, built-in data types, built-in collations, and immutable built-in functions are allowed."
)
SYSTEM_COLUMN: Final = "System columns are not allowed."
USER_TYPE: Final = "User-defined types are not allowed."
MUTABLE_FUNCTION: Final = "User-defined or built-in mutable functions are not allowed."
USER_COLLATION: Final = "User-defined collations are not allowed."


class RowFilterError(ConfigurationError):
    """A row filter was refused, or it failed for a row.

    Attributes:
        detail: PostgreSQL's DETAIL, or None.
    """

    def __init__(self, message: str, *, detail: str | None = None, hint: str | None = None, sqlstate: str | None = None) -> None:
        super().__init__(message, hint=hint, sqlstate=sqlstate)
        self.detail = detail
        if detail is not None:
            self.add_note(f"DETAIL: {detail}")


def not_allowed(detail: str) -> RowFilterError:
    """What ``check_simple_rowfilter_expr_walker`` refuses."""
    return RowFilterError("invalid publication WHERE expression", detail=detail, sqlstate="0A000")


def syntax_error(near: str) -> RowFilterError:
    """Text that is not an expression of PostgreSQL."""
    return RowFilterError(f'syntax error at or near "{near}"' if near else "syntax error at end of input", sqlstate="42601")


def unsupported(what: str, hint: str | None = None) -> RowFilterError:
    """What PostgreSQL may accept, but cannot be evaluated exactly here."""
    return RowFilterError(f"row filter cannot be evaluated by the subscriber: {what}", hint=hint, sqlstate="0A000")
