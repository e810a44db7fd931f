"""``spark-apply``: from its arguments to the loop."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from subscriber.sinks.spark.applied import Cut
from subscriber.sinks.spark.applier import Applier, ApplierSettings
from subscriber.sinks.spark.apply_loop import apply_forever
from subscriber.sinks.spark.copier import Copier, LocalCopyRunner
from subscriber.sinks.spark.copyjobs import SparkCopyRunner
from subscriber.sinks.spark.engines import Engine, LocalEngine
from subscriber.sinks.spark.location import Location
from subscriber.sinks.spark.rewrite import RewriteEngine
from subscriber.sinks.spark.session import spark_session
from subscriber.sinks.spark.storage import Storage

__all__ = ["apply_lake"]

_log = logging.getLogger(__name__)


def apply_lake(
    lake: str,
    stop: threading.Event,
    *,
    engine: str,
    master: str | None,
    conf: Mapping[str, str],
    packages: str | None,
    target_rows: int,
    once: bool,
) -> None:
    """See :func:`subscriber.subscription.targets.spark_apply`."""
    location = Location.parse(lake if "://" in lake else f"spark://{lake}")
    storage = Storage.open(location)
    applier_settings = ApplierSettings(target_rows=target_rows)
    if engine == "local":
        with Copier(storage, LocalCopyRunner(storage), target_rows).running():
            apply_forever(Applier(storage, LocalEngine(storage), applier_settings), stop, _tell, once=once)
        return
    spark = spark_session(master, conf, packages=packages)
    try:
        doing: Engine = RewriteEngine(spark, location)
        with Copier(storage, SparkCopyRunner(spark, location), target_rows).running():
            apply_forever(Applier(storage, doing, applier_settings), stop, _tell, once=once)
    finally:
        spark.stop()


def _tell(cut: Cut) -> None:
    _log.info("published %s, %d tables", cut.lsn, len(cut.tables))
