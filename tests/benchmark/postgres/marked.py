"""``subscriber`` that notes when the steps of :mod:`tests.benchmark.postgres.path` are done: ``marked FILE run …``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from subscriber.apply.receiving.receiver import Receiver
from subscriber.cli import main
from subscriber.sinks.postgres.opened_postgres_sink import OpenedPostgresSink
from subscriber.sinks.postgres.session.pipeline import Pipeline
from subscriber.walreceiver.stream import WalSenderStream

_marks: list[tuple[str, float]] = []


def _note(owner: type, method: str, name: str, *, before: bool = False) -> None:
    original = getattr(owner, method)

    async def noted(*arguments: Any, **more: Any) -> Any:
        if before:
            _marks.append((name, time.perf_counter()))
            return await original(*arguments, **more)
        found = await original(*arguments, **more)
        _marks.append((name, time.perf_counter()))
        return found

    setattr(owner, method, noted)


def run() -> int:
    """Run the program, and write the file at its end."""
    file = Path(sys.argv.pop(1))
    _note(WalSenderStream, "receive", "received")
    _note(Receiver, "_take_frames", "queued")
    _note(OpenedPostgresSink, "apply", "taken", before=True)
    _note(Pipeline, "drain", "sent", before=True)
    _note(Pipeline, "drain", "answered")
    try:
        return main()
    finally:
        file.write_text(json.dumps(_marks))


if __name__ == "__main__":
    sys.exit(run())
