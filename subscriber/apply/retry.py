"""What to do after an error: one table, apart from the places that raise.

Order matters: the first class that the error is an instance of decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from subscriber.config import Settings
from subscriber.errors import (
    CANNOT_CONNECT_NOW,
    ApplyError,
    ConfigurationError,
    CopyOutdated,
    DataLossError,
    NeverPrepared,
    ProtocolError,
    PublisherError,
    PublisherUnavailable,
    RelationError,
    SlotInUse,
    SpoolError,
    SubscriberError,
    SubscriptionChanged,
    SubscriptionInUse,
    TargetError,
    TargetUnavailable,
)

__all__ = ["Backoff", "Policy", "disables", "is_coming_up", "policy"]


class Policy(Enum):
    """How an error is answered."""

    SOON = "soon"
    """Try again with growing pauses, from a fraction of a second up to one: it passes by itself."""
    INTERVAL = "interval"
    """Try again every wal_retrieve_retry_interval: somebody has to fix something first."""
    NEVER = "never"
    """End: going on would do harm, or cannot help."""


_TABLE: Final[tuple[tuple[type[SubscriberError], Policy, str], ...]] = (
    (CopyOutdated, Policy.SOON, "the table is copied again"),
    (PublisherUnavailable, Policy.SOON, "the publisher is tried again until it answers"),
    (SlotInUse, Policy.SOON, "the slot is tried again until the other walsender has gone"),
    (TargetUnavailable, Policy.SOON, "the target is tried again until it answers"),
    (ApplyError, Policy.INTERVAL, "fix the target's rows or constraint; the transaction is tried again until it fits"),
    (RelationError, Policy.INTERVAL, "fix the target's table; the transaction is tried again until it fits"),
    (SpoolError, Policy.INTERVAL, "make room or correct the permissions of the spool directory"),
    (ProtocolError, Policy.NEVER, "report this with the bytes of the message"),
    (NeverPrepared, Policy.NEVER, "copy the tables again: changes of a prepared transaction are missing"),
    (DataLossError, Policy.NEVER, "decide between a new copy and another publisher"),
    (SubscriptionInUse, Policy.NEVER, "stop the other process first"),
    (SubscriptionChanged, Policy.NEVER, "start it again"),
    (ConfigurationError, Policy.NEVER, "correct the options"),
    (PublisherError, Policy.INTERVAL, "fix the publisher; retried until it accepts"),
    (TargetError, Policy.INTERVAL, "fix the target; retried until it accepts"),
    (SubscriberError, Policy.NEVER, "report this"),
)


_SOON_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A row of the table."""

    policy: Policy
    hint: str


def policy(error: SubscriberError) -> Answer:
    """Look the error up."""
    for cls, found, hint in _TABLE:
        if isinstance(error, cls):
            return Answer(found, hint)
    raise AssertionError("SubscriberError is the last row")


_STATEMENT_ENDED: Final = frozenset({"40P01", "57014"})
"""Deadlock, and a statement that was canceled: the session lives on, and natively it is an ERROR of the worker."""


def disables(error: SubscriberError) -> bool:
    """Whether ``disable_on_error`` is about an error that was met while changes came or a table was copied.

    Natively every ERROR of the worker counts, and so does a lost connection to the publisher. What ends the worker itself does not: the
    target's server that stops, or somebody who alters the subscription. Nor do waits that are ours (for locks of the target, for a slot
    whose walsender has not gone yet) and the copies that we begin anew.
    """
    if isinstance(error, TargetUnavailable):
        return error.sqlstate in _STATEMENT_ENDED
    return not isinstance(error, SubscriptionInUse | SubscriptionChanged | SlotInUse | CopyOutdated)


def is_coming_up(error: SubscriberError) -> bool:
    """Whether a server said that it is not ready yet. It is waited for from the first attempt on: nothing has to be fixed."""
    return error.sqlstate == CANNOT_CONNECT_NOW


class Backoff:
    """The pause before the next attempt. Starts anew after :meth:`reset`."""

    def __init__(self, settings: Settings, first: float = 0.1) -> None:
        self._interval = settings.wal_retrieve_retry_interval
        self._ceiling = min(self._interval, _SOON_SECONDS)
        self._first = min(first, self._ceiling)
        self._next = self._first

    def reset(self) -> None:
        """An attempt got somewhere."""
        self._next = self._first

    def pause(self, answer: Answer) -> float:
        """Seconds to wait."""
        if answer.policy is not Policy.SOON:
            return self._interval
        pause = self._next
        self._next = min(self._next * 2, self._ceiling)
        return pause
