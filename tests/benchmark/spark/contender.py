"""One contender, in a process of its own, with a Spark session of its own.

``python -m tests.benchmark.spark.contender NAME DIRECTORY [OPTIONS]`` reads commands from stdin, one JSON object a line, and answers each
with one line that begins with ``=`` (Spark may print what it likes). ``OPTIONS`` is a JSON object, see :class:`Options`. All contenders are
given the same changes; between commands they rest.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow.parquet as pq

from subscriber.sinks.spark.catalog.snapshots import read_snapshot
from subscriber.sinks.spark.pipeline.applier import Applier, ApplierSettings
from subscriber.sinks.spark.pipeline.engines.engine import Engine
from subscriber.sinks.spark.pipeline.engines.local_engine import LocalEngine
from subscriber.sinks.spark.pipeline.engines.spark_engine import SparkEngine
from subscriber.sinks.spark.pipeline.pace import Pace
from subscriber.sinks.spark.pipeline.program.apply_loop import apply_forever
from subscriber.sinks.spark.pipeline.program.registration import CatalogRegistration
from subscriber.sinks.spark.session.spark_session import DELTA_CONF, spark_session
from subscriber.spark import snapshot as spark_snapshot
from tests.benchmark.spark.changes import RANDOM, RECENT, TABLE, Changes, write_for_script
from tests.benchmark.spark.lake import LandedLake
from tests.benchmark.spark.script import Script
from tests.support.delta_tables import delta_bytes

CONF: Final = {"spark.log.level": "ERROR", "spark.sql.shuffle.partitions": "2", "spark.driver.memory": "2g"}
"""The same for all. Two partitions are what a user of two cores would set."""
_SUMS: Final = ["count(*)", "sum(id)", "sum(amount)", "sum(length(doc))", "sum(int(flag))"]
_WAIT: Final = 900.0
_LOAD: Final = 250_000
TICK: Final = 0.3
"""Seconds of changes in a landed batch: ``batch_delay``."""


@dataclass(frozen=True)
class Options:
    """What may differ between runs of a contender: random keys or recent ones, tables, Spark's master and settings."""

    random: bool = False
    tables: int = 1
    master: str = "local[2]"
    conf: dict[str, str] = field(default_factory=dict)


class Contender(Protocol):
    """What can be asked of it."""

    def load(self, rows: int) -> None:
        """Begin with so many rows in the first table."""

    def bulk(self, batches: int, size: int) -> tuple[float, float]:
        """Apply so many batches of so many changes of each table: seconds until they can be read, and until the change logs have them."""

    def follow(self, seconds: float, per_second: int, freshness: float) -> tuple[list[float], int]:
        """How old changes were when they could be read, while so many were made in a second; and the bytes written to tables and logs."""

    def sums(self) -> list[str]:
        """What the rows of the first table amount to."""


class Lakes:
    """This program."""

    def __init__(self, directory: Path, spark: Any, options: Options) -> None:
        self._lake = LandedLake(directory / "lake", options.tables)
        self._spark = spark
        engine: Engine = LocalEngine(self._lake.storage) if spark is None else SparkEngine(spark, self._lake.location)
        self._applier = Applier(self._lake.storage, engine, ApplierSettings())
        self._changes = Changes(mix=RANDOM if options.random else RECENT)
        self._registration: CatalogRegistration | None = None

    def load(self, rows: int) -> None:
        for part in range(0, rows, _LOAD):
            self._lake.land([self._changes.base(min(_LOAD, rows - part))], self._changes.end)
        self._all()

    def change_one(self, size: int) -> None:
        """Apply changes of the first table alone."""
        self._lake.land([self._changes.batch(size)], self._changes.end)
        self._all()

    def register(self, *, again: bool) -> tuple[float, float]:
        """Wall and processor seconds of registering what is published, as the applier does, or as one that was started ``again``."""
        if self._registration is None or again:
            self._registration = CatalogRegistration(self._spark, self._lake.storage, "spark_catalog.bench", lambda _: None)
        snapshot = read_snapshot(self._lake.storage)
        assert snapshot is not None
        began, before = time.monotonic(), cpu_seconds()
        self._registration.register(snapshot)
        return time.monotonic() - began, cpu_seconds() - before

    def _all(self) -> float:
        """Apply everything. Return when it could be read."""
        published = time.monotonic()
        self._applier.open()
        try:
            while self._applier.run_round() is not None:
                published = time.monotonic()
                self._applier.tidy()
        finally:
            self._applier.close()
        return published

    def bulk(self, batches: int, size: int) -> tuple[float, float]:
        for _ in range(batches):
            rows = self._changes.batch(size)
            self._lake.land([rows] * len(self._lake.names), self._changes.end)
        began = time.monotonic()
        published = self._all()
        return published - began, time.monotonic() - began

    def follow(self, seconds: float, per_second: int, freshness: float) -> tuple[list[float], int]:
        before = delta_bytes(self._lake.path)
        published: list[tuple[int, float]] = []
        stop, pace = threading.Event(), Pace(freshness)
        applying = threading.Thread(
            target=lambda: apply_forever(
                self._applier, stop, lambda snapshot: published.append((int(snapshot.lsn), time.time())), pace=pace, rest_seconds=_WAIT
            )
        )
        applying.start()
        landed: list[tuple[int, float]] = []
        began = due = time.time()
        while due < began + seconds:
            due += TICK
            rows = self._changes.batch(round(per_second * TICK))
            time.sleep(max(due - time.time(), 0))
            # committed evenly since the last tick
            self._lake.land([rows], self._changes.end, committed=(due - TICK, due))
            landed.append((self._changes.end, due - TICK / 2))
        stop.set()
        applying.join()
        self._applier.open()
        self._applier.tidy(now=True)
        self._applier.close()
        ages = [next(moment for lsn, moment in published if lsn >= end) - at for end, at in landed]
        return ages, delta_bytes(self._lake.path) - before

    def sums(self) -> list[str]:
        if self._spark is None:
            self._spark = spark_session("local[2]", CONF)
        return _sums(spark_snapshot(self._spark, str(self._lake.path)).table(str(TABLE)))


