"""What subscribers report to the fake publisher, and what they must never report.

The rules, for each session:

* No position goes beyond what was sent to the subscriber: the largest LSN of a message or keepalive, or the position that it started from.
  Keepalives with invented positions (the fault ``false_keepalive``) do not count: a subscriber must not believe them.
* No position goes backwards. (0/0 means: not reported.)
* ``flush`` and ``apply`` are not beyond ``write``.
* After the subscriber ended the stream, it reports nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from subscriber.protocol.frames import StandbyStatusUpdate
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.testing.fake_publisher.server_errors import FeedbackViolation

__all__ = ["Feedback", "FeedbackRecord", "ReportedPositions"]


@dataclass(frozen=True, slots=True)
class FeedbackRecord:
    """One standby status update.

    Attributes:
        slot: the name of the slot.
        session: number of the streaming session, from 1.
        update: the update.
        sent: the largest position that the session had sent by then.
    """

    slot: str
    session: int
    update: StandbyStatusUpdate
    sent: Lsn


class Feedback:
    """All updates of all sessions, and the violations."""

    def __init__(self) -> None:
        self.records: list[FeedbackRecord] = []
        self.violations: list[str] = []
        self.sessions = 0

    def __iter__(self) -> Iterator[FeedbackRecord]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def check(self) -> None:
        """Fail if a subscriber did what it must never do.

        Raises:
            FeedbackViolation: it did.
        """
        if self.violations:
            raise FeedbackViolation("\n".join(self.violations))


class ReportedPositions:
    """The updates of one session.

    Args:
        feedback: gets the updates.
        slot: the name of the slot.
        start: the position that the client asked for, or the slot's, if that is later.

    Attributes:
        sent: the largest position that was sent.
        write, flush, apply: the latest reported positions.
    """

    def __init__(self, feedback: Feedback, slot: str, start: Lsn) -> None:
        self._feedback = feedback
        feedback.sessions += 1
        self._session = feedback.sessions
        self._slot = slot
        self.sent = start
        self.write = self.flush = self.apply = INVALID_LSN
        self._ended = False

    def end(self) -> None:
        """The subscriber ended the stream."""
        self._ended = True

    def add(self, update: StandbyStatusUpdate) -> None:
        """Record and check an update."""
        self._feedback.records.append(FeedbackRecord(self._slot, self._session, update, self.sent))
        if self._ended:
            self._violation("reported positions after it had ended the stream")
        for name, new, old in (
            ("write", update.write, self.write),
            ("flush", update.flush, self.flush),
            ("apply", update.apply, self.apply),
        ):
            if new == INVALID_LSN:
                continue
            if new > self.sent:
                self._violation(f"reported {name} = {new}, but only {self.sent} had been sent")
            if new < old:
                self._violation(f"moved {name} backwards, from {old} to {new}")
            if name != "write" and INVALID_LSN != update.write < new:
                self._violation(f"reported {name} = {new} beyond write = {update.write}")
        self.write = max(self.write, update.write)
        self.flush = max(self.flush, update.flush)
        self.apply = max(self.apply, update.apply)

    def _violation(self, what: str) -> None:
        self._feedback.violations.append(f'slot "{self._slot}", session {self._session}: the subscriber {what}')
