"""Streaming: one START_REPLICATION, from its options to its end.

The sender decodes one record after another and sends what the plugin wrote. When it has caught up it sends a keepalive, unless the client
has already confirmed everything, as WalSndWaitForWal does. A second task reads the client's status updates. At a fast shutdown the
sender goes on until the client has confirmed everything, and then ends the stream.

Source: walsender.c.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from typing import TYPE_CHECKING, Final

from subscriber.errors import ProtocolError
from subscriber.protocol.encoder import encode
from subscriber.protocol.frames import PrimaryKeepalive, XLogData, decode_status_update, encode_frame
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.messages import StreamAbort
from subscriber.testing.fake_publisher.backend import wire
from subscriber.testing.fake_publisher.faults import Fault, FaultKind
from subscriber.testing.fake_publisher.replication.commands import StartReplication
from subscriber.testing.fake_publisher.replication.decoding import Decoder
from subscriber.testing.fake_publisher.replication.feedback import ReportedPositions
from subscriber.testing.fake_publisher.replication.pgoutput import PgOutput
from subscriber.testing.fake_publisher.replication.plugin_options import read_options
from subscriber.testing.fake_publisher.replication.slots import Slot
from subscriber.testing.fake_publisher.server_errors import ClientGone, ServerError

if TYPE_CHECKING:
    from subscriber.testing.fake_publisher.backend.session import Session
    from subscriber.testing.fake_publisher.publisher import FakePublisher

__all__ = ["WalSender"]

_FAR: Final = 1 << 40
_STRANGE_XID: Final = 3_999_999_999


class WalSender:
    """One streaming session.

    Args:
        publisher: the server.
        session: the connection.
        command: the command.

    Raises:
        ServerError: the slot or an option is not valid.
    """

    def __init__(self, publisher: FakePublisher, session: Session, command: StartReplication) -> None:
        self._publisher = publisher
        self._session = session
        caps = publisher.caps
        slot = self._slot = publisher.slot(command.slot, database=session.database)
        self._plugin = read_options(slot.plugin, command.options, publisher)
        slot.acquire(session.pid, caps=caps)
        self.start = max(command.lsn, slot.confirmed_flush_lsn)
        if self._plugin.two_phase and not slot.two_phase:
            slot.two_phase, slot.two_phase_at = True, self.start
        from_lsn = self.start
        if publisher.faults.redelivers():
            from_lsn = publisher.wal.start
        self._positions = ReportedPositions(publisher.feedback, slot.name, self.start)
        self._queue: deque[tuple[Lsn, bytes]] = deque()
        self._sent_messages = 0
        self._plugin.attach(self._enqueue)
        self._decoder = Decoder(
            PgOutput(
                self._plugin.options,
                caps=caps,
                types=publisher.types,
                publications=self._plugin.publications,
                send=self._plugin.message,
            ),
            caps,
            start=from_lsn,
            work_mem=publisher.logical_decoding_work_mem,
            streaming=self._plugin.options.streaming != "off",
            two_phase_at=slot.two_phase_at if slot.two_phase else None,
            statistics=slot.statistics,
            is_aborted=lambda xid: publisher.transaction_status(xid) == "aborted",
            loses_abort=publisher.faults.loses_abort,
        )
        self._place = publisher.wal.place(min(slot.restart_lsn, from_lsn))
        self._decoded = slot.restart_lsn
        self._sent_position = INVALID_LSN
        self._asked = False
        self._client_done = False
        self._woken = asyncio.Event()

    @property
    def session(self) -> Session:
        """The connection."""
        return self._session

    @property
    def slot(self) -> Slot:
        """The slot that is followed."""
        return self._slot

    @property
    def positions(self) -> ReportedPositions:
        """What the client has reported."""
        return self._positions

    async def run(self) -> None:
        """Stream until the client or the publisher ends it.

        Raises:
            ServerError: the session ends with this error.
            ClientGone: the connection was lost.
        """
        self._publisher.streaming.add(self)
        self._session.write(wire.COPY_BOTH)
        await self._session.drain()
        reading = asyncio.create_task(self._read())
        try:
            await self._send_all(reading)
        finally:
            self._publisher.streaming.discard(self)
            self._slot.active_pid = None
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            self._publisher.changed()
        if reading.done() and not reading.cancelled() and (error := reading.exception()) is not None:
            raise error

    async def _send_all(self, reading: asyncio.Task[None]) -> None:
        publisher = self._publisher
        while True:
            if reading.done() and not self._client_done:
                return
            if self._client_done:
                # two, because libpqrcv_endstreaming wants two
                self._session.write(wire.COPY_DONE + wire.command_complete("COPY 0") + wire.command_complete("START_STREAMING"))
                await self._session.drain()
                return
            self._check_slot()
            grown = publisher.wal.grown
            if self._place < len(publisher.wal):
                record = publisher.wal[self._place]
                self._place += 1
                self._decoder.feed(record)
                await self._flush_queue()
                # not before: a keepalive must not be ahead of the messages
                self._decoded = record.end
                continue
            self._decoded = max(self._decoded, publisher.wal.end)
            if publisher.stopping and self._positions.flush >= self._decoded:
                self._session.write(wire.command_complete("COPY 0"))
                await self._session.drain()
                raise ServerError("57P01", "", fatal=True)
            if (self._positions.flush < self._decoded and self._sent_position < self._decoded) or (publisher.stopping and not self._asked):
                self._asked = publisher.stopping
                await self._keepalive(ask=publisher.stopping)
                # what was sent, and the statistics
                publisher.changed()
            await self._wait(grown, reading)

    def _check_slot(self) -> None:
        if self._slot.invalidation_reason is not None or self._slot.name not in self._publisher.slots:
            raise ServerError("57P01", "terminating connection due to administrator command", fatal=True)

    async def _wait(self, grown: asyncio.Event, reading: asyncio.Task[None]) -> None:
        self._woken.clear()
        waiting = [asyncio.create_task(grown.wait()), asyncio.create_task(self._woken.wait())]
        try:
            done, _ = await asyncio.wait(
                [*waiting, reading], timeout=self._publisher.keepalive_seconds, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        if not done:
            await self._keepalive(ask=True)

    async def _keepalive(self, *, ask: bool) -> None:
        if self._publisher.faults.stalled:
            return
        self._sent_position = self._decoded
        self._positions.sent = max(self._positions.sent, self._decoded)
        self._write(encode_frame(PrimaryKeepalive(self._decoded, self._publisher.now(), ask)))
        await self._session.drain()

    # --- messages

    def _enqueue(self, lsn: Lsn, payload: bytes) -> None:
        self._queue.append((lsn, payload))

    async def _flush_queue(self) -> None:
        while self._queue:
            lsn, payload = self._queue.popleft()
            repeat = 1
            for fault in self._publisher.faults.due(self._sent_messages, payload):
                repeat += await self._fault(fault, payload)
            self._positions.sent = max(self._positions.sent, lsn)
            for _ in range(repeat):
                self._write(encode_frame(XLogData(lsn, lsn, self._publisher.now(), payload)))
            self._sent_messages += 1
            if not self._queue or self._sent_messages % 100 == 0:
                await self._session.drain()

    def _write(self, frame: bytes) -> None:
        self._session.write(wire.copy_data(frame))

    async def _fault(self, fault: Fault, payload: bytes) -> int:
        """Let a fault happen; return how often more the message is to be sent."""
        now = self._publisher.now()
        match fault.kind:
            case FaultKind.CUT:
                await self._session.drain()
                raise ClientGone
            case FaultKind.ERROR:
                raise ServerError(fault.sqlstate, fault.text, fatal=True)
            case FaultKind.STALL:
                self._publisher.faults.stall()
                while self._publisher.faults.stalled:
                    await self._publisher.until_changed()
            case FaultKind.DELAY:
                await asyncio.sleep(fault.seconds)
            case FaultKind.GARBAGE:
                self._write(encode_frame(XLogData(INVALID_LSN, INVALID_LSN, now, b"\xfe" + os.urandom(20))))
            case FaultKind.TRUNCATED:
                self._write(encode_frame(XLogData(INVALID_LSN, INVALID_LSN, now, payload[: max(len(payload) // 2, 1)])))
                return -1
            case FaultKind.DUPLICATE:
                return 1
            case FaultKind.STRAY_ABORT:
                self._write(encode_frame(XLogData(INVALID_LSN, INVALID_LSN, now, encode(StreamAbort(_STRANGE_XID, _STRANGE_XID + 1)))))
            case FaultKind.FALSE_KEEPALIVE:
                self._write(encode_frame(PrimaryKeepalive(Lsn(self._publisher.wal.end + _FAR), now, reply_requested=True)))
        return 0

    # --- the client

    async def _read(self) -> None:
        while True:
            tag, body = await self._session.read_message()
            match tag:
                case b"d":
                    if body[:1] == b"r":
                        await self._status_update(body)
                    elif body[:1] != b"h":
                        raise ServerError("08P01", f'unexpected message type "{body[:1]!r}"', fatal=True)
                case b"c":
                    self._client_done = True
                    self._positions.end()
                    self._woken.set()
                    return
                case b"f":
                    raise ServerError("57014", "COPY from stdin failed")
                case b"X":
                    raise ClientGone
                case _:
                    raise ServerError("08P01", f"unexpected message type 0x{tag[0]:02X} during COPY", fatal=True)

    async def _status_update(self, body: bytes) -> None:
        try:
            update = decode_status_update(body)
        except ProtocolError as error:
            raise ServerError("08P01", str(error), fatal=True) from error
        self._positions.add(update)
        slot = self._slot
        if update.flush > slot.confirmed_flush_lsn:
            slot.confirmed_flush_lsn = update.flush
            slot.restart_lsn = max(slot.restart_lsn, self._publisher.oldest_needed(update.flush))
        if update.reply_requested:
            await self._keepalive(ask=False)
        self._woken.set()
        self._publisher.changed()
