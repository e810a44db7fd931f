"""Errors that concern one Delta table: the round is planned again, or the table is stopped while the others continue."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

from deltalake.exceptions import DeltaError

from subscriber.errors import SubscriberError, TargetError
from subscriber.interfaces import TableName
from subscriber.sinks.spark.catalog.lake import Lake
from subscriber.sinks.spark.files.file_errors import store_error

__all__ = [
    "COPY_AGAIN",
    "CommitConflict",
    "DamagedCopy",
    "DamagedTable",
    "LostLog",
    "TableStopped",
    "read_error",
    "remedy",
    "with_names",
    "write_error",
]

_COMMAND: Final = "subscriber alter NAME --target URL --resync SCHEMA.TABLE"
COPY_AGAIN: Final = f"copy it again: {_COMMAND}; or remove it from the publication and add it again, and restart the subscriber each time"
"""A hint for error messages. :func:`with_names` completes it."""
_REMEDIES: Final[Mapping[str, str]] = {
    "log": f"remove its directory and copy the table again: {_COMMAND}",
    "history": "remove its directory: the applier builds it again from the change log",
    "snapshots": "start over in a new directory",
}
_UNREADABLE: Final = re.compile("feature|protocol|unsupported", re.IGNORECASE)
"""In delta-rs' errors about tables that it cannot read."""
_INCOMPLETE: Final = "No table metadata or protocol"
_STORE: Final = re.compile(r"Generic \w+ error")
"""In delta-rs' errors about file systems and object stores."""
_PATH: Final = re.compile(r"\S*/\S*")


class CommitConflict(TargetError):
    """Another writer changed the table after it was loaded. The work must be planned again."""

    def __init__(self, uri: str, directory: str) -> None:
        super().__init__(f"Delta table {uri} was changed by another writer at the same time", hint="let other writers commit less often")
        self.directory = directory


class TableStopped(TargetError):
    """One table cannot be continued. The others can.

    Attributes:
        refused: directory, application and version of the table, if this was found when it was committed.
        again: when to try again, by the monotonic clock. None: when the table has another version.
    """

    refused: tuple[str, str, int] | None = None
    again: float | None = None


class DamagedTable(TableStopped):
    """Files of a table are damaged or missing, although its file system can be read."""

    def __init__(self, uri: str, directory: str, what: str) -> None:
        super().__init__(f"Delta table {uri} is damaged: {what}", hint=remedy(directory))


class DamagedCopy(TableStopped):
    """Files of a table's copy are damaged or missing."""

    def __init__(self, error: SubscriberError) -> None:
        super().__init__(f"the copy of the table is damaged: {error}", hint=COPY_AGAIN)


class LostLog(DamagedCopy):
    """A change log is gone that had the copy of its table: the copy was removed since."""

    def __init__(self, uri: str) -> None:
        text = f"change log {uri} is gone, and its changes cannot be found elsewhere"
        TableStopped.__init__(self, text, hint=COPY_AGAIN)  # a backup would lack what was appended since


def remedy(directory: str) -> str:
    """What repairs a table, by its directory: a hint for error messages."""
    return _REMEDIES.get(directory.partition("/")[0], COPY_AGAIN)


def with_names(text: str, lake: Lake, table: TableName) -> str:
    """A text in which the command of :data:`COPY_AGAIN` names lake and table. An object store has no such command."""
    root = lake.storage.root
    if root is None:
        return text
    arguments = [lake.name, "--target", f"spark://{quote(str(root))}", "--resync", str(table)]
    return text.replace(_COMMAND, shlex.join(["subscriber", "alter", *arguments]))


def read_error(uri: str, directory: str, error: Exception) -> TargetError:
    """The error for one of delta-rs that was raised when a table was read: is it the table, or its file system?"""
    text = str(error)
    first = text.partition("\n")[0]
    if not isinstance(error, DeltaError) or _STORE.search(text):
        return write_error(uri, error)
    # paths in the text may have these words too, and so may the lines of a stack trace below it
    if _INCOMPLETE not in first and _UNREADABLE.search(_PATH.sub("", first.replace(uri, ""))):
        return TableStopped(f"Delta table {uri}: {first}", hint="remove the feature from the table: ALTER TABLE … DROP FEATURE")
    return DamagedTable(uri, directory, first)


def write_error(uri: str, error: Exception) -> TargetError:
    """The error for any other one of delta-rs."""
    if (known := store_error(f"Delta table {uri}", str(error))) is not None:
        return known
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return TargetError(f"Delta table {uri}: {first}", hint="check that all its files exist and are writable")
