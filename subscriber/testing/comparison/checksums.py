"""Compare the rows of two PostgreSQL databases, as a multiset, table by table.

Each side computes, in one repeatable read snapshot, the number of rows and the sums of the two halves of the MD5 of every row. A row is
the text of ``ROW(columns…)``, with the columns in the same order on both sides, and with fixed settings for the text of values. So two
versions of PostgreSQL give the same. A sum does not depend on the order of the rows. Unlike an exclusive or, it detects duplicates. It
changes if values are swapped between two rows or two columns.

The publisher's columns are compared, except generated ones. Columns that only the target has are ignored.

Only if the sums differ, the MD5s of all rows are read from both sides, sorted, and merged, so that memory stays bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg import sql

from subscriber.abc import TableName

__all__ = [
    "PreparedComparison",
    "TableComparison",
    "TableDigest",
    "compare",
    "compare_prepared",
    "prepared_transactions",
    "published_tables",
    "snapshot",
]

Connection = psycopg.AsyncConnection[Any]

_TEXT_SETTINGS: Final = (
    "SET search_path = ''; SET datestyle = ISO; SET intervalstyle = postgres; SET extra_float_digits = 3;"
    " SET timezone = 'UTC'; SET bytea_output = hex; SET lc_monetary = 'C'; SET xmloption = content; SET row_security = off"
)
_COLUMNS: Final = """
SELECT attname FROM pg_catalog.pg_attribute
WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped AND attgenerated = '' ORDER BY attnum
"""
_KEY_COLUMNS: Final = """
SELECT attname FROM pg_catalog.pg_index i JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)
WHERE i.indrelid = %s AND i.indisprimary ORDER BY attnum
"""
_RELATION: Final = """
SELECT c.oid, c.relkind FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %s AND c.relname = %s AND c.relkind IN ('r', 'p', 'v', 'm', 'f')
"""
# an MD5 of bytes in one encoding, because the encodings of both sides may differ
_ROW_HASH: Final = sql.SQL("pg_catalog.md5(pg_catalog.convert_to((ROW({columns}))::pg_catalog.text, 'UTF8'))")
_DIGEST: Final = sql.SQL("""
SELECT count(*),
    coalesce(sum(('x' || substr(hash, 1, 16))::bit(64)::bigint), 0),
    coalesce(sum(('x' || substr(hash, 17))::bit(64)::bigint), 0)
FROM (SELECT {hash} AS hash FROM {table}) AS hashed
""")
_HASHES: Final = sql.SQL('SELECT {hash} COLLATE "C", ({key})::pg_catalog.text FROM {table} ORDER BY 1')
_FETCH_ROWS: Final = 5_000


@dataclass(frozen=True, slots=True)
class TableDigest:
    """A checksum of a table's rows, and their number."""

    rows: int
    checksum: str
    """32 hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class TableComparison:
    """One table on both sides. A digest is None if the table, or one of the publisher's columns, does not exist.

    Attributes:
        only_publisher, only_target: number of rows, including duplicates, that the other side lacks. A changed row counts on both sides.
        samples: if requested, primary keys of such rows as text (whole rows, if there is no key). They contain values.
    """

    table: TableName
    publisher: TableDigest | None
    target: TableDigest | None
    only_publisher: int = 0
    only_target: int = 0
    samples: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether both sides hold the same rows."""
        return self.publisher is not None and self.publisher == self.target


@dataclass(frozen=True, slots=True)
class PreparedComparison:
    """Transaction ids, on the publisher, of the transactions that are prepared on each side."""

    publisher: frozenset[int]
    target: frozenset[int]

    @property
    def equal(self) -> bool:
        """Whether the same transactions are prepared."""
        return self.publisher == self.target


async def published_tables(publisher_dsn: str, publications: Sequence[str]) -> list[TableName]:
    """The tables of publications, sorted: partitions or their root, according to ``publish_via_partition_root``."""
    async with await psycopg.AsyncConnection.connect(publisher_dsn, autocommit=True) as connection:
        cursor = await connection.execute(
            "SELECT DISTINCT schemaname, tablename FROM pg_catalog.pg_publication_tables WHERE pubname = ANY (%s) ORDER BY 1, 2",
            [list(publications)],
        )
        return [TableName(*row) for row in await cursor.fetchall()]


async def compare(publisher_dsn: str, target_dsn: str, tables: Iterable[TableName], *, samples: int = 0) -> list[TableComparison]:
    """Compare whole tables of two databases in their current state.

    Args:
        publisher_dsn: conninfo or URL of the publisher.
        target_dsn: conninfo or URL of the target.
        tables: the tables, with the same names on both sides. A partitioned table includes all its partitions.
        samples: how many keys of differing rows to return per table. For tests only, because keys are values.

    Raises:
        psycopg.Error: a server cannot be reached or rejects a query (SELECT is needed).
    """
    async with snapshot(publisher_dsn) as publisher, snapshot(target_dsn) as target:
        return [await _compare_table(publisher, target, table, samples) for table in tables]


