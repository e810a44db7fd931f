"""The PostgreSQL sink: sessions of table synchronizations that are lost while their backends live, as behind a broken network.

Such a backend keeps its locks and its origin, for example while its COMMIT waits for a synchronous standby.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections.abc import AsyncIterator, Iterator

import pytest

from subscriber.errors import TargetUnavailable
from subscriber.interfaces import CopyFormat, TableEntry, TableState, WorkerActivity
from subscriber.sinks.postgres.copy.postgres_table_sink import PostgresTableSink
from subscriber.sinks.postgres.session import settings
from subscriber.sinks.postgres.session import target as target_module
from subscriber.sinks.postgres.session.origins import Origins, catalog_run
from subscriber.sinks.postgres.session.target import Target
from tests.integration.postgres.test_check import published
from tests.integration.postgres.test_tablesync import AT, T
from tests.support.database import WAIT_SECONDS, Database
from tests.support.proxy import ThreadedProxy, proxy_of
from tests.support.sink_postgres import Feed


@contextlib.contextmanager
def _by_proxy(target: Database) -> Iterator[tuple[ThreadedProxy, str]]:
    """A proxy before the target, and the target's URL that leads through it."""
    found = re.search(r"@([^:/]+):(\d+)/", target.dsn)
    assert found is not None
    with proxy_of(found[1], int(found[2])) as proxy:
        yield proxy, target.dsn.replace(f":{found[2]}/", f":{proxy.port}/")


@contextlib.asynccontextmanager
async def _opened(target: Database) -> AsyncIterator[tuple[Feed, ThreadedProxy]]:
    """A sink behind a proxy, with table t."""
    target.execute("CREATE TABLE t (id int PRIMARY KEY)")
    feed = Feed(target)
    with _by_proxy(target) as (proxy, url):
        feed.sink = feed.new_sink(url)
        await feed.open()
        try:
            await feed.opened.add_tables([T], TableEntry(TableState.INIT))
            yield feed, proxy
        finally:
            # so that the end waits for no frozen session
            proxy.close()
            await feed.opened.close()


async def _lose(table: PostgresTableSink, proxy: ThreadedProxy) -> None:
    """Its backends see no end; without the seconds that the end of a session waits for an answer."""
    proxy.freeze()
    assert table._reader is not None
    table._reader.connection.terminate()
    await table.close()


async def _rows() -> AsyncIterator[bytes]:
    yield b"1\n"


async def test_table_whose_session_is_lost(target_db: Database) -> None:
    async with _opened(target_db) as (feed, proxy):
        table = feed.opened.open_table(T)
        await table.begin()
        await _lose(table, proxy)
        try:
            assert await table.begin() == TableEntry(TableState.INIT)
        finally:
            await table.close()


async def test_states_are_read_after_a_tables_session_is_lost(target_db: Database) -> None:
    async with _opened(target_db) as (feed, proxy):
        await feed.opened.close()
        table = feed.opened.open_table(T)
        await table.begin()
        await table.start_copy()
        await table.finish_copy(AT)
        await _lose(table, proxy)
        await feed.open()
        assert await feed.opened.tables() == {T: TableEntry(TableState.FINISHEDCOPY)}


async def test_table_that_left_a_group_whose_session_is_lost(target_db: Database) -> None:
    async with _opened(target_db) as (feed, proxy):
        group = feed.opened.open_group()
        assert T in await group.begin([T])
        await group.copy(published("t", "*id"), CopyFormat.TEXT, _rows())
        proxy.freeze()
        group._connection.terminate()
        table = feed.opened.open_table(T)
        try:
            assert await table.begin() == TableEntry(TableState.INIT)
        finally:
            await table.close()


@pytest.mark.slow
async def test_end_of_a_group_that_gets_no_answer(target_db: Database) -> None:
    """The bug was that the end of a run waited for ever."""
    async with _opened(target_db) as (feed, proxy):
        group = feed.opened.open_group()
        assert T in await group.begin([T])
        proxy.freeze()
        async with asyncio.timeout(WAIT_SECONDS):
            await group.close()


async def test_cancelled_copy_that_gets_no_answer(target_db: Database) -> None:
    async with _opened(target_db) as (feed, proxy):
        table = feed.opened.open_table(T)
        await table.begin()
        await table.start_copy()
        frozen = asyncio.Event()

        async def rows() -> AsyncIterator[bytes]:
            yield b"1\n"
            proxy.freeze()
            frozen.set()
            await asyncio.get_running_loop().create_future()

        copying = asyncio.create_task(table.copy(["id"], CopyFormat.TEXT, rows()))
        await frozen.wait()
        copying.cancel()
        ended, _ = await asyncio.wait({copying}, timeout=WAIT_SECONDS)
        copying.cancel()
        await table.close()
        assert ended


