"""The server: one thread, one event loop, bounded numbers and lives of connections.

Replication has the main thread's loop. This thread only reads values that replication has anyway, so a client that is slow, or many
clients, cost it nothing but their share of the processor. Each connection has one request and a limited life. If there are too many
connections, the oldest ones end. So what a client can hold is bounded: a socket, a buffer, some seconds.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from subscriber.cli.http.site import Site, worked

__all__ = ["ServerThread"]

_log = logging.getLogger(__name__)

_LIFE_SECONDS: Final = 20.0
"""How long a connection may last, whatever its client does."""
_CONNECTIONS: Final = 256
_LARGEST_BODY: Final = 16_384
_FOR_MACHINES: Final = frozenset({"/metrics", "/healthz", "/readyz"})
_ALIVE_SECONDS: Final = 5.0
"""How long the main thread's event loop may take to answer ``/healthz``."""
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class ServerThread:
    """Serves a site between :meth:`start` and :meth:`stop`, which the thread of the main event loop calls."""

    def __init__(self, host: str, port: int, site: Site) -> None:
        self._host, self._port, self._site = host, port, site
        self._main = asyncio.get_running_loop()
        self._started: Future[None] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None
        self._defect: str | None = None
        self._names = {"localhost", host.lower(), socket.gethostname().lower()}
        self._looked_up = False
        self._thread = threading.Thread(target=self._serve, name="http", daemon=True)

    def _serve(self) -> None:
        try:
            asyncio.run(self._run())
        except Exception as error:
            if self._started.done():
                raise
            self._started.set_exception(error)  # to the caller of start, which waits for it

    def start(self) -> None:
        """Start the thread, and listen.

        Raises:
            OSError: the address is in use, or not this machine's.
        """
        self._thread.start()
        self._started.result()

    def stop(self) -> None:
        """End all connections and the thread."""
        assert self._loop is not None
        assert self._end is not None
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    async def _run(self) -> None:
        logging.getLogger("aiohttp.server").addFilter(_is_ours)
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(middlewares=[_answered, self._known_host], client_max_size=_LARGEST_BODY)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._site.collector)

        async def metrics(request: web.Request) -> web.Response:
            encode, kind = choose_encoder(request.headers.get("Accept", ""))
            return web.Response(body=encode(registry), headers={"Content-Type": kind})

        app.router.add_get("/metrics", metrics)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_routes(self._site.routes())
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        tasks: list[asyncio.Task[None]] = []
        try:
            site = web.TCPSite(runner, self._host, self._port, backlog=_CONNECTIONS)
            try:
                await site.start()
            except OSError as error:
                self._started.set_exception(error)
                return
            host = f"[{self._host}]" if ":" in self._host else self._host
            for address in runner.addresses[:1]:
                _log.info("serving metrics at http://%s:%d/metrics", host, address[1])
            self._started.set_result(None)
            tasks = [asyncio.create_task(_limit(runner)), asyncio.create_task(self._work())]
            await self._end.wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await runner.cleanup()

    @web.middleware
    async def _known_host(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Refuse a name that is not ours: a site that lets its own name point to this machine could read all in its visitors' browsers.

        Prometheus and probes may use any name: what they read is for machines.
        """
        name = _without_port(request.headers.get("Host", "localhost"))
        if request.path not in _FOR_MACHINES and not _is_address(name) and name not in self._names:
            if not self._looked_up:
                self._looked_up = True
                # may ask a DNS server, so only if it is needed
                self._names.add((await asyncio.to_thread(socket.getfqdn)).lower())
            if name not in self._names:
                text = "this is not the name of this server: use its address, its own name, or localhost; a proxy sends Host: localhost\n"
                return web.Response(status=421, text=text)
        return await handler(request)

    async def _work(self) -> None:
        """Let the site look at the servers. If a defect ends this, ``/healthz`` tells it."""
        self._defect = await worked(self._site)

    async def _healthz(self, request: web.Request) -> web.Response:
        """Whether the program works: its main event loop answers, and what this server shows is not old."""
        if self._defect is not None:
            return web.Response(status=503, text=f"the page and the metrics show old values: {self._defect}; start the program again\n")
        answered = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_nothing(), self._main))
        try:
            async with asyncio.timeout(_ALIVE_SECONDS):
                await answered
        except TimeoutError:
            return web.Response(status=503, text=f"the program did not answer within {_ALIVE_SECONDS:g} s\n")
        return web.Response(text="ok\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        reasons = self._site.unready()
        return web.Response(status=503 if reasons else 200, text="".join(f"{reason}\n" for reason in reasons) or "ok\n")


def _without_port(host: str) -> str:
    name, _, port = host.lower().rpartition(":")
    return (name if name and port.isdecimal() else host.lower()).rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether an error is one of this program. A client that does not speak HTTP is told so, and must not fill the log."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


async def _nothing() -> None:
    pass


@web.middleware
async def _answered(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
    """Answer once on each connection. An unexpected error of a handler ends its request: aiohttp logs it, and answers 500."""
    try:
        response = await handler(request)
    except web.HTTPException as error:
        response = web.Response(status=error.status, text=f"{error.reason}\n", headers=_allowed(error))
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)
    response.force_close()
    return response


def _allowed(error: web.HTTPException) -> dict[str, str]:
    return {name: error.headers[name] for name in ("Allow", "Location") if name in error.headers}


async def _limit(runner: web.AppRunner) -> None:
    """End connections that are too old, and the oldest ones if there are too many."""
    clock, seen = asyncio.get_running_loop().time, dict[Any, float]()
    while True:
        connections = runner.server.connections if runner.server is not None else []
        seen = {each: seen.get(each, clock()) for each in connections}
        oldest = sorted(seen, key=seen.__getitem__)
        for number, each in enumerate(oldest):
            if number < len(oldest) - _CONNECTIONS or clock() - seen[each] > _LIFE_SECONDS:
                transport = getattr(each, "transport", None)
                if transport is not None:
                    transport.abort()
        await asyncio.sleep(0.5)
