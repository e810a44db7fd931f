"""``subscriber run`` through the proxies, and what it says.

Its log goes through a pipe to us, so that a limit on the size of files does not reach it.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO

from tests.crash.process import Process, RunProcess

SETTINGS = (
    "wal_retrieve_retry_interval=300ms",
    "wal_receiver_status_interval=1s",
    "wal_receiver_timeout=4s",
    "logical_decoding_work_mem=128kB",
    "batch_rows=500",
    "copy_range_size=512kB",
    "max_sync_workers_per_subscription=3",
)
"""Streams spill, batches split, tables are copied in parts; what is lost is noticed soon."""
_FORBIDDEN = re.compile(
    r"Traceback \(most recent|never retrieved|was destroyed but it is pending|never awaited|Exception ignored|Logging error|AssertionError"
    "|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)
_NUMBERS = re.compile(r"[0-9A-F]+/[0-9A-F]+|\b[0-9][0-9a-f]*\b|crash_\w+")
_DUMP_SECONDS = 3.0
_MOST_LINES = 5
_START_SECONDS = 30.0


@dataclass(kw_only=True)
class ChaosProcess(RunProcess):
    """One subscription, whose process is killed and started again.

    Attributes:
        connection: conninfo of the publisher, through the proxy.
        proxied_target: URL of the target, through the proxy.
        ends: how it ended, each with how often.
        bad: lines of the log that must not be there.
        stopping: we asked for its end.
        secrets: what no line of its log may hold.
    """

    connection: str
    proxied_target: str
    ends: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    stopping: bool = False
    secrets: Sequence[str] = ()
    _reader: threading.Thread | None = None
    _pipe: IO[bytes] | None = None
    _last_error: str = ""

    def arguments(self, *more: str) -> list[str]:
        found = ["--connection", self.connection, "--publication", "pub", "--target", self.proxied_target, "--name", self.name]
        for option in self.options:
            found += ["-o", option]
        for setting in (*self.settings, f"spool_directory={self.spool}"):
            found += ["-c", setting]
        return [sys.executable, "-W", "error", "-m", "tests.chaos.child", "-v", "run", *found, *more]

    def start(self, *more: str) -> Process:
        self.reap()
        self.stopping = False
        self.process = process = subprocess.Popen(
            self.arguments(*more), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self._pipe = process.stdout
        self._reader = threading.Thread(target=self._read, args=(self._pipe,), daemon=True)
        self._reader.start()
        return process

    def note(self, text: str) -> None:
        """Write a line of ours into its log."""
        with (self.directory / "log").open("a", encoding="utf-8") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} CHAOS {text}\n")

    def _read(self, pipe: IO[bytes]) -> None:
        with (self.directory / "log").open("a", encoding="utf-8") as log:
            traceback = False
            for raw in pipe:
                line = raw.decode(errors="replace").rstrip("\n")
                if traceback:
                    # up to the line that names the error
                    self.bad[-1] += f"\n{line}"
                    traceback = line.startswith(" ")
                log.write(line + "\n")
                log.flush()
                if line.startswith("subscriber: "):
                    self._last_error = line
                conflict = " WARNING " in line and "conflict detected" in line
                if conflict or _FORBIDDEN.search(line) or any(secret in line for secret in self.secrets):
                    self.bad.append(line)
                    traceback = line.startswith("Traceback")

    def distinct_bad(self) -> list[str]:
        """One of each sort of bad line."""
        return list({_NUMBERS.sub("#", line)[-100:]: line for line in reversed(self.bad)}.values())[:_MOST_LINES]

    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def reap(self) -> None:
        """Take note of how it ended, if it did since the last look."""
        if self.process is None or (status := self.process.poll()) is None:
            return
        assert self._reader is not None
        assert self._pipe is not None
        self._reader.join()
        self._pipe.close()
        self.process = None
        error, self._last_error = self._last_error, ""
        self.note(f"ended with {status}")
        expected = (0, 1, 143, -signal.SIGTERM, -signal.SIGKILL) if self.stopping else (1,)
        if status not in expected or (status == 1 and not error):
            self.bad.append(f"unexpected exit status {status} {error}")
        if status == 1:
            self.ends[f"error: {_NUMBERS.sub('#', error.removeprefix('subscriber: '))[:110]}"] += 1
        else:
            self.ends[{0: "SIGTERM", 143: "SIGTERM", -signal.SIGTERM: "SIGTERM", -signal.SIGKILL: "SIGKILL"}.get(status, str(status))] += 1

    def stop(self, sent: signal.Signals, timeout: float) -> bool:
        """Whether it ended in time."""
        if self.runs():
            assert self.process is not None
            self.stopping = True
            self.note(f"sends {sent.name}")
            self.process.send_signal(sent)
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.dump()
                self.process.kill()
                self.process.wait()
                self.reap()
                return False
        self.reap()
        return True

    def end(self) -> None:
        self.stop(signal.SIGKILL, _START_SECONDS)

    def dump(self) -> None:
        """Have it write where it is."""
        if self.runs():
            assert self.process is not None
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(_DUMP_SECONDS)
