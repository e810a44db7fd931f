"""Whether somebody else wrote into a change log: their rows would be given to readers as the publisher's changes.

As for tables (``foreign.py``), a commit of ours that adds or removes files names an application of ours in Delta's ``txn``. Before each of
them the log is looked at, and each fails if another one comes between: so whatever is not ours lies behind the last one that is.
"""

from __future__ import annotations

import json
from typing import Literal

from subscriber.errors import TargetError
from subscriber.sinks.spark.delta import LakeDelta
from subscriber.sinks.spark.files.storage import Storage

__all__ = ["require_log_ours"]


def require_log_ours(storage: Storage, log: LakeDelta, prefix: str) -> None:
    """See that a change log has the files that the last commit of ours left.

    Args:
        storage: the lake's.
        log: the table, loaded.
        prefix: how names of applications of ours begin.

    Raises:
        TargetError: it has others.
    """
    foreign = []
    for version in range(log.version, -1, -1):
        writer = _writer(storage, f"{log.directory}/_delta_log/{version:020d}.json", prefix)
        if writer in {"ours", "gone"}:
            break
        if writer == "another":
            foreign.append(version)
    if foreign and (not foreign[-1] or set(log.files_at(foreign[0])) != set(log.files_at(foreign[-1] - 1))):
        hint = f"RESTORE TABLE … TO VERSION AS OF {foreign[-1] - 1}" if foreign[-1] else "remove its directory"
        raise TargetError(f"change log {log.uri} was changed by somebody else, in version {foreign[-1]}", hint=hint)


def _writer(storage: Storage, path: str, prefix: str) -> Literal["ours", "another", "nobody", "gone"]:
    """Who added or removed files in a commit; one of long ago is gone."""
    content = storage.read(path)
    if content is None:
        return "gone"
    actions = [json.loads(line) for line in content.splitlines() if line.strip()]
    if not any("add" in action or "remove" in action for action in actions):
        return "nobody"
    return "ours" if any(action.get("txn", {}).get("appId", "").startswith(prefix) for action in actions) else "another"