@pytest.mark.slow
async def test_cancelled_copy_ends_its_statement(target_db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a server that does not look whether its client is there, as before PostgreSQL 14."""
    monkeypatch.setattr(target_module, "CHECK_CLIENT", "SELECT 1")
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    async with _opened(target_db) as (feed, _):
        table = feed.opened.open_table(T)
        await table.begin()
        await table.start_copy()
        with target_db.connect() as session:
            session.execute("BEGIN; LOCK TABLE t")
            copying = asyncio.create_task(table.copy(["id"], CopyFormat.TEXT, _rows()))
            await asyncio.to_thread(target_db.wait, waiting, 1)
            copying.cancel()
            await asyncio.wait({copying})
            await asyncio.to_thread(target_db.wait, waiting, 0)
        session.close()
        await table.close()


async def test_origin_of_a_session_that_is_lost(target_db: Database) -> None:
    with _by_proxy(target_db) as (proxy, url):
        target = Target(url)
        like = await target.connect("test")
        origins, name = Origins(relied_on=True, lost=target.lost), f"subscriber_{target_db.name}"
        lost = await target.connect_asyncpg(like, "test")
        identifier = await origins.set_up(catalog_run(lost), name)
        assert identifier is not None
        proxy.freeze()
        lost.terminate()
        await like.close()
        like = await target.connect("test")
        again = await target.connect_asyncpg(like, "test")
        try:
            assert await origins.set_up(catalog_run(again), name) == identifier
        finally:
            # its backend holds the origin until it has ended
            pid = again.get_server_pid()
            again.terminate()
            await like.close()
    target_db.wait(f"SELECT count(*) FROM pg_stat_activity WHERE pid = {pid}", 0)
    target_db.wait("SELECT pg_replication_origin_drop(roname) IS NOT NULL FROM pg_replication_origin WHERE roname = $$" + name + "$$", True)


@contextlib.asynccontextmanager
async def _waiting_report(feed: Feed, target: Database) -> AsyncIterator[asyncio.Task[None]]:
    """A report in the middle of its transaction, whose next statement waits for a lock until the block is left."""
    with target.connect() as other, other.transaction():
        other.execute("LOCK TABLE subscriber.worker IN ACCESS EXCLUSIVE MODE")
        report = asyncio.create_task(feed.opened.report([WorkerActivity()], None))
        await asyncio.to_thread(target.wait, "SELECT count(*) FROM pg_locks WHERE NOT granted AND mode = 'RowExclusiveLock'", 1)
        yield report


async def test_cancelled_report_waits_for_no_answer(target_db: Database) -> None:
    async with _opened(target_db) as (feed, proxy), _waiting_report(feed, target_db) as report:
        proxy.freeze()
        report.cancel()
        await asyncio.wait([report], timeout=WAIT_SECONDS)
        assert report.cancelled()


async def test_report_after_one_whose_session_is_lost(target_db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(settings._RELEASE_ROWS_SOON, "idle_in_transaction_session_timeout", "1s")
    async with _opened(target_db) as (feed, proxy):
        await feed.opened.report([WorkerActivity()], None)
        async with _waiting_report(feed, target_db) as report:
            proxy.freeze()
            # now its backend is idle in a transaction that has deleted a row
            feed.opened.reader.connection.terminate()
            await asyncio.wait([report])
            assert isinstance(report.exception(), TargetUnavailable)
        await feed.opened.close()
        await feed.open()
        async with asyncio.timeout(WAIT_SECONDS):
            await feed.opened.report([WorkerActivity(changes=7)], None)
    assert target_db.fetch("SELECT changes FROM subscriber.worker") == [(7,)]


async def test_session_outlives_a_cancelled_report(target_db: Database) -> None:
    async with _opened(target_db) as (feed, _):
        async with _waiting_report(feed, target_db) as report:
            report.cancel()
            await asyncio.wait([report], timeout=WAIT_SECONDS)
            assert report.cancelled()
        await feed.opened.report([WorkerActivity(changes=7)], None)
    assert target_db.fetch("SELECT changes FROM subscriber.worker") == [(7,)]


@pytest.mark.parametrize("answer", [b"E\0\0\0\x05\0", b"\0", b""], ids=["error", "garbage", "end"])
async def test_server_that_goes_away_while_a_second_session_is_opened(answer: bytes, target_db: Database) -> None:
    # the bug was "rejected SSL upgrade", without a hint
    found = re.search(r"@([^:/]+):(\d+)/", target_db.dsn)
    assert found is not None
    connections = itertools.count()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The first is passed on to the server. The next gets the answer, and the end."""
        with contextlib.closing(writer):
            if next(connections):
                await reader.readexactly(8)
                writer.write(answer)
                return
            server, to_server = await asyncio.open_connection(found[1], int(found[2]))
            with contextlib.closing(to_server):
                await asyncio.gather(_pass_on(reader, to_server), _pass_on(server, writer))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        target = Target(target_db.dsn.replace(f"@{found[1]}:{found[2]}/", f"@127.0.0.1:{port}/"))
        async with await target.connect("test") as like:
            with pytest.raises(TargetUnavailable) as caught:
                await target.connect_asyncpg(like, "test")
    assert "SSL" not in caught.value.one_line()
    assert caught.value.hint
    if answer:
        assert caught.value.one_line() == "the target closed a connection while it was opened (hint: is it shutting down?)"


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()
