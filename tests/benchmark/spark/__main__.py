"""Lakes compared with a plain Spark program: ``make bench SINK=spark ROWS=1000000``. Needs Spark, and Maven for Delta's jar and JDBC's.

Measured, each three times in turns, medians given:

* landing: a subscription into a lake beside ``pg_recvlogical`` into ``/dev/null``;
* the initial copy, until it can be read: by executors (``copy=executors``) and by the subscriber, beside Spark's JDBC reader with four
  partitions;
* bulk: changes a second of a backlog, of the engines ``local`` and ``spark``, and of ``spark`` if it merges all tables (``merge``), beside
  a Structured Streaming query with ``foreachBatch`` and MERGE INTO (``script.py``);
* freshness: from when a batch of 1,000 changes is there to when it can be read, one every 0.5 s, with ROWS and four times as many rows;
* cost in table size: a round of 1,000 changes with four times ROWS beside one with ROWS.

Each contender has a process and a Spark session of its own (``local[2]``), is warmed up, is given the same changes, and rests while others
are measured.
In the end all must hold the same rows. Changes are of recent keys, as those of orders or events are; with random keys all that rewrite
files rewrite them all (docs/explanation/lake.md).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from psycopg.conninfo import conninfo_to_dict

from subscriber.sinks.spark.session.spark_session import DELTA_CONF, spark_session
from tests.benchmark.spark.contender import CONF
from tests.benchmark.spark.publisher import copy_by_jdbc, copy_by_us, landed, publisher

ROUNDS: Final = 3
SCRIPT: Final = "script"
MERGE: Final = "merge"
JDBC: Final = "org.postgresql:postgresql:42.7.7"
WARM_UPS: Final = 4
FRESH_WARM_UPS: Final = 2
BATCHES, SIZE = 40, 5_000
TICKS, TICK_SIZE = 20, 1_000
LARGER: Final = 4
COSTS: Final = 20
LAND_ROWS, LAND_SIZE = 200_000, 10
GOALS: Final = {"bulk": 3.0, "freshness": 3.0, "copy": 1.5}
FLAT: Final = 1.25
"""So much longer may a round of the larger table take: what is between is noise, not the table."""


class Process:
    """A contender."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        directory.mkdir()
        self._log = (directory / "log").open("wb")
        command = [sys.executable, "-m", "tests.benchmark.spark.contender", name, str(directory)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True)
        self._answer()

    def ask(self, *command: object) -> Any:
        """Its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("="):
                return json.loads(line[1:])
        raise SystemExit(f"{self.name} ended: {Path(self._log.name).read_text()[-3000:]}")

    def end(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()


def _tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _verdict(kind: str, times: float) -> str:
    return f"{times:.1f} times (to reach: {GOALS[kind]:g}: {'reached' if times >= GOALS[kind] else 'missed'})"


def _in_turns(names: Sequence[str], measure: Callable[[str, int], float]) -> dict[str, float]:
    """Medians by name."""
    order, found = list(names), {name: list[float]() for name in names}
    for number in range(ROUNDS):
        for name in order:
            found[name].append(measure(name, number))
        order.append(order.pop(0))
    return {name: statistics.median(values) for name, values in found.items()}


def _tell_merged(contenders: Mapping[str, Process], before: tuple[int, int]) -> tuple[int, int]:
    """Engine ``merge`` leaves some rounds to units: how many were MERGE's since."""
    if MERGE not in contenders:
        return before
    rounds, merged = contenders[MERGE].ask("rounds")
    _tell(f"  of engine {MERGE}'s {rounds - before[0]} rounds {merged - before[1]} were MERGE INTO's")
    return rounds, merged


def with_publisher(rows: int, directory: Path) -> None:
    """Landing, and the initial copy."""
    packages = ",".join([DELTA_CONF["spark.jars.packages"], JDBC])
    with publisher(rows) as database:
        # executors have no password but their own
        os.environ["PGPASSWORD"] = str(conninfo_to_dict(database.conninfo()).get("password", ""))
        spark = spark_session("local[2]", {**CONF, **DELTA_CONF, "spark.jars.packages": packages})
        kinds: dict[str, Callable[[int], float]] = {
            "jdbc": lambda number: copy_by_jdbc(spark, database, directory, number, rows),
            "executors": lambda number: copy_by_us(spark, database, directory, number, executors=True),
            "subscriber": lambda number: copy_by_us(spark, database, directory, number, executors=False),
        }
        for copy in kinds.values():
            copy(99)  # the first job of its kind
        medians = _in_turns(list(kinds), lambda name, number: kinds[name](number))
        spark.stop()
        _tell(f"initial copy of {rows:,} rows: " + ", ".join(f"{name} {found:.2f} s" for name, found in medians.items()))
        _tell("  executors against JDBC: " + _verdict("copy", medians["jdbc"] / medians["executors"]))
        measured = landed(database, directory, rows + 1)
        pairs = [measured.measure(LAND_ROWS, LAND_SIZE) for _ in range(ROUNDS)]
        limit, ours = (statistics.median(values) for values in zip(*pairs, strict=True))
        _tell(
            f"landing {LAND_ROWS:,} rows in transactions of {LAND_SIZE}: {LAND_ROWS / ours:,.0f} rows/s;"
            f" the publisher's own limit (pg_recvlogical): {LAND_ROWS / limit:,.0f} rows/s"
        )


