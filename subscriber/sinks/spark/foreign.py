"""Whether somebody else wrote into a table of the lake: their rows would be published as the publisher's, and ours be lost in theirs.

Every commit of ours that adds or removes files names an application of ours in Delta's ``txn``. What was changed by another one is no
error any more once the table has the files that it had before (RESTORE TABLE).
"""

from __future__ import annotations

import json

from subscriber.errors import TargetError
from subscriber.sinks.spark.delta import LakeDelta
from subscriber.sinks.spark.storage import Storage

__all__ = ["require_ours"]


def require_ours(storage: Storage, delta: LakeDelta, since: int, prefix: str) -> None:
    """See that commits behind a version are all ours.

    Args:
        storage: the lake's.
        delta: the table, loaded.
        since: a version that was.
        prefix: how names of applications of ours begin.

    Raises:
        TargetError: one is not.
    """
    versions = range(since + 1, delta.version + 1)
    foreign = [version for version in versions if _is_foreign(storage, f"{delta.directory}/_delta_log/{version:020d}.json", prefix)]
    if foreign and set(delta.files_at(foreign[-1])) != set(delta.files_at(foreign[0] - 1)):
        raise TargetError(
            f"Delta table {delta.uri} was changed by somebody else, in version {foreign[0]}",
            hint=f"RESTORE TABLE … TO VERSION AS OF {foreign[0] - 1}; or take it out of the publication and in again, which copies it anew",
        )


def _is_foreign(storage: Storage, path: str, prefix: str) -> bool:
    content = storage.read(path)
    if content is None:
        # of long ago
        return False
    actions = [json.loads(line) for line in content.splitlines() if line.strip()]
    changes = any("add" in action or "remove" in action for action in actions)
    return changes and not any(action.get("txn", {}).get("appId", "").startswith(prefix) for action in actions)
