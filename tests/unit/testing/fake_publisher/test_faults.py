"""What goes wrong on a publisher: our subscription ends with the right rows, or with the right error."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from subscriber.config import SubscriptionOptions
from subscriber.errors import DataLossError, ProtocolError
from subscriber.protocol.capabilities import negotiate
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.sinks.memory import MemoryTarget
from subscriber.testing.fake_publisher import FakePublisher
from subscriber.walreceiver.connection import WalReceiverConnection
from subscriber.walreceiver.slot_status import observe_slot
from tests.unit.testing.fake_publisher.replicas import items, replica, subscription_of


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "cut", "before": "C"},
        {"kind": "cut", "after": 3, "times": 3},
        {"kind": "error", "before": "I"},
        {"kind": "stray_abort", "before": "IC", "times": 3},
        {"kind": "delay", "before": "C"},
        {"kind": "redeliver"},
    ],
    ids=lambda fault: "-".join(map(str, fault.values())),
)
async def test_rows_are_right_after_a_fault(fault: dict[str, Any]) -> None:
    async with items() as publisher, replica(publisher) as copy:
        async with publisher.transaction() as t:
            t.insert("items", id=1)
        await copy.same()
        await publisher.until_active("sub")
        armed = publisher.faults.add(**fault)
        if armed.kind.value == "redeliver":
            publisher.faults.add("cut")
        for id in range(10, 15):
            async with publisher.transaction() as t:
                t.insert("items", id=id)
                t.update("items", {"id": id}, name="changed")
        assert len(await copy.same()) == 6
        assert armed.happened == armed.times


async def until_the_run_fails(publisher: FakePublisher, target: MemoryTarget, kind: str, before: str) -> None:
    async with replica(publisher, target) as copy:
        await copy.same()
        await publisher.until_active("sub")
        publisher.faults.add(kind, before=before)
        async with publisher.transaction() as t:
            t.insert("items", id=1)
        await copy.running


@pytest.mark.parametrize(
    ("kind", "before"),
    [("garbage", "I"), ("truncated", "R"), ("truncated", "I"), ("duplicate", "B"), ("duplicate", "C"), ("false_keepalive", "C")],
)
async def test_wrong_bytes_end_the_run_and_the_next_one_has_the_right_rows(kind: str, before: str) -> None:
    target = MemoryTarget()
    async with items() as publisher:
        with pytest.raises(ProtocolError):
            await until_the_run_fails(publisher, target, kind, before)
        async with replica(publisher, target) as copy:
            async with publisher.transaction() as t:
                t.insert("items", id=2)
            assert len(await copy.same()) == 2


async def test_a_stalled_publisher_sends_the_rest_when_it_is_released() -> None:
    async with items() as publisher, replica(publisher) as copy:
        await copy.same()
        await publisher.until_active("sub")
        publisher.faults.add("stall", before="C")
        async with publisher.transaction() as t:
            t.insert("items", id=1)
        await publisher.until(lambda: publisher.faults.stalled)
        publisher.faults.release()
        await copy.same()


async def run_again(publisher: FakePublisher, target: MemoryTarget) -> None:
    await asyncio.wait_for(subscription_of(publisher, target).run(), 10)


async def followed(publisher: FakePublisher, target: MemoryTarget) -> None:
    """Copy and follow something, and stop."""
    async with replica(publisher, target) as copy:
        async with publisher.transaction() as t:
            t.insert("items", id=1)
        await copy.same()


@pytest.mark.parametrize(
    ("version", "reason", "setting"),
    [
        (14, "wal_removed", "max_slot_wal_keep_size"),
        (17, "wal_removed", "max_slot_wal_keep_size"),
        (17, "rows_removed", "hot_standby_feedback"),
        (18, "wal_level_insufficient", "wal_level"),
        (18, "idle_timeout", "idle_replication_slot_timeout"),
    ],
)
async def test_an_invalidated_slot_is_an_error_that_names_the_setting(version: int, reason: str, setting: str) -> None:
    target = MemoryTarget()
    async with items(version) as publisher:
        await followed(publisher, target)
        publisher.invalidate_slot("sub", reason)
        with pytest.raises(DataLossError, match="was invalidated") as raised:
            await run_again(publisher, target)
        assert setting in (raised.value.hint or "")
        stream = await WalReceiverConnection.connect(publisher.dsn(), application_name="test")
        options = negotiate(stream.capabilities, SubscriptionOptions(), publications=["p"], two_phase=False)
        danger = (await observe_slot(publisher.dsn(), "sub", application_name="test")).danger or ""
        assert setting in danger or version < 17
        assert "invalidated" in danger
        if version >= 18:
            with pytest.raises(DataLossError) as raised:
                await stream.start_replication("sub", INVALID_LSN, options)
            assert setting in (raised.value.hint or "")
        await stream.close()


async def test_a_lost_slot_and_another_cluster_are_errors() -> None:
    target = MemoryTarget()
    async with items() as publisher:
        await followed(publisher, target)
        slot = publisher.slots["sub"]
        publisher.drop_slot("sub")
        with pytest.raises(DataLossError, match="does not exist on the publisher any more"):
            await run_again(publisher, target)
        publisher.slots["sub"] = slot
        publisher.system_identifier = "7"
        with pytest.raises(DataLossError, match="system identifier is 7"):
            await run_again(publisher, target)


async def test_a_promoted_publisher_is_followed_on_its_new_timeline() -> None:
    target = MemoryTarget()
    async with items() as publisher:
        await followed(publisher, target)
        publisher.promote()
        async with replica(publisher, target) as copy:
            async with publisher.transaction() as t:
                t.insert("items", id=2)
            assert len(await copy.same()) == 2
        publisher.timelines = [(1, Lsn(1))]
        publisher.promote()
        publisher.timelines = [(1, Lsn(1)), (2, Lsn(1))]
        with pytest.raises(DataLossError, match="ended at 0/1"):
            await run_again(publisher, target)


async def test_a_fast_shutdown_waits_for_confirmation() -> None:
    async with items() as publisher, replica(publisher) as copy:
        await copy.same()
        await publisher.until_active("sub")
        async with publisher.transaction() as t:
            t.insert("items", id=1)
        await publisher.shutdown()
        assert publisher.slots["sub"].confirmed_flush_lsn >= t.end_lsn
        await publisher.start()
