"""The sizes of tables on the publisher, for estimates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from subscriber.interfaces import TableName
from subscriber.walreceiver.session import Session

__all__ = ["TableSize", "table_sizes"]

# of a partitioned table, the sum of its partitions; rows are unknown until one ANALYZE or VACUUM
_SIZES: Final = """
SELECT n.nspname, c.relname, pg_catalog.sum(pg_catalog.pg_table_size(leaf.oid)), pg_catalog.sum(pg_catalog.pg_indexes_size(leaf.oid)),
       CASE WHEN pg_catalog.bool_and(leaf.reltuples > 0 OR pg_catalog.pg_relation_size(leaf.oid) = 0)
            THEN pg_catalog.sum(greatest(leaf.reltuples, 0))::int8 END,
       pg_catalog.has_table_privilege(c.oid, 'SELECT') AND pg_catalog.has_schema_privilege(n.oid, 'USAGE')
  FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
 CROSS JOIN LATERAL (
    SELECT c.oid AS relid WHERE c.relkind <> 'p'
    UNION ALL SELECT tree.relid FROM pg_catalog.pg_partition_tree(c.oid) AS tree WHERE c.relkind = 'p' AND tree.isleaf) AS own
  JOIN pg_catalog.pg_class AS leaf ON leaf.oid = own.relid
 WHERE c.oid IN ({oids})
 GROUP BY c.oid, n.oid, n.nspname, c.relname
 ORDER BY 3 DESC, 1, 2
"""


@dataclass(frozen=True, slots=True)
class TableSize:
    """A table.

    Attributes:
        bytes: with its TOAST table, without its indexes.
        index_bytes: of its indexes.
        rows: about; None: unknown.
        readable: whether the role may read it.
    """

    bytes: int
    index_bytes: int
    rows: int | None
    readable: bool


async def table_sizes(session: Session, oids: str) -> Mapping[TableName, TableSize]:
    """Return the sizes, the largest first.

    Args:
        session: with the publisher.
        oids: oids in SQL, or a query of them.

    Raises:
        PublisherError: or a subclass.
    """
    return {
        TableName(namespace or "", name or ""): TableSize(
            int(float(size or 0)), int(float(indexes or 0)), None if rows is None else int(rows), readable == "t"
        )
        for namespace, name, size, indexes, rows, readable in await session.execute(_SIZES.format(oids=oids))
    }
