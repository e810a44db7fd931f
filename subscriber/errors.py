"""The one error tree of the project, by what the caller must do.

::

    SubscriberError
    ├── ConfigurationError        correct the call: an option, a parameter, a connection string, a file
    ├── ProtocolError             the bytes are not pgoutput's: report it (offset and tag are named)
    ├── PublisherError            correct the publisher: privilege, wal_level, publication, slot
    │   ├── PublisherUnavailable  wait: connection refused, lost or timed out; retried
    │   │   └── CopyOutdated      wait: the table changed while it was copied; it is copied again
    │   └── SlotInUse             wait: another walsender holds the slot; retried
    ├── DataLossError             decide: changes are gone, and to continue would lose them silently
    │   └── NeverPrepared         decide: COMMIT PREPARED of a transaction that was never prepared in the target
    ├── TargetError               correct the target: privilege, missing setting, broken catalog
    │   ├── TargetUnavailable     wait: connection refused, lost or timed out; retried
    │   ├── SubscriptionInUse     stop the other process that serves this subscription
    │   ├── SubscriptionChanged   start again: it was altered or dropped meanwhile
    │   ├── RelationError         correct the target's table: missing, other columns, no replica identity
    │   └── ApplyError            correct the rows: the target rejected a change; nothing of its transaction stays
    └── SpoolError                correct the spool directory: unreadable, full or damaged

No message ever holds a row's value or a password: text that a server made is taken over only where it cannot
hold one. Control characters in messages, hints and notes are escaped. Where an error came from is added with
:meth:`BaseException.add_note` at the room's boundary, and the cause is kept by ``raise … from``.
"""

from __future__ import annotations

from typing import Final

from subscriber.printable import printable

__all__ = [
    "ApplyError",
    "ConfigurationError",
    "CopyOutdated",
    "DataLossError",
    "NeverPrepared",
    "ProtocolError",
    "PublisherError",
    "PublisherUnavailable",
    "RelationError",
    "SlotInUse",
    "SpoolError",
    "SubscriberError",
    "SubscriptionChanged",
    "SubscriptionInUse",
    "TargetError",
    "TargetUnavailable",
]

CANNOT_CONNECT_NOW: Final = "57P03"
"""SQLSTATE of a server that starts, stops or recovers: it is there, and takes connections before long."""


_LAYOUT: Final = "\n\t"


_TOO_MANY_FILES: Final = "Too many open files"


def connection_hint(text: str, otherwise: str) -> str:
    """What to do about a file or a connection that cannot be opened: this process may be the reason.

    Args:
        text: what the system said.
        otherwise: the hint for every other reason.
    """
    return "this process may not open more files: raise its limit (ulimit -n)" if _TOO_MANY_FILES in text else otherwise


class SubscriberError(Exception):
    """The root of all errors that this package raises on purpose.

    Attributes:
        hint: what to do about it, one sentence, or None.
        sqlstate: the five-character SQLSTATE where a server gave one, or None.
        also: further errors that were found at the same time, each with its own hint.
    """

    def __init__(self, message: str, *, hint: str | None = None, sqlstate: str | None = None) -> None:
        super().__init__(printable(message, keep=_LAYOUT))
        self.hint = hint
        self.sqlstate = sqlstate
        self.also: list[SubscriberError] = []

    @property
    def hint(self) -> str | None:
        """What to do about it."""
        return self._hint

    @hint.setter
    def hint(self, text: str | None) -> None:
        self._hint = None if text is None else printable(text, keep=_LAYOUT)

    def add_note(self, note: str) -> None:
        """Say where the error came from, or what belongs to it."""
        super().add_note(printable(note, keep=_LAYOUT))

    def one_line(self) -> str:
        """Message, notes and hint on one line; then those of the other errors that were found."""
        return "; also: ".join(self.lines())

    def lines(self) -> list[str]:
        """A line for each error that was found, as the command line prints them: message, notes and hint."""
        parts = [str(self), *getattr(self, "__notes__", ())]
        text = "; ".join(" ".join(part.split()) for part in parts)
        own = f"{text} (hint: {' '.join(self.hint.split())})" if self.hint else text
        return [own, *(line for error in self.also for line in error.lines())]


class ConfigurationError(SubscriberError):
    """An option, parameter, connection string or file that cannot be used as given."""


class ProtocolError(SubscriberError):
    r"""Bytes that are not a message of the protocol in use.

    Attributes:
        offset: byte offset in the payload where reading failed, or None.
        tag: the message's tag as one character (or ``\xNN``), or None.
    """

    def __init__(self, message: str, *, offset: int | None = None, tag: str | None = None) -> None:
        where = ""
        if tag is not None:
            where += f" in message '{tag}'"
        if offset is not None:
            where += f" at offset {offset}"
        super().__init__(message + where)
        self.offset = offset
        self.tag = tag


class PublisherError(SubscriberError):
    """The publisher rejected a request, and a retry alone does not help."""


class PublisherUnavailable(PublisherError):
    """The publisher cannot be reached, or the connection to it was lost or timed out."""


class CopyOutdated(PublisherUnavailable):
    """The table changed while it was copied. It is copied again."""


class SlotInUse(PublisherError):
    """Another WAL sender uses the replication slot."""


class DataLossError(SubscriberError):
    """The publisher can no longer send the changes that follow the position in the target."""


class NeverPrepared(DataLossError):
    """The publisher committed a prepared transaction that was never prepared in the target."""


class TargetError(SubscriberError):
    """The target rejected a request, and a retry alone does not help."""


class TargetUnavailable(TargetError):
    """The target cannot be reached, or the connection to it was lost or timed out."""


class SubscriptionInUse(TargetError):
    """Another process serves this subscription."""


class SubscriptionChanged(TargetError):
    """The subscription was altered, refreshed or dropped while this run was not connected, so its definition is no longer valid."""


class RelationError(TargetError):
    """A published table does not fit the target's table: it is missing, has other columns, or has no replica identity."""


class ApplyError(TargetError):
    """The target rejected a change: a constraint, a value. Its whole transaction was rolled back."""


class SpoolError(SubscriberError):
    """The spool of large transactions cannot be written or read."""
