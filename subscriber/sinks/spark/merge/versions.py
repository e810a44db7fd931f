"""The versions of a table's rows: changes of the change log become rows of a history table. Pure functions over Arrow.

A history table has a row for each version of a row (a slowly changing dimension of type 2). A version begins with the commit that made it,
and ends with the commit that changed or deleted the row, or truncated the table. It is the *current* version until then.

A commit makes at most one version of a row: the row that it leaves. A version that the same commit replaces does not appear. A changed key
ends the version of the old key and begins one of the new key. A copy of the table is a TRUNCATE, followed by rows; see ``change_log.py``.

Unchanged TOASTed values are not sent. They are taken from the version before. An UPDATE or DELETE of a row that has no current version is
skipped, as in the state table.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from subscriber.sinks.spark.catalog.history import HISTORY_COLUMNS
from subscriber.sinks.spark.merge.fold import with_values_of
from subscriber.sinks.spark.merge.keys import group_ids, key_columns
from subscriber.sinks.spark.merge.row_matching import update_pairs
from subscriber.sinks.spark.schema.table_schema import TableSchema

__all__ = ["changed_versions", "history_schema"]


def history_schema(schema: TableSchema) -> pa.Schema:
    """The columns of a history table."""
    return pa.schema([*HISTORY_COLUMNS, *schema.current])


@dataclass(slots=True)
class _Version:
    """A version of a row, which begins with the commit ``lsn``.

    Attributes:
        row: the row with its values, among those of the history table and the changes.
        end: the change that ends it. None: it is current, or was ended before.
        values: columns whose values other rows have.
        hidden: whether it has no row, because the commit that made it has replaced it.
    """

    row: int
    lsn: int
    end: int | None = None
    values: dict[str, int] = field(default_factory=dict)
    hidden: bool = False

    def end_by(self, change: int, lsn: int) -> None:
        """Let a change end it."""
        if self.lsn == lsn:
            self.hidden = True
        else:
            self.end = change


def changed_versions(base: pa.Table, changes: pa.Table, schema: TableSchema) -> pa.Table:
    """Apply changes to rows of a history table, and return its rows. ``changes`` are in the landing's columns, in order.

    ``base`` has at least the rows of the changed keys, or all if there is a TRUNCATE. ``schema`` has the replica identity of the changes.
    """
    base, names = base.select(history_schema(schema).names), schema.current.names
    own = pa.concat_tables([base.select(names), changes.select(names)])
    # rows of a table without a key are all different
    ids = group_ids(key_columns(own, schema.keys)) if schema.keys and own.num_rows else pa.array(range(own.num_rows), pa.int64())
    affected = _affected(base, changes, ids)
    rows = pc.indices_nonzero(affected).to_pylist() if len(affected) else []  # see fold.since_truncate
    keys = [*ids[: base.num_rows].filter(affected).to_pylist(), *ids[base.num_rows :].to_pylist()]
    lsns = base["_lsn"].filter(affected).to_pylist()
    versions = [_Version(row, lsn) for row, lsn in zip(rows, lsns, strict=True)]
    # a key has one, but equal rows of a table with REPLICA IDENTITY FULL have one each
    current: dict[int, list[_Version]] = {}
    for key, version in zip(keys, versions, strict=False):
        current.setdefault(key, []).append(version)
    versions += _replay(current, changes, keys[len(rows) :], base.num_rows, schema)
    left = base.filter(pc.invert(affected))
    kept = [version for version in versions if not version.hidden]
    if not kept:
        return left
    return pa.concat_tables([left, _rows(kept, base, changes, own).cast(left.schema)])


def _affected(base: pa.Table, changes: pa.Table, ids: pa.Array) -> pa.Array:
    """Which rows of the history table changes may end or replace."""
    if pc.any(pc.equal(changes["_op"], "t")).as_py():
        found = pa.array([True] * base.num_rows, pa.bool_())
    else:
        found = pc.is_in(ids[: base.num_rows], value_set=pc.unique(ids[base.num_rows :]))
    found = pc.and_(found, base["_is_current"])
    return found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found


def _replay(current: dict[int, list[_Version]], changes: pa.Table, keys: Sequence[int], first: int, schema: TableSchema) -> list[_Version]:
    """Apply the changes one by one to the current versions of their keys. Return the new versions, in the order in which they begin.

    ``first``: number of the first change among the rows.
    """
    made: list[_Version] = []
    ops, moved, unsent, lsns = (changes[name].to_pylist() for name in ("_op", "_moved", "_un", "_lsn"))
    pairs = update_pairs(changes)
    is_bag = schema.full or not schema.keys
    before: _Version | None = None  # of the previous change, a DELETE: the version that it ended
    for change, key in enumerate(keys):
        op, lsn = ops[change], lsns[change]
        there = current.get(key)
        is_pair = pairs[change]
        if op == "t":
            for version in itertools.chain.from_iterable(current.values()):
                version.end_by(change, lsn)
            current.clear()
        elif op == "d":
            before = there.pop() if there else None
            if before is not None:
                before.end_by(change, lsn)
        else:
            previous = before if moved[change] and is_pair else (there[-1] if there else None)
            if op == "u" and previous is None and (is_pair or not moved[change]):
                continue
            if not is_bag and there:
                there.pop().end_by(change, lsn)
            new = _Version(first + change, lsn)
            if unsent[change] and previous is not None:
                new.values = {name: previous.values.get(name, previous.row) for name in unsent[change]}
            current.setdefault(key, []).append(new)
            made.append(new)
    return made


def _rows(kept: Sequence[_Version], base: pa.Table, changes: pa.Table, own: pa.Table) -> pa.Table:
    """The rows of versions. ``own``: the table's own columns of ``base``, and then of ``changes``."""
    numbers = [version.row for version in kept]
    rows = pa.array(numbers, pa.int64())
    taken = with_values_of(own.take(rows), own, numbers, {place: version.values for place, version in enumerate(kept) if version.values})
    times = base.select(["_valid_from", "_lsn"]).rename_columns(["_ts", "_lsn"])
    begun = pa.concat_tables([times, changes.select(["_ts", "_lsn"])]).take(rows)
    ends = pa.array([version.end for version in kept], pa.int64())
    ended = changes.select(["_ts", "_lsn"]).take(ends)
    history = [begun["_ts"], ended["_ts"], pc.is_null(ends), begun["_lsn"], ended["_lsn"]]
    return pa.table([*history, *taken.columns], names=base.schema.names)
