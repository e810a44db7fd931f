"""Standard output, line by line, without ever blocking the event loop: a pipe that nobody reads must not stop the feedback."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Final

from subscriber.errors import TargetError

__all__ = ["Output"]

_BLOCK: Final = 64 * 1024


class Output:
    """Collects lines; what is flushed is out of our hands. Always UTF-8, whatever the locale."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._size = 0

    async def write(self, line: str) -> None:
        """Add a line; write what there is once it is some ten kilobytes.

        Raises:
            BrokenPipeError: the reader is gone.
            TargetError: it cannot be written.
        """
        self._lines.append(line)
        self._size += len(line) + 1
        if self._size >= _BLOCK:
            await self.flush()

    async def flush(self) -> None:
        """Write everything.

        Raises:
            BrokenPipeError: the reader is gone.
            TargetError: it cannot be written.
        """
        if self._lines:
            data = "\n".join([*self._lines, ""]).encode("utf-8", "backslashreplace")
            self._lines.clear()
            self._size = 0
            await asyncio.to_thread(_write, data)


def _write(data: bytes) -> None:
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        # what is left in the buffer would fail again when the interpreter ends: let it vanish
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        raise
    except OSError as error:
        raise TargetError(f"could not write to standard output: {error.strerror}") from error
