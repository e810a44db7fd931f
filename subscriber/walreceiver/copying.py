"""How a published table is read: in which parts, and with which COPY.

A large table is read in ranges of blocks (``ctid``) by several sessions under one exported snapshot; the last range has no upper end,
because the table may have grown since it was measured. A partitioned table that is published as its root is read partition by
partition. Both need a heap; ranges also a server that does not read the whole table for each (14, TID Range Scan). Partitions are read
directly only if the role may: reading through the root asks for privileges on the root alone.

Names and rows do not go together: whichever relation has the name when a statement is parsed is read, with its rows as of the snapshot.
So what was described by its oid may be another's rows by its name. A part is therefore checked by the transaction that reads it
(:func:`check_query`), once before, so that no row of another table is given to anybody, and once after, which is what counts: the
statement holds its lock on what it read until the transaction ends, and as long nobody renames that. Only a whole schema can be renamed
under it, which is why the lock is asked for, and not the name alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from subscriber.abc import CopyFormat, PublishedTable, TableName
from subscriber.protocol.quoting import quote_identifier, quote_literal
from subscriber.walreceiver.session import Session

__all__ = [
    "BlockRange",
    "CopyPart",
    "check_query",
    "copy_parts",
    "copy_query",
    "copy_ranges",
    "copy_source",
    "is_intact",
    "is_renamed",
    "is_rewritten",
    "is_whole",
]

_BLOCK = 8192
# of a relation c: the snapshot's place of it, and that of the moment
_STORED_ANEW = "c.relkind = 'r' AND c.relfilenode IS DISTINCT FROM pg_catalog.pg_relation_filenode(c.oid)"


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Blocks ``first`` up to, but not including, ``end``; None: to the end of the table."""

    first: int
    end: int | None


@dataclass(frozen=True, slots=True)
class CopyPart:
    """What one COPY reads.

    Attributes:
        relation: the table itself or a partition of it.
        relation_id: its oid; what has the name when it is read may be another.
        only: without its children.
        blocks: a range of it, or None for all.
    """

    relation: TableName
    relation_id: int
    only: bool
    blocks: BlockRange | None = None


