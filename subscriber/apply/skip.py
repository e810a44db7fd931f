"""ALTER SUBSCRIPTION … SKIP: skip one transaction, which its finish LSN identifies.

As in PostgreSQL, the skip LSN applies only to the next transaction. If that one has another LSN, the skip LSN was wrong: it is cleared
with a warning. An empty transaction does not clear it.

A prepared transaction has two finish LSNs. If the target stores its changes until COMMIT PREPARED, an error in them occurs only there, and
names that LSN. So the skip LSN may be either of them. It is cleared at COMMIT PREPARED, not at PREPARE.

Source: PostgreSQL manual, ALTER SUBSCRIPTION; worker.c (maybe_start_skipping_changes, clear_subscription_skip_lsn).
"""

from __future__ import annotations

import logging

from subscriber.interfaces import OpenedSink, TwoPhaseSink
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.messages import CommitPrepared
from subscriber.transaction.model import PreparedTransaction, Transaction

__all__ = ["Skipping"]

_log = logging.getLogger(__name__)


class Skipping:
    """The transaction to skip, until it was received.

    Args:
        lsn: its finish LSN (of the commit, the prepare, or the COMMIT PREPARED), or INVALID_LSN.
        name: the subscription's.
    """

    def __init__(self, lsn: Lsn, name: str) -> None:
        self._lsn = lsn
        self._name = name

    @property
    def waits(self) -> bool:
        """Whether there is still one to skip."""
        return self._lsn != INVALID_LSN

    async def skips(self, event: Transaction | PreparedTransaction | CommitPrepared, sink: OpenedSink) -> bool:
        """Skip the event if it is the one.

        Raises:
            TargetError: it was not skipped.
        """
        if not self.waits or _only_describes(event) or _finish_lsn(event) != self._lsn:
            return False
        if isinstance(event, CommitPrepared) and not _keeps(sink):
            # the changes are already in the target
            return False
        _log.warning("logical replication starts skipping transaction at LSN %s", self._lsn)
        await sink.skip(event)
        _log.warning("logical replication completed skipping transaction at LSN %s", self._lsn)
        self._lsn = INVALID_LSN
        return True

    async def passed(self, event: Transaction | PreparedTransaction | CommitPrepared, sink: OpenedSink) -> None:
        """Note that another transaction was applied.

        Raises:
            TargetError: the skip LSN was not cleared.
        """
        if not self.waits or _only_describes(event) or not _says_something(event, keeps=_keeps(sink)):
            return
        await sink.clear_skip()
        _log.warning(
            'skip-LSN of subscription "%s" cleared: Remote transaction\'s finish WAL location (LSN) %s did not match skip-LSN %s.',
            self._name,
            _finish_lsn(event),
            self._lsn,
        )
        self._lsn = INVALID_LSN


def _keeps(sink: OpenedSink) -> bool:
    """Whether the sink stores prepared transactions until their COMMIT PREPARED."""
    return isinstance(sink, TwoPhaseSink) and not sink.prepares_in_target


def _finish_lsn(event: Transaction | PreparedTransaction | CommitPrepared) -> Lsn:
    match event:
        case Transaction():
            return event.final_lsn
        case PreparedTransaction(transaction):
            return transaction.final_lsn
        case CommitPrepared():
            return event.commit_lsn


def _only_describes(event: Transaction | PreparedTransaction | CommitPrepared) -> bool:
    """Whether it is not the publisher's: a relay log begins with one that describes relations, and ends where it begins."""
    return isinstance(event, Transaction) and event.end_lsn <= event.final_lsn


def _says_something(event: Transaction | PreparedTransaction | CommitPrepared, *, keeps: bool) -> bool:
    match event:
        case Transaction():
            return event.count > 0
        case PreparedTransaction(transaction):
            return not keeps and transaction.count > 0
        case CommitPrepared():
            return keeps
