"""How a published table is copied: its parts, and the COPY statement of each.

A large table is read in ranges of blocks (``ctid``) by several sessions under one exported snapshot. The last range has no upper end,
because the table may have grown since it was measured. A partitioned table that is published as its root is read partition by
partition. Both need a heap. Ranges also need TID Range Scan (14); without it each range would read the whole table. Partitions are only
read directly if the role may read them: a query of the root needs privileges on the root alone.

A name can move to another table while tables are copied. A statement reads the relation that has the name when it is parsed, with its
rows as of the snapshot. So a name may give the rows of a table other than the one that was described by oid. Therefore the transaction
that reads a part checks the relation (``CopyPart.check_query``): once before, so that no row of another table is passed on, once after.
The second check is decisive. The statement locks what it reads until the transaction ends, and no locked table can be renamed. Only
its schema can be renamed, which is why the check looks for the lock and not only for the name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from subscriber.interfaces import CopyFormat, PublishedTable, TableName
from subscriber.interfaces.conditions import EVERY_ROW, SETTING
from subscriber.interfaces.copy_parts import STORED_ANEW, BlockRange, CopyPart, has_name
from subscriber.protocol.quoting import quote_identifier, quote_literal
from subscriber.walreceiver.session import Session

__all__ = [
    "BlockRange",
    "CopyPart",
    "copy_parts",
    "copy_query",
    "copy_ranges",
    "is_intact",
    "is_renamed",
    "is_rewritten",
    "is_whole",
    "lock_query",
    "whole_table",
]

_BLOCK = 8192


def copy_ranges(size: int, range_size: int, block_size: int = _BLOCK) -> list[BlockRange | None]:
    """Divide a heap of ``size`` bytes into ranges of about ``range_size``. A heap that fits into one range gives ``[None]``."""
    if size <= range_size:
        return [None]
    blocks = max(range_size // block_size, 1)
    starts = range(0, -(-size // block_size), blocks)
    ranges: list[BlockRange | None] = [BlockRange(first, first + blocks) for first in starts[:-1]]
    return [*ranges, BlockRange(starts[-1], None)]


def whole_table(table: PublishedTable) -> CopyPart:
    """Return the only part of a table that is not divided."""
    return CopyPart(table.publisher_name, table.relation_id, only=table.kind == "r")


async def copy_parts(session: Session, table: PublishedTable, range_size: int) -> list[CopyPart]:
    """Return the parts of the table. Together they are the whole table, and they do not overlap.

    Args:
        session: under the snapshot, or to the same server.
        table: as published.
        range_size: maximum size of a part in bytes.
    """
    whole = [whole_table(table)]
    if table.size <= range_size:
        return whole
    rows = await session.execute(f"""
        SELECT c.oid, n.nspname, c.relname, pg_catalog.pg_relation_size(c.oid), pg_catalog.current_setting('block_size'),
               am.amname IS NOT DISTINCT FROM 'heap' AND c.relkind = 'r' AND (c.oid = {table.relation_id}
                   OR (pg_catalog.has_table_privilege(c.oid, 'SELECT') AND pg_catalog.has_schema_privilege(n.oid, 'USAGE')))
          FROM pg_catalog.pg_class AS c
          JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
          LEFT JOIN pg_catalog.pg_am AS am ON am.oid = c.relam
         WHERE c.oid IN (SELECT {table.relation_id} WHERE {"true" if table.kind == "r" else "false"}
                         UNION ALL
                         SELECT relid FROM pg_catalog.pg_partition_tree({table.relation_id}) WHERE isleaf)
         ORDER BY n.nspname, c.relname
    """)  # noqa: S608
    if not rows or any(direct != "t" for *_, direct in rows):
        return whole
    parts: list[CopyPart] = []
    for oid, namespace, name, size, block_size, _ in rows:
        ranges: Sequence[BlockRange | None] = [None]
        if session.capabilities.tid_range_scan:
            ranges = copy_ranges(int(size or 0), range_size, int(block_size or _BLOCK))
        relation = TableName(namespace or "", name or "")
        parts += [CopyPart(relation, int(oid or 0), only=True, blocks=blocks) for blocks in ranges]
    return parts


async def is_whole(session: Session, table: PublishedTable, part: CopyPart) -> bool:
    """Whether a table that was read as one part is valid: :func:`is_intact`, and neither :func:`is_renamed` nor :func:`is_rewritten`.

    Args:
        session: the session that has read it.
        table: as published, after the snapshot was taken.
        part: the whole table.
    """
    query = f"SELECT {part.is_same()} AND {part.is_held()} AND NOT {_is_renamed(table)} AND NOT EXISTS ({_stored_anew(table)})"
    ((whole,),) = await session.execute(query)
    return whole == "t"


async def is_intact(session: Session, part: CopyPart, *, read: bool) -> bool:
    """Whether the part's name still belongs to its relation, with the same file; after reading, whether that relation was read.

    Args:
        session: the session that reads the part, in a transaction.
        part: the part.
        read: whether it has been read.
    """
    ((same, locked),) = await session.execute(part.check_query())
    return same == "t" and (locked == "t" or not read)


async def is_renamed(session: Session, table: PublishedTable) -> bool:
    """Whether the table had another name as of the snapshot, or has one now. Changes are sent by name: they would go to another table.

    True also for a table that is newer than the snapshot, because its first rows may have been written under another name.

    Args:
        session: under the snapshot, after the last part was read.
        table: as published, after the snapshot was taken.
    """
    ((renamed,),) = await session.execute(f"SELECT {_is_renamed(table)}")
    return renamed == "t"


def _is_renamed(table: PublishedTable) -> str:
    own = table.publisher_name
    namespace, name = quote_literal(own.namespace), quote_literal(own.name)
    return f"""(
        NOT {has_name(own, table.relation_id)} OR NOT EXISTS (
            SELECT FROM pg_catalog.pg_class AS c
              JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
             WHERE c.oid = {table.relation_id} AND n.nspname = {namespace} AND c.relname = {name}))
    """


async def is_rewritten(session: Session, table: PublishedTable) -> bool:
    """Whether VACUUM FULL, CLUSTER, ALTER TABLE or TRUNCATE rewrote the table, or a partition of it, since the snapshot.

    Its rows are then in other blocks, so that ranges read before and after do not fit together. Also, after ALTER TABLE or TRUNCATE
    the table may seem empty to an older snapshot (manual, Caveats of MVCC). None of these can happen while a part is being read.

    Args:
        session: under the snapshot, after the last part was read.
        table: as published.
    """
    return bool(await session.execute(_stored_anew(table)))


def _stored_anew(table: PublishedTable) -> str:
    return f"""
        SELECT FROM pg_catalog.pg_class AS c
         WHERE (c.oid = {table.relation_id} OR c.oid IN (SELECT relid FROM pg_catalog.pg_partition_tree({table.relation_id})))
           AND {STORED_ANEW}
    """  # noqa: S608


def lock_query(table: PublishedTable) -> str:
    """Return a query that reads no row. Until the transaction ends, the table cannot be rewritten, renamed or dropped."""
    only = "ONLY " if table.kind == "r" else ""
    return f"SELECT FROM {only}{table.publisher_name.quoted} LIMIT 0"


def copy_query(table: PublishedTable, part: CopyPart, copy_format: CopyFormat) -> str:
    """Return the COPY statement of a part, as PostgreSQL writes it: COPY of the table where possible, else of a SELECT."""
    columns = ", ".join(quote_identifier(column) for column in table.publisher_columns)
    options = " WITH (FORMAT binary)" if copy_format is CopyFormat.BINARY else ""
    if part.only and not part.conditions(table.row_filters) and not table.generated:
        return f"COPY {part.relation.quoted}{f' ({columns})' if columns else ''} TO STDOUT{options}"
    source = part.source(table.row_filters)
    if table.renamed and (condition := part.condition.sql(SETTING)):
        # it has the target's names of columns
        named = ", ".join(f"{quote_identifier(own)} AS {quote_identifier(name)}" for name, own in table.renamed.items())
        columns = ", ".join(quote_identifier(column) for column in table.columns)
        source = f"FROM (SELECT {named} {replace(part, condition=EVERY_ROW).source(table.row_filters)}) AS named WHERE {condition}"
    return f"COPY (SELECT {columns} {source}) TO STDOUT{options}"
