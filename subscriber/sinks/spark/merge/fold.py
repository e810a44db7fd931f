"""Folding: reduce many changes of one table to one result for each key. Pure functions over Arrow.

Rows are in order (transactions by commit, changes within them), in the landing's columns. The last change of a key determines its row.
There are two complications:

* **TRUNCATE** discards everything before it, including the rows of the table (:attr:`Folded.cleared`).
* **Unchanged TOASTed values** are not sent. Such a value is taken from the previous state of the row: from an earlier change of the same
  key, or, for a row that moved here from another key, of that key. If there is no earlier change, it is taken from the row in the table.
  :func:`fold` fills in the first two cases. For the third, :attr:`Folded.wanted` names the fields, and :func:`merge_keyed_rows` reads them
  from the table's rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from subscriber.sinks.spark.merge.keys import group_ids, key_columns
from subscriber.sinks.spark.merge.row_matching import MissingRows, without_missing_rows
from subscriber.sinks.spark.schema.arrow_columns import with_column
from subscriber.sinks.spark.schema.table_schema import SPECIAL, TableSchema

__all__ = ["Folded", "MergedRows", "fold", "merge_keyed_rows", "merge_whole_rows", "since_truncate", "with_values_of"]


@dataclass(slots=True)
class Folded:
    """The folded changes of a table.

    Attributes:
        cleared: whether all its rows are deleted first.
        touched: one row for each changed key: the table's rows with these keys are deleted. ``gone``: whether the key is deleted.
        puts: the new rows: those of ``touched`` that are not gone, in the current-state columns.
        expected: for each row of ``touched``, whether the first change of its key needs an existing row of the table.
        consistent: whether each of the other changes finds its row; see ``row_matching.py``.
        wanted: values of ``puts`` that must be read from the table: row of ``puts`` to (row of ``touched`` with its former key, fields).
    """

    cleared: bool
    touched: pa.Table
    puts: pa.Table
    gone: pa.Array
    expected: pa.Array
    consistent: bool
    wanted: dict[int, tuple[int, list[str]]] = field(default_factory=dict)


def since_truncate(changes: pa.Table) -> tuple[pa.Table, bool]:
    """The changes after the last TRUNCATE, and whether there was one."""
    # indices_nonzero of a column without rows ends the process before pyarrow 26.0.1
    if not len(changes) or not len(truncates := pc.indices_nonzero(pc.equal(changes["_op"], "t"))):
        return changes, False
    return changes.slice(truncates[-1].as_py() + 1), True


def fold(changes: pa.Table, schema: TableSchema) -> Folded:
    """Fold the changes of a table with a key: rows in the landing's columns of ``schema``, in order."""
    changes, cleared = since_truncate(changes)
    names = schema.current.names
    if not changes.num_rows:
        empty = changes.select(names)
        return Folded(cleared, empty, empty, pa.array([], pa.bool_()), pa.array([], pa.bool_()), consistent=True)
    ids = group_ids(key_columns(changes, schema.keys))
    rows = pa.table({"id": ids, "row": pa.array(range(len(ids)), pa.int64())})
    last = rows.group_by("id", use_threads=False).aggregate([("row", "max"), ("row", "min")])
    order = last.sort_by("row_max")
    last_rows, last_ids = order["row_max"].combine_chunks(), order["id"].combine_chunks()
    gone = pc.equal(changes["_op"].take(last_rows), "d")
    current = changes.select(names)
    wanted: dict[int, tuple[int, list[str]]] = {}
    if changes["_un"].null_count != changes.num_rows:
        position_of_id = {id_: position for position, id_ in enumerate(last_ids.to_pylist())}
        current, from_table = _fill(changes, current, ids.to_pylist())
        kept = {row: put for put, row in enumerate(last_rows.filter(pc.invert(gone)).to_pylist())}
        for row, (id_, fields) in from_table.items():
            if row in kept and not cleared:
                wanted[kept[row]] = position_of_id[id_], fields
    # the changes that need an existing row of their key
    old = pc.or_(pc.equal(changes["_op"], "d"), pc.and_not(pc.equal(changes["_op"], "u"), changes["_moved"])).combine_chunks()
    expected = old.take(order["row_min"].combine_chunks())
    touched = current.take(last_rows)
    consistent = _consistent(changes, ids, old)
    return Folded(cleared, touched, touched.filter(pc.invert(gone)), gone, expected, consistent, wanted)


