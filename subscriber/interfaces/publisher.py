"""The interfaces on the publisher's side: the replication stream, and the spool of large transactions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from subscriber.protocol.lsn import Lsn

if TYPE_CHECKING:
    # `subscriber status` needs none of these
    from subscriber.transaction.model import Event, SpooledRecords

__all__ = [
    "EventStream",
    "ReceivedEvents",
    "ReplicationStream",
    "Spool",
]


class ReplicationStream(Protocol):
    """COPY BOTH with a walsender."""

    async def receive(self) -> Sequence[bytes]:
        """Wait for CopyData messages and return them raw, header included: at least one, at most about a megabyte of what has arrived.

        Cancelling loses nothing. One caller at a time; ``send`` may run meanwhile.

        Raises:
            PublisherUnavailable: the connection was lost or the server ended the stream.
            PublisherError: the server reported an error.
        """
        ...

    async def send(self, message: bytes) -> None:
        """Send one CopyData message (a standby status update) and flush it."""
        ...

    async def wal_end(self, least: Lsn) -> Lsn:
        """Return the end of the publisher's WAL. Ask the publisher only if the known end is before ``least``.

        Raises:
            PublisherError: or a subclass: the query failed.
        """
        ...

    async def rolled_back(self, xid: int, subxids: Collection[int]) -> Collection[int]:
        """Return which subtransactions of a streamed transaction the publisher has rolled back. Its end must have been received.

        Raises:
            UndecidedTransaction: the publisher cannot be asked, or its answer is not certain.
        """
        ...

    async def close(self) -> None:
        """End the stream cleanly if the connection works (CopyDone both ways, at most a second), and close the connection."""
        ...


@dataclass(frozen=True, slots=True)
class ReceivedEvents:
    """What an :class:`EventStream` gives.

    Attributes:
        events: in the publisher's order.
        end: everything up to there has been given.
        moment: when the publisher sent the last of it, as in its frames; None: not known.
    """

    events: Sequence[Event]
    end: Lsn
    moment: int | None


@runtime_checkable
class EventStream(Protocol):
    """The stream of a publisher that was received and checked before: it gives whole transactions, and needs no spool."""

    async def events(self) -> ReceivedEvents:
        """Wait for events, or for their end to move on. Return about a megabyte of what is there.

        Raises:
            SubscriberError: there is nothing more, and why.
        """
        ...

    async def send(self, message: bytes) -> None:
        """See :meth:`ReplicationStream.send`."""
        ...


class Spool(Protocol):
    """Stores the changes of large transactions. Private to this process; its content is lost with the process.

    Calls are made one at a time.
    """

    async def append(self, spool_id: int, records: Sequence[bytes]) -> None:
        """Append records to a transaction. The first call creates it.

        Raises:
            SpoolError: disk full, no permission.
        """
        ...

    async def truncate(self, spool_id: int, count: int) -> None:
        """Keep only the first ``count`` records, after a subtransaction was aborted."""
        ...

    async def discard(self, spool_id: int) -> None:
        """Delete the records of a transaction. Unknown ids are allowed."""
        ...

    async def read(self, spool_id: int, start: int) -> Sequence[bytes]:
        """Read some hundred kilobytes of an unfinished transaction from record number ``start``. Empty after the last record."""
        ...

    def reader(self, spool_id: int) -> SpooledRecords:
        """Return the records for reading. ``append`` is not called after this."""
        ...
