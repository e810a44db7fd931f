"""Changes of a table with a key, and the rows that they touch, become the rows that are there now."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from subscriber.sinks.spark.fold import Folded, fold, since_truncate, with_special
from subscriber.sinks.spark.keys import group_ids, key_columns
from subscriber.sinks.spark.missing import Missing, effective
from subscriber.sinks.spark.schema.table_schema import SPECIAL, TableSchema

__all__ = ["Settled", "settle"]


@dataclass(frozen=True, slots=True)
class Settled:
    """What is to be done to the table.

    Attributes:
        cleared: all its rows are gone first.
        puts: rows that are there now, in the current-state columns; those of their keys are replaced.
        gone: one row a key that was deleted.
        missing: changes that found no row.
        untouched: which rows of the base are neither replaced nor deleted.
        known: whether the base has a row of every key in ``puts``.
    """

    cleared: bool
    puts: pa.Table
    gone: pa.Table
    missing: Missing
    untouched: pa.Array
    known: bool

    def rows(self, base: pa.Table) -> pa.Table:
        """All rows of the table; ``base``: what was given to :func:`settle`."""
        if self.cleared or not base.num_rows:
            return self.puts
        return pa.concat_tables([base.select(self.puts.schema.names).filter(self.untouched), self.puts])


def settle(base: pa.Table, changes: pa.Table, schema: TableSchema, *, passed_over: Missing | None = None) -> Settled:
    """Fold changes and complete them from the table.

    Args:
        base: rows of the table in the current-state columns: at least all those that changes touch, or that a row moved away from.
        changes: in the landing's columns, in order.
        schema: of the table; has a key.
        passed_over: what was left out of the changes already.
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
        left, passed_over = effective(base, since_truncate(changes)[0], schema)
        found = settle(base, left, schema, passed_over=passed_over)
        return Settled(folded.cleared, found.puts, found.gone, found.missing, found.untouched, found.known)
    puts = folded.puts.select(names)
    if folded.wanted:
        puts = _completed(puts, folded, base, pc.index_in(touched_ids, value_set=base_ids).to_pylist())
    untouched = pc.invert(pc.is_in(base_ids, value_set=touched_ids))
    known = pc.all(pc.or_(there, folded.gone), min_count=0).as_py()
    return Settled(folded.cleared, puts, touched.filter(folded.gone), passed_over or Missing(), untouched, known)


def _completed(puts: pa.Table, folded: Folded, base: pa.Table, places: list[int | None]) -> pa.Table:
    """Fill in what only the table has. ``places``: where in ``base`` each touched key is."""
    both = pa.concat_tables([puts, base.select(puts.schema.names)])
    indices: dict[str, list[int]] = {}
    special = both[SPECIAL].to_pylist()
    for put, (touched, fields) in folded.wanted.items():
        place = places[touched]
        if place is None:
            continue  # of a unit that is not this one: see plan.py about rows that move far
        source = puts.num_rows + place
        for name in fields:
            indices.setdefault(name, list(range(puts.num_rows)))[put] = source
        special[put] = with_special(special[put], special[source], fields)
    for name, taken in indices.items():
        position = puts.schema.get_field_index(name)
        puts = puts.set_column(position, puts.schema.field(position), both[name].take(pa.array(taken, pa.int64())))
    position = puts.schema.get_field_index(SPECIAL)
    return puts.set_column(position, puts.schema.field(position), pa.array(special[: puts.num_rows], pa.string()))
