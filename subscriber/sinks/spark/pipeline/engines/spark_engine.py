"""Engine ``spark``: executors of Spark fold the changes, and read and write the rows of tables; the driver plans and commits.

A round is one query of Spark: ``mapInArrow`` over a DataFrame with a row for each task. The tasks run the units of all tables: a few tasks
for each core, each with several units, because starting a task takes longer than a small unit does. There are two kinds of units:

* Usually a unit rewrites its files with pyarrow, and delta-rs commits them. This needs no jar and no shuffle.
* If a table has a feature that only Delta writes, and the session has Delta's extension, its units only fold their changes
  (``units.py``), and Delta's own MERGE INTO applies the folded changes. MERGE accepts one source row for each key, and supports neither
  unchanged TOASTed values nor an UPDATE whose row does not exist. So a unit reads the keys and unchanged values that it needs from the
  table, and writes the final row of each key. MERGE's own commit contains the LSN, by Delta's settings for it. On S3 this needs a log store
  that the user has chosen: Delta's default one may replace a version that another program commits at the same time.

MERGE needs a key. It is not used for REPLICA IDENTITY FULL (it cannot distinguish equal rows), new types of columns, and tables with
columns of names that MERGE uses itself. Delta also deletes the rows for TRUNCATE, in the same commit, and inserts the first ones.
"""

from __future__ import annotations

import heapq
import logging
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Final, TypeVar

import pyarrow as pa

from subscriber.errors import SubscriberError
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.files.location import Location, escape_glob
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.merge.parquet import read_table_files
from subscriber.sinks.spark.merge.units import deleted_flag
from subscriber.sinks.spark.merge.work_unit import FoldedFile, Unit, UnitResult
from subscriber.sinks.spark.pipeline.engines.engine import Engine, TableResult, TableRound, attempt
from subscriber.sinks.spark.pipeline.engines.merge_sql import delete_statement, key_limits, merge_statement
from subscriber.sinks.spark.schema.table_schema import folded_name
from subscriber.sinks.spark.session.jobs import forget_jars, job_errors, job_failed, job_name
from subscriber.sinks.spark.session.object_stores import creates_versions_once, hadoop_uri
from subscriber.sinks.spark.session.spark_session import has_delta, refuse_connect, require_delta_jar
from subscriber.sinks.spark.tables.column_mapping import ROUND_DIRECTORY
from subscriber.sinks.spark.tables.table_errors import CommitConflict

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["SparkEngine", "packed", "task_count"]

_log = logging.getLogger(__name__)

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_TASKS_PER_CORE: Final = 3
"""At most. More than one, because tasks take different times; few, because starting one takes 0.1 s."""
_UNIT_ROWS: Final = 50_000
"""A unit without rows takes as long as rewriting this many rows."""
_TASK_ROWS: Final = 8 * _UNIT_ROWS
"""Below this, a task more than there are cores takes longer to start than it saves: with Delta's jar it needs 0.2 s of a processor."""
_VIOLATION: Final = re.compile("DELTA_VIOLATE_CONSTRAINT|DELTA_NOT_NULL_CONSTRAINT_VIOLATED")
"""In Delta's errors about rows. Their text has values of the row."""
_DELTAS_NAMES: Final = frozenset(
    ("_file_name_", "_row_id_", "_row_dropped_", "_target_row_present_", "_source_row_present_", "_tmp_metadata_row_index")
)
"""MERGE creates columns with these names, and fails if the table has one."""
_SETTINGS: Final = {
    "spark.sql.session.timeZone": "UTC",
    # other types have no statistics, and a smaller range
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # the source is our own file, which does not change: MERGE need not materialize it for its second pass
    "spark.databricks.delta.merge.materializeSource": "none",
    # a missing or incomplete file must be an error, even if the user's other jobs ignore such files
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.files.ignoreCorruptFiles": "false",
    # otherwise MERGE would write damaged values again as sound ones
    "parquet.page.verify-checksum.enabled": "true",
    # files are written and read as by pyarrow, which has only one calendar; and the row counts of files are needed
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.databricks.delta.stats.collect": "true",
    # lists with different elements must have different texts
    "spark.sql.legacy.castComplexTypesToString.enabled": "false",
    # the affected files have many rows and the source has few: avoid sorting all of them for a join
    "spark.sql.join.preferSortMergeJoin": "false",
}


