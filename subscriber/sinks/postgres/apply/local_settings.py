"""The role and the planner's settings of the next statement. The pipeline changes them, but only if the statement needs others."""

from __future__ import annotations

from typing import Final

from subscriber.interfaces import TableName
from subscriber.sinks.postgres.apply.change_sql import set_role
from subscriber.sinks.postgres.session.pipeline import Pipeline
from subscriber.sinks.postgres.session.statement import Statement
from subscriber.sinks.postgres.tables.relation_mapping import TargetTable

__all__ = ["LocalSettings"]

_TEXT: Final = 25
# NULL: the session's own setting
_JOINS: Final = Statement(
    b"SELECT pg_catalog.set_config('enable_hashjoin', $1, true), pg_catalog.set_config('enable_mergejoin', $1, true)", (_TEXT,), reused=True
)


class LocalSettings:
    """The settings of a transaction of the target. :meth:`reset` before the end of the transaction, and before a savepoint."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._role: str | None = None
        self._by_index = False

    def change(self, *tables: TargetTable) -> None:
        """Before a statement that changes these tables. Their triggers run with the session's own planner settings.

        One statement needs one role: the owner if all tables have the same, else the session's own role.
        """
        role = tables[0].role
        for table in tables:
            if table.watched:
                self._find_by_index(False)
            if table.role != role:
                role = None
        self._become(role, tables[0].name if len(tables) == 1 else None)

    def find_set(self, table: TargetTable) -> None:
        """Before a statement that finds the rows of a set.

        The set is joined with a table whose statistics may be old. To find each row by the index is never far from the best plan.
        """
        self._find_by_index(True)
        self._become(table.role, table.name)

    def reset(self) -> None:
        """Return to the session's own role and settings."""
        self._find_by_index(False)
        self._become(None)

    def _become(self, role: str | None, table: TableName | None = None) -> None:
        if role != self._role:
            self._pipeline.send(set_role(role, table), None)
            self._role = role

    def _find_by_index(self, wanted: bool) -> None:
        if wanted != self._by_index:
            self._pipeline.send(_JOINS, None, [b"off" if wanted else None])
            self._by_index = wanted
