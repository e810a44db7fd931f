"""Map the publisher's columns to the fields of a Delta table, while other columns are added and dropped.

Landed files name fields by the columns of their description (``lake_names``). A table also has fields of dropped columns, and readers of
Delta do not distinguish names by letter case. So a column that the table has keeps its field. A new column whose name would differ from a
field's only by letter case gets the altered name. This follows from the table alone. Nothing else is stored, and rounds that are divided
differently after a crash get the same fields.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import pyarrow as pa

from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.landing.zone import unique_path, write_file
from subscriber.sinks.spark.schema.table_schema import META_NAMES, SPECIAL, LakeColumn, TableSchema, altered_name, folded_name

__all__ = ["ROUND_DIRECTORY", "new_names", "renamed_file", "renamed_rows", "resolve_fields"]

ROUND_DIRECTORY: Final = "round"
"""Directory for landed files that are written again with the table's names."""


def resolve_fields(present: Iterable[str], described: Sequence[TableSchema]) -> list[TableSchema]:
    """Assign each column in the schemas of landed files its field in the table. ``present``: the table's fields."""
    there = {*present} - META_NAMES
    taken = set(map(folded_name, there))
    fields: dict[str, str] = {}

    def field(column: LakeColumn) -> str:
        altered = altered_name(column.name)
        if column.name not in fields:
            if altered in there:
                found = altered
            elif column.name in there:
                found = column.name
            else:
                found = altered if folded_name(column.field) in taken else column.field
            taken.add(folded_name(found))
            fields[column.name] = found
        return fields[column.name]

    return [replace(one, columns=tuple(replace(column, field=field(column)) for column in one.columns)) for one in described]


def new_names(landed: TableSchema, table: TableSchema) -> dict[str, str]:
    """Map the file's fields to the table's fields, where they differ."""
    pairs = zip(landed.columns, table.columns, strict=True)
    return {before.field: now.field for before, now in pairs if before.field != now.field}


def renamed_rows(rows: pa.RecordBatch, names: Mapping[str, str]) -> pa.RecordBatch:
    """Rename the fields of landed rows, including the names in ``_un`` and ``_special``."""
    arrays: list[Any] = []
    for name, array in zip(rows.schema.names, rows.columns, strict=True):
        if name == "_un":
            lists = [None if one is None else [names.get(field, field) for field in one] for one in array.to_pylist()]
            arrays.append(pa.array(lists, array.type))
        elif name == SPECIAL and array.null_count < len(array):
            held = [{} if text is None else json.loads(text) for text in array.to_pylist()]
            renamed = [{names.get(field, field): value for field, value in values.items()} for values in held]
            arrays.append(pa.array([json.dumps(values, sort_keys=True) if values else None for values in renamed], array.type))
        else:
            arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=_renamed_schema(rows.schema, names))


def _renamed_schema(schema: pa.Schema, names: Mapping[str, str]) -> pa.Schema:
    return pa.schema([field.with_name(names.get(field.name, field.name)) for field in schema])


def renamed_file(storage: Storage, path: str, names: Mapping[str, str]) -> str:
    """Copy a landed file with renamed fields. Return the path of the new file, in :data:`ROUND_DIRECTORY`."""
    storage.make_directory(ROUND_DIRECTORY)
    with storage.parquet(path, checked=True) as source:
        batches = (renamed_rows(rows, names) for rows in source.iter_batches())
        write_file(storage, found := unique_path(ROUND_DIRECTORY), _renamed_schema(source.schema_arrow, names), batches)
    return found
