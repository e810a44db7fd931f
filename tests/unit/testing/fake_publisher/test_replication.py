"""Our own subscription follows the fake publisher: copy, changes, streams, two-phase, restart; as every version."""

from __future__ import annotations

import pytest

from subscriber.errors import ConfigurationError
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.memory import MemoryTarget
from subscriber.testing.fake_publisher import FakePublisher
from subscriber.types import TypeFact, TypeKind
from tests.unit.testing.fake_publisher.replicas import items, replica


async def fail(publisher: FakePublisher) -> None:
    async with publisher.transaction() as t:
        t.insert("items", [{"id": 3000}, {"id": 3000}])


@pytest.mark.parametrize(("version", "binary"), [(13, False), (14, True), (15, False), (16, True), (17, False), (18, True)])
async def test_rows_are_copied_and_followed(version: int, binary: bool) -> None:
    async with items(version) as publisher:
        async with publisher.transaction() as t:
            for id in range(50):
                t.insert("items", id=id, name=f"tab\t back\\slash\n{id}", big="x" * 3000 if id % 10 == 0 else None)
        async with replica(publisher, binary=binary) as copy:
            await copy.same()
            async with publisher.transaction() as t:
                t.update("items", {"id": 10}, name="the large value is not sent")
                t.update("items", {"id": 11}, id=1011)
                assert t.delete("items", {"id": 12}) == 1
                with t.savepoint():
                    t.insert("items", id=2000, name=None)
                    with t.savepoint():
                        t.insert("items", id=2001)
                        t.rollback_savepoint()
                with pytest.raises(ConfigurationError, match="duplicate key"), t.savepoint():
                    t.insert("items", [{"id": 2002}, {"id": 2000}])
            await copy.same()
            with pytest.raises(ConfigurationError, match="duplicate key"):
                await fail(publisher)
            await copy.same()
            async with publisher.transaction() as t:
                t.truncate("items")
                t.insert("items", id=1)
            assert len(await copy.same()) == 1


@pytest.mark.parametrize(("version", "streaming"), [(13, "on"), (14, "on"), (15, "on"), (16, "parallel"), (18, "off"), (18, "parallel")])
async def test_large_transactions_are_streamed_or_serialized(version: int, streaming: str) -> None:
    async with items(version, logical_decoding_work_mem=5000) as publisher, replica(publisher, streaming=streaming) as copy:
        await copy.same()
        await publisher.until_active("sub")
        first, second = publisher.transaction(), publisher.transaction()
        for id in range(200):
            first.insert("items", id=id, name="first")
            second.insert("items", id=1000 + id, name="second")
            if id % 50 == 0:
                with first.savepoint():
                    for other in range(2000, 2020):
                        first.insert("items", id=other, name="rolled back")
                    first.rollback_savepoint()
        statistics = publisher.slots["sub"].statistics
        serialized = version == 13 or streaming == "off"
        await publisher.until(lambda: statistics.spill_txns > 0 if serialized else statistics.stream_txns == 2)
        second.rollback()
        first.commit()
        assert len(await copy.same()) == 200
        assert (statistics.stream_txns, statistics.spill_txns > 0) == (0 if serialized else 2, serialized)


@pytest.mark.parametrize("version", [15, 18])
async def test_prepared_transactions(version: int) -> None:
    target = MemoryTarget()
    async with items(version, logical_decoding_work_mem=5000) as publisher:
        async with replica(publisher, target, two_phase=True) as copy:
            await copy.same()
            await publisher.until_active("sub")
            small, large, gone = publisher.transaction(), publisher.transaction(), publisher.transaction()
            small.insert("items", id=1)
            for id in range(100, 300):
                large.insert("items", id=id)
            gone.insert("items", id=500)
            for number, transaction in enumerate((small, large, gone)):
                transaction.prepare(f"gid {number}")
            await copy.subscription.wait_for(publisher.wal.end, timeout=10)
            assert target.rows("public.items") == []
        # the ends come after a restart: the prepared transactions do not come again
        async with replica(publisher, target, two_phase=True) as copy:
            small.commit_prepared()
            large.commit_prepared()
            gone.rollback_prepared()
            assert len(await copy.same()) == 201


async def test_a_transaction_that_was_prepared_before_two_phase_comes_whole_at_its_commit() -> None:
    target = MemoryTarget()
    async with items() as publisher:
        async with replica(publisher, target) as copy:
            await copy.same()
            early = publisher.transaction()
            early.insert("items", id=1)
            early.prepare("early")
            await copy.same()
        publisher.slots["sub"].two_phase, publisher.slots["sub"].two_phase_at = True, publisher.wal.end
        async with replica(publisher, target) as copy:
            early.commit_prepared()
            assert len(await copy.same()) == 1


