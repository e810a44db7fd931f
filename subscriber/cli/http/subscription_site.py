"""What ``run --http`` serves: the page, its JSON, metrics and probes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from subscriber.catalog import Definition
from subscriber.cli.http.actions import Actions
from subscriber.cli.http.overview import describe, error_of, table_rows
from subscriber.cli.http.sampler import Sampler, Subscriptions
from subscriber.cli.http.subscription_metrics import SubscriptionCollector
from subscriber.errors import SubscriberError
from subscriber.printable import printable
from subscriber.subscription.targets import open_catalog

if TYPE_CHECKING:
    from aiohttp import web

__all__ = ["SubscriptionSite"]

_STATIC: Final = Path(__file__).parent / "static"
_FILES: Final = {"/": ("page.html", "text/html"), "/page.css": ("page.css", "text/css"), "/page.js": ("page.js", "text/javascript")}
_FRESH_SECONDS: Final = 1.0
"""The overview is made at most once in so many seconds, however many clients there are."""
_DEFINITIONS_SECONDS: Final = 15.0
_TARGET_SECONDS: Final = 5.0
_TABLES: Final = 100


class SubscriptionSite:
    """The subscriptions that this process runs.

    Args:
        subscriptions: those that run now.
        actions: of the target whose catalog defines them; None: the command line defines the subscription.
        target: of a launcher; its catalog also has subscriptions that do not run.
    """

    def __init__(self, subscriptions: Subscriptions, actions: Actions | None = None, target: str | None = None) -> None:
        self._subscriptions = subscriptions
        self._actions = actions
        self._target = target
        self._sampler = Sampler(subscriptions)
        self._definitions: Sequence[Definition] = ()
        self._target_error: SubscriberError | None = None
        self._made: tuple[float, bytes] | None = None
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

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        from aiohttp import web  # noqa: PLC0415 -- an optional dependency

        def file(name: str, kind: str) -> Callable[[web.Request], Awaitable[web.Response]]:
            content = (_STATIC / name).read_bytes()

            async def send(_: web.Request) -> web.Response:
                return web.Response(body=content, content_type=kind, charset="utf-8")

            return send

        async def overview(_: web.Request) -> web.Response:
            return web.Response(body=self._overview(), content_type="application/json")

        async def tables(request: web.Request) -> web.Response:
            query = request.query
            found = self._subscriptions().get(query.get("subscription", ""))
            if found is None:
                return web.json_response({"error": "this subscription does not run"}, status=404)
            offset = int(query["offset"]) if query.get("offset", "").isascii() and query.get("offset", "").isdecimal() else 0
            rows = table_rows(
                found.status, search=query.get("search", "")[:200], problems="problems" in query, offset=min(offset, 10**6), limit=_TABLES
            )
            return web.json_response(rows)

        async def act(request: web.Request) -> web.Response:
            if self._actions is None:
                return web.json_response({"error": "the command line of `subscriber run` defines this subscription"}, status=403)
            return await self._actions.answer(request)

        async def no_icon(_: web.Request) -> web.Response:
            return web.Response(status=204)

        pages = [web.get("/favicon.ico", no_icon), *(web.get(path, file(*each)) for path, each in _FILES.items())]
        return [*pages, web.get("/api/overview", overview), web.get("/api/tables", tables), web.post("/api/action", act)]

    async def work(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._sampler.run())
            if self._target is not None:
                group.create_task(self._look_at_definitions(self._target))

    async def _look_at_definitions(self, target: str) -> None:
        while True:
            try:
                async with asyncio.timeout(_TARGET_SECONDS):
                    catalog = await open_catalog(target, "subscriber status")
                    try:
                        self._definitions, self._target_error = await catalog.subscriptions(), None
                    finally:
                        await catalog.close()
            except SubscriberError as error:
                self._target_error = error
            except TimeoutError:
                self._target_error = SubscriberError(f"the target did not answer within {_TARGET_SECONDS:g} s")
            await asyncio.sleep(_DEFINITIONS_SECONDS)

    def _overview(self) -> bytes:
        now = time.monotonic()
        if self._made is None or now - self._made[0] > _FRESH_SECONDS:
            self._made = now, json.dumps(self._values()).encode()
        return self._made[1]

    def _values(self) -> Mapping[str, Any]:
        running = self._subscriptions()
        found = [describe(name, each.status, self._sampler.of(name)) for name, each in running.items()]
        found += [_idle(each) for each in self._definitions if each.name not in running]
        return {
            "time": time.time(),
            "actions": self._actions is not None and self._actions.allowed,
            "managed": self._actions is not None,
            "target_error": None if self._target_error is None else error_of(self._target_error),
            "log": [] if self._actions is None else list(self._actions.log),
            "subscriptions": sorted(found, key=lambda one: str(one["name"])),
        }


def _idle(definition: Definition) -> dict[str, Any]:
    idle = "not running" if definition.enabled else "disabled"
    state = "defined by its command line" if definition.conninfo is None else idle
    return {"name": printable(definition.name), "running": False, "enabled": definition.enabled, "state": state, "failing": False}
