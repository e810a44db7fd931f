"""The Change Data Feed of a table: the rows that a commit changes, for Delta's ``table_changes``.

If a commit has ``cdc`` files, readers of the feed take these, and not the rows of the files that the commit adds and removes. So a file
that is written again for some changed rows does not appear as deleted and inserted. A feed has the net changes of a commit: a row that is
as before is not in it.

Source: Delta protocol, Add CDC File.
"""

from __future__ import annotations

from collections import Counter
from typing import Final
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc

from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.merge.keys import group_ids, key_columns
from subscriber.sinks.spark.schema.table_schema import TableSchema
from subscriber.sinks.spark.tables.data_file import DataFile, write_data_file

__all__ = ["CHANGE_DATA", "changed_rows", "write_change_data"]

CHANGE_DATA: Final = "_change_data"
"""Directory of the files, in that of the table."""
_TYPE: Final = "_change_type"


def changed_rows(before: pa.Table, after: pa.Table, schema: TableSchema) -> pa.Table:
    """The changes from one set of rows to another, with their types. ``before``: at least all rows that are deleted or replaced."""
    names = schema.current.names
    both = pa.concat_tables([before.select(names), after.select(names)])
    if not both.num_rows:
        return _typed(both, "insert")
    places = _unpaired(group_ids([both[name] for name in names]), before.num_rows)
    old, new = places.filter(pc.less(places, before.num_rows)), places.filter(pc.greater_equal(places, before.num_rows))
    if not schema.keys or schema.full:
        return pa.concat_tables([_typed(both.take(old), "delete"), _typed(both.take(new), "insert")])
    keys = group_ids(key_columns(both, schema.keys))
    old_keys, new_keys = keys.take(old), keys.take(new)
    was, remains = pc.is_in(new_keys, value_set=old_keys), pc.is_in(old_keys, value_set=new_keys)
    parts = [
        (old.filter(pc.invert(remains)), "delete"),
        (new.filter(pc.invert(was)), "insert"),
        (old.filter(remains), "update_preimage"),
        (new.filter(was), "update_postimage"),
    ]
    return pa.concat_tables([_typed(both.take(rows), type_) for rows, type_ in parts])


def _unpaired(ids: pa.Array, first: int) -> pa.Array:
    """The places of rows before ``first`` and after it, without pairs of equal rows from both sides."""
    numbers = ids.to_pylist()
    pairs = Counter(numbers[:first]) & Counter(numbers[first:])
    left = pairs.copy(), pairs
    found: list[int] = []
    for place, number in enumerate(numbers):
        side = left[place >= first]
        if side[number]:
            side[number] -= 1
        else:
            found.append(place)
    return pa.array(found, pa.int64())


def _typed(rows: pa.Table, type_: str) -> pa.Table:
    return rows.append_column(_TYPE, pa.array([type_] * rows.num_rows, pa.string()))


def write_change_data(storage: Storage, directory: str, rows: pa.Table) -> DataFile:
    """Write rows of the feed."""
    storage.make_directory(f"{directory}/{CHANGE_DATA}")
    file = write_data_file(storage, directory, f"{CHANGE_DATA}/cdc-{uuid4().hex}.parquet", rows)
    storage.sync([f"{directory}/{CHANGE_DATA}"])
    return file
