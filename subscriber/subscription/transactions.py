"""The publisher's transactions one by one, for who wants to do something else with them than to keep a replica.

Position
    There is no target and no catalog: the position is the slot's own ``confirmed_flush_lsn``, and it moves when the caller acknowledges.
    Nothing is acknowledged by itself, except that with nothing pending (everything handed out was acknowledged) the position follows
    what is received, so that an idle slot does not hold back WAL.

At least once
    After a lost connection the stream goes on, with growing pauses between attempts, from the last acknowledged position: what was
    handed out and not acknowledged comes again, as new objects. The same after a crash of the caller. What is acknowledged
    never comes again; exactly-once is therefore the caller's: keep ``end_lsn`` where the work is kept, in one transaction with it, and
    pass over what is not beyond it.

Memory
    Bounded by ``logical_decoding_work_mem``, also for a caller who is slow or never acknowledges: transactions are freed when the
    iteration goes on, larger ones lie in a spool, and beyond that the socket is not read. What is not acknowledged is kept by the
    publisher, as WAL.

Ways to iterate
    ``async with`` closes the connection at its end, whatever happens, and lets the loop inside be left and entered again. A plain
    ``async for`` opens with the first transaction and closes when the loop ends by itself or by an error from the stream; left with
    ``break`` or by an error of its own body, it closes a moment later, when Python finalizes the generator.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Generic, Literal, Self, TypeVar, cast, overload

from subscriber.abc import Position
from subscriber.apply.retry import Backoff, Policy, policy
from subscriber.config import Settings, SubscriptionOptions
from subscriber.errors import ConfigurationError, SubscriberError
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.messages import LogicalMessage
from subscriber.subscription.received import ReceivedMessage, ReceivedTransaction
from subscriber.subscription.session import FollowedSlot, StreamSession, undecodable
from subscriber.transaction.header import header
from subscriber.transaction.model import Event, Transaction
from subscriber.walreceiver.failures import is_undecodable

__all__ = ["TransactionStream", "transactions"]

_log = logging.getLogger(__name__)

_TICK = 1.0
"""Seconds between looks at the idle position when nothing happens."""

Received_co = TypeVar("Received_co", bound=ReceivedTransaction | ReceivedMessage, covariant=True)


class TransactionStream(Generic[Received_co]):
    """What :func:`transactions` returns: an async iterable and an async context manager. One loop at a time.

    Args:
        slot: what is followed.
        start_lsn: where to start, None for the slot's position.
        until_lsn: the iteration ends once everything up to there was given.
        until_caught_up: it ends at where the publisher's WAL ended when the stream was opened.
    """

    def __init__(self, slot: FollowedSlot, *, start_lsn: Lsn | None, until_lsn: Lsn | None, until_caught_up: bool) -> None:
        self._slot = slot
        self._start_lsn = start_lsn
        self._until_lsn = until_lsn
        self._until_caught_up = until_caught_up
        self._until = until_lsn
        self._session: StreamSession | None = None
        self._lost: tuple[Position, SubscriberError] | None = None
        self._acknowledged = INVALID_LSN
        self._current: ReceivedTransaction | None = None
        self._held = 0
        self._backoff = Backoff(slot.settings)
        self._connecting: asyncio.Task[StreamSession] | None = None
        self._stopped = asyncio.Event()
        self._open = False
        self._cautiously = False

    async def __aenter__(self) -> Self:
        """Connect and start.

        Raises:
            SubscriberError: the first attempt failed, for whatever reason; later ones are repeated where that may help.
        """
        self._open = True
        self._session = await self._connect(None)
        if self._session is not None:
            self._acknowledged = self._session.position.lsn
            if self._until_caught_up:
                self._until = self._session.publisher_lsn
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Tell the publisher what was acknowledged, and disconnect."""
        self._open = False
        if self._current is not None:
            await self._current.discard()
            self._current = None
        await self._disconnect()

    async def __aiter__(self) -> AsyncIterator[Received_co]:
        """The transactions in commit order, without end unless told where. See the module's text.

        Raises:
            PublisherUnavailable: the connection with a temporary slot was lost: there is nothing to go on from.
            DataLossError, PublisherError, ProtocolError, SpoolError: see :mod:`subscriber.errors`.
        """
        async with contextlib.AsyncExitStack() as stack:
            if not self._open:
                await stack.enter_async_context(self)
            while (received := await self._next()) is not None:
                # the overloads of transactions() know: no messages unless asked for
                yield cast("Received_co", received)

    @property
    def slot_name(self) -> str:
        """The slot's name, that of a temporary one too."""
        return self._slot.name

    @property
    def acknowledged(self) -> Lsn:
        """The position: up to here nothing comes again."""
        return self._acknowledged

    def stop(self) -> None:
        """End the iteration when it next goes on, or at once if it waits. To be called in the loop's thread, as in a signal handler."""
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
                self._follow_idle(session)
                if self._until is not None and session.tracker.received >= self._until:
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
        return ReceivedTransaction(event, session.relations, self._acknowledge)

    def _known_already(self, event: Event) -> bool:
        """Whether it was acknowledged after a new connection had been asked to start before it.

        A prepared transaction may be sent late, with an LSN long acknowledged: that one is never passed over.
        """
        return isinstance(event, Transaction) and event.end_lsn <= self._acknowledged

    async def _release(self) -> None:
        """The caller is done with the current transaction. Cancelled, it can be done again."""
        current = self._current
        if current is None:
            return
        described = await current.described()
        if self._session is not None:
            self._session.relations.update(described)
            self._session.receiver.release(self._held)
        self._current = None
        await current.discard()

    # --- positions

    def _acknowledge(self, end_lsn: Lsn) -> None:
        if not self._open:
            raise RuntimeError("the stream is closed: acknowledge inside the async with block")
        self._acknowledged = max(self._acknowledged, end_lsn)
        if self._session is not None:
            self._confirm(self._session)

    def _confirm(self, session: StreamSession) -> None:
        # after a reconnect, what an old object acknowledges may not have been received again yet
        session.tracker.flush(min(self._acknowledged, session.tracker.received))
        session.receiver.report()

    def _follow_idle(self, session: StreamSession) -> None:
        lsn = session.tracker.idle_lsn()
        if lsn is not None:
            self._acknowledged = max(self._acknowledged, lsn)
            self._confirm(session)

    # --- the connection

    async def _wait(self, session: StreamSession) -> None:
        """Until something is received, or the connection is lost."""
        try:
            await session.receiver.wait(_TICK)
            self._backoff.reset()
        except SubscriberError as error:
            if policy(error).policy is not Policy.SOON:
                raise
            if is_undecodable(error) and self._cautiously:
                raise undecodable(error, self._acknowledged) from error
            if self._slot.temporary:
                error.add_note("the temporary replication slot is gone with its connection")
                error.hint = "name a slot: then the stream continues where it was"
                raise
            self._lost = session.position, error
            self._cautiously = is_undecodable(error)
            await self._disconnect()

    async def _reconnect(self) -> None:
        """One attempt, after a pause that :meth:`stop` ends."""
        assert self._lost is not None  # without a session only after one that was lost
        position, error = self._lost
        pause = self._backoff.pause(policy(error))
        _log.warning("%s; next attempt in %.1f s, from %s", error.one_line(), pause, self._acknowledged)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._stopped.wait()
        try:
            self._session = await self._connect(replace(position, lsn=self._acknowledged))
        except SubscriberError as failed:
            if policy(failed).policy is not Policy.SOON:
                raise
            self._lost = position, failed

    async def _connect(self, position: Position | None) -> StreamSession | None:
        """None if :meth:`stop` was called meanwhile."""
        if self._stopped.is_set():
            return None
        slot = replace(self._slot, cautiously=self._cautiously)
        self._connecting = asyncio.create_task(StreamSession.open(slot, position, self._start_lsn))
        try:
            return await self._connecting
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._stopped.is_set() and not (caller and caller.cancelling()):
                return None
            raise
        finally:
            self._connecting = None

    async def _disconnect(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            if session.receiver.peek() is None:
                self._follow_idle(session)
            await session.close()


def _happened_at(event: Event) -> Lsn:
    """LSN of the event's own record; all that is known of a message or a rollback is where its record ends: a byte before is in it."""
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
    until_lsn: Lsn | None = ...,
    until_caught_up: bool = ...,
    messages: Literal[False] = ...,
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
    until_lsn: Lsn | None = ...,
    until_caught_up: bool = ...,
    messages: bool,
) -> TransactionStream[ReceivedTransaction | ReceivedMessage]: ...
def transactions(
    connection: str,
    *,
    publications: Sequence[str],
    slot_name: str | None = None,
    options: SubscriptionOptions | None = None,
    settings: Settings | None = None,
    start_lsn: Lsn | None = None,
    until_lsn: Lsn | None = None,
    until_caught_up: bool = False,
    messages: bool = False,
) -> TransactionStream[ReceivedTransaction | ReceivedMessage]:
    """Iterate over the transactions of a publisher. It connects when the iteration (or ``async with``) begins.

    Args:
        connection: the publisher: any conninfo or URL that libpq takes.
        publications: at least one.
        slot_name: a permanent slot. It is created if it does not exist and ``options.create_slot`` is set, and kept at the end. None:
            ``options.slot_name``, and if that is None too, a temporary slot: transactions from now on, and nothing is kept.
        options: of CREATE SUBSCRIPTION, as far as they concern the stream: ``binary``, ``streaming``, ``two_phase``, ``origin``,
            ``create_slot``, ``failover``.
        settings: of the receiver.
        start_lsn: start here instead of at the slot's position; an error if the slot has already moved past it.
        until_lsn: end the iteration after everything that was committed up to here.
        until_caught_up: end it where the publisher's WAL ended when the stream was opened.
        messages: give logical messages too: those of a transaction as its changes, others as :class:`ReceivedMessage`.

    Raises:
        ConfigurationError: no publication, or both ends given.

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
    )
    return TransactionStream(slot, start_lsn=start_lsn, until_lsn=until_lsn, until_caught_up=until_caught_up)
