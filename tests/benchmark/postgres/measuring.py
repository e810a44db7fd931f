"""Run the readers of a workload, one after another, and measure them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Final

from tests.benchmark.postgres.contenders import Contender, Limit, Native, Ours, streaming
from tests.benchmark.postgres.figures import Sample
from tests.benchmark.postgres.servers import Bed
from tests.benchmark.postgres.workloads import Copy, Stream

__all__ = ["BASE", "WAIT", "define_subscription", "measure_copy", "measure_stream"]

WAIT: Final = 900.0
_START_POLL: Final = 0.002
_END_POLL: Final = 0.01
BASE: Final = "bench_base"
_WORK_MEM_KB: Final = 65_536

Tell = Callable[[str], None]


def measure_stream(
    bed: Bed, stream: Stream, size: int, rounds: int, tell: Tell, *, readers: Sequence[type[Contender]]
) -> dict[str, list[Sample]]:
    """Write a workload, and let each reader read it in each round."""
    bed.create(stream.setup.replace("{n}", str(size)))
    if stream.streamed:
        bed.stream_beyond(max(64, _WORK_MEM_KB * size // stream.size))
    mode = streaming(bed.version, wanted=stream.streamed)
    define_subscription(bed, mode)
    bed.write(stream, size)

    def run(reader: type[Contender]) -> Sample:
        bed.copy_slot(BASE, reader.slot)
        return _run(reader(bed, mode), f"SELECT active FROM pg_replication_slots WHERE slot_name = '{reader.slot}'")

    return _take_turns([*readers], rounds, run, tell)


def define_subscription(bed: Bed, mode: str) -> None:
    """Define ours in the template, with a slot. The slot of each run is a copy of that slot."""
    subprocess.run(Ours(bed, mode).arguments(bed.template_dsn, "--until-caught-up"), check=True, timeout=WAIT)
    bed.copy_slot(Ours.slot, BASE)


def measure_copy(bed: Bed, copy: Copy, rows: int, rounds: int, tell: Tell) -> dict[str, list[Sample]]:
    """Let each subscriber copy the tables in each round."""
    bed.create_tables(copy, rows)
    sessions = (
        "SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        " AND backend_type IN ('client backend', 'walsender')"
    )

    def run(reader: type[Contender]) -> Sample:
        sample = _run(reader(bed, tables=copy.tables), sessions)
        bed.drop_slot(reader.slot)
        return sample

    return _take_turns([Native, Ours], rounds, run, tell)


def _take_turns(
    readers: list[type[Contender]], rounds: int, run: Callable[[type[Contender]], Sample], tell: Tell
) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {reader.name: [] for reader in readers}
    for _ in range(rounds):
        for reader in readers:
            sample = run(reader)
            samples[reader.name].append(sample)
            tell(f"  {reader.name}: {sample.wall:.2f} s")
        readers.append(readers.pop(0))
    return samples


def _run(reader: Contender, started: str) -> Sample:
    """Run one reader to its end.

    Args:
        started: SQL for the publisher that gives true when the measurement begins.
    """
    bed = reader.bed
    with bed.fresh_target():
        reader.prepare()
        try:
            began = time.monotonic()
            reader.start()
            _until(reader, lambda: bool(bed.publisher.value(started)) or reader.ended(), _START_POLL)
            opened = time.monotonic()
            before = (bed.publisher_cpu(), *reader.cpu())
            _until(reader, reader.ended, _END_POLL)
            wall = time.monotonic() - opened
            after = (bed.publisher_cpu(), *reader.cpu())
            memory = reader.memory()
        finally:
            reader.stop()
        if not isinstance(reader, Limit):
            bed.check_rows()
    walsender, subscriber, target = (later - earlier for earlier, later in zip(before, after, strict=True))
    return Sample(opened - began, wall, walsender, subscriber, target, memory)


def _until(reader: Contender, condition: Callable[[], bool], pause: float) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        reader.check()
        assert time.monotonic() < deadline, f"{reader.name} did not end within {WAIT:.0f} s"
        time.sleep(pause)
