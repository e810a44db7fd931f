"""A proxy before a publisher that puts frames into a replication stream which no server sends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from struct import Struct

from subscriber.protocol.frames import PrimaryKeepalive, encode_frame
from subscriber.protocol.lsn import Lsn
from tests.support.database import Database

__all__ = ["Injector", "injector"]

_HEADER = Struct(">cI")
_COPY_BOTH = b"W"


class Injector:
    """Passes on what client and server say, message by message, and remembers the sessions that stream.

    Attributes:
        conninfo: of the publisher, through here.
        sessions: how many sessions there were.
    """

    def __init__(self, publisher: Database) -> None:
        with contextlib.closing(publisher.connect()) as session:
            self._host, self._port = session.info.hostaddr or session.info.host, session.info.port
        self._streams: list[asyncio.StreamWriter] = []
        self._sessions: set[asyncio.Task[None]] = set()
        self.sessions = 0
        self.conninfo = ""

    @property
    def streaming(self) -> bool:
        """Whether a session streams now."""
        return bool(self._streams)

    def inject(self, frame: bytes) -> None:
        """Send one CopyData to each client that streams, between two of the server's."""
        assert self.streaming
        for writer in self._streams:
            writer.write(_HEADER.pack(b"d", len(frame) + 4) + frame)

    def keepalive(self, lsn: Lsn) -> None:
        """Send a keepalive with this WAL end."""
        self.inject(encode_frame(PrimaryKeepalive(lsn, 0, False)))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._sessions.add(task)
        self.sessions += 1
        server_reader, server_writer = await asyncio.open_connection(self._host, self._port)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_pass_on(reader, server_writer))
                group.create_task(self._answers(server_reader, writer))
        except* ConnectionError:
            pass
        finally:
            writer.close()
            server_writer.close()
            self._sessions.discard(task)

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(asyncio.IncompleteReadError):
                while True:
                    header = await reader.readexactly(_HEADER.size)
                    tag, length = _HEADER.unpack(header)
                    writer.write(header + await reader.readexactly(length - 4))
                    if tag == _COPY_BOTH:
                        self._streams.append(writer)
                    await writer.drain()
        finally:
            if writer in self._streams:
                self._streams.remove(writer)
            writer.close()

    async def close(self) -> None:
        for task in self._sessions:
            task.cancel()
        await asyncio.gather(*self._sessions, return_exceptions=True)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def injector(publisher: Database) -> AsyncIterator[Injector]:
    """A proxy while the block lasts. TLS is off: it reads along."""
    found = Injector(publisher)
    server = await asyncio.start_server(found.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    found.conninfo = publisher.conninfo(host="127.0.0.1", hostaddr="127.0.0.1", port=str(port), sslmode="disable", gssencmode="disable")
    try:
        yield found
    finally:
        server.close()
        await found.close()
