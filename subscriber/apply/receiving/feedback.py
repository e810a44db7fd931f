"""Standby status updates: they report the positions, and keep the connection alive.

An update is sent when the status changed, when the server asked for one, and otherwise at ``wal_receiver_status_interval``. Nothing waits
for the sink here, so a slow apply does not cause a ``wal_sender_timeout``. While nothing is read (the queue is full), a request of the
server is not seen either. Then updates are sent four times a second, often enough for a ``wal_sender_timeout`` of one second.

``wal_receiver_timeout`` works as in PostgreSQL: after half of it without a message, the server is asked for a reply; after all of it, the
connection is closed. Time in which nothing was read does not count.

Source: PostgreSQL manual, Streaming Replication Protocol; worker.c (LogicalRepApplyLoop, send_feedback).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Final

from subscriber import crash_points
from subscriber.config import Settings
from subscriber.errors import PublisherUnavailable
from subscriber.interfaces import EventStream, ReplicationStream
from subscriber.protocol.frames import StandbyStatusUpdate, encode_frame
from subscriber.protocol.lsn import POSTGRES_EPOCH, Lsn
from subscriber.transaction.feedback import FlushTracker

__all__ = ["Feedback"]

_UNREAD_STATUS_INTERVAL: Final = 0.25
_EPOCH_SECONDS: Final = POSTGRES_EPOCH.timestamp()


class Feedback:
    """Sends the status of one stream.

    Args:
        stream: gets the updates.
        tracker: of the positions.
        settings: of the process.

    Attributes:
        reading: whether the stream is being read.
        reported_at: when the last status was sent; seconds since 1970.
        reported: the ``flush`` position in that status; None before the first.
    """

    def __init__(self, stream: ReplicationStream | EventStream, tracker: FlushTracker, settings: Settings) -> None:
        self._stream = stream
        self._tracker = tracker
        self._settings = settings
        self._wanted = asyncio.Event()
        self._forced = False
        self._last_heard = 0.0
        self.reading = False
        self.reported_at: float | None = None
        self.reported: Lsn | None = None

    def begin_reading(self) -> None:
        """Note that the stream is read from now on."""
        self._last_heard = asyncio.get_running_loop().time()
        self.reading = True

    def wake(self, *, reply: bool = False) -> None:
        """Send the status soon if it changed; with ``reply`` in any case."""
        self._forced |= reply
        self._wanted.set()

    async def run(self) -> None:
        """Send updates until cancelled.

        Raises:
            PublisherUnavailable: the connection was lost, or the server was silent for ``wal_receiver_timeout``.
        """
        loop = asyncio.get_running_loop()
        interval = self._settings.wal_receiver_status_interval
        timeout = self._settings.wal_receiver_timeout
        sent: tuple[Lsn, Lsn, Lsn] | None = None
        sent_at = loop.time()
        asked = False
        while True:
            now = loop.time()
            reading = self.reading
            silence = now - self._last_heard if reading and timeout else 0.0
            if timeout and silence >= timeout:
                raise PublisherUnavailable(
                    "terminating logical replication worker due to timeout",
                    hint="the publisher was silent for wal_receiver_timeout; the connection is retried",
                )
            request = bool(timeout) and silence >= timeout / 2 and not asked
            if silence < timeout / 2:
                asked = False
            status = self._tracker.status()
            due = interval if reading else min(interval or _UNREAD_STATUS_INTERVAL, _UNREAD_STATUS_INTERVAL)
            if self._forced or request or (interval and status != sent) or (due and now - sent_at >= due):
                self._forced = False
                asked = asked or request
                await self.send(reply_requested=request)
                sent, sent_at = status, now
            wakes = [1.0]
            if due:
                wakes.append(sent_at + due - now)
            if timeout:
                wakes.append(timeout / 2 - silence if silence < timeout / 2 else timeout - silence)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(min(wakes), 0.001)):
                    await self._wanted.wait()
            self._wanted.clear()

    async def send(self, *, reply_requested: bool = False) -> None:
        """Send the status now.

        Args:
            reply_requested: the server shall reply at once.

        Raises:
            PublisherUnavailable: the connection was lost.
        """
        write, flush, apply = self._tracker.status()
        moment = int((time.time() - _EPOCH_SECONDS) * 1_000_000)
        crash_points.reached("acknowledge.sending")
        await self._stream.send(
            encode_frame(StandbyStatusUpdate(write=write, flush=flush, apply=apply, send_time=moment, reply_requested=reply_requested))
        )
        crash_points.reached("acknowledge.sent")
        self.reported, self.reported_at = flush, time.time()
