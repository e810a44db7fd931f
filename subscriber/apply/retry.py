"""The reaction to each error, as one table, separate from the code that raises.

The order matters: the first class that matches the error decides. What the user must do is in the hints of the errors.
"""

from __future__ import annotations

import logging
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
    UndecidedTransaction,
)

__all__ = ["Backoff", "Policy", "disables", "is_coming_up", "is_of_a_table", "may_recur", "policy"]


class Policy(Enum):
    """The reaction to an error."""

    SOON = "soon"
    """Retry with growing pauses, from a fraction of a second up to a second: the cause is temporary."""
    INTERVAL = "interval"
    """Retry every wal_retrieve_retry_interval: a user must fix something first."""
    NEVER = "never"
    """Stop: to continue would do harm, or cannot help."""

    @property
    def level(self) -> int:
        """The level with which an error is logged."""
        return logging.WARNING if self is Policy.SOON else logging.ERROR


_TABLE: Final[tuple[tuple[type[SubscriberError], Policy], ...]] = (
    (CopyOutdated, Policy.SOON),
    (UndecidedTransaction, Policy.SOON),
    (PublisherUnavailable, Policy.SOON),
    (SlotInUse, Policy.SOON),
    (TargetUnavailable, Policy.SOON),
    (ApplyError, Policy.INTERVAL),
    (RelationError, Policy.INTERVAL),
    (SpoolError, Policy.INTERVAL),
    (ProtocolError, Policy.NEVER),
    (NeverPrepared, Policy.NEVER),
    (DataLossError, Policy.NEVER),
    (SubscriptionInUse, Policy.NEVER),
    (SubscriptionChanged, Policy.NEVER),
    (ConfigurationError, Policy.NEVER),
    (PublisherError, Policy.INTERVAL),
    (TargetError, Policy.INTERVAL),
    (SubscriberError, Policy.NEVER),
)


_FIRST_SECONDS: Final = 0.1
_SOON_SECONDS: Final = 1.0


def policy(error: SubscriberError) -> Policy:
    """Return the reaction to an error."""
    return next(found for cls, found in _TABLE if isinstance(error, cls))


_STATEMENT_ENDED: Final = frozenset({"40P01", "57014"})
"""Deadlock, and a statement that was canceled: the session stays usable. In PostgreSQL these are errors of the worker."""


def disables(error: SubscriberError) -> bool:
    """Whether ``on_error = disable`` applies to an error that occurred while changes were received or a table was copied.

    In PostgreSQL it applies to every ERROR of the worker, including a lost connection to the publisher. It does not apply if the worker
    itself is ended, because the target's server stops or the subscription is altered. Nor does it apply to waits that only this program has
    (for locks of the target, for a slot whose walsender has not ended yet), and to copies that are repeated.
    """
    if isinstance(error, TargetUnavailable):
        return error.sqlstate in _STATEMENT_ENDED
    return not isinstance(error, SubscriptionInUse | SubscriptionChanged | SlotInUse | CopyOutdated)


_OF_A_TABLE: Final = frozenset({"42501", "54000", "55000"})
"""Permission denied, a row or value that is too large, and a table that is not in the state for a change."""


def is_of_a_table(error: SubscriberError) -> bool:
    """Whether an error at a change or a copy of a table is the table's own, so that it does not concern other tables."""
    if isinstance(error, TargetUnavailable | SubscriptionInUse | SubscriptionChanged):
        return False
    return isinstance(error, ApplyError | RelationError) or (isinstance(error, TargetError) and error.sqlstate in _OF_A_TABLE)


def may_recur(error: SubscriberError) -> bool:
    """Whether each attempt may fail in the same way: no server was unavailable, none ended the statement, and no other process works."""
    return policy(error) is Policy.INTERVAL and error.sqlstate not in _STATEMENT_ENDED


def is_coming_up(error: SubscriberError) -> bool:
    """Whether a server reported that it is starting or stopping. It is retried from the first attempt on: nothing must be fixed."""
    return error.sqlstate == CANNOT_CONNECT_NOW


class Backoff:
    """The pause before the next attempt. :meth:`reset` restarts it from the shortest one."""

    def __init__(self, settings: Settings) -> None:
        self._interval = settings.wal_retrieve_retry_interval
        self._ceiling = min(self._interval, _SOON_SECONDS)
        self._first = min(_FIRST_SECONDS, self._ceiling)
        self._next = self._first

    def reset(self) -> None:
        """Note that an attempt was successful."""
        self._next = self._first

    def pause(self, reaction: Policy) -> float:
        """Return the seconds to wait."""
        if reaction is not Policy.SOON:
            return self._interval
        pause = self._next
        self._next = min(self._next * 2, self._ceiling)
        return pause
