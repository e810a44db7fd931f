"""Savepoints that are rolled back without a StreamAbort: what each way to read the stream makes of them."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

import subscriber
from subscriber import Settings, SubscriptionOptions
from subscriber.consumer.plugin_stream import PluginStream
from subscriber.consumer.transactions import TransactionStream, transactions
from subscriber.recording.file import RecordedSession, Recorder
from subscriber.subscription.replay import Replay
from subscriber.testing.fake_publisher import FakePublisher
from tests.unit.testing.fake_publisher.replicas import items, replica

STREAMING = SubscriptionOptions(streaming="on")
KEPT = [1, 3, 4]


async def savepoints(publisher: FakePublisher) -> None:
    """A streamed transaction: rows of a savepoint that is rolled back have been sent before others."""
    async with publisher.transaction() as t:
        t.insert("items", id=1, name="x" * 400)
        with t.savepoint():
            t.insert("items", [{"id": id, "name": "x" * 400} for id in range(100, 150)])
            t.rollback_savepoint()
        t.insert("items", id=3, name="after")
    async with publisher.transaction() as t:
        t.insert("items", id=4)


@asynccontextmanager
async def followed(publisher: FakePublisher, **more: Any) -> AsyncIterator[TransactionStream[Any]]:
    """A stream that ends at the end of the WAL, after :func:`savepoints`."""
    arguments: dict[str, Any] = {"publications": ["app"], "slot_name": "s", "options": STREAMING}
    async with transactions(publisher.dsn(), until_caught_up=True, **arguments) as first:
        async for _ in first:
            pass
    await savepoints(publisher)
    settings = Settings(wal_retrieve_retry_interval=0.1)
    async with transactions(publisher.dsn(), until_caught_up=True, settings=settings, **arguments, **more) as stream:
        yield stream


async def ids(stream: TransactionStream[Any]) -> list[int]:
    found = []
    async for transaction in stream:
        found += [int(change.new["id"]) async for change in transaction]
        await transaction.acknowledge()
    return found


@pytest.mark.parametrize("streaming", ["on", "parallel"])
@pytest.mark.parametrize("unknown", [False, True])
async def test_replica(streaming: Literal["on", "parallel"], unknown: bool, caplog: pytest.LogCaptureFixture) -> None:
    async with items(logical_decoding_work_mem=8000) as publisher, replica(publisher, streaming=streaming) as copy:
        await copy.same()
        await publisher.until_active("sub")
        publisher.faults.add("lost_abort", times=2)
        if unknown:
            publisher.faults.add("unknown_outcome")
        await savepoints(publisher)
        assert len(await copy.same()) == 3
        assert copy.subscription.status.statistics.rolled_back_changes == (0 if unknown else 50)
        assert ("asking the publisher to send only complete transactions" in caplog.text) == unknown


@pytest.mark.parametrize("unknown", [False, True])
async def test_transactions(unknown: bool, caplog: pytest.LogCaptureFixture) -> None:
    async with items(logical_decoding_work_mem=8000) as publisher:
        publisher.faults.add("lost_abort", times=2)
        if unknown:
            publisher.faults.add("unknown_outcome")
        async with followed(publisher) as stream:
            assert await ids(stream) == KEPT
        assert ("their changes (50) are left out" in caplog.text) == (not unknown)


async def test_plugin_with_blocks_is_told_that_all_of_it_is_aborted_and_gets_it_again() -> None:
    async with items(logical_decoding_work_mem=8000) as publisher:
        publisher.faults.add("lost_abort")
        plugin_options = {"stream-changes": "on", "include-xids": "off", "skip-empty-xacts": "on"}
        async with await PluginStream.open(publisher.dsn(), "test_decoding", plugin_options, STREAMING) as plugin:
            assert plugin.streaming
            lines: list[str] = []
            async with followed(publisher, blocks=True) as stream:
                async for received in stream:
                    async for records in plugin.records(received):
                        lines += [record.data.decode() for record in records]
                    await plugin.acknowledge(received)
    place = lines.index("aborting streamed (sub)transaction")
    assert all(line.startswith(("opening a streamed block", "streaming change", "closing a streamed block")) for line in lines[:place])
    assert lines[place + 1 :] == [
        "BEGIN",
        f"table public.items: INSERT: id[integer]:1 name[text]:'{'x' * 400}' big[text]:null",
        "table public.items: INSERT: id[integer]:3 name[text]:'after' big[text]:null",
        "COMMIT",
        "BEGIN",
        "table public.items: INSERT: id[integer]:4 name[text]:null big[text]:null",
        "COMMIT",
    ]


@pytest.mark.parametrize("unknown", [False, True])
async def test_recording_has_the_answers(tmp_path: Path, unknown: bool) -> None:
    async with items(logical_decoding_work_mem=8000) as publisher:
        publisher.faults.add("lost_abort", times=2)
        if unknown:
            publisher.faults.add("unknown_outcome")
        recorder = Recorder(tmp_path / "app.rec")
        async with followed(publisher, recorder=recorder) as stream:
            assert await ids(stream) == KEPT
        recorder.close()
    with closing(sqlite3.connect(tmp_path / "db")) as database:
        database.execute("CREATE TABLE items (id int PRIMARY KEY, name text, big text)")
        await Replay(tmp_path / "app.rec", f"sqlite:///{tmp_path / 'db'}", name="replay").run()
        assert [id for (id,) in database.execute("SELECT id FROM items ORDER BY id")] == KEPT


async def test_older_recording_without_answers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "answered", lambda *_: None)
    written = RecordedSession.to_json
    monkeypatch.setattr(RecordedSession, "to_json", lambda self: written(replace(self, answered=False)))
    async with items(logical_decoding_work_mem=8000) as publisher:
        publisher.faults.add("lost_abort")
        recorder = Recorder(tmp_path / "app.rec")
        async with followed(publisher, recorder=recorder) as stream:
            await ids(stream)
        recorder.close()
    with closing(sqlite3.connect(tmp_path / "db")) as database:
        database.execute("CREATE TABLE items (id int PRIMARY KEY, name text, big text)")
    with pytest.raises(subscriber.ProtocolError, match="does not tell which subtransactions") as caught:
        await Replay(tmp_path / "app.rec", f"sqlite:///{tmp_path / 'db'}", name="replay").run()
    assert "older version" in str(caught.value.hint)
