"""Engine ``merge``: Delta's own MERGE INTO, on Spark with the Delta jar. It produces the same rows as engine ``rewrite``.

A table's changes are folded here first, together with the table's rows that they affect. These rows are read here, or by a join if they are
many. Folding is needed because MERGE accepts only one source row for each key, and does not support unchanged TOASTed values or an UPDATE
whose row does not exist. The folded source has the final row of each key. MERGE's own commit contains the LSN, by Delta's settings for it.

MERGE INTO is used only for tables that have a key and rows. The following work is divided into units, as with engine ``rewrite``: first
loads, TRUNCATE, new types of columns, tables without a key or with REPLICA IDENTITY FULL (MERGE cannot distinguish equal rows), tables with
too many small files, rounds of a backlog, and rounds that would leave more rows in files with overlapping keys than a file should have.
Units are folded where they run, each for its range of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from subscriber.sinks.spark.files.errors import arrow_errors
from subscriber.sinks.spark.files.location import Location, escape_glob
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.landing.zone import write_file
from subscriber.sinks.spark.merge.fold import MergedRows, merge_keyed_rows
from subscriber.sinks.spark.merge.keys import is_orderable
from subscriber.sinks.spark.merge.parquet import conformed, read_base, read_changes
from subscriber.sinks.spark.pipeline.engines import RewriteEngine, TableResult, TableRound
from subscriber.sinks.spark.pipeline.merge_sql import merge_statement, selected_rows
from subscriber.sinks.spark.pipeline.plan import BaseFile
from subscriber.sinks.spark.schema.table_schema import SPECIAL, TableSchema, folded_name
from subscriber.sinks.spark.session.jobs import job_errors, job_failed
from subscriber.sinks.spark.tables.data_file import Bound
from subscriber.sinks.spark.tables.delta import CommitConflict

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["MergeEngine"]

_AT_ONCE: Final = 4
"""Number of tables that are merged in parallel."""
_READ_HERE: Final = 2_000_000
"""Number of rows, in files whose keys match, that the driver reads itself. A join of Spark takes seconds even for few rows."""
_FEW_FILES: Final = 16
_LARGE_UNIT: Final = 8
"""As a multiple of the target. MERGE leaves files whose keys overlap. Beyond this, they are too much for one task, so MERGE is used."""
_GROWN: Final = 1.5
"""As a multiple of the target. Beyond this, a unit divides a file into several."""
_BACKLOG: Final = 4
"""A round is a backlog if a table has more changes than the target divided by this. Executors fold it, each for a range of keys."""
_ROUNDED: Final = 10
"""Limits of keys are rounded by at least this number of bits."""
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
    # files are written and read as by pyarrow, which has only one calendar; and the row counts of files are needed
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.databricks.delta.stats.collect": "true",
    # lists with different elements must have different texts
    "spark.sql.legacy.castComplexTypesToString.enabled": "false",
    # even if the table's properties allow it: pyarrow, which reads these files in other engines and in the next round, has no support
    "spark.databricks.delta.merge.deletionVectors.persistent": "false",
    # the affected files have many rows and the source has few: avoid sorting all of them for a join
    "spark.sql.join.preferSortMergeJoin": "false",
}
_PLANNING: Final = ("spark.sql.adaptive.enabled", "spark.sql.shuffle.partitions")


class MergeEngine:
    """An :class:`subscriber.sinks.spark.pipeline.engines.Engine`.

    Args:
        spark: a session with Delta's extension and catalog.
        location: of the lake.
        storage: of the lake.
        directory: for files of a round, relative to the lake.
    """

    name = "merge"

    def __init__(self, spark: SparkSession, location: Location, storage: Storage, directory: str = "round") -> None:
        self._spark = spark
        self._storage = storage
        self._directory = directory
        self._units = RewriteEngine(spark, location)
        self._sessions: dict[str, SparkSession] = {}

    def apply(self, works: Sequence[TableRound]) -> list[TableResult]:
        """Run the units first, then merge the other tables, some in parallel. See the protocol."""
        merged = [number for number, work in enumerate(works) if _is_merged(work)]
        others = [number for number in range(len(works)) if number not in set(merged)]
        found: dict[int, TableResult] = {}
        if others:
            found.update(zip(others, self._units.apply([works[number] for number in others]), strict=True))
        if merged:
            self._storage.make_directory(self._directory)
            with ThreadPoolExecutor(min(_AT_ONCE, len(merged))) as pool:
                found.update(zip(merged, pool.map(lambda number: self._merge(works[number]), merged), strict=True))
        return [found[number] for number in range(len(works))]

    def _merge(self, work: TableRound) -> TableResult:
        with arrow_errors(work.delta.uri):
            return self._merge_changes(work)

    def _merge_changes(self, work: TableRound) -> TableResult:
        schema, reached = work.task.schema, work.source.reached
        changes = read_changes(self._storage, work.task.stretches[0].files, schema, work.task.after)
        try:
            session = self._session(work)
            settled = merge_keyed_rows(self._touched(session, work, changes), changes, schema)
            source = self._source(session, settled)
            if source is not None:
                frame, flag = source
                frame.createOrReplaceTempView("changes")
                range_ = _range(schema, settled.puts, settled.gone)
                session.sql(merge_statement(work.delta.uri, schema, "changes", flag, range_, known=settled.known))
        except job_errors() as error:
            if "DELTA_CONCURRENT" in str(error) or "ConcurrentModification" in str(error):
                raise CommitConflict(work.delta.uri) from error
            raise job_failed(self._spark, error) from error
        work.delta.load()
        work.delta.make_durable()
        if work.delta.applied(work.application) != reached:
            # nothing had to be changed: then MERGE makes no commit
            work.delta.commit([], [], work.application, reached, note=work.note)
        return TableResult(missing=settled.missing)

    def _session(self, work: TableRound) -> SparkSession:
        """A session only for this table, because the ``txn`` of Delta's commit is a setting of the session."""
        if work.application not in self._sessions:
            self._sessions[work.application] = self._spark.newSession()
        session = self._sessions[work.application]
        parts = max(2, min(session.sparkContext.defaultParallelism, 16))
        # without limits of the keys, MERGE searches all files
        files = _near(work) if _has_limits(work.task.schema) else work.task.base
        rows = sum(file.rows for file in files) + work.plan.changes
        if rows <= _READ_HERE:
            # adaptive planning after each stage takes longer than it saves here, and a good number of tasks is known
            planning = ["false", str(max(1, min(parts, -(-rows * 2 // work.task.target_rows))))]
        else:
            planning = [str(self._spark.conf.get(name)) for name in _PLANNING]
        settings = {
            **_SETTINGS,
            **dict(zip(_PLANNING, planning, strict=True)),
            # for Delta's own bookkeeping; the default is 50 tasks for each table
            "spark.databricks.delta.snapshotPartitions": str(parts),
            "spark.databricks.delta.write.txnAppId": work.application,
            "spark.databricks.delta.write.txnVersion": str(int(work.source.reached)),
            "spark.databricks.delta.commitInfo.userMetadata": work.note,
        }
        for name, value in settings.items():
            session.conf.set(name, value)
        return session

    def _touched(self, session: SparkSession, work: TableRound, changes: pa.Table) -> pa.Table:
        """The table's rows that changes affect: their keys, and the columns whose values some change did not send."""
        schema = work.task.schema
        unsent = set(pc.unique(pc.list_flatten(changes["_un"])).to_pylist())
        if not unsent and not pc.any(pc.is_in(changes["_op"], value_set=pa.array(["u", "d"]))).as_py():
            return schema.current.empty_table()  # only new rows: no existing row is needed
        names = [name for name in schema.current.names if name in unsent or name in schema.keys or name == SPECIAL]
        near = _near(work)
        if sum(file.rows for file in near) <= _READ_HERE:
            rows = read_base(self._storage, work.delta.directory, [file.path for file in near], schema, names)
            first = schema.keys[0]
            if is_orderable(schema.current.field(first).type):
                rows = rows.filter(pc.is_in(rows[first], value_set=changes[first].combine_chunks()))
            return rows
        keys = changes.select([*schema.keys, SPECIAL])
        self._frame(session, keys).createOrReplaceTempView("keys")
        found = session.sql(selected_rows(work.delta.uri, schema, names, "keys", _range(schema, keys))).toArrow()
        return conformed(found, schema.current)

    def _source(self, session: SparkSession, settled: MergedRows) -> tuple[DataFrame, str] | None:
        """A DataFrame with one row for each key, and a column that marks deleted ones; None if there are no rows."""
        flag = "_gone"
        while folded_name(flag) in map(folded_name, settled.puts.schema.names):
            flag += "_"
        parts = [(settled.puts, False), (settled.gone, True)]
        rows = pa.concat_tables([table.append_column(flag, pa.array([gone] * table.num_rows, pa.bool_())) for table, gone in parts])
        return (self._frame(session, rows), flag) if rows.num_rows else None

    def _frame(self, session: SparkSession, rows: pa.Table) -> DataFrame:
        path = write_file(self._storage, self._directory, rows.schema, rows.to_batches())
        root = str(self._storage.root) if self._storage.root is not None else self._storage.place.rstrip("/")
        # Spark takes the file's size for the size of the rows in memory. Then a task would hold more than fits
        size = self._storage.filesystem.get_file_info(path).size
        session.conf.set("spark.sql.sources.fileCompressionFactor", str(max(rows.nbytes / size, 1.0)))
        return session.read.parquet(escape_glob(f"{root}/{path}"))


def _near(work: TableRound) -> list[BaseFile]:
    """The files whose key ranges overlap those of the changes."""
    removed = set(work.plan.removed)
    return [file for file in work.task.base if file.path in removed]


def _is_merged(work: TableRound) -> bool:
    task = work.task
    schema = task.schema
    keyed = bool(schema.keys) and not schema.full
    plain = not task.rewrite and not work.overwrite and not work.plan.cleared and len(task.stretches) == 1
    taken = not _DELTAS_NAMES.isdisjoint(map(folded_name, schema.current.names))
    return keyed and plain and bool(task.base) and not taken and not _is_scattered(work)


def _is_scattered(work: TableRound) -> bool:
    """Whether there are too many small files or changes, or MERGE would leave too many rows in files whose keys overlap.

    MERGE divides the rows of all affected files by a hash of their keys. So every new file has keys of the whole range, and is affected
    again the next time. Units divide the rows by their keys instead.
    """
    target = work.task.target_rows
    files = {file.path: file for file in work.task.base}
    small = [file for file in files.values() if file.rows < target // 4]
    units = [([files[path] for path in unit.base], len(unit.ranges)) for unit in work.plan.units]
    growth = work.plan.growth or (0,) * len(units)
    if max((sum(file.rows for file in base) for base, _ in units), default=0) > target * _LARGE_UNIT:
        return False
    sizes = [max(sum(file.rows for file in base) + more, 0) for (base, _), more in zip(units, growth, strict=True)]
    # there is a range for each cluster of files
    mixing = sum(ranges for _, ranges in units) > 1 and sum(sizes) > target * _GROWN
    grown = any(_divided(base, more, target * _GROWN) * 2 > size for (base, _), more, size in zip(units, growth, sizes, strict=True))
    return len(small) > _FEW_FILES or mixing or grown or _is_backlog(work)


def _is_backlog(work: TableRound) -> bool:
    """Whether there are many changes, and the keys of the affected files can be divided."""
    ranges = [file.range for file in _near(work) if file.range is not None]
    return work.plan.changes >= work.task.target_rows // _BACKLOG and any(low < high for low, high in ranges)


def _divided(base: Sequence[BaseFile], growth: int, most: float) -> int:
    """Count the rows of these files that a unit would divide by keys, because with the new rows they are too many for one file.

    Files that share at most a limit are divided already: then one key has more rows than a file.
    """
    groups: list[tuple[Bound, Bound, int]] = []
    for file in sorted(base, key=lambda file: file.range or ()):
        if file.range is None:
            return 0
        low, high = file.range
        if groups and low < groups[-1][1]:
            least, greatest, rows = groups.pop()
            groups.append((least, max(greatest, high), rows + file.rows))
        else:
            groups.append((low, high, file.rows))
    if len(groups) == 1:
        groups = [(low, high, rows + growth) for low, high, rows in groups]
    return sum(rows for low, high, rows in groups if low < high and rows > most)


def _has_limits(schema: TableSchema) -> bool:
    type_ = schema.current.field(schema.keys[0]).type
    return bool(pa.types.is_integer(type_) or pa.types.is_date(type_))


def _range(schema: TableSchema, *tables: pa.Table) -> tuple[Any, Any] | None:
    """The minimum and maximum of the first key column, by which other files are skipped. None if unknown."""
    key = schema.keys[0]
    type_ = schema.current.field(key).type
    column = pa.chunked_array([chunk for table in tables for chunk in table[key].chunks], type_)
    if not _has_limits(schema) or column.null_count or not len(column):
        return None
    found = pc.min_max(column).as_py()
    if pa.types.is_date(type_):
        return found["min"], found["max"]
    # rounded, because Spark compiles the statement again for other numbers, which takes longer than a few more keys
    least, step = -(1 << (type_.bit_width - 1)), 1 << max((found["max"] - found["min"]).bit_length(), _ROUNDED)
    return max(found["min"] // step * step, least), min((found["max"] // step + 1) * step - 1, -least - 1)
