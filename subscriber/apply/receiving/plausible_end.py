"""Does not believe an LSN that is far beyond the end of the publisher's WAL.

An LSN moves the position in the target and the slot. A wrong one would lose changes below it. So if an LSN is far beyond the known end of
the publisher's WAL, the publisher is asked for that end first. If the publisher cannot be asked, because it has no free session or a
password is no longer valid, the LSN is accepted only if it is not far beyond the received position.
"""

from __future__ import annotations

import logging
from typing import Final

from subscriber.errors import ProtocolError, PublisherError
from subscriber.interfaces import EventStream, ReplicationStream
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.transaction.feedback import FlushTracker

__all__ = ["PlausibleEnd"]

_log = logging.getLogger(__name__)

_SLACK: Final = 64 * 1024**2
"""Bytes that an LSN may be beyond the known end of the publisher's WAL, because it has written more since."""
_UNASKED_SLACK: Final = 16 * _SLACK
"""Bytes that an LSN may be beyond the received position if the publisher cannot be asked: it may decode so much without sending data."""


class PlausibleEnd:
    """How far LSNs of a stream are believed.

    Args:
        stream: it can be asked for the end of the publisher's WAL. The LSNs of a stream of events were checked before.
        tracker: has the received position.

    Attributes:
        lsn: up to here. The caller checks what is beyond it.
    """

    def __init__(self, stream: ReplicationStream | EventStream, tracker: FlushTracker) -> None:
        self._stream = stream
        self._tracker = tracker
        self.lsn = INVALID_LSN

    async def check(self, lsn: Lsn) -> None:
        """Ask the publisher whether its WAL reaches to an LSN.

        Raises:
            ProtocolError: it does not.
            PublisherError: it cannot be asked, and the LSN is far beyond the received position.
        """
        stream = self._stream
        assert not isinstance(stream, EventStream)
        try:
            wal_end = await stream.wal_end(Lsn(max(lsn - _SLACK, 0)))
        except PublisherError as refusal:
            if lsn > self._tracker.received + _UNASKED_SLACK:
                raise
            # not far beyond: a working stream must not end because the publisher rejects new sessions
            _log.info("could not ask the publisher for the end of its WAL: %s", refusal)
            self.lsn = Lsn(lsn + _SLACK)
            return
        self.lsn = Lsn(wal_end + _SLACK)
        if lsn > self.lsn:
            error = ProtocolError(f"the publisher sent LSN {lsn}, but its WAL ends at {wal_end}")
            error.hint = "the LSN is neither applied nor stored; find out what sent it: the publisher, or a proxy in front of it"
            raise error
