"""Settings of the applier."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from subscriber.interfaces import TableName
from subscriber.sinks.spark.files.location import DEFAULT_FRESHNESS

__all__ = ["ApplierSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplierSettings:
    """Settings of the applier.

    Attributes:
        target_rows: rows that a file should have.
        round_bytes: landed bytes after which a round takes no more manifests. An engine also limits the rows (``round_rows``).
        log_files: number of landed files after which the change log takes them, and they are removed.
        sweep_seconds: interval of the search for files that are no longer needed.
        retain_hours: how long readers can read what was replaced: removed files, versions and published snapshots. Also how long the landed
            changes of a stopped table are kept.
        freshness: the target in seconds, for the reports. The loop keeps to it.
        vectors: whether deletion vectors may be written.
        without_vectors: tables in which none are written.
        log_seconds: how long landed changes wait for others before the change log takes them.
    """

    target_rows: int = 250_000
    round_bytes: int = 512 * 1024**2
    log_files: int = 200
    sweep_seconds: float = 3600.0
    retain_hours: int = 24
    freshness: float = DEFAULT_FRESHNESS
    vectors: bool = True
    without_vectors: Collection[TableName] = ()
    log_seconds: float = 60.0
