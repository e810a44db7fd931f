"""Lets other programs' maintenance win: rounds wait while another program rewrites files of a table.

OPTIMIZE reads files of a table, writes new ones, and commits at its end. If a round has replaced a file meanwhile, or marked rows in it,
OPTIMIZE has lost. With rounds every second it would lose each time. It does not announce its begin, but its files are in the table's
directory before a commit names them. Then rounds wait until there is such a commit, or until a time limit. Each time that the limit passes
without a commit, the next limit is twice as long. So a maintenance that is tried again wins after a few tries. A program that rewrites
many tables one after another does not keep all rounds waiting: two minutes are the limit for all tables together.

This needs the table's directory. In an object store, rounds do not wait.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections import Counter
from collections.abc import Collection
from typing import Final

from subscriber.errors import TargetError
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.tables.delta_reader import DeltaReader
from subscriber.sinks.spark.tables.table_log import LOG

__all__ = ["MaintenanceRoom"]

_log = logging.getLogger(__name__)

_OURS: Final = re.compile(r"part-[0-9a-f]{32}\.parquet")
_FIRST_SECONDS: Final = 10.0
_MOST_SECONDS: Final = 120.0


class MaintenanceRoom:
    """Says how long rounds wait, see the module. Not for several threads."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._known: dict[str, set[str]] = {}
        self._changed: dict[str, int] = {}  # when a directory has changed last
        self._waiting: dict[str, tuple[int, float]] = {}  # the table's version, and until when
        self._since: float | None = None  # rounds wait
        self._lost = Counter[str]()

    def seconds(self, tables: Collection[DeltaReader]) -> float:
        """How long the next round should wait. 0: not at all. The tables are as the last round left them."""
        now = time.monotonic()
        for table in tables:
            if self._storage.root is not None and table.is_there:
                with contextlib.suppress(TargetError):  # the round finds out which table it is of
                    self._look(table, now)
        if (left := max((until - now for _, until in self._waiting.values()), default=0.0)) <= 0:
            self._since = None
            return 0.0
        self._since = now if self._since is None else self._since
        if now >= self._since + _MOST_SECONDS:
            self._since = None
            self._lost.update(self._waiting.keys())
            self._waiting.clear()
            return 0.0
        return min(left, self._since + _MOST_SECONDS - now)

    def know(self, tables: Collection[DeltaReader]) -> None:
        """Take all files in the directories of these tables for ours: a MERGE INTO that failed leaves files that no commit names."""
        for table in tables:
            if self._storage.root is not None:
                with contextlib.suppress(TargetError):
                    self._new_files(table.directory)

    def _look(self, table: DeltaReader, now: float) -> None:
        directory = table.directory
        new = self._new_files(directory)
        if directory in self._waiting:
            version, until = self._waiting[directory]
            if self._is_followed(directory, version):
                del self._waiting[directory], self._lost[directory]
            elif now >= until:
                del self._waiting[directory]
                self._lost[directory] += 1
        elif new - {path.rpartition("/")[2] for path in table.table_files()} and not self._is_followed(directory, table.version):
            limit = min(_FIRST_SECONDS * 2 ** self._lost[directory], _MOST_SECONDS)
            self._waiting[directory] = table.version, now + limit
            _log.info("rounds wait up to %.0f s for another program that rewrites files of Delta table %s", limit, table.uri)

    def _is_followed(self, directory: str, version: int) -> bool:
        """Whether there is a commit after a version."""
        return self._storage.exists(f"{directory}/{LOG}/{version + 1:020d}.json")

    def _new_files(self, directory: str) -> set[str]:
        """The names of data files that are not ours, and that were not there when it was looked last."""
        assert self._storage.root is not None
        path = self._storage.root / directory
        with self._storage.reading(directory):
            # a directory has as many files as rounds in the retention time
            if self._changed.get(directory) == (changed := path.stat().st_mtime_ns):
                return set()
            there = {file.name for file in path.iterdir() if file.suffix == ".parquet" and not _OURS.fullmatch(file.name)}
        known, self._known[directory], self._changed[directory] = self._known.get(directory, there), there, changed
        return there - known
