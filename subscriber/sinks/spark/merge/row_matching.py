"""Changes whose row does not exist, and old rows that differ from the stored ones in columns added later.

* As in PostgreSQL, an UPDATE or DELETE of a row that does not exist is skipped and counted. A publisher's stream is consistent in itself.
  But a target may have begun without a copy, or lack a row for another reason. Folding detects whether that is possible (``fold.py``). Only
  then :func:`without_missing_rows` checks the changes one by one against the keys of the table.
* In a table with REPLICA IDENTITY FULL, rows from before ADD COLUMN have NULL in the new column here, while the publisher may have its
  default there. Then the publisher's old rows are equal to no row of the lake. :func:`match_incomplete_rows` matches each of them with a
  row that is equal except for NULLs in such columns.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import pyarrow as pa

from subscriber.sinks.spark.merge.keys import group_ids, held_values, key_columns
from subscriber.sinks.spark.schema.arrow_columns import with_column
from subscriber.sinks.spark.schema.table_schema import SPECIAL, TableSchema

__all__ = ["MissingRows", "identity_names", "match_incomplete_rows", "update_pairs", "without_missing_rows"]


@dataclass(slots=True)
class MissingRows:
    """Counts of changes that were skipped because their row did not exist."""

    updates: int = 0
    deletes: int = 0

    def add(self, other: MissingRows) -> None:
        self.updates += other.updates
        self.deletes += other.deletes


def identity_names(schema: TableSchema) -> list[str]:
    """The columns that identify a row of a table."""
    return schema.current.names if schema.full else [*schema.keys, SPECIAL]


def update_pairs(changes: pa.Table) -> list[bool]:
    """Whether each row is the second of the two of one UPDATE. If not, the other may belong to another unit. One entry more than rows."""
    moved, lsns, seqs = (changes[name].to_pylist() for name in ("_moved", "_lsn", "_seq"))
    places = [(lsn, seq) for lsn, seq in zip(lsns, seqs, strict=True)]
    return [row > 0 and moved[row] and places[row - 1] == (lsn, seq - 1) for row, (lsn, seq) in enumerate(places)] + [False]


def without_missing_rows(base: pa.Table, changes: pa.Table, schema: TableSchema) -> tuple[pa.Table, MissingRows]:
    """Leave out changes whose row does not exist. Return the others, and counts. An UPDATE that is two rows counts once.

    The base needs the columns of :func:`identity_names`. The changes are those after the last TRUNCATE, in order. With REPLICA IDENTITY
    FULL, equal rows are counted.
    """
    names = identity_names(schema)
    both = pa.concat_tables([base.select(names), changes.select(names)])
    columns = [both[name] for name in names] if schema.full else key_columns(both, schema.keys)
    ids = group_ids(columns).to_pylist()
    there: dict[int, int] = {}
    for id_ in ids[: base.num_rows]:
        there[id_] = there.get(id_, 0) + 1
    found, kept = MissingRows(), []
    ops, moved, pairs = changes["_op"].to_pylist(), changes["_moved"].to_pylist(), update_pairs(changes)
    was_there = True
    for row, id_ in enumerate(ids[base.num_rows :]):
        count = there.get(id_, 0)
        match ops[row]:
            case "d":
                was_there = count > 0
                if not was_there:
                    found.deletes += not pairs[row + 1]
                    continue
                there[id_] = count - 1 if schema.full else 0
            case "u" if not moved[row] and not count:
                found.updates += 1
                continue
            case "u" if moved[row] and pairs[row] and not was_there:
                found.updates += 1
                continue
            case "u" if not moved[row]:
                pass
            case _:
                there[id_] = count + 1 if schema.full else 1
        kept.append(row)
    return changes.take(pa.array(kept, pa.int64())), found


def match_incomplete_rows(base: pa.Table, changes: pa.Table, schema: TableSchema, added: Collection[str]) -> pa.Table:
    """Replace old rows that equal no stored row by a stored row that lacks only values of the columns that were added later.

    The table has REPLICA IDENTITY FULL. The changes are those after the last TRUNCATE, in order.
    """
    names = schema.current.names
    late = [name for name in names if name in added]
    early = [name for name in names if name not in added and name != SPECIAL]
    both = pa.concat_tables([base.select(names), changes.select(names)])
    if not late or not early or not both.num_rows:
        return changes
    same = group_ids([both[name] for name in names]).to_pylist()
    alike = group_ids([*(both[name] for name in early), held_values(both[SPECIAL], lambda field: field not in late)]).to_pylist()
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
        changes = with_column(changes, name, both[name].take(taken))
    return changes


def _values(rows: pa.Table, name: str) -> list[int | None]:
    """A number for each value, the same for equal values; None for NULL. A value that the column cannot hold has a number too."""
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
