"""A real terminal for tests: what a pseudo-terminal shows."""

from __future__ import annotations

import contextlib
import os
import pty
import termios
import threading
from collections.abc import Iterator


class Terminal:
    """``descriptor`` is the end that programs write to."""

    def __init__(self, columns: int, rows: int) -> None:
        self._ours, self.descriptor = pty.openpty()
        # a new one has no size, and tqdm shows nothing where there is no room
        termios.tcsetwinsize(self.descriptor, (rows, columns))
        self._shown: list[bytes] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        # Linux reports by OSError that the other end is closed
        with contextlib.suppress(OSError):
            while data := os.read(self._ours, 65536):
                self._shown.append(data)

    def shown(self) -> str:
        """Everything, once those who were given the other end have closed it. Ends the terminal."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            self._reader.join()
            os.close(self._ours)
        return b"".join(self._shown).decode(errors="replace")


@contextlib.contextmanager
def terminal(columns: int = 100, rows: int = 24) -> Iterator[Terminal]:
    found = Terminal(columns, rows)
    try:
        yield found
    finally:
        found.shown()
