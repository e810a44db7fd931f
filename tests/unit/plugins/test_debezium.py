"""The envelope of Debezium."""

from __future__ import annotations

import json
from typing import Any

import pytest

from subscriber.errors import ConfigurationError
from subscriber.plugins.context import LogicalDecodingContext, Record
from subscriber.plugins.debezium import UNAVAILABLE, Debezium
from subscriber.plugins.feed import PluginFeed
from subscriber.protocol.capabilities import capabilities
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import UNCHANGED as KIND_UNCHANGED
from subscriber.protocol.messages import Begin, Column, Commit, LogicalMessage, Message, Relation, TupleData, Update
from tests.support.sink_postgres import Remote, truncate

T = Remote("t", "*id", "v", relation_id=1)


def events(*messages: Message, **options: str) -> list[dict[str, Any]]:
    written: list[Record] = []
    given = {name.replace("_", "."): value for name, value in options.items()}
    feed = PluginFeed(Debezium(), LogicalDecodingContext("debezium", given, capabilities=capabilities(180000), writer=written.append))
    feed.start()
    for message in (Begin(Lsn(0x100), 1_000_000, 5), T.relation, *messages, Commit(0, Lsn(0x100), Lsn(0x108), 1_000_000)):
        feed.message(message)
    return [json.loads(record.data) for record in written]


def test_the_envelope() -> None:
    (event,) = events(T.insert("1", "a"), topic_prefix="shop", database_dbname="app")
    assert event.pop("ts_ms") > 1_700_000_000_000
    assert event == {
        "before": None,
        "after": {"id": "1", "v": "a"},
        "source": {
            "version": "subscriber",
            "connector": "postgresql",
            "name": "shop",
            "ts_ms": 946_684_801_000,
            "snapshot": "false",
            "db": "app",
            "sequence": '[null,"256"]',
            "schema": "public",
            "table": "t",
            "txId": 5,
            "lsn": 256,
            "xmin": None,
        },
        "transaction": None,
        "op": "c",
    }


def test_operations() -> None:
    found = events(
        T.update("1", "b"),
        T.update("2", "b", old=("1", None)),
        T.delete("2", None),
        truncate(T),
        LogicalMessage(True, Lsn(1), "p", b"\xff"),
        LogicalMessage(False, Lsn(2), "q", b""),
    )
    assert [(event["op"], event.get("before"), event.get("after")) for event in found] == [
        ("u", None, {"id": "1", "v": "b"}),
        ("d", {"id": "1"}, None),
        ("c", None, {"id": "2", "v": "b"}),
        ("d", {"id": "2"}, None),
        ("t", None, None),
        ("m", None, None),
        ("m", None, None),
    ]
    assert found[5]["message"] == {"prefix": "p", "content": "/w=="}
    assert (found[6]["source"]["txId"], found[6]["source"]["lsn"]) == (None, 2)


@pytest.mark.parametrize(
    ("oid", "text", "expected"),
    [
        (23, "-5", -5),
        (20, "9223372036854775807", 9223372036854775807),
        (701, "1.5e300", 1.5e300),
        (701, "NaN", "NaN"),
        (700, "-Infinity", "-Infinity"),
        (16, "t", True),
        (16, "f", False),
        (17, "\\x00ff", "AP8="),
        (1082, "1970-01-02", 1),
        (1082, "infinity", "infinity"),
        (1082, "0044-03-15 BC", "0044-03-15 BC"),
        (1083, "00:00:01.5", 1_500_000),
        (1083, "24:00:00", "24:00:00"),
        (1114, "1970-01-01 00:00:01.000001", 1_000_001),
        (1114, "10000-01-01 00:00:00", "10000-01-01 00:00:00"),
        (1184, "2024-02-29 12:00:00.5+02", "2024-02-29T10:00:00.500000Z"),
        (1700, "1.50", "1.50"),
        (25, "ü\n", "ü\n"),
    ],
)
def test_values(oid: int, text: str, expected: object) -> None:
    relation = Relation(1, "public", "t", "d", (Column("v", oid, -1, True),))
    row = TupleData(b"t", [text.encode()])
    (event,) = events(relation, Update(1, None, None, row))
    assert event["after"] == {"v": expected}


def test_unchanged_and_binary_values() -> None:
    row = TupleData(b"t" + bytes([KIND_UNCHANGED]), [b"1", None])
    (event,) = events(Update(1, None, None, row))
    assert event["after"] == {"id": "1", "v": UNAVAILABLE}
    with pytest.raises(ConfigurationError, match="needs text"):
        events(Update(1, None, None, TupleData(b"tb", [b"1", b"x"])))
    with pytest.raises(ConfigurationError, match='option "a" = "b" is unknown'):
        events(a="b")
