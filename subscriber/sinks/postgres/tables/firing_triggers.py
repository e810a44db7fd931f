"""Triggers of the target that fire for the rows which a reconciliation deletes and writes.

Those are ENABLE REPLICA or ENABLE ALWAYS, and not the ones of foreign keys. A row that is only updated is deleted and stored again, so they
would see a deletion that the publisher has not made.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from subscriber.errors import RelationError
from subscriber.interfaces import TableName
from subscriber.sinks.postgres.tables.relation_mapping import TargetTable

__all__ = ["firing_trigger"]

# a trigger of a partition that was made for one of the partitioned table is internal in old versions
_FIRING: Final = """
WITH RECURSIVE tree(oid) AS (
    SELECT %s::int8::oid
  UNION ALL
    SELECT h.inhrelid FROM tree AS t JOIN pg_catalog.pg_inherits AS h ON h.inhparent = t.oid
      JOIN pg_catalog.pg_class AS c ON c.oid = h.inhrelid AND c.relispartition
)
SELECT n.nspname::text, c.relname::text, g.tgname::text, pg_catalog.format('%%I', g.tgname),
       pg_catalog.format('ALTER TABLE %%I.%%I', n.nspname, c.relname), CASE g.tgenabled WHEN 'R' THEN 'REPLICA' ELSE 'ALWAYS' END
  FROM tree AS t JOIN pg_catalog.pg_class AS c ON c.oid = t.oid JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
  JOIN pg_catalog.pg_trigger AS g ON g.tgrelid = c.oid
 WHERE g.tgenabled IN ('R', 'A') AND (NOT g.tgisinternal OR g.tgconstraint = 0)
 ORDER BY 1, 2, 3 LIMIT 1
"""


async def firing_trigger(fetch: Callable[..., Awaitable[Sequence[Sequence[Any]]]], table: TargetTable) -> RelationError | None:
    """Return the error for the first such trigger of a table or of one of its partitions; None: it has none.

    Args:
        fetch: runs a query.
        table: the table.

    Raises:
        TargetError: or a subclass.
    """
    for namespace, relation, trigger, quoted, alter, enabled in await fetch(_FIRING, table.oid):
        return RelationError(
            f'trigger "{trigger}" of table "{TableName(namespace, relation)}" fires for the rows that are deleted and written while table'
            f' "{table.name}" is reconciled',
            sqlstate="55000",
            hint=f"{alter} DISABLE TRIGGER {quoted}; afterwards {alter} ENABLE {enabled} TRIGGER {quoted}",
        )
    return None
