"""Keep one subscription running: an attempt that ends with an error is repeated, until the subscription is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from subscriber.apply.retry import Backoff, policy
from subscriber.config import Settings
from subscriber.errors import SubscriberError, SubscriptionChanged
from subscriber.interfaces import Retry
from subscriber.log_fields import error_fields
from subscriber.repeated_errors import RepeatedErrors
from subscriber.subscription.subscription import Subscription

__all__ = ["keep_running", "wait"]

_log = logging.getLogger(__name__)


async def keep_running(
    subscription: Subscription,
    settings: Settings,
    stopping: asyncio.Event,
    failed: Callable[[SubscriberError, Retry | None], None] = lambda error, retry: None,
) -> SubscriberError | None:
    """Run a subscription until it is stopped. A transient error is retried almost at once, others as PostgreSQL's launcher does.

    Args:
        subscription: to run.
        settings: for the pauses.
        stopping: set together with ``subscription.stop()``.
        failed: is told about each error that ended an attempt. Without a next attempt: ``on_error = disable`` ended it.

    Returns:
        None after it was stopped; the error that disabled it; or SubscriptionChanged, if a verb altered it meanwhile.
    """
    backoff, failures, errors = Backoff(settings), 0, RepeatedErrors(_log)
    clock = asyncio.get_running_loop()
    while not stopping.is_set():
        began = clock.time()
        try:
            await subscription.run()
        except SubscriptionChanged as error:
            _log.info('subscription "%s": %s', subscription.name, error)
            return error
        except SubscriberError as error:
            if clock.time() - began > settings.wal_retrieve_retry_interval:
                backoff.reset()
                failures = 0
            failures += 1
            reaction = policy(error)
            if subscription.disabled_by is not None:
                failed(error, None)
                return error
            pause = backoff.pause(reaction)
            failed(error, Retry(error.one_line(), failures, time.time() + pause))
            text = error.one_line()
            fields = error_fields(error, subscription=subscription.name, attempt=failures)
            errors.tell(reaction.level, text, f'subscription "{subscription.name}": {text}; next attempt in {pause:.1f} s', fields)
            await wait(stopping, pause)
    return None


async def wait(event: asyncio.Event, seconds: float) -> None:
    """Wait for the event, but no longer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
