"""The standard streams: what the verbs print, and how errors of writing are handled.

A name or a server's message may contain characters that control a terminal. Text for people is therefore escaped
(:func:`subscriber.printable.printable`). Data (``tail``, ``decode``) is escaped only on a terminal.

If standard output cannot be written (a full disk, a closed descriptor), the verb fails with one line on standard error. If the reader of
a pipe has closed it, the verb ends silently. If standard error cannot be written, messages are lost, and the verb continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import signal
import sys
from collections.abc import Iterator
from typing import Final, TextIO

from subscriber.errors import TargetError
from subscriber.printable import printable

__all__ = ["Output", "complain", "emit", "finish", "say", "settle_streams"]

_log = logging.getLogger("subscriber")

_BLOCK: Final = 64 * 1024


def settle_streams() -> None:
    """Make the standard streams of our own process safe to use. Call it before anything else is opened."""
    # the next file or socket would get the number of a closed descriptor, and what is printed would be written to it. /dev/null opened
    # in the opposite direction occupies the number, and fails as a closed descriptor does
    for number, mode in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_RDONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, mode), True)
    # typeshed does not know that they are None if the descriptor was closed
    streams: list[TextIO | None] = [sys.stdin, sys.stdout, sys.stderr]
    if streams[0] is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 -- for the life of the process
    if streams[1] is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if streams[2] is None:
        sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # characters that the locale's encoding lacks are escaped
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(errors="backslashreplace")
    # a log line that cannot be written is lost, and that cannot be reported anywhere
    logging.raiseExceptions = False
    # SIGHUP: the parent's terminal was closed, which does not affect us
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def finish(status: int) -> int:
    """Flush the streams before the process ends. Return the exit status: 1 instead of 0 if that fails."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _abandon(sys.stdout)
    except OSError as error:
        _abandon(sys.stdout)
        complain(str(_unwritable(error)))
        status = status or 1
    try:
        sys.stderr.flush()
    except OSError:
        _abandon(sys.stderr)
    return status


def say(text: str) -> None:
    """Print lines for people on standard output, and flush.

    Raises:
        BrokenPipeError: the reader has closed the pipe.
        TargetError: standard output cannot be written.
    """
    emit(printable(text, keep="\n") + "\n")


def emit(text: str) -> None:
    """Write text to standard output unchanged, and flush.

    Raises:
        BrokenPipeError: the reader has closed the pipe.
        TargetError: standard output cannot be written.
    """
    with _output_errors():
        sys.stdout.write(text)
        sys.stdout.flush()


def complain(text: str, level: int = logging.ERROR) -> None:
    """Print a line on standard error, or write it to the log if that is not plain text there. A line that cannot be written is lost.

    An error is printed even if the log is a file.
    """
    from subscriber.cli.service.logs import program_log  # noqa: PLC0415 -- most verbs have nothing to say

    log = program_log()
    if log is not None and not log.plain:
        _log.log(level, "%s", text)
        if not log.is_file or level < logging.ERROR:
            return
    with contextlib.suppress(OSError):
        print(f"subscriber: {printable(text)}", file=sys.stderr, flush=True)


class Output:
    """Writes lines of data without blocking the event loop: a pipe that is not read must not stop the feedback to the publisher.

    The output is always UTF-8, in every locale. On a terminal, control characters are escaped; elsewhere the bytes are exact.

    Args:
        errors: how characters are written that UTF-8 cannot encode: ``surrogateescape`` writes the bytes from which they come.
    """

    def __init__(self, errors: str = "backslashreplace") -> None:
        self._errors = errors
        self._lines: list[str] = []
        self._size = 0

    async def write(self, line: str) -> None:
        """Add a line. Write the buffer once it has reached 64 kB.

        Raises:
            BrokenPipeError: the reader has closed the pipe.
            TargetError: standard output cannot be written.
        """
        self._lines.append(line)
        self._size += len(line) + 1
        if self._size >= _BLOCK:
            await self.flush()

    async def flush(self) -> None:
        """Write the buffer.

        Raises:
            BrokenPipeError: the reader has closed the pipe.
            TargetError: standard output cannot be written.
        """
        if self._lines:
            # escapes use JSON's notation, so that a line of JSON keeps its meaning
            lines = map(printable, self._lines) if sys.stdout.isatty() else self._lines
            data = "\n".join([*lines, ""]).encode("utf-8", self._errors)
            self._lines.clear()
            self._size = 0
            await asyncio.to_thread(_write, data)


def _write(data: bytes) -> None:
    with _output_errors():
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


@contextlib.contextmanager
def _output_errors() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        _abandon(sys.stdout)
        raise
    except OSError as error:
        _abandon(sys.stdout)
        raise _unwritable(error) from error


def _unwritable(error: OSError) -> TargetError:
    return TargetError(f"could not write to standard output: {error.strerror}")


def _abandon(stream: TextIO) -> None:
    """Discard what is left in the buffer. It would fail again when the interpreter exits."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
