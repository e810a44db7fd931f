"""Whether a table of the lake is as the applier left it.

What was published must still be there: what it was made of is gone. And nobody else may have written into it: their rows would be
published as the publisher's, and ours be lost in theirs. Every commit of ours that adds or removes files names an application of ours in
Delta's ``txn``. What was changed by another one is no error any more once the table has the files that it had before (RESTORE TABLE).
"""

from __future__ import annotations

import json
from typing import Any, Final, Literal

from subscriber.errors import TargetError
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.catalog.snapshots import CutTable
from subscriber.sinks.spark.delta import LakeDelta
from subscriber.sinks.spark.files.storage import Storage

__all__ = ["COPY_ANEW", "copied_version", "of_copy", "require_kept", "require_ours"]

COPY_ANEW: Final = "take it out of the publication and in again, which copies it anew"
"""A remedy."""


def of_copy(application: str) -> str:
    """In whose name the files of a copy by executors become a table's, before anything else of this copy."""
    return f"{application}-copied"


def require_kept(delta: LakeDelta, published: CutTable, applied: Lsn | None) -> None:
    """See that what was published of a table is still there.

    Args:
        delta: the table, loaded.
        published: what was.
        applied: up to where the table says it is.

    Raises:
        TargetError: it is not. What was landed for it may be gone since: going on would leave that out.
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
            hint=f"restore it from a backup, or {COPY_ANEW}",
        )


def require_ours(storage: Storage, delta: LakeDelta, since: int, prefix: str, application: str) -> None:
    """See that commits behind a version are all ours, or undone before another one of ours came.

    Args:
        storage: the lake's.
        delta: the table, loaded.
        since: a version that was.
        prefix: how names of applications of ours begin.
        application: in whose name the table is committed now; that of a new copy replaces all that was.

    Raises:
        TargetError: one is not.
    """
    ours: list[int] = []
    runs: list[list[int]] = []  # of others' commits, with none of ours between them
    for version in range(since + 1, delta.version + 1):
        changes = _changes(storage, _entry(delta, version), prefix)
        if changes == "ours":
            ours.append(version)
        elif changes == "foreign":
            if runs and not (ours and ours[-1] > runs[-1][-1]):
                runs[-1].append(version)
            else:
                runs.append([version])

    def is_begun(version: int) -> bool:
        return any(delta.applied_at(version, name) is not None for name in (application, of_copy(application)))

    if runs and ours and not is_begun(since) and is_begun(delta.version):
        copied = next(version for version in ours if is_begun(version))
        runs = [run for run in runs if run[-1] > copied]
    for run in runs:
        if set(delta.files_at(run[-1])) == set(delta.files_at(run[0] - 1)):
            continue
        behind = next((version for version in ours if version > run[0]), None)
        told = f"Delta table {delta.uri} was changed by somebody else, in version {run[0]}"
        if behind is None:
            raise TargetError(told, hint=f"RESTORE TABLE … TO VERSION AS OF {run[0] - 1}; or {COPY_ANEW}")
        # restored to before it, the table would lack what a commit of ours brought, and say that it has it
        raise TargetError(f"{told}, and by the applier behind that, in version {behind}", hint=COPY_ANEW)


def copied_version(storage: Storage, delta: LakeDelta, application: str) -> int:
    """In which version the files of a copy by executors became the table's; where that is of long ago, the last one of long ago."""
    for version in range(delta.version, -1, -1):
        actions = _actions(storage, _entry(delta, version))
        if actions is None or any(action.get("txn", {}).get("appId") == of_copy(application) for action in actions):
            return version
    return -1


def _entry(delta: LakeDelta, version: int) -> str:
    return f"{delta.directory}/_delta_log/{version:020d}.json"


def _actions(storage: Storage, path: str) -> list[dict[str, Any]] | None:
    content = storage.read(path)
    return None if content is None else [json.loads(line) for line in content.splitlines() if line.strip()]


def _changes(storage: Storage, path: str, prefix: str) -> Literal["ours", "foreign", "nothing"] | None:
    """Whose files a commit adds or removes; None: it is of long ago."""
    actions = _actions(storage, path)
    if actions is None:
        return None
    if not any("add" in action or "remove" in action for action in actions):
        return "nothing"
    return "ours" if any(action.get("txn", {}).get("appId", "").startswith(prefix) for action in actions) else "foreign"
