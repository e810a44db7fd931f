"""Spark jobs: their names, their errors, and the cleanup at the end of a task.

An error belongs to the job, which is then retried, or to Spark itself, which needs a new process.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from subscriber.errors import SubscriberError, TargetUnavailable
from subscriber.protocol.lsn import Lsn

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LENGTH: Final = 200
"""Of the tables' names in a job's name, in characters."""
_MISSING: Final = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")

__all__ = ["SparkLost", "end_session", "first_words", "forget_jars", "has_class", "job_errors", "job_failed", "job_name"]


class SparkLost(SubscriberError):
    """The driver's Java process, or the application on its cluster, has ended. Only a new process of ours can start another one."""


def job_errors() -> tuple[type[Exception], ...]:
    """The exceptions that pyspark raises if a job fails, or if a Java process does not answer."""
    from py4j.protocol import Py4JError  # noqa: PLC0415 -- with pyspark, which is an extra
    from pyspark.errors import PySparkException  # noqa: PLC0415

    return (PySparkException, Py4JError, OSError, EOFError)


def job_failed(spark: SparkSession, error: BaseException) -> SubscriberError:
    """The error to raise in place of an exception in :func:`job_errors`."""
    what = first_words(error)
    if not _is_alive(spark):
        return SparkLost(f"Spark has ended: {what}", hint="start the applier again (a supervisor does): it resumes where it was")
    missing = _MISSING.search(str(error))
    if missing is not None:
        return TargetUnavailable(
            f'executors have no module "{missing[1]}"',
            hint="--py-files ships this program as a wheel; they need the other packages installed",
        )
    return TargetUnavailable(f"the Spark job failed: {what}", hint="it is retried; see Spark's log")


def first_words(error: BaseException) -> str:
    """The first line of Spark's own message. Python's message in a task may contain a value."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # py4j's text begins with the call; Java's exception follows after a colon
    telling = [line for line in lines if "Job aborted" in line] or [line for line in lines if line.startswith(": ")] or lines
    return telling[0].removeprefix(": ").removeprefix("org.apache.spark.SparkException: ") if telling else type(error).__name__


def _is_alive(spark: SparkSession) -> bool:
    java = spark.sparkContext._jsc  # noqa: SLF001 -- pyspark has no other way to ask
    try:
        return java is not None and not java.sc().isStopped()
    except job_errors():
        return False


def has_class(spark: SparkSession, name: str) -> bool:
    """Whether the driver's Java process can load a class."""
    java: Any = spark.sparkContext._jvm  # noqa: SLF001 -- pyspark has no other way to ask
    try:
        java.Thread.currentThread().getContextClassLoader().loadClass(name)
    except job_errors():
        return False
    return True


def end_session(spark: SparkSession) -> None:
    """Stop the session, if it still exists."""
    with contextlib.suppress(*job_errors()):
        spark.stop()


def forget_jars() -> None:
    """Remove jars from the caches of Python's import system. Call it at the end of a task.

    Spark puts the jars of ``spark.jars.packages`` on the path of its Python workers, because they may contain Python. It also invalidates
    all import caches before each task. Then Python up to 3.11 reads the directory of each zip file again. With Delta's jars, this takes 0.2
    s of processor time for each task. The next import still finds them on the path.
    """
    for path in [path for path in list(sys.path_importer_cache) if path.endswith(".jar")]:
        sys.path_importer_cache.pop(path, None)


def job_name(phase: str, tables: Iterable[object], after: Lsn | None = None, to: Lsn | None = None) -> str:
    """The name of a job in Spark's UI and event log: its phase, the tables, and the LSNs that its changes are between."""
    names = [str(table) for table in tables]
    shown: list[str] = []
    for name in names:
        if shown and len(", ".join([*shown, name])) > _LENGTH:
            break
        shown.append(name)
    more = f" and {len(names) - len(shown)} more" if len(shown) < len(names) else ""
    lsns = "" if to is None else f", up to {to}" if after is None else f", {after} to {to}"
    return f"{phase}: {', '.join(shown)}{more}{lsns}"
