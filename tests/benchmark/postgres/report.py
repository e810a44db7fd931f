"""What is printed, the JSON of it, the chart, and the table of the documentation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any, Final

from tests.benchmark.postgres.figures import Sample, Timing, median

__all__ = ["LIMIT", "Report", "Result"]

LIMIT: Final = "pg_recvlogical"
NATIVE: Final = "native"
OURS: Final = "subscriber"
SHARED: Final = "4 workers, groups only"
_COLORS: Final = {LIMIT: "#9aa5b1", NATIVE: "#2f6f9f", OURS: "#d9822b"}
_MEGABYTE: Final = 1e6
_LEFT: Final = 250
_WIDTH: Final = 760
_BAR: Final = 9
_GROUP: Final = 38
_TOP: Final = 34


@dataclass(frozen=True, slots=True)
class Result:
    """A workload, and the runs of each reader."""

    workload: str
    title: str
    changes: int
    samples: Mapping[str, Sequence[Sample]]

    def medians(self) -> dict[str, Sample]:
        """The median run of each reader."""
        return {name: median(samples) for name, samples in self.samples.items()}

    def ratio(self, other: str) -> float | None:
        """How many times the wall time of another reader ours is."""
        medians = self.medians()
        return medians[OURS].wall / medians[other].wall if other in medians else None

    def calculated(self) -> dict[int, tuple[float, str]]:
        """What enough cores would give, for each number of sessions: seconds, and the part that takes them. Calculated, not measured.

        Each process has a core of its own, the sessions share the target's work, and nothing waits for locks or for the disk. The work is
        that of :data:`SHARED`, in which every batch is applied in groups; for one session, that of one session.
        """
        medians = self.medians()
        if SHARED not in medians:
            return {}
        found = {}
        for sessions in (1, 2, 4, 8):
            sample = medians[OURS if sessions == 1 else SHARED]
            parts = {"walsender": sample.walsender, OURS: sample.subscriber, "target": sample.target / sessions}
            slowest = max(parts, key=lambda part: parts[part])
            found[sessions] = parts[slowest], slowest
        return found

    def cpu_ratio(self) -> float | None:
        """Processor time of subscriber and target, ours beside native's."""
        medians = self.medians()
        ours, native = medians[OURS], medians.get(NATIVE)
        return (ours.subscriber + ours.target) / max(native.subscriber, 0.01) if native else None


