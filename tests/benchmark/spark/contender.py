"""One contender, in a process with a Spark session of its own.

``python -m tests.benchmark.spark.contender NAME DIRECTORY`` reads commands from stdin, one JSON object a line, and answers each with one
line that begins with ``=`` (Spark may print what it likes).
All contenders are given the same changes; between commands they rest.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow.parquet as pq
from deltalake import DeltaTable

from subscriber.abc import Position, TableEntry, TableState
from subscriber.config import Settings, SubscriptionOptions
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.catalog.lake import LANDING, Lake
from subscriber.sinks.spark.catalog.snapshots import read_snapshot
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.landing.zone import LandingZone
from subscriber.sinks.spark.pipeline.applier import Applier
from subscriber.sinks.spark.pipeline.apply_loop import apply_forever
from subscriber.sinks.spark.pipeline.engines import Engine, LocalEngine
from subscriber.sinks.spark.pipeline.spark_engine import SparkEngine
from subscriber.sinks.spark.session.spark_session import DELTA_CONF, spark_session
from subscriber.sinks.spark.sink import SparkSink
from subscriber.spark import read
from tests.benchmark.spark.changes import TABLE, Changes, land, write_for_script
from tests.benchmark.spark.script import Script

CONF: Final = {"spark.log.level": "ERROR", "spark.sql.shuffle.partitions": "2", "spark.driver.memory": "2g"}
"""The same for all. Two partitions are what a user of two cores would set."""
_SUMS: Final = ["count(*)", "sum(id)", "sum(amount)", "sum(length(doc))", "sum(int(flag))"]
_WAIT: Final = 600.0
_TICK: Final = 0.5


class Contender(Protocol):
    """What can be asked of it."""

    def load(self, rows: int) -> None:
        """Begin with so many rows."""

    def bulk(self, batches: int, size: int) -> float:
        """Seconds to apply what is waiting."""

    def fresh(self, ticks: int, size: int) -> list[float]:
        """How long after it was there each of so many batches, one every half second, could be read."""

    def sums(self) -> list[str]:
        """What the rows amount to."""


class Lakes:
    """This program.

    Args:
        spark: None for engine ``local``.
        engine: makes it.
    """

    def __init__(self, directory: Path, spark: Any, engine: Callable[[Storage, Location], Engine]) -> None:
        self._path = directory / "lake"
        self._spark = spark
        location = Location.parse(f"spark://{self._path}")
        asyncio.run(self._make())
        self._storage = Storage.open(location)
        lake = Lake.find(self._storage)
        assert lake is not None
        self._id = lake.table(TABLE).id
        self._zone = LandingZone(self._storage, LANDING)
        self._zone.recover()
        self._applier = Applier(self._storage, engine(self._storage, location))
        self._changes = Changes()

    async def _make(self) -> None:
        sink = SparkSink(f"spark://{self._path}", options=SubscriptionOptions(), settings=Settings())
        opened = await sink.open("bench", lambda _: None)
        await opened.begin_slot("bench", ["pub"], opened.state.two_phase)
        await opened.set_position(Position("bench", "1", 1, Lsn(100)))
        await opened.add_tables([TABLE], TableEntry(TableState.READY))
        await opened.close()

    def _land(self, rows: Any) -> int:
        land(self._zone, self._storage, self._id, rows, self._changes.end)
        return self._changes.end

    def load(self, rows: int) -> None:
        for part in range(0, rows, 250_000):
            self._land(self._changes.base(min(250_000, rows - part)))
        self._all()

    def _all(self) -> None:
        self._applier.open()
        try:
            while self._applier.run_round() is not None:
                self._applier.tidy()
        finally:
            self._applier.close()

    def bulk(self, batches: int, size: int) -> float:
        for _ in range(batches):
            self._land(self._changes.batch(size))
        began = time.monotonic()
        self._all()
        return time.monotonic() - began

    def fresh(self, ticks: int, size: int) -> list[float]:
        published: list[tuple[int, float]] = []
        stop = threading.Event()
        applying = threading.Thread(
            target=apply_forever, args=(self._applier, stop, lambda snapshot: published.append((int(snapshot.lsn), time.monotonic())))
        )
        applying.start()
        waiting = [self._changes.batch(size) for _ in range(2)]  # not measured: the first jobs of a loop
        landed: list[tuple[int, float]] = []
        end = 0
        for number in range(ticks + 2):
            due = time.monotonic() + _TICK
            rows = waiting.pop(0) if waiting else self._changes.batch(size)
            end = self._land_at(rows)
            if number >= 2:
                landed.append((end, time.monotonic()))
            time.sleep(max(due - time.monotonic(), 0))
        deadline = time.monotonic() + _WAIT
        while not published or published[-1][0] < end:
            assert time.monotonic() < deadline, "it did not catch up"
            time.sleep(0.01)
        stop.set()
        applying.join()
        return [next(moment for lsn, moment in published if lsn >= end) - at for end, at in landed]

    def _land_at(self, rows: Any) -> int:
        end = int(rows["_lsn"][-1].as_py())
        land(self._zone, self._storage, self._id, rows, end)
        return end

    def sums(self) -> list[str]:
        snapshot = read_snapshot(self._storage)
        assert snapshot is not None
        if self._spark is None:
            self._spark = spark_session("local[2]", CONF)
        return _sums(read(self._spark, str(self._path), str(TABLE), snapshot=snapshot))

    def rounds(self) -> tuple[int, int]:
        """How many made something of the table, and how many of them by MERGE INTO."""
        snapshot = read_snapshot(self._storage)
        assert snapshot is not None
        operations = [entry["operation"] for entry in DeltaTable(self._path / snapshot.tables[TABLE].path).history()]
        return operations.count("WRITE") + operations.count("MERGE"), operations.count("MERGE")


class Streamed:
    """The script."""

    def __init__(self, directory: Path, spark: Any, *, delta: bool) -> None:
        self._directory = directory
        self._script = Script(spark, directory / "script", delta=delta)
        self._changes = Changes()

    def load(self, rows: int) -> None:
        base = self._directory / "base"
        base.mkdir()
        for part in range(0, rows, 250_000):
            pq.write_table(self._changes.base(min(250_000, rows - part)), base / f"{part:010d}.parquet")
        self._script.load(base)

    def _write(self, rows: Any) -> None:
        write_for_script(self._script.changes, rows, int(rows["_lsn"][-1].as_py()))

    def bulk(self, batches: int, size: int) -> float:
        for _ in range(batches):
            self._write(self._changes.batch(size))
        began = time.monotonic()
        query = self._script.stream(until_empty=True)
        query.awaitTermination()
        return time.monotonic() - began

    def fresh(self, ticks: int, size: int) -> list[float]:
        self._script.done.clear()
        query = self._script.stream(until_empty=False)
        written: list[tuple[int, float]] = []
        for number in range(ticks + 2):
            due = time.monotonic() + _TICK
            rows = self._changes.batch(size)
            self._write(rows)
            written.append((rows.num_rows, time.monotonic()))
            if number == 1:
                query.processAllAvailable()  # not measured: its first batches
                due = time.monotonic()
            time.sleep(max(due - time.monotonic(), 0))
        query.processAllAvailable()
        counts = {progress["batchId"]: progress["numInputRows"] for progress in query.recentProgress}
        query.stop()
        waiting = list(written)
        found: list[float] = []
        for batch, moment in sorted(self._script.done.items()):
            rows_left = counts[batch]
            while rows_left > 0:
                count, at = waiting.pop(0)
                rows_left -= count
                found.append(moment - at)
        assert not waiting
        return found[2:]

    def sums(self) -> list[str]:
        return _sums(self._script.rows())


def _sums(frame: Any) -> list[str]:
    return [str(value) for value in frame.selectExpr(*_SUMS).collect()[0]]


def make(name: str, directory: Path) -> Contender:
    """One of those there are."""
    if name == "local":
        return Lakes(directory, None, lambda storage, _: LocalEngine(storage))
    jar = name in {"script", "merge"}
    spark = spark_session("local[2]", {**CONF, **(DELTA_CONF if jar else {})})
    if name in {"spark", "merge"}:
        return Lakes(directory, spark, lambda _, location: SparkEngine(spark, location, **({"large_unit": 0} if name == "merge" else {})))
    return Streamed(directory, spark, delta=jar)


def main() -> None:
    """Answer commands."""
    contender = make(sys.argv[1], Path(sys.argv[2]))
    _answer("ready")
    for line in sys.stdin:
        match json.loads(line):
            case ["load", rows]:
                contender.load(rows)
                _answer(None)
            case ["bulk", batches, size]:
                _answer(contender.bulk(batches, size))
            case ["fresh", ticks, size]:
                seconds = contender.fresh(ticks, size)
                _answer([statistics.median(seconds), sorted(seconds)[int(len(seconds) * 0.95)]])
            case ["rounds"] if isinstance(contender, Lakes):
                _answer(contender.rounds())
            case ["sums"]:
                _answer(contender.sums())


def _answer(value: Any) -> None:
    sys.stdout.write(f"={json.dumps(value)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
