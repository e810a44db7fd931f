"""Which remote relation has which columns, and how each maps to the target.

What outlives a transaction: Relation messages count from where they come. The target's side is read when a relation is first needed, again
after each Relation message for it, and again after an error or an ALTER TABLE (:meth:`RelationMap.forget_targets`).
"""

from __future__ import annotations

import logging
from typing import Final

from subscriber.abc import CATALOG_SCHEMA, TableName, TableState
from subscriber.errors import ProtocolError
from subscriber.protocol.decoder import decode
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Relation, Tag
from subscriber.sinks.postgres.reading import CatalogReader
from subscriber.sinks.postgres.relation import RelationMapping, map_relation
from subscriber.sinks.postgres.table_reader import read_table, require_table
from subscriber.transaction.model import Transaction

__all__ = ["RelationMap"]

_log = logging.getLogger(__name__)

_RELATION: Final = bytes([Tag.RELATION])

_OF_SUBSCRIPTION: Final = """
SELECT srsubstate::text AS state, srsublsn::text AS lsn
FROM subscriber.pg_subscription_rel WHERE srsubid = $1::int8::oid AND srrelid = $2::int8::oid
"""


class RelationMap:
    """Remote relations by id, and the mappings made of them.

    Args:
        reader: reads the target's catalogs.
        as_owner: changes are made as the tables' owners.
        subscription: oid of the subscription whose tables alone may be changed, or None while a table's own synchronization, which holds
            the table's oid itself, follows.
    """

    def __init__(self, reader: CatalogReader, *, as_owner: bool, subscription: int | None) -> None:
        self._reader = reader
        self._as_owner = as_owner
        self._subscription = subscription
        self._remote: dict[int, Relation] = {}
        self._mappings: dict[int, RelationMapping] = {}
        self._passed_over: set[tuple[int, bool]] = set()

    @property
    def has_targets(self) -> bool:
        """Whether any target table was read, and may be stale."""
        return bool(self._mappings or self._passed_over)

    def remembered(self) -> dict[int, Relation]:
        """The relations as known now, for :meth:`restore`."""
        return dict(self._remote)

    def restore(self, remembered: dict[int, Relation]) -> None:
        """Go back to what was known before transactions that did not become durable."""
        self._remote = dict(remembered)
        self.forget_targets()

    def adopt(self, other: RelationMap) -> None:
        """What another one knows was described, last of all."""
        for relation in other.remembered().values():
            self.define(relation)

    def forget_targets(self) -> None:
        """Read the target's tables again when they are needed next."""
        self._mappings.clear()
        self._passed_over.clear()

    def define(self, relation: Relation) -> None:
        """A Relation message came."""
        self._remote[relation.relation_id] = relation
        self._mappings.pop(relation.relation_id, None)
        self._passed_over -= {(relation.relation_id, True), (relation.relation_id, False)}

    async def learn(self, transaction: Transaction) -> None:
        """Read what a transaction describes, and nothing else of it: the publisher will not describe it again.

        Raises:
            ProtocolError: a Relation message that is none.
            SpoolError: its spilled part cannot be read.
        """
        async for chunk in transaction.chunks():
            for record in chunk:
                if record[:1] == _RELATION and isinstance(message := decode(record, in_stream=transaction.prefixed), Relation):
                    self.define(message)

    def remote(self, relation_id: int) -> Relation:
        """What the publisher said of a relation.

        Raises:
            ProtocolError: nothing.
        """
        try:
            return self._remote[relation_id]
        except KeyError:
            raise ProtocolError(f"no relation map entry for remote relation ID {relation_id}") from None

    async def mapping(self, relation: Relation) -> RelationMapping:
        """The relation with its target.

        Raises:
            RelationError: they do not fit.
            TargetUnavailable: the connection was lost.
        """
        found = self._mappings.get(relation.relation_id)
        if found is None:
            name = TableName(relation.namespace, relation.name)
            found = map_relation(relation, await read_table(self._reader, name, as_owner=self._as_owner))
            self._mappings[relation.relation_id] = found
        return found

    async def is_wanted(self, relation: Relation, final_lsn: Lsn, *, by_name: bool) -> bool:
        """Whether changes of this relation are for the apply worker.

        The rooms above know tables by name, and the catalog by oid, as native's does. So a table that was renamed on both sides is
        followed, and one that took the place of a subscribed one is not.

        Args:
            relation: the publisher's.
            final_lsn: of the transaction.
            by_name: what those rooms say.

        Raises:
            RelationError: there is no such table, which native demands of those too that are passed over.
            TargetUnavailable: the connection was lost.
        """
        # a table's own synchronization gets the changes of all other tables too, and they are none of its business
        if self._subscription is None or relation.namespace == CATALOG_SCHEMA:
            return by_name
        relation_id = relation.relation_id
        if by_name and relation_id in self._mappings:
            return True
        if (relation_id, by_name) in self._passed_over:
            return False
        name = TableName(relation.namespace, relation.name)
        rows = await self._reader.fetch(_OF_SUBSCRIPTION, self._subscription, await require_table(self._reader, name))
        state, lsn = (rows[0]["state"], rows[0]["lsn"]) if rows else (None, None)
        if state == TableState.READY or (state == TableState.SYNCDONE and (lsn is None or Lsn.parse(lsn) <= final_lsn)):
            return True
        if state is None:
            if by_name:
                _log.warning(
                    'table "%s" of the target was replaced by another one, which is not of the subscription: its changes are left out'
                    " (hint: refresh the subscription, or start the run again: the new table is added and copied)",
                    name,
                )
            self._passed_over.add((relation_id, by_name))
        return False
