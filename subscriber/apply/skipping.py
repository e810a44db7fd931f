"""ALTER SUBSCRIPTION … SKIP: one transaction, named by its finish LSN, is passed over.

As natively the name holds for the next transaction alone: if that one has another LSN, the name was mistaken and is forgotten, with a
warning. An empty transaction says nothing about it.

A prepared transaction has two such LSNs. Where the target keeps its changes until COMMIT PREPARED, they are refused only there, and the
error names the LSN of that. So the name may be either's, and is judged at COMMIT PREPARED; PREPARE says nothing about it.

Source: PostgreSQL manual, ALTER SUBSCRIPTION; worker.c (maybe_start_skipping_changes, clear_subscription_skip_lsn).
"""

from __future__ import annotations

import logging

from subscriber.abc import Sink
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.messages import CommitPrepared
from subscriber.transaction.model import PreparedTransaction, Transaction

__all__ = ["Skipping"]

_log = logging.getLogger(__name__)


class Skipping:
    """The transaction to be skipped, until it came.

    Args:
        lsn: its finish LSN (of the commit, the prepare, or the COMMIT PREPARED), or INVALID_LSN.
        name: the subscription's.
    """

    def __init__(self, lsn: Lsn, name: str) -> None:
        self._lsn = lsn
        self._name = name

    @property
    def waits(self) -> bool:
        """Whether there is one still."""
        return self._lsn != INVALID_LSN

    async def skips(self, event: Transaction | PreparedTransaction | CommitPrepared, sink: Sink) -> bool:
        """Pass over the event if it is the one.

        Raises:
            TargetError: it was not passed over.
        """
        if not self.waits or _finish_lsn(event) != self._lsn:
            return False
        if isinstance(event, CommitPrepared) and sink.capabilities.prepares_in_target:
            # its changes are in the target already
            return False
        _log.warning("logical replication starts skipping transaction at LSN %s", self._lsn)
        await sink.skip(event)
        _log.warning("logical replication completed skipping transaction at LSN %s", self._lsn)
        self._lsn = INVALID_LSN
        return True

    async def passed(self, event: Transaction | PreparedTransaction | CommitPrepared, sink: Sink) -> None:
        """Another one was applied.

        Raises:
            TargetError: the name is not forgotten.
        """
        if not self.waits or not _says_something(event, keeps=not sink.capabilities.prepares_in_target):
            return
        await sink.clear_skip()
        _log.warning(
            'skip-LSN of subscription "%s" cleared: Remote transaction\'s finish WAL location (LSN) %s did not match skip-LSN %s.',
            self._name,
            _finish_lsn(event),
            self._lsn,
        )
        self._lsn = INVALID_LSN


def _finish_lsn(event: Transaction | PreparedTransaction | CommitPrepared) -> Lsn:
    match event:
        case Transaction():
            return event.final_lsn
        case PreparedTransaction(transaction):
            return transaction.final_lsn
        case CommitPrepared():
            return event.commit_lsn


def _says_something(event: Transaction | PreparedTransaction | CommitPrepared, *, keeps: bool) -> bool:
    match event:
        case Transaction():
            return event.count > 0
        case PreparedTransaction(transaction):
            return not keeps and transaction.count > 0
        case CommitPrepared():
            return keeps
