"""What of a lake needs a publisher: how fast changes are landed, and how fast a table is copied, compared with a script."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psycopg
import pyarrow as pa
from deltalake import write_deltalake
from pyarrow import csv

from subscriber import Subscription, SubscriptionOptions, Until
from subscriber.interfaces import TableName
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.catalog.snapshots import Snapshot
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.pipeline.applier import Applier
from subscriber.sinks.spark.pipeline.engines.local_engine import LocalEngine
from subscriber.sinks.spark.pipeline.engines.spark_engine import SparkEngine
from subscriber.sinks.spark.pipeline.pace import Pace
from subscriber.sinks.spark.pipeline.program.apply_loop import apply_forever
from subscriber.testing.binaries import find_binaries
from subscriber.testing.server import EmbeddedServer
from tests.benchmark.spark.changes import SCHEMA, TABLE
from tests.support.database import Database, ServerAddress

__all__ = ["copy_by_script", "copy_by_us", "copy_small_tables", "landed", "publisher"]

_VERSION: Final = 18
_WAIT: Final = 600.0
_COLUMNS: Final = "id bigint PRIMARY KEY, name text, amount numeric(18, 2), at timestamptz, doc jsonb, flag boolean"
_ROW: Final = (
    "g, 'name ' || g::bigint * 7919 % 100000000, (g::bigint * 7919 % 100000000)::numeric(18, 2),"
    " timestamptz '2024-01-01' + g * interval '1 s',"
    " jsonb_build_object('n', g, 'tag', 't' || g % 100, 'text', 'some text ' || g), g % 2 = 0"
)


@contextlib.contextmanager
def publisher(rows: int, small: int = 0) -> Iterator[Database]:
    """A publisher with a table of so many rows, and a publication of so many small tables."""
    server = EmbeddedServer.create(_VERSION, settings={"logical_decoding_work_mem": "64MB", "max_wal_size": "8GB"})
    try:
        server.createdb("pub")
        database = Database(ServerAddress(server.dsn(), server.version), "pub")
        database.execute(f"CREATE TABLE t ({_COLUMNS}); CREATE PUBLICATION pub FOR TABLE t")
        database.execute(f"INSERT INTO t SELECT {_ROW} FROM generate_series(1, {rows}) AS g")
        for number in range(small):
            database.execute(
                f"CREATE TABLE small{number} ({_COLUMNS}); INSERT INTO small{number} SELECT {_ROW} FROM generate_series(1, 100) AS g"
            )
        if small:
            database.execute("CREATE PUBLICATION small FOR TABLE " + ", ".join(f"small{number}" for number in range(small)))
        database.execute("ANALYZE t")
        database.execute("CHECKPOINT")
        yield database
        database.close()
    finally:
        server.remove()


def _subscription(database: Database, name: str, target: str, *, copy_data: bool, publication: str = "pub") -> Subscription:
    options = SubscriptionOptions(copy_data=copy_data)
    return Subscription(name, connection=database.dsn, publications=[publication], target=target, options=options)


class Landed:
    """Inserts of one slot after another: of a subscription's into a lake, and of ``pg_recvlogical``'s into /dev/null."""

    def __init__(self, database: Database, directory: Path, first: int) -> None:
        self._database = database
        self._target = f"spark://{directory / 'landed'}"
        self._next = first
        database.execute("SELECT pg_create_logical_replication_slot('bench_limit', 'pgoutput')")
        asyncio.run(_subscription(database, "bench_land", self._target, copy_data=False).run(Until()))

    def measure(self, rows: int, size: int) -> tuple[float, float]:
        """Write so many rows in transactions of this size; seconds that the publisher alone needs for them, and that landing does."""
        database = self._database
        database.execute(
            f"DO $$ BEGIN FOR n IN 0..{rows // size - 1} LOOP INSERT INTO t SELECT {_ROW} FROM"
            f" generate_series({self._next} + n * {size}, {self._next} + (n + 1) * {size} - 1) AS g; COMMIT; END LOOP; END $$"
        )
        self._next += rows
        database.execute("SELECT pg_switch_wal()")
        lsn = database.current_lsn()
        limit = self._limit(lsn)
        began = time.monotonic()
        asyncio.run(asyncio.wait_for(_subscription(database, "bench_land", self._target, copy_data=False).run(Until(lsn)), _WAIT))
        return limit, time.monotonic() - began

    def _limit(self, lsn: Lsn) -> float:
        program = find_binaries(_VERSION) / "pg_recvlogical"
        command = [str(program), "--start", f"--dbname={self._database.conninfo()}", "--slot=bench_limit", "--file=/dev/null"]
        command += [f"--endpos={lsn}", "--no-loop", "--option=proto_version=1", "--option=publication_names=pub"]
        began = time.monotonic()
        subprocess.run(command, check=True, timeout=_WAIT, capture_output=True)
        return time.monotonic() - began


def landed(database: Database, directory: Path, first: int) -> Landed:
    """Make what :meth:`Landed.measure` measures."""
    return Landed(database, directory, first)


def copy_by_us(spark: Any, database: Database, directory: Path, number: int) -> float:
    """Seconds from a subscription's start until its table can be read in a published snapshot. Without Spark, engine ``local`` applies."""
    target, name = f"spark://{directory / f'copied-{number}'}", f"bench_copy_{number}"
    subscription = _subscription(database, name, target, copy_data=True)
    seconds = asyncio.run(_published(spark, Location.parse(target), subscription, {TABLE}))
    database.execute(f"SELECT pg_drop_replication_slot('{name}')")
    return seconds


