"""Foreign keys that refer to tables whose rows are not moved: they are created NOT VALID, or not at all.

A partitioned table is moved if all its partitions are. A table of an extension is never left out: CREATE EXTENSION fills it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from subscriber.interfaces import TableName
from subscriber.protocol.quoting import quote_literal
from subscriber.schema.archive import Entry
from subscriber.walreceiver.session import Session

__all__ = ["LeftOutKeys", "adapt_keys", "left_out_keys"]

LeftOutKeys = Literal["not-valid", "skip"]

_PARTITIONED_SINCE: Final = 18
"""NOT VALID for a foreign key of a partitioned table."""
_FIND: Final = """
WITH published AS (
    SELECT gpt.relid FROM pg_catalog.pg_publication AS p CROSS JOIN LATERAL pg_catalog.pg_get_publication_tables(p.pubname) AS gpt
     WHERE p.pubname IN ({publications})
), moved AS MATERIALIZED (
    SELECT relid FROM published
    UNION SELECT tree.relid FROM published CROSS JOIN LATERAL pg_catalog.pg_partition_tree(published.relid) AS tree
    UNION SELECT d.objid FROM pg_catalog.pg_depend AS d WHERE d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.deptype = 'e'
), leaf AS MATERIALIZED (
    SELECT c.oid AS root, c.oid AS relid FROM pg_catalog.pg_class AS c WHERE c.relkind = 'r'
    UNION ALL
    SELECT c.oid, tree.relid FROM pg_catalog.pg_class AS c CROSS JOIN LATERAL pg_catalog.pg_partition_tree(c.oid) AS tree
     WHERE c.relkind = 'p' AND tree.isleaf
)
SELECT n.nspname, c.relname, k.conname, rn.nspname, r.relname, c.relkind = 'p'
  FROM pg_catalog.pg_constraint AS k
  JOIN pg_catalog.pg_class AS c ON c.oid = k.conrelid JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
  JOIN pg_catalog.pg_class AS r ON r.oid = k.confrelid JOIN pg_catalog.pg_namespace AS rn ON rn.oid = r.relnamespace
 WHERE k.contype = 'f' AND k.conparentid = 0
   AND EXISTS (SELECT FROM leaf WHERE leaf.root = c.oid AND leaf.relid IN (SELECT relid FROM moved))
   AND EXISTS (SELECT FROM leaf WHERE leaf.root = r.oid AND leaf.relid NOT IN (SELECT relid FROM moved))
 ORDER BY 1, 2, 3
"""


@dataclass(frozen=True, slots=True)
class _Key:
    table: TableName
    name: str
    refers_to: TableName
    partitioned: bool


async def left_out_keys(session: Session, publications: Sequence[str]) -> Mapping[tuple[str, str], _Key]:
    """Find the foreign keys of moved tables that refer to a table of which rows are not moved.

    Args:
        session: with the publisher.
        publications: their tables are moved.

    Returns:
        The keys, by schema and name of their entry in the archive.

    Raises:
        PublisherError: or a subclass.
    """
    if not publications:
        return {}
    rows = await session.execute(_FIND.format(publications=", ".join(map(quote_literal, publications))))
    return {
        (schema or "", f"{table} {name}"): _Key(
            TableName(schema or "", table or ""), name or "", TableName(other or "", refers_to or ""), partitioned == "t"
        )
        for schema, table, name, other, refers_to, partitioned in rows
    }


def adapt_keys(
    entries: Sequence[Entry], found: Mapping[tuple[str, str], _Key], how: LeftOutKeys, version: int
) -> tuple[list[Entry], list[str]]:
    """Change or remove the entries of these keys.

    Args:
        entries: of the archive.
        found: the keys.
        how: what is done with them.
        version: the target's major version.

    Returns:
        The entries, and a line for each key.
    """
    kept, lines = list[Entry](), list[str]()
    for entry in entries:
        key = found.get((entry.schema, entry.name)) if entry.type == "FK CONSTRAINT" else None
        if key is None:
            kept.append(entry)
            continue
        skipped = how == "skip" or (key.partitioned and version < _PARTITIONED_SINCE)
        lines.append(
            f'foreign key "{key.name}" of table "{key.table}" refers to "{key.refers_to}", whose rows are not moved:'
            f" it is {'left out' if skipped else 'created NOT VALID'}"
        )
        if not skipped:
            sql = entry.sql.rstrip().removesuffix(";")
            kept.append(replace(entry, sql=f"{sql.removesuffix(' NOT VALID')} NOT VALID;"))
    return kept, lines
