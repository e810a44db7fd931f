"""The metadata of a transaction without its changes, in one form for all kinds of end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, assert_never

from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import CommitPrepared, RollbackPrepared
from subscriber.transaction.model import PreparedTransaction, Transaction

__all__ = ["TransactionHeader", "TransactionKind", "header"]

TransactionKind = Literal["commit", "prepare", "commit prepared", "rollback prepared"]
"""What ended the transaction, or this part of it. Only ``commit`` and ``prepare`` have changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionHeader:
    """One event of one transaction.

    Attributes:
        kind: what happened to it.
        xid: its (top) id on the publisher.
        gid: the publisher's name of a prepared transaction, else None.
        commit_lsn: of the commit or prepare record. For a rollback it is the end of the record, because no other LSN is sent.
        end_lsn: end of that record: the position after the transaction.
        commit_time: time of the event, microseconds since the PostgreSQL epoch.
        origin: where the publisher replicated it from, or None.
        size: bytes of its changes as received.
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
    """Return the header of an event of the reassembly."""
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
