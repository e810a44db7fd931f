"""Lakes compared with what a Spark user would write: ``make bench SINK=spark``. Needs Spark, and Maven for Delta's jar.

Workloads, chosen with ``WORKLOAD=price,tables``; without it all of them run. Each prints figures beside its goal:

* ``price``: 1,000 changes a second of random keys of 300,000 rows. Freshness with the default target, and bytes written an hour with
  ``--freshness 10s``; both engines, beside a Structured Streaming query with ``foreachBatch`` and MERGE INTO (``script.py``);
* ``tables``: five changes in each of 300 tables, until they can be read;
* ``copies``: the initial copy of 200 small tables;
* ``backlog``: 200,000 changes that wait, warm, of recent and of random keys, beside the script;
* ``waiting``: ROWS (1,000,000) changes of random keys that wait when the applier is started: its start included;
* ``memory``: peak memory of the driver with one million changes and with ROWS (50,000,000);
* ``scaling``: processor seconds a change and the driver's part, with one, two and four executors, and ROWS changes (20,000,000);
* ``copy``: the initial copy of a table of ROWS (5,000,000) rows, beside a script (COPY TO, pyarrow, delta-rs);
* ``registration``: ``--register`` with ROWS (500) tables, and with half of them: the first one, and later ones;
* ``landing``: a subscription into a lake beside ``pg_recvlogical`` into ``/dev/null``.

``ENGINE=local,spark`` leaves out the script. ``SECONDS=10`` shortens ``price``. Each contender has a process and a Spark session of its own
(``local[2]``), is warmed up and is given the same changes; contenders of one workload rest while another one is measured.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from subscriber.sinks.spark.session.spark_session import DELTA_CONF, spark_session
from tests.benchmark.spark.contender import CONF
from tests.benchmark.spark.publisher import copy_by_script, copy_by_us, copy_small_tables, landed, publisher
from tests.benchmark.spark.workloads import (
    SCRIPT,
    Run,
    backlog,
    in_turns,
    memory,
    price,
    registration,
    scaling,
    tables,
    tell,
    verdict,
    waiting,
)

SMALL: Final = 200
ROWS: Final = 5_000_000
LAND_ROWS, LAND_SIZE = 200_000, 10


def copies(run: Run) -> None:
    """The initial copy of 200 small tables."""
    with publisher(1, small=SMALL) as database:
        for name in (name for name in run.engines if name != SCRIPT):
            spark = None if name == "local" else spark_session("local[2]", {**CONF, **DELTA_CONF})
            if spark is not None:
                copy_small_tables(spark, database, run.directory, 99, SMALL)  # the first jobs of a session
            seconds = statistics.median(copy_small_tables(spark, database, run.directory, number, SMALL) for number in range(run.rounds))
            told = verdict(seconds <= 20, "at most 20 s")
            tell(f"copies, {name}: {SMALL} small tables can be read after {seconds:.1f} s; {told}")
            if spark is not None:
                spark.stop()


def copy(run: Run) -> None:
    """The initial copy of one table."""
    rows = run.rows or ROWS
    with publisher(rows) as database:
        spark = spark_session("local[2]", {**CONF, **DELTA_CONF}) if "spark" in run.engines else None
        numbers = iter(range(1000))
        kinds: dict[str, Callable[[], float]] = {
            "local": lambda: copy_by_us(None, database, run.directory, next(numbers)),
            "spark": lambda: copy_by_us(spark, database, run.directory, next(numbers)),
            SCRIPT: lambda: copy_by_script(database, run.directory, next(numbers)),
        }
        if spark is not None:
            kinds["spark"]()  # the first jobs of a session
        medians = in_turns([*run.engines], run.rounds, lambda name: kinds[name]())
        if spark is not None:
            spark.stop()
    for name, found in medians.items():
        times = found / medians[SCRIPT] if SCRIPT in medians else None
        told = "" if times is None or name == SCRIPT else f", {times:.2f} times the script; " + verdict(times <= 1.4, "at most 1.4 times")
        tell(f"copy of {rows:,} rows, {name}: {found:.2f} s{told}")


def landing(run: Run) -> None:
    """Landing beside the publisher's own limit."""
    with publisher(1) as database:
        measured = landed(database, run.directory, 2)
        pairs = [measured.measure(LAND_ROWS, LAND_SIZE) for _ in range(run.rounds)]
    limit, ours = (statistics.median(values) for values in zip(*pairs, strict=True))
    tell(
        f"landing {LAND_ROWS:,} rows in transactions of {LAND_SIZE}: {LAND_ROWS / ours:,.0f} rows/s;"
        f" the publisher's own limit (pg_recvlogical): {LAND_ROWS / limit:,.0f} rows/s"
    )


WORKLOADS: Final[dict[str, Callable[[Run], None]]] = {
    "price": price,
    "tables": tables,
    "copies": copies,
    "backlog": backlog,
    "waiting": waiting,
    "memory": memory,
    "scaling": scaling,
    "registration": registration,
    "copy": copy,
    "landing": landing,
}


def main() -> None:
    """Run the workloads."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark.spark")
    parser.add_argument("--workload", default=",".join(WORKLOADS), help="names, separated by commas")
    parser.add_argument("--engine", default=f"local,spark,{SCRIPT}", help="contenders, separated by commas")
    parser.add_argument(
        "--rows", type=int, default=0, help="of waiting, memory, scaling, copy, registration (tables); 0: as the workload has it"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of price, for each target")
    parser.add_argument("--rounds", type=int, default=3, help="how often measurements are repeated")
    args = parser.parse_args()
    chosen = args.workload.split(",")
    if unknown := set(chosen) - WORKLOADS.keys():
        parser.error(f"unknown workload {', '.join(sorted(unknown))}: one of {', '.join(WORKLOADS)}")
    # so that contenders and clusters end with it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench-") as place:
        for name in chosen:
            directory = Path(place) / name
            directory.mkdir()
            WORKLOADS[name](
                Run(directory=directory, engines=args.engine.split(","), rows=args.rows, seconds=args.seconds, rounds=args.rounds)
            )
    tell(f"took {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
