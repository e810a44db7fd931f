"""Run a subscription from two empty databases to the proof that both hold the same rows. ``subscriber demo`` reports it.

The publisher is an embedded PostgreSQL 18. The target is a second one, a SQLite file, an embedded MariaDB, a lake that Spark keeps, or
a database of the user. Use it as a context manager: at the end, everything that was started is stopped, and everything that was created
is removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, TypeVar
from urllib.parse import quote

import psycopg

from subscriber.apply.progress import CopyProgress
from subscriber.config import SubscriptionOptions
from subscriber.errors import ConfigurationError, PublisherError, SubscriberError
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.kind import LakeKind
from subscriber.subscription.subscription import Subscription
from subscriber.subscription.targets import is_postgres, target_kind
from subscriber.testing.comparison import PreparedComparison
from subscriber.testing.demonstration.target import DatabaseFacts, DemoTarget, Example, PostgresTarget, inspect_database
from subscriber.testing.load.mixed_load import LoadReport, MixedLoad
from subscriber.testing.load.tables import create_tables, table_names
from subscriber.testing.mariadb import EmbeddedMariaDB
from subscriber.testing.server import EmbeddedServer
from subscriber.verification.model import TableReport

__all__ = ["MARIADB", "SCHEMA", "SPARK", "SQLITE", "Demonstration", "Sample"]

SCHEMA: Final = "subscriber_demo"
"""Schema of the tables, on both sides."""
SQLITE: Final = "sqlite"
MARIADB: Final = "mariadb"
SPARK: Final = "spark"

_VERSION: Final = 18
_PUBLICATION: Final = "subscriber_demo"
_SEED: Final = 18
_SAMPLE_SECONDS: Final = 1.0
_CATCH_UP_SECONDS: Final = 300.0
_STOP_SECONDS: Final = 30.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The progress while the load runs.

    Attributes:
        seconds: since the start of the load.
        transactions: run on the publisher.
        applied: rows inserted, updated or deleted in the target.
        behind_bytes: WAL that is not durable in the target, or that cannot be read there yet.
        behind_seconds: measured time until a transaction that commits now is durable in the target and can be read there.
    """

    seconds: float
    transactions: int
    applied: int
    behind_bytes: int
    behind_seconds: float


