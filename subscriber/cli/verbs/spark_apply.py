"""``subscriber spark-apply``: apply the landed batches of a lake, with or without Spark."""

from __future__ import annotations

import argparse
import asyncio
import threading
from functools import partial

from subscriber.cli.http.applier_metrics import ApplierSite
from subscriber.cli.http.serving import served
from subscriber.cli.notices import confirm
from subscriber.cli.signals import clean_end
from subscriber.config import parse_assignments
from subscriber.sinks.required_packages import requiring
from subscriber.sinks.spark.kind import LAKE_NEEDS

__all__ = ["add_arguments"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the verb's arguments."""
    parser.description = (
        "Applies the batches that `subscriber run --target spark:///path` lands to the lake's Delta tables. Run one per lake."
    )
    parser.add_argument("lake", metavar="LAKE", help="the target of the subscription, spark:///path, or its directory")
    parser.add_argument(
        "--engine",
        choices=["local", "spark"],
        help="local: threads of this program, without Spark; spark: executors of Spark "
        "(default: spark with --master, --conf, --py-files or spark-submit, else local)",
    )
    parser.add_argument("--master", help="as spark-submit takes it (default: what Spark's configuration says, else local[*])")
    parser.add_argument("--conf", action="append", default=[], metavar="NAME=VALUE", help="a setting of Spark; may be repeated")
    parser.add_argument("--py-files", metavar="WHEEL", help="this program as a wheel or zip, for executors on which it is not installed")
    parser.add_argument(
        "--freshness",
        metavar="TIME",
        help="how old a change may be when it can be read, for example 500ms, 10s or 1min; a longer time writes fewer bytes (default: 2s)",
    )
    parser.add_argument(
        "--max-write-rate",
        metavar="SIZE/s",
        help="write no more on average, for example 10MB/s, even if changes become older (default: no limit)",
    )
    parser.add_argument(
        "--retain-hours", metavar="N", help="how long removed files, versions and published snapshots can be read (default: 24)"
    )
    parser.add_argument("--target-rows", metavar="N", help="number of rows to aim for in a file (default: 250000)")
    parser.add_argument("--progress", metavar="FILE", help="append a progress event for each round, as a line of JSON")
    parser.add_argument("--http", "--metrics", metavar="HOST:PORT", help="serve metrics for Prometheus and the probes at this address")
    parser.add_argument(
        "--register",
        metavar="CATALOG.SCHEMA",
        help="register the tables in a catalog of Spark, with views of the published snapshot, for example spark_catalog.lake",
    )
    parser.add_argument("--once", action="store_true", help="end when all landed batches are applied; exit status 1 if a table is stopped")
    parser.set_defaults(execute=_execute)


async def _execute(args: argparse.Namespace) -> int:
    with requiring(*LAKE_NEEDS):
        from subscriber.sinks.spark.pipeline.program import apply_lake  # noqa: PLC0415 -- pyarrow and deltalake come with an extra
    given = {name: getattr(args, name) for name in ("freshness", "max_write_rate", "retain_hours", "target_rows")}
    site = ApplierSite()
    stop = threading.Event()
    apply = partial(
        apply_lake,
        args.lake,
        stop,
        engine=args.engine,
        master=args.master,
        conf=parse_assignments(args.conf, case_matters=True),
        packages=args.py_files,
        parameters={name: value for name, value in given.items() if value is not None},
        progress=args.progress,
        watch=site.collector.watch,
        register=args.register,
        once=args.once,
    )
    with served(args.http, site), clean_end(stop.set) as ending:
        await asyncio.to_thread(apply)
    confirm(args, "stopped" if stop.is_set() else "applied everything that was landed")
    return ending.status
