"""Converts the errors of databases and drivers to errors of this package.

A database's message may hold values of a row (``Duplicate entry 'x' for key``, ``Incorrect integer value: 'x'``), and SQLAlchemy's message
holds the statement. So the messages are written here, with names taken from the report. The database's own message is used only for kinds
of errors that are about objects or about the server's state. The driver's exception is not chained: a printed traceback would show the
values that the message omits.

===============================  ================================================  ===============================
 kind                             error of this package                             retry
===============================  ================================================  ===============================
 connection lost, busy, locked,   :class:`~subscriber.errors.TargetUnavailable`     soon
 deadlock, shutting down
 disk full, read-only, privilege  :class:`~subscriber.errors.TargetError`           until the cause is fixed
 no such table or column          :class:`~subscriber.errors.RelationError`         the same
 constraint, value                :class:`~subscriber.errors.ApplyError`            the same
===============================  ================================================  ===============================

Each error has the SQLSTATE that PostgreSQL uses for it, on every database.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator
from typing import Final

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from subscriber.errors import ApplyError, RelationError, SubscriberError, TargetError, TargetUnavailable, connection_hint
from subscriber.sinks.sqlalchemy.session.error_codes import APPLY_HINT, Refusal, mysql_refusal, sqlite_refusal

__all__ = ["UNIQUE_VIOLATION", "ChangeRefused", "passing_values", "target_error", "translated"]

UNIQUE_VIOLATION: Final = "23505"

_PASSES: Final = "temporary error; if it persists, check that the target runs"
_DRIVERS: Final = frozenset({"aiosqlite", "sqlite3", "asyncmy", "aiomysql", "pymysql"})
_DISCONNECTED = re.compile(r"(?i)\b(closed|lost|gone|reset|broken pipe|not connected|refused|timed? ?out|terminat|network operation)")


class ChangeRefused(ApplyError):
    """The database rejected a change.

    Attributes:
        column: the target's column, if the database named it.
    """

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.text, sqlstate=refusal.sqlstate, hint=refusal.hint or APPLY_HINT)
        self.column = refusal.column


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Convert errors of SQLAlchemy and the drivers, raised inside the block, to errors of this package.

    A driver also raises errors that SQLAlchemy does not wrap, some of them of Python's own classes: while a cursor is created, or on a
    connection that was closed in the meantime. The state of the session is then unknown, as if the connection were lost.

    Raises:
        TargetError: or a subclass of it.
    """
    try:
        yield
    except SubscriberError:
        raise
    except SQLAlchemyError as error:
        raise target_error(error) from None
    except (OSError, EOFError) as error:
        said = _one_line(str(error))
        raise TargetUnavailable(f"connection to the target failed: {said}", hint=connection_hint(said, _PASSES)) from error
    except Exception as error:
        if not _passed_a_driver(error):
            raise
        raise TargetUnavailable(
            f"the target's driver failed, and the connection with it ({type(error).__name__})", sqlstate="08006", hint=_PASSES
        ) from None


def _passed_a_driver(error: Exception) -> bool:
    frames = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(str(module).partition(".")[0] in _DRIVERS for module in (*frames, type(error).__module__))


@contextlib.contextmanager
def passing_values() -> Iterator[None]:
    """Convert errors that a driver raises while it encodes values of rows: their texts would show the values.

    Raises:
        ApplyError
    """
    try:
        yield
    except (OverflowError, UnicodeError, ValueError, TypeError) as error:
        raise ApplyError(
            f"the target's driver cannot pass a value on ({type(error).__name__})", sqlstate="22000", hint=APPLY_HINT
        ) from None


def target_error(error: SQLAlchemyError) -> TargetError:
    """Convert an error of SQLAlchemy. The class of the result says what the caller must do (see :mod:`subscriber.errors`)."""
    original = error.orig if isinstance(error, DBAPIError) else None
    if original is None:
        return TargetError(f"the target's driver failed: {_one_line(str(error))}", hint="report this")
    refusal = _refusal(original)
    if refusal is None:
        if _is_disconnect(error, original):
            return TargetUnavailable(f"the connection to the target was lost ({type(original).__name__})", sqlstate="08006", hint=_PASSES)
        return TargetError(f"the target rejected a statement ({type(original).__name__})", hint="see the target's log for details")
    return _of_refusal(refusal)


def _refusal(original: BaseException) -> Refusal | None:
    name = getattr(original, "sqlite_errorname", None)
    if isinstance(name, str):
        return sqlite_refusal(name, str(original))
    match original.args:
        case (int() as code, *rest):
            # MySQL's drivers give a SQLSTATE too, but it has only a few classes
            return mysql_refusal(code, str(rest[0]) if rest else "")
        case _:
            return None


def _of_refusal(refusal: Refusal) -> TargetError:
    match refusal.kind:
        case "unavailable":
            return TargetUnavailable(refusal.text, sqlstate=refusal.sqlstate, hint=refusal.hint or _PASSES)
        case "relation":
            hint = refusal.hint or "compare the target's table with the publisher's"
            return RelationError(refusal.text, sqlstate=refusal.sqlstate, hint=hint)
        case "apply":
            return ChangeRefused(refusal)
        case "target":
            return TargetError(refusal.text, sqlstate=refusal.sqlstate, hint=refusal.hint or "see the target's log for details")


def _is_disconnect(error: SQLAlchemyError, original: BaseException) -> bool:
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    return isinstance(original.__cause__, OSError) or bool(_DISCONNECTED.search(str(original)))


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
