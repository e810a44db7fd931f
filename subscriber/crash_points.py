"""Named points where a test can make the program fail: see :mod:`subscriber.testing.crash_points`.

The program calls :func:`reached` between two steps whose order matters after a crash. Nothing happens there unless a test has set a hook.
No point is inside a loop over rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Final

__all__ = ["POINTS", "reached", "watched"]

POINTS: Final[Mapping[str, str]] = {
    "setup.slot_created": "the slot exists, and the target has no position yet",
    "setup.position_stored": "the target has the first position, and no tables yet",
    "copy.begun": "an unfinished copy was undone, or is to be resumed",
    "copy.started": "the table's state says that it is being copied",
    "copy.slot_created": "the table's own slot and its snapshot exist",
    "copy.stored": "all rows are stored, and the state still says that the table is being copied",
    "copy.finished": "the table is copied, and has its own position",
    "copy.batch_applied": "a batch is applied to the table before it has caught up",
    "copy.caught_up": "the table has caught up, and its state does not say so yet",
    "copy.synchronized": "the table is synchronized, and its slot still exists",
    "copy.slot_dropped": "the table's slot is dropped",
    "copy.ready": "the tables that the apply worker has taken over are stored as ready",
    "reconcile.planned": "it is known how a table is compared with the publisher's, and nothing of it was changed",
    "reconcile.rows_written": "rows of a table that is reconciled were deleted and stored, and are not committed",
    "reconcile.replaced": "some rows that differed are replaced",
    "park.stored": "the target says that a table is parked, and its changes are not left out yet",
    "park.left": "the target says that a parked table is reconciled, and nothing is compared yet",
    "group.copied": "the rows of a table of a group were sent, and are not stored",
    "group.stored": "the rows of a table of a group and its state are stored, and the apply worker does not know it yet",
    "apply.taken": "a batch was received, and nothing of it is applied",
    "apply.applied": "the sink has applied a batch, and the positions do not count it yet",
    "apply.advanced": "the sink has stored a position without changes, and it is not acknowledged",
    "prepare.taken": "PREPARE was received",
    "prepare.prepared": "the sink has prepared a transaction, and the positions do not count it yet",
    "prepare.commit_taken": "COMMIT PREPARED was received",
    "prepare.committed": "the sink has committed a prepared transaction, and the positions do not count it yet",
    "prepare.rollback_taken": "ROLLBACK PREPARED was received",
    "prepare.rolled_back": "the sink has rolled back a prepared transaction, and the positions do not count it yet",
    "spool.written": "a block was written to the spool",
    "spool.truncated": "records of a savepoint that was rolled back were cut off",
    "spool.rolled_back": "changes that the publisher had rolled back without an abort were left out of a transaction",
    "spool.read": "a block of the spool was read",
    "spool.removed": "the file of a transaction was removed",
    "relay.segment": "a segment of the relay log was begun, and has no changes",
    "relay.written": "changes were written to the relay log, and are not durable",
    "relay.synced": "changes are durable in the relay log, and are not acknowledged",
    "relay.removed": "a segment of the relay log was removed",
    "acknowledge.sending": "positions are about to be sent to the publisher",
    "acknowledge.sent": "positions were sent to the publisher",
    "postgres.changes_sent": "the changes of a batch were sent, and neither the position nor the end of the transaction",
    "postgres.end_sent": "COMMIT or PREPARE TRANSACTION was sent, and the answer is not here",
    "postgres.committed": "a batch is committed, and not reported as durable",
    "postgres.prepared": "PREPARE TRANSACTION is done, and the position is not moved",
    "postgres.commit_prepared": "COMMIT PREPARED is done, and the position is not moved",
    "postgres.rollback_prepared": "ROLLBACK PREPARED is done, and the position is not moved",
    "postgres.part_copied": "the rows of a part of a copy were sent, and are not committed",
    "postgres.part_committed": "a part of a copy is committed",
    "columns.changed": "columns of the target were changed as the publisher's were, and no row that needs them is stored",
    "cutover.step": "a step of a cutover, or a part of undoing or finishing it, is about to be made, or was made",
    "cutover.left": "the record says that writers are let into the destination, and they are not",
    "cutover.removed": "a part of what a cutover has made was removed",
    "sqlalchemy.changes_made": "the changes of a batch were made, and the position is not moved",
    "sqlalchemy.position_moved": "the position was moved in the same transaction, which is not committed",
    "sqlalchemy.committed": "a batch is committed, and not reported as durable",
    "sqlalchemy.rows_copied": "rows of a copy were stored, and are not committed",
    "sqlalchemy.copy_stored": "the end of a copy was stored, and is not committed",
    "landing.files_written": "the files of a batch are complete, and no manifest names them",
    "landing.landed": "the manifest of a batch is written, and the batch is not reported as durable",
    "landing.position_stored": "a position without rows is stored, and not reported as durable",
    "landing.rows_copied": "a file with rows of a copy is complete, and no document names it",
    "landing.copy_stored": "the document of a copy is written, and the table's state does not say that it is copied",
    "landing.prepared_files_written": "the files of a prepared transaction are complete, and no document names them",
    "landing.prepared": "the document of a prepared transaction is written, and the position is not moved",
    "landing.prepare_forgotten": "the position does not name a prepared transaction any more, which has ended, and its files remain",
    "landing.commit_written": "the rows of a prepared transaction are in the landing zone, and no manifest names them",
    "publishing.files_written": "the files of a round are complete, and no table has committed them",
    "publishing.table_committed": "a table has committed its files; others may not have",
    "publishing.committed": "all tables of a round have committed, and no snapshot has these versions",
    "publishing.snapshot_written": "the file of a snapshot is complete, and not committed",
    "publishing.published": "a snapshot is published",
    "publishing.log_committed": "a change log has what was landed; others may not have it",
    "publishing.log_written": "the change log has what was landed, and the landed files still exist",
    "publishing.manifests_removed": "manifests are removed, and their files still exist",
}
"""All points of this package, and what has happened there. The first part of a name is the step."""

Hook = Callable[[str], None]

_hook: Hook | None = None


def reached(point: str) -> None:
    """Tell the hook, if there is one, that the program is at a point. The hook may end the process or raise an error.

    Args:
        point: one of :data:`POINTS`, or a name of your own for a sink of your own.
    """
    if _hook is not None:
        _hook(point)


@contextlib.contextmanager
def watched(hook: Hook) -> Iterator[None]:
    """Call ``hook`` at every point while the block runs, in all threads of the process."""
    global _hook  # noqa: PLW0603 -- one for the process, as cheap to ask as can be
    before, _hook = _hook, hook
    try:
        yield
    finally:
        _hook = before
