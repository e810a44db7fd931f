"""The SQL of MERGE INTO, by which engine ``spark`` applies folded changes to a table. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import Any, Final

import pyarrow as pa

from subscriber.sinks.spark.schema.table_schema import SPECIAL, TableSchema
from subscriber.sinks.spark.session.sql_text import quoted_name, quoted_text

__all__ = ["delete_statement", "key_limits", "merge_statement"]

_ROUNDED: Final = 10
"""Limits of keys are rounded by at least this number of bits."""

Range = tuple[Any, Any] | None
"""Minimum and maximum of the first key column."""


def delete_statement(uri: str) -> str:
    """DELETE all rows of the table at ``uri``."""
    return f"DELETE FROM delta.{quoted_name(uri)}"  # noqa: S608 -- quoted


def merge_statement(
    uri: str, schema: TableSchema, source: str, flag: str, range_: Range, *, known: bool = False, cleared: bool = False
) -> str:
    """MERGE INTO the table at ``uri`` a view with its columns, one row for each key. ``range_`` is the range of the keys in the view.

    ``flag`` is an additional column of the view: whether the row is deleted. ``known``: the table has a row for each key that is not
    deleted, so Delta needs no full outer join. ``cleared``: all other rows are deleted.
    """
    names = schema.current.names
    setting = ", ".join(f"t.{quoted_name(name)} = s.{quoted_name(name)}" for name in names)
    columns = ", ".join(map(quoted_name, names))
    values = ", ".join(f"s.{quoted_name(name)}" for name in names)
    statement = (
        f"MERGE INTO delta.{quoted_name(uri)} t USING {source} s ON {_same_key(schema, range_)} "
        f"WHEN MATCHED AND s.{quoted_name(flag)} THEN DELETE "
        f"WHEN MATCHED THEN UPDATE SET {setting}"
    )
    if not known:
        statement += f" WHEN NOT MATCHED AND NOT s.{quoted_name(flag)} THEN INSERT ({columns}) VALUES ({values})"  # noqa: S608 -- quoted
    return f"{statement} WHEN NOT MATCHED BY SOURCE THEN DELETE" if cleared else statement


def key_limits(schema: TableSchema, ranges: Sequence[Range]) -> Range:
    """The minimum and maximum of the first key column in several files, by which MERGE skips files of the table. None if unknown."""
    known = [range_ for range_ in ranges if range_ is not None]
    if not known or len(known) < len(ranges):
        return None
    low, high = min(low for low, _ in known), max(high for _, high in known)
    type_ = schema.current.field(schema.keys[0]).type
    if pa.types.is_date(type_):
        return low, high
    # rounded, because Spark compiles the statement again for other numbers, which takes longer than a few more keys
    least, step = -(1 << (type_.bit_width - 1)), 1 << max((high - low).bit_length(), _ROUNDED)
    return max(low // step * step, least), min((high // step + 1) * step - 1, -least - 1)


def _same_key(schema: TableSchema, range_: Range) -> str:
    """Compare keys. NULLs are equal. If a key column cannot hold a value, the value's text in ``_special`` is part of the key."""
    found = [_same_value(key, schema.current.field(key).type) for key in schema.keys]
    if any(_may_be_special(schema.current.field(key).type) for key in schema.keys):
        texts = [f"from_json({side}.{quoted_name(SPECIAL)}, 'map<string,string>')" for side in ("t", "s")]
        found += [f"{texts[0]}[{quoted_text(key)}] <=> {texts[1]}[{quoted_text(key)}]" for key in schema.keys]
    if range_ is not None:
        first = f"t.{quoted_name(schema.keys[0])}"
        found.append(f"{first} >= {_literal(range_[0])} AND {first} <= {_literal(range_[1])}")
    return " AND ".join(found)


def _same_value(key: str, type_: pa.DataType) -> str:
    sides = [f"{side}.{quoted_name(key)}" for side in ("t", "s")]
    if pa.types.is_floating(type_.value_type if pa.types.is_list(type_) else type_):
        # -0 and 0 are equal to Spark, but they are two keys: the publisher sends the old key when a row's key changes from one to the other
        sides = [f"CAST({side} AS STRING)" for side in sides]
    return " <=> ".join(sides)


def _may_be_special(type_: pa.DataType) -> bool:
    plain = pa.types.is_integer(type_) or pa.types.is_string(type_) or pa.types.is_boolean(type_)
    return not (plain or pa.types.is_floating(type_) or pa.types.is_binary(type_))


def _literal(value: Any) -> str:
    return f"DATE'{value.isoformat()}'" if isinstance(value, date) else str(int(value))
