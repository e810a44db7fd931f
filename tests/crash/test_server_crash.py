"""The servers crash under the load, the subscriber's process lives: what was acknowledged is in the target in every case."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from subscriber.protocol.lsn import Lsn
from subscriber.testing.load.mixed_load import MixedLoad
from subscriber.testing.server import EmbeddedServer
from tests.crash.process import SubscriberProcess
from tests.crash.scenario import (
    assert_all_arrives,
    assert_same,
    eventually,
    make_load,
    make_tables,
    prepare_one,
    under_load,
)
from tests.support.database import Database, ServerAddress, let_slots_be_created, let_small_transactions_stream


@contextlib.contextmanager
def _server(**settings: str) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer.create(18, settings=settings)
    try:
        server.createdb("crash")
        yield server
    finally:
        server.remove()


def _database(server: EmbeddedServer) -> Database:
    return Database(ServerAddress(server.dsn(), server.version), "crash")


def _position(process: SubscriberProcess) -> Lsn:
    return Lsn.parse(process.target.value('SELECT remote_lsn::text FROM subscriber."position" WHERE srrelid = 0'))


def _acknowledged(process: SubscriberProcess) -> Lsn:
    return Lsn.parse(process.acknowledged())


async def _progress(process: SubscriberProcess, load: MixedLoad) -> None:
    """Some transactions of now arrive, and are acknowledged."""
    before, done = _acknowledged(process), load.report.transactions
    assert await eventually(lambda: load.report.transactions > done + 20 and _acknowledged(process) > before, 90, process), process.log()


async def _starts(process: SubscriberProcess) -> None:
    """From here on it waits for servers that are away."""
    process.start()
    assert await eventually(process.streams, 90, process), process.log()


def _prepared(process: SubscriberProcess) -> set[str]:
    return {gid for (gid,) in process.publisher.fetch("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()")}


def _reconnect(process: SubscriberProcess, publisher: EmbeddedServer, target: EmbeddedServer) -> None:
    process.publisher.close()
    process.target.close()
    process.publisher, process.target = _database(publisher), _database(target)


@pytest.mark.endurance
@pytest.mark.parametrize("crashes", [7])
@pytest.mark.timeout(1200)
async def test_target_crashes(tmp_path: Path, crashes: int) -> None:
    """Without two-phase commit, whose PREPARE would bring everything before it to the disk; and with a WAL writer that takes its time."""
    seed = secrets.randbelow(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    lost = 0
    with _server() as publisher, _server(synchronous_commit="off", wal_writer_delay="1s", wal_writer_flush_after="1GB") as target:
        process = SubscriberProcess(_database(publisher), _database(target), tmp_path, options=("synchronous_commit=off",))
        await make_tables(process.publisher, process.target)
        load = make_load(process.publisher, seed)
        let_slots_be_created(process.publisher, load)
        try:
            async with under_load(load):
                await _starts(process)
                for number in range(crashes):
                    if number == 2:
                        assert await eventually(process.are_tables_ready, 150, process), process.log()
                        let_small_transactions_stream(process.publisher, load)
                    if number:
                        await _progress(process, load)
                    # a random moment, not synchronisation
                    await asyncio.sleep(rng.uniform(0, 1))
                    visible = _position(process)
                    await asyncio.to_thread(target.stop, "immediate")
                    acknowledged = _acknowledged(process)
                    await asyncio.to_thread(target.start)
                    _reconnect(process, publisher, target)
                    survived = _position(process)
                    assert survived >= acknowledged
                    lost += survived < visible
                    process.assert_runs()
                await _progress(process, load)
                process.kill()
            await load.finish()
            for _ in range(2):
                await asyncio.to_thread(process.catch_up, 60)
            await assert_same(process)
        finally:
            process.end()
            process.publisher.close()
            process.target.close()
    print(f"{lost} of {crashes} crashes lost commits that had been visible; {load.report.transactions} transactions")
    assert lost > 0


@pytest.mark.endurance
@pytest.mark.parametrize("crashes", [6])
@pytest.mark.timeout(1200)
async def test_publisher_crashes(tmp_path: Path, crashes: int) -> None:
    seed = secrets.randbelow(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    early: set[str] = set()
    with _server() as publisher, _server() as target:
        process = SubscriberProcess(_database(publisher), _database(target), tmp_path)
        await make_tables(process.publisher, process.target)
        load = make_load(process.publisher, seed, reconnect=True)
        let_slots_be_created(process.publisher, load)
        try:
            async with under_load(load):
                await _starts(process)
                for number, stop in enumerate([publisher.kill, publisher.stop, publisher.kill] * (crashes // 3)):
                    if number == 2:
                        assert await eventually(process.is_ready, 150, process), process.log()
                        early = _prepared(process)
                        let_small_transactions_stream(process.publisher, load)
                    elif number:
                        await _progress(process, load)
                    await asyncio.sleep(rng.uniform(0, 1))
                    await asyncio.to_thread(*((stop,) if stop == publisher.kill else (stop, "immediate")))
                    await asyncio.to_thread(publisher.start)
                    _reconnect(process, publisher, target)
                await _progress(process, load)
                # what was prepared before two-phase commit was enabled is sent when it is committed
                assert await eventually(lambda: not early & _prepared(process), 90, process), process.log()
                process.kill()
                for number in range(3):
                    prepare_one(process.publisher, f"left {number}", rng)
            await assert_all_arrives(process, load, 60, lambda: assert_same(process))
        finally:
            process.end()
            process.publisher.close()
            process.target.close()
    print(f"{load.report.transactions} transactions, {load.report.lost} lost with their connection")
    assert load.report.lost >= crashes
