"""Turn errors of PostgreSQL into errors of this package.

A message of the server may contain values of a row: ``invalid input syntax for type integer: "..."``, the DETAIL of a violated constraint,
the CONTEXT of a COPY, an error that a trigger raises. Hence:

- The text of a constraint violation is built here, from the names in the separate fields of the server's report.
- The server's primary message is used only for error classes about objects and the server's state, and only if no function was involved
  (CONTEXT is empty), because a function may raise any text under any SQLSTATE.
- All other errors are named by their condition, from the list in the manual's appendix. DETAIL and CONTEXT are never shown.
- The driver's exception is not chained, because a printed traceback would show the hidden values.

Source: PostgreSQL manual, Appendix A (PostgreSQL Error Codes) and 54.8 (Error and Notice Message Fields).
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psycopg
from psycopg import pq

from subscriber.errors import CANNOT_CONNECT_NOW, ApplyError, RelationError, TargetError, TargetUnavailable, connection_hint
from subscriber.interfaces import TableName

if TYPE_CHECKING:
    # not loaded by what needs libpq only
    import asyncpg

__all__ = ["CATALOG_HINT", "Diagnostics", "condition_name", "is_lost", "parameter_number", "target_error", "translated"]

_UNAVAILABLE: Final = frozenset({"57P01", "57P02", "57P03", "57P05", "57014", "53300", "55P03", "25P03", "25P04"})
_SAFE_CLASSES: Final = frozenset({"08", "0A", "25", "26", "28", "34", "3D", "3F", "40", "42", "53", "54", "55", "57", "58"})
_APPLY_CLASSES: Final = frozenset({"09", "0A", "0B", "20", "21", "22", "23", "27", "2F", "38", "39", "44", "54", "P0"})

CATALOG_HINT: Final = (
    "restore the schema subscriber from a backup of the target; without one, DROP SCHEMA subscriber CASCADE, drop the publishers' slots of"
    " its subscriptions, and start over with empty tables"
)
"""Hint for a catalog that was changed by hand."""
_CATALOG: Final = re.compile(r'relation "subscriber\.')
_RELATION_HINT: Final = "compare the target's table with the publisher's"
_READ_ONLY_HINT: Final = "connect to the primary, with a role that may write"
_LOG_HINT: Final = "see the target's log for details"
_DISK_FULL: Final = "53100"
_DISK_HINT: Final = "make room on the target's disk"
_PASSES: Final = "temporary error; if it persists, check that the target runs"
_UNAVAILABLE_HINTS: Final = {
    CANNOT_CONNECT_NOW: "wait until it accepts connections",
    "53300": "increase max_connections of the target, or end other sessions",
    "55P03": "another session of the target holds the lock (pg_locks), or lock_timeout of the role is too short",
    "57014": "another session canceled the statement, or statement_timeout of the target's role is too short",
    "25P03": "increase idle_in_transaction_session_timeout of the target's role",
    "25P04": "increase transaction_timeout of the target's role",
    "57P05": "increase idle_session_timeout of the target's role",
}
_APPLY_HINTS: Final = {
    "22": "compare the column's type in the target with the publisher's",
    "23505": "delete or change the target's row that has this key; before an initial copy, empty the table",
    "23": "the target's constraint rejects the publisher's row: change or drop the constraint, or change the rows of the target",
}


@dataclass(frozen=True, slots=True)
class Diagnostics:
    """The fields of one error report. ``message``, ``detail`` and ``context`` may hold values, and must not leave this module unchanged."""

    sqlstate: str | None
    message: str = ""
    context: str | None = None
    table: str | None = None
    column: str | None = None
    datatype: str | None = None
    constraint: str | None = None
    schema: str | None = None
    detail: str | None = None

    @property
    def relation(self) -> TableName | None:
        """The table of the error; for a partitioned table, the partition."""
        return None if self.schema is None or self.table is None else TableName(self.schema, self.table)

    @classmethod
    def of_result(cls, result: pq.abc.PGresult) -> Diagnostics:
        """Read the fields of a result with status FATAL_ERROR."""

        def field(which: pq.DiagnosticField) -> str | None:
            value = result.error_field(which)
            return None if value is None else value.decode("utf-8", "replace")

        return cls(
            sqlstate=field(pq.DiagnosticField.SQLSTATE),
            message=field(pq.DiagnosticField.MESSAGE_PRIMARY) or result.error_message.decode("utf-8", "replace").strip(),
            context=field(pq.DiagnosticField.CONTEXT),
            table=field(pq.DiagnosticField.TABLE_NAME),
            column=field(pq.DiagnosticField.COLUMN_NAME),
            datatype=field(pq.DiagnosticField.DATATYPE_NAME),
            constraint=field(pq.DiagnosticField.CONSTRAINT_NAME),
            schema=field(pq.DiagnosticField.SCHEMA_NAME),
            detail=field(pq.DiagnosticField.MESSAGE_DETAIL),
        )

    @classmethod
    def of_psycopg(cls, error: psycopg.Error) -> Diagnostics:
        """Read the fields of an exception of psycopg. One without SQLSTATE is an error of libpq about the connection."""
        diag = error.diag
        return cls(
            sqlstate=error.sqlstate,
            message=diag.message_primary or str(error).strip(),
            context=diag.context,
            table=diag.table_name,
            column=diag.column_name,
            datatype=diag.datatype_name,
            constraint=diag.constraint_name,
            schema=diag.schema_name,
            detail=diag.message_detail,
        )

    @classmethod
    def of_asyncpg(cls, error: asyncpg.PostgresError) -> Diagnostics:
        """Read the fields of an exception of asyncpg that a report of the server caused."""
        return cls(
            sqlstate=error.sqlstate,
            message=str(error.args[0]) if error.args else "",
            context=error.context,
            table=error.table_name,
            column=error.column_name,
            datatype=error.data_type_name,
            constraint=error.constraint_name,
            schema=error.schema_name,
            detail=error.detail,
        )


def condition_name(sqlstate: str) -> str:
    """The condition name from the manual's appendix, in words: ``22P02`` is "invalid text representation"."""
    try:
        name = psycopg.errors.lookup(sqlstate).__name__
    except KeyError:
        return f"SQLSTATE {sqlstate}"
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).lower()


