"""Tables whose columns have changed while they are followed.

The publisher sends a new column with the rows that are changed, but not what ADD COLUMN, RENAME COLUMN or ALTER COLUMN … TYPE gave to the
other rows. The lake would have NULL there, or the value from before. So the subscriber stops before it lands the first change with other
columns than the table's copy had. Of new columns, it asks the publisher's catalog (``schema_gap``); of new types, ``type_changes.py``
knows whether the values are the same. If earlier rows are as on the publisher, the table continues. Otherwise ``on_schema_gap`` says what
is done:

* ``copy``: the table is copied again. It is in no snapshot until then.
* ``park``: the applier stops the table.
* ``null``: nothing is asked, unless rows are identified by all their columns, and so could not be found: then as ``copy``.

A column that was dropped and added again under its name between two changes is not noticed. Nor is any change of a table that was not
copied: what its copy would have had is not known.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Final

from subscriber.errors import MissingColumns, RelationError
from subscriber.interfaces import TableName, TwoPhaseState
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Relation
from subscriber.sinks.spark.catalog.lake import Lake, LakeState, copied_again, with_tables
from subscriber.sinks.spark.files.location import OnSchemaGap
from subscriber.sinks.spark.schema.type_changes import keeps_texts

__all__ = ["SchemaGaps"]

_log = logging.getLogger(__name__)

_HINT: Final = "on_schema_gap in the target's URL says what is done"


class SchemaGaps:
    """Finds the tables whose columns have changed, and decides what becomes of them. Belongs to an open stream."""

    def __init__(self, lake: Lake, policy: OnSchemaGap) -> None:
        self._lake = lake
        self._policy = policy
        self._columns: dict[TableName, tuple[tuple[str, int, int], ...]] = {}  # that they have now
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
        columns, known = tuple((column.name, column.type_oid, column.type_modifier) for column in relation.columns), table.columns
        if known and {*columns} != {*known} and (self._policy != "null" or relation.replica_identity == "f"):
            self._columns[name] = columns
            names = {column[0] for column in known}
            error = RelationError(f'table "{name}" has other columns than its copy', hint=_HINT)
            error.missing_columns = MissingColumns(
                relation.relation_id,
                name.namespace,
                name.name,
                tuple(column for column in columns if column[0] not in names),
                tuple(column[:2] for column in known),
                tuple(column for column in columns if column[0] in names and column not in known),
            )
            raise error
        return table.id

    def gap(self, missing: MissingColumns) -> str | None:
        """Why earlier rows may have other values than the publisher's in columns whose types have changed. None: they have the same."""
        table = self._lake.state.tables[TableName(missing.namespace, missing.name)]
        declared = {name: (oid, modifier) for name, oid, modifier in table.columns}
        for name, oid, modifier in missing.retyped:
            if not keeps_texts(*declared[name], oid, modifier):
                return f'the type of column "{name}" has changed, and the values that earlier rows got are not sent'
        return None

    def copies_again(self, missing: MissingColumns, gap: str | None) -> bool:
        """Whether a table is copied again. ``gap``: why earlier rows lack values. None: they lack none."""
        if gap is None or self._policy == "park" or self._lake.state.two_phase is TwoPhaseState.ENABLED:
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
            return copied_again(state, [name], position)
        table = replace(state.tables[name], columns=self._columns[name])
        if gap is not None:
            table = replace(table, gap=f'earlier rows of table "{name}" lack values: {gap}')
        return with_tables(state, {name: table})
