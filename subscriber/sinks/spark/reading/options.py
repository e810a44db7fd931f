"""Options and schemas of the data sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import StructType

from subscriber.errors import ConfigurationError
from subscriber.interfaces import TableName

__all__ = ["arrow_schema", "table_options"]


def table_options(source: str, options: Mapping[str, str], names: Sequence[str]) -> tuple[str, TableName]:
    """The options ``path`` and ``table``. ``names`` has all options that the data source knows.

    Raises:
        ConfigurationError: one of them is missing or invalid, or there is an unknown option.
    """
    known = {name.lower() for name in names}
    for name in options:
        if name.lower() not in known:
            raise ConfigurationError(f'unrecognized option of {source}: "{name}"', hint=f"one of {', '.join(names)}")
    path, text = options.get("path"), options.get("table")
    if path is None or not text:
        raise ConfigurationError(f"{source} needs options path and table", hint='.option("table", "public.orders").load(path)')
    namespace, _, table = text.partition(".")
    if not (namespace and table):
        # Spark shows no hint
        raise ConfigurationError(f'option table of {source}: "{text}" does not have the form schema.table', hint="as in public.orders")
    return path, TableName(namespace, table)


def arrow_schema(schema: StructType) -> pa.Schema:
    """The Arrow types in which Spark takes rows."""
    return pa.schema([pa.field(field.name, to_arrow_type(field.dataType, timestamp_utc=True)) for field in schema.fields])
