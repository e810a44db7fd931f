"""What an error while applying was about, in the words of native's context lines and conflict reports. Never a value.

Conflicts are logged once they are committed: a batch that is rolled back and applied again has them once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from psycopg.pq.abc import PGresult

from subscriber.abc import ApplyStatistics, TableName
from subscriber.errors import TargetError, TargetUnavailable
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.postgres.errors import parameter_number, target_error
from subscriber.sinks.postgres.pipeline import StatementFailed
from subscriber.sinks.postgres.statement import Statement

__all__ = ["ChangeContext", "Counted", "Tally", "apply_error", "describe"]

_log = logging.getLogger(__name__)

_BINARY_FORMAT: Final = "22P03"
_UNIQUE: Final = "23505"
_DIVISION_BY_ZERO: Final = "22012"
_MISSING: Final = {"UPDATE": "updated", "DELETE": "deleted"}
_LOG_INTERVAL: Final = 1.0


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
        error.hint = "change or delete the target's row, or drop its constraint; the transaction is tried again"
    if isinstance(context, ChangeContext) and statement.message_type:
        error.add_note(describe(context, statement.message_type, statement.table, column))
    elif isinstance(context, ChangeContext):
        error.add_note(describe(context))
    return error


class Counted:
    """What was done in one attempt. It counts only if that is committed.

    Attributes:
        statistics: all of it.
        missing: rows not found, by table and message type.
    """

    def __init__(self) -> None:
        self.statistics = ApplyStatistics()
        self.missing: Counter[tuple[TableName | None, str]] = Counter()

    def copy(self) -> Counted:
        """As it is now, to go back to."""
        found = Counted()
        found.statistics = replace(self.statistics, skipped_tables=set(self.statistics.skipped_tables))
        found.missing = Counter(self.missing)
        return found

    def answer(self, statement: Statement, result: PGresult) -> None:
        """Count what the server says of a change."""
        self.change(statement, int(result.get_value(0, 0) or 0) if statement.finds else result.command_tuples or 0)

    def change(self, statement: Statement, found: int) -> None:
        """Count a change that was made, or the conflict if there was no row to make it to."""
        statistics = self.statistics
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
                self.missing[statement.table, "UPDATE"] += 1
            case "DELETE":
                statistics.confl_delete_missing += 1
                self.missing[statement.table, "DELETE"] += 1
            case _:
                pass


class Tally:
    """Adds up what was committed, and logs the conflicts in it: for each relation one line at once, and then one a second.

    Args:
        statistics: added to.
    """

    def __init__(self, statistics: ApplyStatistics) -> None:
        self._statistics = statistics
        self._missing: Counter[tuple[TableName | None, str]] = Counter()
        self._timers: dict[TableName | None, asyncio.TimerHandle] = {}
        self._written: Counter[str] = Counter()

    def unwritten(self, name: str) -> int:
        """By how much a counter grew since :meth:`wrote`."""
        return int(getattr(self._statistics, name)) - self._written[name]

    def wrote(self, counted: Mapping[str, int]) -> None:
        """So much is in the catalog now."""
        self._written.update(counted)

    def add(self, counted: Counted) -> None:
        """An attempt was committed."""
        mine, more = self._statistics, counted.statistics
        mine.transactions += more.transactions
        mine.parallel_transactions += more.parallel_transactions
        mine.inserts += more.inserts
        mine.updates += more.updates
        mine.deletes += more.deletes
        mine.truncates += more.truncates
        mine.confl_update_missing += more.confl_update_missing
        mine.confl_delete_missing += more.confl_delete_missing
        mine.skipped_tables |= more.skipped_tables
        self._missing.update(counted.missing)
        for table in {table for table, _ in counted.missing} - self._timers.keys():
            self._log_missing(table)

    def _log_missing(self, table: TableName | None) -> None:
        self._timers.pop(table, None)
        found = [(kind, count) for kind in _MISSING if (count := self._missing.pop((table, kind), 0))]
        if found:
            texts = [
                f"conflict={kind.lower()}_missing: Could not find the row to be {_MISSING[kind]}"
                + (f" ({count} rows)." if count > 1 else ".")
                for kind, count in found
            ]
            _log.warning('conflict detected on relation "%s": %s', table, " ".join(texts))
            self._timers[table] = asyncio.get_running_loop().call_later(_LOG_INTERVAL, self._log_missing, table)

    def close(self) -> None:
        """Log what has waited. Idempotent; it may be used again."""
        waiting, self._timers = self._timers, {}
        for timer in waiting.values():
            timer.cancel()
        for table in waiting:
            self._log_missing(table)
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
