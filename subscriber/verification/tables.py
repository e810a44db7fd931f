"""How a table is compared: the columns of both sides, and the ranges into which it is divided.

A table with a key is divided into ranges of the key's first column, if its rows lie in about that order (``pg_stats.correlation``): then
each range reads its own blocks only. The bounds are those of ``pg_stats.histogram_bounds``, so that no row is read to find them. A table
without statistics is divided between the least and the greatest key, if that is an integer.

Other tables are read once, in ranges of blocks. The blocks of both sides hold different rows. So each range gives a checksum for each
value of some bits of the rows' hashes, and the sums over all ranges are compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from subscriber.interfaces import PublishedTable, Query, TableName
from subscriber.protocol.quoting import quote_identifier, quote_literal
from subscriber.verification.parts import WHOLE, Part
from subscriber.verification.row_sql import ColumnSql, TableSql, column_sql, stored_sql

__all__ = [
    "Blocks",
    "KeyRanges",
    "Pair",
    "SideTable",
    "block_ranges",
    "bucket_mask",
    "describe",
    "divide",
    "expected_rows",
    "key_ranges",
    "may_have_ranges",
    "own_columns",
    "pair",
    "row_key",
    "was_rewritten_query",
]

_DESCRIBE: Final = """
WITH RECURSIVE given AS MATERIALIZED (
    SELECT c.oid, n.nspname, c.relname, c.relkind, c.relam
      FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace WHERE (n.nspname, c.relname) IN ({names})
), base(relid, attnum, typ) AS (
    SELECT a.attrelid, a.attnum, a.atttypid FROM pg_catalog.pg_attribute AS a JOIN given ON a.attrelid = given.oid
     WHERE a.attnum > 0 AND NOT a.attisdropped
  UNION ALL
    SELECT base.relid, base.attnum, t.typbasetype FROM base JOIN pg_catalog.pg_type AS t ON t.oid = base.typ WHERE t.typtype = 'd'
), columns AS (
    SELECT base.relid, pg_catalog.json_agg(pg_catalog.json_build_array(a.attname,
               CASE WHEN n.nspname = 'pg_catalog' THEN t.typname::text ELSE n.nspname || '.' || t.typname END,
               a.atttypmod, a.attnotnull))::text AS described
      FROM base JOIN pg_catalog.pg_attribute AS a ON a.attrelid = base.relid AND a.attnum = base.attnum
      JOIN pg_catalog.pg_type AS t ON t.oid = base.typ AND t.typtype <> 'd'
      JOIN pg_catalog.pg_namespace AS n ON n.oid = t.typnamespace
     GROUP BY base.relid
)
SELECT given.nspname::text, given.relname::text, given.relkind::text, pg_catalog.pg_relation_size(given.oid)::text,
       pg_catalog.current_setting('block_size'), (am.amname = 'heap')::text,
       (pg_catalog.current_setting('server_version_num')::int >= 140000)::text, pg_catalog.getdatabaseencoding()::text,
       zone.reset_val, columns.described
  FROM given LEFT JOIN pg_catalog.pg_am AS am ON am.oid = given.relam LEFT JOIN columns ON columns.relid = given.oid
 CROSS JOIN (SELECT reset_val FROM pg_catalog.pg_settings WHERE name = 'TimeZone') AS zone
"""
_SOME: Final = 500
_STATISTICS: Final = """
SELECT correlation::text, pg_catalog.array_to_json(histogram_bounds::text::text[])::text
  FROM pg_catalog.pg_stats
 WHERE schemaname = {namespace} AND tablename = {name} AND attname = {column} ORDER BY inherited DESC LIMIT 1
