"""Publishes snapshots: one commit to the Delta table ``snapshots/`` for each (``catalog/snapshots.py``).

Delta gives each version to one commit only, in directories and in object stores. So of two appliers of a lake, only one can publish after a
snapshot that both have read. The other one ends with :class:`SubscriptionInUse`, and nothing that it did is published.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Final
from uuid import uuid4

from subscriber import crash_points
from subscriber.errors import SubscriptionInUse
from subscriber.sinks.spark.catalog.snapshots import NOT_PUBLISHED, SNAPSHOTS, Publication, Snapshot, Snapshots, snapshot_rows
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.tables.data_file import write_data_file
from subscriber.sinks.spark.tables.delta import LakeDelta
from subscriber.sinks.spark.tables.table_errors import CommitConflict

__all__ = ["SnapshotPublisher"]

_APPLICATION: Final = "subscriber-snapshot"


class SnapshotPublisher:
    """Reads and publishes the snapshots of a lake, for its applier."""

    def __init__(self, storage: Storage, retain_hours: int = 24) -> None:
        self._storage = storage
        self._snapshots = Snapshots(storage)
        self._applier = uuid4().hex
        self._last: Publication | None = None
        self.delta = LakeDelta(storage, SNAPSHOTS, retain_hours)

    def forget(self) -> None:
        """Continue from whatever is published, even if another applier has published it."""
        self._last = None

    def read(self) -> Snapshot:
        """Read the newest snapshot, durably. :data:`NOT_PUBLISHED` before the first.

        Raises:
            SubscriptionInUse: another applier has published since the last call.
        """
        if not self.delta.load():
            return NOT_PUBLISHED
        # landed files are removed on the strength of it
        self.delta.make_durable()
        found = self._snapshots.at(self.delta.version) or NOT_PUBLISHED
        published = found.publication
        if self._last is not None and published is not None and published != self._last and published.applier != self._applier:
            raise SubscriptionInUse(
                f"the lake in {self._storage.place} has another applier, which published in the meantime", hint="stop one of them"
            )
        self._last = published
        return found

    def publish(self, snapshot: Snapshot) -> Snapshot:
        """Publish a snapshot after the one that was read last.

        Raises:
            SubscriptionInUse: another applier has published in the meantime.
            CommitConflict: another writer committed to the table in the meantime.
            TargetError: it cannot be written. A store may have taken it without an answer; :meth:`read` tells.
        """
        now = datetime.now(UTC)
        time = now if self._last is None else max(now, self._last.published)  # readers search by time
        publication = Publication(snapshot.lsn, snapshot.landed, time, self._applier)
        rows = snapshot_rows(snapshot, publication)
        if not self.delta.is_there:
            self.delta.create(rows.schema)
        file = write_data_file(self._storage, SNAPSHOTS, f"{int(snapshot.lsn):020d}-{uuid4().hex}.parquet", rows)
        crash_points.reached("publishing.snapshot_written")
        try:
            self.delta.commit([file], list(self.delta.table_files()), _APPLICATION, snapshot.lsn, note=publication.note())
        except CommitConflict:
            self.read()
            raise
        self._last = publication
        return replace(snapshot, publication=publication)
