"""A lake as the target of the demonstration. The subscription lands changes, a thread applies them, and Spark SQL reads them.

Engine ``local`` applies, the default on one machine: engine ``spark`` would fall behind beside a publisher under load on two cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import platform
import shutil
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from subscriber.config import Settings
from subscriber.errors import ConfigurationError, RelationError, SubscriberError, TargetError
from subscriber.interfaces import PublishedTable, TableName
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.sinks.spark.catalog.lake import Lake
from subscriber.sinks.spark.catalog.snapshots import read_snapshot
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.landing.prepared_transactions import PreparedTransactions
from subscriber.sinks.spark.pipeline.applier import Applier
from subscriber.sinks.spark.pipeline.engines.local_engine import LocalEngine
from subscriber.sinks.spark.pipeline.pace import Pace
from subscriber.sinks.spark.pipeline.program.apply_loop import apply_forever
from subscriber.sinks.spark.reading.snapshot import LakeSnapshot
from subscriber.sinks.spark.reading.table_files import with_held_values
from subscriber.sinks.spark.schema.table_schema import SPECIAL
from subscriber.sinks.spark.session.jobs import first_words, job_errors
from subscriber.sinks.spark.session.spark_session import spark_session
from subscriber.sinks.spark.session.sql_text import quoted_name
from subscriber.testing.comparison import PreparedComparison, compare, prepared_transactions
from subscriber.testing.demonstration.target import DatabaseFacts, Example
from subscriber.verification.model import TableReport

__all__ = ["LakeTarget"]

_MASTER: Final = "local[2]"
_CONF: Final = {
    "spark.log.level": "ERROR",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": "1g",
    "spark.ui.enabled": "true",
    "spark.ui.port": "0",
}
_LOOK_SECONDS: Final = 0.02
_FRESHNESS: Final = 1.0
_ROWS: Final = 10_000
"""Of a batch that is compared."""
_VIEW: Final = "subscriber_snapshot"
_EXAMPLES: Final = (
    """\
from subscriber.spark import snapshot

lake = snapshot(spark, "LAKE")
accounts = lake.table("subscriber_demo.accounts")
branches = lake.table("subscriber_demo.branches")  # as of the same transaction
joined = accounts.join(branches, "bid").groupBy("bid").count()
joined.orderBy("bid").show(3)
""",
    """\
from subscriber.spark import register

