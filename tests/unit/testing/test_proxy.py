"""The proxy of the tests."""

from __future__ import annotations

import asyncio
import socket

from subscriber.testing.ports import LOOPBACK
from tests.support.proxy import Link, Proxy

SIZE = 4 * 1024 * 1024


async def test_end_of_a_link_that_has_sent_the_rest() -> None:
    """The bug was an AttributeError of the event loop."""
    outside, inside = zip(socket.socketpair(), socket.socketpair(), strict=True)
    client, server = [await asyncio.open_connection(sock=each) for each in inside]
    link = Link(Proxy(LOOPBACK, 0), client, server)
    # more than the sockets hold
    client[1].write(bytes(SIZE))
    client[1].close()
    reader, writer = await asyncio.open_connection(sock=outside[0])
    assert len(await reader.read(-1)) == SIZE
    await client[1].wait_closed()
    link.end()
    await server[1].wait_closed()
    assert outside[1].recv(1) == b""
    writer.close()
    outside[1].close()
