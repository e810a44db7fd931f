"""Engine ``rewrite``: the units of all tables as one Spark job. Executors rewrite the touched files by pyarrow; no jar, no shuffle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from subscriber.errors import SubscriberError, TargetError
from subscriber.sinks.spark.engines import UnitEngine
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.merge.merge_unit import merge_unit
from subscriber.sinks.spark.merge.unit import Unit, UnitResult
from subscriber.sinks.spark.session.jobs import forget_jars, job_errors, job_failed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["RewriteEngine"]


class RewriteEngine(UnitEngine):
    """See the module.

    Args:
        spark: a session; its executors reach the lake at ``location``, and have this package and pyarrow.
        location: of the lake.
    """

    def __init__(self, spark: SparkSession, location: Location) -> None:
        self._spark = spark
        self._location = location

    @property
    def name(self) -> str:
        """See :attr:`subscriber.sinks.spark.engines.Engine.name`."""
        return "rewrite"

    def run(self, units: Sequence[Unit]) -> list[UnitResult]:
        """See :meth:`UnitEngine.run`."""
        if not units:
            return []
        location = self._location

        def work(unit: Unit) -> tuple[UnitResult | None, str | None]:
            return run_unit(location, unit)

        try:
            # no DataFrame: the work is Python's alone, and planning a query for it takes as long again
            found = self._spark.sparkContext.parallelize(units, len(units)).map(work).collect()
        except job_errors() as error:
            raise job_failed(self._spark, error) from error
        written: list[UnitResult] = []
        for result, failure in found:
            if result is None:
                raise TargetError(failure or "a unit of work failed", hint="nothing of this round was published")
            written.append(result)
        return written


def run_unit(location: Location, unit: Unit) -> tuple[UnitResult | None, str | None]:
    """What an executor does: what came of it, or why it failed."""
    try:
        return merge_unit(Storage.open(location), unit), None
    except SubscriberError as error:
        return None, error.one_line()
    finally:
        forget_jars()