class Demonstration:
    """A demonstration. Call its methods in the order in which they are defined.

    Args:
        target: conninfo or URL of the target; :data:`SQLITE` for a new file, :data:`MARIADB` for an embedded server of that kind,
            :data:`SPARK` for a lake in a temporary directory; None for an embedded PostgreSQL.
        rows: of the largest table.
        rate: transactions per second of the load.
        huge_rows: approximate number of rows of a huge transaction.
        progress: called with the progress of table copies.
        keep: the directory in which a lake is kept; then ``target`` is :data:`SPARK`.
    """

    def __init__(
        self, *, target: str | None, rows: int, rate: float, huge_rows: int, progress: CopyProgress, keep: Path | None = None
    ) -> None:
        self._keep = keep
        self._given_target = target
        self._rows = rows
        self._rate = rate
        self._huge_rows = huge_rows
        self._progress = progress
        self._name = f"{SCHEMA}_{secrets.token_hex(4)}"
        self._stack = contextlib.AsyncExitStack()
        self._lag_seconds = 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def start(self) -> tuple[DatabaseFacts, DatabaseFacts]:
        """Start the embedded servers. Return the facts of publisher and target.

        Raises:
            ConfigurationError: the programs of PostgreSQL 18 (or MariaDB) are missing, or no sink supports the target.
            TargetError: the target cannot be reached.
        """
        if self._keep is not None:
            if self._given_target != SPARK:
                raise ConfigurationError("only a lake can be kept", hint="--target spark")
            self._target = await self._opened(_target_of(f"spark://{quote(str(self._keep.absolute()))}", keep=True))
            self._publisher_dsn = (await self._embedded()).dsn()
        elif self._given_target in {SQLITE, MARIADB, SPARK, None}:
            self._publisher_dsn = (await self._embedded()).dsn()
            self._target = await self._temporary_target()
        else:
            # before anything else is started
            self._target = await self._opened(_target_of(str(self._given_target)))
            self._publisher_dsn = (await self._embedded()).dsn()
        self._observer = await psycopg.AsyncConnection.connect(self._publisher_dsn, autocommit=True)
        self._stack.push_async_callback(self._observer.close)
        return await inspect_database(self._publisher_dsn), self._facts

    @property
    def makes_tables(self) -> bool:
        """Whether the subscription creates the target's tables. Known after :meth:`start`."""
        return self._target.makes_tables

    async def make_tables(self) -> int:
        """Create the tables on both sides (or only on the publisher) and fill the publisher's. Return their number of rows.

        Raises:
            ConfigurationError: the target already has a schema of this name, or such tables.
            TargetError: a privilege is missing in the target.
        """
        await self._made(self._target.make_tables(SCHEMA), lambda _: self._target.remove_tables(SCHEMA))
        await create_tables(self._publisher_dsn, schema=SCHEMA, rows=self._rows)
        as_one = " WITH (publish_via_partition_root)" if self._target.makes_tables else ""
        await self._observer.execute(f"CREATE PUBLICATION {_PUBLICATION} FOR TABLES IN SCHEMA {SCHEMA}{as_one}")
        return int(
            await self._ask("SELECT sum(reltuples)::bigint FROM pg_class WHERE relnamespace = %s::regnamespace AND relkind = 'r'", SCHEMA)
        )

    async def copy(self) -> float:
        """Start the subscription. Return the seconds until all tables were copied.

        Raises:
            SubscriberError: the error that ended the subscription.
        """
        options = SubscriptionOptions(two_phase=self._facts.two_phase, disable_on_error=True)
        self._subscription = Subscription(
            self._name,
            connection=self._publisher_dsn,
            publications=[_PUBLICATION],
            target=self._target.url,
            options=options,
            settings=self._target.settings,
            progress=self._progress,
        )
        self._stack.push_async_callback(self._target.forget, self._name)
        self._running = asyncio.create_task(self._subscription.run())
        self._stack.push_async_callback(self._stop)
        return await self.catch_up()

    async def follow(self, seconds: float) -> AsyncGenerator[Sample, None]:
        """Run the load for so many seconds, and yield the progress every second. Close the generator if it is not read to its end.

        Raises:
            SubscriberError: the error that ended the subscription or the load.
        """
        self._load = MixedLoad(self._publisher_dsn, seed=_SEED, rate=self._rate, schema=SCHEMA, huge_rows=self._huge_rows)
        begun = time.monotonic()
        loading = asyncio.create_task(self._load.run(seconds=seconds))
        measuring = asyncio.create_task(self._measure_lag())
        try:
            while not loading.done():
                await asyncio.wait({loading, self._running}, timeout=_SAMPLE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if self._running.done():
                    raise self._ended()
                yield await self._sample(time.monotonic() - begun)
            await loading
        except psycopg.Error as error:
            raise PublisherError(f"the load on the publisher failed: {' '.join(str(error).split())}") from error
        finally:
            await _cancel(loading, measuring)

    async def catch_up(self) -> float:
        """Wait until everything committed so far is durable in the target and can be read there. Return the seconds that it took.

        Raises:
            SubscriberError: the subscription ended, or it took too long.
        """
        begun = time.monotonic()
        await self._while_running(self._seen(await self._publisher_lsn()))
        return time.monotonic() - begun

    async def _seen(self, lsn: Lsn) -> None:
        """Wait until a reader of the target sees everything up to this LSN."""
        async with asyncio.timeout(_CATCH_UP_SECONDS):
            await self._subscription.wait_for(lsn)
            await self._target.reached(lsn)

    async def compare_prepared(self) -> PreparedComparison | None:
        """Compare the prepared transactions of both sides. None if the target prepares none (max_prepared_transactions = 0)."""
        return await self._target.compare_prepared(self._publisher_dsn)

    async def finish_prepared(self) -> LoadReport:
        """Commit or roll back, on the publisher, the transactions that the load left prepared. Return the load's report."""
        await self._load.finish()
        return self._load.report

    async def streamed(self) -> int:
        """The number of transactions that the publisher sent while they were still running."""
        return int(await self._ask("SELECT coalesce(sum(stream_txns), 0) FROM pg_stat_replication_slots WHERE slot_name = %s", self._name))

    @property
    def proof(self) -> str:
        """A description of how :meth:`compare` compares."""
        return self._target.proof

    async def compare(self) -> list[TableReport]:
        return await self._target.compare(self._publisher_dsn, table_names(SCHEMA))

    @property
    def examples(self) -> Sequence[Example]:
        """Example programs for the target."""
        return self._target.examples

    # --- start and remove

    async def _embedded(self) -> EmbeddedServer:
        return await self._made(asyncio.to_thread(EmbeddedServer.create, _VERSION), lambda server: asyncio.to_thread(server.remove))

    async def _made(self, making: Coroutine[Any, Any, T], undo: Callable[[T], Awaitable[object]]) -> T:
        """Await something that must be removed at the end, also if this task is cancelled meanwhile."""
        task = asyncio.ensure_future(making)
        try:
            return await asyncio.shield(task)
        finally:
            await asyncio.wait([task])
            if not task.cancelled() and task.exception() is None:
                self._stack.push_async_callback(_call, undo, task.result())

    async def _temporary_target(self) -> DemoTarget:
        if self._given_target == SQLITE:
            directory = await self._made(asyncio.to_thread(_private_directory), lambda path: asyncio.to_thread(shutil.rmtree, path))
            return await self._opened(_target_of(f"sqlite:///{directory / 'replica.db'}"))
        if self._given_target == SPARK:
            directory = await self._made(asyncio.to_thread(_private_directory), lambda path: asyncio.to_thread(shutil.rmtree, path))
            return await self._opened(_target_of(f"spark://{directory / 'lake'}"))
        if self._given_target == MARIADB:
            server = await self._made(asyncio.to_thread(EmbeddedMariaDB.create), lambda server: asyncio.to_thread(server.remove))
            await asyncio.to_thread(server.create_database, SCHEMA)
            return await self._opened(_target_of(server.url(SCHEMA)))
        return await self._opened(PostgresTarget((await self._embedded()).dsn(), temporary=True))

    async def _opened(self, target: DemoTarget) -> DemoTarget:
        self._stack.push_async_callback(target.close)
        self._facts = await target.inspect()
        return target

    async def _stop(self) -> None:
        self._subscription.stop()
        await asyncio.wait([self._running], timeout=_STOP_SECONDS)
        await _cancel(self._running)

    # --- observe

    async def _ask(self, query: str, *parameters: str) -> Any:
        cursor = await self._observer.execute(query.encode(), parameters or None)
        row = await cursor.fetchone()
        assert row is not None
        return row[0]

    async def _publisher_lsn(self) -> Lsn:
        """The flushed position of the publisher's WAL. Everything committed is below it."""
        return Lsn.parse(await self._ask("SELECT pg_current_wal_flush_lsn()::text"))

    async def _measure_lag(self) -> None:
        while True:
            begun = time.monotonic()
            reached = asyncio.ensure_future(self._seen(await self._publisher_lsn()))
            try:
                while not reached.done():
                    await asyncio.wait([reached], timeout=_SAMPLE_SECONDS / 4)
                    # until it arrives, the lag is at least the time waited so far
                    self._lag_seconds = time.monotonic() - begun if reached.done() else max(self._lag_seconds, time.monotonic() - begun)
            finally:
                await _cancel(reached)
            await asyncio.sleep(_SAMPLE_SECONDS / 4)

    async def _sample(self, seconds: float) -> Sample:
        status = self._subscription.status
        done = status.statistics
        return Sample(
            seconds=seconds,
            transactions=self._load.report.transactions,
            applied=done.inserts + done.updates + done.deletes,
            behind_bytes=max(await self._publisher_lsn() - self._target.visible(status.flushed), 0),
            behind_seconds=self._lag_seconds,
        )

    async def _while_running(self, work: Coroutine[Any, Any, None]) -> None:
        """Await ``work``, but no longer than the subscription runs."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._running}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self._ended()
            task.result()
        except TimeoutError:
            last = self._subscription.status.last_error
            raise SubscriberError(
                f"the target did not catch up within {_CATCH_UP_SECONDS:.0f} s", hint=last.one_line() if last else None
            ) from last
        finally:
            await _cancel(task)

    def _ended(self) -> BaseException:
        return self._running.exception() or SubscriberError("the subscription ended without an error")


def _target_of(text: str, *, keep: bool = False) -> DemoTarget:
    if is_postgres(text):
        return PostgresTarget(text, temporary=False)
    try:
        if isinstance(target_kind(text), LakeKind):
            from subscriber.testing.demonstration.lake_target import LakeTarget  # noqa: PLC0415 -- needs an extra

            return LakeTarget(text, keep=keep)
        from subscriber.testing.demonstration.sqlalchemy_target import SqlAlchemyTarget  # noqa: PLC0415 -- as above
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"this target needs {error.name}, which is not installed", hint="pip install 'pg-subscriber[demo]'"
        ) from error
    return SqlAlchemyTarget(text)


def _private_directory() -> Path:
    return Path(tempfile.mkdtemp(prefix="subscriber-demo-"))


async def _call(undo: Callable[[T], Awaitable[object]], made: T) -> None:
    await undo(made)


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel and await them. Their errors were reported elsewhere."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
