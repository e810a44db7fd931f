"""Jobs of Spark that fail: whether it was the job, which may be tried again, or Spark itself is gone."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from subscriber.errors import SubscriberError, TargetUnavailable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["SparkLost", "end_session", "job_errors", "job_failed"]


class SparkLost(SubscriberError):
    """The driver's Java process, or the application on its cluster, has ended. Only a new process of ours gets another one."""


def job_errors() -> tuple[type[Exception], ...]:
    """What pyspark raises of a job: refused by Spark, or no answer from its Java process."""
    from py4j.protocol import Py4JError  # noqa: PLC0415 -- with pyspark, which is an extra
    from pyspark.errors import PySparkException  # noqa: PLC0415

    return (PySparkException, Py4JError, OSError, EOFError)


def job_failed(spark: SparkSession, error: BaseException) -> SubscriberError:
    """What to raise in place of one of :func:`job_errors`."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    if not _is_alive(spark):
        return SparkLost(
            f"Spark has ended: {first}", hint="start the applier again: it goes on where it was; a supervisor does that by itself"
        )
    return TargetUnavailable(f"the Spark job failed: {first}", hint="it is tried again; see Spark's log")


def _is_alive(spark: SparkSession) -> bool:
    if spark.sparkContext._jsc is None:  # noqa: SLF001 -- pyspark has no other way to ask
        return False
    try:
        return not spark.sparkContext._jsc.sc().isStopped()  # noqa: SLF001 -- pyspark has no other way to ask
    except job_errors():
        return False


def end_session(spark: SparkSession) -> None:
    """Stop it, if there is anything left to be stopped."""
    with contextlib.suppress(*job_errors()):
        spark.stop()
