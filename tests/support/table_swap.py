"""Replace a table by another of the same name while it is copied: the published table, or a partition of it."""

from __future__ import annotations

from typing import Final

from tests.support.database import Database

ROWS: Final = 5000


def swap_in(name: str) -> str:
    """Statements that rename ``name`` to ``<name>_old`` and ``<name>_new`` to ``name``."""
    return f"BEGIN; ALTER TABLE {name} RENAME TO {name}_old; ALTER TABLE {name}_new RENAME TO {name}; COMMIT"


def swap_out(name: str) -> str:
    """Statements that undo :func:`swap_in`."""
    return f"BEGIN; ALTER TABLE {name} RENAME TO {name}_new; ALTER TABLE {name}_old RENAME TO {name}; COMMIT"


def make_swappable_table(publisher: Database, *, partitioned: bool) -> str:
    """The table t of many blocks, published as pub, and another like what is read of it: the name of that, which :func:`swap_in` takes."""
    name = "t_one" if partitioned else "t"
    publisher.execute(f"CREATE TABLE t (id int PRIMARY KEY, v text) {'PARTITION BY RANGE (id)' if partitioned else ''}")
    if partitioned:
        publisher.execute(f"CREATE TABLE {name} PARTITION OF t FOR VALUES FROM (0) TO (1000000)")
    publisher.execute(f"""
        CREATE TABLE {name}_new (LIKE t INCLUDING ALL);
        INSERT INTO t SELECT i, repeat('o', 60) FROM generate_series(1, {ROWS}) AS i;
        INSERT INTO {name}_new SELECT i + 100000, repeat('n', 60) FROM generate_series(1, {ROWS}) AS i;
        CREATE PUBLICATION pub FOR TABLE {"t WITH (publish_via_partition_root)" if partitioned else "t, t_new"}
    """)
    return name
