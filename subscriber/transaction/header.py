"""What is known of a transaction beside its changes, one shape for all ways in which one can end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, assert_never

from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import CommitPrepared, RollbackPrepared
from subscriber.transaction.model import PreparedTransaction, Transaction

__all__ = ["TransactionHeader", "TransactionKind", "header"]

TransactionKind = Literal["commit", "prepare", "commit prepared", "rollback prepared"]
"""What ended (this part of) the transaction. The changes come with ``commit`` and ``prepare``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionHeader:
    """One event of one transaction.

    Attributes:
        kind: what happened to it.
        xid: its (top) id on the publisher.
        gid: the publisher's name for it if it was prepared, else None.
        commit_lsn: of the commit or prepare record; of a rolled-back one the end of the record, which is all that is sent.
        end_lsn: end of that record: the position once it is done with.
        commit_time: of the event, microseconds since the PostgreSQL epoch.
        origin: where the publisher itself got it from, or None.
        size: bytes of its changes as they came.
    """

    kind: TransactionKind
    xid: int
    gid: str | None
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_time: int
    origin: str | None = None
    size: int = 0


def header(event: Transaction | PreparedTransaction | CommitPrepared | RollbackPrepared) -> TransactionHeader:
    """The header of what reassembly gave."""
    match event:
        case Transaction():
            return _with_changes(event, "commit", None)
        case PreparedTransaction():
            return _with_changes(event.transaction, "prepare", event.gid)
        case CommitPrepared():
            return TransactionHeader(
                kind="commit prepared",
                xid=event.xid,
                gid=event.gid,
                commit_lsn=event.commit_lsn,
                end_lsn=event.end_lsn,
                commit_time=event.commit_time,
            )
        case RollbackPrepared():
            return TransactionHeader(
                kind="rollback prepared",
                xid=event.xid,
                gid=event.gid,
                commit_lsn=event.rollback_end_lsn,
                end_lsn=event.rollback_end_lsn,
                commit_time=event.rollback_time,
            )
    assert_never(event)


def _with_changes(transaction: Transaction, kind: TransactionKind, gid: str | None) -> TransactionHeader:
    return TransactionHeader(
        kind=kind,
        xid=transaction.xid,
        gid=gid,
        commit_lsn=transaction.final_lsn,
        end_lsn=transaction.end_lsn,
        commit_time=transaction.commit_time,
        origin=transaction.origin.name if transaction.origin else None,
        size=transaction.size,
    )
