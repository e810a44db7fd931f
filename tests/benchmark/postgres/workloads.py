"""What is written on the publisher.

In the SQL, ``{n}`` is the size of the workload, after scaling. The sizes are such that a native subscription of PostgreSQL 18 takes four
seconds or more on a machine with two cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

__all__ = ["COPIES", "NARROW", "PARALLEL", "STREAMS", "Copy", "Stream"]


@dataclass(frozen=True, slots=True)
class Stream:
    """Changes that are written before the readers start.

    Attributes:
        title: for the report.
        size: ``{n}``.
        changes: number of changes for each unit of the size.
        setup: SQL for both sides.
        write: SQL for the publisher; None: pgbench.
        streamed: whether subscriptions stream transactions in progress with versions that do not do it by default, and at every scale.
        clients: of pgbench.
        settings: of the target's server. With fsync, commits wait until they are on disk.
        calculated: whether the processor is the limit, so that what more cores would give is calculated.
    """

    title: str
    size: int
    setup: str
    write: str | None
    changes: float = 1
    streamed: bool = False
    clients: int = 4
    settings: Mapping[str, str] = field(default_factory=dict)
    calculated: bool = False


@dataclass(frozen=True, slots=True)
class Copy:
    """Tables with rows that an initial copy transfers."""

    title: str
    tables: int
    rows: int


NARROW: Final = "CREATE TABLE t (id bigint PRIMARY KEY, a int NOT NULL, b int, c text);"
_VALUES: Final = "g, g % 1000, g / 7, md5(g::text)"
_FILL: Final = f"INSERT INTO t SELECT {_VALUES} FROM generate_series(1, {{n}}) AS g;"


def _each(statements: str) -> str:
    """Transactions of these statements, numbered by ``i``."""
    return f"DO $$ BEGIN FOR i IN 1..{{n}} LOOP {statements}; COMMIT; END LOOP; END $$"


_MIXED: Final = """
    INSERT INTO t SELECT {n} + 3 * i + g, i, g, md5(i::text) FROM generate_series(1, 3) AS g;
    UPDATE t SET a = a + 1, c = md5(c) WHERE id IN (1 + i * 7919::bigint % {n}, 1 + i * 104729::bigint % {n});
    DELETE FROM t WHERE id IN ({n} + 3 * i - 2, {n} + 3 * i - 1);
    INSERT INTO u VALUES (i, i, md5(i::text));
    UPDATE u SET a = a + 1 WHERE id = i / 2
"""
_TYPES: Final = ("int", "text", "numeric(12, 2)", "timestamptz", "boolean")
_WIDE: Final = ", ".join(f"c{number} {_TYPES[number % 5]}" for number in range(49))
_WIDE_VALUES: Final = ", ".join(
    ("g", f"'text ' || g + {number}", f"g / {number + 1}.0", "timestamptz '2024-01-01' + g * interval '1 s'", "g % 2 = 0")[number % 5]
    for number in range(49)
)
_LARGE: Final = "(SELECT string_agg(md5(({seed} + part)::text), '') FROM generate_series(1, 3200) AS part)"
_BRANCHES: Final = 10
_TPCB: Final = f"""
    CREATE TABLE pgbench_branches (bid int PRIMARY KEY, bbalance int, filler char(88)) WITH (fillfactor = 100);
    CREATE TABLE pgbench_tellers (tid int PRIMARY KEY, bid int, tbalance int, filler char(84)) WITH (fillfactor = 100);
    CREATE TABLE pgbench_accounts (aid int PRIMARY KEY, bid int, abalance int, filler char(84)) WITH (fillfactor = 100);
    CREATE TABLE pgbench_history (tid int, bid int, aid int, delta int, mtime timestamp, filler char(22));
    INSERT INTO pgbench_branches SELECT g, 0 FROM generate_series(1, {_BRANCHES}) AS g;
    INSERT INTO pgbench_tellers SELECT g, (g - 1) / 10 + 1, 0 FROM generate_series(1, {_BRANCHES} * 10) AS g;
    INSERT INTO pgbench_accounts SELECT g, (g - 1) / 100000 + 1, 0, '' FROM generate_series(1, {_BRANCHES} * 100000) AS g;