"""
# relfilenode is that of the snapshot, pg_relation_filenode() the current one
_WAS_REWRITTEN: Final = """
WITH RECURSIVE tree AS (
    SELECT c.oid FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
     WHERE n.nspname = {namespace} AND c.relname = {name}
  UNION ALL
    SELECT i.inhrelid FROM tree JOIN pg_catalog.pg_inherits AS i ON i.inhparent = tree.oid
)
SELECT EXISTS (
    SELECT FROM tree JOIN pg_catalog.pg_class AS c ON c.oid = tree.oid
     WHERE c.relkind = 'r' AND c.relfilenode IS DISTINCT FROM pg_catalog.pg_relation_filenode(c.oid))::text
"""
_ORDERED: Final = frozenset({"int2", "int4", "int8", "numeric", "date", "timestamp", "timestamptz", "uuid"})
_INTEGERS: Final = frozenset({"int2", "int4", "int8"})
_TEXTS: Final = frozenset({"text", "varchar"})
_CORRELATED: Final = 0.9
_RANGE_ROWS: Final = 50_000
"""A range of the key has at least about so many rows."""
_ROW_BYTES: Final = 64
"""A row of a table without statistics."""
_MOST_RANGES: Final = 10_000
_LEAST_BLOCKS: Final = 32 * 1024**2
_MOST_BLOCKS: Final = 512 * 1024**2
_BUCKETS: Final = 4096
_BUCKET_ROWS: Final = 200


def was_rewritten_query(table: TableName) -> str:
    """Query whether TRUNCATE, VACUUM FULL or ALTER TABLE rewrote a table, or a partition of it, since the snapshot.

    Its rows may then be invisible to the snapshot (manual, Caveats of MVCC). Also true if it does not exist any more.
    """
    return _WAS_REWRITTEN.format(namespace=quote_literal(table.namespace), name=quote_literal(table.name))


@dataclass(frozen=True, slots=True)
class SideTable:
    """A table of one side.

    Attributes:
        kind: ``pg_class.relkind``.
        size: bytes of its heap.
        block_size: of the server.
        is_heap: whether it is an ordinary table of PostgreSQL's own kind.
        by_blocks: whether ranges of its blocks can be read.
        encoding: of the database.
        time_zone: in which a session reads a time without zone, unless it sets another one.
        columns: base type, type modifier and NOT NULL of each column.
    """

    kind: str
    size: int
    block_size: int
    is_heap: bool
    by_blocks: bool
    encoding: str
    time_zone: str
    columns: Mapping[str, tuple[str, int, bool]]


async def describe(query: Query, tables: Sequence[TableName]) -> dict[TableName, SideTable]:
    """Read the descriptions of tables from the catalog of their server. Those that do not exist are missing.

    Raises:
        SubscriberError: the server rejected the query, or the session was lost.
    """
    found: dict[TableName, SideTable] = {}
    for begin in range(0, len(tables), _SOME):
        names = ", ".join(f"({quote_literal(each.namespace)}, {quote_literal(each.name)})" for each in tables[begin : begin + _SOME])
        for namespace, name, kind, size, block_size, is_heap, by_blocks, encoding, time_zone, columns in await query(
            _DESCRIBE.format(names=names)
        ):
            found[TableName(namespace or "", name or "")] = SideTable(
                kind or "",
                int(size or 0),
                int(block_size or 8192),
                is_heap == "true" and kind == "r",
                is_heap == by_blocks == "true" and kind == "r",
                encoding or "",
                time_zone or "UTC",
                {column: (base, modifier, not_null) for column, base, modifier, not_null in json.loads(columns or "[]")},
            )
    return found


@dataclass(frozen=True, slots=True)
class Pair:
    """One table on both sides.

    Attributes:
        publisher, target: their SQL.
        rows: the estimated number of rows.
        here, there: the descriptions of both sides.
        same_keys: the target stores each key of the publisher with the same text, so that the text names the row on both sides.
    """

    publisher: TableSql
    target: TableSql
    rows: int
    here: SideTable
    there: SideTable
    same_keys: bool

    @property
    def ordered(self) -> str | None:
        """The first column of the key, if both sides sort it in the same way."""
        bases = self._bases
        return self.publisher.key[0] if bases and (bases <= _INTEGERS or (len(bases) == 1 and bases <= _ORDERED)) else None

    @property
    def bound_type(self) -> str:
        """The type of the bounds of its ranges, in pg_catalog."""
        return "int8" if self._bases <= _INTEGERS else min(self._bases)

    @property
    def _bases(self) -> set[str]:
        return {side.columns[name][0] for side in (self.here, self.there) for name in self.publisher.key[:1]}


def may_have_ranges(published: PublishedTable) -> bool:
    """Whether :func:`divide` may divide a table into several ranges of its key, as far as its description tells."""
    return bool(row_key(published)) and expected_rows(published) > _RANGE_ROWS


def expected_rows(published: PublishedTable) -> int:
    """The estimated number of rows; without statistics, from the table's size."""
    return published.size // _ROW_BYTES if published.estimated_rows is None else published.estimated_rows


