"""Errors of the file system and of Arrow, translated into errors of the subscriber."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator
from typing import Final

import pyarrow as pa

from subscriber.errors import TargetError, TargetUnavailable, connection_hint

__all__ = [
    "MORE_MEMORY",
    "NO_MEMORY",
    "AccessDenied",
    "DamagedFile",
    "StorageFull",
    "UnsupportedValues",
    "arrow_errors",
    "os_errors",
    "store_error",
]

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_ROOM: Final = "make room, or run the applier: it removes landed files"
NO_MEMORY: Final = "there is not enough memory"
MORE_MEMORY: Final = "give this program more memory, or the executors if Spark applies"
_FORBIDDEN: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_RIGHTS: Final = "give this user the right to read and write there"
_OS_ERROR: Final = re.compile(r"\(os error (\d+)\)")
"""In errors of delta-rs about a local file system."""
_STORE_CODES: Final = re.compile(r"AWS Error (\w+)|HTTP status (\d+)|<Code>(\w+)</Code>|Status\((\w+)|\b(40[13]|507) [A-Z]")
"""The codes in errors of pyarrow and delta-rs about object stores."""
_STORE_DENIED: Final = re.compile(r"accessdenied|accesskey|signature|permissiondenied|authorization|authentication|token|40[13]")
_STORE_CLOCK: Final = re.compile(
    r"(?:AWS Error |<Code>|ExceptionName: )(REQUEST_TIME_TOO_SKEWED|RequestTimeTooSkewed)|(Request date header too old)"
)
"""A request is refused, often with 403, if the time in its signature differs much from the store's."""
_STORE_FULL: Final = re.compile(r"quotaexceeded|storagefull|insufficientstorage|507")


@contextlib.contextmanager
def os_errors(what: str) -> Iterator[None]:
    """Translate an ``OSError`` of the block into a TargetError that names ``what``.

    Raises:
        TargetError: no space, no permission, no such place: an operator must fix it.
        TargetUnavailable: any other error; a retry may succeed.
    """
    try:
        yield
    except OSError as error:
        code = error.errno
        text = errno.errorcode.get(code, "") if code is not None else ""
        if code in _FULL:
            raise StorageFull(f"cannot write {what}: no space left ({text})", hint=_ROOM) from error
        if code in _FORBIDDEN:
            raise AccessDenied(f"cannot write {what}: permission denied ({text})", hint=_RIGHTS) from error
        if code in {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG}:
            raise TargetError(f"cannot write {what}: {text}", hint="the lake needs a directory of its own") from error
        if (known := store_error(what, str(error))) is not None:
            raise known from error
        hint = connection_hint(error.strerror or "", "check that the file system is available")
        raise TargetUnavailable(f"cannot read or write {what}: {text or type(error).__name__}", hint=hint) from error


def store_error(what: str, text: str) -> TargetError | None:
    """The error for an answer of a store or a file system that an operator must act on: permissions, space, or the time. None: another."""
    for number in map(int, _OS_ERROR.findall(text)):
        if number in _FORBIDDEN:
            return AccessDenied(f"cannot read or write {what}: permission denied ({errno.errorcode[number]})", hint=_RIGHTS)
        if number in _FULL:
            return StorageFull(f"cannot write {what}: no space left ({errno.errorcode[number]})", hint=_ROOM)
    if (skewed := _STORE_CLOCK.search(text)) is not None:
        return TargetError(
            f"cannot read or write {what}: the clock is wrong ({skewed[1] or skewed[2]})",
            hint="set the clock of this machine: it differs from that of the store by minutes",
        )
    for match in _STORE_CODES.finditer(text):
        code = next(filter(None, match.groups()))
        plain = code.replace("_", "").lower()
        if _STORE_DENIED.search(plain):
            return AccessDenied(
                f"cannot read or write {what}: permission denied ({code})",
                hint="check this program's credentials: they need the rights to list, read, write and delete there",
            )
        if _STORE_FULL.search(plain):
            return StorageFull(f"cannot write {what}: no space left ({code})", hint=_ROOM)
    return None


@contextlib.contextmanager
def arrow_errors(what: str) -> Iterator[None]:
    """Translate an error of Arrow about values, not about a file, into one that names ``what``.

    Arrow's text is left out, because it may contain values. So is the cause, because Spark shows causes.

    Raises:
        UnsupportedValues: Arrow cannot convert, compare or store a type, or lacks memory.
    """
    try:
        yield
    except pa.ArrowMemoryError:
        raise UnsupportedValues(f"{what}: {NO_MEMORY}", hint=MORE_MEMORY) from None
    except pa.ArrowException as error:
        raise UnsupportedValues(f"{what}: Arrow cannot compute with its columns ({type(error).__name__})", hint="report this") from None


class AccessDenied(TargetError):
    """This program lacks the permission for a file or an object. Its name is in the text."""


class StorageFull(TargetError):
    """There is no space left."""


class UnsupportedValues(TargetError):
    """Arrow cannot convert, compare or store values of a table. Its directory is in the text."""


class DamagedFile(TargetError):
    """A file is missing, or its content is not what was written. ``path`` is relative to the lake."""

    def __init__(self, what: str, path: str, problem: str = "is damaged") -> None:
        super().__init__(f"{what} {problem}".strip(), hint="restore it from a backup, or start over in a new directory")
        self.path = path
