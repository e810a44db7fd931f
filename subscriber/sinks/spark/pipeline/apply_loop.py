"""The loop of the applier: run a round as soon as something was landed, and retry after an error. Blocks: for a thread or a program."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from subscriber.errors import SubscriberError, SubscriptionInUse, TargetError, TargetUnavailable
from subscriber.sinks.spark.catalog.snapshots import Snapshot
from subscriber.sinks.spark.pipeline.applier import Applier

__all__ = ["apply_forever"]

_log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.05
_RETRY_SECONDS: Final = 5.0
_FIRST_RETRY_SECONDS: Final = 0.2


def apply_forever(
    applier: Applier,
    stop: threading.Event,
    published: Callable[[Snapshot], None] = lambda _: None,
    *,
    once: bool = False,
    rest_seconds: float = 0.0,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Apply until ``stop`` is set, or until nothing is waiting.

    Args:
        applier: the applier, not open.
        stop: set by another thread. A round in progress is finished.
        published: is told each published snapshot.
        once: end as soon as nothing is waiting, and at the first error.
        rest_seconds: after ``stop``, continue for at most this long until nothing is waiting.
        check: called before each round. If it raises, that counts as an error of the round.

    Raises:
        SubscriptionInUse: the lake has an applier.
        SubscriberError: an error that a retry does not fix.
    """
    applier.open()
    try:
        pause = _FIRST_RETRY_SECONDS
        end: float | None = None
        while True:
            # a round does not see what is landed while it runs: only a round that began after the stop shows that nothing is waiting
            if stopping := stop.is_set():
                now = time.monotonic()
                end = now + rest_seconds if end is None else end
                if now >= end:
                    return
            try:
                check()
                snapshot = applier.run_round()
                if snapshot is not None:
                    published(snapshot)
                applier.tidy(now=once and snapshot is None)
                pause = _FIRST_RETRY_SECONDS
            except SubscriberError as error:
                applier.failed(error)
                if once or isinstance(error, SubscriptionInUse) or not isinstance(error, TargetError):
                    raise
                if stopping:
                    return
                level = logging.WARNING if isinstance(error, TargetUnavailable) else logging.ERROR
                _log.log(level, "could not apply: %s; next attempt in %.1f s", error.one_line(), pause)
                stop.wait(pause)
                pause = min(pause * 2, _RETRY_SECONDS)
                continue
            if snapshot is None:
                if once or stopping:
                    return
                stop.wait(_LOOK_SECONDS)
    finally:
        applier.close()
