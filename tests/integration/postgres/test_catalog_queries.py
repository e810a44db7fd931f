"""Queries on the catalogs read what belongs to the tables in question, and not all relations or operators, as the planner did once."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from subscriber.protocol.capabilities import capabilities
from subscriber.sinks.postgres.tables import table_reader
from subscriber.walreceiver import publication
from tests.support.database import Database

TYPES = ("int", "bigint", "text", "varchar", "numeric", "date", "timestamptz", "uuid", "jsonb", "int[]", "mood", "inet", "bytea", "boolean")


def visited(database: Database, query: str) -> int:
    """The rows that all steps of a plan gave or removed."""

    def counted(plan: dict[str, Any]) -> float:
        rows = sum(plan.get(name, 0) for name in ("Actual Rows", "Rows Removed by Filter", "Rows Removed by Join Filter"))
        return float(rows * plan["Actual Loops"] + sum(map(counted, plan.get("Plans", ()))))

    found = database.value(f"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) {query}")
    return round(counted((json.loads(found) if isinstance(found, str) else found)[0]["Plan"]))


def test_columns(target_db: Database) -> None:
    target_db.execute("CREATE TYPE mood AS ENUM ('calm')")
    columns = ", ".join(f"c{number} {name}" for number, name in enumerate(TYPES))
    target_db.execute(f"CREATE TABLE t ({columns}); SET enable_seqscan = off")
    oid = target_db.value("SELECT 't'::regclass::oid")
    assert visited(target_db, table_reader._COLUMNS.replace("$1", f"'{{{oid}}}'")) < 20_000


def test_published_tables(publisher18_db: Database) -> None:
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (id int); CREATE PUBLICATION p FOR TABLE t")
    session: Any = SimpleNamespace(capabilities=capabilities(180_000))
    assert visited(publisher18_db, publication._tables_query(session, ["p"], [])) < 4_000
