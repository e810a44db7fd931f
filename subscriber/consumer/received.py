"""The objects that :func:`subscriber.consumer.transactions.transactions` gives to its caller.

An object is *current* until the iteration asks for the next one. Its changes can be read only until then, because they are freed
afterwards. It can be acknowledged while the stream is open.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from datetime import datetime
from typing import ClassVar, Literal

from subscriber.protocol.decoder import decode
from subscriber.protocol.lsn import Lsn, datetime_from_postgres
from subscriber.protocol.messages import CommitPrepared, LogicalMessage, Message, Relation, RollbackPrepared, Type
from subscriber.transaction.changes import Change, ChangeReader
from subscriber.transaction.header import TransactionHeader, TransactionKind, header
from subscriber.transaction.model import PreparedTransaction, StreamedPart, Transaction

__all__ = ["ReceivedMessage", "ReceivedPart", "ReceivedTransaction"]

Acknowledge = Callable[[Lsn], None]


class ReceivedTransaction:
    """One transaction of the publisher. Iterate over it to read its changes, in order and in bounded memory, any number of times.

    ``kind`` is one of:

    * ``commit``: the transaction is committed. Without two_phase there is no other kind.
    * ``prepare``: the transaction was prepared for two-phase commit. It may still be committed or rolled back. Once acknowledged it is
      never sent again, so store it durably first, under its ``xid`` and ``gid``. If it was rolled back before the publisher sent it, only a
      part of its changes may arrive (reorderbuffer.c, concurrent abort); its rollback follows.
    * ``commit prepared``, ``rollback prepared``: the end of a prepared transaction, without changes. A rollback may arrive for a prepare
      that was never sent. ``rollback`` is the message of a rollback, else None.

    ``types`` has the Type messages among the changes that were read so far.
    """

    def __init__(
        self,
        event: Transaction | PreparedTransaction | CommitPrepared | RollbackPrepared,
        known: Mapping[int, Relation],
        acknowledge: Acknowledge,
    ) -> None:
        self.header: TransactionHeader = header(event)
        self.rollback = event if isinstance(event, RollbackPrepared) else None
        self._transaction: Transaction | None = None
        match event:
            case Transaction():
                self._transaction = event
            case PreparedTransaction():
                self._transaction = event.transaction
        self.types: Mapping[int, Type] = {}
        self._known = known
        self._acknowledge = acknowledge
        self._described: Mapping[int, Relation] | None = None
        self._current = True

    @property
    def kind(self) -> TransactionKind:
        """The kind of this event."""
        return self.header.kind

    @property
    def xid(self) -> int:
        """Transaction ID on the publisher."""
        return self.header.xid

    @property
    def gid(self) -> str | None:
        """The identifier given in PREPARE TRANSACTION, if the transaction was prepared."""
        return self.header.gid

    @property
    def commit_lsn(self) -> Lsn:
        """LSN of the commit record; with ``kind`` ``prepare``, of the prepare record."""
        return self.header.commit_lsn

    @property
    def end_lsn(self) -> Lsn:
        """End of that record. A stream that resumes here starts after this transaction."""
        return self.header.end_lsn

    @property
    def commit_time(self) -> datetime:
        """When it was committed, prepared or rolled back, by the publisher's clock. Timezone-aware, in UTC.

        Raises:
            OverflowError: the publisher's clock is outside the years 1 to 9999.
        """
        return datetime_from_postgres(self.header.commit_time)

    @property
    def origin(self) -> str | None:
        """The replication origin of the transaction. None if it was made on the publisher."""
        return self.header.origin

    async def __aiter__(self) -> AsyncIterator[Change]:
        """Iterate over the changes. Aborted subtransactions are left out.

        Raises:
            RuntimeError: the next transaction was requested, so the changes are freed.
            ProtocolError, SpoolError: the changes cannot be read.
        """
        self._check_current()
        if self._transaction is None:
            return
        reader = ChangeReader(self._known, prefixed=self._transaction.prefixed)
        self.types = reader.types
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
        """Tell the publisher that this transaction and everything before it are durable, so that they are never sent again.

        Returns before the publisher knows. If the connection is lost in the meantime, the next connection tells it.

        Raises:
            RuntimeError: the stream is closed.
        """
        self._acknowledge(self.header.end_lsn)

    async def described(self) -> Mapping[int, Relation]:
        """For the stream: the relations in this transaction. Later changes need them, even if the caller did not read to the end."""
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


class ReceivedPart(ReceivedTransaction):
    """A part of a transaction in progress: a block of its changes, an abort, or its end.

    Attributes:
        message: what it is, see :class:`subscriber.transaction.model.StreamedPart`.
    """

    def __init__(self, event: StreamedPart, known: Mapping[int, Relation], acknowledge: Acknowledge) -> None:
        super().__init__(event, known, acknowledge)
        self.message = event.message
        self.origin_message = event.origin

    async def messages(self) -> AsyncIterator[Message]:
        """The messages of a block, without StreamStart, Origin and StreamStop.

        Raises:
            ProtocolError, SpoolError: they cannot be read.
        """
        if self._transaction is not None:
            async for chunk in self._transaction.chunks():
                for record in chunk:
                    yield decode(record, in_stream=True)

    async def acknowledge(self) -> None:
        """Acknowledge the transaction, if this is its end. Before that, nothing of it is acknowledged."""
        if self.end_lsn:
            await super().acknowledge()


class ReceivedMessage:
    """A logical message that was written outside any transaction (``pg_logical_emit_message(false, …)``).

    Attributes:
        lsn: the end of its record (decode.c, logicalmsg_decode).
        prefix: the prefix, which tells applications whether the message is for them.
        content: the content.
    """

    kind: ClassVar[Literal["message"]] = "message"

    def __init__(self, message: LogicalMessage, acknowledge: Acknowledge) -> None:
        self.lsn = message.lsn
        self.prefix = message.prefix
        self.content = message.content
        self._acknowledge = acknowledge

    @property
    def end_lsn(self) -> Lsn:
        """The LSN that is acknowledged."""
        return self.lsn

    async def acknowledge(self) -> None:
        """Acknowledge the message, see :meth:`ReceivedTransaction.acknowledge`."""
        self._acknowledge(self.end_lsn)

    def __repr__(self) -> str:
        return f"ReceivedMessage(lsn='{self.lsn}', prefix={self.prefix!r})"