register(spark)
reader = spark.readStream.format("postgres_changes").option("table", "subscriber_demo.branches")
changes = reader.load("LAKE").groupBy("_op").count()
writer = changes.writeStream.format("memory").queryName("changes").outputMode("complete")
writer.trigger(availableNow=True).start().awaitTermination()  # without the trigger, it follows
spark.table("changes").show()
""",
)


class LakeTarget:
    """See :class:`subscriber.testing.demonstration.target.DemoTarget`. The lake is created in a new or empty directory.

    Args:
        url: ``spark:///path``.
        keep: whether the lake is kept. Otherwise it is removed.

    Raises:
        ConfigurationError: the URL is not of this form, or names something else than a new or empty directory.
    """

    settings: Final = Settings()
    makes_tables: Final = True

    def __init__(self, url: str, *, keep: bool = False) -> None:
        self.url: Final = url
        self._location = Location.parse(url)
        self._storage = Storage.open(self._location)
        if self._storage.root is None:
            raise ConfigurationError("the demo creates its lake in a directory", hint="example: --target spark:///tmp/lake")
        self._root: Path = self._storage.root
        if self._root.exists() and (not self._root.is_dir() or any(self._root.iterdir())):
            raise ConfigurationError(f"{self._root} exists and is not empty", hint="the demo makes a lake there: use a new directory")
        self._was_there = self._root.exists()
        self._keep = keep
        self._stop = threading.Event()
        self._spark: Any = None
        """A SparkSession, whose class comes with an extra."""
        self._applying: asyncio.Task[None] | None = None

    async def inspect(self) -> DatabaseFacts:
        """Start Spark."""
        self._spark = await asyncio.to_thread(spark_session, _MASTER, _CONF)
        self._applying = asyncio.create_task(self._apply())
        python, version = platform.python_version(), self._spark.version
        reader = f"read by Spark {version} on {_MASTER} (UI: {self._spark.sparkContext.uiWebUrl})"
        place = f"a lake in {self._root}, applied by engine local, {reader}, Python {python}"
        return DatabaseFacts(place, two_phase=True, had_catalog=False)

    async def _apply(self) -> None:
        while Lake.find(self._storage) is None:  # noqa: ASYNC110 -- the subscription creates it, without a notification
            await asyncio.sleep(_LOOK_SECONDS)
        applier = Applier(self._storage, LocalEngine(self._storage))
        await asyncio.to_thread(apply_forever, applier, self._stop, pace=Pace(_FRESHNESS))

    async def make_tables(self, schema: str) -> None:
        """Do nothing: the tables are created with their first rows."""

    async def reached(self, lsn: Lsn) -> None:
        """Wait until the published snapshot has this LSN or a later one, and every table.

        Raises:
            SubscriberError: the error that ended the applier.
        """
        assert self._applying is not None
        while not self._has(lsn):
            if self._applying.done():
                self._applying.result()
                raise SubscriberError("the applier ended without an error", hint="see its messages above")
            await asyncio.sleep(_LOOK_SECONDS)

    def _has(self, lsn: Lsn) -> bool:
        snapshot, lake = read_snapshot(self._storage), Lake.find(self._storage)
        return snapshot is not None and lake is not None and snapshot.lsn >= lsn and set(lake.state.tables) <= set(snapshot.tables)

    def visible(self, flushed: Lsn) -> Lsn:
        """The LSN of the published snapshot: landed changes cannot be read yet."""
        snapshot = read_snapshot(self._storage)
        return min(flushed, snapshot.lsn) if snapshot is not None else INVALID_LSN

    @property
    def proof(self) -> str:
        """How the sides are compared, and at which LSN."""
        snapshot = read_snapshot(self._storage)
        return f"every row of both, value by value; the lake by Spark SQL, at LSN {snapshot.lsn if snapshot else INVALID_LSN}"

    async def compare(self, publisher_dsn: str, tables: Sequence[TableName]) -> list[TableReport]:
        """Compare tables of the published snapshot, value by value."""
        snapshot = read_snapshot(self._storage)
        assert snapshot is not None
        return await compare(publisher_dsn, _SnapshotTables(self._spark, LakeSnapshot(self._spark, self.url, snapshot)), tables)

    async def compare_prepared(self, publisher_dsn: str) -> PreparedComparison | None:
        """Compare the transactions prepared on the publisher with those that wait in the lake."""
        return PreparedComparison(await prepared_transactions(publisher_dsn), PreparedTransactions(self._storage).xids())

    @property
    def examples(self) -> Sequence[Example]:
        """Join two tables of one snapshot, and stream changes."""
        programs = [text.replace("LAKE", str(self._root)) for text in _EXAMPLES]
        return [Example(program, partial(self._run_example, program)) for program in programs]

    def _run_example(self, program: str) -> str:
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(program, {"spark": self._spark})
        except job_errors() as error:
            raise TargetError(f"the example failed: {first_words(error)}", hint="see Spark's log") from error
        return printed.getvalue()

    async def forget(self, name: str) -> None:
        """Do nothing: the directory is removed, or its slot is removed with the publisher."""

    async def remove_tables(self, schema: str) -> None:
        """As :meth:`forget`."""

    async def close(self) -> None:
        """Stop the applier and Spark, and remove the lake unless it is kept."""
        self._stop.set()
        if self._applying is not None:
            if Lake.find(self._storage) is None:
                self._applying.cancel()
            # if it failed, its error was reported where it was awaited
            await asyncio.wait([self._applying])
        if self._spark is not None:
            await asyncio.to_thread(self._spark.stop)
        await asyncio.to_thread(self._remove)

    def _remove(self) -> None:
        if self._keep or not self._root.exists():
            return
        for path in self._root.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not self._was_there:
            self._root.rmdir()


class _SnapshotTables:
    """The :class:`subscriber.interfaces.ComparedTables` of one snapshot, by Spark SQL."""

    def __init__(self, spark: Any, found: LakeSnapshot) -> None:
        self._spark = spark
        self._found = found

    async def table(self, published: PublishedTable, key: Sequence[str]) -> _SnapshotTable:
        if str(published.name) not in self._found.tables:
            raise RelationError(f"the snapshot has no table {published.name}")
        return _SnapshotTable(self._spark, self._found, published)


class _SnapshotTable:
    """A :class:`subscriber.interfaces.RowSource`."""

    def __init__(self, spark: Any, found: LakeSnapshot, published: PublishedTable) -> None:
        self._spark = spark
        self._found = found
        self._published = published

    def is_integer(self, number: int) -> bool:
        return False

    async def rows(self, column: str | None, low: int | None, high: int | None) -> AsyncIterator[Sequence[Sequence[object]]]:
        batches = self._batches()
        while (batch := await asyncio.to_thread(next, batches, None)) is not None:
            yield batch

    def _batches(self) -> Iterator[list[Sequence[object]]]:
        columns = self._published.columns
        self._found.table(str(self._published.name)).createOrReplaceTempView(_VIEW)
        query = f"SELECT {', '.join(map(quoted_name, [*columns, SPECIAL]))} FROM {_VIEW}"
        for batch in self._spark.sql(query).toArrow().to_batches(max_chunksize=_ROWS):
            yield [with_held_values(row, columns) for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)]
