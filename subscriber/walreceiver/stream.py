"""COPY BOTH with a walsender: ``ReplicationStream`` of :mod:`subscriber.interfaces` over libpq.

libpq may hold messages that it has already read from the socket, and TLS may hold bytes below that. So everything is drained before
waiting for the socket. A message taken from libpq is always returned: if an error follows it, the error is kept for the next call.

Source: PostgreSQL manual, Streaming Replication Protocol; libpq, Functions Associated with the COPY Command; pg_xact_status.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from typing import Final

import psycopg
from psycopg import pq

from subscriber.errors import PublisherError, PublisherUnavailable, SubscriberError, UndecidedTransaction
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.quoting import quote_literal
from subscriber.walreceiver.copy_data import drain
from subscriber.walreceiver.publisher_errors import connection_lost, result_error
from subscriber.walreceiver.session import Session

__all__ = ["WalSenderStream"]

_DRAIN_BYTES: Final = 1024 * 1024
_ASK_SECONDS: Final = 30.0
_CLOSE_SECONDS: Final = 1.0
_TLS_READS: Final = 4
"""TLS keeps bytes that did not fit into libpq's buffer (a record is 16 kB at most), and waiting for the socket does not see them."""
# An id on the wire has 32 bits. The one that is meant is the nearest to the next id, because a server lets no older one be in use.
# An id that was not assigned yet is an error. A standby may not have replayed what a session of the primary's address asks for.
_SUBTRANSACTIONS: Final = """
WITH here AS MATERIALIZED (
    SELECT pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::text::int8 AS next
     WHERE NOT pg_catalog.pg_is_in_recovery()
       AND EXISTS (SELECT FROM pg_catalog.pg_replication_slots WHERE slot_name = {slot} AND active)
), answers AS MATERIALIZED (
    SELECT xid, pg_catalog.pg_xact_status((next + ((xid - next + 2147483648) & 4294967295) - 2147483648)::text::xid8) AS status
      FROM here, pg_catalog.unnest('{{{xids}}}'::int8[]) AS asked (xid)
)
SELECT pg_catalog.count(*)::text, pg_catalog.count(status)::text,
       pg_catalog.string_agg(xid::text, ',') FILTER (WHERE status = 'aborted')
  FROM answers
"""