class Streamed:
    """The script: a stream with a trigger interval that is the freshness."""

    def __init__(self, directory: Path, spark: Any, options: Options) -> None:
        self._directory = directory
        self._script = Script(spark, directory / "script", tables=options.tables)
        self._changes = Changes(mix=RANDOM if options.random else RECENT)

    def load(self, rows: int) -> None:
        base = self._directory / "base"
        base.mkdir()
        for part in range(0, rows, _LOAD):
            pq.write_table(self._changes.base(min(_LOAD, rows - part)), base / f"{part:010d}.parquet")
        self._script.load(base)

    def _write(self, rows: Any) -> None:
        write_for_script(self._script.changes, rows, int(rows["_lsn"][-1].as_py()))

    def bulk(self, batches: int, size: int) -> tuple[float, float]:
        for _ in range(batches):
            self._write(self._changes.batch(size))
        began = time.monotonic()
        query = self._script.stream(until_empty=True)
        query.awaitTermination()
        seconds = time.monotonic() - began
        return seconds, seconds

    def follow(self, seconds: float, per_second: int, freshness: float) -> tuple[list[float], int]:
        before = delta_bytes(self._script.directory)
        self._script.done.clear()
        query = self._script.stream(until_empty=False, interval=freshness)
        written: list[tuple[int, float]] = []
        began = due = time.time()
        while due < began + seconds:
            due += TICK
            rows = self._changes.batch(round(per_second * TICK))
            time.sleep(max(due - time.time(), 0))
            self._write(rows)
            written.append((rows.num_rows, due - TICK / 2))
        query.processAllAvailable()
        counts = {progress["batchId"]: progress["numInputRows"] for progress in query.recentProgress}
        query.stop()
        waiting, ages = list(written), list[float]()
        for batch, moment in sorted(self._script.done.items()):
            left = counts[batch]
            while left > 0:
                count, at = waiting.pop(0)
                left -= count
                ages.append(moment - at)
        assert not waiting
        return ages, delta_bytes(self._script.directory) - before

    def sums(self) -> list[str]:
        return _sums(self._script.rows())


def _sums(frame: Any) -> list[str]:
    return [str(value) for value in frame.selectExpr(*_SUMS).collect()[0]]


def processes() -> dict[str, list[int]]:
    """The processes below this one, with it: ``driver`` is this one and its JVM; ``workers`` are Python workers and executors."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                before, _, after = (entry / "stat").read_text().rpartition(")")
            except OSError:
                continue
            parents[int(entry.name)], names[int(entry.name)] = int(after.split()[1]), before.partition("(")[2]
    found: dict[str, list[int]] = {"driver": [os.getpid()], "workers": []}
    for pid in parents:
        above, line = pid, list[int]()
        while above and above != os.getpid():
            line.append(above)
            above = parents.get(above, 0)
        if above and line:
            found["driver" if len(line) == 1 and names[pid] == "java" else "workers"].append(pid)
    return found


def peak_memory() -> int:
    """The sum of the largest resident sizes of the driver's processes, in bytes."""
    size = 0
    for pid in processes()["driver"]:
        status = (Path("/proc") / str(pid) / "status").read_text()
        size += next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    return size


def cpu_seconds(*kinds: str) -> float:
    """Processor time of the driver's processes so far, or of these kinds, see :func:`processes`; with children that have ended."""
    ticks, found = 0, processes()
    for pid in (pid for kind in kinds or ("driver",) for pid in found[kind]):
        fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
        ticks += sum(map(int, fields[11:15] if kinds else fields[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def make(name: str, directory: Path, options: Options) -> Contender:
    """One of those there are."""
    if name == "local":
        return Lakes(directory, None, options)
    spark = spark_session(options.master, {**CONF, **DELTA_CONF, **options.conf})
    kinds: dict[str, Callable[[Path, Any, Options], Contender]] = {"spark": Lakes, "script": Streamed}
    return kinds[name](directory, spark, options)


def main() -> None:
    """Answer commands."""
    options = Options(**json.loads(sys.argv[3])) if len(sys.argv) > 3 else Options()
    contender = make(sys.argv[1], Path(sys.argv[2]), options)
    _answer("ready")
    for line in sys.stdin:
        match json.loads(line):
            case ["load", rows]:
                contender.load(rows)
                _answer(None)
            case ["bulk", batches, size]:
                _answer(contender.bulk(batches, size))
            case ["follow", seconds, per_second, freshness]:
                ages, written = contender.follow(seconds, per_second, freshness)
                _answer([statistics.median(ages), sorted(ages)[int(len(ages) * 0.95)], written])
            case ["memory"]:
                _answer(peak_memory())
            case ["cpu"]:
                _answer(cpu_seconds())
            case ["all_cpu"]:
                _answer(cpu_seconds("driver", "workers"))
            case ["change_one", size] if isinstance(contender, Lakes):
                contender.change_one(size)
                _answer(None)
            case ["register", again] if isinstance(contender, Lakes):
                _answer(contender.register(again=again))
            case ["sums"]:
                _answer(contender.sums())


def _answer(value: Any) -> None:
    sys.stdout.write(f"={json.dumps(value)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
