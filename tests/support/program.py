"""``python -m subscriber`` as a person runs it, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.database import WAIT_SECONDS, Database
from tests.support.preloaded import PipedProgram

PROGRAM = (sys.executable, "-W", "error", "-m", "subscriber", "--quiet")
"""What it says on success is the subject of test_notices alone."""
LOUD = PROGRAM[:-1]


@dataclass(frozen=True)
class Ended:
    """How a process ended, what it said, and how long it took."""

    status: int
    output: str
    errors: str
    seconds: float


def environment(given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours without libpq's variables. Bytecode is stored, as that of an installed program is."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PG") and name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, **(given or {})}


def subscriber(
    *arguments: str, env: Mapping[str, str] | None = None, timeout: float = WAIT_SECONDS, loud: bool = False, directory: Path | None = None
) -> Ended:
    """Run it to its end, in a working directory if that is another one."""
    with running(*arguments, env=env, loud=loud, errors="strict", directory=directory) as program:
        return program.ended(timeout)


class Program:
    """One that runs."""

    def __init__(self, process: PipedProgram) -> None:
        self.process = process
        self._output: list[str] = []
        self._errors: list[str] = []
        self._readers = [
            threading.Thread(target=found.extend, args=(stream,))
            for found, stream in ((self._output, process.stdout), (self._errors, process.stderr))
        ]
        for reader in self._readers:
            reader.start()

    @property
    def errors(self) -> str:
        """What it has written to stderr by now."""
        return "".join(self._errors)

    def says(self, text: str, times: int = 1) -> None:
        """Wait until stderr holds it."""
        deadline = time.monotonic() + WAIT_SECONDS
        while self.errors.count(text) < times:
            assert time.monotonic() < deadline, f"it never said {text!r}, but {self.errors!r}"
            assert self.process.poll() is None, f"it ended with {self.process.returncode}: {self.errors}"
            time.sleep(0.02)

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def ended(self, timeout: float = WAIT_SECONDS) -> Ended:
        """Wait for its end."""
        began = time.monotonic()
        status = self.process.wait(timeout)
        self.join()
        return Ended(status, "".join(self._output), self.errors, time.monotonic() - began)

    def join(self) -> None:
        """Wait for the rest of its output."""
        for reader in self._readers:
            reader.join()


@contextlib.contextmanager
def running(
    *arguments: str,
    env: Mapping[str, str] | None = None,
    loud: bool = False,
    errors: str = "replace",
    directory: Path | None = None,
) -> Iterator[Program]:
    """Run it while the block lasts; killed at its end."""
    process = PipedProgram([*(() if loud else ("--quiet",)), *arguments], environment(env), errors=errors, directory=directory)
    found = Program(process)
    try:
        yield found
    finally:
        process.kill()
        process.wait()
        found.join()
        process.close()


# --- what a subscription leaves on both sides


def slots(publisher: Database) -> list[str]:
    """The slots of this database."""
    return [
        name for (name,) in publisher.fetch("SELECT slot_name FROM pg_replication_slots WHERE database = current_database() ORDER BY 1")
    ]


def confirmed(publisher: Database, slot: str) -> str:
    """What was acknowledged."""
    found: str = publisher.value(f"SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = '{slot}'")
    return found


def position(target: Database, name: str) -> str:
    """What the target holds."""
    found: str = target.value(
        'SELECT p.remote_lsn::text FROM subscriber."position" AS p JOIN subscriber.pg_subscription AS s ON s.oid = p.srsubid'
        f" WHERE p.srrelid = 0 AND s.subname = '{name}'"
    )
    return found


def has_catalog(target: Database) -> bool:
    found: bool = target.value("SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = 'subscriber')")
    return found
