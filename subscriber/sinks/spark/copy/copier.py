"""The applier's side of copies by executors. It looks for orders (``order.py``) and has their parts read, in parallel with the rounds.

Each order has a thread, which waits for its tasks. The number of tables of a subscription that are copied at once is limited. A failure is
retried while the snapshot exists, and reported to the subscriber. If an applier is killed, the finished parts remain, and the next applier
has the other parts read.

With Spark, an order is a job in its own scheduler pool, so that a round gets a free core.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Final, Protocol, Self

from subscriber.errors import SubscriberError
from subscriber.interfaces import TableState
from subscriber.sinks.spark.catalog.lake import Lake, copy_directory
from subscriber.sinks.spark.copy.order import CopyFailure, CopyOrder
from subscriber.sinks.spark.copy.task import OrderOutdated, Sessions, copy_part
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.session.job_names import job_name
from subscriber.sinks.spark.session.jobs import SparkLost, forget_jars, job_errors, job_failed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


__all__ = ["Copier", "CopyRunner", "LocalCopyRunner", "SparkCopyRunner", "try_copy_part", "worst_failure"]

_log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.1
_FIRST_RETRY_SECONDS: Final = 1.0
_RETRY_SECONDS: Final = 30.0
_PATIENCE_SECONDS: Final = 10.0
"""How long an end waits for parts. A part that takes longer ends with the process, and the next applier reads it again."""


class CopyRunner(Protocol):
    """Runs the parts of a copy, in threads or on executors."""

    def run(self, order: CopyOrder, numbers: Sequence[int], target_rows: int, stop: threading.Event) -> CopyFailure | None:
        """Store these parts, ``order.workers`` at once. None if all are stored. May end early once ``stop`` is set.

        Raises:
            SubscriberError: the parts cannot be read at the moment.
        """
        ...

    def cancel(self) -> None:
        """Make :meth:`run` end in other threads, after ``stop`` was set. Called repeatedly until they have ended. Never blocks."""
        ...


class LocalCopyRunner:
    """Runs parts in threads of this process."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._sessions = Sessions()

    def run(self, order: CopyOrder, numbers: Sequence[int], target_rows: int, stop: threading.Event) -> CopyFailure | None:
        parts = {number: Future[CopyFailure | None]() for number in numbers}
        left = iter(parts.items())

        def work() -> None:
            # each thread takes the next part; no part is taken twice
            for number, part in left:
                try:
                    part.set_result(try_copy_part(self._storage, order, number, target_rows, stop=stop, sessions=self._sessions))
                except BaseException as error:  # noqa: BLE001 -- it is raised below
                    part.set_exception(error)

        # no thread pool: the interpreter waits for the threads of a pool at exit, and a dead peer may block these
        for index in range(min(max(order.workers, 1), len(parts))):
            threading.Thread(target=work, name=f"copy {order.directory} {index}", daemon=True).start()
        wait(parts.values())
        return worst_failure([part.result() for part in parts.values()])

    def cancel(self) -> None:
        """Cancel statements on the publisher. Elsewhere the threads check ``stop`` themselves."""
        self._sessions.cancel()


def try_copy_part(
    storage: Storage, order: CopyOrder, number: int, target_rows: int, *, stop: threading.Event, sessions: Sessions
) -> CopyFailure | None:
    """Store one part. Return the failure, if any. Once ``stop`` is set, an error is a result of the stop, and is not returned."""
    try:
        if not stop.is_set():
            copy_part(storage, order, number, target_rows, stop=stop, sessions=sessions)
    except SubscriberError as error:
        return None if stop.is_set() else CopyFailure(error.one_line(), isinstance(error, OrderOutdated))
    return None


def worst_failure(failures: Sequence[CopyFailure | None]) -> CopyFailure | None:
    """The failure to report. A lost snapshot comes before all others."""
    found = [failure for failure in failures if failure is not None]
    return next((failure for failure in found if failure.gone), found[0] if found else None)


