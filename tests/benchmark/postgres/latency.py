"""How long after COMMIT a row is visible in the target, and how long commands take to start."""

from __future__ import annotations

import subprocess
import time
from typing import Final

from tests.benchmark.postgres.contenders import COMMAND, Contender, Native, Ours, streaming
from tests.benchmark.postgres.figures import Timing
from tests.benchmark.postgres.measuring import BASE, WAIT, define_subscription
from tests.benchmark.postgres.servers import Bed
from tests.benchmark.postgres.workloads import NARROW
from tests.support.program import environment

__all__ = ["measure_commands", "measure_latency"]

ROWS: Final = 200
_PAUSE: Final = 0.01
_COMMANDS: Final = {"subscriber --help": ("--help",), "subscriber --version": ("--version",)}


def measure_latency(bed: Bed, rows: int, rounds: int) -> list[Timing]:
    """Insert single rows while a subscriber follows; each one after the one before is visible."""
    bed.create(NARROW)
    mode = streaming(bed.version, wanted=False)
    define_subscription(bed, mode)
    readers: list[type[Contender]] = [Native, Ours]
    seconds: dict[str, list[float]] = {reader.name: [] for reader in readers}
    for _ in range(rounds):
        for reader in readers:
            bed.copy_slot(BASE, reader.slot)
            seconds[reader.name] += _latencies(reader(bed, mode), rows)
        readers.reverse()
    return [Timing.of("commit to visible, one row", name, found) for name, found in seconds.items()]


def _latencies(reader: Contender, rows: int) -> list[float]:
    bed = reader.bed
    found = []
    with bed.fresh_target():
        reader.prepare()
        reader.start()
        try:
            first = bed.publisher.value("SELECT coalesce(max(id), 0) + 1 FROM t")
            for number in range(first, first + rows + 1):
                bed.publisher.execute(f"INSERT INTO t VALUES ({number}, 1, 2, 'one row')")
                committed = time.perf_counter()
                # without a pause, since a pause would be longer than what is measured
                while not bed.target.value(f"SELECT EXISTS (SELECT FROM t WHERE id = {number})"):
                    reader.check()
                    assert time.perf_counter() - committed < WAIT
                found.append(time.perf_counter() - committed)
                time.sleep(_PAUSE)
        finally:
            reader.stop()
        bed.check_rows()
    return found[1:]  # the first one waited for the start


def measure_commands(bed: Bed, times: int) -> list[Timing]:
    """Commands that do little; ``status`` is that of the subscription in the template."""
    found = []
    for title, arguments in {**_COMMANDS, "subscriber status": ("status", "--target", bed.template_dsn)}.items():
        seconds = []
        for _ in range(times):
            began = time.perf_counter()
            subprocess.run([*COMMAND, *arguments], check=True, capture_output=True, env=environment())
            seconds.append(time.perf_counter() - began)
        found.append(Timing.of(title, Ours.name, seconds))
    return found
