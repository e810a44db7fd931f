"""Values that an UPDATE did not send: they are taken from other rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from subscriber.sinks.spark.schema.arrow_columns import with_column
from subscriber.sinks.spark.schema.table_schema import SPECIAL

__all__ = ["with_values_of"]


def with_values_of(rows: pa.Table, own: pa.Table, numbers: Sequence[int], values: Mapping[int, Mapping[str, int]]) -> pa.Table:
    """Rows, some of whose columns have the values of other rows.

    ``rows`` are those of ``own`` with these numbers. ``values`` has, by the place of a row in ``rows``, for a column the number of the row
    that has its value.
    """
    if not values:
        return rows
    texts = own[SPECIAL].to_pylist()
    special = [texts[number] for number in numbers]
    taken: dict[str, list[int]] = {}
    for place, sources in values.items():
        for name, source in sources.items():
            taken.setdefault(name, list(numbers))[place] = source
            special[place] = _with_special(special[place], texts[source], name)
    for name, indices in taken.items():
        rows = with_column(rows, name, own[name].take(pa.array(indices, pa.int64())))
    return with_column(rows, SPECIAL, pa.array(special, pa.string()))


def _with_special(own: str | None, other: str | None, name: str) -> str | None:
    """The ``_special`` of a row after one of its fields was taken from another row."""
    if own is None and other is None:
        return None
    values: dict[str, Any] = {} if own is None else json.loads(own)
    others: dict[str, Any] = {} if other is None else json.loads(other)
    values.pop(name, None)
    if name in others:
        values[name] = others[name]
    return json.dumps(values, sort_keys=True) if values else None
