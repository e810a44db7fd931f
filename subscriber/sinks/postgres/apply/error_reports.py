"""Describe errors and conflicts of apply, in the words of PostgreSQL's context lines and conflict reports. They never contain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from psycopg.pq.abc import PGresult

from subscriber.errors import TargetError, TargetUnavailable
from subscriber.interfaces import TableName
from subscriber.sinks import apply_counters
from subscriber.sinks.apply_counters import ChangeContext, describe
from subscriber.sinks.postgres.apply.change_sql import SWITCH_ROLE
from subscriber.sinks.postgres.apply.conflicts import UNIQUE_VIOLATION, Collision, Existing, unique_conflict
from subscriber.sinks.postgres.session.pipeline import StatementFailed
from subscriber.sinks.postgres.session.postgres_errors import parameter_number, target_error
from subscriber.sinks.postgres.session.statement import Statement

__all__ = ["Counted", "RowsMissed", "SetContext", "apply_error"]

_BINARY_FORMAT: Final = "22P03"
_LOCK_NOT_AVAILABLE: Final = "55P03"
_DIVISION_BY_ZERO: Final = "22012"
_NOT_SUPPORTED: Final = "0A000"
_DOING: Final = {"UPDATE": "Updating", "DELETE": "Deleting"}


@dataclass(frozen=True, slots=True)
class SetContext:
    """The context of a statement for a set: those of its first and its last change.

    Attributes:
        omitted: number of UPDATEs that need not be made, because this set or a set of the same run overwrites or deletes their rows.
    """

    first: ChangeContext
    last: ChangeContext
    omitted: int = 0

    def describe(self, statement: Statement) -> str:
        """The context line. It names one transaction only if all changes are from it, because the failing one is not known."""
        text = describe(self.first, statement.message_type, statement.table)
        if self.first is self.last:
            return text
        return f"{text}, or in a later one up to transaction {self.last.xid}, finished at {self.last.final_lsn}"


class RowsMissed(TargetError):
    """A statement for a set did not find all its rows.

    Attributes:
        table: the table.
    """

    def __init__(self, table: TableName | None) -> None:
        super().__init__(f'relation "{table}" misses rows of a set', hint="its changes are applied one by one")
        self.table = table


def apply_error(failure: StatementFailed, collisions: list[Collision] | None = None) -> TargetError:
    """The error to raise for a rejected statement.

    Args:
        failure: the server's report.
        collisions: after a unique violation, the result of :func:`find_collisions`.
    """
    diagnostics, statement, context = failure.diagnostics, failure.statement, failure.context
    error = target_error(diagnostics)
    if statement.together and statement.finds and diagnostics.sqlstate == _DIVISION_BY_ZERO:
        return RowsMissed(statement.table)
    if statement.finds and diagnostics.sqlstate == _DIVISION_BY_ZERO and not diagnostics.context:
        error = TargetUnavailable(f'a row of relation "{statement.table}" was changed by another session', sqlstate="40001")
    number = parameter_number(diagnostics)
    column = diagnostics.column
    if number is not None and number <= len(statement.columns):
        column = statement.columns[number - 1]
        if diagnostics.sqlstate == _BINARY_FORMAT:
            # PostgreSQL's message
            error = type(error)(f"incorrect binary data format in logical replication column {number}", sqlstate=_BINARY_FORMAT)
    if statement.hint and diagnostics.sqlstate != _LOCK_NOT_AVAILABLE:
        error.hint = statement.hint
    elif diagnostics.sqlstate == "42501" and statement.sql.startswith(SWITCH_ROLE):
        error.hint = "GRANT the table's owner TO the target's role, or set run_as_owner = true"
    elif diagnostics.sqlstate == "42501" and statement.message_type:
        error.hint = "grant the privilege to the role that makes the change: the table's owner; with run_as_owner = true, the target's role"
    elif diagnostics.sqlstate == "0A000" and statement.message_type == "TRUNCATE":
        error.hint = "publish both tables and truncate them in one statement, or drop the foreign key in the target"
    if diagnostics.sqlstate == UNIQUE_VIOLATION and statement.table is not None:
        found = collisions or []
        relation = diagnostics.relation or statement.table
        error.add_note(f'conflict detected on relation "{relation}": conflict={unique_conflict(statement, found)}')
        for collision in found:
            error.add_note(str(collision))
        if not found:
            error.add_note(f'Key already exists in unique index "{diagnostics.constraint}".')
        error.hint = "change or delete the target's row, or drop its constraint; the transaction is retried"
    blamed = statement.table or (diagnostics.relation if statement.ends else None) or _truncated(failure)
    error.of_table = None if blamed is None else (blamed.namespace, blamed.name)
    if isinstance(context, ChangeContext):
        error.finish_lsn = context.final_lsn
        error.add_note(describe(context, statement.message_type or context.ending, statement.table, column))
    elif isinstance(context, SetContext):
        error.add_note(context.describe(statement))
    return error


def _truncated(failure: StatementFailed) -> TableName | None:
    """The table that keeps others from being truncated with it, if this is known: it is the only one, or another table references it."""
    tables = failure.statement.truncated
    names = {table.name for table in tables}
    found = [table.name for table in tables if not table.referenced_by <= names] if len(tables) > 1 else [*names]
    return found[0] if len(names) == 1 or (failure.diagnostics.sqlstate == _NOT_SUPPORTED and found) else None


class Counted(apply_counters.Counted):
    """Counts from PostgreSQL's answers."""

    def answer(self, statement: Statement, context: object, result: PGresult) -> None:
        """Count changes from the server's answer. ``context``: of the statement."""
        if statement.together:
            if isinstance(context, SetContext) and context.omitted:
                self.changes("UPDATE", statement.table, statement.identity, context.omitted, context.omitted)
            count = int(result.get_value(0, 0) or 0) if statement.finds else result.command_tuples or 0
            self.changes(statement.message_type, statement.table, statement.identity, count, count)
        elif statement.finds:
            other = Existing.of(result, 1) if result.nfields > 1 else None
            self.change(statement, int(result.get_value(0, 0) or 0), other, _partition(result) if other else None)
        else:
            found = result.command_tuples or 0
            self.changes(statement.message_type, statement.table, statement.identity, 1, min(found, 1))

    def change(self, statement: Statement, found: int, other: Existing | None, partition: TableName | None = None) -> None:
        """Count a change, or a conflict if its row was not found.

        Args:
            statement: the statement of the change.
            found: number of rows found.
            other: the previous change of the row, if it came from another replication origin.
            partition: the partition that has the row.
        """
        kind, table, identity = statement.message_type, statement.table, statement.identity
        self.changes(kind, table, identity, 1, min(found, 1))
        if other is not None:
            explanation = f"{_DOING[kind]} the row that was {other.modified('by a different origin')}"
            self.conflict(kind, partition or table, identity, "origin_differs", explanation)


def _partition(result: PGresult) -> TableName | None:
    namespace, name = result.get_value(0, 4), result.get_value(0, 5)
    return None if namespace is None or name is None else TableName(namespace.decode(), name.decode())
