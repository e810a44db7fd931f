"""Parts of a copy as tasks of Spark: a job an order, in a pool of its own, so that rounds find a free core beside it."""

from __future__ import annotations

import base64
import contextlib
import pickle
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from subscriber.sinks.spark.copier import attempt, worst
from subscriber.sinks.spark.copyorder import CopyFailure, CopyOrder
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.session.jobs import forget_jars, job_errors, job_failed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["SparkCopyRunner"]


class SparkCopyRunner:
    """A :class:`subscriber.sinks.spark.copier.CopyRunner`.

    Args:
        spark: a session; its executors reach the lake and the publisher, and have this package, pyarrow and ADBC's driver.
        location: of the lake.
    """

    def __init__(self, spark: SparkSession, location: Location) -> None:
        self._spark = spark
        self._location = location
        #: the group of its jobs; another lake's copy may be in the same session
        self.jobs = f"subscriber copy {uuid.uuid4()}"

    def run(self, order: CopyOrder, numbers: Sequence[int], target_rows: int, stop: threading.Event) -> CopyFailure | None:
        """See the protocol."""
        location = self._location
        packed = base64.b64encode(pickle.dumps(order)).decode()

        def work(found: Iterable[int]) -> Iterator[CopyFailure | None]:
            return copy_parts(location, packed, found, target_rows)

        context = self._spark.sparkContext
        try:
            context.setLocalProperty("spark.scheduler.pool", "copy")
            context.setJobGroup(self.jobs, "initial copy")
            # a worker of the order is a task, which reads one part after another: the publisher has no more sessions than it asked for
            slices = max(min(order.workers, len(numbers)), 1)
            return worst(context.parallelize(numbers, slices).mapPartitions(work).collect())
        except job_errors() as error:
            raise job_failed(self._spark, error) from error

    def cancel(self) -> None:
        """Its own jobs alone: the session may be somebody else's."""
        with contextlib.suppress(*job_errors()):
            self._spark.sparkContext.cancelJobGroup(self.jobs)


def copy_parts(location: Location, packed: str, numbers: Iterable[int], target_rows: int) -> Iterator[CopyFailure | None]:
    """What an executor does."""
    storage = Storage.open(location)
    # from the driver of this job, by Spark's own channel, which carries pickled code anyway
    order: CopyOrder = pickle.loads(base64.b64decode(packed))  # noqa: S301
    for number in numbers:
        yield attempt(storage, order, number, target_rows)
    forget_jars()
