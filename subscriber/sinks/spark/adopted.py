"""Old rows of a table with REPLICA IDENTITY FULL, where it has columns that came later.

Rows from before have NULL in such a column, and the publisher may have its default there: its old rows say that, and are of no row of the
lake as they stand. One that finds no row equal to it takes one that is equal but for NULLs in such columns.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection

import pyarrow as pa

from subscriber.sinks.spark.keys import group_ids
from subscriber.sinks.spark.schema.table_schema import SPECIAL, TableSchema

__all__ = ["adopted"]


def adopted(base: pa.Table, changes: pa.Table, schema: TableSchema, added: Collection[str]) -> pa.Table:
    """Let old rows that are of no row be of one that lacks values of later columns.

    Args:
        base: rows of the table, in the current-state columns.
        changes: behind the last TRUNCATE, in the landing's columns, in order.
        schema: of the table; REPLICA IDENTITY FULL.
        added: columns that came later.

    Returns:
        The changes, with such old rows as the lake has them.
    """
    names = schema.current.names
    late = [name for name in names if name in added]
    early = [name for name in names if name not in added and name != SPECIAL]
    both = pa.concat_tables([base.select(names), changes.select(names)])
    if not late or not early or not both.num_rows:
        return changes
    same = group_ids([both[name] for name in names]).to_pylist()
    alike = group_ids([*(both[name] for name in early), _without(both[SPECIAL], late)]).to_pylist()
    values = [_values(both, name) for name in late]
    there = Counter(same[: base.num_rows])
    lacking: dict[int, list[int]] = {}
    found = list(range(both.num_rows))

    def remember(row: int) -> None:
        if any(column[row] is None for column in values):
            lacking.setdefault(alike[row], []).append(row)

    for row in range(base.num_rows):
        remember(row)
    for row, op in enumerate(changes["_op"].to_pylist(), base.num_rows):
        if op != "d":
            there[same[row]] += 1
            remember(row)
        elif there[same[row]]:
            there[same[row]] -= 1
        else:
            fitting = (
                other
                for other in lacking.get(alike[row], ())
                if there[same[other]] and all(column[other] in {None, column[row]} for column in values)
            )
            other = next(fitting, None)
            if other is not None:
                there[same[other]] -= 1
                found[row] = other
    if found == list(range(both.num_rows)):
        return changes
    taken = pa.array(found[base.num_rows :], pa.int64())
    for name in names:
        position = changes.schema.get_field_index(name)
        changes = changes.set_column(position, changes.schema.field(position), both[name].take(taken))
    return changes


def _without(special: pa.ChunkedArray, fields: list[str]) -> pa.ChunkedArray:
    if special.null_count == len(special):
        return special
    texts: list[str | None] = []
    for text in special.to_pylist():
        left = {} if text is None else {field: value for field, value in json.loads(text).items() if field not in fields}
        texts.append(json.dumps(left, sort_keys=True) if left else None)
    return pa.chunked_array([pa.array(texts, pa.string())])


def _values(rows: pa.Table, name: str) -> list[int | None]:
    """A number for each value, the same for equal ones; None for NULL. A value that the column cannot hold is one."""
    column, special = rows[name], rows[SPECIAL]
    parts = [column]
    held = (
        [None if text is None else json.loads(text).get(name) for text in special.to_pylist()] if special.null_count < len(special) else []
    )
    if any(value is not None for value in held):
        parts.append(pa.chunked_array([pa.array(held, pa.string())]))
    ids = group_ids(parts).to_pylist()
    valid = column.is_valid().to_pylist()
    return [id_ if valid[row] or (held and held[row] is not None) else None for row, id_ in enumerate(ids)]
