"""Damaged answers of the target: the session is lost, with an error of this package."""

from __future__ import annotations

import random

import asyncpg
import pytest
from psycopg.conninfo import conninfo_to_dict

from subscriber.errors import TargetUnavailable
from subscriber.sinks.postgres.session.catalog_reader import CatalogReader
from subscriber.testing.ports import LOOPBACK
from tests.support.database import Database
from tests.support.framing import PostgresFraming
from tests.support.proxy import Fault, Proxy, Strike, Then
from tests.support.stream_state import StreamState


def _damage(tag: bytes, damaged: bytes) -> Fault:
    """Another message instead of the next one with this tag."""

    def make(_state: StreamState, message: bytes, _rng: random.Random) -> Strike | None:
        return Strike(damaged, then=Then.CLOSE) if message[:1] == tag else None

    return Fault("damage", make)


@pytest.mark.parametrize(
    ("tag", "damaged"),
    [
        # asyncpg raised IndexError
        (b"T", b"T\0\0\0\4"),
        (b"T", b"T\0\0\0\x06\0\1"),
        (b"T", b"T\0\0\0\3"),
        (b"T", b"T\0\0\0\x08\xff\xff\0\0"),
        (b"t", b"t\0\0\0\x06\x7f\xff"),
        (b"D", b"D\0\0\0\x06\0\1"),
        (b"D", b"D\0\0\0\x0a\0\1\x7f\xff\xff\xff"),
        (b"C", b"C\0\0\0\4"),
        (b"Z", b"Z\0\0\0\4"),
        (b"1", b"?\0\0\0\4"),
    ],
)
async def test_a_damaged_message_is_a_lost_session(target_db: Database, tag: bytes, damaged: bytes) -> None:
    address = conninfo_to_dict(target_db.conninfo())
    async with Proxy(LOOPBACK, int(str(address["port"])), PostgresFraming) as proxy:
        connection = await asyncpg.connect(
            host=LOOPBACK, port=proxy.port, user=str(address["user"]), password=str(address["password"]), database=target_db.name, ssl=False
        )
        reader = CatalogReader(connection)
        proxy.arm(_damage(tag, damaged))
        with pytest.raises(TargetUnavailable):
            await reader.fetch("SELECT $1::text[] AS texts, 1 AS number", ["a"])
        assert proxy.struck["damage"] == 1
        with pytest.raises(TargetUnavailable, match="was lost"):
            await reader.fetch("SELECT 1")
