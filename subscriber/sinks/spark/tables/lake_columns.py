"""The columns of a Delta table in the lake's Arrow types, and their comments."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
from deltalake import DeltaTable

__all__ = ["is_without_zone", "lake_schema", "with_comments"]

_COMMENT: Final = "comment"


def lake_schema(table: DeltaTable) -> pa.Schema:
    """The columns of a table, in the lake's Arrow types."""
    return pa.schema([pa.field(field.name, _lake_type(field.type)) for field in pa.schema(table.schema().to_arrow())])


def with_comments(schema: pa.Schema, table: DeltaTable) -> pa.Schema:
    """The schema with the comments that columns of these names have in a table."""
    found = {field.name: str(field.metadata[_COMMENT]) for field in table.schema().fields if field.metadata.get(_COMMENT)}
    return pa.schema(
        [field.with_metadata({**(field.metadata or {}), _COMMENT: found[field.name]}) if field.name in found else field for field in schema]
    )


def is_without_zone(type_: pa.DataType) -> bool:
    """Whether it is a timestamp without a time zone, or a list of them."""
    if pa.types.is_list(type_):
        return is_without_zone(type_.value_type)
    return bool(pa.types.is_timestamp(type_)) and type_.tz is None


def _lake_type(type_: pa.DataType) -> pa.DataType:
    """Convert to the lake's type: delta-rs uses views and large types for some of them."""
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return pa.list_(_lake_type(type_.value_type))
    if pa.types.is_large_string(type_) or pa.types.is_string_view(type_):
        return pa.string()
    if pa.types.is_large_binary(type_) or pa.types.is_binary_view(type_):
        return pa.binary()
    if pa.types.is_timestamp(type_):
        return pa.timestamp("us", "UTC") if type_.tz else pa.timestamp("us")
    return type_
