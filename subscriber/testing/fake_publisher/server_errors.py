"""The errors that the fake publisher sends to its clients, and those that it raises in the test."""

from __future__ import annotations

__all__ = ["ClientGone", "FeedbackViolation", "ServerError"]


class ServerError(Exception):
    """An ErrorResponse. A session sends it and goes on, as a server does.

    Attributes:
        sqlstate: PostgreSQL's error code.
        message: PostgreSQL's message.
        detail, hint: or empty.
        fatal: whether the session ends.
    """

    def __init__(self, sqlstate: str, message: str, *, detail: str = "", hint: str = "", fatal: bool = False) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate
        self.message = message
        self.detail = detail
        self.hint = hint
        self.fatal = fatal


class ClientGone(Exception):
    """The client closed the connection."""


class FeedbackViolation(AssertionError):
    """A subscriber did what it must never do. Each line of the text is one violation."""
