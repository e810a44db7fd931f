"""Numbers of a publisher that cannot be right: nothing is lost, and the position does not follow them."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable

import pytest

from subscriber import DataLossError, ProtocolError
from subscriber.protocol.encoder import encode
from subscriber.protocol.frames import PrimaryKeepalive, XLogData, encode_frame
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Begin, Commit
from subscriber.testing.ports import LOOPBACK
from tests.support.database import Database
from tests.support.framing import PostgresFraming
from tests.support.observation import acknowledged, all_ready, confirmed, eventually, until
from tests.support.proxy import Proxy
from tests.support.replica import Replica, replica, subscription_of

ROWS = "SELECT id FROM t ORDER BY id"
POSITION = 'SELECT remote_lsn::text FROM subscriber."position" WHERE srrelid = 0'
MAX = Lsn(0xFFFF_FFFF_FFFF_FFFF)


class Injector:
    """Sends a client that streams from the publisher what no server sends.

    Attributes:
        conninfo: of the publisher, through the proxy.
    """

    def __init__(self, proxy: Proxy, publisher: Database) -> None:
        self._proxy = proxy
        address = {"host": proxy.host, "hostaddr": proxy.host, "port": str(proxy.port)}
        self.conninfo = publisher.conninfo(**address, sslmode="disable", gssencmode="disable")

    @property
    def sessions(self) -> int:
        return self._proxy.accepted

    def inject(self, frame: bytes) -> None:
        self._proxy.inject(b"d" + (len(frame) + 4).to_bytes(4) + frame)

    def keepalive(self, lsn: Lsn) -> None:
        self.inject(encode_frame(PrimaryKeepalive(lsn, 0, False)))


@contextlib.asynccontextmanager
async def injector(publisher: Database) -> AsyncIterator[Injector]:
    with contextlib.closing(publisher.connect()) as session:
        port = session.info.port
    async with Proxy(LOOPBACK, port, PostgresFraming) as proxy:
        yield Injector(proxy, publisher)


async def ends(found: Replica, text: str) -> None:
    """The run ends with this error of the protocol."""
    await until(found.running.done, "the end of the run")
    error = found.running.exception()
    assert isinstance(error, ProtocolError)
    assert re.search(text, str(error))


@contextlib.asynccontextmanager
async def running(publisher: Database, target: Database, proxy: Injector) -> AsyncIterator[Replica]:
    """A subscription through the proxy, its tables ready; however it ends."""
    subscription = subscription_of(publisher, target, conninfo=proxy.conninfo)
    found = Replica(subscription, publisher, target, asyncio.create_task(subscription.run()))
    try:
        await all_ready(found)
        yield found
    finally:
        found.running.cancel()
        await asyncio.gather(found.running, return_exceptions=True)


def filler(size: int) -> str:
    """WAL that is of no interest to a subscription."""
    return f"SELECT count(pg_logical_emit_message(true, 'filler', repeat('x', {size // 8}))) FROM generate_series(1, 8)"


def make_tables(publisher: Database, target: Database) -> None:
    for database in (publisher, target):
        database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    publisher.execute("CREATE PUBLICATION pub FOR TABLE t")


@pytest.mark.parametrize("ahead", [1 << 32, None])
async def test_keepalive_far_ahead(publisher18_db: Database, target_db: Database, ahead: int | None) -> None:
    make_tables(publisher18_db, target_db)
    async with injector(publisher18_db) as proxy, running(publisher18_db, target_db, proxy) as found:
        publisher18_db.execute("INSERT INTO t VALUES (1)")
        await found.same(ROWS)
        proxy.keepalive(MAX if ahead is None else Lsn(publisher18_db.current_lsn() + ahead))
        publisher18_db.execute("INSERT INTO t VALUES (2)")
        await ends(found, r"the publisher sent LSN .*, but its WAL ends at ")
    assert Lsn.parse(target_db.value(POSITION)) <= publisher18_db.current_lsn()
    assert confirmed(publisher18_db) <= publisher18_db.current_lsn()
    async with replica(publisher18_db, target_db) as found:
        await found.same(ROWS)


async def test_wal_end_of_a_busy_publisher(publisher18_db: Database, target_db: Database) -> None:
    """What is far beyond the WAL end that was known, but was written since, counts; for it the publisher is asked once."""
    make_tables(publisher18_db, target_db)
    async with injector(publisher18_db) as proxy, running(publisher18_db, target_db, proxy) as found:
        before = proxy.sessions
        publisher18_db.execute(filler(80_000_000))
        await acknowledged(publisher18_db, publisher18_db.current_lsn())
        assert 0 < proxy.sessions - before < 3
        publisher18_db.execute("INSERT INTO t VALUES (1)")
        await found.same(ROWS)


async def test_commit_below_a_wal_end_that_was_stored(publisher18_db: Database, target_db: Database) -> None:
    """Not far ahead, a wrong WAL end is found by the next transaction, which is below it. It is not lost silently."""
    make_tables(publisher18_db, target_db)
    async with injector(publisher18_db) as proxy, running(publisher18_db, target_db, proxy) as found:
        publisher18_db.execute("INSERT INTO t VALUES (1)")
        await found.same(ROWS)
        real = publisher18_db.current_lsn()
        wrong = Lsn(real + 10_000_000)
        proxy.keepalive(wrong)
        await acknowledged(publisher18_db, wrong)
        publisher18_db.execute("INSERT INTO t VALUES (2)")
        await ends(found, "sent a transaction that ends at .*, after it had sent everything up to")
    assert Lsn.parse(target_db.value(POSITION)) <= real
    # the slot cannot give it any more: every start says so, also when the publisher's WAL is past that end
    publisher18_db.execute(filler(12_000_000))
    assert publisher18_db.current_lsn() > wrong
    with pytest.raises(DataLossError, match=r"past position .* of the target"):
        await subscription_of(publisher18_db, target_db).run()


async def _repeat(send: Callable[[], None]) -> None:
    while True:
        send()
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("moment", [-(1 << 63), (1 << 63) - 1])
async def test_times_that_no_clock_tells(publisher18_db: Database, target_db: Database, moment: int) -> None:
    """Of a keepalive and of a commit: the rows are applied, the statistics are stored, and the origin gets the nearest valid time."""
    make_tables(publisher18_db, target_db)
    async with injector(publisher18_db) as proxy, running(publisher18_db, target_db, proxy) as found:
        publisher18_db.execute("INSERT INTO t VALUES (1)")
        await found.same(ROWS)
        begin = Lsn(publisher18_db.current_lsn() + 8)
        end = Lsn(begin + 8)
        proxy.inject(encode_frame(XLogData(begin, begin, moment, encode(Begin(begin, moment, 7)))))
        proxy.inject(encode_frame(XLogData(end, end, moment, encode(Commit(0, begin, end, moment)))))
        await acknowledged(publisher18_db, end)
        reported = "SELECT extract(year FROM last_msg_send_time)::int IN (1, 9999) FROM subscriber.pg_stat_subscription"
        # a keepalive of the publisher may come before the next report: the wrong one is repeated until it was stored
        keepalives = asyncio.create_task(_repeat(lambda: proxy.inject(encode_frame(PrimaryKeepalive(end, moment, False)))))
        try:
            await eventually(target_db, reported, True)
        finally:
            keepalives.cancel()
        await found.stop()
