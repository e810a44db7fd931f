"""Detects commits of other writers that change rows or columns, and the loss of published versions.

A published version must remain, because the landed files that it was made from are removed. Other writers may maintain the tables, as with
any optimistic writer: commits that only move rows between files (``dataChange`` is false), and new properties, comments and columns, are
adopted. They must not change rows, or the columns that are there: these would be published as the publisher's, and could not be
distinguished from ours. Each of our commits that adds or removes files has one of our applications in Delta's ``txn``. The table must be
copied again, even if the other writer has undone its change: nothing is derived from what it did.

Change logs are checked in the same way, because readers would get rows of another writer as the publisher's changes. A log is checked
before each of our commits, and the commit fails if rows were changed since the check. So a foreign change always comes after our last
commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.catalog.snapshots import SnapshotTable
from subscriber.sinks.spark.schema.arrow_types import widened
from subscriber.sinks.spark.tables.delta_reader import DeltaReader
from subscriber.sinks.spark.tables.lake_columns import lake_schema
from subscriber.sinks.spark.tables.table_errors import COPY_AGAIN, TableStopped, remedy
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
    elif applied is None or applied < published.applied:
        found = f"a commit up to {published.applied} is not in its log"
    if found is not None:
        raise TableStopped(
            f"Delta table {delta.uri} has lost version {published.version}, which was published: {found}",
            hint=COPY_AGAIN,
        )


def require_no_foreign_changes(delta: DeltaReader, since: int, prefix: str, application: str) -> None:
    """Check that other writers changed no rows or columns of a loaded table after a published version, or raise TableStopped.

    ``prefix``: the beginning of the names of our applications. ``application`` commits the table now. Its first commit, of a new copy,
    replaces everything before it.
    """
    changed: dict[int, str] = {}
    for version in range(since + 1, delta.version + 1):
        commit = delta.actions(version) or []
        if _is_ours(commit, prefix):
            continue
        if changes_rows(commit):
            changed[version] = ""
        elif has(commit, "metaData") and (column := _changed_column(delta, version)) is not None:
            changed[version] = f' (column "{column}")'
    if changed and delta.applied_at(since, application) is None and delta.applied_at(delta.version, application) is not None:
        # the commit of an empty copy may have no file
        copied = next(version for version in range(since + 1, delta.version + 1) if delta.applied_at(version, application) is not None)
        changed = {version: what for version, what in changed.items() if version > copied}
    for version, what in changed.items():
        raise TableStopped(f"Delta table {delta.uri} was changed by another writer, in version {version}{what}", hint=COPY_AGAIN)


def _changed_column(delta: DeltaReader, version: int) -> str | None:
    """A column that a version changed or dropped. None: it changed none of those that were there."""
    tables = [delta.at(version - 1), delta.at(version)]
    before, now = map(lake_schema, tables)
    # with column mapping, a column of the same name may be another one in the files
    stored, stored_now = (
        {field.name: field.metadata.get(PHYSICAL_NAME, field.name) for field in table.schema().fields} for table in tables
    )
    for field in before:
        is_same = stored_now.get(field.name) == stored[field.name]
        if not is_same or widened(field.type, now.field(field.name).type) != now.field(field.name).type:
            return str(field.name)
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
    """Check that a loaded change log or history table (``what``) has the rows that our last commit left, or raise TableStopped."""
    for version in range(log.version, -1, -1):
        commit = log.actions(version)
        if commit is None or (has(commit, "add", "remove") and _is_ours(commit, prefix)):
            return
        if changes_rows(commit):
            raise TableStopped(f"{what} {log.uri} was changed by another writer, in version {version}", hint=remedy(log.directory))


def _is_ours(commit: Iterable[Mapping[str, Any]], prefix: str) -> bool:
    return any(action.get("txn", {}).get("appId", "").startswith(prefix) for action in commit)
