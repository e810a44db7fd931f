"""A server that wants to learn a password: it asks for it in cleartext or with MD5, or pretends that it needs none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from psycopg.conninfo import conninfo_to_dict

from subscriber import PublisherError, SubscriberError, TargetError
from subscriber.protocol.conninfo import StoredConninfo
from subscriber.sinks.postgres.session.authentication import connect_asyncpg
from subscriber.sinks.postgres.session.target import Target, asyncpg_arguments
from subscriber.walreceiver.session import Session
from tests.support.database import Database

SECRET = "the-secret-of-this-host"
ASKS = {
    "cleartext": b"R\0\0\0\x08\0\0\0\x03",
    "md5": b"R\0\0\0\x0c\0\0\0\x05salt",
    # nothing is asked: whoever answers like this need not know the password
    "none": b"R\0\0\0\x08\0\0\0\0" + b"S\0\0\0\x16server_version\00018\0" + b"K\0\0\0\x0c\0\0\0\x01\0\0\0\x01" + b"Z\0\0\0\x05I",
}


@contextlib.asynccontextmanager
async def evil_server(asks: bytes) -> AsyncIterator[tuple[int, bytearray]]:
    """A server that rejects TLS and then asks this. It gives its port, and what it is told after that."""
    told = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                size = int.from_bytes(await reader.readexactly(4), "big")
                if int.from_bytes((await reader.readexactly(size - 4))[:4], "big") >> 16 == 3:
                    break
                writer.write(b"N")
            writer.write(asks)
            while data := await reader.read(1000):
                told.extend(data)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], told


@pytest.mark.parametrize("asks", ASKS)
async def test_password_is_not_given(asks: str) -> None:
    async with evil_server(ASKS[asks]) as (port, told):
        conninfo = f"host=127.0.0.1 port={port} user=u dbname=d password={SECRET}"
        with pytest.raises(PublisherError, match="authentication method requirement"):
            await Session.connect(conninfo, application_name="test")
        with pytest.raises(TargetError, match="authentication method requirement"):
            await Target(conninfo).connect("test")
        parameters = {name: str(value) for name, value in conninfo_to_dict(conninfo).items()}
        with pytest.raises(TargetError, match="authentication method requirement"):
            await connect_asyncpg(asyncpg_arguments(parameters, "test"), "scram-sha-256")
        assert not [byte for byte in (b"p" + b"\0", SECRET.encode(), b"md5") if byte in told], told


async def test_evil_row_gets_no_password_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    # the bug was that whoever could write a row of pg_subscription got the launcher's PGPASSWORD, in cleartext if he asked for it
    monkeypatch.setenv("PGPASSWORD", SECRET)
    async with evil_server(ASKS["cleartext"]) as (port, told):
        for more in ("", " require_auth=password"):
            with pytest.raises(SubscriberError):
                await Session.connect(StoredConninfo(f"host=127.0.0.1 port={port} user=u dbname=d{more}"), application_name="test")
        assert SECRET.encode() not in told


async def test_method_that_the_user_allows(publisher18_db: Database) -> None:
    """Both drivers, on a real server: ``require_auth`` of the connection string counts."""
    async with await Target(publisher18_db.conninfo()).connect("test") as like:
        reader = await Target(publisher18_db.conninfo()).connect_asyncpg(like, "test")
        await reader.close()
    for refused in ("md5", "none", "!scram-sha-256"):
        with pytest.raises(TargetError, match="authentication method requirement"):
            await Target(publisher18_db.conninfo(require_auth=refused)).connect("test")
        parameters = {name: str(value) for name, value in conninfo_to_dict(publisher18_db.conninfo()).items()}
        with pytest.raises(TargetError, match="authentication method requirement"):
            await connect_asyncpg(asyncpg_arguments(parameters, "test"), refused)