_PARAMETER = re.compile(r"parameter \$(\d+)")
_ENUM = re.compile(r'invalid input value for enum (?P<type>[^\n]+?): "')
_COPY_COLUMN = re.compile(r"\ACOPY [^\n]*?, line \d+, column (?P<name>[^\n]*?)(?:: |\Z|\n)")


def parameter_number(diagnostics: Diagnostics) -> int | None:
    """Number (from 1) of the parameter whose value the server could not read, if the report has it."""
    found = _PARAMETER.search((diagnostics.context or "").split("=", 1)[0])
    return int(found[1]) if found else None


def copy_column(diagnostics: Diagnostics, columns: Sequence[str]) -> str | None:
    """The column that COPY was reading, if the report names one of ``columns``."""
    found = _COPY_COLUMN.match(diagnostics.context or "")
    return found["name"] if found and found["name"] in columns else None


def _violation(diagnostics: Diagnostics) -> str:
    table, constraint = diagnostics.table, diagnostics.constraint
    match diagnostics.sqlstate:
        case "23502" if diagnostics.datatype:
            return f'domain "{diagnostics.datatype}" does not allow null values'
        case "23502":
            return f'null value in column "{diagnostics.column}" of relation "{table}" violates not-null constraint'
        case "23503":
            return f'row in table "{table}" violates foreign key constraint "{constraint}"'
        case "23505":
            return f'duplicate key value violates unique constraint "{constraint}"'
        case "23514" if diagnostics.datatype:
            return f'value for domain "{diagnostics.datatype}" violates check constraint "{constraint}"'
        case "23514" if constraint:
            return f'new row for relation "{table}" violates check constraint "{constraint}"'
        case "23514":
            return f'no partition of relation "{table}" found for row'
        case "23P01":
            return f'conflicting key value violates exclusion constraint "{constraint}"'
        case _:
            return condition_name(diagnostics.sqlstate or "23000")


def _enum(diagnostics: Diagnostics) -> str | None:
    """The name of the enum type that lacks a label. A trigger may raise this error with any text; then the context names its function."""
    context = diagnostics.context
    if diagnostics.sqlstate != "22P02" or not (context is None or parameter_number(diagnostics) or context.startswith("COPY ")):
        return None
    found = _ENUM.match(diagnostics.message)
    return found["type"] if found else None


