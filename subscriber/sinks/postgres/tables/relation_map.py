"""The remote relations, and how each maps to its target table.

The target table is read when a relation is first needed, together with the tables of the other changes that are applied next
(:meth:`RelationMap.expect`): one table takes almost as long as hundreds. It is read again if a Relation message changes the relation, and
after an error or an ALTER TABLE (:meth:`RelationMap.forget_targets`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from subscriber.config import ConflictRules
from subscriber.errors import ProtocolError, RelationError
from subscriber.interfaces import CATALOG_SCHEMA, ColumnPlanner, TableName, TableState
from subscriber.protocol.decoder import decode
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Relation, Tag
from subscriber.sinks.described_relations import DescribedRelations
from subscriber.sinks.postgres.session.catalog_reader import CatalogQueries, CatalogReader
from subscriber.sinks.postgres.tables.conflict_log import ConflictLog
from subscriber.sinks.postgres.tables.relation_mapping import (
    STREAM_HINT,
    RelationMapping,
    Resolving,
    TargetTable,
    map_relation,
    qualified_name,
)
from subscriber.sinks.postgres.tables.table_reader import read_table, read_tables, require_table
from subscriber.sinks.postgres.tables.unique_indexes import UNIQUE_INDEXES, unique_indexes
from subscriber.transaction.model import Transaction
from subscriber.transaction.relations import changed_relations

__all__ = ["RelationMap"]

_OF_SUBSCRIPTION: Final = """
SELECT srrelid::int8 AS oid, srsubstate::text AS state, srsublsn::text AS lsn
FROM subscriber.pg_subscription_rel WHERE srsubid = $1::int8::oid AND srrelid = ANY ($2::oid[])
"""

_AHEAD: Final = 1000
"""In so many of the transactions that are applied next, tables are looked for."""

_HORIZON: Final = """
SELECT srsyncxid AS xid FROM subscriber.pg_subscription_rel
WHERE srsubid = $1::int8::oid AND srrelid = $2::int8::oid AND srsyncxid IS NOT NULL
"""


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A table that was read before its first change, and its row of the subscription's tables, if it has one."""

    table: TargetTable
    state: str | None
    lsn: str | None


