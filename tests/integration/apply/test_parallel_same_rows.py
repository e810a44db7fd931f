"""For anything that the publisher sends, and at any progress of an attempt: in parallel or from the spool, the rows are the same.

And no change is made before everything that was committed before it was sent: a trigger in the target notes with each row of ``log``
how many rows of other transactions it sees. That would not show in the rows themselves: an attempt that came too early mostly finds a
row missing or locked, and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from subscriber.apply.parallel import ParallelApply
from subscriber.apply.receiving.receiver import Receiver
from subscriber.apply.receiving.spool import SpoolDirectory
from subscriber.apply.skip import Skipping
from subscriber.apply.tables.table_state import TableStates
from subscriber.apply.worker import ApplyWorker
from subscriber.config import Settings
from subscriber.interfaces import Batch, TableEntry, TableName, TableState, TwoPhaseState
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.sinks.postgres.opened_postgres_sink import OpenedPostgresSink
from subscriber.transaction.feedback import FlushTracker
from tests.support.database import WAIT_SECONDS, Database
from tests.support.sink_postgres import START, Feed, opened
from tests.support.stream_histories import History
from tests.unit.apply.scripted_stream import EndlessRun, ScriptedStream

STEPS = 250
SETTINGS = Settings(logical_decoding_work_mem=64 * 1024, wal_receiver_timeout=0)
TABLES = """
CREATE TABLE t (id int PRIMARY KEY, v text);
CREATE TABLE log (label text, seen int);
CREATE OR REPLACE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        NEW.seen := (SELECT count(*) FROM public.log WHERE split_part(label, '-', 1) <> split_part(NEW.label, '-', 1));
        RETURN NEW;
    END
$$;
CREATE TRIGGER look BEFORE INSERT ON log FOR EACH ROW EXECUTE FUNCTION look();
ALTER TABLE log ENABLE ALWAYS TRIGGER look;
"""


class ParallelWorker:
    """A worker between a scripted stream and the sink of a feed."""

    def __init__(self, feed: Feed, spool: SpoolDirectory, limit: int) -> None:
        states = TableStates()
        states.load({TableName("public", name): TableEntry(TableState.READY, START) for name in ("t", "log")}, START)
        self.stream = ScriptedStream()
        self.tracker = FlushTracker(START)
        self.receiver = Receiver(self.stream, self.tracker, spool, SETTINGS)
        self.parallel = ParallelApply(self.receiver, feed.opened, states, limit)
        self.worker = ApplyWorker(
            self.receiver,
            feed.opened,
            states,
            EndlessRun(),
            two_phase=TwoPhaseState.ENABLED,
            skipping=Skipping(INVALID_LSN, "sub"),
            parallel=self.parallel,
        )

    async def applied(self, lsn: Lsn, task: asyncio.Task[None]) -> None:
        """Everything up to there is."""
        async with asyncio.timeout(WAIT_SECONDS):
            while self.tracker.applied < lsn:
                if task.done():
                    task.result()
                await asyncio.sleep(0.002)

    async def attempts_are_even(self, task: asyncio.Task[None]) -> None:
        """No attempt could do more now."""
        async with asyncio.timeout(WAIT_SECONDS):
            while not task.done() and (
                self.stream.unread
                or self.receiver.peek() is not None
                or self.parallel.events < self.receiver.popped
                or any(
                    attempt.alive and (attempt.done < attempt.stream.available(self.parallel.events) or attempt.session is None)
                    for attempt in self.parallel._attempts.values()
                )
            ):
                await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def running_worker(feed: Feed, directory: Path, limit: int) -> AsyncIterator[tuple[ParallelWorker, asyncio.Task[None]]]:
    async with SpoolDirectory(str(directory), "same rows") as spool:
        running = ParallelWorker(feed, spool, limit)
        await running.receiver.start()
        try:
            async with running.parallel:
                task = asyncio.create_task(running.worker.run())
                try:
                    yield running, task
                finally:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
        finally:
            await running.receiver.close()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("limit", [pytest.param(3, marks=pytest.mark.endurance), 0])
async def test_same_rows(target_db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    base = secrets.randbelow(10**6)
    print(f"seeds from {base}")
    apply, pauses = OpenedPostgresSink.apply, random.Random(base)

    async def apply_slowly(sink: OpenedPostgresSink, batch: Batch) -> None:
        # chance, not synchronisation: attempts get further than what was committed before
        await asyncio.sleep(pauses.choice((0, 0, 0.01)))
        await apply(sink, batch)

    monkeypatch.setattr(OpenedPostgresSink, "apply", apply_slowly)
    used: Counter[str] = Counter()
    for seed in range(base, base + (8 if limit else 2)):
        target_db.execute("DROP SCHEMA IF EXISTS subscriber CASCADE; DROP TABLE IF EXISTS t, log")
        target_db.execute(TABLES)
        rng, history = random.Random(f"pace {seed}"), History(seed)
        # changes that are received together may depend on each other
        together = (0.5, 0.9, 0.95)[seed % 3]
        async with opened(target_db, synchronous_commit="off") as feed:
            for name in ("t", "log"):
                feed.subscribe("public", name)
            async with running_worker(feed, tmp_path, limit) as (running, task):
                piece: list[bytes] = []
                for frames in history.frames(STEPS):
                    piece += frames
                    if piece and rng.random() > together:
                        running.stream.give(piece)
                        piece = []
                        if rng.random() < 0.6:
                            await running.attempts_are_even(task)
                running.stream.give(piece)
                # a commit ends 8 bytes later, but the last that is sent may be an abort
                await running.applied(Lsn(history.lsn), task)
            assert dict(target_db.fetch("SELECT id, v FROM t")) == history.rows, f"seed {seed}"
            logged: list[tuple[str, int]] = target_db.fetch("SELECT label, seen FROM log")
            assert sorted(label for label, _ in logged) == sorted(history.log), f"seed {seed}"
            early = {label: (seen, history.committed_before[label]) for label, seen in logged if seen < history.committed_before[label]}
            assert not early, f"seed {seed}"
            statistics = feed.opened.statistics
            assert (statistics.confl_update_missing, statistics.confl_delete_missing) == (0, 0), f"seed {seed}"
            used["parallel"] += statistics.parallel_transactions
            used["all"] += statistics.transactions
        assert target_db.fetch("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()") == []
    print(used)
    assert bool(used["parallel"]) == bool(limit)
