"""Detects commits of other writers that change rows or columns, and the loss of published versions.

A published version must remain, because the landed files that it was made from are removed. Other writers may maintain the tables, as with
any optimistic writer: commits that only move rows between files (``dataChange`` is false), and new properties, comments and columns, are
adopted. They must not change rows, or the columns that are there: these would be published as the publisher's, and could not be
distinguished from ours. Each of our commits that adds or removes files has one of our applications in Delta's ``txn``. A change by another
writer is no error once the table has its previous rows and columns again (RESTORE TABLE).

Change logs are checked in the same way, because readers would get rows of another writer as the publisher's changes. A log is checked
before each of our commits, and the commit fails if rows were changed since the check. So a foreign change always comes after our last
commit.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.catalog.snapshots import SnapshotTable
from subscriber.sinks.spark.schema.arrow_types import widened
from subscriber.sinks.spark.tables.delta_reader import DeltaReader
from subscriber.sinks.spark.tables.lake_columns import lake_schema
from subscriber.sinks.spark.tables.table_errors import BEGIN_AGAIN, COPY_AGAIN, TableStopped
from subscriber.sinks.spark.tables.table_features import PHYSICAL_NAME
from subscriber.sinks.spark.tables.table_log import changes_rows, has

__all__ = [
    "first_version",
    "require_no_foreign_changes",
    "require_no_foreign_log_changes",
    "require_published_version",
]


def require_published_version(delta: DeltaReader, published: SnapshotTable, applied: Lsn | None) -> None:
    """Check that the published version of a loaded table is still there. ``applied``: the LSN of the table.

    Raises:
        TableStopped: it is not there. Landed files of the lost commits may already be removed, so continuing would lose changes.
    """
    found = None
    if not delta.is_there:
        found = "it is gone"
    elif delta.version < published.version:
        found = f"its log ends at {delta.version}"
    elif published.applied is not None and (applied is None or applied < published.applied):
        found = f"a commit up to {published.applied} is not in its log"
    if found is not None:
        raise TableStopped(
            f"Delta table {delta.uri} has lost version {published.version}, which was published: {found}",
            hint=f"restore it from a backup, or {COPY_AGAIN}",
        )


def require_no_foreign_changes(delta: DeltaReader, since: int, prefix: str, application: str) -> None:
    """Check that other writers changed no rows or columns after a version, or undid that before our next commit.

    Args:
        delta: the table, loaded.
        since: a version that was published.
        prefix: the beginning of the names of our applications.
        application: the application that commits the table now. The application of a new copy replaces everything before it.

    Raises:
        TableStopped: a change was not undone.
    """
    ours: list[int] = []
    foreign: list[int] = []
    for version in range(since + 1, delta.version + 1):
        commit = delta.actions(version) or []
        if not _is_ours(commit, prefix):
            foreign += [version] if changes_rows(commit) or has(commit, "metaData") else []
        elif has(commit, "add", "remove"):
            ours.append(version)

    def is_begun(version: int) -> bool:
        return delta.applied_at(version, application) is not None

    if foreign and not is_begun(since) and is_begun(delta.version):
        # the commit of an empty copy may have no file
        copied = next(version for version in range(since + 1, delta.version + 1) if is_begun(version))
        foreign = [version for version in foreign if version > copied]
    for run in _runs(foreign, ours):
        changed = _changed(delta, run)
        if changed is None:
            continue
        version, what = changed
        behind = next((one for one in ours if one > version), None)
        text = f"Delta table {delta.uri} was changed by another writer, in version {version}{what}"
        if behind is None:
            raise TableStopped(text, hint=f"RESTORE TABLE … TO VERSION AS OF {version - 1}; or {COPY_AGAIN}")
        # restored to the version before, the table would lack the rows of our commit, but still state its LSN
        raise TableStopped(f"{text}, and by the applier behind that, in version {behind}", hint=COPY_AGAIN)


def _runs(versions: Sequence[int], ours: Sequence[int]) -> Iterable[list[int]]:
    """Divide versions of other writers at our own."""
    for _, run in itertools.groupby(versions, lambda version: bisect_left(ours, version)):
        yield list(run)


def _changed(delta: DeltaReader, run: Sequence[int]) -> tuple[int, str] | None:
    """The first version that changed rows or columns, and what it changed. None if the last version has undone it."""
    rows = [version for version in run if changes_rows(delta.actions(version) or [])]
    if rows and delta.rows_at(rows[-1]) != delta.rows_at(rows[0] - 1):
        return rows[0], ""
    columns = [version for version in run if has(delta.actions(version) or [], "metaData")]
    if columns:
        tables = [delta.at(version) for version in (run[0] - 1, run[-1])]
        before, now = map(lake_schema, tables)
        # with column mapping, a column of the same name may be another one in the files
        stored, stored_now = (
            {field.name: field.metadata.get(PHYSICAL_NAME, field.name) for field in table.schema().fields} for table in tables
        )
        for field in before:
            is_same = stored_now.get(field.name) == stored[field.name]
            if not is_same or widened(field.type, now.field(field.name).type) != now.field(field.name).type:
                return columns[0], f' (column "{field.name}")'
    return None


def first_version(delta: DeltaReader, application: str) -> int:
    """The first version of a copy or of its changes; or the last version that the log no longer has."""
    found = -1
    for version in range(delta.version, -1, -1):
        commit = delta.actions(version)
        if commit is None:
            return version if found < 0 else found
        if any(action.get("txn", {}).get("appId") == application for action in commit):
            found = version
    return found


def require_no_foreign_log_changes(log: DeltaReader, prefix: str, what: str = "change log") -> None:
    """Check that a loaded change log, or a history table (``what``), has the rows that our last commit left.

    Raises:
        TableStopped: it has other rows.
    """
    foreign = []
    for version in range(log.version, -1, -1):
        commit = log.actions(version)
        if commit is None or (has(commit, "add", "remove") and _is_ours(commit, prefix)):
            break
        if changes_rows(commit):
            foreign.append(version)
    if foreign and (not foreign[-1] or log.rows_at(foreign[0]) != log.rows_at(foreign[-1] - 1)):
        hint = f"RESTORE TABLE … TO VERSION AS OF {foreign[-1] - 1}; or {BEGIN_AGAIN[what]}" if foreign[-1] else BEGIN_AGAIN[what]
        raise TableStopped(f"{what} {log.uri} was changed by another writer, in version {foreign[-1]}", hint=hint)


def _is_ours(commit: Iterable[Mapping[str, Any]], prefix: str) -> bool:
    return any(action.get("txn", {}).get("appId", "").startswith(prefix) for action in commit)
