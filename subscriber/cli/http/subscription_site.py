"""What ``run --http`` serves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from subscriber.cli.http.sampler import Sampler, Subscriptions
from subscriber.cli.http.subscription_metrics import SubscriptionCollector
from subscriber.printable import printable

if TYPE_CHECKING:
    from aiohttp.web import AbstractRouteDef

__all__ = ["SubscriptionSite"]


class SubscriptionSite:
    """The subscriptions that this process runs."""

    def __init__(self, subscriptions: Subscriptions) -> None:
        self._subscriptions = subscriptions
        self._sampler = Sampler(subscriptions)
        self.collector = SubscriptionCollector(self._sampler)

    def unready(self) -> Sequence[str]:
        """A subscription is ready while it follows its slot, also during copies."""
        running = self._subscriptions()
        if not running:
            return ["no subscription runs"]
        reasons = []
        for name, subscription in running.items():
            status = subscription.status
            if status.retry is not None:
                reasons.append(f'subscription "{name}": attempt {status.retry.attempt} failed: {status.retry.error}')
            elif not status.streaming:
                reasons.append(f'subscription "{name}": {status.state.value}')
        return [printable(reason) for reason in reasons]

    def routes(self) -> Sequence[AbstractRouteDef]:
        return []

    async def work(self) -> None:
        await self._sampler.run()
