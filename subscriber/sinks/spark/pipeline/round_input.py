"""What a round takes: the tables that it applies to, and the landed batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from subscriber.interfaces import TableName
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.catalog.lake import Lake, LakeTable
from subscriber.sinks.spark.catalog.snapshots import Snapshot
from subscriber.sinks.spark.landing.manifest import Manifest

__all__ = ["Reached", "SynchronizedTables", "is_ahead", "synchronized_tables", "taken_manifests"]

SynchronizedTables = tuple[dict[TableName, LakeTable], list[tuple[TableName, LakeTable, Lsn]]]
"""The tables that rounds apply to; and removed ones with landed changes that must still be applied, each with the LSN up to which."""


class Reached(NamedTuple):
    """How far a table is: the LSN of its last commit, and the LSN at which it is handed over after its synchronization."""

    name: TableName
    applied: Lsn | None
    handed: Lsn | None


def synchronized_tables(lake: Lake) -> SynchronizedTables:
    """The tables for a round."""
    tables = {name: table for name, table in lake.state.tables.items() if table.is_synchronized}
    # a finished copy replaces all rows of the removed table
    left = [(name, table, table.until) for name, table in lake.state.removed.items() if table.until is not None and name not in tables]
    return tables, left


def is_ahead(handed: Lsn | None, end: Lsn) -> bool:
    """Whether a table is handed over after an LSN. Then it is not in a snapshot there."""
    return handed is not None and handed > end


def taken_manifests(
    manifests: Sequence[Manifest], reached: Sequence[Reached], snapshot: Snapshot, boundary: Lsn, limits: tuple[int, int]
) -> list[Manifest]:
    """The manifests of a round. After a crash, only those that bring all tables to the LSN of the tables that are ahead.

    A manifest that ends at the boundary is the last one. ``limits``: the bytes and the rows after which a round takes no more.
    """
    ahead = [one.applied for one in reached if one.applied is not None and one.name in snapshot.tables and one.applied > snapshot.lsn]
    level = max(ahead, default=None)

    def may_end(lsn: Lsn) -> bool:
        """Whether no table would be ahead of a snapshot at ``lsn``. A table that is handed over later is not in the snapshot."""
        return all(one.applied is None or one.applied <= lsn or is_ahead(one.handed, lsn) for one in reached)

    taken: list[Manifest] = []
    size = rows = 0
    for manifest in manifests:
        enough = (
            size >= limits[0]
            or rows >= limits[1]
            or (level is not None and taken and taken[-1].end >= level)
            or (taken and taken[-1].end == boundary)
        )
        if enough and may_end(taken[-1].end):
            break
        taken.append(manifest)
        size += manifest.size
        rows += sum(file.rows for file in manifest.files)
    return taken