def without_publisher(rows: int, names: Sequence[str], directory: Path, *, bulk: bool) -> None:
    """Bulk and freshness with so many rows."""
    contenders = {name: Process(name, directory / f"{name}-{rows}") for name in names}
    try:
        for contender in contenders.values():
            contender.ask("load", rows)
            # who follows a publisher runs for days: what Java has still to compile is not what is measured
            for _ in range(WARM_UPS):
                contender.ask("bulk", 2, SIZE)
            for _ in range(FRESH_WARM_UPS):
                contender.ask("fresh", TICKS, TICK_SIZE)
        before = contenders[MERGE].ask("rounds") if MERGE in contenders else (0, 0)
        if bulk:
            seconds = _in_turns(names, lambda name, _: float(contenders[name].ask("bulk", BATCHES, SIZE)))
            changes = BATCHES * SIZE
            _tell(f"bulk, {changes:,} changes, {rows:,} rows:")
            for name, found in seconds.items():
                against = "" if name == SCRIPT else ": " + _verdict("bulk", seconds[SCRIPT] / found)
                _tell(f"  {name:8} {changes / found:9,.0f} changes/s{against}")
            before = _tell_merged(contenders, before)
        ends: dict[str, list[float]] = {name: [] for name in names}

        def fresh(name: str, _: int) -> float:
            median, late = contenders[name].ask("fresh", TICKS, TICK_SIZE)
            ends[name].append(late)
            return float(median)

        medians = _in_turns(names, fresh)
        _tell(f"freshness, {TICK_SIZE:,} changes every 0.5 s, {rows:,} rows (median, 95 %):")
        for name, found in medians.items():
            against = "" if name == SCRIPT else ": " + _verdict("freshness", medians[SCRIPT] / found)
            _tell(f"  {name:8} {found:6.2f} s, {statistics.median(ends[name]):6.2f} s{against}")
        _tell_merged(contenders, before)
        sums = {name: contender.ask("sums") for name, contender in contenders.items()}
        assert len({json.dumps(found) for found in sums.values()}) == 1, sums
        _tell("  all hold the same rows")
    finally:
        for contender in contenders.values():
            contender.end()


def in_table_size(rows: int, names: Sequence[str], directory: Path) -> None:
    """What a round of changes of recent keys costs in a larger table."""
    for name in names:
        contenders = {str(size): Process(name, directory / f"{name}-cost-{size}") for size in (rows, rows * LARGER)}
        try:
            for size, contender in contenders.items():
                contender.ask("load", int(size))
                for _ in range(WARM_UPS):
                    contender.ask("bulk", 2, SIZE)
                for _ in range(COSTS // 2):
                    contender.ask("bulk", 1, TICK_SIZE)
            pairs = [[float(contender.ask("bulk", 1, TICK_SIZE)) for contender in contenders.values()] for _ in range(COSTS)]
        finally:
            for contender in contenders.values():
                contender.end()
        few, many = (statistics.median(values) for values in zip(*pairs, strict=True))
        verdict = "reached" if many <= few * FLAT else "missed"
        _tell(
            f"a round of {TICK_SIZE:,} changes, {name}: {rows:,} rows {few:.2f} s, {rows * LARGER:,} rows {many:.2f} s:"
            f" {many / few:.2f} times (to reach: {FLAT:g} or less: {verdict})"
        )


def main() -> None:
    """Run it."""
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    names = sys.argv[2].split(",") if len(sys.argv) > 2 else [SCRIPT, "spark", MERGE, "local"]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench-") as place:
        directory = Path(place)
        with_publisher(rows, directory)
        without_publisher(rows, names, directory, bulk=True)
        without_publisher(rows * LARGER, [name for name in names if name in {SCRIPT, "spark"}], directory, bulk=False)
        in_table_size(rows, [name for name in names if name in {"spark", MERGE}], directory)
    _tell(f"took {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
