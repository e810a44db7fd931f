"""Find the table because of which the target rejected the end of a transaction: constraints that were deferred are checked there."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from subscriber.interfaces import TableName
from subscriber.sinks.postgres.session.apply_session import ApplySession
from subscriber.sinks.postgres.session.postgres_errors import Diagnostics

__all__ = ["FOREIGN_KEY_VIOLATION", "find_violating"]

FOREIGN_KEY_VIOLATION: Final = "23503"

# both tables of the foreign key, the referencing one first, each with those that it is a partition of
_TABLES: Final = """
SELECT n.nspname::text, c.relname::text
FROM pg_catalog.pg_constraint k
JOIN pg_catalog.pg_class r ON r.oid = k.conrelid JOIN pg_catalog.pg_namespace rn ON rn.oid = r.relnamespace
CROSS JOIN LATERAL (VALUES (1, k.conrelid), (2, k.confrelid)) AS side(place, oid)
CROSS JOIN LATERAL (
    SELECT a.relid::pg_catalog.oid AS oid FROM pg_catalog.pg_partition_ancestors(side.oid) AS a UNION SELECT side.oid
) AS tree
JOIN pg_catalog.pg_class c ON c.oid = tree.oid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE k.contype::text = 'f' AND k.conname = %s AND r.relname = %s AND rn.nspname = %s
ORDER BY side.place
"""


async def find_violating(session: ApplySession, diagnostics: Diagnostics, changed: Collection[TableName]) -> TableName | None:
    """Return the table whose changes violate a foreign key; None: not known.

    The report names the referencing table, also if the transaction deleted a row that is referenced.

    Args:
        session: usable.
        diagnostics: the report.
        changed: the tables that the transaction changed.

    Raises:
        TargetUnavailable
    """
    relation = diagnostics.relation
    if relation is None:
        return None
    tables = await session.fetch(_TABLES, diagnostics.constraint, relation.name, relation.namespace)
    return next((table for row in tables if (table := TableName(*row)) in changed), None)
