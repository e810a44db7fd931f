"""``python -m tests.benchmark.postgres``: see the package."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Final

from subscriber import __version__
from subscriber._implementation import implementation
from tests.benchmark.postgres.contenders import FourWorkers, GroupsOnly, Limit, Native, Ours, Relayed, TwoWorkers
from tests.benchmark.postgres.figures import Timing
from tests.benchmark.postgres.landing import LakeBed, Landing, lake_bed
from tests.benchmark.postgres.latency import ROWS, measure_commands, measure_latency
from tests.benchmark.postgres.measuring import measure_copy, measure_stream
from tests.benchmark.postgres.report import LIMIT, Report, Result
from tests.benchmark.postgres.servers import Bed, bed
from tests.benchmark.postgres.workloads import COPIES, PARALLEL, STREAMS

LATENCY: Final = "latency"
START: Final = "start"
WORKERS: Final = "parallel"
NAMES: Final = (*STREAMS, *COPIES, LATENCY)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark.postgres")
    parser.add_argument("--landing", action="store_true", help="the target is a lake, in which changes are landed and not applied")
    parser.add_argument("--relay", action="store_true", help="also with a relay log, instead of a native subscription")
    parser.add_argument("--version", type=int, default=18, help="of publisher and target")
    parser.add_argument(
        "--workload", help=f"some of {', '.join(NAMES)}; of landing, the first {len(STREAMS) - 1}; {WORKERS}: of apply_workers"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of all sizes")
    parser.add_argument("--rows", type=int, default=0, help="the scale, as the number of rows of the workload inserts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--svg", type=Path, help="write a chart of the wall times to this file")
    arguments = parser.parse_args(given)
    names = [name for name in STREAMS if name != START] if arguments.landing else NAMES
    arguments.workload = arguments.workload.split(",") if arguments.workload else names
    if WORKERS in arguments.workload:
        arguments.workload = [*(name for name in arguments.workload if name != WORKERS), *PARALLEL]
    if unknown := set(arguments.workload) - {*names, *PARALLEL}:
        parser.error(f"unknown workload: {', '.join(sorted(unknown))}")
    if arguments.rows:
        arguments.scale = arguments.rows / STREAMS["inserts"].size
    return arguments


def _measure(place: Bed, name: str, scale: float, rounds: int, *, relay: bool = False) -> tuple[list[Result], list[Timing]]:
    with place.workload():
        if name == LATENCY:
            return [], measure_latency(place, max(int(ROWS * scale), 3), rounds)
        if name in COPIES:
            copy = COPIES[name]
            rows = max(int(copy.rows * scale), 1)
            return [Result(name, copy.title, copy.tables * rows, measure_copy(place, copy, rows, rounds, _tell))], []
        stream = (STREAMS | PARALLEL)[name]
        size = max(int(stream.size * scale), 1)
        ours = [Landing] if isinstance(place, LakeBed) else [Relayed, Ours] if relay else [Native, Ours]
        if name in PARALLEL:
            ours = [Native, Ours, TwoWorkers, FourWorkers, *([GroupsOnly] if stream.calculated else [])]
        with place.target_settings(stream.settings):
            samples = measure_stream(place, stream, size, rounds, _tell, readers=[Limit, *ours])
        if name == START:
            firsts = {who: [run.startup + run.wall for run in runs] for who, runs in samples.items() if who != LIMIT}
            timings = [Timing.of("command to first row", who, seconds) for who, seconds in firsts.items()]
            return [], timings + measure_commands(place, rounds)
    return [Result(name, stream.title, int(size * stream.changes), samples)], []


def _load() -> str:
    return " ".join(f"{average:.1f}" for average in os.getloadavg())


def main(given: list[str] | None = None) -> Report:
    """Run it."""
    arguments = _arguments(given)
    about = {
        "command": shlex.join(["python", "-m", "tests.benchmark.postgres", *(sys.argv[1:] if given is None else given)]),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "subscriber": f"{__version__} ({implementation()})",
        "versions": f"PostgreSQL {arguments.version} on both sides, Python {platform.python_version()}",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "rounds": arguments.rounds,
        "scale": arguments.scale,
        "load average before": _load(),
    }
    results: list[Result] = []
    timings: list[Timing] = []
    report = Report(about, results, timings)
    with (lake_bed if arguments.landing else bed)(arguments.version) as place:
        for name in arguments.workload:
            _tell(name)
            found, times = _measure(place, name, arguments.scale, arguments.rounds, relay=arguments.relay)
            results += found
            timings += times
            about["load average after"] = _load()
            # after each workload, so that an interrupted run leaves what it has measured
            if arguments.json:
                report.save(arguments.json)
            if arguments.svg:
                arguments.svg.write_text(report.svg())
    print(report.text())
    return report


if __name__ == "__main__":
    main()