def row_key(published: PublishedTable) -> tuple[str, ...]:
    """The columns that identify a row on the publisher: those of the primary key or of the replica identity index; else none."""
    if published.primary_key:
        return published.primary_key
    return published.key_columns if published.replica_identity != "f" else ()


def pair(published: PublishedTable, here: SideTable, there: SideTable) -> Pair | str:
    """Plan the comparison of one table. A text says why it cannot be compared.

    Args:
        published: the table as published.
        here: the description of the publisher.
        there: that of the target.
    """
    lacking = [name for name in published.columns if name not in there.columns]
    if lacking:
        return f"the target has no column {', '.join(lacking)}"
    here_columns = own_columns(published, here)
    own: list[ColumnSql] = []
    other: list[ColumnSql] = []
    for name in published.columns:
        (base, modifier, not_null), (its_base, its_modifier, its_not_null) = here_columns[name], there.columns[name]
        null, same = not (not_null and its_not_null), modifier == its_modifier
        if (stored := stored_sql(name, base, its_base, null=null, time_zone=there.time_zone)) is not None:
            own.append(stored[0])
            other.append(stored[1])
            continue
        for columns, kind, others in ((own, base, its_base), (other, its_base, base)):
            columns.append(column_sql(name, kind, others, null=null, same_modifier=same))
    key = row_key(published)
    if any(here_columns[name][0] in {"text", "varchar"} and there.columns[name][0] == "bpchar" for name in key):
        # the target has no trailing blanks, which tell keys of the publisher apart
        key = ()
    fast = here.encoding == there.encoding
    return Pair(
        TableSql(published.publisher_name, here.kind == "r", tuple(own), key, published.row_filters, fast, published.renamed),
        TableSql(published.name, there.kind == "r", tuple(other), key, (), fast),
        expected_rows(published),
        replace(here, columns=here_columns),
        there,
        all(_stores_text(here_columns[name], there.columns[name]) for name in key),
    )


def own_columns(published: PublishedTable, here: SideTable) -> Mapping[str, tuple[str, int, bool]]:
    """The columns of the publisher's description, by the target's names."""
    return {name: here.columns[own] for name, own in zip(published.columns, published.publisher_columns, strict=True)}


def _stores_text(own: tuple[str, int, bool], other: tuple[str, int, bool]) -> bool:
    """Whether the text of a value is the same after it was stored in the other column."""
    (base, modifier, _), (its_base, its_modifier, _) = own, other
    if base == its_base:
        # a smaller precision would round it
        return modifier == its_modifier or base in _TEXTS
    return (base in _INTEGERS and its_base in _INTEGERS) or (base in _INTEGERS | _TEXTS | {"uuid"} and its_base in _TEXTS)


@dataclass(frozen=True, slots=True)
class KeyRanges:
    """Ranges of the key's first column, the same on both sides; or the whole table."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Ranges of the blocks of each side, and the bits of the hash by which the rows are compared."""

    publisher: tuple[Part, ...]
    target: tuple[Part, ...]
    mask: int