def copy_ranges(size: int, range_size: int, block_size: int = _BLOCK) -> list[BlockRange | None]:
    """Divide a heap of ``size`` bytes into ranges of about ``range_size``; ``[None]`` if it is not larger than one."""
    if size <= range_size:
        return [None]
    blocks = max(range_size // block_size, 1)
    starts = range(0, -(-size // block_size), blocks)
    ranges: list[BlockRange | None] = [BlockRange(first, first + blocks) for first in starts[:-1]]
    return [*ranges, BlockRange(starts[-1], None)]


async def copy_parts(session: Session, table: PublishedTable, range_size: int) -> list[CopyPart]:
    """The parts that together are the table, none twice.

    Args:
        session: under the snapshot, or to the same server.
        table: as published.
        range_size: bytes a part should have at most.
    """
    whole = [CopyPart(table.name, table.relation_id, only=table.kind == "r")]
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


def check_query(part: CopyPart) -> str:
    """Asks the transaction that reads a part of which relation it is, in two columns; both have to be true once it was read.

    The first, whether the relation that has the name is the part's, counts before, too. It tells what is read from a view or a
    partitioned table that took the name and has the part's relation beneath, which is then locked as well. The lookup is by the catalog
    of the moment, as that of the statement that reads is; a SELECT of pg_class would be by the snapshot. And the relation has to be
    stored where it was: :func:`is_rewritten` does not hear of a partition that was detached since.

    The second is whether the relation is locked: a part's transaction locks nothing but what it reads. (LOCK TABLE by name would do no
    better, and ask for SELECT on all columns.)
    """
    return f"SELECT {_is_same(part)}, {_is_held(part)}"


def _is_same(part: CopyPart) -> str:
    stored_anew = f"SELECT FROM pg_catalog.pg_class AS c WHERE c.oid = {part.relation_id} AND {_STORED_ANEW}"
    return f"{_has_name(part.relation, part.relation_id)} AND NOT EXISTS ({stored_anew})"


def _is_held(part: CopyPart) -> str:
    held = f"locktype = 'relation' AND relation = {part.relation_id} AND pid = pg_catalog.pg_backend_pid() AND granted"
    return f"EXISTS (SELECT FROM pg_catalog.pg_locks WHERE {held})"


async def is_whole(session: Session, table: PublishedTable, part: CopyPart) -> bool:
    """Whether a table that was read as one part is of use: :func:`is_intact`, and neither :func:`is_renamed` nor :func:`is_rewritten`.

    Args:
        session: which has read it.
        table: as published, after the snapshot was taken.
        part: all of it.
    """
    query = f"SELECT {_is_same(part)} AND {_is_held(part)} AND NOT {_is_renamed(table)} AND NOT EXISTS ({_stored_anew(table)})"
    ((whole,),) = await session.execute(query)
    return whole == "t"


async def is_intact(session: Session, part: CopyPart, *, read: bool) -> bool:
    """Whether the name of a part's relation stands for that relation still, stored where it was; once read, whether that is what was.

    Args:
        session: which reads the part, in a transaction.
        part: which.
        read: whether it has done so.
    """
    ((same, locked),) = await session.execute(check_query(part))
    return same == "t" and (locked == "t" or not read)


async def is_renamed(session: Session, table: PublishedTable) -> bool:
    """Whether the table had another name as of the snapshot, or has one now: changes are sent by name, and those are then another's.

    So are those of a table that is newer than the snapshot: it may have had another name as its rows came.

    Args:
        session: under the snapshot, after the last part was read.
        table: as published, after the snapshot was taken.
    """
    ((renamed,),) = await session.execute(f"SELECT {_is_renamed(table)}")
    return renamed == "t"


def _is_renamed(table: PublishedTable) -> str:
    namespace, name = quote_literal(table.name.namespace), quote_literal(table.name.name)
    return f"""(
        NOT {_has_name(table.name, table.relation_id)} OR NOT EXISTS (
            SELECT FROM pg_catalog.pg_class AS c
              JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
             WHERE c.oid = {table.relation_id} AND n.nspname = {namespace} AND c.relname = {name}))
    """


def _has_name(name: TableName, relation_id: int) -> str:
    return f"COALESCE(pg_catalog.to_regclass({quote_literal(_quoted(name))})::pg_catalog.oid = {relation_id}, false)"


def _quoted(name: TableName) -> str:
    return f"{quote_identifier(name.namespace)}.{quote_identifier(name.name)}"


async def is_rewritten(session: Session, table: PublishedTable) -> bool:
    """Whether the table, or a partition of it, was stored anew since the snapshot: by VACUUM FULL, CLUSTER, ALTER TABLE, TRUNCATE.

    Rows then lie in other blocks, so that ranges read before and after do not fit together; and ALTER TABLE and TRUNCATE let a
    table seem empty to an older snapshot (manual, Caveats of MVCC). While a part is being read none of them can happen.

    Args:
        session: under the snapshot, after the last part was read.
        table: as published.
    """
    return bool(await session.execute(_stored_anew(table)))


def _stored_anew(table: PublishedTable) -> str:
    return f"""
        SELECT FROM pg_catalog.pg_class AS c
         WHERE (c.oid = {table.relation_id} OR c.oid IN (SELECT relid FROM pg_catalog.pg_partition_tree({table.relation_id})))
           AND {_STORED_ANEW}
    """  # noqa: S608


def copy_source(table: PublishedTable, part: CopyPart) -> str:
    """What a SELECT of a part's rows selects from: ``FROM … WHERE …``."""
    conditions = _conditions(table, part)
    where = f" WHERE {' AND '.join(f'({condition})' for condition in conditions)}" if conditions else ""
    return f"FROM {'ONLY ' if part.only else ''}{_quoted(part.relation)}{where}"


def _conditions(table: PublishedTable, part: CopyPart) -> list[str]:
    conditions = []
    if table.row_filters:
        conditions.append(" OR ".join(f"({expression})" for expression in table.row_filters))
    if part.blocks is not None:
        conditions.append(f"ctid >= '({part.blocks.first},0)'")
        if part.blocks.end is not None:
            conditions.append(f"ctid < '({part.blocks.end},0)'")
    return conditions


def copy_query(table: PublishedTable, part: CopyPart, copy_format: CopyFormat) -> str:
    """The COPY statement of a part, as native writes it: COPY of the table where that says it all, of a SELECT otherwise."""
    columns = ", ".join(quote_identifier(column) for column in table.columns)
    options = " WITH (FORMAT binary)" if copy_format is CopyFormat.BINARY else ""
    if part.only and not _conditions(table, part) and not table.generated:
        return f"COPY {_quoted(part.relation)}{f' ({columns})' if columns else ''} TO STDOUT{options}"
    return f"COPY (SELECT {columns} {copy_source(table, part)}) TO STDOUT{options}"
