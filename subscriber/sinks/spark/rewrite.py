"""Engine ``rewrite``: the units of all tables as one Spark job. Executors rewrite the touched files by pyarrow; no jar, no shuffle."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from subscriber.errors import SubscriberError, TargetError
from subscriber.sinks.spark.engines import UnitEngine
from subscriber.sinks.spark.jobs import job_errors, job_failed
from subscriber.sinks.spark.location import Location
from subscriber.sinks.spark.merge import NewFile, Unit, UnitResult, merge_unit
from subscriber.sinks.spark.missing import Missing
from subscriber.sinks.spark.storage import Storage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["RewriteEngine"]

_RESULT = "number long, result string, error string"


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

        def work(batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
            return run_units(location, batches)

        rows = [(number, base64.b64encode(pickle.dumps(unit)).decode()) for number, unit in enumerate(units)]
        try:
            context = self._spark.sparkContext
            frame = self._spark.createDataFrame(context.parallelize(rows, len(rows)), "number long, unit string")
            found = frame.mapInArrow(work, _RESULT).collect()
        except job_errors() as error:
            raise job_failed(self._spark, error) from error
        written: dict[int, UnitResult] = {}
        for number, result, failure in found:
            if failure is not None:
                raise TargetError(failure, hint="nothing of this round was published")
            written[number] = _result(json.loads(result))
        return [written[number] for number in range(len(units))]


def run_units(location: Location, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """What an executor does."""
    storage = Storage.open(location)
    for batch in batches:
        for number, packed in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True):
            # from the driver of this job, by Spark's own channel, which carries pickled code anyway
            unit: Unit = pickle.loads(base64.b64decode(packed))  # noqa: S301
            result: str | None = None
            failure: str | None = None
            try:
                result = json.dumps(_packed(merge_unit(storage, unit)))
            except SubscriberError as error:
                failure = error.one_line()
            yield pa.record_batch(
                [pa.array([number], pa.int64()), pa.array([result], pa.string()), pa.array([failure], pa.string())],
                names=["number", "result", "error"],
            )


def _packed(result: UnitResult) -> dict[str, Any]:
    return {"files": [_plain(file) for file in result.files], "missing": asdict(result.missing)}


def _result(data: dict[str, Any]) -> UnitResult:
    return UnitResult([_new_file(file) for file in data["files"]], Missing(**data["missing"]))


def _plain(file: NewFile) -> dict[str, Any]:
    values = asdict(file)
    values["range"] = base64.b64encode(pickle.dumps((file.low, file.high))).decode()
    del values["low"], values["high"]
    return values


def _new_file(data: dict[str, Any]) -> NewFile:
    low, high = pickle.loads(base64.b64decode(data.pop("range")))  # noqa: S301 -- see above
    return NewFile(**data, low=low, high=high)
