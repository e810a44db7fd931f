"""Which tables of the target are followed by their keys, when groups of transactions are applied at the same time."""

from __future__ import annotations

import pytest

from subscriber.interfaces import TableName
from subscriber.sinks.postgres.parallel.followed_tables import FollowedTables
from subscriber.sinks.postgres.tables.relation_mapping import map_relation
from subscriber.sinks.postgres.tables.table_reader import read_table
from tests.support.database import Database
from tests.support.sink_postgres import Remote, opened

INT, TEXT, NUMERIC = (23, -1), (25, -1), (1700, -1)
COLUMNS = {"id": INT, "u": INT, "n": NUMERIC, "v": TEXT}
TABLE = "CREATE TABLE t (id int, u int, n numeric, v text{}, PRIMARY KEY (id))"
PARTITIONED = """
    CREATE TABLE t (id int{}, u int, n numeric, v text) PARTITION BY RANGE (id);
    CREATE TABLE low PARTITION OF t{} FOR VALUES FROM (MINVALUE) TO (10); CREATE TABLE high PARTITION OF t{} DEFAULT
"""
LEAF = " (PRIMARY KEY (id))"
WHOLE = None
"""Each change is one of the whole table."""


@pytest.mark.parametrize(
    ("setup", "keys", "finds_one"),
    [
        (TABLE.format(""), {("id",)}, True),
        (TABLE.format(", UNIQUE (u, v), UNIQUE (n)"), {("id",), ("u", "v"), ("n",)}, True),
        (f"{TABLE.format('')}; CREATE UNIQUE INDEX ON t (u) INCLUDE (v) WHERE v > 'a'", {("id",), ("u",)}, True),
        (f"{TABLE.format('')}; CREATE UNIQUE INDEX ON t (lower(v))", WHOLE, True),
        (f"{TABLE.format(', EXCLUDE USING btree (u WITH =)')}", WHOLE, True),
        (f"{TABLE.format(', w text UNIQUE')}", WHOLE, True),
        (f"{TABLE.format('')}; ALTER TABLE t ALTER n TYPE numeric(9, 1); CREATE UNIQUE INDEX ON t (n)", WHOLE, True),
        (f"{TABLE.format('')}; ALTER TABLE t ALTER v TYPE char(5); CREATE UNIQUE INDEX ON t (v)", WHOLE, True),
        (PARTITIONED.format(" PRIMARY KEY", "", ""), {("id",)}, True),
        # the bug was that this key counted as one that finds one row
        (PARTITIONED.format("", LEAF, LEAF), {("id",)}, False),
        (PARTITIONED.format("", LEAF, ""), {("id",)}, False),
        ("CREATE TABLE t (id int, u int, n numeric, v text)", set(), False),
    ],
)
async def test_keys_of_tables(target_db: Database, setup: str, keys: set[tuple[str, ...]] | None, finds_one: bool) -> None:
    target_db.execute(setup)
    remote = Remote("t", "*id", *list(COLUMNS)[1:], identity="f", types=COLUMNS)
    async with opened(target_db) as feed:
        reader = feed.opened.reader
        mapping = map_relation(remote.relation, await read_table(reader, TableName("public", "t"), as_owner=False))
        (table,) = (await FollowedTables(reader).read([mapping])).values()
    assert (None if table.keys is None else {key.names for key in table.keys}) == keys
    assert table.finds_one is finds_one
