"""Reads the rows that changes affect from files that are not rewritten: only the columns that identify rows, and those that are needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.merge.keys import is_orderable
from subscriber.sinks.spark.merge.parquet import read_file
from subscriber.sinks.spark.merge.work_unit import Unit, UnitFile
from subscriber.sinks.spark.schema.table_schema import SPECIAL

__all__ = ["affected_rows"]


def affected_rows(storage: Storage, unit: Unit, files: Sequence[UnitFile], changes: pa.Table) -> Iterator[tuple[pa.Table, pa.Array]]:
    """The rows of each file that changes may affect, and their positions in the file.

    The rows have their keys, and the columns whose values some change did not send. Other columns are NULL, unless the unit needs the
    whole rows for the Change Data Feed. Only one file at a time is in memory, because all keys of a table may not fit.
    """
    schema = unit.schema
    unsent = set(pc.unique(pc.list_flatten(changes["_un"])).to_pylist())
    names = [name for name in schema.current.names if unit.feed or name in unsent or name in schema.keys or name == SPECIAL]
    first = schema.keys[0]
    keys = pc.unique(changes[first]) if is_orderable(schema.current.field(first).type) else None
    for file in files:
        rows, live = read_file(storage, unit.directory, file, schema, names)
        places = live if live is not None else pa.array(range(rows.num_rows), pa.uint32())
        if keys is not None:
            wanted = pc.is_in(rows[first], value_set=keys)
            rows, places = rows.filter(wanted), places.filter(wanted.combine_chunks())
        yield rows, places
