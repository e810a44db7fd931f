"""Find rows of published tables that are larger than the memory budget.

Such rows are stored in a TOAST table, so tables with a small one are skipped. Of the others, a sample of the blocks is read. The stored
size of a value is found without reading the value. A compressed value is larger in memory.

Source: PostgreSQL manual, TOAST; TABLESAMPLE; Database Object Management Functions (pg_column_size).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from subscriber.interfaces import Finding, PublishedTable
from subscriber.protocol.quoting import quote_identifier
from subscriber.walreceiver.session import Session

__all__ = ["find_large_rows"]

_BLOCKS: Final = 1000
"""Number of blocks to read per table."""
_MEGABYTE: Final = 1024**2


async def find_large_rows(session: Session, tables: Sequence[PublishedTable], budget: int) -> list[Finding]:
    """Return a warning for each table that has a row of more than ``budget`` bytes in the sample.

    Args:
        session: to the publisher.
        tables: published tables. Those that the role may not read are skipped.
        budget: in bytes.

    Raises:
        PublisherError: the publisher refused to answer.
    """
    findings = []
    for table, blocks in await _candidates(session, tables, budget):
        largest = await _largest(session, table, blocks)
        if largest > budget:
            message = (
                f"table {table.name} has rows of {largest // _MEGABYTE} MB and more, logical_decoding_work_mem is {budget // _MEGABYTE} MB"
            )
            hint = "allow the process several times the largest row as memory: docs/reference/limits.md has the figures"
            findings.append(Finding("warning", message, hint, table.name))
    return findings


async def _candidates(session: Session, tables: Sequence[PublishedTable], budget: int) -> list[tuple[PublishedTable, int]]:
    """Return the tables whose TOAST tables are larger than the budget, each with its number of blocks."""
    known = {table.relation_id: table for table in tables if table.columns}
    if not known:
        return []
    rows = await session.execute(f"""
        SELECT c.oid, pg_catalog.sum(pg_catalog.pg_relation_size(leaf.oid)) / pg_catalog.current_setting('block_size')::pg_catalog.int8
          FROM pg_catalog.pg_class AS c
         CROSS JOIN LATERAL (
            SELECT c.oid AS relid WHERE c.relkind <> 'p'
            UNION ALL
            SELECT tree.relid FROM pg_catalog.pg_partition_tree(c.oid) AS tree WHERE c.relkind = 'p' AND tree.isleaf) AS own
          JOIN pg_catalog.pg_class AS leaf ON leaf.oid = own.relid
         WHERE c.oid IN ({", ".join(map(str, known))}) AND pg_catalog.has_table_privilege(c.oid, 'SELECT')
           AND pg_catalog.has_schema_privilege(c.relnamespace, 'USAGE')
         GROUP BY c.oid
        HAVING pg_catalog.max(CASE WHEN leaf.reltoastrelid <> 0 THEN pg_catalog.pg_relation_size(leaf.reltoastrelid) ELSE 0 END) > {budget}
    """)  # noqa: S608 (numbers of ours)
    return [(known[int(oid or 0)], int(float(blocks or 0))) for oid, blocks in rows]


async def _largest(session: Session, table: PublishedTable, blocks: int) -> int:
    """Return the size of the largest row in the sample, in bytes."""
    size = " + ".join(
        f"COALESCE(pg_catalog.pg_column_size({quote_identifier(column)}), 0)::pg_catalog.int8" for column in table.publisher_columns
    )
    name = table.publisher_name.quoted
    only = "" if table.kind == "p" else "ONLY "
    percent = min(100.0, 100.0 * _BLOCKS / max(blocks, 1))
    # int8, because the sum of several values may be larger than 2 GB
    ((largest,),) = await session.execute(
        f"SELECT pg_catalog.max({size}) FROM {only}{name} TABLESAMPLE SYSTEM ({percent:.6f})"  # noqa: S608 (quoted)
    )
    return int(largest or 0)
