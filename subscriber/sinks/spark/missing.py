"""Changes of rows that are not there: as natively, an UPDATE or DELETE of such a row is passed over, and counted.

A publisher's stream is consistent in itself; but a target may have begun without a copy, or lack a row for another reason. Folding sees at
once whether that may be so (``fold.py``), and only then changes are gone through one by one here, beside the keys that the table has.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from subscriber.sinks.spark.keys import group_ids, key_columns
from subscriber.sinks.spark.schema.table_schema import SPECIAL, TableSchema

__all__ = ["Missing", "effective", "identity_names"]


@dataclass(slots=True)
class Missing:
    """How many changes were passed over: their row was not there."""

    updates: int = 0
    deletes: int = 0

    def add(self, other: Missing) -> None:
        """Count these too."""
        self.updates += other.updates
        self.deletes += other.deletes


def identity_names(schema: TableSchema) -> list[str]:
    """The columns that tell rows of a table apart."""
    return schema.current.names if schema.full else [*schema.keys, SPECIAL]


def effective(base: pa.Table, changes: pa.Table, schema: TableSchema) -> tuple[pa.Table, Missing]:
    """Leave out what finds no row.

    Args:
        base: what the table holds; at least :func:`identity_names`.
        changes: behind the last TRUNCATE, in the landing's columns, in order.
        schema: has a key, or is REPLICA IDENTITY FULL: then equal rows are counted.

    Returns:
        The changes that are left, and how many were not. An UPDATE that is two rows counts once.
    """
    names = identity_names(schema)
    both = pa.concat_tables([base.select(names), changes.select(names)])
    columns = [both[name] for name in names] if schema.full else key_columns(both, schema.keys)
    ids = group_ids(columns).to_pylist()
    there: dict[int, int] = {}
    for id_ in ids[: base.num_rows]:
        there[id_] = there.get(id_, 0) + 1
    found, kept = Missing(), []
    ops, moved, lsns, seqs = (changes[name].to_pylist() for name in ("_op", "_moved", "_lsn", "_seq"))

    def is_pair(first: int) -> bool:
        """Whether this row and the next are the two of one UPDATE: the other half may be another unit's."""
        second = first + 1
        return first >= 0 and second < len(ops) and moved[second] and lsns[first] == lsns[second] and seqs[first] + 1 == seqs[second]

    was_there = True
    for row, id_ in enumerate(ids[base.num_rows :]):
        count = there.get(id_, 0)
        match ops[row]:
            case "d":
                was_there = count > 0
                if not was_there:
                    found.deletes += not is_pair(row)
                    continue
                there[id_] = count - 1 if schema.full else 0
            case "u" if not moved[row] and not count:
                found.updates += 1
                continue
            case "u" if moved[row] and is_pair(row - 1) and not was_there:
                found.updates += 1
                continue
            case "u" if not moved[row]:
                pass
            case _:
                there[id_] = count + 1 if schema.full else 1
        kept.append(row)
    return changes.take(pa.array(kept, pa.int64())), found
