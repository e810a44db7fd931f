"""Other clients follow the fake publisher: pg_recvlogical and psycopg2's replication cursor."""

from __future__ import annotations

import asyncio
import json
import subprocess
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psycopg2
import psycopg2.extras
import pytest

from subscriber.protocol.lsn import Lsn
from subscriber.testing.binaries import reachable_binaries, server_user
from subscriber.testing.fake_publisher import FakePublisher


def items(version: int) -> FakePublisher:
    publisher = FakePublisher(version)
    publisher.create_table("items", {"id": "int", "name": "text"}, key=["id"])
    publisher.create_publication("app", "items")
    return publisher


async def pg_recvlogical(publisher: FakePublisher, version: int, *arguments: str) -> str:
    """Run it to its end; return its standard output."""
    program = reachable_binaries(version, server_user()) / "pg_recvlogical"
    if not program.exists():
        # the servers that `make test-matrix` downloads come without clients
        program = Path(f"/usr/lib/postgresql/{version}/bin/pg_recvlogical")
    process = await asyncio.create_subprocess_exec(
        program, "--dbname", publisher.dsn(), "--slot", "s", *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0, err.decode()
    return out.decode()


@pytest.mark.parametrize(("client", "version"), [(15, 13), (15, 15), (18, 16), (18, 18)])
async def test_pg_recvlogical(client: int, version: int) -> None:
    async with items(version) as publisher:
        await pg_recvlogical(publisher, client, "--create-slot", "--plugin", "test_decoding")
        async with publisher.transaction() as t:
            t.insert("items", id=1, name="it's")
            t.update("items", {"id": 1}, name=None)
        middle = t.end_lsn
        async with publisher.transaction() as t:
            t.delete("items", {"id": 1})
        options = ("--start", "--file", "-", "--no-loop", "--option", "include-xids=0", "--option", "skip-empty-xacts")
        first = [
            "BEGIN",
            "table public.items: INSERT: id[integer]:1 name[text]:'it''s'",
            "table public.items: UPDATE: id[integer]:1 name[text]:null",
            "COMMIT",
        ]
        second = ["BEGIN", "table public.items: DELETE: id[integer]:1", "COMMIT"]
        found = await pg_recvlogical(publisher, client, *options, "--endpos", str(middle))
        assert found.splitlines() == first
        assert publisher.slots["s"].confirmed_flush_lsn == middle
        found = await pg_recvlogical(publisher, client, *options, "--endpos", str(publisher.wal.end))
        assert found.splitlines() == second
        await pg_recvlogical(publisher, client, "--drop-slot")
        assert publisher.slots == {}


async def consume(publisher: FakePublisher, options: dict[str, str], last: Lsn) -> list[bytes]:
    """Follow a slot with psycopg2, and confirm each message up to the one at ``last``."""
    loop = asyncio.get_running_loop()
    found: list[bytes] = []

    def take(message: Any) -> None:
        found.append(message.payload)
        message.cursor.send_feedback(flush_lsn=message.data_start)
        if message.data_start >= last:
            raise psycopg2.extras.StopReplication

    def follow() -> None:
        connection = psycopg2.connect(publisher.dsn(), connection_factory=psycopg2.extras.LogicalReplicationConnection)
        with closing(connection), connection.cursor() as cursor:
            cursor.start_replication("s", options=options, decode=False)
            with suppress(psycopg2.extras.StopReplication):
                cursor.consume_stream(take)
            cursor.send_feedback(force=True)  # type: ignore[no-untyped-call]
            # a feedback directly before the end of the connection may be lost
            asyncio.run_coroutine_threadsafe(publisher.until_confirmed("s", last), loop).result(30)

    await asyncio.to_thread(follow)
    return found


@pytest.mark.parametrize("version", [13, 18])
async def test_psycopg2_replication_cursor(version: int) -> None:
    async with items(version) as publisher:
        await publisher.create_slot("s")
        ends = []
        for id in range(3):
            async with publisher.transaction() as t:
                t.insert("items", id=id, name="x")
            ends.append(t.end_lsn)
        options = {"proto_version": "1", "publication_names": "app"}
        assert "".join(chr(payload[0]) for payload in await consume(publisher, options, ends[1])) == "BRICBIC"
        assert "".join(chr(payload[0]) for payload in await consume(publisher, options, ends[2])) == "BRIC"


async def test_psycopg2_with_wal2json() -> None:
    async with items(16) as publisher:
        await publisher.create_slot("s", "wal2json")
        async with publisher.transaction() as t:
            t.insert("items", id=1, name="x")
        payloads = await consume(publisher, {"format-version": "1"}, t.end_lsn)
        (change,) = json.loads(payloads[0])["change"]
        assert (change["kind"], change["columnvalues"]) == ("insert", [1, "x"])
