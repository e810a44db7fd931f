"""Describe errors and conflicts of apply, in the words of PostgreSQL's context lines and conflict reports. They never contain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from psycopg.pq.abc import PGresult

from subscriber.errors import ApplyError, TargetError, TargetUnavailable
from subscriber.interfaces import TableName
from subscriber.sinks import apply_counters
from subscriber.sinks.apply_counters import ChangeContext, describe
from subscriber.sinks.conflict_log import LoggedConflict
from subscriber.sinks.postgres.apply.change_sql import SWITCH_ROLE
from subscriber.sinks.postgres.apply.conflicts import UNIQUE_VIOLATION, Collision, Existing, unique_conflict
from subscriber.sinks.postgres.apply.resolving_sql import REASONS
from subscriber.sinks.postgres.session.pipeline import StatementFailed
from subscriber.sinks.postgres.session.postgres_errors import parameter_number, target_error
from subscriber.sinks.postgres.session.statement import Resolution, Statement

__all__ = ["Counted", "RefusedByRule", "RowsMissed", "SetContext", "apply_error"]

_BINARY_FORMAT: Final = "22P03"
_LOCK_NOT_AVAILABLE: Final = "55P03"
_DIVISION_BY_ZERO: Final = "22012"
_INVALID_TEXT: Final = "22P02"
_NOT_SUPPORTED: Final = "0A000"
_DOING: Final = {"UPDATE": "Updating", "DELETE": "Deleting"}
_DONE: Final = {"UPDATE": "updated", "DELETE": "deleted"}
_COLLIDED: Final = 'Key already exists in unique index "{index}", {modified}: key ({keys})'
_EXPLAINED: Final = {
    "exists": _COLLIDED,
    "conflicts": f"{_COLLIDED}, and in other unique indexes",
    "differs": "{doing} the row that was {modified}",
    "missing": "Could not find the row to be {done}",
}
"""By the last word of the conflict's name."""
_APPLIED: Final = frozenset("ai")
ACTS: Final = {"a": "apply_remote", "k": "keep_local", "s": "skip", "i": "insert"}
"""What a rule did."""


@dataclass(frozen=True, slots=True)
class SetContext:
    """The context of a statement for a set: those of its first and its last change.

    Attributes:
        omitted: number of UPDATEs that need not be made, because this set or a set of the same run overwrites or deletes their rows.
        each: those of all changes, if their conflicts are resolved by rules.
    """

    first: ChangeContext
    last: ChangeContext
    omitted: int = 0
    each: Sequence[ChangeContext] = ()

    def describe(self, statement: Statement) -> str:
        """The context line. It names one transaction only if all changes are from it, because the failing one is not known."""
        text = describe(self.first, statement.message_type, statement.table)
        if self.first is self.last:
            return text
        return f"{text}, or in a later one up to transaction {self.last.xid}, finished at {self.last.final_lsn}"


class RefusedByRule(ApplyError):
    """A conflict that is an error by a rule.

    Attributes:
        conflict: its name.
    """

    conflict = ""


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
    if statement.resolves is not None and diagnostics.sqlstate == _INVALID_TEXT and not diagnostics.context:
        error = _by_rule(statement, diagnostics.message) or error
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
        conflict = unique_conflict(statement, found)
        error.add_note(f'conflict detected on relation "{relation}": conflict={conflict}')
        for collision in found:
            error.add_note(str(collision))
        if not found:
            error.add_note(f'Key already exists in unique index "{diagnostics.constraint}".')
        error.hint = f"change or delete the target's row, drop its constraint, or give a rule (conflict.{conflict}); it is retried"
    blamed = statement.table or (diagnostics.relation if statement.ends else None) or _truncated(failure)
    error.of_table = None if blamed is None else (blamed.namespace, blamed.name)
    if isinstance(context, ChangeContext):
        error.finish_lsn = context.final_lsn
        error.add_note(describe(context, statement.message_type or context.ending, statement.table, column))
    elif isinstance(context, SetContext):
        error.add_note(context.describe(statement))
    return error


def _by_rule(statement: Statement, message: str) -> TargetError | None:
    """The error that a rule demands."""
    resolves, kind = statement.resolves, statement.message_type.lower()
    if resolves is None:
        return None
    done = {"update": "updated", "delete": "deleted"}.get(kind, "")
    hint = "correct the row in the target, or change the rule; the transaction is retried"
    if REASONS["missing"] in message:
        error = RefusedByRule(f'could not find the row of relation "{statement.table}" to be {done}', sqlstate="P0002", hint=hint)
    elif REASONS["unsent"] in message:
        columns = ", ".join(f'"{name}"' for name in resolves.unsent)
        error = RefusedByRule(
            f'could not find the row of relation "{statement.table}" to be updated, and it cannot be inserted:'
            f" the publisher did not send the unchanged values of {columns}",
            sqlstate="P0002",
            hint="reconcile the table (`subscriber alter NAME --resync TABLE`), or change the rule; the transaction is retried",
        )
    elif REASONS["unknown"] in message:
        return TargetError("the commit time of a transaction is not known before its end", hint="it is applied at its end")
    else:
        return None
    error.conflict = conflict = f"{kind}_missing"
    error.add_note(f'conflict detected on relation "{statement.table}": conflict={conflict}, rule={resolves.rules[conflict]}')
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
        if statement.resolves is not None:
            self.resolve(statement, statement.resolves, context, result)
        elif statement.together:
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

    def resolve(self, statement: Statement, resolution: Resolution, context: object, result: PGresult) -> None:
        """Count changes and the conflicts that rules resolved."""
        kind, table, identity = statement.message_type, statement.table, statement.identity
        made = int(result.get_value(0, 1) or 0)
        self.changes(kind, table, identity, made, made)
        for row in range(1, result.ntuples):
            conflict, number, act, index = ((result.get_value(row, column) or b"").decode() for column in range(4))
            partition = _partition(result, 7, row)
            explained = partial(_explanation, conflict, kind, resolution.indexes[int(index) - 1] if int(index) else None, result, row)
            self.conflict("", partition or table, identity, conflict, explained, resolution=ACTS[act])
            if not resolution.logged:
                continue
            if isinstance(context, SetContext) and context.each:
                change = context.each[int(number) - 1]
            else:
                assert isinstance(context, ChangeContext)
                change = context
            rows = (result.get_value(row, column) for column in (9, 10, 11))
            self.resolved.append(
                LoggedConflict(
                    partition or table,
                    conflict,
                    resolution.rules[conflict],
                    act in _APPLIED,
                    change.xid,
                    change.final_lsn or None,
                    change.commit_time,
                    *rows,
                )
            )

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


def _explanation(conflict: str, kind: str, index: tuple[str, tuple[str, ...]] | None, result: PGresult, row: int) -> str:
    """What was found. ``index``: name and key of the index that has the key."""
    existing = Existing.of(result, 4, row)
    name, keys = index or ("", ())
    return _EXPLAINED[conflict.rpartition("_")[2]].format(
        doing=_DOING.get(kind, ""),
        done=_DONE.get(kind, ""),
        index=name,
        modified=existing and existing.modified(),
        keys=", ".join(keys),
    )


def _partition(result: PGresult, first: int = 4, row: int = 0) -> TableName | None:
    namespace, name = result.get_value(row, first), result.get_value(row, first + 1)
    return None if namespace is None or name is None else TableName(namespace.decode(), name.decode())