def _consistent(changes: pa.Table, ids: pa.Array, old: pa.Array) -> bool:
    """Whether no change needs a row that an earlier change deleted."""
    if not pc.any(pc.equal(changes["_op"], "d")).as_py():
        return True
    order = pc.sort_indices(ids)  # equal ones stay in order
    ids, old = ids.take(order), old.take(order)
    gone = pc.equal(changes["_op"], "d").combine_chunks().take(order)
    after = pc.and_(pc.equal(ids[1:], ids[:-1]), pc.and_(gone[:-1], old[1:]))
    return not pc.any(after).as_py()


def _fill(changes: pa.Table, current: pa.Table, ids: list[int]) -> tuple[pa.Table, dict[int, tuple[int, list[str]]]]:
    """Fill in unchanged values from earlier changes.

    Returns:
        The rows; and for rows with values that only the table has: row to (the key that it had, fields).
    """
    ops, moved, unchanged = (changes[name].to_pylist() for name in ("_op", "_moved", "_un"))
    state: dict[int, int | None] = {}  # key to the change that has its current row; None: deleted
    sources: dict[int, dict[str, int]] = {}  # row to field to the row that has its value
    from_table: dict[int, tuple[int, list[str]]] = {}
    left: tuple[int, int | None, bool] = (0, None, False)  # of the previous row: its key, its state before, and whether changes define it
    for row, id_ in enumerate(ids):
        if unchanged[row]:
            key, before, known = left if moved[row] else (id_, state.get(id_), id_ in state)
            if not known:
                from_table[row] = key, list(unchanged[row])
            elif before is not None:
                inherited = sources.get(before, {})
                sources[row] = {name: inherited.get(name, before) for name in unchanged[row]}
                if before in from_table:
                    # values that the earlier change takes from the table, this change takes from the table too
                    old_key, fields = from_table[before]
                    shared = [name for name in fields if name in unchanged[row]]
                    sources[row] = {name: source for name, source in sources[row].items() if name not in shared}
                    if shared:
                        from_table[row] = old_key, shared
        left = id_, state.get(id_), id_ in state
        state[id_] = None if ops[row] == "d" else row
    return with_values_of(current, current, range(current.num_rows), sources), from_table


def merge_whole_rows(base: pa.Table, changes: pa.Table, schema: TableSchema) -> tuple[pa.Table, MissingRows]:
    """Apply changes to a table whose rows are identified by all their columns, and may occur several times.

    Returns the new rows, and counts of the changes that found no row.
    """
    changes, cleared = since_truncate(changes)
    names = schema.current.names
    base = base.select(names).slice(0, 0) if cleared else base.select(names)
    rows = pa.concat_tables([base, changes.select(names)])
    if not rows.num_rows:
        return rows, MissingRows()
    signs = pc.if_else(pc.equal(changes["_op"], "d"), pa.scalar(-1, pa.int64()), pa.scalar(1, pa.int64()))
    weights = pa.concat_arrays([pa.repeat(pa.scalar(1, pa.int64()), base.num_rows), *signs.chunks])
    ids = group_ids([rows[name] for name in names])
    if _runs_short(ids, weights):
        changes, missing = without_missing_rows(base, changes, schema)
        return merge_whole_rows(base, changes, schema)[0], missing
    counted = pa.table({"id": ids, "weight": weights, "row": pa.array(range(len(ids)), pa.int64())})
    groups = counted.group_by("id", use_threads=False).aggregate([("weight", "sum"), ("row", "min")])
    taken = [
        row
        for row, count in zip(groups["row_min"].to_pylist(), groups["weight_sum"].to_pylist(), strict=True)
        for _ in range(max(count, 0))
    ]
    return rows.take(pa.array(taken, pa.int64())), MissingRows()


