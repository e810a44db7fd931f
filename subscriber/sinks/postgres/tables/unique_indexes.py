"""The unique indexes of a table that PostgreSQL checks at once, for the rules of conflicts and for their reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from subscriber.protocol.quoting import quote_identifier
from subscriber.sinks.postgres.tables.relation_mapping import TargetTable, UniqueIndex

__all__ = ["UNIQUE_INDEXES", "unique_indexes"]

# Only immediate unique indexes, as in PostgreSQL, and none WITHOUT OVERLAPS: its rows conflict if they overlap. A key is a column or an
# expression, compared with the operator of the index.
UNIQUE_INDEXES: Final = """
SELECT ic.relname::text AS name, pg_catalog.pg_get_expr(i.indpred, i.indrelid) AS predicate,
       ARRAY(SELECT pg_catalog.pg_get_indexdef(i.indexrelid, k, false)
             FROM pg_catalog.generate_series(1, i.indnkeyatts) AS k ORDER BY k) AS keys,
       ARRAY(SELECT 'OPERATOR(' || pg_catalog.quote_ident(n.nspname) || '.' || op.oprname || ')'
             FROM pg_catalog.generate_series(1, i.indnkeyatts) AS k
             JOIN pg_catalog.pg_opclass AS oc ON oc.oid = i.indclass[k - 1]
             JOIN pg_catalog.pg_amop AS m ON m.amopfamily = oc.opcfamily AND m.amopstrategy = 3
                  AND m.amoplefttype = oc.opcintype AND m.amoprighttype = oc.opcintype
             JOIN pg_catalog.pg_operator AS op ON op.oid = m.amopopr
             JOIN pg_catalog.pg_namespace AS n ON n.oid = op.oprnamespace ORDER BY k) AS operators
FROM pg_catalog.pg_index AS i JOIN pg_catalog.pg_class AS ic ON ic.oid = i.indexrelid
WHERE i.indrelid = pg_catalog.to_regclass({}) AND i.indisunique AND NOT i.indisexclusion AND i.indimmediate AND i.indisready
ORDER BY ic.oid
"""
"""The unique indexes of a table; the placeholder is that of its name."""


def unique_indexes(rows: Iterable[Sequence[Any]], table: TargetTable) -> tuple[UniqueIndex, ...]:
    """Read the rows of :data:`UNIQUE_INDEXES`. The index of the table's key comes first: its row is the one that a rule changes."""
    key = {quote_identifier(name) for name, _ in table.key}
    found = [UniqueIndex(name, predicate, tuple(keys), tuple(operators)) for name, predicate, keys, operators in rows]
    return tuple(sorted(found, key=lambda index: {*map(_quoted, index.keys)} != key))


def _quoted(expression: str) -> str:
    return expression if expression.startswith('"') else quote_identifier(expression)
