"""The base of all embedded servers: a process that is started, watched, stopped, and removed with its directory.

No server outlives the process that started it. A watchdog, which is a shell that waits for the end of a pipe, stops the server and removes
its directory when the process is gone for any reason. The kernel's death signal (PR_SET_PDEATHSIG) was rejected, because it is already
sent when the *thread* that started the server ends.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Final, Self

from subscriber.testing.binaries import ServerUser, environment
from subscriber.testing.ports import LOOPBACK, EmbeddedServerError, free_port

__all__ = ["Embedded"]

# $1 the server, $2 the private directory, $3 the signal, $4 a file that the server removes at its end, or empty.
# It waits half a minute for a server that does not end.
_WATCHDOG: Final = """
read _
kill -"$3" "$1" 2>/dev/null
n=0
while kill -0 "$1" 2>/dev/null && { [ -z "$4" ] || [ -e "$4" ]; } && [ $n -lt 300 ]; do sleep 0.1; n=$((n+1)); done
rm -rf -- "$2"
"""
_START_SECONDS: Final = 60.0
_BIND_ATTEMPTS: Final = 5


class Embedded(ABC):
    """One embedded server on 127.0.0.1. As a context manager it is removed at the end. Its methods block.

    Attributes:
        base: its private directory.
        log_file: its log.
        host, port: where it listens. They stay the same after a restart.

    Args:
        title: its name in messages.
        base: created by the caller, removed by this class.
        run_as: the user that it runs as.
    """

    host: Final = LOOPBACK
    cannot_bind: ClassVar[bytes]
    """Text in its log if the port is in use."""
    watchdog_signal: ClassVar[str]
    """The signal that ends it when this process is gone."""

    def __init__(self, title: str, base: Path, run_as: ServerUser) -> None:
        self.base = base
        self.log_file = base / "server.log"
        self.port = 0
        self._title = title
        self._run_as = run_as
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def _command(self) -> Sequence[Path | str]:
        """Program and arguments of the server, at :attr:`port`."""

    @abstractmethod
    def _ready(self) -> bool:
        """Whether the server that was started last accepts connections."""

    @property
    def _sign_of_life(self) -> Path | None:
        """A file that the server removes at its end, whichever way the watchdog ends it."""
        return None

    @property
    def running(self) -> bool:
        """Whether the server runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The server's process id.

        Raises:
            EmbeddedServerError: it does not run.
        """
        if self._process is None:
            raise self._failure(f"{self._title} is not running")
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until it accepts connections (including crash recovery). Does nothing if it runs already.

        Raises:
            EmbeddedServerError: it did not start within a minute.
        """
        if self.running:
            return
        first = self.port == 0
        for attempt in range(_BIND_ATTEMPTS):
            if first:
                self.port = free_port()
            log_start = self.log_file.stat().st_size
            try:
                self._launch()
            except EmbeddedServerError:
                # the port may have been taken since it was chosen; choose another one, but only before the port was used
                new_text = self.log_file.read_bytes()[log_start:]
                if not (first and self.cannot_bind in new_text and attempt + 1 < _BIND_ATTEMPTS):
                    raise
            else:
                return

    def _launch(self) -> None:
        command = self._command()
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                user=self._run_as.uid,
                group=self._run_as.gid,
                extra_groups=None if self._run_as.uid is None else [],
                cwd=self.base,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C at the terminal is not for the server
            )
        self._watchdog = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHDOG, "sh", str(self._process.pid), self.base, self.watchdog_signal, self._sign_of_life or ""],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
        deadline = time.monotonic() + _START_SECONDS
        while not self._ready():
            if self._process.poll() is not None:
                self._reap()
                raise self._failure(f"{self._title} did not start")
            if time.monotonic() > deadline:
                self.kill()
                raise self._failure(f"{self._title} did not start within {_START_SECONDS:.0f} s")
            time.sleep(0.02)

    def _stop(self, sent: signal.Signals, timeout: float, how: str = "") -> None:
        if self._process is None:
            return
        self._process.send_signal(sent)
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise self._failure(f"{self._title} did not stop{how} within {timeout:g} s") from error
        self._reap()

    def kill(self) -> None:
        """Send SIGKILL. Does nothing if it does not run."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._reap()

    def _reap(self) -> None:
        self._process = None
        if self._watchdog is not None:
            self._watchdog.kill()
            self._watchdog.communicate()
            self._watchdog = None

    def log(self) -> str:
        """The content of the server's log."""
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def remove(self) -> None:
        """Stop it immediately and remove its directory. Idempotent."""
        self.kill()
        shutil.rmtree(self.base, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _failure(self, message: str) -> EmbeddedServerError:
        error = EmbeddedServerError(message, hint=f"its log was {self.log_file}")
        if self.log_file.exists():
            error.add_note("\n".join(self.log().splitlines()[-15:]))
        return error
