"""The remote relations, and how each maps to its target table.

The target table is read when a relation is first needed. It is read again if a Relation message changes the relation, and after an error or
an ALTER TABLE (:meth:`RelationMap.forget_targets`).
"""

from __future__ import annotations

from typing import Final

from subscriber.abc import CATALOG_SCHEMA, TableName, TableState
from subscriber.errors import RelationError
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Relation
from subscriber.sinks.described_relations import DescribedRelations
from subscriber.sinks.postgres.session.catalog_reader import CatalogReader
from subscriber.sinks.postgres.tables.relation_mapping import STREAM_HINT, RelationMapping, map_relation
from subscriber.sinks.postgres.tables.table_reader import read_table, require_table

__all__ = ["RelationMap"]

_OF_SUBSCRIPTION: Final = """
SELECT srsubstate::text AS state, srsublsn::text AS lsn
FROM subscriber.pg_subscription_rel WHERE srsubid = $1::int8::oid AND srrelid = $2::int8::oid
"""


class RelationMap(DescribedRelations):
    """Remote relations by id, and their mappings.

    Args:
        reader: reads the target's catalogs.
        as_owner: changes are made as the tables' owners.
        subscription: oid of the subscription; only its tables are changed. None in a table's own synchronization, where only the gate
            decides.
    """

    def __init__(self, reader: CatalogReader, *, as_owner: bool, subscription: int | None) -> None:
        super().__init__()
        self._reader = reader
        self._as_owner = as_owner
        self._subscription = subscription
        self._mappings: dict[int, RelationMapping] = {}
        self._passed_over: set[int] = set()

    def adopt(self, other: RelationMap) -> None:
        """Define the relations of another map that differ: they were described after those of this one."""
        for relation in other.remembered().values():
            self.define(relation)

    def forget_targets(self) -> None:
        """Read the target's tables again when they are needed next."""
        self._mappings.clear()
        self._passed_over.clear()

    def begin(self) -> None:
        """Before a transaction of the target: a table that was passed over may have another name, or be of the subscription, now."""
        self._passed_over.clear()

    def _forget_target(self, relation_id: int) -> None:
        self._mappings.pop(relation_id, None)
        self._passed_over.discard(relation_id)

    async def mapping(self, relation: Relation) -> RelationMapping:
        """The relation with its target.

        Raises:
            RelationError: the relation does not fit the target table.
            TargetUnavailable: the connection was lost.
        """
        found = self._mappings.get(relation.relation_id)
        if found is None:
            name = TableName(relation.namespace, relation.name)
            found = map_relation(relation, await read_table(self._reader, name, as_owner=self._as_owner, hint=STREAM_HINT))
            self._mappings[relation.relation_id] = found
        return found

    async def is_wanted(self, relation: Relation, final_lsn: Lsn, *, by_name: bool | None) -> bool:
        """Whether the apply worker applies the changes of this relation.

        The caller of the sink identifies tables by name; the catalog identifies them by oid, as PostgreSQL's does. So a table that was
        renamed on both sides is still replicated. A new table with the name of a subscribed one is an error: natively its changes are left
        out, and would be lost if the old one gets its name back.

        Args:
            relation: the publisher's relation.
            final_lsn: final LSN of the transaction.
            by_name: the gate's answer for the name. None: the target need not have the table.

        Raises:
            RelationError: the target has no such table, or another one of that name. As in PostgreSQL, it must exist even if its changes
                are left out. Only the publisher knows whether it was renamed, so that changes would be lost, or dropped.
            TargetUnavailable: the connection was lost.
        """
        if by_name is None:
            return False
        # a table's own synchronization receives the changes of all tables; the gate lets only its own table through
        if self._subscription is None or relation.namespace == CATALOG_SCHEMA:
            return by_name
        relation_id = relation.relation_id
        if by_name and relation_id in self._mappings:
            return True
        if not by_name and relation_id in self._passed_over:
            return False
        name = TableName(relation.namespace, relation.name)
        try:
            oid = await require_table(self._reader, name)
        except RelationError as error:
            error.missing = relation_id, str(name)
            raise
        rows = await self._reader.fetch(_OF_SUBSCRIPTION, self._subscription, oid)
        state, lsn = (rows[0]["state"], rows[0]["lsn"]) if rows else (None, None)
        if state == TableState.READY or (state == TableState.SYNCDONE and (lsn is None or Lsn.parse(lsn) <= final_lsn)):
            return True
        if state is None and by_name:
            raise RelationError(
                f'table "{name}" of the target was replaced by another one, which is not part of the subscription',
                hint="give the old table its name back; or start the run again (or `subscriber alter NAME --refresh`):"
                " that adds the new table and copies it",
                sqlstate="55000",
            )
        if state is None:
            self._passed_over.add(relation_id)
        return False
