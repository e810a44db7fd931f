"""What an error while applying was about, in the words of native's context lines and conflict reports. Never a value."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from subscriber.abc import ApplyStatistics, TableName
from subscriber.errors import TargetError, TargetUnavailable
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.postgres.errors import parameter_number, target_error
from subscriber.sinks.postgres.pipeline import StatementFailed
from subscriber.sinks.postgres.statement import Statement

__all__ = ["ChangeContext", "apply_error", "count_change", "describe"]

_log = logging.getLogger(__name__)

_BINARY_FORMAT: Final = "22P03"
_UNIQUE: Final = "23505"
_DIVISION_BY_ZERO: Final = "22012"
_MISSING: Final = {"UPDATE": "updated", "DELETE": "deleted"}


@dataclass(frozen=True, slots=True)
class ChangeContext:
    """The remote transaction that a statement carries out a change of."""

    origin: str
    xid: int
    final_lsn: Lsn


def describe(context: ChangeContext, message_type: str = "", table: TableName | None = None, column: str | None = None) -> str:
    """Native's apply_error_callback."""
    text = f'processing remote data for replication origin "{context.origin}"'
    if message_type:
        text += f' during message type "{message_type}"'
    if table is not None:
        text += f' for replication target relation "{table}"'
        if column is not None:
            text += f' column "{column}"'
    return f"{text} in transaction {context.xid}, finished at {context.final_lsn}"


def apply_error(failure: StatementFailed) -> TargetError:
    """The error to raise for a statement that the server refused."""
    diagnostics, statement, context = failure.diagnostics, failure.statement, failure.context
    error = target_error(diagnostics)
    if statement.finds and diagnostics.sqlstate == _DIVISION_BY_ZERO and not diagnostics.context:
        error = TargetUnavailable(f'a row of relation "{statement.table}" was changed by another session meanwhile', sqlstate="40001")
    number = parameter_number(diagnostics)
    column = diagnostics.column
    if number is not None and number <= len(statement.columns):
        column = statement.columns[number - 1]
        if diagnostics.sqlstate == _BINARY_FORMAT:
            # native's words for it
            error = type(error)(f"incorrect binary data format in logical replication column {number}", sqlstate=_BINARY_FORMAT)
    if diagnostics.sqlstate == "42501" and not statement.message_type:
        error.hint = "GRANT the table's owner TO the target's role, or set run_as_owner = true"
    if diagnostics.sqlstate == _UNIQUE and statement.table is not None:
        kind = "insert_exists" if statement.message_type == "INSERT" else "update_exists"
        error.add_note(f'conflict detected on relation "{statement.table}": conflict={kind}')
        error.hint = "change the target's row, or skip the transaction"
    if isinstance(context, ChangeContext) and statement.message_type:
        error.add_note(describe(context, statement.message_type, statement.table, column))
    elif isinstance(context, ChangeContext):
        error.add_note(describe(context))
    return error


def count_change(statement: Statement, found: int, statistics: ApplyStatistics) -> None:
    """Count a change that was made, or the conflict if there was no row to make it to."""
    match statement.message_type:
        case "INSERT":
            statistics.inserts += 1
        case "TRUNCATE":
            statistics.truncates += 1
        case "UPDATE" if found:
            statistics.updates += 1
        case "DELETE" if found:
            statistics.deletes += 1
        case "UPDATE":
            statistics.confl_update_missing += 1
            _report_missing(statement)
        case "DELETE":
            statistics.confl_delete_missing += 1
            _report_missing(statement)
        case _:
            pass


def _report_missing(statement: Statement) -> None:
    kind = statement.message_type
    _log.warning(
        'conflict detected on relation "%s": conflict=%s_missing: Could not find the row to be %s.',
        statement.table,
        kind.lower(),
        _MISSING[kind],
    )
