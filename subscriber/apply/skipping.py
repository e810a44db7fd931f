"""ALTER SUBSCRIPTION … SKIP: one transaction, named by its finish LSN, is passed over.

As natively the name holds for the next transaction alone: if that one has another LSN, the name was mistaken and is forgotten, with a
warning. An empty transaction says nothing about it.

Source: PostgreSQL manual, ALTER SUBSCRIPTION; worker.c (maybe_start_skipping_changes, clear_subscription_skip_lsn).
"""

from __future__ import annotations

import logging

from subscriber.abc import Sink
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.transaction.model import PreparedTransaction, Transaction

__all__ = ["Skipping"]

_log = logging.getLogger(__name__)


class Skipping:
    """The transaction to be skipped, until it came.

    Args:
        lsn: its finish LSN (of the commit, or of the prepare), or INVALID_LSN.
        name: the subscription's.
    """

    def __init__(self, lsn: Lsn, name: str) -> None:
        self._lsn = lsn
        self._name = name

    @property
    def waits(self) -> bool:
        """Whether there is one still."""
        return self._lsn != INVALID_LSN

    async def skips(self, event: Transaction | PreparedTransaction, sink: Sink) -> bool:
        """Pass over the event if it is the one.

        Raises:
            TargetError: it was not passed over.
        """
        transaction = event.transaction if isinstance(event, PreparedTransaction) else event
        if not self.waits or transaction.final_lsn != self._lsn:
            return False
        _log.warning("logical replication starts skipping transaction at LSN %s", self._lsn)
        await sink.skip(event)
        _log.warning("logical replication completed skipping transaction at LSN %s", self._lsn)
        self._lsn = INVALID_LSN
        return True

    async def passed(self, transaction: Transaction, sink: Sink) -> None:
        """Another one was applied.

        Raises:
            TargetError: the name is not forgotten.
        """
        if not self.waits or not transaction.count:
            return
        await sink.clear_skip()
        _log.warning(
            'skip-LSN of subscription "%s" cleared: Remote transaction\'s finish WAL location (LSN) %s did not match skip-LSN %s.',
            self._name,
            transaction.final_lsn,
            self._lsn,
        )
        self._lsn = INVALID_LSN
