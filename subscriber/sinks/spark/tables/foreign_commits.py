"""Detects commits of other writers, and the loss of published versions.

A published version must remain, because the landed files that it was made from are removed. Other writers must not change the table. Their
rows would be published as the publisher's, and could not be distinguished from ours. Each of our commits that adds or removes files has
one of our applications in Delta's ``txn``. A change by another writer is no error once the table has its previous files again (RESTORE
TABLE).

Change logs are checked in the same way, because readers would get rows of another writer as the publisher's changes. A log is checked
before each of our commits, and the commit fails if another one was made since the check. So a foreign commit always comes after our last
one.
"""

from __future__ import annotations

import json
from typing import Any, Final, Literal

from subscriber.errors import TargetError
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.catalog.snapshots import CutTable
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.tables.delta import LakeDelta

__all__ = [
    "COPY_AGAIN",
    "copied_version",
    "copy_application",
    "require_no_foreign_commits",
    "require_no_foreign_log_commits",
    "require_published_version",
]

COPY_AGAIN: Final = "remove it from the publication and add it again, which copies it again"
"""A hint for error messages."""


def copy_application(application: str) -> str:
    """The application for the first commit of a copy by executors, which adds its files."""
    return f"{application}-copied"


def require_published_version(delta: LakeDelta, published: CutTable, applied: Lsn | None) -> None:
    """Check that the published version of a table is still there.

    Args:
        delta: the table, loaded.
        published: the table in the published cut.
        applied: the LSN of the table.

    Raises:
        TargetError: it is not there. Landed files of the lost commits may already be removed, so continuing would lose changes.
    """
    found = None
    if not delta.is_there:
        found = "it is gone"
    elif delta.version < published.version:
        found = f"its log ends at {delta.version}"
    elif published.applied is not None and (applied is None or applied < published.applied):
        found = f"a commit up to {published.applied} is not in its log"
    if found is not None:
        raise TargetError(
            f"Delta table {delta.uri} has lost version {published.version}, which was published: {found}",
            hint=f"restore it from a backup, or {COPY_AGAIN}",
        )


def require_no_foreign_commits(storage: Storage, delta: LakeDelta, since: int, prefix: str, application: str) -> None:
    """Check that all commits after a version are ours, or were undone before our next one.

    Args:
        storage: of the lake.
        delta: the table, loaded.
        since: a version that was published.
        prefix: the beginning of the names of our applications.
        application: the application that commits the table now. The application of a new copy replaces everything before it.

    Raises:
        TargetError: a commit is foreign and was not undone.
    """
    ours: list[int] = []
    runs: list[list[int]] = []  # of foreign commits, without a commit of ours in between
    for version in range(since + 1, delta.version + 1):
        writer = _writer(storage, delta, version, prefix)
        if writer == "ours":
            ours.append(version)
        elif writer == "foreign":
            if runs and not (ours and ours[-1] > runs[-1][-1]):
                runs[-1].append(version)
            else:
                runs.append([version])

    def is_begun(version: int) -> bool:
        return any(delta.applied_at(version, name) is not None for name in (application, copy_application(application)))

    if runs and ours and not is_begun(since) and is_begun(delta.version):
        copied = next(version for version in ours if is_begun(version))
        runs = [run for run in runs if run[-1] > copied]
    for run in runs:
        if set(delta.files_at(run[-1])) == set(delta.files_at(run[0] - 1)):
            continue
        behind = next((version for version in ours if version > run[0]), None)
        told = f"Delta table {delta.uri} was changed by another writer, in version {run[0]}"
        if behind is None:
            raise TargetError(told, hint=f"RESTORE TABLE … TO VERSION AS OF {run[0] - 1}; or {COPY_AGAIN}")
        # restored to the version before, the table would lack the rows of our commit, but still state its LSN
        raise TargetError(f"{told}, and by the applier behind that, in version {behind}", hint=COPY_AGAIN)


def copied_version(storage: Storage, delta: LakeDelta, application: str) -> int:
    """The version in which a copy by executors was added to the table; or the last version that the log no longer has."""
    for version in range(delta.version, -1, -1):
        actions = _actions(storage, delta, version)
        if actions is None or any(action.get("txn", {}).get("appId") == copy_application(application) for action in actions):
            return version
    return -1


def require_no_foreign_log_commits(storage: Storage, log: LakeDelta, prefix: str) -> None:
    """Check that a change log has the files that our last commit left.

    Args:
        storage: of the lake.
        log: the table, loaded.
        prefix: the beginning of the names of our applications.

    Raises:
        TargetError: it has other files.
    """
    foreign = []
    for version in range(log.version, -1, -1):
        writer = _writer(storage, log, version, prefix)
        if writer in {"ours", None}:
            break
        if writer == "foreign":
            foreign.append(version)
    if foreign and (not foreign[-1] or set(log.files_at(foreign[0])) != set(log.files_at(foreign[-1] - 1))):
        hint = f"RESTORE TABLE … TO VERSION AS OF {foreign[-1] - 1}" if foreign[-1] else "remove its directory"
        raise TargetError(f"change log {log.uri} was changed by another writer, in version {foreign[-1]}", hint=hint)


def _actions(storage: Storage, delta: LakeDelta, version: int) -> list[dict[str, Any]] | None:
    content = storage.read(f"{delta.directory}/_delta_log/{version:020d}.json")
    return None if content is None else [json.loads(line) for line in content.splitlines() if line.strip()]


def _writer(storage: Storage, delta: LakeDelta, version: int, prefix: str) -> Literal["ours", "foreign", "none"] | None:
    """The writer that added or removed files in a commit. None: the log no longer has that commit."""
    actions = _actions(storage, delta, version)
    if actions is None:
        return None
    if not any("add" in action or "remove" in action for action in actions):
        return "none"
    return "ours" if any(action.get("txn", {}).get("appId", "").startswith(prefix) for action in actions) else "foreign"