class RelationMap(DescribedRelations):
    """Remote relations by id, and their mappings.

    Args:
        reader: reads the target's catalogs.
        as_owner: changes are made as the tables' owners.
        subscription: oid of the subscription; only its tables are changed. None in a table's own synchronization, where only the gate
            decides, and all rows count as the subscription's own.
        rules: what to do about conflicts.
        log: the table in which they are logged, if there is one.

    Attributes:
        rules, log: the same.
        planner: says which columns to change, if they follow the publisher's.
    """

    def __init__(
        self, reader: CatalogReader, *, as_owner: bool, subscription: int | None, rules: ConflictRules, log: ConflictLog | None = None
    ) -> None:
        super().__init__()
        self.rules = rules
        self.log = log
        self._reader = reader
        self._as_owner = as_owner
        self._subscription = subscription
        self.planner: ColumnPlanner | None = None
        self._mappings: dict[int, RelationMapping] = {}
        self._passed_over: set[int] = set()
        self._expected: Sequence[Transaction] = ()
        self._ahead: dict[TableName, _Ahead] | None = None

    @property
    def subscription(self) -> int | None:
        """Oid of the subscription, if the map is that of its apply worker."""
        return self._subscription

    @property
    def owner(self) -> str | None:
        """See :attr:`CatalogReader.owner`."""
        return self._reader.owner

    @property
    def as_owner(self) -> bool:
        """Whether changes are made as the tables' owners."""
        return self._as_owner

    def follow(self, planner: ColumnPlanner) -> None:
        """Let the columns of the target follow the publisher's."""
        self.planner, self.follows = planner, True

    def expect(self, transactions: Sequence[Transaction]) -> None:
        """Name the transactions that are applied next. The first table that was not read yet is read with all tables that they change."""
        self._expected, self._ahead = transactions, None

    async def _read_ahead(self, name: TableName) -> _Ahead | None:
        if self._ahead is None:
            self._ahead = await self._read(self._expected)
        return self._ahead.get(name)

    async def _read(self, transactions: Sequence[Transaction]) -> dict[TableName, _Ahead]:
        transactions = transactions[:_AHEAD]
        described = {**self._remote, **{each.relation_id: each for transaction in transactions for each in _described(transaction)}}
        ids = {each for transaction in transactions for each in changed_relations(transaction) or ()} - self._mappings.keys()
        names = {TableName(described[each].namespace, described[each].name) for each in ids & described.keys()}
        if len(names) < 2:
            return {}
        tables = await read_tables(self._reader, names, as_owner=self._as_owner)
        rows = []
        if self._subscription is not None:
            rows = await self._reader.fetch(_OF_SUBSCRIPTION, self._subscription, [table.oid for table in tables.values()])
        known = {row["oid"]: (row["state"], row["lsn"]) for row in rows}
        return {name: _Ahead(table, *known.get(table.oid, (None, None))) for name, table in tables.items()}

    def adopt(self, other: RelationMap) -> None:
        """Define the relations of another map that differ: they were described after those of this one."""
        for relation in other.remembered().values():
            self.define(relation)

    def forget_targets(self) -> None:
        """Read the target's tables again when they are needed next."""
        self._mappings.clear()
        self._passed_over.clear()
        self._ahead = None

    def begin(self) -> None:
        """Before a transaction of the target: a table that was passed over may have another name, or be of the subscription, now."""
        self._passed_over.clear()

    def _forget_target(self, relation_id: int) -> None:
        self._mappings.pop(relation_id, None)
        self._passed_over.discard(relation_id)

    def is_mapped(self, relation_id: int) -> bool:
        """Whether the mapping of a relation is known."""
        return relation_id in self._mappings

    def mapped(self, relation_id: int) -> RelationMapping | None:
        """The mapping of a relation, if it is known."""
        return self._mappings.get(relation_id)

    async def map_to(self, relation: Relation, table: TargetTable, reader: CatalogQueries) -> RelationMapping:
        """Map the relation to its table, which was read just now. ``reader``: sees the table as it is now.

        Raises:
            RelationError: the relation does not fit the target table.
            TargetUnavailable: the connection was lost.
        """
        found = self._mappings[relation.relation_id] = await self._resolving(map_relation(relation, table), reader)
        return found

    def forget_tree(self, tree: int) -> set[int]:
        """Forget the tables of a tree of partitions. Returns the ids of their relations."""
        found = {relation_id for relation_id, mapping in self._mappings.items() if mapping.table.tree == tree}
        for relation_id in found:
            self._forget_target(relation_id)
        return found

    async def mapping(self, relation: Relation, reader: CatalogQueries) -> RelationMapping:
        """The relation with its target.

        Args:
            relation: the relation.
            reader: the session that changes the table. ``pg_get_indexdef`` locks the table, and would wait for ever for a TRUNCATE of it.

        Raises:
            RelationError: the relation does not fit the target table.
            TargetUnavailable: the connection was lost.
        """
        found = self._mappings.get(relation.relation_id)
        if found is None:
            name = TableName(relation.namespace, relation.name)
            ahead = await self._read_ahead(name)
            table = ahead.table if ahead else await read_table(self._reader, name, as_owner=self._as_owner, hint=STREAM_HINT)
            try:
                found = self._mappings[relation.relation_id] = await self._resolving(map_relation(relation, table), reader)
            except RelationError:
                # the table may be altered before the next attempt
                self._ahead = None
                raise
        return found

    async def _resolving(self, mapping: RelationMapping, reader: CatalogQueries) -> RelationMapping:
        """Add what conflicts of the table are resolved by, unless all its rules are the default."""
        rules = self.rules.of(mapping.remote.namespace, mapping.remote.name)
        rules = rules if self._subscription is not None else rules.without_origins()
        log = self.log
        if not rules.changed and log is None:
            return mapping
        table, horizon = mapping.table, None
        rows = await reader.fetch(UNIQUE_INDEXES.format("$1"), qualified_name(table.name))
        if rules.by_origin or log is not None:
            found = await reader.fetch(_HORIZON, self._subscription, table.oid)
            horizon = found[0]["xid"] if found else None
        indexes = unique_indexes([tuple(row.values()) for row in rows], table)
        return replace(mapping, resolving=Resolving(rules, indexes, horizon, log is not None, log is not None and log.rows))

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
        if by_name:
            ahead = await self._read_ahead(name)
            if ahead is not None and _is_synchronized(ahead.state, ahead.lsn, final_lsn):
                return True
        try:
            oid = await require_table(self._reader, name)
        except RelationError as error:
            error.missing = relation_id, str(name)
            raise
        rows = await self._reader.fetch(_OF_SUBSCRIPTION, self._subscription, [oid])
        state, lsn = (rows[0]["state"], rows[0]["lsn"]) if rows else (None, None)
        if _is_synchronized(state, lsn, final_lsn):
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


def _described(transaction: Transaction) -> Iterator[Relation]:
    """The relations that a transaction describes, without those in the spool. A damaged message is reported when it is applied."""
    for record in transaction.records:
        if record[0] == Tag.RELATION:
            with contextlib.suppress(ProtocolError):
                message = decode(record, in_stream=transaction.prefixed)
                if isinstance(message, Relation):
                    yield message


def _is_synchronized(state: str | None, lsn: str | None, final_lsn: Lsn) -> bool:
    """Whether the apply worker applies the changes of a table that are committed at an LSN."""
    return state == TableState.READY or (state == TableState.SYNCDONE and (lsn is None or Lsn.parse(lsn) <= final_lsn))
