"""``subscriber.transactions`` without a server: every kind of change, spilled transactions, and acknowledging."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from subscriber.config import Settings, SubscriptionOptions
from subscriber.consumer.transactions import transactions
from subscriber.testing.fake_publisher import FakePublisher
from subscriber.transaction.changes import UNCHANGED
from tests.support.received import SMALL, changes, first


def source() -> FakePublisher:
    publisher = FakePublisher(logical_decoding_work_mem=SMALL)
    publisher.create_table("t", {"id": "int", "note": "text"}, key=["id"])
    publisher.create_publication("p", all_tables=True)
    return publisher


async def test_every_kind_of_change() -> None:
    async with source() as publisher:
        publisher.create_table("whole", {"a": "int", "b": "text"}, replica_identity="f")
        async with transactions(publisher.dsn(), publications=["p"]) as stream:
            async with publisher.transaction(origin="upstream") as t:
                t.insert("t", [{"id": 1, "note": "one"}, {"id": 2, "note": "x" * 5000}, {"id": 3, "note": "ü\n'"}])
                t.update("t", {"id": 2}, id=20)
                t.delete("t", {"id": 1})
                t.insert("whole", a=1)
                t.update("whole", {"a": 1}, b="x")
                t.delete("whole", {"a": 1})
                t.truncate("t", "whole", restart_identity=True)
            transaction, found = await first(stream)
        assert (transaction.xid, transaction.origin, transaction.end_lsn) == (t.xid, "upstream", t.end_lsn)
        assert found == [
            ("insert", "t", {"id": "1", "note": "one"}),
            ("insert", "t", {"id": "2", "note": "x" * 5000}),
            ("insert", "t", {"id": "3", "note": "ü\n'"}),
            ("update", "t", {"id": "2"}, None, {"id": "20", "note": UNCHANGED}),
            ("delete", "t", {"id": "1"}, None),
            ("insert", "whole", {"a": "1", "b": None}),
            ("update", "whole", None, {"a": "1", "b": None}, {"a": "1", "b": "x"}),
            ("delete", "whole", None, {"a": "1", "b": "x"}),
            ("truncate", {"t", "whole"}, False, True),
        ]


@pytest.mark.parametrize("memory", [SMALL, 64 * 1024 * 1024])
@pytest.mark.parametrize("streaming", ["off", "on", "parallel"])
async def test_large_transaction_with_aborted_subtransactions(memory: int, streaming: Any, tmp_path: Path) -> None:
    # tests/integration/consumer/test_transactions.py sees the files
    settings = Settings(logical_decoding_work_mem=memory, spool_directory=str(tmp_path))
    options = SubscriptionOptions(streaming=streaming)
    async with source() as publisher, transactions(publisher.dsn(), publications=["p"], options=options, settings=settings) as stream:
        async with publisher.transaction() as t:
            t.insert("t", [{"id": id, "note": "a" * 2000} for id in range(100)])
            with t.savepoint():
                t.insert("t", [{"id": id, "note": "b" * 2000} for id in range(100, 200)])
                with t.savepoint():
                    t.insert("t", id=9000)
                t.rollback_savepoint()
            t.insert("t", [{"id": id, "note": "c" * 2000} for id in range(200, 250)])
        async with publisher.transaction() as t:
            t.insert("t", id=3000, note="after")
        _, found = await first(stream)
        _, after = await first(stream)
    expected = [(str(id), ("a" if id < 100 else "c") * 2000) for id in (*range(100), *range(200, 250))]
    assert [(change[2]["id"], change[2]["note"]) for change in found] == expected
    assert after == [("insert", "t", {"id": "3000", "note": "after"})]


async def test_only_acknowledged_transactions_do_not_come_again() -> None:
    async with source() as publisher:
        await publisher.create_slot("s")
        for id in range(3):
            async with publisher.transaction() as t:
                t.insert("t", id=id)
        found = []
        for _ in range(2):
            async with transactions(publisher.dsn(), publications=["p"], slot_name="s", until_caught_up=True) as stream:
                async for transaction in stream:
                    found += [change[2]["id"] for change in await changes(transaction)]
                    if found == ["0"]:
                        await transaction.acknowledge()
        assert found == ["0", "1", "2", "1", "2"]
