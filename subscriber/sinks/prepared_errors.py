"""The errors of a COMMIT PREPARED whose transaction the target does not have."""

from __future__ import annotations

from subscriber.errors import DataLossError, NeverPrepared
from subscriber.protocol.messages import CommitPrepared

__all__ = ["lost_prepared", "never_prepared"]

_HINT = "copy its tables again"


def never_prepared(message: CommitPrepared) -> NeverPrepared:
    """The target never received it. Before 18, a publisher sends nothing but COMMIT PREPARED of a transaction without changes."""
    return NeverPrepared(f"{_committed(message)}, but the target never received its PREPARE", hint=f"its changes are missing: {_HINT}")


def lost_prepared(message: CommitPrepared) -> DataLossError:
    """The target received it, and what it stored is gone."""
    return DataLossError(
        f"{_committed(message)}, but the target does not have it any more: it was received, and is lost",
        hint=f"it was removed from the target. Skip it (`subscriber alter NAME --skip-lsn {message.commit_lsn}`), and {_HINT}",
    )


def _committed(message: CommitPrepared) -> str:
    return f'the publisher committed prepared transaction {message.xid} ("{message.gid}") at LSN {message.commit_lsn}'