class Copier:
    """Carries out the copy orders of a lake, see the module."""

    def __init__(self, storage: Storage, runner: CopyRunner, target_rows: int) -> None:
        self._storage = storage
        self._runner = runner
        self._target_rows = target_rows
        self._stop = threading.Event()
        self._copying: dict[str, threading.Thread] = {}
        self._given_up: set[str] = set()
        self._lost: SparkLost | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[Self]:
        """Look for orders inside the block. The caller holds the applier's lock, or does not need it."""
        watcher = threading.Thread(target=self._watch, name="copier", daemon=True)
        watcher.start()
        try:
            yield self
        finally:
            self._stop.set()
            watcher.join()
            self._end()

    def _end(self) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while running := [thread for thread in self._copying.values() if thread.is_alive()]:
            if time.monotonic() >= deadline:
                _log.warning(
                    "parts of %d tables are still being copied after %.0f s: not waiting for them", len(running), _PATIENCE_SECONDS
                )
                return
            # repeatedly: a cancel has no effect between two statements, or between two jobs
            self._runner.cancel()
            running[0].join(_LOOK_SECONDS)

    def check(self) -> None:
        """Check that this process can still read parts.

        Raises:
            SparkLost: it cannot, until the applier is started again.
        """
        if self._lost is not None:
            raise self._lost

    def orders(self) -> list[CopyOrder]:
        """The open orders.

        Raises:
            TargetError: an order is damaged.
        """
        lake = Lake.find(self._storage)
        tables = lake.state.tables.values() if lake is not None else ()
        found: list[CopyOrder] = []
        for table in tables:
            directory = copy_directory(table)
            if table.entry.state is TableState.DATASYNC and directory not in self._given_up:
                order = CopyOrder.find(self._storage, directory)
                found += [order] if order is not None else []
        return found

    def _watch(self) -> None:
        while not self._stop.wait(_LOOK_SECONDS):
            self._copying = {name: thread for name, thread in self._copying.items() if thread.is_alive()}
            try:
                found = self.orders()
            except SubscriberError as error:
                _log.error("copying: %s", error.one_line())
                self._stop.wait(_RETRY_SECONDS)
                continue
            for order in found:
                if order.directory not in self._copying:
                    thread = threading.Thread(target=self.copy, args=[order], name=f"copy {order.directory}", daemon=True)
                    self._copying[order.directory] = thread
                    thread.start()

    def copy(self, order: CopyOrder) -> None:
        """Store the parts of an order, until all are stored or the order is no longer valid."""
        pause = _FIRST_RETRY_SECONDS
        while not self._stop.is_set():
            try:
                missing = sorted(set(range(len(order.parts))) - order.numbers_done(self._storage))
                # the subscriber removes the order when it gives up the copy
                if not missing or CopyOrder.find(self._storage, order.directory) is None:
                    return
                _log.info('table "%s": %d of %d parts remain to be copied', order.schema.table, len(missing), len(order.parts))
                failure = self._runner.run(order, missing, self._target_rows, self._stop)
                if self._stop.is_set():
                    return
                with contextlib.suppress(SubscriberError):
                    order.report(self._storage, failure)
            except SparkLost as error:
                self._lost = error
                return
            except SubscriberError as error:
                failure = CopyFailure(error.one_line(), gone=False)
            if failure is None:
                continue
            if failure.gone:
                self._given_up.add(order.directory)
                return
            _log.warning('copying table "%s": %s; next attempt in %.0f s', order.schema.table, failure.text, pause)
            self._stop.wait(pause)
            pause = min(pause * 2, _RETRY_SECONDS)


class SparkCopyRunner:
    """A :class:`subscriber.sinks.spark.copy.copier.CopyRunner`.

    Args:
        spark: a session. Its executors can access the lake and the publisher, and have this package, pyarrow and ADBC's driver.
        location: of the lake.
    """

    def __init__(self, spark: SparkSession, location: Location) -> None:
        self._spark = spark
        self._location = location
        #: the group of its jobs: another lake's copy may run in the same session
        self.jobs = f"subscriber copy {uuid.uuid4()}"

    def run(self, order: CopyOrder, numbers: Sequence[int], target_rows: int, stop: threading.Event) -> CopyFailure | None:
        location = self._location

        def work(found: Iterable[int]) -> Iterator[CopyFailure | None]:
            return _copy_parts(location, order, found, target_rows)

        context = self._spark.sparkContext
        try:
            context.setLocalProperty("spark.scheduler.pool", "copy")
            context.setJobGroup(self.jobs, f"subscriber: {job_name('initial copy', [order.base])}")
            # each worker of the order is a task that reads its parts one by one: so there are no more sessions than the order allows
            slices = max(min(order.workers, len(numbers)), 1)
            return worst_failure(context.parallelize(numbers, slices).mapPartitions(work).collect())
        except job_errors() as error:
            raise job_failed(self._spark, error) from error

    def cancel(self) -> None:
        """Cancel only its own jobs, because the session may be shared."""
        with contextlib.suppress(*job_errors()):
            self._spark.sparkContext.cancelJobGroup(self.jobs)


def _copy_parts(location: Location, order: CopyOrder, numbers: Iterable[int], target_rows: int) -> Iterator[CopyFailure | None]:
    """Store parts on an executor."""
    storage = Storage.open(location)
    for number in numbers:
        yield try_copy_part(storage, order, number, target_rows, stop=threading.Event(), sessions=Sessions())
    forget_jars()
