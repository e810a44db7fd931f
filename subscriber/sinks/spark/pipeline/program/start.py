"""Starts the applier, with its engine, as a program (``spark-apply``) or as a thread of ``run``."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from subscriber.errors import ConfigurationError, TargetError
from subscriber.sinks.spark.catalog.snapshots import Snapshot
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.pipeline.applier import Applier, ApplierSettings
from subscriber.sinks.spark.pipeline.engines.engine import Engine
from subscriber.sinks.spark.pipeline.engines.local_engine import LocalEngine
from subscriber.sinks.spark.pipeline.engines.spark_engine import SparkEngine
from subscriber.sinks.spark.pipeline.pace import Pace
from subscriber.sinks.spark.pipeline.program.apply_loop import apply_forever
from subscriber.sinks.spark.pipeline.program.registration import CatalogRegistration, require_catalog
from subscriber.sinks.spark.pipeline.progress import ApplierProgress, as_line
from subscriber.sinks.spark.session.jobs import end_session
from subscriber.sinks.spark.session.spark_session import is_under_spark, spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["apply_in_process", "apply_lake"]

_log = logging.getLogger(__name__)


def apply_lake(
    lake: str,
    stop: threading.Event,
    *,
    engine: str | None,
    master: str | None,
    conf: Mapping[str, str],
    packages: str | None,
    parameters: Mapping[str, str],
    progress: str | None,
    watch: Callable[[ApplierProgress], None] | None,
    register: str | None,
    once: bool,
) -> None:
    """Apply landed batches to the tables of a lake until ``stop`` is set. Blocks.

    Args:
        lake: its URL, or its directory.
        stop: see above.
        engine: ``local`` runs in threads, ``spark`` on executors. None: ``spark`` if an option for Spark is given, or under spark-submit,
            else ``local``.
        master: as for :func:`subscriber.sinks.spark.session.spark_session.spark_session`.
        conf: as above.
        packages: as above.
        parameters: parameters that take precedence over those in the lake's URL: ``freshness``, ``max_write_rate``, ``retain_hours``,
            ``target_rows``.
        progress: a file to which an event in JSON is appended for each round.
        watch: is given the progress of the applier before it starts, for its metrics.
        register: ``CATALOG.SCHEMA`` of Spark in which the tables are registered. None: nowhere.
        once: end when nothing is waiting.

    Raises:
        ConfigurationError: the URL is invalid, or a required package is not installed.
        SubscriptionInUse: the lake already has an applier.
        TargetError, DataLossError: the lake cannot be read or written, landed changes are lost, or with ``once`` a table is stopped.
    """
    location = Location.of(lake).changed(parameters)
    if engine is None:
        engine = "spark" if master or conf or packages or register or is_under_spark() else "local"
    if engine == "local":
        options = {"--master": master, "--conf": conf, "--py-files": packages}
        if given := [option for option, value in options.items() if value]:
            raise ConfigurationError(f"engine local does not use {' and '.join(given)}", hint="use --engine spark, or omit that")
        if register is not None:
            raise ConfigurationError("engine local has no catalog", hint="--register needs --engine spark")
    with _progress_file(progress) as progress_file:
        spark = spark_session(master, conf, packages=packages) if engine == "spark" else None
        if spark is not None and (ui := spark.sparkContext.uiWebUrl) is not None:
            _log.info("Spark UI: %s", ui)
        try:
            _apply(location, spark, stop, progress_file=progress_file, watch=watch, register=register, once=once)
        finally:
            if spark is not None:
                end_session(spark)


def apply_in_process(location: Location, stop: threading.Event, rest_seconds: float) -> None:
    """Apply a lake in this process, as its URL says, see :func:`apply_forever`. Blocks, so call it in a thread.

    The Spark session stays open, whether it existed before or is started here, because starting one takes a quarter of a minute.

    Raises:
        SubscriptionInUse: the lake has an applier.
        SubscriberError: an error that a retry does not fix; after ``stop`` also any other, or tables that are stopped.
    """
    spark = spark_session("local[*]") if location.apply == "spark" else None
    _apply(location, spark, stop, rest_seconds=rest_seconds)


def _apply(
    location: Location,
    spark: SparkSession | None,
    stop: threading.Event,
    *,
    progress_file: TextIO | None = None,
    watch: Callable[[ApplierProgress], None] | None = None,
    register: str | None = None,
    once: bool = False,
    rest_seconds: float = 0.0,
) -> None:
    storage = Storage.open(location)
    settings = ApplierSettings(
        target_rows=location.target_rows,
        retain_hours=location.retain_hours,
        freshness=location.freshness,
        vectors=location.deletion_vectors,
        without_vectors=location.without_vectors,
    )
    engine: Engine = LocalEngine(storage) if spark is None else SparkEngine(spark, location)
    applier = Applier(storage, engine, settings)
    if watch is not None:
        watch(applier.progress)

    registration: CatalogRegistration | None = None
    if register is not None and spark is not None:
        require_catalog(spark, register)
        registration = CatalogRegistration(spark, storage, register, partial(applier.failed, what="registration"))

    def published(snapshot: Snapshot) -> None:
        _log.info("published %s, %d tables", snapshot.lsn, len(snapshot.tables))
        if progress_file is not None and applier.progress.recent:
            progress_file.write(as_line(applier.progress.recent[-1]) + "\n")
            progress_file.flush()
        if registration is not None:
            registration.publish()

    pace = Pace(location.freshness, location.max_write_rate)
    registering = registration.running() if registration is not None else contextlib.nullcontext()
    check = registration.check if registration is not None else lambda: None
    with registering:
        apply_forever(applier, stop, published, pace=pace, once=once, rest_seconds=rest_seconds, check=check)
    if rest_seconds or (once and not stop.is_set()):
        _require_all_applied(applier.progress)


def _require_all_applied(progress: ApplierProgress) -> None:
    stopped = [*map(str, sorted(progress.stopped)), *(f"change log of {name}" for name in sorted(progress.stopped_logs))]
    if stopped:
        raise TargetError(f"stopped, and not applied: {', '.join(stopped)}", hint="`subscriber status` tells the reasons and the remedies")


@contextlib.contextmanager
def _progress_file(path: str | None) -> Iterator[TextIO | None]:
    if path is None:
        yield None
        return
    try:
        file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 -- closed below
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}", hint="choose another file for --progress") from error
    with file:
        yield file
