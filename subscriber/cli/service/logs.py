"""The log of the program: where it is written, and how a record becomes one line.

On standard error, confirmations and errors that end a verb are plain lines. Where the log is JSON, a file or systemd's journal, these are
records as all others. The journal reads a priority from the beginning of each line, and has a time of its own.

A log that cannot be written loses lines, and the work continues.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TextIO

from subscriber.config.file.sections import LOG, LogOptions
from subscriber.errors import ConfigurationError
from subscriber.log_fields import fields_of
from subscriber.printable import printable

if TYPE_CHECKING:
    from subscriber.config.file.configuration import Configuration

__all__ = ["LEVELS", "NOTICE", "JsonFormatter", "LogFormatter", "ProgramLog", "is_journal", "program_log", "set_up"]

NOTICE: Final = 25
"""The level of confirmations: less than a warning, and shown by default."""

LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "notice": NOTICE, "warning": logging.WARNING, "error": logging.ERROR}

_OURS: Final = "subscriber"
_NUMBERS: Final = frozenset({"attempt", "xid"})
_PRIORITIES: Final = ((logging.ERROR, 3), (logging.WARNING, 4), (NOTICE, 5), (logging.INFO, 6), (0, 7))


class LogFormatter(logging.Formatter):
    """Formats a record as one line of text, even if it contains line breaks, control characters or a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Escape what is not printable. The lines of a traceback are joined."""
        lines = super().format(record).split("\n") if not record.exc_info and not record.exc_text else self._lines(record)
        return printable("\n".join(lines))

    def _lines(self, record: logging.LogRecord) -> list[str]:
        record.message = record.getMessage()
        if self.usesTime():
            record.asctime = self.formatTime(record, self.datefmt)
        return [" | ".join([self.formatMessage(record), *_traceback(self, record).splitlines()])]


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """The members are those that docs/reference/log.md lists."""
        found: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": _level(record.levelno),
            "logger": record.name,
            "message": printable(record.getMessage()),
            **{name: value if name in _NUMBERS else printable(str(value)) for name, value in _fields(record).items()},
        }
        if record.exc_info or record.exc_text:
            found["traceback"] = printable(_traceback(self, record), keep="\n\t")
        return json.dumps(found, ensure_ascii=False)


class ProgramLog(logging.StreamHandler[TextIO]):
    """Writes the log to standard error, or to a file that can be opened again."""

    def __init__(self, options: LogOptions) -> None:
        super().__init__(sys.stderr)
        self._file: TextIO | None = None
        self.options = LogOptions()
        self._journal = False
        self.configure(options)

    @property
    def plain(self) -> bool:
        """Whether confirmations are plain lines on standard error."""
        return self.options.format == "text" and self._file is None and not self._journal

    @property
    def is_file(self) -> bool:
        """Whether the log is written to a file. Then the terminal does not show it."""
        return self._file is not None

    def configure(self, options: LogOptions) -> None:
        """Use these options from now on.

        Raises:
            ConfigurationError: the file cannot be opened. Then nothing changes.
        """
        opened = _open(options.file) if options.file is not None else None
        self.acquire()
        try:
            before, self._file, self.options = self._file, opened, options
            self._journal = opened is None and is_journal(os.environ)
            self.setStream(opened or sys.stderr)
            text = "%(levelname)s %(name)s: %(message)s" if self._journal else "%(asctime)s %(levelname)s %(name)s: %(message)s"
            self.setFormatter(JsonFormatter() if options.format == "json" else LogFormatter(text))
        finally:
            self.release()
        if before is not None:
            before.close()

    def format(self, record: logging.LogRecord) -> str:
        """Add the journal's priority."""
        line = super().format(record)
        return f"<{_priority(record.levelno)}>{line}" if self._journal else line


def program_log() -> ProgramLog | None:
    """The log of this process, if it has one: a program that calls ``main`` has its own logging."""
    return next((each for each in logging.getLogger().handlers if isinstance(each, ProgramLog)), None)


def set_up(args: argparse.Namespace) -> None:
    """Configure the log of this process: as the arguments want it, then, for a service, the configuration file.

    If neither says anything, the handlers that a program has stay the only ones.

    Raises:
        ConfigurationError: the file cannot be opened. Then nothing changes.
    """
    args.given_log = {name: value for name in LOG if (value := getattr(args, f"log_{name}", None)) is not None}
    if args.verbose:
        args.given_log.setdefault("level", "info" if args.verbose == 1 else "debug")
    configuration: Configuration | None = args.configuration if getattr(args, "is_service", False) else None
    options = replace(LogOptions() if configuration is None else configuration.log, **args.given_log)
    logging.addLevelName(NOTICE, "NOTICE")
    root, log = logging.getLogger(), program_log()
    if log is not None:
        log.configure(options)
    elif not root.handlers or options != LogOptions(level=options.level):
        root.addHandler(ProgramLog(options))
    # only our loggers: drivers log the parameters of their calls (rows, a connection string with its password)
    logging.getLogger(_OURS).setLevel(LEVELS[options.level])


def is_journal(environment: Mapping[str, str]) -> bool:
    """Whether systemd has connected standard error to its journal: it names device and inode of that stream."""
    device, _, inode = environment.get("JOURNAL_STREAM", "").partition(":")
    try:
        found = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):
        return False
    return (device, inode) == (str(found.st_dev), str(found.st_ino))


def _open(file: str) -> TextIO:
    try:
        return open(file, "a", encoding="utf-8", errors="backslashreplace", buffering=1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a path"
        raise ConfigurationError(f'cannot write the log file "{file}": {reason}', hint="check the path and its permissions") from None


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    if not record.exc_text and record.exc_info:
        record.exc_text = formatter.formatException(record.exc_info)
    return record.exc_text or ""


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """The fields of a record. Tables and LSNs that are arguments of the message are fields too."""
    from subscriber.interfaces import TableName  # noqa: PLC0415 -- only JSON needs it
    from subscriber.protocol.lsn import Lsn  # noqa: PLC0415

    found = fields_of(record)
    for argument in record.args if isinstance(record.args, tuple) else ():
        if isinstance(argument, TableName):
            found.setdefault("table", argument)
        elif isinstance(argument, Lsn):
            found.setdefault("lsn", argument)
    return found


def _level(number: int) -> str:
    return next((name for name, least in reversed(LEVELS.items()) if number >= least), "debug")


def _priority(number: int) -> int:
    return next(priority for least, priority in _PRIORITIES if number >= least)
