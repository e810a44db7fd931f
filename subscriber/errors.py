"""The exceptions of the project. Their classes say what the caller must do.

::

    SubscriberError
    ├── ConfigurationError        fix the call: an option, a parameter, a connection string, a file
    ├── ProtocolError             report it: the bytes are not pgoutput's (the error names offset and tag)
    ├── PublisherError            fix the publisher: privilege, wal_level, publication, slot
    │   ├── PublisherUnavailable  wait: connection refused, lost or timed out; retried
    │   │   ├── CopyOutdated      wait: the table changed while it was copied; copied again
    │   │   └── UndecidedTransaction  wait: which rows of a streamed transaction are valid is not known; received again
    │   └── SlotInUse             wait: another walsender uses the slot; retried
    ├── DataLossError             decide: changes are lost; to continue would hide it
    │   └── NeverPrepared         decide: COMMIT PREPARED of a transaction that was never prepared in the target
    ├── TargetError               fix the target: privilege, missing setting, broken catalog
    │   ├── TargetUnavailable     wait: connection refused, lost or timed out; retried
    │   ├── SubscriptionInUse     stop the other process that runs this subscription
    │   ├── SubscriptionChanged   start again: the subscription was altered or dropped meanwhile
    │   ├── RelationError         fix the target's table: missing, other columns, no replica identity
    │   └── ApplyError            fix the rows: the target rejected a change; its transaction was rolled back
    └── SpoolError                fix the spool directory: unreadable, full or damaged

A message never holds a row's value or a password. Text from a server is included only where it cannot hold one. Control characters in
messages, hints and notes are escaped. Packages add context with :meth:`BaseException.add_note`, and keep the cause with ``raise … from``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

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
    "UndecidedTransaction",
]

CANNOT_CONNECT_NOW: Final = "57P03"
"""SQLSTATE of a server that starts, stops or recovers. It exists, and will soon accept connections."""


_LAYOUT: Final = "\n\t"


_TOO_MANY_FILES: Final = "Too many open files"


REQUIRE_AUTH_HINT: Final = (
    "let the server use scram-sha-256; or, if you trust the network and the server, name its method in the connection string:"
    " require_auth=md5, password or none"
)
"""For a server that asks for a password in cleartext or with MD5, or that asks for none although one is given."""


def connection_hint(text: str, otherwise: str) -> str:
    """Return the hint for a file or connection that cannot be opened. The limit of this process may be the cause.

    Args:
        text: the system's error message.
        otherwise: the hint for all other causes.
    """
    return "this process may not open more files: increase its limit (ulimit -n)" if _TOO_MANY_FILES in text else otherwise


class SubscriberError(Exception):
    """Base class of all exceptions that this package raises on purpose.

    Attributes:
        hint: what to do, one sentence, or None.
        sqlstate: the five-character SQLSTATE if a server sent one, or None.
        also: further errors that were found at the same time, each with its own hint.
    """

    def __init__(self, message: str, *, hint: str | None = None, sqlstate: str | None = None) -> None:
        super().__init__(printable(message, keep=_LAYOUT))
        self.hint = hint
        self.sqlstate = sqlstate
        self.also: list[SubscriberError] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the constructor: its arguments differ from class to class."""
        return _unpickled, (type(self), self.args), vars(self)

    @property
    def hint(self) -> str | None:
        """What to do about the error."""
        return self._hint

    @hint.setter
    def hint(self, text: str | None) -> None:
        self._hint = None if text is None else printable(text, keep=_LAYOUT)

    def add_note(self, note: str) -> None:
        """Add context, such as what was being done."""
        super().add_note(printable(note, keep=_LAYOUT))

    def one_line(self, *, hint: bool = True) -> str:
        """Return message, notes and hint on one line, then those of the other errors."""
        return "; also: ".join(self.lines(hint=hint))

    def lines(self, *, hint: bool = True) -> list[str]:
        """Return a line for each error, as the command line prints it: message, notes and hint."""
        parts = [str(self), *getattr(self, "__notes__", ())]
        text = "; ".join(" ".join(part.split()) for part in parts)
        own = f"{text} (hint: {' '.join(self.hint.split())})" if self.hint and hint else text
        return [own, *(line for error in self.also for line in error.lines(hint=hint))]


def _unpickled(kind: type[SubscriberError], args: tuple[Any, ...]) -> SubscriberError:
    error = kind.__new__(kind)
    error.args = args
    return error


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
    """The publisher rejected a request, and waiting does not help."""


class PublisherUnavailable(PublisherError):
    """The publisher cannot be reached, or the connection to it was lost or timed out."""


class CopyOutdated(PublisherUnavailable):
    """The publisher's table changed while it was copied. It is copied again."""


class UndecidedTransaction(PublisherUnavailable):
    """It is not known which rows of a streamed transaction the publisher rolled back. It is received again, without streaming."""


class SlotInUse(PublisherError):
    """Another walsender uses the replication slot."""


class DataLossError(SubscriberError):
    """The publisher cannot send the changes after the target's durable position any more."""


class NeverPrepared(DataLossError):
    """The publisher committed a prepared transaction that was never prepared in the target."""


class TargetError(SubscriberError):
    """The target rejected a request, and waiting does not help.

    Attributes:
        of_table: schema and name of the table whose change was rejected; None: not known.
        finish_lsn: the final LSN of that change's transaction; None: not known.
    """

    of_table: tuple[str, str] | None = None
    finish_lsn: int | None = None


class TargetUnavailable(TargetError):
    """The target cannot be reached, or the connection to it was lost or timed out."""


class SubscriptionInUse(TargetError):
    """Another process runs this subscription."""


class SubscriptionChanged(TargetError):
    """The subscription was altered, refreshed or dropped while this run was disconnected, so that its state is outdated."""


class MissingColumns(NamedTuple):
    """Published columns that a table of the target lacks, or has with another type.

    Attributes:
        relation_id: oid of the table on the publisher.
        namespace, name: of the table in the target.
        columns: name, and oid and modifier of the type, of each column.
        present: name, and oid of the type, of the columns that the table of the target has.
        retyped: name, and oid and modifier of the type, of columns that have another type in the target.
    """

    relation_id: int
    namespace: str
    name: str
    columns: tuple[tuple[str, int, int], ...]
    present: tuple[tuple[str, int], ...] = ()
    retyped: tuple[tuple[str, int, int], ...] = ()


class RelationError(TargetError):
    """A published table does not match the target's: it is missing, has other columns, or has no replica identity.

    Attributes:
        missing: of a table that has changes and that the target lacks, the oid on the publisher and the name; or None.
        missing_columns: the columns that a table of the target lacks, if it could get them; or None.
    """

    missing: tuple[int, str] | None = None
    missing_columns: MissingColumns | None = None


class ApplyError(TargetError):
    """The target rejected a change (a constraint, a value). Its whole transaction was rolled back."""


class SpoolError(SubscriberError):
    """The spool of large transactions cannot be written or read."""


def raise_all(errors: Sequence[SubscriberError]) -> None:
    """Raise the first error with the others.

    Raises:
        SubscriberError: there is an error.
    """
    if errors:
        first, *others = errors
        first.also = [*first.also, *others]
        raise first