"""

STREAMS: Final = {
    "inserts": Stream("inserts, one transaction", 1_000_000, NARROW, f"INSERT INTO t SELECT {_VALUES} FROM generate_series(1, {{n}}) AS g"),
    "single": Stream("transactions of one row", 400_000, NARROW, _each("INSERT INTO t VALUES (i, i % 1000, i / 7, md5(i::text))")),
    "tens": Stream(
        "transactions of ten rows",
        100_000,
        NARROW,
        _each(f"INSERT INTO t SELECT {_VALUES} FROM generate_series(i * 10, i * 10 + 9) AS g"),
        changes=10,
    ),
    "bulk": Stream(
        "bulk updates and deletes",
        800_000,
        NARROW + _FILL,
        "BEGIN; UPDATE t SET a = a + 1, c = md5(c) WHERE id % 5 > 0; COMMIT; DELETE FROM t WHERE id % 5 = 0",
    ),
    "mixed": Stream(
        "transactions of nine mixed changes",
        120_000,
        # with rows, so that no plan is made for an empty table
        NARROW
        + _FILL
        + "CREATE TABLE u (id int PRIMARY KEY, a int, c text); INSERT INTO u SELECT -g, g, '' FROM generate_series(1, 9999) AS g;",
        _each(_MIXED),
        changes=9,
    ),
    "tpcb": Stream("pgbench TPC-B", 160_000, _TPCB, None, changes=4),
    "streamed": Stream(
        "streamed, savepoint rolled back",
        1_000_000,
        NARROW,
        f"BEGIN; INSERT INTO t SELECT {_VALUES} FROM generate_series(1, {{n}} / 2) AS g; SAVEPOINT s;"
        f" INSERT INTO t SELECT {_VALUES} FROM generate_series({{n}} / 2 + 1, {{n}} * 3 / 4) AS g; ROLLBACK TO s;"
        f" INSERT INTO t SELECT {_VALUES} FROM generate_series({{n}} / 2 + 1, {{n}}) AS g; COMMIT",
        streamed=True,
    ),
    "wide": Stream(
        "rows of 50 columns",
        6_000,
        f"CREATE TABLE t (id bigint PRIMARY KEY, {_WIDE});",
        _each(f"INSERT INTO t SELECT g, {_WIDE_VALUES} FROM generate_series(i * 100, i * 100 + 99) AS g"),
        changes=100,
    ),
    "toast": Stream(
        "100 kB TOASTed rows, rarely changed",
        500_000,
        "CREATE TABLE t (id int PRIMARY KEY, a int, large text); ALTER TABLE t ALTER large SET STORAGE EXTERNAL;"
        f"INSERT INTO t SELECT g, 0, {_LARGE.replace('{seed}', 'g')} FROM generate_series(1, 500) AS g;",
        _each(
            "UPDATE t SET a = a + 1 WHERE id = 1 + i % 500;"
            f" IF i % 500 = 0 THEN UPDATE t SET large = {_LARGE.replace('{seed}', 'i')} WHERE id = 1 + i / 500 % 500; END IF"
        ),
        changes=1 + 1 / 500,
    ),
    "full": Stream(
        "REPLICA IDENTITY FULL",
        60_000,
        NARROW + "ALTER TABLE t REPLICA IDENTITY FULL; INSERT INTO t SELECT g, g % 1000, NULLIF(g % 3, 0), md5(g::text)"
        " FROM generate_series(1, {n} * 10) AS g;",
        _each(
            "UPDATE t SET a = a + 1, c = md5(c) WHERE id BETWEEN i * 10 - 9 AND i * 10;"
            " UPDATE t SET b = i WHERE id BETWEEN i * 10 - 4 AND i * 10; DELETE FROM t WHERE id BETWEEN i * 10 - 9 AND i * 10 - 5"
        ),
        changes=20,
    ),
    "interleaved": Stream(
        "ten interleaved tables",
        160_000,
        "".join(f"CREATE TABLE t{number} (id int PRIMARY KEY, a int, c text);" for number in range(10)),
        _each("; ".join(f"INSERT INTO t{number} VALUES (i, {number}, md5(i::text))" for number in range(10))),
        changes=10,
    ),
    "start": Stream("start-up and one row", 1, NARROW, _FILL, changes=1),
}

_INDEXED: Final = ", ".join(f"a{number} int" for number in range(8))
_INDEXES: Final = " ".join(f"CREATE INDEX ON t (a{number});" for number in range(8))
_RANDOM: Final = ", ".join(f"hashint4(g + {number})" for number in range(8))
_UPDATED: Final = ", ".join(f"a{number} = hashint4(i + {number})" for number in range(8))

_ANY: Final = "SELECT 1 + (hashint4(10 * i + g)::bigint & 2147483647) % ({n} * 10) FROM generate_series(0, 9) AS g"

PARALLEL: Final = {
    **{
        f"parallel-tpcb-{clients}": Stream(
            f"pgbench TPC-B, {clients} clients", 60_000, _TPCB, None, changes=4, clients=clients, calculated=clients == 8
        )
        for clients in (8, 32, 64)
    },
    "parallel-indexes": Stream(
        "random updates, 8 indexes",
        15_000,
        f"CREATE TABLE t (id int PRIMARY KEY, {_INDEXED}, c text); {_INDEXES}"
        f" INSERT INTO t SELECT g, {_RANDOM}, md5(g::text) FROM generate_series(1, {{n}} * 10) AS g;",
        _each(f"UPDATE t SET {_UPDATED} WHERE id IN ({_ANY})"),
        changes=10,
        calculated=True,
    ),
    "parallel-buffers": Stream(
        "random updates, table larger than the memory",
        20_000,
        "CREATE TABLE t (id int PRIMARY KEY, a int, c char(300));"
        " INSERT INTO t SELECT g, 0, md5(g::text) FROM generate_series(1, {n} * 10) AS g;",
        _each(f"UPDATE t SET a = i WHERE id IN ({_ANY})"),
        changes=10,
        # each page is read from the disk, and not from the system's cache
        settings={"shared_buffers": "8MB", "debug_io_direct": "data"},
    ),
    "parallel-flush": Stream(
        "ten rows each, commits wait 2 ms",
        12_000,
        NARROW,
        _each(f"INSERT INTO t SELECT {_VALUES} FROM generate_series(i * 10, i * 10 + 9) AS g"),
        changes=10,
        settings={"fsync": "on", "commit_delay": "2000", "commit_siblings": "0"},
    ),
}
"""For ``apply_workers``."""

COPIES: Final = {
    "copy": Copy("copy of one table", 1, 2_000_000),
    "copy-tables": Copy("copy of 200 tables", 200, 500),
}
