"""Fields of log records, which a program reads beside the message: ``--log-format json`` has them.

The stable names are those of :data:`FIELDS`. ``subscription`` is set by the task that runs the subscription (:func:`log_fields`), and holds
for everything that it calls and starts. The others belong to one record, and are given to it:
``_log.warning(…, extra=error_fields(error))``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Final

from subscriber.context_values import holding

__all__ = ["FIELDS", "LOG_OPTIONS", "current_fields", "error_fields", "extra_fields", "fields_of", "log_fields"]

FIELDS: Final = ("subscription", "table", "lsn", "xid", "sqlstate", "attempt")

LOG_OPTIONS: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    "format": (("text", "json"), "text: lines for people; json: one JSON object per line"),
    "level": (("notice", "debug", "info", "warning", "error"), "the least important messages that are logged"),
    "file": ((), "append the log to this file, which SIGHUP opens again"),
}
"""The options of the log: their values, the default first, and their help. Here, so that ``--help`` need not import the other options."""

_current: ContextVar[Mapping[str, Any]] = ContextVar("log_fields", default=MappingProxyType({}))
_ATTRIBUTE: Final = "subscriber_fields"


def log_fields(**fields: Any) -> AbstractContextManager[None]:
    """Add fields to all records of a block, and of the tasks that it starts."""
    return holding(_current, {**_current.get(), **fields})


def current_fields() -> Mapping[str, Any]:
    """The fields of :func:`log_fields` that hold now."""
    return _current.get()


def extra_fields(**fields: Any) -> dict[str, Any]:
    """The argument ``extra`` of a log call."""
    return {_ATTRIBUTE: fields}


def error_fields(error: BaseException, **fields: Any) -> dict[str, Any]:
    """The argument ``extra`` of a log call about an error, which may have an SQLSTATE."""
    return extra_fields(sqlstate=getattr(error, "sqlstate", None), **fields)


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """The fields of a record that is being handled, without those that are unknown."""
    found = {**_current.get(), **getattr(record, _ATTRIBUTE, {})}
    return {name: found[name] for name in FIELDS if found.get(name) is not None}
