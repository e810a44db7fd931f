"""What Delta's statistics say about the columns of a table's files."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.tables.delta_reader import DeltaReader

__all__ = ["LogFile", "ValueSearch", "files_of_log", "null_counts"]


@dataclass(frozen=True, slots=True)
class LogFile:
    """A file of a change log: its path, relative to the table, and the first and last LSN of its changes."""

    path: str
    first: int
    last: int


def files_of_log(log: DeltaReader) -> list[LogFile]:
    """The files of a change log in order: by ``_lsn``, and within one transaction by ``_seq``. They always have these statistics."""
    actions = log.add_actions()
    if not actions.num_rows:
        return []
    columns = (actions[name].to_pylist() for name in ("min._lsn", "max._lsn", "min._seq", "path"))
    found = sorted(zip(*columns, strict=True), key=lambda one: one[:3])
    return [LogFile(path, first, last) for first, last, _, path in found]


def null_counts(actions: pa.Table, field: str) -> dict[str, int | None]:
    """The number of NULLs of a column in each file, from the result of :meth:`DeltaReader.add_actions`. None: unknown."""
    name, paths = f"null_count.{field}", actions["path"].to_pylist()
    return dict(zip(paths, actions[name].to_pylist() if name in actions.schema.names else [None] * len(paths), strict=True))


class ValueSearch:
    """Whether columns have values. It remembers files that Delta has no statistics of."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._known: dict[tuple[str, str], dict[str, bool]] = {}

    def has_values(self, delta: DeltaReader, field: str) -> bool:
        """Whether some row has a value in this column, by Delta's statistics; or by those in the file if Delta has none.

        A list counts only if it has an element that is a value.
        """
        actions = delta.add_actions()
        nulls, known = null_counts(actions, field), self._known.get((delta.directory, field), {})
        found: dict[str, bool] = {}
        for path, count in zip(actions["path"].to_pylist(), actions["num_records"].to_pylist(), strict=True):
            missing = nulls[path]
            if missing is not None:
                found[path] = missing < count
            else:
                found[path] = known[path] if path in known else self._states_values(f"{delta.directory}/{path}", field)
        self._known[delta.directory, field] = found
        return any(found.values())

    def _states_values(self, path: str, field: str) -> bool:
        with self._storage.parquet(path) as file:
            metadata = file.metadata
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            for column in (group.column(index) for index in range(group.num_columns)):
                if column.path_in_schema != field and not column.path_in_schema.startswith(f"{field}.list."):
                    continue
                stated = column.statistics
                if stated is None or not stated.has_null_count or stated.null_count < column.num_values:
                    return True
        return False