async def divide(query: Query, planned: Pair, jobs: int) -> KeyRanges | Blocks:
    """Divide a table.

    Args:
        query: a session with the publisher.
        planned: the table.
        jobs: sessions on each side.

    Raises:
        SubscriberError: the server rejected the query, or the session was lost.
    """
    ranges = await key_ranges(query, planned.publisher, planned.ordered, planned.bound_type, planned.rows)
    return ranges or Blocks(block_ranges(planned.here, jobs), block_ranges(planned.there, jobs), bucket_mask(planned.rows))


def bucket_mask(rows: int) -> int:
    """The bits of the hash by which so many rows are compared at once."""
    return min(_BUCKETS, 1 << (rows // _BUCKET_ROWS).bit_length()) - 1


async def key_ranges(
    query: Query, table: TableSql, column: str | None, type_name: str, rows: int, *, any_order: bool = False
) -> KeyRanges | None:
    """Divide a table by the first column of its key.

    Args:
        query: a session with the publisher.
        table: the table there.
        column: the column, by the target's name; None: it has none that both sides sort in the same way.
        type_name: of the bounds: a type of pg_catalog.
        rows: the estimated number of rows.
        any_order: also if the rows are not in the order of the key. Then a range is read through an index.

    Returns:
        The ranges; None: the table is large, and its rows are not in the order of the key.
    """
    if rows <= _RANGE_ROWS:
        return KeyRanges((WHOLE if column is None else Part(column, type=type_name),))
    bounds: Sequence[str] | None = ()
    if column is not None:
        own = table.renamed.get(column, column)
        bounds = await _bounds(query, table.table, own, rows, 0.0 if any_order else _CORRELATED)
        if bounds is None and type_name == "int8":
            bounds = await _even_bounds(query, table.table, own, rows)
    return KeyRanges(tuple(Part(column, low, high, type_name) for low, high in pairwise([None, *bounds, None]))) if bounds else None


async def _bounds(query: Query, name: TableName, column: str, estimated: int, correlated: float) -> Sequence[str] | None:
    """The bounds of ranges from the statistics; None: there are none."""
    rows = await query(
        _STATISTICS.format(namespace=quote_literal(name.namespace), name=quote_literal(name.name), column=quote_literal(column))
    )
    for correlation, histogram in rows:
        if histogram is None or correlation is None or abs(float(correlation)) < correlated:
            return ()
        bounds = list(dict.fromkeys(json.loads(histogram)))
        step = max(-(-_RANGE_ROWS * len(bounds) // max(estimated, 1)), 1)
        return bounds[step::step] if len(bounds) > step else ()
    return None


async def _even_bounds(query: Query, name: TableName, column: str, estimated: int) -> Sequence[str]:
    """Without statistics: ranges of the same width, between the ends of the index."""
    quoted = quote_identifier(column)
    relation = name.quoted
    ((low, high),) = await query(f"SELECT min({quoted})::text, max({quoted})::text FROM {relation}")  # noqa: S608
    if low is None or high is None:
        return ()
    width = max((int(high) - int(low)) // min(-(-estimated // _RANGE_ROWS), _MOST_RANGES), 1)
    return [str(bound) for bound in range(int(low) + width, int(high), width)]


def block_ranges(table: SideTable, jobs: int) -> tuple[Part, ...]:
    """Parts that divide a table's blocks, so that each session gets some ranges."""
    size = min(max(table.size // (jobs * 4), _LEAST_BLOCKS), _MOST_BLOCKS)
    if not table.by_blocks or table.size <= size:
        return (WHOLE,)
    blocks = size // table.block_size
    starts = range(0, -(-table.size // table.block_size), blocks)
    inner = [Part(blocks=f"ctid >= '({first},0)' AND ctid < '({first + blocks},0)'") for first in starts[:-1]]
    # the last range has no end: the table may have grown since it was measured
    return (*inner, Part(blocks=f"ctid >= '({starts[-1]},0)'"))
