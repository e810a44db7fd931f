"""The workloads of ``make bench SINK=spark`` that need no publisher. Each prints figures beside its goal."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.benchmark.spark.changes import RANDOM, Changes
from tests.benchmark.spark.lake import LandedLake
from tests.spark.cluster import cluster

__all__ = ["SCRIPT", "Run", "backlog", "memory", "price", "registration", "scaling", "tables", "tell", "verdict", "waiting"]

SCRIPT: Final = "script"
RANDOM_ROWS: Final = 300_000
PER_SECOND: Final = 1_000
WARM_UPS: Final = 4
GB: Final = 1_000_000_000
_BATCH: Final = 250_000
_GOALS: Final = {"local": 1.0, "spark": 2.5}
"""Seconds of median freshness with the default target."""
_TABLES: Final = 300
_MANY: Final = {"local": 5.0, "spark": 8.0}
"""Seconds until the changes of so many tables are visible."""
_WAITING: Final = 76_000
"""Changes a second of a backlog: twice what engine ``spark`` did on 26 November 2026, with two cores."""


@dataclass(frozen=True)
class Run:
    """How to run a workload.

    Attributes:
        directory: for files.
        engines: the contenders.
        rows: the number of changes of ``memory`` and ``scaling``. 0: as the workload has it.
        seconds: how long ``price`` follows changes.
        rounds: how often measurements are repeated in turns.
    """

    directory: Path
    engines: Sequence[str]
    rows: int = 0
    seconds: float = 60.0
    rounds: int = 3


class Process:
    """A contender in its process."""

    def __init__(self, name: str, directory: Path, **options: Any) -> None:
        self.name = name
        directory.mkdir()
        self._log = (directory / "log").open("wb")
        command = [sys.executable, "-m", "tests.benchmark.spark.contender", name, str(directory), json.dumps(options)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True)
        self._answer()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def ask(self, *command: object) -> Any:
        """Send a command and return its answer."""
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
        """End it. Its JVM ends with it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def tell(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def verdict(reached: bool, goal: str) -> str:
    """The goal, and whether it is reached."""
    return f"goal: {goal}: {'reached' if reached else 'MISSED'}"


def in_turns(names: Sequence[str], rounds: int, measure: Callable[[str], float]) -> dict[str, float]:
    """Medians by name. The order changes with each round."""
    order, found = list(names), {name: list[float]() for name in names}
    for _ in range(rounds):
        for name in order:
            found[name].append(measure(name))
        order.append(order.pop(0))
    return {name: statistics.median(values) for name, values in found.items()}


def price(run: Run) -> None:
    """1,000 random changes in a second on 300,000 rows: freshness with the default target, and bytes an hour with ``--freshness 10s``."""
    for name in run.engines:
        with Process(name, run.directory / f"price-{name}", random=True) as contender:
            contender.ask("load", RANDOM_ROWS)
            # whoever follows a publisher runs for days: what Java has still to compile is not measured
            contender.ask("follow", 3.0 if name == "local" else 30.0, PER_SECOND, 2.0)
            # the script has no target: it follows as fast as it can, then every ten seconds
            median, late, written = contender.ask("follow", run.seconds, PER_SECOND, 0.0 if name == SCRIPT else 2.0)
            goal = _GOALS.get(name)
            hourly = written * 3600 / run.seconds
            told = ""
            if goal is not None:
                told = f"; {verdict(median <= goal, f'median at most {goal:g} s')}, {verdict(hourly <= GB, 'at most 1 GB an hour')}"
            target = "as soon as possible" if name == SCRIPT else "--freshness 2s"
            tell(f"price, {name}, {target}: freshness median {median:.2f} s, 95 % {late:.2f} s; {_hourly(written, run.seconds)}{told}")
            median, late, written = contender.ask("follow", run.seconds, PER_SECOND, 10.0)
            tell(f"price, {name}, 10 s: freshness median {median:.2f} s, 95 % {late:.2f} s; {_hourly(written, run.seconds)}")


def _hourly(written: int, seconds: float) -> str:
    return f"{written * 3600 / seconds / GB:.2f} GB an hour"


def tables(run: Run) -> None:
    """Many tables with five changes each: until they can be read."""
    for name in run.engines:
        rounds = 1 if name == SCRIPT else run.rounds
        with Process(name, run.directory / f"tables-{name}", tables=_TABLES) as contender:
            contender.ask("load", 1000)
            contender.ask("bulk", 1, 10)
            found = [contender.ask("bulk", 1, 5) for _ in range(rounds)]
            seconds, all_seconds = (statistics.median(values) for values in zip(*found, strict=True))
            goal = _MANY.get(name)
            told = "" if goal is None else f"; change logs after {all_seconds:.1f} s; " + verdict(seconds <= goal, f"at most {goal:g} s")
            tell(f"tables, {name}: 5 changes in each of {_TABLES} tables can be read after {seconds:.1f} s{told}")


def registration(run: Run) -> None:
    """``--register`` with so many tables: the first registration, one after a change of one table, and that of an applier started again."""
    for count in ((run.rows or 500) // 2, run.rows or 500):
        conf = {"spark.sql.catalogImplementation": "hive", "spark.sql.warehouse.dir": str(run.directory / f"warehouse-{count}")}
        conf |= {"spark.hadoop.javax.jdo.option.ConnectionURL": f"jdbc:derby:{run.directory / f'metastore-{count}'};create=true"}
        with Process("spark", run.directory / f"registration-{count}", tables=count, conf=conf) as contender:
            contender.ask("load", 1000)
            contender.ask("bulk", 1, 10)
            found = {"first": contender.ask("register", False)}
            found["without a change"] = contender.ask("register", False)
            for _ in range(run.rounds):
                contender.ask("change_one", 5)
                found["after a change of one table"] = contender.ask("register", False)
            found["started again"] = contender.ask("register", True)
        for name, (wall, cpu) in found.items():
            tell(f"registration of {count} tables, {name}: {wall:.2f} s, {cpu:.2f} s of processors")


def backlog(run: Run) -> None:
    """200,000 changes that wait, warm, of recent keys and of random ones."""
    batches, size = 40, 5_000
    for random in (False, True):
        kind = "random" if random else "recent"
        contenders = {name: Process(name, run.directory / f"backlog-{kind}-{name}", random=random) for name in run.engines}
        try:
            for contender in contenders.values():
                contender.ask("load", RANDOM_ROWS)
                for _ in range(WARM_UPS):
                    contender.ask("bulk", 2, size)
            seconds = in_turns(run.engines, run.rounds, lambda name, of=contenders: float(of[name].ask("bulk", batches, size)[1]))  # type: ignore[misc]
            for name, found in seconds.items():
                told = ""
                if name != SCRIPT and SCRIPT in seconds:
                    times = seconds[SCRIPT] / found
                    told = f", {times:.1f} times the script; {verdict(times >= 5, 'at least 5 times')}"
                tell(f"backlog, {kind} keys, {name}: {batches * size:,} changes in {found:.2f} s{told}")
            _require_equal(contenders)
        finally:
            for contender in contenders.values():
                contender.end()


def waiting(run: Run) -> None:
    """A million changes of random keys that wait when ``spark-apply`` is started, until it has applied them and ended."""
    count, size = run.rows or 1_000_000, 5_000
    for name in (name for name in run.engines if name != SCRIPT):
        lake, changes = LandedLake(run.directory / f"waiting-{name}"), Changes(mix=RANDOM)
        options = ["--engine", name, "--once", *(["--master", "local[2]"] if name == "spark" else [])]
        command = [sys.executable, "-m", "subscriber", "spark-apply", str(lake.path), *options]
        lake.land([changes.base(RANDOM_ROWS)], changes.end)
        _run(command)
        start = min(_run(command) for _ in range(run.rounds))
        found: list[float] = []
        for _ in range(run.rounds):
            for _ in range(count // size):
                lake.land([changes.batch(size)], changes.end)
            found.append(_run(command))
        seconds = statistics.median(found)
        told = f"; {verdict(count / seconds >= _WAITING, f'at least {_WAITING:,} a second')}" if name == "spark" else ""
        tell(
            f"waiting, {name}: {count:,} changes in {seconds:.1f} s, {count / seconds:,.0f} a second;"
            f" of these, start and end take {start:.1f} s{told}"
        )


def _run(command: Sequence[str]) -> float:
    """Seconds that a command takes."""
    began = time.monotonic()
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return time.monotonic() - began


def _require_equal(contenders: Mapping[str, Process]) -> None:
    sums = {name: contender.ask("sums") for name, contender in contenders.items()}
    assert len({json.dumps(found) for found in sums.values()}) == 1, sums
    tell("  all hold the same rows")


@contextlib.contextmanager
def _on_cluster(directory: Path, executors: int) -> Iterator[tuple[Process, Any]]:
    """The engine ``spark`` on a standalone cluster, so that executors are not in the driver's process."""
    with cluster(directory.with_name(f"{directory.name}-cluster"), workers=executors) as found:
        conf = {"spark.executor.cores": "1", "spark.executor.memory": "1g", "spark.driver.host": "127.0.0.1", "spark.ui.enabled": "false"}
        conf |= {"spark.driver.bindAddress": "127.0.0.1", "spark.cores.max": str(executors)}
        with Process("spark", directory, random=True, master=found.master, conf=conf) as contender:
            yield contender, found


def memory(run: Run) -> None:
    """Peak resident memory of the driver with one million changes and with more, of random keys, that wait."""
    more = run.rows or 50_000_000
    for name in (name for name in run.engines if name != SCRIPT):
        found = []
        for count in (1_000_000, more):
            directory = run.directory / f"memory-{name}-{count}"
            with contextlib.ExitStack() as stack:
                if name == "spark":
                    contender, _ = stack.enter_context(_on_cluster(directory, 1))
                else:
                    contender = stack.enter_context(Process(name, directory, random=True))
                contender.ask("load", RANDOM_ROWS)
                contender.ask("bulk", count // _BATCH, _BATCH)
                found.append(contender.ask("memory"))
        few, many = found
        told = verdict(many <= few * 1.2, "at most 20 % more")
        sizes = f"{few / 1e6:.0f} MB with 1,000,000 changes, {many / 1e6:.0f} MB with {more:,}"
        tell(f"memory, {name}: driver {sizes}: {many / few:.2f} times; {told}")


def scaling(run: Run) -> None:
    """Processor seconds for each million changes, and the driver's part, with one, two and four executors of a standalone cluster."""
    count = run.rows or 20_000_000
    for executors in (1, 2, 4):
        with _on_cluster(run.directory / f"scaling-{executors}", executors) as (contender, found):
            contender.ask("load", RANDOM_ROWS)
            contender.ask("bulk", 2, 5_000)
            before, workers = contender.ask("cpu"), found.cpu_seconds()
            _, seconds = contender.ask("bulk", count // _BATCH, _BATCH)
            driver, working = contender.ask("cpu") - before, found.cpu_seconds() - workers
            tell(
                f"scaling, {executors} executors: {count:,} changes in {seconds:.1f} s; processor seconds for a million changes:"
                f" {(driver + working) / count * 1e6:.2f}, of these {driver / (driver + working):.0%} in the driver"
            )
    tell(f"  this machine has {os.cpu_count()} processors: wall times with more executors say nothing")
