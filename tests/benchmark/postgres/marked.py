"""``subscriber`` that notes when the steps of :mod:`tests.benchmark.postgres.path` are done: ``marked FILE run …``."""

from __future__ import annotations

import json
import sys
import time
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

from subscriber.apply.receiving.receiver import Receiver
from subscriber.apply.worker import ApplyWorker
from subscriber.cli import main
from subscriber.sinks.postgres.session.pipeline import Pipeline
from subscriber.walreceiver.stream import WalSenderStream

_marks: list[tuple[str, float, float]] = []


def _mark(name: str) -> None:
    _marks.append((name, time.perf_counter(), time.thread_time()))


def _note(owner: type, method: str, name: str, *, before: bool = False) -> None:
    original = getattr(owner, method)

    async def noted(*arguments: Any, **more: Any) -> Any:
        if before:
            _mark(name)
            return await original(*arguments, **more)
        found = await original(*arguments, **more)
        _mark(name)
        return found

    def noted_at_once(*arguments: Any) -> Any:
        found = original(*arguments)
        _mark(name)
        return found

    setattr(owner, method, noted if iscoroutinefunction(original) else noted_at_once)


def run() -> int:
    """Run the program, and write the file at its end."""
    file = Path(sys.argv.pop(1))
    _note(WalSenderStream, "receive", "received")
    _note(Receiver, "_take_frames", "queued")
    _note(ApplyWorker, "_apply_batch", "taken", before=True)
    _note(Pipeline, "enter", "opened")
    _note(Pipeline, "start", "started")
    _note(Pipeline, "drain", "sent", before=True)
    _note(Pipeline, "drain", "answered")
    try:
        return main()
    finally:
        file.write_text(json.dumps(_marks))


if __name__ == "__main__":
    sys.exit(run())
