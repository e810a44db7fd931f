"""What an error while applying was about, in the words of native's context lines and conflict reports. Never a value.

Conflicts that change nothing else are counted and logged once they are committed: a batch that is rolled back and applied again has
them once. Those that are errors are counted each time they are met, as natively.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Final

from psycopg.pq.abc import PGresult

from subscriber.abc import ApplyStatistics, TableName
from subscriber.errors import TargetError, TargetUnavailable
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.postgres.conflict import UNIQUE_VIOLATION, Collision, Existing, unique_conflict
from subscriber.sinks.postgres.errors import parameter_number, target_error
from subscriber.sinks.postgres.pipeline import StatementFailed
from subscriber.sinks.postgres.statement import Statement

__all__ = ["ChangeContext", "Counted", "Tally", "apply_error", "count", "describe"]

_log = logging.getLogger(__name__)

_BINARY_FORMAT: Final = "22P03"
_DIVISION_BY_ZERO: Final = "22012"
_DONE: Final = {"UPDATE": "updated", "DELETE": "deleted"}
_DOING: Final = {"UPDATE": "Updating", "DELETE": "Deleting"}
_LOG_INTERVAL: Final = 1.0


@dataclass(frozen=True, slots=True)
class ChangeContext:
    """The remote transaction that a statement carries out a change of.

    Attributes:
        origin: native's name of what is followed.
        xid: of the transaction on the publisher.
        final_lsn: where it finished there.
        ending: native's name of the message that ends it, for what is not about one of its changes.
    """

    origin: str
    xid: int
    final_lsn: Lsn
    ending: str = "COMMIT"


def describe(context: ChangeContext, message_type: str = "", table: TableName | None = None, column: str | None = None) -> str:
    """Native's apply_error_callback: without a relation it is about a message that has none."""
    text = f'processing remote data for replication origin "{context.origin}"'
    if message_type:
        text += f' during message type "{message_type}"'
    if table is not None:
        text += f' for replication target relation "{table}"'
        if column is not None:
            text += f' column "{column}"'
    return f"{text} in transaction {context.xid}, finished at {context.final_lsn}"


def apply_error(failure: StatementFailed, collisions: list[Collision] | None = None) -> TargetError:
    """The error to raise for a statement that the server refused.

    Args:
        failure: what it said.
        collisions: with a unique violation, what :func:`find_collisions` found.
    """
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
    if diagnostics.sqlstate == UNIQUE_VIOLATION and statement.table is not None:
        found = collisions or []
        error.add_note(f'conflict detected on relation "{statement.table}": conflict={unique_conflict(statement, found)}')
        for collision in found:
            error.add_note(str(collision))
        if not found:
            error.add_note(f'Key already exists in unique index "{diagnostics.constraint}".')
        error.hint = "change or delete the target's row, or drop its constraint; the transaction is tried again"
    if isinstance(context, ChangeContext):
        error.add_note(describe(context, statement.message_type or context.ending, statement.table, column))
    return error


@dataclass(frozen=True, slots=True)
class _Conflict:
    """Conflicts of one kind on one table are logged together."""

    table: TableName | None
    kind: str


class Counted:
    """What was done in one attempt. It counts only if that is committed.

    Attributes:
        statistics: all of it.
        conflicts: how many there were of each kind.
        explanations: of the first one of each kind.
    """

    def __init__(self) -> None:
        self.statistics = ApplyStatistics()
        self.conflicts: Counter[_Conflict] = Counter()
        self.explanations: dict[_Conflict, tuple[str, str]] = {}

    def copy(self) -> Counted:
        """As it is now, to go back to."""
        found = Counted()
        found.statistics = replace(self.statistics, skipped_tables=set(self.statistics.skipped_tables))
        found.conflicts = Counter(self.conflicts)
        found.explanations = dict(self.explanations)
        return found

    def answer(self, statement: Statement, result: PGresult) -> None:
        """Count what the server says of a change."""
        if statement.finds:
            other = Existing.of(result, 1) if result.nfields > 1 else None
            self.change(statement, int(result.get_value(0, 0) or 0), other)
        else:
            self.change(statement, result.command_tuples or 0, None)

    def change(self, statement: Statement, found: int, other: Existing | None) -> None:
        """Count a change that was made, or the conflict if there was no row to make it to.

        Args:
            statement: the change.
            found: how many rows.
            other: what is known of the row before, if another replication origin changed it last.
        """
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
            case "UPDATE" | "DELETE" as kind:
                self._conflict(statement, "missing", f"Could not find the row to be {_DONE[kind]}")
            case _:
                pass
        if other is not None:
            doing = _DOING[statement.message_type]
            self._conflict(statement, "origin_differs", f"{doing} the row that was {other.modified('by a different origin')}")

    def _conflict(self, statement: Statement, what: str, explanation: str) -> None:
        conflict = _Conflict(statement.table, f"{statement.message_type.lower()}_{what}")
        count(self.statistics, conflict.kind)
        self.conflicts[conflict] += 1
        if conflict not in self.explanations:
            key = f"({', '.join(statement.identity)})" if statement.identity else "full"
            self.explanations[conflict] = explanation, f"Replica identity {key}."


def count(statistics: ApplyStatistics, kind: str) -> None:
    """Count one conflict, under its name in pg_stat_subscription_stats."""
    name = f"confl_{kind}"
    setattr(statistics, name, getattr(statistics, name) + 1)


class Tally:
    """Adds up what was committed, and logs the conflicts in it: for each relation one line at once, and then one a second.

    Args:
        statistics: added to.
    """

    def __init__(self, statistics: ApplyStatistics) -> None:
        self.statistics = statistics
        self._conflicts: Counter[_Conflict] = Counter()
        self._explanations: dict[_Conflict, tuple[str, str]] = {}
        self._timers: dict[TableName | None, asyncio.TimerHandle] = {}
        self._written: Counter[str] = Counter()

    def unwritten(self, name: str) -> int:
        """By how much a counter grew since :meth:`wrote`."""
        return int(getattr(self.statistics, name)) - self._written[name]

    def wrote(self, counted: Mapping[str, int]) -> None:
        """So much is in the catalog now."""
        self._written.update(counted)

    def add(self, counted: Counted) -> None:
        """An attempt was committed."""
        mine, more = self.statistics, counted.statistics
        for field in fields(more):
            added = getattr(more, field.name)
            if isinstance(added, int):
                setattr(mine, field.name, getattr(mine, field.name) + added)
        mine.skipped_tables |= more.skipped_tables
        if counted.conflicts:
            self._conflicts.update(counted.conflicts)
            self._explanations = counted.explanations | self._explanations
            for table in {conflict.table for conflict in counted.conflicts} - self._timers.keys():
                self._log_conflicts(table)

    def _log_conflicts(self, table: TableName | None) -> None:
        self._timers.pop(table, None)
        found = {conflict: times for conflict, times in self._conflicts.items() if conflict.table == table}
        texts = []
        for conflict, times in found.items():
            explanation, key = self._explanations.pop(conflict)
            del self._conflicts[conflict]
            texts.append(f"conflict={conflict.kind}: {explanation}{f' ({times} rows)' if times > 1 else ''}. {key}")
        if texts:
            _log.warning('conflict detected on relation "%s": %s', table, " ".join(texts))
            self._timers[table] = asyncio.get_running_loop().call_later(_LOG_INTERVAL, self._log_conflicts, table)

    def close(self) -> None:
        """Log what has waited. Idempotent; it may be used again."""
        waiting, self._timers = self._timers, {}
        for timer in waiting.values():
            timer.cancel()
        for table in waiting:
            self._log_conflicts(table)
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
