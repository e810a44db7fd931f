"""What the rounds of an applier did: progress events, and totals for the metrics.

An event has the form of Structured Streaming's StreamingQueryProgress, so that tools for it can read it. A round is a micro-batch, and the
offsets are LSNs. The phases in ``durationMs`` have Structured Streaming's names where there is one:

* ``latestOffset``: find what is landed; ``queryPlanning``: plan the work of all tables;
* ``addBatch``: the engine runs the work and commits each table; ``commitOffsets``: publish the snapshot;
* ``triggerExecution``: the whole round. The change log is appended to between rounds, and is not part of it.

``observedMetrics`` has what Structured Streaming has no place for: freshness, bytes and files.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final
from uuid import NAMESPACE_URL, uuid4, uuid5

from subscriber.interfaces import TableName
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.sinks.spark.pipeline.pace import Waiting

if TYPE_CHECKING:
    # it needs pyarrow, and the metrics of the command line import this module without
    from subscriber.sinks.spark.landing.manifest import Manifest

__all__ = ["PHASES", "ApplierProgress", "RoundProgress", "TableProgress", "Totals", "as_line"]

PHASES: Final = ("latestOffset", "queryPlanning", "addBatch", "commitOffsets")
_RECENT: Final = 10
"""How many events are kept for the status."""
_SLOWEST: Final = 5
"""How many tables an event names."""
_TABLES: Final = 100
"""Number of rounds over which the slowest tables are found."""


@dataclass(slots=True)
class TableProgress:
    """One table in a round: its changes, what was written for it, and the seconds of work, which may be in parallel with that of others."""

    rows: int = 0
    files: int = 0
    written: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class RoundProgress:
    """One round.

    Attributes:
        began, ended: seconds since 1970.
        start, end, latest: the LSN before the round, after it, and of the newest landed batch when it began.
        rows, size: the number of landed changes that it took, and the size of their files in bytes.
        since, newest: when the oldest and the newest commit in it were made. None: unknown.
        received, landed: how long after its commit the oldest one was received, and landed.
        seconds: of each phase.
    """

    number: int
    began: float
    start: Lsn = INVALID_LSN
    end: Lsn = INVALID_LSN
    latest: Lsn = INVALID_LSN
    rows: int = 0
    size: int = 0
    since: float | None = None
    newest: float | None = None
    received: float | None = None
    landed: float | None = None
    ended: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    tables: dict[TableName, TableProgress] = field(default_factory=dict)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase, which may be in several pieces."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began

    def of(self, name: TableName) -> TableProgress:
        return self.tables.setdefault(name, TableProgress())

    def take(self, taken: Sequence[Manifest], waiting: Sequence[Manifest], names: Mapping[int, TableName]) -> None:
        """Describe what the round took of the waiting manifests. ``names``: the tables by their numbers."""
        self.latest = waiting[-1].end if waiting else self.end
        for manifest in taken:
            self.size += manifest.size
            for file in manifest.files:
                self.rows += file.rows
                if file.table_id in names:
                    self.of(names[file.table_id]).rows += file.rows
        if taken:
            first = taken[0]
            self.since, self.newest = first.since, taken[-1].until
            self.received, self.landed = first.after_commit(first.received_time), first.after_commit(first.landed_time)

    @property
    def written(self) -> int:
        """Bytes that were written to the tables."""
        return sum(table.written for table in self.tables.values())

    @property
    def files(self) -> int:
        return sum(table.files for table in self.tables.values())

    @property
    def freshness(self) -> float | None:
        """The age of the oldest commit when its changes could be read."""
        return None if self.since is None else max(self.ended - self.since, 0.0)


@dataclass(slots=True)
class Totals:
    """Sums since the applier started.

    Attributes:
        rounds, late: the number of rounds, and of those that missed the freshness target.
        rows, size: landed changes that were applied, and the size of their files.
        files, written: what was written: files of tables, and bytes by ``table`` and ``log``.
        seconds: of each phase.
    """

    rounds: int = 0
    late: int = 0
    rows: int = 0
    size: int = 0
    files: int = 0
    written: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)

    @property
    def amplification(self) -> float | None:
        """Bytes that were written to tables and logs for each byte of landed changes."""
        return sum(self.written.values()) / self.size if self.size else None


class ApplierProgress:
    """The progress of one applier, see the module. Other threads may read it.

    Attributes:
        recent: the events of the last rounds.
        batches: the number of rounds so far, with those of earlier appliers.
        waiting: what waits for the next round. None: nothing.
        held: whether the write rate makes the next round wait beyond the target.
        stopped, stopped_logs: the tables that are stopped, and those whose change logs are, with the reasons.
    """

    def __init__(self, lake: str, engine: str, freshness: float) -> None:
        self.freshness = freshness
        self.last: RoundProgress | None = None
        self.recent: deque[dict[str, Any]] = deque(maxlen=_RECENT)
        self.totals = Totals()
        self.waiting: Waiting | None = None
        self.held = False
        self.stopped: dict[TableName, str] = {}
        self.stopped_logs: dict[TableName, str] = {}
        self.engine = engine
        self.lake = lake
        self._id = ""
        self._run = str(uuid4())
        self.batches = 0
        self._tables: deque[dict[TableName, TableProgress]] = deque(maxlen=_TABLES)

    def begin(self, lake_identifier: str, batches: int) -> None:
        """Begin, after so many rounds of earlier appliers."""
        self._id = str(uuid5(NAMESPACE_URL, f"subscriber-lake:{lake_identifier}"))
        self.batches = batches

    def start(self) -> RoundProgress:
        """Begin a round. It only counts after :meth:`end`."""
        return RoundProgress(self.batches, time.time())

    def end(self, done: RoundProgress) -> dict[str, Any]:
        """Count a round that was published. Return its event."""
        done.ended = time.time()
        event = self._event(done)
        self.recent.append(event)
        self._tables.append(done.tables)
        totals = self.totals
        totals.rounds += 1
        totals.rows += done.rows
        totals.size += done.size
        totals.files += done.files
        totals.written["table"] += done.written
        totals.seconds.update(done.seconds)
        if done.freshness is not None and done.freshness > self.freshness:
            totals.late += 1
        self.last = done
        self.batches += 1
        return event

    def slowest(self) -> dict[TableName, TableProgress]:
        """The tables that took the most time in the last rounds, with their sums."""
        found: dict[TableName, TableProgress] = {}
        for tables in list(self._tables):
            for name, one in list(tables.items()):
                sums = found.setdefault(name, TableProgress())
                sums.rows += one.rows
                sums.files += one.files
                sums.written += one.written
                sums.seconds += one.seconds
        return _slowest(found)

    def _event(self, done: RoundProgress) -> dict[str, Any]:
        took = done.ended - done.began
        since_last = done.began - self.last.began if self.last is not None else took
        rates = {
            "numInputRows": done.rows,
            "inputRowsPerSecond": round(done.rows / since_last, 1) if since_last > 0 else 0.0,
            "processedRowsPerSecond": round(done.rows / took, 1) if took > 0 else 0.0,
        }
        duration = {name: round(seconds * 1000) for name, seconds in done.seconds.items()}
        source = {
            "description": "landing zone",
            "startOffset": str(done.start),
            "endOffset": str(done.end),
            "latestOffset": str(max(done.latest, done.end)),
            **rates,
            "metrics": {"landedBytes": str(done.size)},
        }
        return {
            "id": self._id,
            "runId": self._run,
            "name": "subscriber",
            "timestamp": _iso(done.began),
            "batchId": done.number,
            "batchDuration": round(took * 1000),
            **rates,
            "durationMs": {**duration, "triggerExecution": round(took * 1000)},
            "eventTime": {name: _iso(moment) for name, moment in (("min", done.since), ("max", done.newest)) if moment is not None},
            "stateOperators": [],
            "sources": [source],
            "sink": {
                "description": f"Delta tables in {self.lake}, engine {self.engine}",
                "numOutputRows": -1,
                "metrics": {"tables": str(len(done.tables)), "files": str(done.files), "bytes": str(done.written)},
            },
            "observedMetrics": {
                "freshness": {
                    "targetSeconds": self.freshness,
                    "seconds": None if done.freshness is None else round(done.freshness, 3),
                    "receivedSeconds": None if done.received is None else round(done.received, 3),
                    "landedSeconds": None if done.landed is None else round(done.landed, 3),
                    "isMissed": done.freshness is not None and done.freshness > self.freshness,
                },
                "slowestTables": {str(name): round(table.seconds, 3) for name, table in _slowest(done.tables).items()},
            },
        }


def _slowest(tables: Mapping[TableName, TableProgress]) -> dict[TableName, TableProgress]:
    return dict(sorted(tables.items(), key=lambda item: -item[1].seconds)[:_SLOWEST])


def _iso(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def as_line(event: dict[str, Any]) -> str:
    """An event as one line of JSON."""
    return json.dumps(event, ensure_ascii=False, separators=(",", ":"))
