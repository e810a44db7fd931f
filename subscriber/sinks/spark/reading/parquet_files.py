"""Reads a version of a Delta table with Spark's own Parquet reader, for sessions without the Delta jar.

Spark applies the deletion vectors itself: each is a small row of 64-bit words, which is joined to the rows of its file. So Spark reads only
the columns that a query needs, skips rows by its conditions, and needs no Python on executors.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyroaring import BitMap

from subscriber.errors import TargetError
from subscriber.sinks.spark.files.location import escape_glob
from subscriber.sinks.spark.reading.table_files import PinnedTable
from subscriber.sinks.spark.session.object_stores import hadoop_uri
from subscriber.sinks.spark.session.sql_text import quoted_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["lake_files"]

_FILE, _ROW, _WORDS = "subscriber file", "subscriber row", "subscriber deleted"
"""Names that no column of a Delta table has."""
_LIVE: Final = f"coalesce(getbit(try_element_at(`{_WORDS}`, cast(`{_ROW}` div 64 as int) + 1), cast(`{_ROW}` % 64 as int)), 0) = 0"
_PLAIN: Final = re.compile(r"[A-Za-z0-9._=-]+")


def lake_files(spark: SparkSession, table: PinnedTable, schema: Mapping[str, Any]) -> DataFrame:
    """The rows of a table. ``schema`` is as in Delta's log."""
    from pyspark.sql.functions import broadcast  # noqa: PLC0415 -- an extra
    from pyspark.sql.types import StructField, StructType  # noqa: PLC0415

    columns, stored = StructType.fromJson(dict(schema)), table.physical()
    in_files = StructType([StructField(stored.get(field.name, field.name), field.dataType) for field in columns])
    names = [f"{quoted_name(stored.get(name, name))} AS {quoted_name(name)}" for name in columns.names]

    def read(paths: list[str]) -> DataFrame:
        files = [escape_glob(hadoop_uri(f"{table.uri}/{path}")) for path in paths]
        # independent of the calendar that the session assumes for files without Spark's mark
        return spark.read.schema(in_files).parquet(*files, datetimeRebaseMode="CORRECTED")

    files = table.files()
    deleted = {file.path: _words(table.deleted(file.vector)) for file in files if file.vector is not None}
    whole = [file.path for file in files if file.path not in deleted]
    frames = [read(whole).selectExpr(*names)] if whole else []
    if deleted:
        found = read([*deleted])
        place = found.metadataColumn("_metadata")
        found = found.select("*", place["file_name"].alias(_FILE), place["row_index"].alias(_ROW))
        vectors = pa.table({_FILE: _file_names(table, [*deleted]), _WORDS: pa.array(deleted.values(), pa.list_(pa.int64()))})
        joined = found.join(broadcast(spark.createDataFrame(vectors)), _FILE)
        frames.append(joined.where(_LIVE).selectExpr(*names))
    if not frames:
        return spark.createDataFrame([], columns)
    return frames[0] if len(frames) == 1 else frames[0].union(frames[1])


def _words(deleted: BitMap) -> list[int]:
    """A bitmap as signed 64-bit words."""
    bits = bytearray((deleted.max() // 64 + 1) * 8) if deleted else bytearray()
    for row in deleted:
        bits[row // 8] |= 1 << row % 8
    return list(struct.unpack(f"<{len(bits) // 8}q", bits))


def _file_names(table: PinnedTable, paths: list[str]) -> list[str]:
    """The names of files without their directories, as Spark gives them."""
    names = [path.rpartition("/")[2] for path in paths]
    if not all(map(_PLAIN.fullmatch, names)) or max(Counter(names).values()) > 1:
        raise TargetError(f"Delta table {table.uri} has files with odd or equal names", hint="read it with Delta's jar")
    return names
