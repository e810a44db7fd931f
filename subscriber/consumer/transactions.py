"""The publisher's transactions one by one, for programs that use them for something other than a replica.

Position
    There is no target and no catalog. The position is the slot's ``confirmed_flush_lsn``, which moves when the caller acknowledges. There
    is no automatic acknowledgement, with one exception: when nothing is pending (everything handed out was acknowledged), the position
    follows what is received, so that an idle slot does not retain WAL. A caller that stores the position itself gives ``advance``, and
    stores that position, too; otherwise the slot is beyond its own position at the next start.

At least once
    After a lost connection the stream resumes from the last acknowledged position, with growing pauses between attempts. Transactions
    that were handed out but not acknowledged are sent again, as new objects. The same happens after a crash of the caller. Acknowledged
    transactions are never sent again. For exactly-once, the caller stores ``end_lsn`` in the same transaction as its results, and
    skips transactions that are not beyond it.

Memory
    Memory is bounded by ``logical_decoding_work_mem``, even if the caller is slow or never acknowledges. Transactions are freed when the
    next one is requested. Larger ones are spooled to disk, and beyond that the socket is not read. The publisher keeps what is not
    acknowledged, as WAL.

Ways to iterate
    ``async with`` closes the connection at its end in all cases. The loop inside may be left and entered again. A plain ``async for``
    connects with the first transaction, and closes when the loop ends normally or with an error of the stream. If the loop ends by
    ``break`` or by an error in its body, the stream closes a moment later, when Python finalizes the generator.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Generic, Literal, Self, TypeVar, cast, overload

from subscriber.apply.retry import Backoff, Policy, policy
from subscriber.config import Settings, SubscriptionOptions
from subscriber.consumer.received import ReceivedMessage, ReceivedPart, ReceivedTransaction
from subscriber.errors import ConfigurationError, SubscriberError
from subscriber.interfaces import Position
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.messages import LogicalMessage, Relation, StreamAbort, StreamCommit, StreamPrepare, StreamStart
from subscriber.recording.file import Recorder
from subscriber.repeated_errors import RepeatedErrors
from subscriber.stream_session import FollowedSlot, StreamSession, undecodable
from subscriber.transaction.header import header
from subscriber.transaction.model import Event, StreamedPart, Transaction
from subscriber.walreceiver.publisher_errors import is_undecodable

__all__ = ["TransactionStream", "transactions"]

_log = logging.getLogger(__name__)

Advance = Callable[[Lsn], Awaitable[None]]

_TICK = 1.0
"""Seconds between two checks of the idle position while nothing arrives."""

Received_co = TypeVar("Received_co", bound=ReceivedTransaction | ReceivedMessage, covariant=True)


class TransactionStream(Generic[Received_co]):
    """The result of :func:`transactions`: an async iterable and an async context manager. Only one loop at a time may use it.

    Args:
        slot: the slot to follow.
        start_lsn: where to start. None: at the slot's position.
        until_lsn: the iteration ends after everything up to this LSN.
        until_caught_up: the iteration ends at the end of the publisher's WAL as of when the stream was opened.
        advance: stores a position while nothing is pending.
    """

    def __init__(
        self, slot: FollowedSlot, *, start_lsn: Lsn | None, until_lsn: Lsn | None, until_caught_up: bool, advance: Advance | None = None
    ) -> None:
        self._slot = slot
        self._start_lsn = start_lsn
        self._until_caught_up = until_caught_up
        self._until = until_lsn
        self._session: StreamSession | None = None
        self._lost: tuple[Position, SubscriberError] | None = None
        self._acknowledged = INVALID_LSN
        self._current: ReceivedTransaction | None = None
        self._held = 0
        self._backoff = Backoff(slot.settings)
        self._errors = RepeatedErrors(_log)
        self._connecting: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()
        self._open = False
        self._cautiously = False
        self._advance = advance
        self._advanced_at = -_TICK
        self._streamed: dict[int, dict[int, Relation]] = {}

    async def __aenter__(self) -> Self:
        """Connect and start.

        Raises:
            SubscriberError: the first attempt failed, for any reason. Later attempts are retried if that can help.
        """
        self._open = True
        try:
            await self._connect(None)
        except BaseException:
            self._open = False
            session, self._session = self._session, None
            if session is not None:
                await session.close()
            raise
        if self._session is not None:
            self._acknowledged = self._session.position.lsn
            if self._until_caught_up:
                self._until = self._session.publisher_lsn
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Send the acknowledged position to the publisher, and disconnect."""
        self._open = False
        try:
            if self._current is not None:
                await self._current.discard()
                self._current = None
        finally:
            await self._disconnect()

    async def __aiter__(self) -> AsyncIterator[Received_co]:
        """The transactions in commit order, without end unless ``until_…`` was given. See the module's text.

        Raises:
            PublisherUnavailable: the connection with a temporary slot was lost, so the stream cannot resume.
            DataLossError, PublisherError, ProtocolError, SpoolError: see :mod:`subscriber.errors`.
        """
        async with contextlib.AsyncExitStack() as stack:
            if not self._open:
                await stack.enter_async_context(self)
            while (received := await self._next()) is not None:
                # the overloads of transactions() guarantee that there are no messages unless requested
                yield cast("Received_co", received)

    @property
    def slot_name(self) -> str:
        """The slot's name, also of a temporary slot."""
        return self._slot.name

    @property
    def acknowledged(self) -> Lsn:
        """The position. Nothing up to here is sent again."""
        return self._acknowledged

    def stop(self) -> None:
        """End the iteration at its next step, or at once if it waits. Call it in the loop's thread, for example in a signal handler."""
        self._stopped.set()
        if self._connecting is not None:
            self._connecting.cancel()
        if self._session is not None:
            self._session.receiver.wake()

    # --- one after the other

    async def _next(self) -> ReceivedTransaction | ReceivedMessage | None:
        await self._release()
        while not self._stopped.is_set():
            session = self._session
            if session is None:
                await self._reconnect()
                continue
            waiting = session.receiver.peek()
            if waiting is not None and self._until is not None and _happened_at(waiting) >= self._until:
                return None
            if waiting is None:
                if self._advance is None or asyncio.get_running_loop().time() - self._advanced_at >= _TICK:
                    await self._follow_idle(session)
                # more may have been received while the idle position was stored
                if self._until is not None and session.tracker.received >= self._until and session.receiver.peek() is None:
                    return None
                await self._wait(session)
                continue
            event, held = session.receiver.pop()
            received = self._receive(session, event)
            if isinstance(received, ReceivedTransaction):
                self._current, self._held = received, held
                if self._known_already(event):
                    self._confirm(session)
                    await self._release()
                    continue
            else:
                session.receiver.release(held)
            return received
        return None

    def _receive(self, session: StreamSession, event: Event) -> ReceivedTransaction | ReceivedMessage:
        if isinstance(event, LogicalMessage):
            message = ReceivedMessage(event, self._acknowledge)
            session.tracker.pend(message.end_lsn)
            return message
        if isinstance(event, StreamedPart):
            return ReceivedPart(event, session.relations, self._acknowledge)
        return ReceivedTransaction(event, session.relations, self._acknowledge)

    def _known_already(self, event: Event) -> bool:
        """Whether it was acknowledged after a new connection had requested a start before it.

        A prepared transaction may be sent late, with an LSN that was acknowledged long ago, so it is never skipped.
        """
        # a plugin that was given blocks must be told how they end
        return isinstance(event, Transaction) and not isinstance(event, StreamedPart) and event.end_lsn <= self._acknowledged

    async def _release(self) -> None:
        """Free the current transaction. Can be repeated after a cancellation."""
        current = self._current
        if current is None:
            return
        described = await current.described()
        if self._session is not None:
            if isinstance(current, ReceivedPart):
                described = self._described_by_stream(current.message, described)
            self._session.relations.update(described)
            self._session.receiver.release(self._held)
        self._current = None
        await current.discard()

    def _described_by_stream(
        self, message: StreamStart | StreamAbort | StreamCommit | StreamPrepare, described: Mapping[int, Relation]
    ) -> Mapping[int, Relation]:
        """Note the relations of a transaction in progress. Return those that its end makes known."""
        match message:
            case StreamStart():
                if message.first_segment:
                    self._streamed.pop(message.xid, None)
                self._streamed.setdefault(message.xid, {}).update(described)
            case StreamAbort():
                self._streamed.pop(message.xid, None)
            case StreamCommit() | StreamPrepare():
                return self._streamed.pop(message.xid, {})
        return {}

    # --- positions

    def _acknowledge(self, end_lsn: Lsn) -> None:
        if not self._open:
            raise RuntimeError("the stream is closed: acknowledge inside the async with block")
        self._acknowledged = max(self._acknowledged, end_lsn)
        if self._session is not None:
            self._confirm(self._session)

    def _confirm(self, session: StreamSession) -> None:
        # after a reconnect, the LSN that an old object acknowledges may not have been received again yet
        session.tracker.flush(min(self._acknowledged, session.tracker.received))
        session.receiver.report()

    async def _follow_idle(self, session: StreamSession) -> None:
        lsn = session.tracker.idle_lsn()
        if lsn is not None:
            if self._advance is not None:
                await self._advance(lsn)
                self._advanced_at = asyncio.get_running_loop().time()
            self._acknowledged = max(self._acknowledged, lsn)
            self._confirm(session)

    # --- the connection

    async def _wait(self, session: StreamSession) -> None:
        """Wait until something is received, or the connection is lost."""
        try:
            await session.receiver.wait(_TICK)
            self._backoff.reset()
        except SubscriberError as error:
            if policy(error) is not Policy.SOON:
                raise
            if is_undecodable(error) and self._cautiously:
                raise undecodable(error, self._acknowledged) from error
            if self._slot.temporary:
                error.add_note("the temporary replication slot was lost with its connection")
                error.hint = "name a slot: then the stream continues where it was"
                raise
            self._lost = session.position, error
            self._cautiously = is_undecodable(error)
            await self._disconnect()

    async def _reconnect(self) -> None:
        """Make one attempt after a pause. :meth:`stop` ends the pause."""
        assert self._lost is not None  # there is no session only after a session was lost
        position, error = self._lost
        pause = self._backoff.pause(policy(error))
        text = error.one_line()
        self._errors.tell(logging.WARNING, text, f"{text}; next attempt in {pause:.1f} s, from {self._acknowledged}")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._stopped.wait()
        try:
            await self._connect(replace(position, lsn=self._acknowledged))
        except SubscriberError as failed:
            if policy(failed) is not Policy.SOON:
                raise
            self._lost = position, failed

    async def _connect(self, position: Position | None) -> None:
        """Open a session, unless :meth:`stop` is called in the meantime."""
        if self._stopped.is_set():
            return
        self._connecting = asyncio.create_task(self._open_session(position))
        try:
            await self._connecting
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if not self._stopped.is_set() or (caller and caller.cancelling()):
                raise
        finally:
            self._connecting = None

    async def _open_session(self, position: Position | None) -> None:
        slot = replace(self._slot, cautiously=self._cautiously)
        # stored by this task: what it returns is lost if the caller is cancelled at that moment
        self._session = await StreamSession.open(slot, position, self._start_lsn)

    async def _disconnect(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            try:
                if session.receiver.peek() is None:
                    await self._follow_idle(session)
            finally:
                await session.close()


def _happened_at(event: Event) -> Lsn:
    """An LSN inside the event's own record. Of a message or a rollback only the end of the record is known; the byte before is in it."""
    if isinstance(event, LogicalMessage):
        return Lsn(event.lsn - 1)
    found = header(event)
    return Lsn(found.commit_lsn - 1) if found.kind == "rollback prepared" else found.commit_lsn


@overload
def transactions(
    connection: str,
    *,
    publications: Sequence[str],
    slot_name: str | None = ...,
    options: SubscriptionOptions | None = ...,
    settings: Settings | None = ...,
    start_lsn: Lsn | None = ...,
    advance: Callable[[Lsn], Awaitable[None]] | None = ...,
    until_lsn: Lsn | None = ...,
    until_caught_up: bool = ...,
    messages: Literal[False] = ...,
    recorder: Recorder | None = ...,
) -> TransactionStream[ReceivedTransaction]: ...
@overload
def transactions(
    connection: str,
    *,
    publications: Sequence[str],
    slot_name: str | None = ...,
    options: SubscriptionOptions | None = ...,
    settings: Settings | None = ...,
    start_lsn: Lsn | None = ...,
    advance: Callable[[Lsn], Awaitable[None]] | None = ...,
    until_lsn: Lsn | None = ...,
    until_caught_up: bool = ...,
    messages: bool,
    recorder: Recorder | None = ...,
    blocks: bool = ...,
) -> TransactionStream[ReceivedTransaction | ReceivedMessage]: ...
def transactions(
    connection: str,
    *,
    publications: Sequence[str],
    slot_name: str | None = None,
    options: SubscriptionOptions | None = None,
    settings: Settings | None = None,
    start_lsn: Lsn | None = None,
    advance: Callable[[Lsn], Awaitable[None]] | None = None,
    until_lsn: Lsn | None = None,
    until_caught_up: bool = False,
    messages: bool = False,
    recorder: Recorder | None = None,
    blocks: bool = False,
) -> TransactionStream[ReceivedTransaction | ReceivedMessage]:
    """Iterate over the transactions of a publisher. The connection is opened when the iteration (or ``async with``) begins.

    Args:
        connection: connection string of the publisher: any conninfo or URL that libpq accepts.
        publications: at least one.
        slot_name: name of a permanent slot. It is created if it does not exist and ``options.create_slot`` is set. It remains at the end.
            None: ``options.slot_name``. If that is None too, a temporary slot: transactions from now on, and nothing remains.
        options: the parameters of CREATE SUBSCRIPTION that affect the stream: ``binary``, ``streaming``, ``two_phase``, ``origin``,
            ``create_slot``, ``failover``.
        settings: of the receiver.
        start_lsn: start here instead of at the slot's position. It is an error if the slot is already beyond it.
        advance: for a caller that gives ``start_lsn``: called while nothing is pending, with an LSN before which nothing is missing. It
            stores the LSN as its position. Then that is acknowledged.
        until_lsn: end the iteration after everything that was committed up to this LSN.
        until_caught_up: end the iteration at the end of the publisher's WAL as of when the stream was opened.
        messages: include logical messages. Those of a transaction are among its changes, others are a :class:`ReceivedMessage`.
        recorder: stores the raw stream. The caller closes it.
        blocks: for output plugins: streamed transactions are given in blocks, before their end.

    Raises:
        ConfigurationError: no publication is given, or both ends are given.

    Example::

        async with subscriber.transactions("host=db1 dbname=app", publications=["app"], slot_name="audit") as stream:
            async for transaction in stream:
                async for change in transaction:
                    print(transaction.xid, change.kind, change)
                await transaction.acknowledge()
    """
    if isinstance(publications, str) or not publications:
        raise ConfigurationError("no publication to subscribe to", hint='name at least one publication, as in publications=["app"]')
    if until_lsn is not None and until_caught_up:
        raise ConfigurationError("until_lsn and until_caught_up are mutually exclusive options")
    options = options or SubscriptionOptions()
    name = slot_name or options.slot_name
    slot = FollowedSlot(
        conninfo=connection,
        name=name or f"subscriber_{secrets.token_hex(8)}",
        temporary=name is None,
        publications=tuple(publications),
        options=options,
        settings=settings or Settings(),
        messages=messages,
        application_name="subscriber" if name is None else name,
        recorder=recorder,
        blocks=blocks,
    )
    return TransactionStream(slot, start_lsn=start_lsn, until_lsn=until_lsn, until_caught_up=until_caught_up, advance=advance)
