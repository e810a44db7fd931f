"""Keep one subscription running: an attempt that ends with an error is repeated, until the subscription is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from subscriber.apply.retry import Backoff, policy
from subscriber.config import Settings
from subscriber.errors import SubscriberError, SubscriptionChanged, SubscriptionInUse, TargetUnavailable
from subscriber.interfaces import Retry, WorkerDetails, WorkerState
from subscriber.log_fields import error_fields
from subscriber.repeated_errors import RepeatedErrors
from subscriber.subscription.subscription import Subscription
from subscriber.subscription.targets import opened_catalog

__all__ = ["details_of", "keep_running", "note_error", "wait"]

_log = logging.getLogger(__name__)

_NOTE_SECONDS: Final = 2.0


async def keep_running(
    subscription: Subscription,
    settings: Settings,
    stopping: asyncio.Event,
    failed: Callable[[SubscriberError, Retry | None], Awaitable[None]],
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
                await failed(error, None)
                return error
            pause, text = backoff.pause(reaction), error.one_line()
            subscription.note_retry(retry := Retry(text, failures, time.time() + pause))
            fields = error_fields(error, subscription=subscription.name, attempt=failures)
            errors.tell(reaction.level, text, f'subscription "{subscription.name}": {text}; next attempt in {pause:.1f} s', fields)
            await failed(error, retry)
            await wait(stopping, pause)
    return None


def details_of(subscription: Subscription, retry: Retry) -> str:
    """What the catalog shows of a subscription between two runs."""
    return WorkerDetails(state=WorkerState.RETRYING, retry=retry, left_out=subscription.status.left_out).to_json()


async def note_error(subscription: Subscription, target: str, error: SubscriberError, retry: Retry | None) -> None:
    """Let the catalog show an error of a run, which had no session with the target to report it. Only if the target answers at once."""
    if isinstance(error, TargetUnavailable | SubscriptionInUse):
        return
    with contextlib.suppress(SubscriberError, OSError):  # OSError: also TimeoutError
        async with asyncio.timeout(_NOTE_SECONDS):
            async with opened_catalog(target, "subscriber run") as catalog:
                for each in await catalog.subscriptions():
                    if each.name == subscription.name:
                        await catalog.note_error(each.oid, error.one_line(), None if retry is None else details_of(subscription, retry))


async def wait(event: asyncio.Event, seconds: float) -> None:
    """Wait for the event, but no longer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