class Report:
    """All results of a run.

    Args:
        about: the command, the machine, the versions.
    """

    def __init__(self, about: Mapping[str, Any], results: Sequence[Result], timings: Sequence[Timing]) -> None:
        self.about = about
        self.results = results
        self.timings = timings

    @classmethod
    def load(cls, path: Path) -> Report:
        """Read what :meth:`save` wrote."""
        content = json.loads(path.read_text())
        results = [
            Result(
                found["workload"],
                found["title"],
                found["changes"],
                {name: [Sample(**sample) for sample in samples] for name, samples in found["samples"].items()},
            )
            for found in content["results"]
        ]
        return cls(content["about"], results, [Timing(**timing) for timing in content["timings"]])

    def save(self, path: Path) -> None:
        """Write it as JSON, with all samples, medians and ratios."""
        results = [
            {
                **asdict(result),
                "medians": {name: asdict(sample) for name, sample in result.medians().items()},
                "ours / native": result.ratio(NATIVE),
                "ours / pg_recvlogical": result.ratio(LIMIT),
                "cpu of subscriber and target, ours / native": result.cpu_ratio(),
                "calculated seconds with a core for each process": result.calculated(),
            }
            for result in self.results
        ]
        timings = [asdict(timing) for timing in self.timings]
        path.write_text(json.dumps({"about": self.about, "results": results, "timings": timings}, indent=1) + "\n")

    def text(self) -> str:
        """For a terminal."""
        rows = [_HEAD, *(row for result in self.results for row in _lines(result))]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines += [line for result in self.results for line in _calculated(result)]
        lines += [f"{timing.title}: {timing.who} {timing.median:.1f} ms, p95 {timing.p95:.1f} ms" for timing in self.timings]
        return "\n".join([*(f"{name}: {value}" for name, value in self.about.items()), "", *lines])

    def markdown(self) -> str:
        """For the documentation."""
        about = "\n".join(f"- {name}: {f'`{value}`' if name == 'command' else value}" for name, value in self.about.items())
        walls = [["workload", LIMIT, NATIVE, OURS, "/ native", f"/ {LIMIT}"]]
        costs = [["workload", "walsender", NATIVE, OURS, "its target", "/ native", "memory"]]
        for result in self.results:
            found = result.medians()
            ours = found[OURS]
            seconds = [f"{found[name].wall:.1f}" if name in found else "" for name in (LIMIT, NATIVE, OURS)]
            walls.append([result.title, *seconds, _number(result.ratio(NATIVE)), _number(result.ratio(LIMIT))])
            micros = [cpu / result.changes * 1e6 for cpu in (ours.walsender, found[NATIVE].subscriber, ours.subscriber, ours.target)]
            memory = f"{ours.memory / _MEGABYTE:.0f} MB"
            costs.append([result.title, *(f"{cpu:.1f}" for cpu in micros), _number(result.cpu_ratio()), memory])
        timings = [["", "", "median, ms", "p95, ms"]]
        timings += [[timing.title, timing.who, f"{timing.median:.1f}", f"{timing.p95:.1f}"] for timing in self.timings]
        return "\n\n".join(
            [
                about,
                "Wall time in seconds, from the start of the stream until the last row is visible:",
                _table(walls),
                "Processor time in microseconds for each change, and peak memory:",
                _table(costs),
                "Start-up and latency:",
                _table(timings),
            ]
        )

    def workers_markdown(self) -> str:
        """For the documentation of ``apply_workers``."""
        walls = [NATIVE, OURS, "2 workers", "4 workers"]
        rows = [["workload", NATIVE, "1", "2", "4", "publisher", "program", "target", "calculated"]]
        for result in self.results:
            found, calculated = result.medians(), result.calculated()
            ours = found[OURS]
            seconds = [*(found[name].wall for name in walls), ours.walsender, ours.subscriber, ours.target]
            most = f"{calculated[1][0]:.1f}, {calculated[4][0]:.1f}" if calculated else ""
            rows.append([result.title, *(f"{each:.1f}" for each in seconds), most])
        about = ", ".join(str(self.about[name]) for name in ("machine", "date"))
        return f"`{self.about['command']}`, {about}, load {self.about['load average before']}:\n\n{_table(rows)}"

    def svg(self) -> str:
        """A bar for each reader of each workload, as a share of the longest in its group."""
        height = _TOP + _GROUP * len(self.results)
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">',
            f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        ]
        for number, (name, color) in enumerate(_COLORS.items()):
            x = _LEFT + number * 150
            lines.append(f'<rect x="{x}" y="10" width="10" height="10" fill="{color}"/>')
            lines.append(f'<text x="{x + 16}" y="19" fill="#222222">{name}, s</text>')
        for number, result in enumerate(self.results):
            lines += _bars(result, _TOP + number * _GROUP)
        return "\n".join([*lines, "</svg>"]) + "\n"


_HEAD = ["workload", "reader", "wall s", "start-up s", "walsender s", "subscriber s", "target s", "MB"]
_HEAD += ["/ native", f"/ {LIMIT}", "CPU / native"]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _lines(result: Result) -> Iterator[list[str]]:
    for name, sample in result.medians().items():
        seconds = (sample.wall, sample.startup, sample.walsender, sample.subscriber, sample.target)
        ratios = (result.ratio(NATIVE), result.ratio(LIMIT), result.cpu_ratio()) if name == OURS else (None, None, None)
        yield [result.workload, name, *(f"{value:.2f}" for value in seconds), f"{sample.memory / _MEGABYTE:.0f}", *map(_number, ratios)]


def _calculated(result: Result) -> Iterator[str]:
    parts = [f"{sessions}: {seconds:.1f} s ({part})" for sessions, (seconds, part) in result.calculated().items()]
    if parts:
        yield f"{result.workload}, calculated from processor time for sessions with a core each: {', '.join(parts)}"


def _table(rows: list[list[str]]) -> str:
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|" + " --- |" * len(rows[0]), *body])


def _bars(result: Result, top: int) -> Iterator[str]:
    walls = {name: sample.wall for name, sample in result.medians().items()}
    longest = max(walls.values())
    yield f'<text x="{_LEFT - 10}" y="{top + 18}" text-anchor="end" fill="#222222">{escape(result.title)}</text>'
    for number, name in enumerate(name for name in _COLORS if name in walls):
        width = walls[name] / longest * (_WIDTH - _LEFT - 60)
        y = top + number * (_BAR + 1)
        yield f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{_COLORS[name]}"/>'
        yield f'<text x="{_LEFT + width + 5:.1f}" y="{y + _BAR - 1}" font-size="10" fill="#222222">{walls[name]:.1f}</text>'
