"""A TCP proxy that does faults to what passes through it.

It passes on whole messages of the server, and what the client sends as it comes. A fault is *armed*; the next message that it fits, or one
soon after that, is struck. Bytes are never lost or changed silently: what a fault damages is either found by any reader of the protocol, or
the connection ends with it. (PostgreSQL's protocol has no checksums, because TCP has: a flipped bit inside a value cannot be detected.)

Connections can also be frozen, as behind a firewall that has dropped them: both ends see neither data nor an end. And messages that no
server sends can be put into a stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from subscriber.testing.ports import LOOPBACK
from tests.support.framing import Framing, NoFraming
from tests.support.stream_state import StreamState

_CHUNK = 65536
_LARGE = 32 * 1024
_ORPHAN_SECONDS = 12.0
_BACKEND_KEY = b"K\x00\x00\x00\x0c"


class Then(Enum):
    """What happens to the connection after a fault."""

    GO_ON = auto()
    CLOSE = auto()
    """Both sides see the end of the stream."""
    RESET = auto()
    ORPHAN = auto()
    """The client sees a reset; the server sees nothing for a while, as with a lost network."""


@dataclass(frozen=True)
class Strike:
    """What a fault does with one message.

    Attributes:
        data: sent instead of it.
        pause: seconds of silence before that, in both directions.
        then: afterwards.
    """

    data: bytes
    pause: float = 0.0
    then: Then = Then.GO_ON


class Direction(Enum):
    """Of a message."""

    TO_CLIENT = auto()
    TO_SERVER = auto()


Make = Callable[[StreamState, bytes, random.Random], Strike | None]
"""Gives what to do with a message; None: the fault does not fit it."""


@dataclass
class Fault:
    """Something to be done once."""

    name: str
    make: Make
    direction: Direction = Direction.TO_CLIENT
    skip: int = 0


@dataclass
class Proxy:
    """Between the subscriber and one server. Used as a context manager; :func:`proxy_of` is one for blocking tests.

    Attributes:
        large_pause: seconds after each large chunk.
        pools: clients are told PIDs that are no session's, as by a pooler.
        struck: faults that happened, by name.
        links: connections now.
        accepted: how many connections there were.
    """

    host: str
    server_port: int
    framing: Callable[[], Framing] = NoFraming
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    log: Callable[[str], None] = print
    large_pause: float = 0.0
    pools: bool = False
    accepted: int = 0
    port: int = 0
    struck: Counter[str] = field(default_factory=Counter)
    armed: Fault | None = None
    outage: bool = False
    links: set[Link] = field(default_factory=set)
    calm: asyncio.Event = field(default_factory=asyncio.Event)
    _freezes: bool = False
    _tasks: dict[asyncio.Task[None], asyncio.StreamWriter] = field(default_factory=dict)
    _server: asyncio.Server | None = None

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._accepted, LOOPBACK, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.end_links()
        tasks = dict(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in tasks.values():
            _reset(writer)  # if its task was cancelled before it began
        await asyncio.gather(*(writer.wait_closed() for writer in tasks.values()), return_exceptions=True)

    def be_calm(self) -> None:
        """Do no more harm, and end what is damaged."""
        self.armed, self.outage = None, False
        self.calm.set()
        for link in list(self.links):
            if link.damaged:
                link.end()

    def begin_storm(self) -> None:
        """Harm may be done again."""
        self.calm.clear()

    def arm(self, fault: Fault) -> None:
        """Do this soon; a fault that was armed before and has not struck is dropped."""
        self.armed = fault

    def end_links(self) -> None:
        """Reset all connections."""
        for link in list(self.links):
            link.end()

    async def be_away(self, seconds: float) -> None:
        """Reset all connections, and take none for a while."""
        self.outage = True
        self.struck["outage"] += 1
        self.end_links()
        await self.pause(seconds)
        self.outage = False

    async def pause(self, seconds: float) -> None:
        """Seconds of a storm: they end with it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.calm.wait()

    def freeze(self, *, all_later: bool = False) -> None:
        """The connections of now forward nothing any more; new ones do, unless ``all_later``."""
        self._freezes |= all_later
        for link in list(self.links):
            link.frozen = True

    def inject(self, message: bytes) -> None:
        """Send a message to each client that streams, between two of the server's."""
        streams = [link for link in self.links if link.state.streaming]
        assert streams
        for link in streams:
            link.inject(message)

    def strike(self, link: Link, direction: Direction, data: bytes) -> Strike | None:
        """What is to be done with these bytes."""
        fault = self.armed
        if fault is None or fault.direction is not direction:
            return None
        found = fault.make(link.state, data, self.rng)
        if found is None:
            return None
        if fault.skip > 0:
            fault.skip -= 1
            return None
        self.armed = None
        self.struck[fault.name] += 1
        self.log(f"fault: {fault.name} ({link.state.describe(data)})")
        return found

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.outage:
            writer.transport.abort()
            return
        self.accepted += 1
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks[task] = writer
        task.add_done_callback(self._tasks.pop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            # cancelled by the end of the proxy alone: the loop would log a task that is cancelled
            with contextlib.suppress(OSError, asyncio.CancelledError):
                server_reader, server_writer = await asyncio.open_connection(self.host, self.server_port)
                link = Link(self, (reader, writer), (server_reader, server_writer))
                self.links.add(link)
                try:
                    await link.run()
                finally:
                    self.links.discard(link)
                    link.end()
        finally:
            _reset(writer)


def _reset(writer: asyncio.StreamWriter) -> None:
    """The other side sees a reset, unless it has been sent everything and the end."""
    # abort() of Python 3.11 fails if a closed transport has sent the rest of its buffer
    if not writer.transport.is_closing() or writer.transport.get_write_buffer_size():
        writer.transport.abort()


Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Link:
    """One connection through the proxy."""

    def __init__(self, proxy: Proxy, client: Ends, server: Ends) -> None:
        self.state = StreamState()
        self.damaged = False
        self.frozen = proxy._freezes
        self._proxy = proxy
        self._client_reader, self._client_writer = client
        self._server_reader, self._server_writer = server
        self._open = asyncio.Event()
        self._open.set()

    def end(self) -> None:
        """Reset both sides."""
        _reset(self._client_writer)
        _reset(self._server_writer)

    async def run(self) -> None:
        """Pass on until one side ends."""
        down = asyncio.create_task(self._to_client())
        up = asyncio.create_task(self._to_server())
        try:
            await asyncio.wait({down, up}, return_when=asyncio.FIRST_COMPLETED)
            if self.frozen:
                # the other side does not see the end either
                await asyncio.Event().wait()
        finally:
            for task in (down, up):
                task.cancel()
            await asyncio.gather(down, up, return_exceptions=True)
        # what the server said last still arrives
        with contextlib.suppress(OSError):
            self._client_writer.close()
            await self._client_writer.wait_closed()

    def inject(self, message: bytes) -> None:
        """Send a message of no server to the client. Only whole messages were written before."""
        self._client_writer.write(message)

    async def _may_pass(self, size: int) -> None:
        """Wait after a large chunk; without end, if the connection is frozen."""
        if self.frozen:
            await asyncio.Event().wait()
        if self._proxy.large_pause and size > _LARGE:
            await asyncio.sleep(self._proxy.large_pause)

    async def _to_client(self) -> None:
        framing, buffer = self._proxy.framing(), bytearray()
        writer = self._client_writer
        while data := await self._server_reader.read(_CHUNK):
            await self._may_pass(len(data))
            buffer += self._without_pid(data) if self._proxy.pools else data
            passed = bytearray()
            for message in framing.take(buffer):
                if self._proxy.armed is not None:
                    # the fault may inject messages, behind these
                    writer.write(passed)
                    passed = bytearray()
                found = self._proxy.strike(self, Direction.TO_CLIENT, message)
                if found is None:
                    passed += message
                elif not await self._carry_out(found, writer):
                    return
                self.state.observe(message)
            writer.write(passed)
            await self._open.wait()
            await writer.drain()
        writer.write(buffer)

    async def _to_server(self) -> None:
        while data := await self._client_reader.read(_CHUNK):
            await self._may_pass(len(data))
            await self._open.wait()
            found = self._proxy.strike(self, Direction.TO_SERVER, data)
            if found is None:
                self._server_writer.write(data)
            elif not await self._carry_out(found, self._server_writer):
                return
            await self._server_writer.drain()

    @staticmethod
    def _without_pid(data: bytes) -> bytes:
        place = data.find(_BACKEND_KEY)
        if place < 0:
            return data
        place += len(_BACKEND_KEY)
        return data[:place] + b"\x7f\xff\xff\xff" + data[place + 4 :]

    async def _carry_out(self, found: Strike, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection continues."""
        self.damaged = True
        if found.pause:
            self._open.clear()
            await self._proxy.pause(found.pause)
            self._open.set()
        writer.write(found.data)
        match found.then:
            case Then.GO_ON:
                return True
            case Then.CLOSE:
                return False
            case Then.RESET:
                await asyncio.wait_for(writer.drain(), 5)
                self.end()
                return False
            case Then.ORPHAN:
                _reset(self._client_writer)
                await self._proxy.pause(_ORPHAN_SECONDS)
                return False


class ThreadedProxy:
    """A proxy on an event loop of its own thread: the test's may be blocked."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(proxy.__aenter__(), self._loop).result()
        self.port = proxy.port

    def freeze(self, *, all_later: bool = False) -> None:
        """See :meth:`Proxy.freeze`."""

        async def freeze() -> None:
            self._proxy.freeze(all_later=all_later)

        asyncio.run_coroutine_threadsafe(freeze(), self._loop).result()

    def close(self) -> None:
        """End all connections. Idempotent."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._proxy.__aexit__(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


@contextlib.contextmanager
def proxy_of(host: str, port: int, *, large_pause: float = 0.0, pools: bool = False) -> Iterator[ThreadedProxy]:
    """One while the block lasts."""
    proxy = ThreadedProxy(Proxy(host, port, large_pause=large_pause, pools=pools))
    try:
        yield proxy
    finally:
        proxy.close()
