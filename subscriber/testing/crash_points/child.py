"""The process that runs the subscription of a case. It is forked from a server that has imported everything."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from subscriber import crash_points
from subscriber.config import Settings, SubscriptionOptions
from subscriber.errors import SubscriberError
from subscriber.subscription.subscription import Subscription
from subscriber.testing.crash_points.failures import FailureAt
from subscriber.testing.crash_points.target import CrashTarget

__all__ = ["ERROR_STATUS", "NAME", "PUBLICATION", "Start", "make_subscription", "run_child"]

NAME: Final = "crash_point"
"""Of the subscription and its slot."""
PUBLICATION: Final = "crash_points"
ERROR_STATUS: Final = 3
"""Of a process that ended with an error of the subscription."""
_log = logging.getLogger(__name__)

_WORK_MEM: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class Start:
    """What a process needs to begin.

    Attributes:
        target: makes the sink.
        conninfo: of the publisher.
        directory: for the spool and the log.
        two_phase: the option of the subscription.
        failure: the hook, or None.
        mistake: is called first; plants a mistake, to show that a case finds it.
    """

    target: CrashTarget
    conninfo: str
    directory: Path
    two_phase: bool
    failure: FailureAt | None = None
    mistake: Callable[[], None] | None = None


def make_subscription(start: Start) -> Subscription:
    """The subscription of a case: it spills and retries soon, commits are durable at once, and the order of copies does not vary."""
    return Subscription(
        NAME,
        connection=start.conninfo,
        publications=[PUBLICATION],
        target=start.target.new_sink(),
        options=SubscriptionOptions(two_phase=start.two_phase, streaming="on", synchronous_commit="on"),
        settings=Settings(
            wal_retrieve_retry_interval=0.05,
            wal_receiver_status_interval=0.5,
            logical_decoding_work_mem=_WORK_MEM,
            max_copy_workers_per_table=1,
            max_sync_workers_per_subscription=1,
            spool_directory=str(start.directory / "spool"),
        ),
    )


def run_child(start: Start) -> None:
    """Run until SIGTERM. Exits with :data:`ERROR_STATUS` after an error of the subscription."""
    log = os.open(start.directory / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, force=True)
    if start.mistake is not None:
        start.mistake()
    try:
        with crash_points.watched(start.failure) if start.failure is not None else contextlib.nullcontext():
            asyncio.run(_run(start))
    except SubscriberError as error:
        _log.error("%s", error)
        sys.exit(ERROR_STATUS)


async def _run(start: Start) -> None:
    subscription = make_subscription(start)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, subscription.stop)
    await subscription.run()
