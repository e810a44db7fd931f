"""Starts the applier, with its engine and its copies, as a program (``spark-apply``) or as a thread of ``run``."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from subscriber.sinks.spark.catalog.snapshots import Snapshot
from subscriber.sinks.spark.copy.copier import Copier, CopyRunner, LocalCopyRunner, SparkCopyRunner
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.pipeline.applier import Applier, ApplierSettings
from subscriber.sinks.spark.pipeline.apply_loop import apply_forever
from subscriber.sinks.spark.pipeline.engines import Engine, LocalEngine
from subscriber.sinks.spark.pipeline.spark_engine import SparkEngine
from subscriber.sinks.spark.session.jobs import end_session
from subscriber.sinks.spark.session.spark_session import is_under_spark, spark_session

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
    target_rows: int,
    once: bool,
) -> None:
    """Apply a lake until ``stop`` is set, see :func:`subscriber.subscription.targets.spark_apply`."""
    location = Location.of(lake)
    storage = Storage.open(location)
    settings = ApplierSettings(target_rows=target_rows)
    if engine is None:
        engine = "spark" if master or conf or packages or is_under_spark() else "local"
    if engine == "local":
        with Copier(storage, LocalCopyRunner(storage), target_rows).running() as copier:
            apply_forever(Applier(storage, LocalEngine(storage), settings), stop, _tell, once=once, check=copier.check)
        return
    spark = spark_session(master, conf, packages=packages)
    try:
        with Copier(storage, SparkCopyRunner(spark, location), target_rows).running() as copier:
            apply_forever(Applier(storage, SparkEngine(spark, location), settings), stop, _tell, once=once, check=copier.check)
    finally:
        end_session(spark)


def apply_in_process(location: Location, stop: threading.Event, rest_seconds: float) -> None:
    """Apply a lake in this process, as its URL says, until ``stop`` is set. Blocks, so call it in a thread.

    The Spark session stays open, whether it existed before or is started here, because starting one takes a quarter of a minute.

    Args:
        location: its ``apply`` selects the engine.
        stop: see :func:`subscriber.sinks.spark.pipeline.apply_loop.apply_forever`.
        rest_seconds: likewise.

    Raises:
        SubscriptionInUse: the lake has an applier.
        SubscriberError: an error that a retry does not fix.
    """
    storage = Storage.open(location)
    settings = ApplierSettings(target_rows=location.target_rows)
    runner: CopyRunner
    engine: Engine
    if location.apply == "local":
        runner, engine = LocalCopyRunner(storage), LocalEngine(storage)
    else:
        spark = spark_session("local[*]")
        runner, engine = SparkCopyRunner(spark, location), SparkEngine(spark, location)
    with Copier(storage, runner, location.target_rows).running() as copier:
        apply_forever(Applier(storage, engine, settings), stop, _tell, rest_seconds=rest_seconds, check=copier.check)


def _tell(snapshot: Snapshot) -> None:
    _log.info("published %s, %d tables", snapshot.lsn, len(snapshot.tables))
