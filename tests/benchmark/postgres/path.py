"""``python -m tests.benchmark.postgres.path``: where the time between COMMIT on the publisher and the visible row goes.

Single rows are inserted while a subscription follows. The program notes when each step is done (:mod:`tests.benchmark.postgres.marked`).
All times are of one clock. They are medians, in milliseconds after the answer to COMMIT. Beside them is the processor time of the program
since the step before, in microseconds: it does not depend on what else the machine does.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final

from tests.benchmark.postgres.contenders import Ours, streaming
from tests.benchmark.postgres.measuring import BASE, WAIT, define_subscription
from tests.benchmark.postgres.servers import Bed, bed
from tests.benchmark.postgres.workloads import NARROW

_ROWS: Final = 200
_PAUSE: Final = 0.01
_FIRST: Final = 10
"""The first rows wait for the start, and fill caches."""
STEPS: Final = {
    "committed": "COMMIT is answered",
    "received": "the walsender's messages are read",
    "queued": "they are a whole transaction",
    "taken": "the apply worker has it",
    "opened": "a pipeline is open",
    "started": "BEGIN and the changes are sent",
    "sent": "the position and COMMIT are prepared",
    "answered": "the target has answered",
    "visible": "another session of the target sees the row",
}
_WIDTH: Final = 40
Step = tuple[float, float | None]
"""Milliseconds after the answer to COMMIT, and microseconds of the program's processor time since the step before, if they are known."""


class _Marked(Ours):
    """``subscriber run``, which notes when each step is done."""

    def __init__(self, place: Bed, mode: str, file: Path) -> None:
        super().__init__(place, mode)
        self._file = file

    def command(self) -> list[str]:
        python, *rest = super().command()
        return [python, "-m", "tests.benchmark.postgres.marked", str(self._file), *rest[rest.index("subscriber") + 1 :]]


def _measure(place: Bed, rows: int, file: Path) -> dict[str, Step]:
    """The medians of all steps."""
    place.create(NARROW)
    mode = streaming(place.version, wanted=False)
    define_subscription(place, mode)
    place.copy_slot(BASE, _Marked.slot)
    reader, moments = _Marked(place, mode, file), []
    with place.fresh_target():
        reader.prepare()
        reader.start()
        try:
            for number in range(rows + _FIRST):
                place.publisher.execute(f"INSERT INTO t VALUES ({number}, 1, 2, 'one row')")
                committed = time.perf_counter()
                while not place.target.value(f"SELECT EXISTS (SELECT FROM t WHERE id = {number})"):
                    reader.check()
                    assert time.perf_counter() - committed < WAIT
                moments.append((committed, time.perf_counter()))
                time.sleep(_PAUSE)
        finally:
            reader.stop()
    return medians(moments[_FIRST:], json.loads(file.read_text()))


def medians(moments: Sequence[tuple[float, float]], marks: Sequence[tuple[str, float, float]]) -> dict[str, Step]:
    """The median of each step.

    Args:
        moments: for each row when its COMMIT was answered, and when it was visible.
        marks: the steps of the program, in order: the name, the time, and the processor time.
    """
    found: dict[str, list[float]] = {step: [] for step in STEPS}
    used: dict[str, list[float]] = {step: [] for step in STEPS}
    for committed, visible in moments:
        found["committed"].append(0.0)
        found["visible"].append(visible - committed)
        # the last of each name: a message that arrives in two pieces is received twice
        steps = {name: (at, cpu) for name, at, cpu in marks if committed - _PAUSE / 2 < at < visible + _PAUSE / 2}
        before: float | None = None
        for name in STEPS:
            if name in steps:
                at, cpu = steps[name]
                found[name].append(at - committed)
                if before is not None and cpu >= before:
                    used[name].append(cpu - before)
                before = cpu
    return {step: (median(times) * 1000, median(used[step]) * 1e6 if used[step] else None) for step, times in found.items() if times}


def chart(found: Mapping[str, Step]) -> str:
    """A line for each step."""
    most = max(after for after, _ in found.values()) or 1.0
    lines = []
    for step, (after, used) in found.items():
        cpu = f"{used:4.0f} µs" if used is not None else " " * 7
        lines.append(f"{after:6.2f} ms  {cpu}  {'#' * round(max(after, 0) / most * _WIDTH):{_WIDTH}}  {STEPS[step]}")
    return "\n".join(lines)


def main() -> None:
    """Run it. The arguments: the number of rows."""
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    with tempfile.TemporaryDirectory() as directory, bed(18) as place, place.workload():
        print(chart(_measure(place, rows or _ROWS, Path(directory, "marks.json"))))


if __name__ == "__main__":
    main()
