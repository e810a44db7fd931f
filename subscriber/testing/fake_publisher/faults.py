"""Scripted faults: what a walsender does at a chosen moment, instead of what it should.

A fault is armed with ``publisher.faults.add(...)`` and happens once (or ``times`` times), in the next streaming session that comes to its
moment: before message ``after`` of the session (from 0), or before the next message of kind ``before`` (its tag: ``"C"`` is Commit).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

__all__ = ["Fault", "FaultKind", "Faults"]


class FaultKind(Enum):
    """The kinds."""

    CUT = "cut"
    """The connection is closed without a word."""
    STALL = "stall"
    """Nothing is sent any more, until :meth:`Faults.release`; feedback is still read."""
    DELAY = "delay"
    """The message comes late, by ``seconds``."""
    GARBAGE = "garbage"
    """A message of random bytes is sent first."""
    TRUNCATED = "truncated"
    """The message is sent without its second half."""
    DUPLICATE = "duplicate"
    """The message is sent twice."""
    STRAY_ABORT = "stray_abort"
    """A StreamAbort of a transaction that was never streamed is sent first, as PostgreSQL 18.4 does."""
    LOST_ABORT = "lost_abort"
    """The StreamAbort of a savepoint that is rolled back is not sent, as PostgreSQL 14 to 18 do. The streamed rows of it stay. It happens
    at the next rollback of a streamed savepoint: ``after`` and ``before`` mean nothing."""
    UNKNOWN_OUTCOME = "unknown_outcome"
    """The next question for the outcome of subtransactions gets no answer, as if they were too old. ``after`` and ``before`` mean
    nothing."""
    FALSE_KEEPALIVE = "false_keepalive"
    """A keepalive with a position far beyond the end of the WAL is sent first."""
    REDELIVER = "redeliver"
    """The next session starts as far back as the WAL reaches, and sends transactions that were confirmed before."""
    ERROR = "error"
    """The session ends with an ErrorResponse: ``sqlstate`` and ``text``."""


_ELSEWHERE: Final = frozenset({FaultKind.REDELIVER, FaultKind.LOST_ABORT, FaultKind.UNKNOWN_OUTCOME})
"""Kinds that do not happen before a message."""


@dataclass(slots=True)
class Fault:
    """One fault.

    Attributes:
        kind: what happens.
        after: number of the message before which it happens.
        before: tags of the messages before which it happens; empty: any.
        times: how often.
        seconds: of a delay.
        sqlstate, text: of an error.
        happened: how often it happened.
    """

    kind: FaultKind
    after: int = 0
    before: str = ""
    times: int = 1
    seconds: float = 0.05
    sqlstate: str = "57P01"
    text: str = "terminating connection due to administrator command"
    happened: int = field(default=0, init=False)

    def is_due(self, sent: int, payload: bytes) -> bool:
        """Whether it happens before this message."""
        return (
            self.kind not in _ELSEWHERE
            and self.happened < self.times
            and sent >= self.after
            and (not self.before or chr(payload[0]) in self.before)
        )


class Faults:
    """The armed faults of a publisher.

    Args:
        changed: called when a stall begins or ends.

    Attributes:
        stalled: whether a stall has begun.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._armed: list[Fault] = []
        self.stalled = False

    def add(self, kind: FaultKind | str, **details: object) -> Fault:
        """Arm a fault. The details are the attributes of :class:`Fault`."""
        fault = Fault(FaultKind(kind), **details)  # type: ignore[arg-type]
        self._armed.append(fault)
        return fault

    def due(self, sent: int, payload: bytes) -> Sequence[Fault]:
        """Take the faults that happen before this message."""
        found = [fault for fault in self._armed if fault.is_due(sent, payload)]
        for fault in found:
            fault.happened += 1
        return found

    def redelivers(self) -> bool:
        """Take the fault that the session that starts now sends everything again."""
        return self._take(FaultKind.REDELIVER)

    def loses_abort(self) -> bool:
        """Take the fault that the abort of a streamed savepoint is not sent."""
        return self._take(FaultKind.LOST_ABORT)

    def hides_outcome(self) -> bool:
        """Take the fault that the outcome of subtransactions is not known."""
        return self._take(FaultKind.UNKNOWN_OUTCOME)

    def _take(self, kind: FaultKind) -> bool:
        for fault in self._armed:
            if fault.kind is kind and fault.happened < fault.times:
                fault.happened += 1
                return True
        return False

    def release(self) -> None:
        """End all faults, also a stall."""
        self._armed.clear()
        self.stalled = False
        self._changed()

    def stall(self) -> None:
        """Begin a stall."""
        self.stalled = True
        self._changed()