async def compare_prepared(publisher_dsn: str, target_dsn: str) -> PreparedComparison:
    """Compare the prepared transactions of both databases. On the target they are named ``pg_gid_<subscription>_<xid>``."""
    publisher = await prepared_transactions(publisher_dsn)
    async with await psycopg.AsyncConnection.connect(target_dsn, autocommit=True) as connection:
        cursor = await connection.execute(
            "SELECT substring(gid FROM '^pg_gid_[0-9]+_([0-9]+)$')::bigint FROM pg_catalog.pg_prepared_xacts"
            " WHERE database = current_database() AND gid ~ '^pg_gid_[0-9]+_[0-9]+$'"
        )
        target = frozenset(row[0] for row in await cursor.fetchall())
    return PreparedComparison(publisher, target)


async def prepared_transactions(publisher_dsn: str) -> frozenset[int]:
    """The ids of the transactions that are prepared in a database."""
    async with await psycopg.AsyncConnection.connect(publisher_dsn, autocommit=True) as connection:
        cursor = await connection.execute(
            "SELECT transaction::text::bigint FROM pg_catalog.pg_prepared_xacts WHERE database = current_database()"
        )
        return frozenset(row[0] for row in await cursor.fetchall())


@contextlib.asynccontextmanager
async def snapshot(dsn: str) -> AsyncIterator[Connection]:
    """Open a session with one snapshot of the database, and fixed settings for the text of values."""
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        await connection.set_autocommit(True)
        await connection.execute(_TEXT_SETTINGS)
        await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        yield connection


@dataclass(frozen=True, slots=True)
class _Side:
    """One table on one side, and the columns to compare."""

    connection: Connection
    relation: sql.Composed
    columns: tuple[str, ...]
    key: tuple[str, ...]

    async def digest(self) -> TableDigest:
        cursor = await self.connection.execute(_DIGEST.format(hash=self._hash, table=self.relation))
        row = await cursor.fetchone()
        assert row is not None
        rows, high, low = (int(value) for value in row)
        return TableDigest(rows, f"{high % 2**64:016x}{low % 2**64:016x}")

    async def hashes(self) -> AsyncIterator[tuple[str, str]]:
        """Hash and key of each row, sorted by hash."""
        key = sql.SQL("ROW({})").format(_names(self.key or self.columns))
        async with self.connection.cursor(name="hashes") as cursor:
            cursor.itersize = _FETCH_ROWS
            await cursor.execute(_HASHES.format(hash=self._hash, key=key, table=self.relation))
            async for row in cursor:
                yield row

    @property
    def _hash(self) -> sql.Composed:
        return _ROW_HASH.format(columns=_names(self.columns))


def _names(columns: Iterable[str]) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Identifier, columns))


async def _open(connection: Connection, table: TableName) -> _Side | None:
    cursor = await connection.execute(_RELATION, [table.namespace, table.name])
    row = await cursor.fetchone()
    if row is None:
        return None
    oid, kind = row
    # exclude the rows of inheritance children; a partitioned table has only the rows of its partitions
    relation = sql.SQL("{} {}").format(sql.SQL("ONLY" if kind == "r" else ""), sql.Identifier(table.namespace, table.name))
    columns = tuple(name for (name,) in await (await connection.execute(_COLUMNS, [oid])).fetchall())
    key = tuple(name for (name,) in await (await connection.execute(_KEY_COLUMNS, [oid])).fetchall())
    return _Side(connection, relation, columns, key)


async def _compare_table(publisher: Connection, target: Connection, table: TableName, samples: int) -> TableComparison:
    here, there = await asyncio.gather(_open(publisher, table), _open(target, table))
    if here is not None and there is not None:
        complete = set(here.columns) <= set(there.columns)
        there = _Side(target, there.relation, here.columns, here.key) if complete else None
    if here is None or there is None:
        return TableComparison(table, await here.digest() if here else None, await there.digest() if there else None)
    publisher_digest, target_digest = await asyncio.gather(here.digest(), there.digest())
    if publisher_digest == target_digest:
        return TableComparison(table, publisher_digest, target_digest)
    only_publisher, only_target, keys = await _differences(here, there, samples)
    return TableComparison(table, publisher_digest, target_digest, only_publisher, only_target, tuple(keys))


async def _differences(here: _Side, there: _Side, samples: int) -> tuple[int, int, list[str]]:
    """Merge the sorted hashes of both sides, and count those that only one side has."""
    only = [0, 0]
    keys: list[str] = []
    streams = (here.hashes(), there.hashes())
    heads = [await anext(stream, None) for stream in streams]
    while any(heads):
        left, right = heads
        if left is not None and right is not None and left[0] == right[0]:
            heads = [await anext(stream, None) for stream in streams]
            continue
        side = 0 if right is None or (left is not None and left[0] < right[0]) else 1
        only[side] += 1
        alone = heads[side]
        if alone is not None and alone[1] not in keys and len(keys) < samples:
            keys.append(alone[1])
        heads[side] = await anext(streams[side], None)
    return only[0], only[1], keys
