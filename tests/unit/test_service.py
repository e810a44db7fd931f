"""The subscriptions of a configuration file in one process."""

from __future__ import annotations

import asyncio

from subscriber.config.file.configuration import parse_configuration
from subscriber.subscription.service import Service

FILE = """
[targets.copy]
url = "postgresql://127.0.0.1:1/none"
[subscriptions.move]
connection = "host=127.0.0.1 port=1"
publications = ["pub"]
target = "copy"
"""


async def test_subscription_stays_stopped_until_the_last_one_releases_it() -> None:
    service = Service({}, {})
    service.configure(parse_configuration(FILE, lambda reference: reference))

    async def until(running: bool) -> None:
        async with asyncio.timeout(10):
            while bool(service.subscriptions) is not running:
                await asyncio.sleep(0.01)

    # the page serves before the service runs
    with service.held("move"):
        run = asyncio.create_task(service.run())
        await asyncio.sleep(0.2)
        assert not service.subscriptions
    await until(running=True)
    with service.held("move"):
        with service.held("move"):
            await until(running=False)
        await asyncio.sleep(0.2)
        assert not service.subscriptions
    await until(running=True)
    service.stop()
    await run
