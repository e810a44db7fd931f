"""What a round takes: the tables that it applies to, and the landed batches."""

from __future__ import annotations

from collections.abc import Sequence

from subscriber.interfaces import TableName
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.catalog.lake import Lake, LakeTable
from subscriber.sinks.spark.catalog.snapshots import Snapshot
from subscriber.sinks.spark.landing.manifest import Manifest

__all__ = ["SynchronizedTables", "is_ahead", "synchronized_tables", "taken_manifests"]

SynchronizedTables = tuple[dict[TableName, LakeTable], list[tuple[TableName, LakeTable, Lsn]]]
"""The tables that rounds apply to; and removed ones with landed changes that must still be applied, each with the LSN up to which."""


def synchronized_tables(lake: Lake) -> SynchronizedTables:
    """The tables for a round."""
    tables = {name: table for name, table in lake.state.tables.items() if table.is_synchronized}
    # a finished copy replaces all rows of the removed table
    left = [(name, table, table.until) for name, table in lake.state.removed.items() if table.until is not None and name not in tables]
    return tables, left


def is_ahead(table: LakeTable, end: Lsn) -> bool:
    """Whether a table is handed over after an LSN. Then it is not in a snapshot there."""
    return table.entry.lsn is not None and table.entry.lsn > end


def taken_manifests(
    manifests: Sequence[Manifest],
    reached: Sequence[tuple[TableName, LakeTable, Lsn | None]],
    snapshot: Snapshot,
    boundary: Lsn,
    limits: tuple[int, int],
) -> list[Manifest]:
    """The manifests of a round. After a crash, only those that bring all tables to the LSN of the tables that are ahead.

    ``reached`` are the tables, each with the LSN of its last commit. A manifest that ends at the boundary is the last one. ``limits``: the
    bytes and the rows after which a round takes no more.
    """
    ahead = [lsn for name, _, lsn in reached if lsn is not None and name in snapshot.tables and lsn > snapshot.lsn]
    level = max(ahead, default=None)

    def may_end(lsn: Lsn) -> bool:
        """Whether no table would be ahead of a snapshot at ``lsn``. A table that is handed over later is not in the snapshot."""
        return all(applied is None or applied <= lsn or is_ahead(table, lsn) for _, table, applied in reached)

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
