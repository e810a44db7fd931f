"""Makes commits durable, with what they depend on. Neither delta-rs nor Spark fsyncs what it writes on a local file system.

These are fsynced: the files that a commit adds, the commit, its checksums, and each checkpoint in any of its forms: one file, parts, or a
file with a UUID and its sidecars. ``_last_checkpoint`` comes after the checkpoint that it names.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import unquote

from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.tables.deletion_vectors import DeletionVector
from subscriber.sinks.spark.tables.table_log import LOG, SIDECARS, TableLog, checkpoint_version

__all__ = ["sync_added", "sync_log"]

_CHECKSUM: Final = "crc"


def sync_added(storage: Storage, directory: str, log: TableLog, since: int, version: int) -> None:
    """Fsync the files that the commits after a version add to a table, and its directory."""
    for number in range(since + 1, version + 1):
        added = [action[kind] for action in log.actions(number) or () for kind in ("add", "cdc") if kind in action]
        files = {unquote(action["path"]) for action in added}
        files.update(DeletionVector.from_json(action["deletionVector"]).file or "" for action in added if action.get("deletionVector"))
        storage.sync((f"{directory}/{path}" for path in files - {""}), missing_ok=True)
    storage.sync([directory])


def sync_log(storage: Storage, directory: str, since: int, version: int) -> None:
    """Fsync the commits after a version, and the checkpoints. Does nothing in an object store."""
    if storage.root is None:
        return
    log = f"{directory}/{LOG}"
    names = [f"{number:020d}.{ending}" for number in range(since + 1, version + 1) for ending in ("json", _CHECKSUM)]
    checkpoints = [file.name for file in storage.files(log) if (end := checkpoint_version(file.name)) is not None and end > since]
    sidecars = storage.files(f"{log}/{SIDECARS}") if checkpoints else []
    storage.sync((f"{log}/{SIDECARS}/{file.name}" for file in sidecars), missing_ok=True)
    if sidecars:
        storage.sync([f"{log}/{SIDECARS}"])
    for name in (*names, *checkpoints, "_last_checkpoint"):
        # Spark writes a checksum file for each file, and relies on it
        storage.sync([f"{log}/{name}", f"{log}/.{name}.{_CHECKSUM}"], missing_ok=True)
    storage.sync([log])
