"""What ``run --http`` serves: the page, its JSON, metrics and probes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from subscriber.apply.tasks import task_group
from subscriber.catalog import Definition
from subscriber.cli.http.actions import Actions
from subscriber.cli.http.overview import describe, error_of, known, table_rows
from subscriber.cli.http.sampler import Sampler, Subscriptions, answer_of
from subscriber.cli.http.subscription_metrics import SubscriptionCollector
from subscriber.errors import SubscriberError
from subscriber.printable import printable
from subscriber.subscription.targets import opened_catalog

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
        actions: on them; None: the command line defines the subscription.
    """

    def __init__(self, subscriptions: Subscriptions, actions: Actions | None = None) -> None:
        self._subscriptions = subscriptions
        self._actions = actions
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
        async with task_group() as group:
            group.create_task(self._sampler.run())
            if self._actions is not None:
                group.create_task(self._look_at_definitions(self._actions))

    async def _look_at_definitions(self, actions: Actions) -> None:
        """The catalogs also have subscriptions that do not run."""
        known: dict[str, Sequence[Definition]] = {}
        while True:
            failure: SubscriberError | None = None
            targets = actions.launched()
            for target in targets:
                try:
                    async with asyncio.timeout(_TARGET_SECONDS):
                        async with opened_catalog(target, "subscriber status") as catalog:
                            known[target] = await catalog.subscriptions()
                except (SubscriberError, OSError) as error:
                    failure = answer_of("the target", error, _TARGET_SECONDS)
            known = {target: known[target] for target in targets if target in known}
            self._definitions = [each for found in known.values() for each in found]
            actions.defined = {each.name: target for target, found in known.items() for each in found}
            self._target_error = failure
            await asyncio.sleep(_DEFINITIONS_SECONDS)

    def _overview(self) -> bytes:
        now = time.monotonic()
        if self._made is None or now - self._made[0] > _FRESH_SECONDS:
            self._made = now, json.dumps(self._values()).encode()
        return self._made[1]

    def _values(self) -> Mapping[str, Any]:
        running = self._subscriptions()
        found = [describe(name, each.status, self._sampler.of(name)) for name, each in running.items()]
        idle = {each.name: _idle(each) for each in self._definitions if each.name not in running}
        for name in () if self._actions is None else self._actions.idle(running):
            # the catalog of its target may not be read, or not know it yet
            each = idle.setdefault(name, {"name": printable(name), "running": False, "enabled": True, "failing": False})
            each["state"] = "paused" if each["enabled"] else each["state"]
        found += idle.values()
        for each in found:
            each["can"] = self._actions.of(each["name"]) if self._actions is not None else ()
        return {
            "time": time.time(),
            "actions": self._actions is not None and self._actions.allowed,
            "target_error": known(error_of, self._target_error),
            "log": [] if self._actions is None else list(self._actions.log),
            "subscriptions": sorted(found, key=lambda one: str(one["name"])),
        }


def _idle(definition: Definition) -> dict[str, Any]:
    idle = "not running" if definition.enabled else "disabled"
    state = "defined by its command line or configuration file" if definition.conninfo is None else idle
    return {"name": printable(definition.name), "running": False, "enabled": definition.enabled, "state": state, "failing": False}
