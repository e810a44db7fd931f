"""The triggers of the target that fire for changes that are applied: ENABLE REPLICA or ENABLE ALWAYS, and not those of foreign keys."""

# names are quoted, values are parameters

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from subscriber.catalog.store import FiringTrigger
from subscriber.interfaces import TableName
from subscriber.sinks.postgres.session.catalog_reader import Execute

__all__ = ["first_firing"]

# a trigger of a partition that was made for one of the partitioned table is internal in old versions
_FIRING: Final = """
WITH RECURSIVE tree(oid) AS (
    SELECT c.oid FROM ROWS FROM (pg_catalog.unnest({}::text[]::name[]), pg_catalog.unnest({}::text[]::name[])) AS wanted(nspname, relname)
      JOIN pg_catalog.pg_namespace n ON n.nspname = wanted.nspname
      JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = wanted.relname
  UNION ALL
    SELECT h.inhrelid FROM tree AS t JOIN pg_catalog.pg_inherits AS h ON h.inhparent = t.oid
      JOIN pg_catalog.pg_class AS c ON c.oid = h.inhrelid AND c.relispartition
)
SELECT n.nspname::text, c.relname::text, g.tgname::text, pg_catalog.quote_ident(g.tgname),
       'ALTER TABLE ' || pg_catalog.quote_ident(n.nspname) || '.' || pg_catalog.quote_ident(c.relname),
       CASE g.tgenabled WHEN 'R' THEN 'REPLICA' ELSE 'ALWAYS' END
  FROM tree AS t JOIN pg_catalog.pg_class AS c ON c.oid = t.oid JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
  JOIN pg_catalog.pg_trigger AS g ON g.tgrelid = c.oid
 WHERE g.tgenabled IN ('R', 'A') AND (NOT g.tgisinternal OR g.tgconstraint = 0)
 ORDER BY 1, 2, 3 LIMIT 1
"""


async def first_firing(execute: Execute, tables: Sequence[TableName], placeholder: Callable[[int], str]) -> FiringTrigger | None:
    """Return the first trigger of these tables or their partitions.

    Args:
        execute: runs a query.
        tables: their names.
        placeholder: returns the placeholder of the parameter with this number.

    Raises:
        TargetError: or a subclass.
    """
    query = _FIRING.format(placeholder(1), placeholder(2))
    names = [each.namespace for each in tables], [each.name for each in tables]
    for namespace, name, trigger, quoted, alter, enabled in await execute(query, *names):
        enable = f"{alter} ENABLE {enabled} TRIGGER {quoted}"
        return FiringTrigger(TableName(namespace, name), trigger, f"{alter} DISABLE TRIGGER {quoted}", enable)
    return None
