"""``subscriber demo`` as a person runs it, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SMALL = ("--rows", "2000", "--seconds", "4")
WAIT_SECONDS = 90.0


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-W", "error", "-m", "subscriber", "demo", *arguments]


def environment(scratch: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(scratch)}


def demo(scratch: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), env=environment(scratch), capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)


@contextlib.contextmanager
def running_demo(scratch: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command(*arguments), env=environment(scratch), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
