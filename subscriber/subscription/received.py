"""What :func:`subscriber.subscription.transactions.transactions` gives to its caller.

An object is *current* until the iteration goes on: only then its changes can be read, because they are freed behind it. It can be
acknowledged as long as the stream is open.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from datetime import datetime
from typing import ClassVar, Literal

from subscriber.protocol.lsn import Lsn, datetime_from_postgres
from subscriber.protocol.messages import CommitPrepared, LogicalMessage, Relation, RollbackPrepared
from subscriber.transaction.changes import Change, ChangeReader
from subscriber.transaction.header import TransactionHeader, TransactionKind, header
from subscriber.transaction.model import PreparedTransaction, Transaction

__all__ = ["ReceivedMessage", "ReceivedTransaction"]

Acknowledge = Callable[[Lsn], None]


class ReceivedTransaction:
    """One transaction of the publisher. Iterate over it for its changes, in order and in bounded memory, as often as you like.

    ``kind`` says what it is:

    * ``commit``: it is committed. Without two_phase there is no other kind.
    * ``prepare``: it was prepared for two-phase commit and may still be committed or rolled back. Once acknowledged it never arrives again,
      so store it durably first, under its ``xid`` and ``gid``. If it was rolled back before the publisher had sent it, only a part of its
      changes may arrive (reorderbuffer.c, concurrent abort); its rollback follows.
    * ``commit prepared``, ``rollback prepared``: how it ended; without changes. A rollback may arrive for a prepare that never did.
    """

    def __init__(
        self,
        event: Transaction | PreparedTransaction | CommitPrepared | RollbackPrepared,
        known: Mapping[int, Relation],
        acknowledge: Acknowledge,
    ) -> None:
        self.header: TransactionHeader = header(event)
        self._transaction: Transaction | None = None
        match event:
            case Transaction():
                self._transaction = event
            case PreparedTransaction():
                self._transaction = event.transaction
        self._known = known
        self._acknowledge = acknowledge
        self._described: Mapping[int, Relation] | None = None
        self._current = True

    @property
    def kind(self) -> TransactionKind:
        """What happened to it."""
        return self.header.kind

    @property
    def xid(self) -> int:
        """Its id on the publisher."""
        return self.header.xid

    @property
    def gid(self) -> str | None:
        """Its name in PREPARE TRANSACTION, if it was prepared."""
        return self.header.gid

    @property
    def commit_lsn(self) -> Lsn:
        """LSN of its commit record (prepare record, when ``kind`` is ``prepare``)."""
        return self.header.commit_lsn

    @property
    def end_lsn(self) -> Lsn:
        """End of that record: the position to go on from after it."""
        return self.header.end_lsn

    @property
    def commit_time(self) -> datetime:
        """When it was committed (prepared, rolled back), by the publisher's clock; aware, in UTC.

        Raises:
            OverflowError: that clock is outside the years 1 to 9999.
        """
        return datetime_from_postgres(self.header.commit_time)

    @property
    def origin(self) -> str | None:
        """The replication origin it came to the publisher from, or None if it was made there."""
        return self.header.origin

    async def __aiter__(self) -> AsyncIterator[Change]:
        """Its changes, aborted subtransactions left out.

        Raises:
            RuntimeError: the iteration over transactions has gone on: the changes are freed.
            ProtocolError, SpoolError: they cannot be read.
        """
        self._check_current()
        if self._transaction is None:
            return
        reader = ChangeReader(self._known, prefixed=self._transaction.prefixed)
        async for chunk in self._transaction.chunks():
            for record in chunk:
                change = reader.read(record)
                if change is not None:
                    yield change
                    self._check_current()
        self._described = reader.described

    def _check_current(self) -> None:
        if not self._current:
            raise RuntimeError(f"the changes of transaction {self.xid} are freed: read them before the next transaction is asked for")

    async def acknowledge(self) -> None:
        """Tell the publisher that this transaction, and all that came before it, are durable: they are never sent again.

        Returns before the publisher knows. If the connection is lost meanwhile, it is told with the next one.

        Raises:
            RuntimeError: the stream is closed.
        """
        self._acknowledge(self.header.end_lsn)

    async def described(self) -> Mapping[int, Relation]:
        """For the stream: the relations that its changes describe; they hold for what follows even if the caller did not read so far."""
        transaction = self._transaction
        if transaction is None or self._described is not None:
            return self._described or {}
        reader = ChangeReader(self._known, prefixed=transaction.prefixed)
        async for chunk in transaction.chunks():
            for record in chunk:
                reader.skim(record)
        return reader.described

    async def discard(self) -> None:
        """For the stream: free the changes. Idempotent."""
        transaction, self._transaction = self._transaction, None
        self._current = False
        if transaction is not None:
            await transaction.discard()

    def __repr__(self) -> str:
        return f"ReceivedTransaction({self.kind!r}, xid={self.xid}, end_lsn='{self.end_lsn}')"


class ReceivedMessage:
    """A logical message that was written outside any transaction (``pg_logical_emit_message(false, …)``).

    Attributes:
        lsn: where its record ends: the position behind it (decode.c, logicalmsg_decode).
        prefix: who it is for.
        content: what it says.
    """

    kind: ClassVar[Literal["message"]] = "message"

    def __init__(self, message: LogicalMessage, acknowledge: Acknowledge) -> None:
        self.lsn = message.lsn
        self.prefix = message.prefix
        self.content = message.content
        self._acknowledge = acknowledge

    @property
    def end_lsn(self) -> Lsn:
        """What is acknowledged."""
        return self.lsn

    async def acknowledge(self) -> None:
        """As :meth:`ReceivedTransaction.acknowledge`."""
        self._acknowledge(self.end_lsn)

    def __repr__(self) -> str:
        return f"ReceivedMessage(lsn='{self.lsn}', prefix={self.prefix!r})"