def _runs_short(ids: pa.Array, weights: pa.Array) -> bool:
    """Whether more equal rows are deleted than exist."""
    gone = pc.unique(ids.filter(pc.less(weights, 0)))
    if not len(gone):
        return False
    rows = pa.table({"id": ids, "weight": weights, "row": pa.array(range(len(ids)), pa.int64())})
    rows = rows.filter(pc.is_in(ids, value_set=gone)).sort_by([("id", "ascending"), ("row", "ascending")])
    sums = pc.cumulative_sum(rows["weight"])
    summed = pa.table({"id": rows["id"], "sum": sums, "start": pc.subtract(sums, rows["weight"])})
    found = summed.group_by("id", use_threads=False).aggregate([("sum", "min"), ("start", "first")])
    return bool(pc.any(pc.less(found["sum_min"], found["start_first"])).as_py())


@dataclass(frozen=True, slots=True)
class MergedRows:
    """The folded changes of a table, completed from its rows. ``puts`` replace the rows with the same keys.

    ``untouched``: which rows of the base are neither replaced nor deleted. ``known``: whether the base has a row for every key in ``puts``.
    """

    cleared: bool
    puts: pa.Table
    gone: pa.Table
    missing: MissingRows
    untouched: pa.Array
    known: bool

    def rows(self, base: pa.Table) -> pa.Table:
        """All rows of the table. ``base`` is the argument of :func:`merge_keyed_rows`."""
        if self.cleared or not base.num_rows:
            return self.puts
        return pa.concat_tables([base.select(self.puts.schema.names).filter(self.untouched), self.puts])


def merge_keyed_rows(base: pa.Table, changes: pa.Table, schema: TableSchema, *, passed_over: MissingRows | None = None) -> MergedRows:
    """Fold the changes of a table with a key, and complete them from its rows.

    ``base`` has at least all rows that changes affect, or that a row moved from. ``changes`` are in the landing's columns, in order.
    ``passed_over`` counts changes that were already left out.
    """
    names = schema.current.names
    folded = fold(changes, schema)
    if folded.cleared:
        base = base.slice(0, 0)
    touched = folded.touched
    ids = group_ids(key_columns(pa.concat_tables([base.select(names), touched.select(names)]), schema.keys))
    base_ids, touched_ids = ids[: base.num_rows], ids[base.num_rows :]
    there = pc.is_in(touched_ids, value_set=base_ids)
    if passed_over is None and (not folded.consistent or pc.any(pc.and_not(folded.expected, there)).as_py()):
        left, passed_over = without_missing_rows(base, since_truncate(changes)[0], schema)
        return replace(merge_keyed_rows(base, left, schema, passed_over=passed_over), cleared=folded.cleared)
    puts = folded.puts.select(names)
    if folded.wanted:
        puts = _completed(puts, folded, base, pc.index_in(touched_ids, value_set=base_ids).to_pylist())
    untouched = pc.invert(pc.is_in(base_ids, value_set=touched_ids))
    known = pc.all(pc.or_(there, folded.gone), min_count=0).as_py()
    return MergedRows(folded.cleared, puts, touched.filter(folded.gone), passed_over or MissingRows(), untouched, known)


def _completed(puts: pa.Table, folded: Folded, base: pa.Table, places: list[int | None]) -> pa.Table:
    """Fill in unchanged values from the table's rows. ``places``: the row of each touched key in ``base``."""
    both = pa.concat_tables([puts, base.select(puts.schema.names)])
    # without a place the row belongs to another unit: see plan.py about rows that move far
    found = {
        put: dict.fromkeys(fields, puts.num_rows + place)
        for put, (touched, fields) in folded.wanted.items()
        if (place := places[touched]) is not None
    }
    return with_values_of(puts, both, range(puts.num_rows), found)


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
