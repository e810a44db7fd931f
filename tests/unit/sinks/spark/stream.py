"""A publisher's stream for tests of the lake: relations, transactions, and reading back what was landed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow.parquet as pq

from subscriber.config import Settings, SubscriptionOptions
from subscriber.interfaces import Batch, Position, TableEntry, TableName, TableState
from subscriber.protocol.encoder import encode
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Column, Message, Relation, TupleData
from subscriber.sinks.spark.opened_spark_sink import OpenedSparkSink
from subscriber.sinks.spark.sink import SparkSink
from subscriber.transaction.model import Transaction

T = TypeVar("T")

START = Position("replica", "7", 1, Lsn(100))
TABLE = TableName("public", "t")
RELATION = Relation(5, "public", "t", "d", (Column("id", 23, -1, True), Column("note", 25, -1, False), Column("day", 1082, -1, False)))


def row(*values: str | None) -> TupleData:
    """``"unchanged"`` is the value that was not sent."""
    kinds = bytes(ord("n") if value is None else ord("u") if value == "unchanged" else ord("t") for value in values)
    return TupleData(kinds, [None if value in {None, "unchanged"} else str(value).encode() for value in values])


def transaction(end: int, *messages: Message, xid: int = 0) -> Transaction:
    return Transaction(
        xid=xid or end,
        final_lsn=Lsn(end - 5),
        end_lsn=Lsn(end),
        commit_time=end * 1_000_000,
        prefixed=False,
        records=[encode(message) for message in messages],
    )


def batch(*transactions: Transaction) -> Batch:
    return Batch(transactions, lambda *_: True)


def make(path: Path, parameters: str = "?batch_delay=1h") -> SparkSink:
    # there is no publisher to ask about new columns
    parameters += f"{'&' if parameters else '?'}on_schema_gap=null" if "on_schema_gap" not in parameters else ""
    return SparkSink(f"spark://{path}{parameters}", options=SubscriptionOptions(), settings=Settings())


async def begun(sink: SparkSink, durable: list[int] | None = None, tables: Sequence[TableName] = (TABLE,)) -> OpenedSparkSink:
    """Open a sink, and make what a first start makes."""
    opened = await sink.open("replica", (durable if durable is not None else []).append)
    if opened.state.position is None:
        await opened.begin_slot("replica", ["app"], opened.state.two_phase)
        await opened.set_position(START)
    known = await opened.tables()
    await opened.add_tables([table for table in tables if table not in known], TableEntry(TableState.READY))
    return opened


def landed(path: Path) -> list[dict[str, Any]]:
    """All rows that manifests name, in order."""
    import json

    rows: list[dict[str, Any]] = []
    for name in sorted((path / "landing").glob("*.json")):
        for file in json.loads(name.read_text())["document"]["files"]:
            rows += pq.read_table(path / file["path"]).to_pylist()
    return rows


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)
