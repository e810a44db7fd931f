"""Reading a replication stream in a test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from subscriber.config import SubscriptionOptions
from subscriber.protocol.capabilities import negotiate
from subscriber.protocol.decoder import decode
from subscriber.protocol.frames import PrimaryKeepalive, StandbyStatusUpdate, XLogData, decode_frame, encode_frame
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Commit, Message
from subscriber.walreceiver.connection import WalReceiverConnection
from subscriber.walreceiver.stream import WalSenderStream
from tests.support.database import Database

DEADLINE = 30.0


async def start(
    database: Database, slot: str, publication: str = "p", *, lsn: Lsn | None = None, conninfo: str | None = None
) -> WalSenderStream:
    connection = await WalReceiverConnection.connect(conninfo or database.dsn, application_name=slot)
    try:
        options = SubscriptionOptions(streaming="off")
        wanted = negotiate(connection.capabilities, options, publications=[publication], two_phase=False)
        return await connection.start_replication(slot, lsn or Lsn(0), wanted)
    except BaseException:
        await connection.close()
        raise


@contextlib.asynccontextmanager
async def streaming(
    database: Database, slot: str, publication: str = "p", *, conninfo: str | None = None
) -> AsyncIterator[WalSenderStream]:
    stream = await start(database, slot, publication, conninfo=conninfo)
    try:
        yield stream
    finally:
        await stream.close()


async def collect(stream: WalSenderStream, enough: Callable[[list[Message]], bool]) -> list[Message]:
    """Decode what comes until ``enough``."""
    messages: list[Message] = []
    async with asyncio.timeout(DEADLINE):
        while not enough(messages):
            for data in await stream.receive():
                frame = decode_frame(data)
                if isinstance(frame, XLogData):
                    messages.append(decode(bytes(frame.payload)))
    return messages


async def transactions(stream: WalSenderStream, count: int) -> list[Message]:
    return await collect(stream, lambda messages: sum(isinstance(message, Commit) for message in messages) >= count)


async def keepalive(stream: WalSenderStream) -> PrimaryKeepalive:
    """The last keepalive of the next messages that hold one. Changes on the way are dropped."""
    async with asyncio.timeout(DEADLINE):
        while True:
            frames = [decode_frame(data) for data in await stream.receive()]
            found = [frame for frame in frames if isinstance(frame, PrimaryKeepalive)]
            if found:
                return found[-1]


def status(lsn: Lsn, *, reply: bool = False) -> bytes:
    return encode_frame(StandbyStatusUpdate(lsn, lsn, lsn, 0, reply))
