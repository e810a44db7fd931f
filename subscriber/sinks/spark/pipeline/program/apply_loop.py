"""The loop of the applier: run a round when it is due (``pace.py``), and retry after an error. Blocks: for a thread or a program."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from subscriber.errors import SubscriberError, SubscriptionInUse, TargetError, TargetUnavailable
from subscriber.repeated_errors import RepeatedErrors
from subscriber.sinks.spark.catalog.snapshots import Snapshot
from subscriber.sinks.spark.pipeline.applier import Applier
from subscriber.sinks.spark.pipeline.pace import Pace

__all__ = ["apply_forever"]

_log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = (0.05, 0.5)
"""Interval of looking for landed batches: a part of the freshness target, between these; the latter in an object store, where a look is a
dozen requests."""
_LOOKS: Final = 20
_RETRY_SECONDS: Final = 5.0
_FIRST_RETRY_SECONDS: Final = 0.2


def apply_forever(
    applier: Applier,
    stop: threading.Event,
    published: Callable[[Snapshot], None] = lambda _: None,
    *,
    pace: Pace | None = None,
    once: bool = False,
    rest_seconds: float = 0.0,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Apply until ``stop`` is set, or until nothing is waiting.

    Args:
        applier: the applier, not open.
        stop: set by another thread. A round in progress is finished.
        published: is told each published snapshot.
        pace: decides when rounds begin. None: as soon as something is landed. It has no effect after ``stop``, and with ``once``.
        once: end as soon as nothing is waiting, and at the first error.
        rest_seconds: after ``stop``, continue for at most this long until nothing is waiting.
        check: called before each round. If it raises, that counts as an error of the round.

    Raises:
        SubscriptionInUse: the lake has an applier.
        SubscriberError: an error that a retry does not fix, or any error after ``stop``.
    """
    pace = pace or Pace(0.0)
    look = _LOOK_SECONDS[1] if applier.is_remote else min(max(pace.freshness / _LOOKS, _LOOK_SECONDS[0]), _LOOK_SECONDS[1])
    applier.open()
    try:
        pause = _FIRST_RETRY_SECONDS
        end: float | None = None
        errors = RepeatedErrors(_log)
        while True:
            # a round does not see what is landed while it runs: only a round that began after the stop shows that nothing is waiting
            if stopping := stop.is_set():
                now = time.monotonic()
                end = now + rest_seconds if end is None else end
                if now >= end:
                    return
            try:
                check()
                if not (once or stopping) and (left := _seconds_until_round(applier, pace, look)) > 0:
                    pause = _FIRST_RETRY_SECONDS
                    stop.wait(left)
                    continue
                snapshot = _round(applier, pace)
                if snapshot is not None:
                    published(snapshot)
                pace.wrote(time.monotonic(), applier.tidy(now=once and snapshot is None))
                applier.failed(None)
                pause = _FIRST_RETRY_SECONDS
            except SubscriberError as error:
                applier.failed(error)
                if once or stopping or isinstance(error, SubscriptionInUse) or not isinstance(error, TargetError):
                    raise
                level = logging.WARNING if isinstance(error, TargetUnavailable) else logging.ERROR
                text = error.one_line()
                errors.tell(level, text, f"could not apply: {text}; next attempt in {pause:.1f} s")
                stop.wait(pause)
                pause = min(pause * 2, _RETRY_SECONDS)
                continue
            if snapshot is None and (once or stopping):
                return
    finally:
        applier.close()


def _seconds_until_round(applier: Applier, pace: Pace, look: float) -> float:
    """How long to wait before the next look: until the round is due, or until something may have been landed."""
    waiting, now = applier.waiting(), time.monotonic()
    applier.progress.waiting = waiting
    if waiting is None:
        return look
    applier.progress.held = pace.is_held(waiting, now)
    left = pace.begin_at(waiting) - now
    if left <= 0 and waiting.size and (room := applier.room()) > 0:
        return min(room, look)
    # what arrives meanwhile makes the round larger, and it is due earlier then
    return min(left, max(left / 2, look))


def _round(applier: Applier, pace: Pace) -> Snapshot | None:
    before, began = applier.progress.last, time.monotonic()
    snapshot = applier.run_round()
    done = applier.progress.last
    if done is not None and done is not before:
        pace.ended(began, time.monotonic(), size=done.size, written=done.written)
    return snapshot
