"""Read from the target what is needed to know the rows of a table by its keys: see :mod:`subscriber.sinks.postgres.parallel.keys`.

A table is not followed, so that its transactions are applied alone, if the order of changes of different tables could be seen
(:attr:`TargetTable.watched`), or if rules resolve its conflicts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from subscriber.sinks.postgres.parallel.keys import FollowedTable, UniqueKey
from subscriber.sinks.postgres.session.catalog_reader import CatalogReader
from subscriber.sinks.postgres.tables.relation_mapping import RelationMapping

__all__ = ["FollowedTables"]

_MOST_KNOWN: Final = 1000
_NUMERIC: Final = 1700
_EXACT: Final = frozenset({16, 17, 20, 21, 23, 25, 26, 1043, 1082, 1114, 1184, 2950, _NUMERIC})
"""Types of which the publisher sends equal values as equal bytes, or numeric."""

# exact: of the operator classes of PostgreSQL, over columns. The table's indexes, and those of its partitions.
# to_jsonb: a column that PostgreSQL 15 added
_UNIQUE: Final = """
WITH RECURSIVE tree(root, oid) AS (
    SELECT root, root FROM pg_catalog.unnest($1::oid[]) AS root
  UNION ALL
    SELECT t.root, h.inhrelid FROM tree AS t JOIN pg_catalog.pg_inherits AS h ON h.inhparent = t.oid
    JOIN pg_catalog.pg_class AS c ON c.oid = h.inhrelid AND c.relispartition
)
SELECT DISTINCT t.root::int8 AS relid,
       ARRAY(SELECT a.attname::text FROM pg_catalog.unnest(i.indkey::int2[]) WITH ORDINALITY AS u(number, place)
             JOIN pg_catalog.pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = u.number
             WHERE u.place <= i.indnkeyatts ORDER BY u.place) AS columns,
       i.indexprs IS NULL AND NOT i.indisexclusion AND i.indisready AND m.amname = 'btree'
       AND NOT EXISTS (SELECT FROM pg_catalog.pg_opclass AS k
                       WHERE k.oid = ANY (i.indclass::oid[]) AND k.opcnamespace <> 'pg_catalog'::pg_catalog.regnamespace)
       AND NOT EXISTS (SELECT FROM pg_catalog.pg_collation AS l WHERE l.oid = ANY (i.indcollation::oid[]) AND NOT l.collisdeterministic)
           AS exact,
       coalesce((pg_catalog.to_jsonb(i) ->> 'indnullsnotdistinct')::bool, false) AS nulls_equal
FROM tree AS t
JOIN pg_catalog.pg_index AS i ON i.indrelid = t.oid AND (i.indisunique OR i.indisexclusion)
JOIN pg_catalog.pg_class AS c ON c.oid = i.indexrelid
JOIN pg_catalog.pg_am AS m ON m.oid = c.relam
"""
_DEFAULTS: Final = """
SELECT a.attrelid::int8 AS relid, a.attname::text AS name FROM pg_catalog.pg_attribute AS a
JOIN pg_catalog.pg_type AS t ON t.oid = a.atttypid
WHERE a.attrelid = ANY ($1::oid[]) AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
  AND (a.atthasdef OR a.attidentity <> '' OR t.typdefaultbin IS NOT NULL)
"""


class FollowedTables:
    """The tables whose rows are known by their keys.

    Args:
        reader: reads the target's catalogs.
    """

    def __init__(self, reader: CatalogReader) -> None:
        self._reader = reader
        self._known: dict[RelationMapping, FollowedTable | None] = {}

    async def read(self, mappings: Collection[RelationMapping]) -> Mapping[int, FollowedTable]:
        """The tables of these relations that are followed, by relation id.

        Raises:
            TargetUnavailable, TargetError
        """
        if len(self._known) > _MOST_KNOWN + len(mappings):
            # most belong to tables that were read again since
            self._known.clear()
        if new := [mapping for mapping in mappings if mapping not in self._known]:
            await self._learn(new)
        found = {mapping.remote.relation_id: self._known[mapping] for mapping in mappings}
        return {relation_id: table for relation_id, table in found.items() if table is not None}

    async def _learn(self, mappings: Sequence[RelationMapping]) -> None:
        followed = [mapping for mapping in mappings if not mapping.table.watched and mapping.resolving is None]
        self._known |= dict.fromkeys(mappings)
        if not followed:
            return
        oids = [mapping.table.oid for mapping in followed]
        indexes: dict[int, list[dict[str, Any]]] = {}
        for row in await self._reader.fetch(_UNIQUE, oids):
            indexes.setdefault(row["relid"], []).append(row)
        defaults: dict[int, set[str]] = {}
        for row in await self._reader.fetch(_DEFAULTS, oids):
            defaults.setdefault(row["relid"], set()).add(row["name"])
        for mapping in followed:
            oid = mapping.table.oid
            self._known[mapping] = _followed(mapping, indexes.get(oid, ()), defaults.get(oid, set()))


def _followed(mapping: RelationMapping, indexes: Sequence[dict[str, Any]], defaults: set[str]) -> FollowedTable:
    sent = {column.name for column in mapping.columns}
    keys = [_unique_key(mapping, index) for index in indexes]
    known = tuple(key for key in keys if key is not None)
    return FollowedTable(
        mapping.remote,
        mapping.table.tree,
        known if len(known) == len(keys) else None,
        finds_one=mapping.unique_key is not None,
        inserts_alone=not defaults <= sent,
    )


def _unique_key(mapping: RelationMapping, index: dict[str, Any]) -> UniqueKey | None:
    """The key of a unique index; None: its values are not known from what the publisher sends."""
    places = {column.name: place for place, column in enumerate(mapping.columns)}
    if not index["exact"] or not index["columns"] or not places.keys() >= set(index["columns"]):
        return None
    columns = tuple(places[name] for name in index["columns"])
    for place in columns:
        remote, column = mapping.remote.columns[place], mapping.columns[place]
        if column.type_oid not in _EXACT or (remote.type_oid, remote.type_modifier) != (column.type_oid, column.modifier):
            return None
    numeric = tuple(mapping.columns[place].type_oid == _NUMERIC for place in columns)
    return UniqueKey(tuple(index["columns"]), columns, numeric, nulls_differ=not index["nulls_equal"])
