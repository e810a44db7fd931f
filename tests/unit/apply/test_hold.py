"""Apply is held exactly where the target has what a snapshot of the publisher sees."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from subscriber.apply.hold import Hold, PublisherSnapshot
from subscriber.errors import TargetError
from subscriber.protocol.lsn import Lsn
from subscriber.transaction.visibility import XidSnapshot
from tests.unit.apply.memory_publisher import keepalive
from tests.unit.apply.scripted_stream import transaction
from tests.unit.apply.virtual_time import run
from tests.unit.apply.worker_setup import WorkerSetup, running_worker


@dataclass(frozen=True)
class Snapshot:
    """A :class:`subscriber.apply.hold.PublisherSnapshot`."""

    xids: XidSnapshot
    wal_end: Lsn


def snapshot(text: str, wal_end: int) -> Snapshot:
    return Snapshot(XidSnapshot.parse(text), Lsn(wal_end))


class Held:
    """A hold that takes these snapshots, the last one again and again, and notes the rows of the target."""

    def __init__(self, setup: WorkerSetup, *snapshots: Snapshot, limit: float = 2.0, fails: bool = False) -> None:
        self._setup = setup
        self._snapshots = list(snapshots)
        self._fails = fails
        self.taken = 0
        self.rows: list[str] | None = None
        self.lsn: Lsn | None = None
        self.hold = setup.hold = Hold(self._take, self._act, limit)
        setup.receiver.wake()

    async def _take(self) -> PublisherSnapshot:
        self.taken += 1
        return self._snapshots.pop(0) if len(self._snapshots) > 1 else self._snapshots[0]

    async def _act(self, _: PublisherSnapshot, lsn: Lsn) -> None:
        self.rows, self.lsn = self._setup.rows, lsn
        await asyncio.sleep(0.1)
        assert self._setup.rows == self.rows, "nothing is applied meanwhile"
        if self._fails:
            raise TargetError("it failed")


def give(setup: WorkerSetup, xids: Sequence[int]) -> None:
    setup.stream.give([frame for xid in xids for frame in transaction(xid)])


def test_stops_before_the_first_transaction_that_the_snapshot_does_not_see() -> None:
    async def work() -> None:
        async with running_worker() as (setup, _):
            held = Held(setup, snapshot("3:4:3", 250))
            give(setup, [1, 2, 3, 4])
            await held.hold.ended.wait()
            assert (held.rows, held.lsn, held.hold.error) == (["1", "2"], Lsn(208), None)
            assert held.hold.seconds == pytest.approx(0.1, abs=0.01)
            await asyncio.sleep(1)
            assert setup.rows == ["1", "2", "3", "4"]

    run(work())


def test_waits_until_everything_that_the_snapshot_sees_was_received() -> None:
    async def work() -> None:
        async with running_worker() as (setup, _):
            held = Held(setup, snapshot("3:3:", 250))
            give(setup, [1])
            await asyncio.sleep(30)
            assert not held.hold.ended.is_set()
            assert setup.rows == ["1"]
            give(setup, [2])
            setup.stream.give([keepalive(Lsn(250))])
            await held.hold.ended.wait()
            # the wait held up nothing
            assert (held.rows, held.hold.error) == (["1", "2"], None)
            assert held.hold.seconds < 0.2

    run(work())


def test_takes_another_snapshot_if_commits_became_visible_in_another_order() -> None:
    async def work() -> None:
        async with running_worker() as (setup, _):
            # the first one sees 2, but not 1, which was committed before
            held = Held(setup, snapshot("1:3:1", 250), snapshot("3:3:", 260))
            give(setup, [1, 2, 3])
            await held.hold.ended.wait()
            assert (held.rows, held.taken, held.hold.error) == (["1", "2"], 2, None)

    run(work())


def test_takes_another_snapshot_until_it_sees_what_was_applied() -> None:
    async def work() -> None:
        async with running_worker() as (setup, _):
            give(setup, [1, 2])
            await asyncio.sleep(1)
            assert setup.rows == ["1", "2"]
            held = Held(setup, snapshot("1:3:1", 200), snapshot("1:3:1", 200), snapshot("2:3:", 208))
            await held.hold.ended.wait()
            assert (held.rows, held.taken, held.hold.error) == (["1", "2"], 3, None)

    run(work())


def test_apply_continues_after_the_limit() -> None:
    async def work() -> None:
        async with running_worker() as (setup, _):
            held = Held(setup, snapshot("2:2:", 10_000))
            give(setup, [1, 2])
            await held.hold.ended.wait()
            assert held.rows is None
            assert "within 2 s" in str(held.hold.error)
            await asyncio.sleep(0.1)
            assert setup.rows == ["1", "2"]

    run(work())


def test_apply_continues_after_an_error() -> None:
    async def work() -> None:
        async with running_worker() as (setup, task):
            held = Held(setup, snapshot("2:2:", 108), fails=True)
            give(setup, [1, 2])
            await held.hold.ended.wait()
            assert str(held.hold.error) == "it failed"
            await asyncio.sleep(0.1)
            assert setup.rows == ["1", "2"]
            assert not task.done()

    run(work())


def test_ids_of_a_stream_have_no_epoch() -> None:
    found = XidSnapshot.parse(f"{2**32 - 5}:{2**32 + 5}:{2**32 - 3},{2**32 + 2}")
    seen = {xid: found.sees(xid % 2**32) for xid in range(2**32 - 8, 2**32 + 8)}
    assert [xid - 2**32 for xid, visible in seen.items() if not visible] == [-3, 2, 5, 6, 7]
    with pytest.raises(ValueError, match="unpack"):
        XidSnapshot.parse("1:2")