def _text(diagnostics: Diagnostics) -> str:
    sqlstate = diagnostics.sqlstate
    if sqlstate is None:
        return " ".join(diagnostics.message.split())
    if sqlstate.startswith("23") and (diagnostics.constraint or diagnostics.column or diagnostics.table or diagnostics.datatype):
        return _violation(diagnostics)
    if enum := _enum(diagnostics):
        return f"invalid input value for enum {enum}"
    if sqlstate[:2] in _SAFE_CLASSES and not diagnostics.context:
        # the details of what is not supported name objects, for example the table of a foreign key that refuses a TRUNCATE
        detail = f": {diagnostics.detail}" if sqlstate == "0A000" and diagnostics.detail else ""
        return " ".join((diagnostics.message + detail).split())
    return f"{condition_name(sqlstate)} (SQLSTATE {sqlstate})"


def target_error(diagnostics: Diagnostics) -> TargetError:
    """The error of this package for a report: its class says what the caller must do (see :mod:`subscriber.errors`)."""
    sqlstate, text = diagnostics.sqlstate, _text(diagnostics)
    if sqlstate == "08P01" and diagnostics.context:
        # a type's receive function ran out of bytes; a protocol violation of the connection itself has no context
        return ApplyError(f"incorrect binary data format (SQLSTATE {sqlstate})", sqlstate=sqlstate, hint=_APPLY_HINTS["22"])
    if sqlstate is None or sqlstate in _UNAVAILABLE or sqlstate[:2] in {"08", "40"}:
        return TargetUnavailable(text, sqlstate=sqlstate, hint=_UNAVAILABLE_HINTS.get(sqlstate or "", _PASSES))
    if sqlstate == "42501":
        return TargetError(
            text, sqlstate=sqlstate, hint="grant the target's role this privilege, or connect as the tables' owner or a superuser"
        )
    if sqlstate == "25006":
        return TargetError(text, sqlstate=sqlstate, hint=_READ_ONLY_HINT)
    if sqlstate == "42P01" and _CATALOG.search(text):
        return TargetError(text, sqlstate=sqlstate, hint=CATALOG_HINT)
    if sqlstate[:2] == "42" or sqlstate == "3F000":
        return RelationError(text, sqlstate=sqlstate, hint=_RELATION_HINT if diagnostics.context is None else _LOG_HINT)
    if enum := _enum(diagnostics):
        return ApplyError(text, sqlstate=sqlstate, hint=f"ALTER TYPE {enum} ADD VALUE … in the target, with the publisher's new value")
    if sqlstate[:2] in _APPLY_CLASSES:
        return ApplyError(text, sqlstate=sqlstate, hint=_APPLY_HINTS.get(sqlstate) or _APPLY_HINTS.get(sqlstate[:2], _LOG_HINT))
    return TargetError(text, sqlstate=sqlstate, hint=_DISK_HINT if sqlstate == _DISK_FULL else _LOG_HINT)


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Turn exceptions of both drivers into errors of this package.

    Raises:
        TargetError: or a subclass of it.
    """
    try:
        yield
    except psycopg.Error as error:
        raise target_error(Diagnostics.of_psycopg(error)) from None
    except Exception as error:
        driver = sys.modules.get("asyncpg")
        if driver is not None and isinstance(error, driver.PostgresError):
            raise target_error(Diagnostics.of_asyncpg(error)) from None
        if not is_lost(error):
            raise
        said = " ".join(str(error).split())
        if driver is not None and (type(error) is driver.InterfaceError or not isinstance(error, driver.InterfaceError | OSError)):
            # asyncpg's text describes its internal states ("cannot switch to state 12; another operation (2) is in progress")
            said = "the session was closed while it was in use"
        raise TargetUnavailable(f"connection to the target failed: {said}", hint=connection_hint(said, _PASSES)) from error


def is_lost(error: BaseException) -> bool:
    """Whether asyncpg had an error of the connection, or received bytes that it could not decode.

    asyncpg checks little of its input: a damaged message may raise any exception from its buffers, for example IndexError.
    """
    if isinstance(error, OSError):
        return True
    driver = sys.modules.get("asyncpg")
    if driver is None:
        return False
    if isinstance(error, driver.InterfaceError | driver.InternalClientError):
        return True
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is not None and "asyncpg" in Path(traceback.tb_frame.f_code.co_filename).parts