async def test_changes_continue_after_restarts_of_either_side() -> None:
    target = MemoryTarget()
    async with items() as publisher:
        open_one = publisher.transaction()
        async with replica(publisher, target) as copy:
            await copy.same()
            open_one.insert("items", id=1)
            async with publisher.transaction() as t:
                t.insert("items", id=2)
            await copy.same()
        slot = publisher.slots["sub"]
        assert open_one.first_lsn is not None
        assert slot.restart_lsn <= open_one.first_lsn < slot.confirmed_flush_lsn
        async with publisher.transaction() as t:
            t.insert("items", id=3)
        async with replica(publisher, target) as copy:
            await copy.same()
            open_one.commit()
            await copy.same()
            await publisher.shutdown()
            await publisher.start()
            async with publisher.transaction() as t:
                t.insert("items", id=4)
            assert len(await copy.same()) == 4


async def test_types_identities_and_columns() -> None:
    async with FakePublisher(toast_threshold=10) as publisher:
        publisher.add_type(TypeFact(90001, "public", "mood", TypeKind.ENUM, labels=("sad", "happy")))
        publisher.create_table("full", {"a": "varchar(20)", "b": "numeric(8,2)", "c": "int[]", "d": "mood"}, replica_identity="f")
        publisher.create_table("indexed", {"a": "text", "b": "timestamptz", "c": "bytea"}, identity_index=["a"], replica_identity="i")
        publisher.create_table("listed", {"id": "bigint", "seen": "bool", "hidden": "text"}, key=["id"])
        publisher.create_publication("app", "full", "indexed", "listed", columns={"listed": ["id", "seen"]})
        async with replica(publisher) as copy:
            await copy.subscription.wait_for(publisher.wal.end, timeout=10)
            async with publisher.transaction() as t:
                t.insert("full", a="one", b="1.50", c=[1, None, 3], d="happy")
                t.insert("full", a="two", b=None, c=None, d=None)
                t.update("full", {"a": "two"}, d="sad")
                t.insert("indexed", a="a key that is stored out of line", b="2024-05-01 00:00:00+00", c=b"\0\xff")
                t.update("indexed", {"c": b"\0\xff"}, b=None)
                t.insert("listed", id=2**40, seen=True, hidden="x")
                t.update("listed", {"seen": True}, hidden="y")
            await copy.subscription.wait_for(t.end_lsn, timeout=10)
            assert [row["d"] for row in copy.target.rows("public.full")] == ["happy", "sad"]
            assert copy.target.rows("public.indexed") == [{"a": "a key that is stored out of line", "b": None, "c": b"\0\xff"}]
            assert copy.target.rows("public.listed") == [{"id": 2**40, "seen": True}]
            publisher.alter_table("listed", add={"more": "int"})
            async with publisher.transaction() as t:
                t.delete("listed", {"id": 2**40})
            await copy.subscription.wait_for(t.end_lsn, timeout=10)
            assert copy.target.rows("public.listed") == []


async def test_row_filters_apply_to_the_copy_and_the_changes() -> None:
    async with items() as publisher:
        publisher.create_publication("more", "items", where={"items": "id >= 100"})
        publisher.publications["app"] = publisher.publications.pop("more")
        async with publisher.transaction() as t:
            for id in (1, 100, 200):
                t.insert("items", id=id)
        async with replica(publisher) as copy:
            await copy.subscription.wait_for(publisher.wal.end, timeout=10)
            async with publisher.transaction() as t:
                t.update("items", {"id": 1}, id=101)  # becomes an INSERT
                t.update("items", {"id": 200}, id=2)  # becomes a DELETE
                t.insert("items", id=3)
                t.update("items", {"id": 100}, name="changed")
            await copy.subscription.wait_for(t.end_lsn, timeout=10)
            found = sorted((row["id"], row["name"]) for row in copy.target.rows("public.items"))
            assert found == [(100, "changed"), (101, None)]


@pytest.mark.parametrize("origin", ["any", "none"])
async def test_origin(origin: str) -> None:
    async with items() as publisher, replica(publisher, origin=origin) as copy:
        await copy.same()
        async with publisher.transaction(origin="elsewhere", origin_lsn=Lsn(5)) as t:
            t.insert("items", id=1)
        async with publisher.transaction() as t:
            t.insert("items", id=2)
        await copy.subscription.wait_for(publisher.wal.end, timeout=10)
        found = {row["id"] for row in copy.target.rows("public.items")}
        assert found == ({1, 2} if origin == "any" else {2})