async def _published(spark: Any, location: Location, subscription: Subscription, tables: set[TableName]) -> float:
    """Seconds until a snapshot has all tables. Without Spark, engine ``local`` applies."""
    storage = Storage.open(location)
    stop = threading.Event()
    # the subscriber's own copy needs no applier before its end: it is started with the lake
    began = time.monotonic()
    running = asyncio.create_task(subscription.run())
    while not (Path(str(location)) / "subscriber.json").exists():
        await asyncio.sleep(0.01)
    applier = Applier(storage, LocalEngine(storage) if spark is None else SparkEngine(spark, location))
    loop, complete = asyncio.get_running_loop(), asyncio.Event()

    def published(snapshot: Snapshot) -> None:
        if tables <= snapshot.tables.keys():
            loop.call_soon_threadsafe(complete.set)

    applying = asyncio.create_task(asyncio.to_thread(apply_forever, applier, stop, published, pace=Pace(location.freshness)))
    # asking for the snapshot again and again would slow the subscriber, in whose loop this runs
    waiting = asyncio.create_task(complete.wait())
    await asyncio.wait([waiting, running], timeout=_WAIT, return_when=asyncio.FIRST_COMPLETED)
    assert not running.done(), running.result()
    assert waiting.done(), "not all tables were published in time"
    seconds = time.monotonic() - began
    subscription.stop()
    await running
    stop.set()
    await applying
    return seconds


def copy_small_tables(spark: Any, database: Database, directory: Path, number: int, small: int) -> float:
    """Seconds from a subscription's start until its small tables can be read in one published snapshot. Without Spark: engine ``local``."""
    target = f"spark://{directory / f'small-{number}-{spark is None}'}"
    name = f"bench_small_{number}_{spark is None}".lower()
    subscription = _subscription(database, name, target, copy_data=True, publication="small")
    tables = {TableName("public", f"small{index}") for index in range(small)}
    seconds = asyncio.run(_published(spark, Location.parse(target), subscription, tables))
    database.execute(f"SELECT pg_drop_replication_slot('{name}')")
    return seconds


def copy_by_script(database: Database, directory: Path, number: int) -> float:
    """Seconds of what a user writes: COPY TO, read by pyarrow, written by delta-rs."""
    began = time.monotonic()
    reading, writing = os.pipe()

    def send() -> None:
        with (
            os.fdopen(writing, "wb") as file,
            psycopg.connect(database.dsn) as connection,
            connection.cursor().copy("COPY t TO STDOUT (FORMAT csv)") as copy,
        ):
            for piece in copy:
                file.write(piece)

    sending = threading.Thread(target=send)
    sending.start()
    with os.fdopen(reading, "rb") as file:
        types = {field.name: field.type for field in SCHEMA.arrow}
        options = csv.ConvertOptions(column_types=types, true_values=["t"], false_values=["f"])
        rows = csv.open_csv(file, csv.ReadOptions(column_names=[*types], block_size=8 * 1024**2), convert_options=options)
        write_deltalake(directory / f"script-{number}", pa.RecordBatchReader.from_batches(rows.schema, rows))
    sending.join()
    return time.monotonic() - began
