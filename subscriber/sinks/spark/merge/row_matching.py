"""Changes whose row does not exist.

As in PostgreSQL, an UPDATE or DELETE of a row that does not exist is skipped and counted. A publisher's stream is consistent in itself. But
a target may have begun without a copy, or lack a row for another reason. Folding detects whether that is possible (``fold.py``). Only then
:func:`without_missing_rows` checks the changes one by one against the keys of the table.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from subscriber.sinks.spark.merge.keys import group_ids, key_columns
from subscriber.sinks.spark.schema.table_schema import SPECIAL, TableSchema

__all__ = ["MissingRows", "update_pairs", "without_missing_rows"]


@dataclass(slots=True)
class MissingRows:
    """Counts of changes that were skipped because their row did not exist."""

    updates: int = 0
    deletes: int = 0

    def add(self, other: MissingRows) -> None:
        self.updates += other.updates
        self.deletes += other.deletes


def update_pairs(changes: pa.Table) -> list[bool]:
    """Whether each row is the second of the two of one UPDATE. If not, the other may belong to another unit. One entry more than rows."""
    moved, lsns, seqs = (changes[name].to_pylist() for name in ("_moved", "_lsn", "_seq"))
    places = [(lsn, seq) for lsn, seq in zip(lsns, seqs, strict=True)]
    return [row > 0 and moved[row] and places[row - 1] == (lsn, seq - 1) for row, (lsn, seq) in enumerate(places)] + [False]


def without_missing_rows(base: pa.Table, changes: pa.Table, schema: TableSchema) -> tuple[pa.Table, MissingRows]:
    """Leave out changes whose row does not exist. Return the others, and counts. An UPDATE that is two rows counts once.

    The base needs the columns that identify a row. The changes are those after the last TRUNCATE, in order. With REPLICA IDENTITY FULL,
    equal rows are counted.
    """
    names = schema.current.names if schema.full else [*schema.keys, SPECIAL]
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
