"""The tables of the mixed load: pgbench's four, and one for each difficult case of replication.

========================  =====================================================================================
accounts, branches,       pgbench's, with bigint keys
tellers, history          (history has no key: REPLICA IDENTITY FULL)
documents                 TOASTed text, stored uncompressed out of line
measurements              partitioned by list, four partitions; rows move between them
specimens                 a column of each of many types, with NULLs and extreme values, and a generated column
tags                      no key, REPLICA IDENTITY FULL, duplicate rows
scratch, scratch_items    truncated together, with a foreign key and an identity column
========================  =====================================================================================

Publisher and target get the same definitions, in a schema that must not exist yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg import sql

from subscriber.errors import ConfigurationError
from subscriber.interfaces import TableName

__all__ = ["FIRST_FRESH_KEY", "SPECIMEN_NAMES", "SPECIMEN_VALUES", "TABLES", "TableSizes", "create_tables", "drop_tables", "table_names"]

FIRST_FRESH_KEY: Final = 1_000_000_000
"""Keys below this are used by :func:`create_tables`."""

TABLES: Final = ("accounts", "branches", "tellers", "history", "documents", "measurements", "specimens", "tags", "scratch", "scratch_items")
"""In an order in which they can be filled, because of the foreign key."""

# name, type, value as an expression over n, a bigint of at least 0
_SPECIMEN: Final = (
    ("flag", "boolean", "CASE n % 3 WHEN 0 THEN true WHEN 1 THEN false END"),
    ("small", "smallint", "(n % 65536 - 32768)::smallint"),
    ("big", "bigint", "9223372036854775807 - n"),
    ("exact", "numeric", "CASE n % 4 WHEN 0 THEN 'NaN'::numeric WHEN 1 THEN n / 7.0 WHEN 2 THEN -1e100 * n ELSE 0.00 END"),
    ("single", "real", "CASE n % 4 WHEN 0 THEN 'Infinity'::real WHEN 1 THEN '-0'::real ELSE (n / 3.0)::real END"),
    ("double", "double precision", "CASE n % 4 WHEN 0 THEN 'NaN'::double precision ELSE (n / 3.0)::double precision END"),
    ("label", "text", "CASE n % 5 WHEN 0 THEN '' WHEN 1 THEN NULL ELSE E'tab\\t newline\\n backslash \\\\ quotes \" \\' äöü €' || n END"),
    ("fixed", "character(12)", "n % 1000"),
    ("varied", "character varying(40)", "md5(n::text)"),
    ("blob", "bytea", "decode(md5(n::text) || '00ff5c', 'hex')"),
    ("day", "date", "CASE n % 4 WHEN 0 THEN 'infinity' WHEN 1 THEN '0044-03-15 BC' ELSE date '2000-01-01' + (n % 100000)::int END"),
    (
        "at",
        "timestamp with time zone",
        "CASE n % 5 WHEN 0 THEN '-infinity' ELSE timestamptz '2000-01-01 00:00+00' + n * interval '1.25 s' END",
    ),
    ("stamp", "timestamp", "timestamp '1999-12-31 23:59:59.999999' + (n % 1000) * interval '1 day'"),
    ("clock", "time", "time '00:00' + (n % 86400) * interval '1 s'"),
    ("zoned", "time with time zone", "CASE n % 2 WHEN 0 THEN timetz '24:00+02' ELSE timetz '12:34:56.789-08' END"),
    ("span", "interval", "(n % 50)::int * interval '1 month -3 days 04:05:06.5'"),
    ("ident", "uuid", "md5(n::text)::uuid"),
    ("paper", "json", "json_build_object('n', n, 'text', E'\\u00e9\\n')"),
    ("tree", "jsonb", "jsonb_build_object('n', n, 'list', jsonb_build_array(1, NULL, '\"'))"),
    ("numbers", "integer[]", "ARRAY[[1, NULL], [(n % 1000)::int, -1]]"),
    ("words", "text[]", "CASE n % 3 WHEN 0 THEN '{}' ELSE ARRAY['a,b', '\"', NULL, 'NULL', '\\', n::text] END"),
    ("address", "inet", "inet '10.0.0.0/8' + n % 100000"),
    ("network", "cidr", "CASE n % 2 WHEN 0 THEN cidr '2001:db8::/32' ELSE cidr '192.168.0.0/16' END"),
    ("hardware", "macaddr", "macaddr '08:00:2b:01:02:03'"),
    ("during", "tstzrange", "tstzrange(timestamptz '2000-01-01 00:00+00' + (n % 1000) * interval '1 h', NULL)"),
    ("spread", "int4range", "CASE n % 3 WHEN 0 THEN int4range 'empty' ELSE int4range((n % 100)::int, (n % 100)::int + 10) END"),
    ("place", "point", "point((n % 100) / 3.0, -1e300)"),
    ("bits", "bit varying", "(n % 256)::int::bit(8)"),
    ("search", "tsvector", "to_tsvector('simple', 'the row ' || n)"),
    ("mood", "mood", "(ARRAY['sad', 'so-so', 'it''s \"fine\"'])[n % 3 + 1]::mood"),
    ("positive", "positive", "n % 1000 + 1"),
    ("couple", "pair", "ROW((n % 100)::int, CASE n % 2 WHEN 0 THEN '(,)' END)::pair"),
)

SPECIMEN_NAMES: Final = ", ".join(name for name, _, _ in _SPECIMEN)
"""The replicated columns of ``specimens`` except its key ``id``."""
SPECIMEN_VALUES: Final = ", ".join(value for _, _, value in _SPECIMEN).replace("%", "%%")
"""The expressions for their values over a bigint ``n``, for a query with parameters."""

_DEFINITIONS: Final = (
    "CREATE TYPE mood AS ENUM ('sad', 'so-so', 'it''s \"fine\"')",
    "CREATE DOMAIN positive AS bigint CHECK (VALUE > 0)",
    "CREATE TYPE pair AS (number integer, remark text)",
    "CREATE TABLE accounts (aid bigint PRIMARY KEY, bid integer NOT NULL, abalance bigint NOT NULL, filler character(84))",
    "CREATE TABLE branches (bid bigint PRIMARY KEY, bbalance bigint NOT NULL, filler character(88))",
    "CREATE TABLE tellers (tid bigint PRIMARY KEY, bid integer NOT NULL, tbalance bigint NOT NULL, filler character(84))",
    "CREATE TABLE history (tid bigint, bid integer, aid bigint, delta integer, mtime timestamp, filler character(22))",
    "ALTER TABLE history REPLICA IDENTITY FULL",
    "CREATE TABLE documents (id bigint PRIMARY KEY, title text NOT NULL, revision integer NOT NULL, body text)",
    "ALTER TABLE documents ALTER COLUMN body SET STORAGE EXTERNAL",
    "CREATE TABLE measurements (id bigint, region integer, reading numeric, PRIMARY KEY (id, region)) PARTITION BY LIST (region)",
    "CREATE TABLE measurements_0 PARTITION OF measurements FOR VALUES IN (0)",
    "CREATE TABLE measurements_1 PARTITION OF measurements FOR VALUES IN (1)",
    "CREATE TABLE measurements_2 PARTITION OF measurements FOR VALUES IN (2)",
    "CREATE TABLE measurements_other PARTITION OF measurements DEFAULT",
    f"CREATE TABLE specimens (id bigint PRIMARY KEY, {', '.join(f'{name} {kind}' for name, kind, _ in _SPECIMEN)},"
    " twice bigint GENERATED ALWAYS AS (small::bigint * 2) STORED)",
    "CREATE TABLE tags (owner integer, label text, amount integer)",
    "ALTER TABLE tags REPLICA IDENTITY FULL",
    "CREATE TABLE scratch (id bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, note text)",
    "CREATE TABLE scratch_items (scratch_id bigint REFERENCES scratch ON DELETE CASCADE, item integer, PRIMARY KEY (scratch_id, item))",
    "CREATE SEQUENCE load_runs",
)

_FILLING: Final = (
    "INSERT INTO accounts SELECT i, i %% 100, 0, md5(i::text) FROM generate_series(1, %(accounts)s::bigint) i",
    "INSERT INTO branches SELECT i, 0, NULL FROM generate_series(1, %(branches)s::bigint) i",
    "INSERT INTO tellers SELECT i, i %% 100, 0, NULL FROM generate_series(1, %(tellers)s::bigint) i",
    "INSERT INTO history SELECT i %% 100, i %% 10, i, 0, '2000-01-01', NULL FROM generate_series(1, %(history)s::bigint) i",
    "INSERT INTO documents SELECT i, 'document ' || i, 0, (SELECT string_agg(md5(i || '/' || k), '') FROM generate_series(1, 200) k)"
    " FROM generate_series(1, %(documents)s::bigint) i",
    "INSERT INTO measurements SELECT i, i %% 5, i / 3.0 FROM generate_series(1, %(measurements)s::bigint) i",
    f"INSERT INTO specimens (id, {SPECIMEN_NAMES}) SELECT n, {SPECIMEN_VALUES} FROM generate_series(1, %(specimens)s::bigint) n",
    "INSERT INTO tags SELECT 0, 'a duplicate', 0 FROM generate_series(1, %(tags)s::bigint)",
    "INSERT INTO scratch (note) SELECT 'first' FROM generate_series(1, %(scratch)s::bigint)",
    "INSERT INTO scratch_items SELECT id, k FROM scratch, generate_series(1, 3) k",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSizes:
    """Initial rows of each table (scratch_items has three times those of scratch)."""

    accounts: int
    branches: int
    tellers: int
    history: int
    documents: int
    measurements: int
    specimens: int
    tags: int
    scratch: int

    @classmethod
    def scaled(cls, rows: int) -> TableSizes:
        """About ``rows`` accounts, and proportionally many rows of the others, but enough for several sessions.

        Raises:
            ConfigurationError: there are not so many keys.
        """
        if not 0 <= rows < FIRST_FRESH_KEY:
            raise ConfigurationError(f"{rows} is not a valid number of rows", hint=f"from 0 to {FIRST_FRESH_KEY - 1}")
        return cls(
            accounts=max(rows, 400),
            branches=8,
            tellers=max(rows // 10_000, 80),
            history=rows // 10,
            documents=min(max(rows // 500, 160), 2_000),
            measurements=max(rows // 10, 400),
            specimens=max(rows // 100, 160),
            tags=20,
            scratch=30,
        )


def table_names(schema: str) -> list[TableName]:
    """The load's tables; for the partitioned one the root."""
    return [TableName(schema, name) for name in TABLES]