class SparkEngine(Engine):
    """See the module.

    Args:
        spark: a session. Its executors can access the lake at ``location``, and have this package and pyarrow.
        location: of the lake.
        merges_all: whether MERGE is used wherever it can be. For tests.

    Raises:
        ConfigurationError: the session has Delta's extension, but a jar is missing or does not fit; or it is one of Spark Connect.
        SparkLost: Spark has ended.
    """

    name: ClassVar[str] = "spark"
    round_rows: ClassVar[int] = 2_000_000

    def __init__(self, spark: SparkSession, location: Location, *, merges_all: bool = False) -> None:
        refuse_connect(spark)
        self._spark = spark
        self._location = location
        self._storage = Storage.open(location)
        self._merges_all = merges_all
        try:
            self._can_merge = has_delta(spark)
            if self._can_merge:
                require_delta_jar(spark)
                self._can_merge = creates_versions_once(spark, location.uri)
        except job_errors() as error:
            raise job_failed(spark, error) from error
        self._units = spark.newSession()
        self._sessions: dict[str, SparkSession] = {}

    def merges(self, work: TableRound) -> bool:
        # Delta itself writes all features, delta-rs does not
        if work.delta.is_there and work.delta.is_append_only:
            return False
        only_delta = work.delta.is_there and work.delta.unwritable(columns=False) is not None
        chosen = only_delta or (self._merges_all and bool(work.task.base) and not work.plan.cleared)
        return self._can_merge and chosen and _is_mergeable(work)

    def refuses(self, work: TableRound) -> str | None:
        return None if self.merges(work) else super().refuses(work)

    def refuses_columns(self, work: TableRound) -> str | None:
        added = self.merges(work) and work.delta.takes_columns_of_delta(work.task.schema.current)
        return None if added else super().refuses_columns(work)

    def add_columns(self, work: TableRound) -> None:
        if work.delta.unwritable(columns=True) is None:
            super().add_columns(work)
            return

        def by_delta(columns: pa.Schema, note: str) -> None:
            from pyspark.sql.pandas.types import from_arrow_type  # noqa: PLC0415 -- an extra
            from pyspark.sql.types import StructField, StructType  # noqa: PLC0415

            fields = [StructField(one.name, from_arrow_type(one.type, prefer_timestamp_ntz=True)) for one in columns]
            try:
                rows = self._spark.createDataFrame([], StructType(fields)).write.format("delta").mode("append")
                rows.option("mergeSchema", "true").option("userMetadata", note).save(hadoop_uri(work.delta.uri))
            except job_errors() as error:
                raise job_failed(self._spark, error) from error

        work.delta.add_columns(work.task.schema.current, by_delta)

    def divide(self, work: TableRound) -> Sequence[Unit]:
        if not self.merges(work):
            return work.plan.units
        self._storage.make_directory(ROUND_DIRECTORY)
        return [replace(unit, folded_into=ROUND_DIRECTORY) for unit in work.plan.units]

    def outcomes(
        self, function: Callable[[Storage, _Item], _Result], items: Sequence[_Item], weights: Sequence[int], what: str
    ) -> list[_Result | SubscriberError]:
        if not items:
            return []
        location = self._location

        def work(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return _run_packs(location, function, batches)

        try:
            context = self._spark.sparkContext
            loads = [weight + _UNIT_ROWS for weight in weights]
            packs = packed(loads, task_count(sum(loads), context.defaultParallelism))
            tasks = [pickle.dumps([(number, items[number]) for number in pack]) for pack in packs]
            _name_jobs(context, what)
            # so that each row is a task
            self._units.conf.set("spark.sql.leafNodeDefaultParallelism", str(len(tasks)))
            units = self._units.createDataFrame(pa.table({"units": pa.array(tasks, pa.binary())}))
            found = units.mapInArrow(work, "outcomes binary").toArrow()
        except job_errors() as error:
            raise job_failed(self._spark, error) from error
        outcomes: dict[int, _Result | SubscriberError] = {}
        for outcome in found["outcomes"].to_pylist():
            outcomes.update(pickle.loads(outcome))  # noqa: S301 -- of our executors
        return [outcomes[number] for number in range(len(items))]

    def commit(self, work: TableRound, results: Sequence[UnitResult]) -> TableResult:
        # after a TRUNCATE alone there are no units
        if results[0].folded is None if results else not self.merges(work):
            return super().commit(work, results)
        found = TableResult()
        for result in results:
            found.missing.add(result.missing)
        self._merge(work, [result.folded for result in results if result.folded is not None and result.folded.rows])
        work.delta.load()
        work.delta.make_durable()
        if work.delta.applied(work.application) != work.source.reached:
            # nothing had to be changed: then MERGE makes no commit
            work.delta.commit([], [], work.application, work.source.reached, note=work.note)
        return found

    def _merge(self, work: TableRound, files: Sequence[FoldedFile]) -> None:
        cleared = work.plan.cleared
        if not files and not cleared:
            return
        schema, uri = work.task.schema, hadoop_uri(work.delta.uri)
        try:
            session = self._session(work)
            _name_jobs(self._spark.sparkContext, job_name("MERGE INTO", [work.name], Lsn(work.task.after), work.source.reached))
            if files:
                self._read(session, files).createOrReplaceTempView("changes")
                limits = None if cleared else key_limits(schema, [file.keys for file in files])
                known = all(file.known for file in files)
                statement = merge_statement(uri, schema, "changes", deleted_flag(schema), limits, known=known, cleared=cleared)
            else:
                statement = delete_statement(uri)
            session.sql(statement)
        except job_errors() as error:
            text = str(error)
            if "DELTA_CONCURRENT" in text or "ConcurrentModification" in text:
                raise CommitConflict(work.delta.uri, work.delta.directory) from error
            if _VIOLATION.search(text):
                raise work.refused("rows violate a constraint") from None
            for path in work.delta.table_files():
                if path.rpartition("/")[2] in text:
                    # raises the error of a damaged file, if it is one
                    read_table_files(self._storage, work.delta.directory, [path], schema.current)
            raise job_failed(self._spark, error) from error

    def _session(self, work: TableRound) -> SparkSession:
        """A session only for this table, because the ``txn`` of Delta's commit is a setting of the session."""
        if work.application not in self._sessions:
            self._sessions[work.application] = self._spark.newSession()
        session = self._sessions[work.application]
        settings = {
            **_SETTINGS,
            # for Delta's own bookkeeping; the default is 50 tasks for each table
            "spark.databricks.delta.snapshotPartitions": str(max(2, min(session.sparkContext.defaultParallelism, 16))),
            "spark.databricks.delta.write.txnAppId": work.application,
            "spark.databricks.delta.write.txnVersion": str(int(work.source.reached)),
            "spark.databricks.delta.commitInfo.userMetadata": work.note,
        }
        for name, value in settings.items():
            session.conf.set(name, value)
        return session

    def _read(self, session: SparkSession, files: Sequence[FoldedFile]) -> DataFrame:
        root = str(self._storage.root) if self._storage.root is not None else self._storage.place.rstrip("/")
        # Spark takes the size of the files for the size of the rows in memory. Then a task would hold more than fits
        factor = sum(file.memory for file in files) / sum(file.size for file in files)
        session.conf.set("spark.sql.sources.fileCompressionFactor", str(max(factor, 1.0)))
        return session.read.parquet(*(escape_glob(hadoop_uri(f"{root}/{file.path}")) for file in files))


def _name_jobs(context: SparkContext, name: str) -> None:
    """Name the following jobs of this thread. Their group is the lake's applier, whose jobs can so be found and cancelled."""
    context.setJobGroup("subscriber spark-apply", f"subscriber: {name}")


def task_count(rows: int, cores: int) -> int:
    """The largest number of tasks for work of so many rows."""
    return min(max(rows // _TASK_ROWS, cores), cores * _TASKS_PER_CORE)


def packed(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Divide numbered units into at most ``parts`` packs of about equal weight. Return the numbers in each pack."""
    packs: list[list[int]] = [[] for _ in range(min(parts, len(weights)))]
    lightest = [(0, number) for number in range(len(packs))]
    for unit in sorted(range(len(weights)), key=lambda unit: -weights[unit]):
        weight, number = lightest[0]
        packs[number].append(unit)
        heapq.heapreplace(lightest, (weight + weights[unit], number))
    return packs


def _is_mergeable(work: TableRound) -> bool:
    """Whether MERGE can apply the changes of a table, see the module."""
    task, schema = work.task, work.task.schema
    keyed = bool(schema.keys) and not schema.full
    plain = not task.rewrite and not work.overwrite and len(task.stretches) == 1
    return keyed and plain and _DELTAS_NAMES.isdisjoint(map(folded_name, schema.current.names))


def _run_packs(
    location: Location, function: Callable[[Storage, _Item], _Result], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Call a function on an executor, for each item in the rows. Return for each item its number, and its result or the error."""
    storage = Storage.open(location)
    try:
        for batch in batches:
            for pack in batch.column(0).to_pylist():
                items = pickle.loads(pack)  # noqa: S301 -- of our driver
                outcomes = [(number, attempt(function, storage, item)) for number, item in items]
                yield pa.record_batch([pa.array([pickle.dumps(outcomes)], pa.binary())], names=["outcomes"])
    finally:
        forget_jars()
