"""Every type of PostgreSQL's catalogue into a lake, by copy and by stream, and back by a plain Delta reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from subscriber import TableName, Until
from subscriber.sinks.spark.catalog.snapshots import Snapshot
from tests.integration.lake.test_replica import subscription
from tests.support import every_type
from tests.support.database import Database
from tests.support.lake_types import differences, lake_type
from tests.support.lakes import applied


def declared(database: Database, table: str) -> dict[str, str]:
    """Types of the columns, domains by their own names."""
    return dict(
        database.fetch(
            "SELECT attname, CASE WHEN typtype = 'd' THEN 'a domain' ELSE format_type(atttypid, atttypmod) END FROM pg_attribute"
            f" JOIN pg_type AS t ON t.oid = atttypid WHERE attrelid = 'app.{table}'::regclass AND attnum > 0"
        )
    )


def read(lake: Path, snapshot: Snapshot, table: str) -> pa.Table:
    found = snapshot.tables[TableName("app", table)]
    return DeltaTable(str(lake / found.path), version=found.version).to_pyarrow_table()


def plain(type_: pa.DataType) -> str:
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return f"list<{plain(type_.value_type)}>"
    return {"large_string": "string", "string_view": "string", "large_binary": "binary", "binary_view": "binary"}.get(
        str(type_), str(type_)
    )


async def test_every_type_by_copy_and_by_stream(publisher18_db: Database, tmp_path: Path) -> None:
    publisher, lake = publisher18_db, tmp_path / "lake"
    publisher.execute(every_type.SETUP)
    for table in ("copied", "streamed"):
        every_type.create_table(publisher, table)
    every_type.fill(publisher, "copied")
    publisher.execute("CREATE PUBLICATION pub FOR TABLE app.copied, app.streamed")
    await subscription(publisher, lake).run(Until())
    every_type.fill(publisher, "streamed")
    # each row once more, under another key: by an UPDATE whose values the applier fetches where they were not sent
    publisher.execute("UPDATE app.streamed SET id = id + 1000; UPDATE app.copied SET id = id + 1000")
    await subscription(publisher, lake).run(Until())
    snapshot = await applied(lake)
    for table in ("copied", "streamed"):
        types = {name: lake_type(type_) for name, type_ in declared(publisher, table).items()}
        found = read(lake, snapshot, table)
        assert {name: plain(found.schema.field(name).type) for name in types} == types, table
        rows: dict[int, dict[str, Any]] = {row["id"]: row for row in found.to_pylist()}
        texts = every_type.texts(publisher, table)
        assert len(rows) == len(texts) == every_type.ROWS
        wrong = differences(rows, texts, types)
        assert not wrong, f"{table}: {len(wrong)}\n" + "\n".join(wrong[:20])


def test_the_table_of_types_in_the_docs_is_this() -> None:
    for name, expected in {
        "boolean": "bool",
        "numeric(12,2)": "decimal128(12, 2)",
        "numeric(38,38)": "decimal128(38, 38)",
        "numeric(39,2)": "string",
        "numeric(3,-2)": "string",
        "numeric": "string",
        "numeric(12,2)[]": "list<decimal128(12, 2)>",
        "character varying(10)[]": "list<string>",
        "timestamp(3) without time zone": "timestamp[us]",
        "time without time zone": "string",
        "int4range[]": "string",
        "timestamp with time zone[]": "list<timestamp[us, tz=UTC]>",
    }.items():
        assert lake_type(name) == expected, name