async def create_tables(dsn: str, *, schema: str = "load", rows: int | None = None) -> None:
    """Create the schema with the load's tables in one transaction.

    Args:
        dsn: of the database, for a role that may create a schema.
        schema: a new schema.
        rows: number of rows (see :meth:`TableSizes.scaled`); None leaves the tables empty, as for a target.

    Raises:
        ConfigurationError: the schema exists.
        psycopg.Error: the server rejected another statement.
    """
    sizes = None if rows is None else TableSizes.scaled(rows)
    name = sql.Identifier(schema)
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        try:
            await connection.execute(sql.SQL("CREATE SCHEMA {}").format(name))
        except psycopg.errors.DuplicateSchema:
            await connection.rollback()
            raise ConfigurationError(
                f'schema "{schema}" exists already in database "{connection.info.dbname}"',
                hint="its tables may be in use: drop or rename it, or take another database",
            ) from None
        await connection.execute(sql.SQL("SET LOCAL search_path = {}").format(name))
        for definition in _DEFINITIONS:
            await connection.execute(definition.encode())
        if sizes is not None:
            values = {field: getattr(sizes, field) for field in TableSizes.__slots__}
            for filling in _FILLING:
                await connection.execute(filling.encode(), values)
        await connection.commit()
        if sizes is not None:  # the progress of a copy is computed from pg_class.reltuples
            await connection.set_autocommit(True)
            for table in TABLES:
                await connection.execute(sql.SQL("ANALYZE {}").format(sql.Identifier(schema, table)))


async def drop_tables(dsn: str, *, schema: str = "load") -> None:
    """Drop the schema and everything in it. Does nothing if it does not exist.

    Raises:
        psycopg.Error: another transaction, for example a prepared one, holds a lock on one of its tables for more than half a minute.
    """
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await connection.execute("SET lock_timeout = '30s'")
        await connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(schema)))
