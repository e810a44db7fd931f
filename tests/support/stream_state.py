"""What a replication stream is at, so that a forged message can be put where it makes sense."""

from __future__ import annotations

from dataclasses import dataclass, field

from subscriber.protocol.frames import PAYLOAD
from tests.support.framing import HEADER

_COPY_DATA = ord("d")
_COPY_BOTH = ord("W")
_OPENS = frozenset(b"BbS")
_CLOSES = frozenset(b"CPE")
_FEW = 40


@dataclass
class StreamState:
    """Of one connection. Not a stream of CopyBoth: ``streaming`` is False.

    Attributes:
        lsn: the highest that the server named in a frame.
        block: the tag that opened what is open now; 0 between transactions.
        transaction: the messages of a small transaction so far, for a repetition.
    """

    streaming: bool = False
    lsn: int = 0
    block: int = 0
    transaction: list[bytes] = field(default_factory=list)

    def observe(self, message: bytes) -> None:
        """A message of the server passed."""
        if message[0] == _COPY_BOTH:
            self.streaming = True
            return
        tag = payload_tag(message) if self.streaming else 0
        if self.streaming and message[0] == _COPY_DATA:
            content = message[HEADER:]
            for start in (1, 9) if content[:1] == b"w" else (1,):
                self.lsn = max(self.lsn, int.from_bytes(content[start : start + 8], "big"))
        if tag == ord("B"):
            self.transaction.clear()
        if tag and self.block != ord("S") and len(self.transaction) < _FEW:
            self.transaction.append(message)
        if tag in _OPENS:
            self.block = tag
        elif tag in _CLOSES:
            self.block = 0

    def describe(self, message: bytes) -> str:
        """For the log of faults."""
        if not self.streaming:
            return "a session"
        tag = payload_tag(message)
        return f"the stream, at {'message ' + chr(tag) if tag else 'a keepalive'} behind {self.lsn >> 32:X}/{self.lsn & 0xFFFFFFFF:X}"


def payload_tag(message: bytes) -> int:
    """The pgoutput tag of a CopyData with an XLogData; else 0."""
    place = HEADER + PAYLOAD
    return message[place] if len(message) > place and message[0] == _COPY_DATA and message[HEADER] == ord("w") else 0
