"""Sweeps: removes files that no version of a table within the retention time has, and abandoned copies.

A reader may still have a file open, or use it through a published snapshot, until the retention time has passed since its removal from the
table. Files that no commit ever named, for example of a round that was killed, are removed at the same age. So are unfinished files.
delta-rs trims Delta's own log at each checkpoint (``delta.py``).

An error of one directory, such as a missing right, does not keep the others from being swept.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable, Iterator
from typing import Final

from subscriber.errors import TargetError
from subscriber.sinks.spark.catalog.lake import Lake, abandoned_copies
from subscriber.sinks.spark.catalog.snapshots import SNAPSHOTS
from subscriber.sinks.spark.files.location import table_directory
from subscriber.sinks.spark.files.storage import TEMPORARY, Storage
from subscriber.sinks.spark.tables.delta import LakeDelta
from subscriber.sinks.spark.tables.table_errors import CommitConflict

__all__ = ["isolated", "remove_unneeded_files"]

_UNFINISHED: Final = re.compile(rf"{re.escape(TEMPORARY)}[0-9a-f]{{32}}-")


def remove_unneeded_files(
    storage: Storage, lake: Lake, tables: Iterable[LakeDelta], retain_hours: int, errors: dict[str, TargetError]
) -> int:
    """Remove files that are no longer needed. Return their number. Store the retention time in the tables, which are loaded.

    The error of a directory that cannot be swept is added to ``errors``.
    """
    count = 0
    for table in tables:
        with isolated(storage, table.directory, errors):
            gone = table.unneeded(retain_hours)
            storage.delete(f"{table.directory}/{path}" for path in gone)
            count += len(gone)
            if table.unwritable(columns=False) is None:
                table.set_retention()
    count += _sweep_unfinished(storage, lake, retain_hours, errors)
    for directory in abandoned_copies(storage, [*lake.state.tables.values(), *lake.state.removed.values()]):
        with isolated(storage, directory, errors):
            storage.remove_directory(directory)
            count += 1
    return count


@contextlib.contextmanager
def isolated(storage: Storage, directory: str, errors: dict[str, TargetError]) -> Iterator[None]:
    """Collect the error of a block that concerns one directory only."""
    try:
        yield
    except CommitConflict:
        pass  # the next sweep stores the retention time
    except TargetError as error:
        Lake.find(storage)
        errors[directory] = error


def _sweep_unfinished(storage: Storage, lake: Lake, retain_hours: int, errors: dict[str, TargetError]) -> int:
    """Remove files that were being written when a process was killed. Delta's library ignores names that begin with a dot."""
    known = [*lake.state.tables.items(), *lake.state.removed.items()]
    hours = {table_directory(root, name, table.id): retain_hours for root in ("tables", "log", "history") for name, table in known}
    # other processes may be writing small files there
    hours |= dict.fromkeys(["", SNAPSHOTS], max(retain_hours, 1))
    now, count = time.time(), 0
    for directory, old in hours.items():
        with isolated(storage, directory, errors):
            names = [file.name for file in storage.files(directory) if _UNFINISHED.match(file.name) and file.changed < now - old * 3600]
            storage.delete(f"{directory}/{name}" if directory else name for name in names)
            count += len(names)
    return count