class WalSenderStream:
    """See :class:`subscriber.interfaces.ReplicationStream`. ``WalReceiverConnection.start_replication`` creates it. It owns its session."""

    def __init__(self, session: Session, slot_name: str, wal_end: Lsn) -> None:
        self._slot_name = slot_name
        self._wal_end = wal_end
        self._outcomes: Session | None = None
        self._session = session
        self._pgconn = session.pgconn
        self._reads = _TLS_READS if self._pgconn.ssl_in_use else 1
        self._sending = asyncio.Lock()
        self._failure: SubscriberError | None = None
        self._closed = False
        self._waited = True

    async def receive(self) -> Sequence[bytes]:
        """Return at least one CopyData message; see :meth:`subscriber.interfaces.ReplicationStream.receive`."""
        if not self._waited:
            await asyncio.sleep(0)  # a busy publisher must not starve the other tasks
        self._waited = False
        while True:
            messages = self._drain()
            if messages:
                return messages
            if self._failure is not None:
                raise self._failure
            await self._session.readable()
            self._waited = True

    def _drain(self) -> list[bytes]:
        messages: list[bytes] = []
        if self._failure is not None:
            return messages
        try:
            if drain(self._pgconn, messages, _DRAIN_BYTES, self._reads)[0]:
                self._failure = self._ended()
        except psycopg.Error as error:
            self._failure = connection_lost(error)
        return messages

    def _ended(self) -> SubscriberError:
        result = self._pgconn.get_result()  # does not block: libpq has received it completely
        if result is not None and result.status == pq.ExecStatus.FATAL_ERROR:
            return result_error(result, rows=True)
        return PublisherUnavailable("the publisher ended the replication stream", hint="it was probably shut down")

    async def send(self, message: bytes) -> None:
        """Send one CopyData message and flush it.

        Raises:
            PublisherUnavailable: the connection is lost.
        """
        async with self._sending:
            if self._failure is not None:
                raise self._failure
            try:
                while not self._pgconn.put_copy_data(message):
                    await self._session.writable()
                await self._session.flush()
            except psycopg.Error as error:
                raise connection_lost(error) from error

    async def wal_end(self, least: Lsn) -> Lsn:
        """The end of the publisher's WAL, as far as it is known; see :meth:`subscriber.interfaces.ReplicationStream.wal_end`."""
        if self._wal_end < least:
            try:
                async with asyncio.timeout(_ASK_SECONDS):
                    session = await self._session.sibling("wal end")
                    try:
                        self._wal_end = await session.current_wal_lsn()
                    finally:
                        await session.close()
            except TimeoutError:
                raise PublisherUnavailable(
                    "the publisher did not report the end of its WAL in time", hint="it is asked in a separate session; this is retried"
                ) from None
        return self._wal_end

    async def rolled_back(self, xid: int, subxids: Collection[int]) -> Collection[int]:
        """Ask in a session that is kept; see :meth:`subscriber.interfaces.ReplicationStream.rolled_back`."""
        while True:
            kept = self._outcomes is not None
            try:
                async with asyncio.timeout(_ASK_SECONDS):
                    if self._outcomes is None:
                        self._outcomes = await self._session.sibling("outcome")
                    return await _rolled_back_subtransactions(self._outcomes, self._slot_name, xid, subxids)
            except (PublisherError, TimeoutError) as error:
                await self._close_outcomes()
                if kept and not isinstance(error, UndecidedTransaction):
                    continue  # that session may have been ended meanwhile
                why = error.one_line() if isinstance(error, PublisherError) else "no answer in time"
                raise UndecidedTransaction(
                    f"the publisher does not say which subtransactions of transaction {xid} were rolled back: {why}",
                    hint="the transaction is received again, without streaming",
                ) from error

    async def _close_outcomes(self) -> None:
        session, self._outcomes = self._outcomes, None
        if session is not None:
            await session.close()

    async def close(self) -> None:
        """End the stream and close the connection. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._failure is None:
                with contextlib.suppress(psycopg.Error, TimeoutError):
                    async with asyncio.timeout(_CLOSE_SECONDS):
                        await self._end()
        finally:
            await self._close_outcomes()
            await self._session.close()

    async def _end(self) -> None:
        while not self._pgconn.put_copy_end():
            await self._session.writable()
        await self._session.flush()
        while (count := self._pgconn.get_copy_data(1)[0]) >= 0:
            if not count:
                await self._session.readable()
                self._pgconn.consume_input()
        while (result := await self._session.result()) is not None and result.status != pq.ExecStatus.FATAL_ERROR:
            pass


async def _rolled_back_subtransactions(session: Session, slot_name: str, xid: int, subxids: Collection[int]) -> Collection[int]:
    """Ask the publisher which of a transaction's subtransactions were rolled back.

    Args:
        session: with the server that sent the transaction.
        slot_name: the slot through which it was sent. It shows that another server answers.
        xid: of the transaction, without an epoch, as in messages. Its COMMIT or PREPARE was received.
        subxids: of its subtransactions.

    Raises:
        UndecidedTransaction: the answer is not certain.
        PublisherUnavailable, PublisherError: the query failed.
    """
    # the top transaction last: if it was not rolled back by then, its subtransactions were rolled back before its COMMIT or PREPARE
    xids = ",".join(map(str, (*subxids, xid)))
    ((answers, known, found),) = await session.execute(_SUBTRANSACTIONS.format(slot=quote_literal(slot_name), xids=xids))
    if answers == "0":
        raise UndecidedTransaction("another server answers, or it is a standby")
    if answers != known:
        raise UndecidedTransaction("the transaction is too old")
    aborted = {int(each) for each in (found or "").split(",") if each}
    # of a prepared transaction that was rolled back since, nothing is left anyway
    return () if xid in aborted else aborted
