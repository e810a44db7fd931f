"""The process that runs the subscription of a case. It is forked from a server that has imported everything."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from subscriber.config import Settings, SubscriptionOptions
from subscriber.errors import SubscriberError
from subscriber.protocol.lsn import Lsn
from subscriber.subscription.subscription import Subscription
from subscriber.testing.crash_points.failures import Failure, FailureAt, free_disk
from subscriber.testing.crash_points.target import CrashTarget, FullDiskTarget

__all__ = [
    "ERROR_STATUS",
    "NAME",
    "PUBLICATION",
    "SYNCHRONIZED",
    "Start",
    "make_subscription",
    "note_synchronized",
    "run_child",
    "stop_synchronized",
]

NAME: Final = "crash_point"
"""Of the subscription and its slot."""
PUBLICATION: Final = "crash_points"
ERROR_STATUS: Final = 3
"""Of a process that ended with an error of the subscription."""
SYNCHRONIZED: Final = "synchronized"
"""A file."""
_log = logging.getLogger(__name__)

_WORK_MEM: Final = 64 * 1024
_RELAY_LOG: Final = 512 * 1024
_RANGE: Final = 64 * 1024
"""A larger table is not copied in a group."""


@dataclass(frozen=True, slots=True)
class Start:
    """What a process needs to begin.

    Attributes:
        target: makes the sink.
        conninfo: of the publisher.
        directory: for the spool and the log.
        two_phase: the option of the subscription.
        failure: the hook.
        mistake: is called first; plants a mistake, to show that a case finds it.
        relay_log: whether it has one, in the directory.
    """

    target: CrashTarget
    conninfo: str
    directory: Path
    two_phase: bool
    failure: FailureAt
    mistake: Callable[[], None] | None = None
    relay_log: bool = False


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
            copy_range_size=_RANGE,
            max_copy_workers_per_table=1,
            max_sync_workers_per_subscription=1,
            spool_directory=str(start.directory / "spool"),
            relay_log=str(start.directory / "relay") if start.relay_log else None,
            relay_log_size=_RELAY_LOG,
        ),
    )


async def note_synchronized(subscription: Subscription, directory: Path) -> None:
    """Create a file when all tables are synchronized. Until then, changes of a table do not reach the apply worker's batches."""
    with contextlib.suppress(SubscriberError):
        await subscription.wait_for(Lsn(1))
        (directory / SYNCHRONIZED).touch()


async def stop_synchronized(subscription: Subscription) -> None:
    """Stop it when all tables are synchronized and it follows, or leave it if it has ended."""
    with contextlib.suppress(SubscriberError):
        await subscription.wait_for(Lsn(1))
        if (relay_log := subscription.status.relay_log) is not None:
            # what the publisher knows to be durable may not be in the target yet
            await subscription.wait_for(relay_log.flushed)
        # at its start a stream removes what a killed process has left
        while not subscription.status.streaming:  # noqa: ASYNC110 -- no event of the public interface says so
            await asyncio.sleep(0.01)
        subscription.stop()


def run_child(start: Start, stop: Connection) -> None:
    """Run until ``stop`` can be read, and all tables are synchronized.

    Exits with :data:`ERROR_STATUS` after an error of the subscription.
    """
    log = os.open(start.directory / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if start.failure.failure is Failure.DISK_FULL:
        handlers.insert(0, _FreeDisk(start.target))
    logging.basicConfig(handlers=handlers, level=logging.INFO, force=True)
    if start.mistake is not None:
        start.mistake()
    try:
        with start.failure.watching():
            asyncio.run(_run(start, stop))
    except SubscriberError as error:
        _log.error("%s", error)
        sys.exit(ERROR_STATUS)
    except BaseException:
        free_disk()  # so that the log can hold the traceback
        raise


class _FreeDisk(logging.Handler):
    """Makes room on a full disk when the program reports a problem."""

    def __init__(self, target: CrashTarget) -> None:
        super().__init__(logging.WARNING)
        self._free = target.free_disk if isinstance(target, FullDiskTarget) else free_disk

    def emit(self, record: logging.LogRecord) -> None:
        self._free()


async def _run(start: Start, stop: Connection) -> None:
    subscription = make_subscription(start)
    loop, waiting = asyncio.get_running_loop(), {asyncio.create_task(note_synchronized(subscription, start.directory))}

    def stopped() -> None:
        loop.remove_reader(stop.fileno())
        waiting.add(asyncio.create_task(stop_synchronized(subscription)))

    loop.add_reader(stop.fileno(), stopped)
    await subscription.run()
