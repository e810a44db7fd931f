"""Compare the rows of a PostgreSQL publisher and of a database of another kind, as a multiset, value by value, table by table.

Two databases of different kinds cannot compute the same checksum. So all rows are read from both, and each value is converted to
PostgreSQL's own text (:mod:`subscriber.verification.values`). Then the numbers of rows are compared, and the sums of the two halves
of the MD5 of each row. Memory stays bounded, order does not matter, and duplicates count.

The publisher's columns are compared, except generated ones. Columns that only the target has are ignored. The publisher is read in one
snapshot. Nothing may write to the target meanwhile.

Only if the sums differ, both are read again, and the hashes of all rows are kept, which takes some 16 bytes per row.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from psycopg import sql

from subscriber.abc import TableName
from subscriber.testing.comparison.checksums import Connection, TableComparison, TableDigest, snapshot
from subscriber.verification.values import normalizer

__all__ = ["RowReader", "compare_rows"]

_COLUMNS: Final = """
SELECT a.attname::text, (
    WITH RECURSIVE base AS (
        SELECT t.oid, t.typtype, t.typbasetype FROM pg_catalog.pg_type t WHERE t.oid = a.atttypid
        UNION ALL
        SELECT t.oid, t.typtype, t.typbasetype FROM base b JOIN pg_catalog.pg_type t ON t.oid = b.typbasetype WHERE b.typtype = 'd'
    )
    SELECT pg_catalog.format_type(oid, NULL) FROM base WHERE typtype <> 'd'
), c.relkind = 'r'
FROM pg_catalog.pg_attribute a
JOIN pg_catalog.pg_class c ON c.oid = a.attrelid
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %s AND c.relname = %s AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
ORDER BY a.attnum
"""
_COPY: Final = sql.SQL("COPY (SELECT {columns} FROM {only} {table}) TO STDOUT")
_HALF: Final = 2**64


class RowReader(Protocol):
    """Reads tables of any kind of target."""

    async def has_columns(self, table: TableName, columns: Sequence[str]) -> bool:
        """Whether the target has the table with these columns."""
        ...

    def rows(self, table: TableName, columns: Sequence[str]) -> AsyncIterator[Sequence[object]]:
        """Read every row, with the values as the driver returns them."""
        ...


async def compare_rows(publisher_dsn: str, target: RowReader, tables: Iterable[TableName]) -> list[TableComparison]:
    """Compare whole tables.

    Args:
        publisher_dsn: conninfo or URL of the publisher.
        target: reads the target.
        tables: the tables, by their names on the publisher. A partitioned table includes all its partitions.

    Raises:
        psycopg.Error: the publisher cannot be reached or rejects a query (SELECT is needed).
        TargetError: the same for the target; or a value there has a class that cannot be compared.
    """
    async with snapshot(publisher_dsn) as publisher:
        return [await _compare(publisher, target, table) for table in tables]


@dataclass(frozen=True, slots=True)
class _Columns:
    """The columns to read from a table: names and base types, in the same order on both sides."""

    names: tuple[str, ...]
    types: tuple[str, ...]
    only: bool
    """Whether the table may have inheritance children, whose rows are excluded."""


async def _compare(publisher: Connection, target: RowReader, table: TableName) -> TableComparison:
    found = await (await publisher.execute(_COLUMNS, [table.namespace, table.name])).fetchall()
    if not found:
        return TableComparison(table, None, None)
    columns = _Columns(tuple(name for name, _, _ in found), tuple(kind for _, kind, _ in found), bool(found[0][2]))
    here = await _digest(_hashes(_published(publisher, table, columns), columns))
    if not await target.has_columns(table, columns.names):
        return TableComparison(table, here, None)
    there = await _digest(_hashes(target.rows(table, columns.names), columns))
    if here == there:
        return TableComparison(table, here, there)
    ours = Counter([row async for row in _hashes(_published(publisher, table, columns), columns)])
    theirs = Counter([row async for row in _hashes(target.rows(table, columns.names), columns)])
    return TableComparison(table, here, there, (ours - theirs).total(), (theirs - ours).total())


async def _published(publisher: Connection, table: TableName, columns: _Columns) -> AsyncIterator[Sequence[object]]:
    query = _COPY.format(
        columns=sql.SQL(", ").join(map(sql.Identifier, columns.names)),
        only=sql.SQL("ONLY" if columns.only else ""),
        table=sql.Identifier(table.namespace, table.name),
    )
    async with publisher.cursor() as cursor, cursor.copy(query) as copy:
        async for row in copy.rows():
            yield row


async def _hashes(rows: AsyncIterator[Sequence[object]], columns: _Columns) -> AsyncIterator[bytes]:
    normalizers = [normalizer(kind) for kind in columns.types]
    async for row in rows:
        texts = [normalized(value) for normalized, value in zip(normalizers, row, strict=True)]
        yield hashlib.md5(ascii(texts).encode(), usedforsecurity=False).digest()


async def _digest(hashes: AsyncIterator[bytes]) -> TableDigest:
    rows = high = low = 0
    async for digest in hashes:
        rows += 1
        high += int.from_bytes(digest[:8], "big")
        low += int.from_bytes(digest[8:], "big")
    return TableDigest(rows, f"{high % _HALF:016x}{low % _HALF:016x}")
