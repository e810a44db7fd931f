"""Tables that have got or lost columns while they are followed.

The publisher sends a new column with the rows that are changed, but not what ADD COLUMN or RENAME COLUMN gave to the other rows. The lake
would have NULL there. So the subscriber stops before it lands the first change with other columns than the table's copy had, and asks the
publisher's catalog (``schema_gap``). If earlier rows have NULL, the table continues. Otherwise ``on_schema_gap`` says what is done:

* ``copy``: the table is copied again. It is in no snapshot until then.
* ``park``: the applier stops the table.
* ``null``: nothing is asked.

A column that was dropped and added again under its name between two changes is not noticed.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Final

from subscriber.errors import MissingColumns, RelationError
from subscriber.interfaces import TableEntry, TableName, TableState, TwoPhaseState
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Relation
from subscriber.sinks.spark.catalog.lake import Lake, LakeState, with_table, with_tables, without_table
from subscriber.sinks.spark.files.location import OnSchemaGap

__all__ = ["SchemaGaps"]

_log = logging.getLogger(__name__)

_HINT: Final = "on_schema_gap in the target's URL says what is done"


class SchemaGaps:
    """Finds the tables whose columns have changed, and decides what becomes of them. Belongs to an open stream."""

    def __init__(self, lake: Lake, policy: OnSchemaGap) -> None:
        self._lake = lake
        self._policy = policy
        self._now: dict[TableName, tuple[tuple[str, int], ...]] = {}
        self._copied: set[MissingColumns] = set()

    def table_id(self, relation: Relation) -> int | None:
        """The number of the table of a relation whose changes are landed. None: it is not of the subscription.

        Raises:
            RelationError: with ``missing_columns``: the relation has other columns than the table.
        """
        name = TableName(relation.namespace, relation.name)
        table = self._lake.state.tables.get(name)
        if table is None:
            return None
        now = tuple((column.name, column.type_oid) for column in relation.columns)
        if self._policy != "null" and table.columns and dict(now).keys() != dict(table.columns).keys():
            self._now[name] = now
            known = dict(table.columns)
            new = tuple((column.name, column.type_oid, column.type_modifier) for column in relation.columns if column.name not in known)
            error = RelationError(f'table "{name}" has other columns than its copy', hint=_HINT)
            error.missing_columns = MissingColumns(relation.relation_id, name.namespace, name.name, new, table.columns)
            raise error
        return table.id

    def copies_again(self, missing: MissingColumns, gap: str | None) -> bool:
        """Whether a table is copied again. ``gap``: see :meth:`subscriber.interfaces.SchemaGapSink.take_columns`."""
        if gap is None or self._policy != "copy" or self._lake.state.two_phase is TwoPhaseState.ENABLED:
            return False
        if missing in self._copied:
            return False  # its copy has not these columns either
        self._copied.add(missing)
        _log.warning('table "%s.%s" is copied again: %s', missing.namespace, missing.name, gap)
        return True

    def changed(self, state: LakeState, missing: MissingColumns, gap: str | None, position: Lsn, *, again: bool) -> LakeState:
        """The catalog, in which the table has its present columns, or waits to be copied again from the position on."""
        name = TableName(missing.namespace, missing.name)
        if again:
            return with_table(without_table(state, name, position), name, TableEntry(TableState.INIT), position)
        table = replace(state.tables[name], columns=self._now[name])
        if gap is not None:
            table = replace(table, gap=f'earlier rows of table "{name}" lack values: {gap}')
        return with_tables(state, {name: table})
