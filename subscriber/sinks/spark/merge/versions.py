"""The versions of a table's rows: changes of the change log become rows of a history table. Pure functions over Arrow.

A history table has one of two forms:

* ``scd2``: a row for each version of a row (a slowly changing dimension of type 2). A version begins with the commit that made it, and ends
  with the commit that changed or deleted the row, or truncated the table. It is the *current* version until then.
* ``soft_delete``: the last version of each row. If the row is deleted, ``_deleted`` is true. An INSERT of the same key revives it.

A commit makes at most one version of a row: the row that it leaves. A version that the same commit replaces does not appear. A changed key
ends the version of the old key and begins one of the new key. A copy of the table is a TRUNCATE, followed by rows; see ``change_log.py``.

Unchanged TOASTed values are not sent. They are taken from the version before. An UPDATE or DELETE of a row that has no current version is
skipped, as in the state table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.compute as pc

from subscriber.sinks.spark.catalog.history import HISTORY_COLUMNS
from subscriber.sinks.spark.files.location import HistoryKind
from subscriber.sinks.spark.merge.keys import group_ids, key_columns
from subscriber.sinks.spark.merge.row_matching import MissingRows, match_incomplete_rows, update_pairs
from subscriber.sinks.spark.merge.unsent_values import with_values_of
from subscriber.sinks.spark.schema.table_schema import TableSchema

__all__ = ["changed_versions", "history_schema"]


def history_schema(kind: HistoryKind, schema: TableSchema) -> pa.Schema:
    """The columns of a history table."""
    return pa.schema([*HISTORY_COLUMNS[kind], *schema.current])


@dataclass(slots=True)
class _Version:
    """A version of a row.

    Attributes:
        row: the row with its values, among those of the history table and the changes.
        lsn: it begins with this commit.
        end: the change that ends it. None: it is current, or was ended before.
        values: columns whose values other rows have.
        hidden: whether it has no row: the commit that made it has replaced it, or, with soft deletes, a later version has.
        hides: versions that this one has hidden.
    """

    row: int
    lsn: int
    end: int | None = None
    values: dict[str, int] = field(default_factory=dict)
    hidden: bool = False
    hides: list[_Version] = field(default_factory=list)

    def hide(self, others: Iterable[_Version]) -> None:
        self.hides = [version for version in others if not version.hidden]
        for version in self.hides:
            version.hidden = True


@dataclass(slots=True)
class _Versions:
    """The versions that changes affect: those in the history table, and new ones.

    Attributes:
        current: by the key's number. A key has one, but equal rows of a table with REPLICA IDENTITY FULL have one each.
        ended: the deleted rows of a table with soft deletes.
        made: all versions, in the order in which they begin.
    """

    current: dict[int, list[_Version]] = field(default_factory=dict)
    ended: dict[int, list[_Version]] = field(default_factory=dict)
    made: list[_Version] = field(default_factory=list)
    missing: MissingRows = field(default_factory=MissingRows)

    def end(self, key: int, version: _Version, change: int, lsn: int) -> None:
        if version.lsn == lsn:
            version.hidden = True
            for other in version.hides:
                other.hidden = False
        else:
            version.end = change
            self.ended.setdefault(key, []).append(version)


def changed_versions(kind: HistoryKind, base: pa.Table, changes: pa.Table, schema: TableSchema, added: Collection[str] = ()) -> pa.Table:
    """Apply changes to rows of a history table, and return its rows.

    Args:
        kind: the form of the table.
        base: rows of the history table; at least those of the changed keys, or all if there is a TRUNCATE.
        changes: in the landing's columns, in order.
        schema: of the table, with the replica identity of the changes.
        added: columns added later: older rows have NULL there, even if the publisher has a value.
    """
    columns = history_schema(kind, schema)
    base = base.select(columns.names)
    found, missing = _applied(kind, base, changes, schema)
    if schema.full and added and (missing.updates or missing.deletes):
        described = replace(schema, columns=tuple(column for column in schema.columns if column.key))
        current = base.filter(_is_current(kind, base))
        found, _ = _applied(kind, base, match_incomplete_rows(current, changes, described, added), schema)
    return found


def _is_current(kind: HistoryKind, rows: pa.Table) -> pa.ChunkedArray:
    return rows["_is_current"] if kind == "scd2" else pc.invert(rows["_deleted"])


def _applied(kind: HistoryKind, base: pa.Table, changes: pa.Table, schema: TableSchema) -> tuple[pa.Table, MissingRows]:
    names = schema.current.names
    own = pa.concat_tables([base.select(names), changes.select(names)])
    ids = _identified(own, schema)
    affected = _affected(kind, base, changes, ids)
    rows = pc.indices_nonzero(affected).to_pylist() if len(affected) else []  # see fold.since_truncate
    keys = [*ids[: base.num_rows].filter(affected).to_pylist(), *ids[base.num_rows :].to_pylist()]
    current = _is_current(kind, base).filter(affected).to_pylist()
    lsns = base["_lsn"].filter(affected).to_pylist()
    versions = _Versions()
    for key, row, lsn, is_current in zip(keys, rows, lsns, current, strict=False):
        version = _Version(row, lsn)
        versions.made.append(version)
        (versions.current if is_current else versions.ended).setdefault(key, []).append(version)
    _replay(versions, changes, keys[len(rows) :], base.num_rows, schema, revives=kind == "soft_delete")
    left = base.filter(pc.invert(affected))
    kept = [version for version in versions.made if not version.hidden]
    if not kept:
        return left, versions.missing
    result = _rows(kind, kept, base, changes, own)
    return pa.concat_tables([left, result.cast(left.schema)]), versions.missing


def _identified(own: pa.Table, schema: TableSchema) -> pa.Array:
    """Number the rows by their keys. Rows of a table without a key are all different."""
    if not schema.keys or not own.num_rows:
        return pa.array(range(own.num_rows), pa.int64())
    return group_ids(key_columns(own, schema.keys))


def _affected(kind: HistoryKind, base: pa.Table, changes: pa.Table, ids: pa.Array) -> pa.Array:
    """Which rows of the history table changes may end or replace."""
    if pc.any(pc.equal(changes["_op"], "t")).as_py():
        found = pa.array([True] * base.num_rows, pa.bool_())
    else:
        found = pc.is_in(ids[: base.num_rows], value_set=pc.unique(ids[base.num_rows :]))
    if kind == "scd2":
        found = pc.and_(found, _is_current(kind, base))
    return found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found


def _replay(versions: _Versions, changes: pa.Table, keys: list[int], first: int, schema: TableSchema, *, revives: bool) -> None:
    """Apply the changes one by one. ``first``: number of the first change among the rows."""
    ops, moved, unsent, lsns = (changes[name].to_pylist() for name in ("_op", "_moved", "_un", "_lsn"))
    pairs = update_pairs(changes)
    is_bag = schema.full or not schema.keys
    before: _Version | None = None  # of the previous change, a DELETE: the version that it ended
    for change, key in enumerate(keys):
        op, lsn = ops[change], lsns[change]
        there = versions.current.get(key)
        is_pair = pairs[change]
        if op == "t":
            for of_key, all_ in versions.current.items():
                for version in all_:
                    versions.end(of_key, version, change, lsn)
            versions.current.clear()
        elif op == "d":
            before = there.pop() if there else None
            if before is not None:
                versions.end(key, before, change, lsn)
            else:
                versions.missing.deletes += not pairs[change + 1]
        else:
            previous = before if moved[change] and is_pair else (there[-1] if there else None)
            if op == "u" and previous is None and (is_pair or not moved[change]):
                versions.missing.updates += 1
                continue
            if not is_bag and there:
                versions.end(key, there.pop(), change, lsn)
            new = _Version(first + change, lsn)
            if revives and is_bag and is_pair and previous is not None:
                # the old values of a row that was updated are not a deleted row
                new.hide([previous, *previous.hides])
            elif revives:
                ended = [version for version in versions.ended.get(key, ()) if not version.hidden]
                new.hide(ended[-1:] if is_bag else ended)
            if unsent[change] and previous is not None:
                new.values = {name: previous.values.get(name, previous.row) for name in unsent[change]}
            versions.current.setdefault(key, []).append(new)
            versions.made.append(new)


def _rows(kind: HistoryKind, kept: Sequence[_Version], base: pa.Table, changes: pa.Table, own: pa.Table) -> pa.Table:
    """The rows of versions. ``own``: the table's own columns of ``base``, and then of ``changes``."""
    numbers = [version.row for version in kept]
    rows = pa.array(numbers, pa.int64())
    taken = with_values_of(own.take(rows), own, numbers, {place: version.values for place, version in enumerate(kept) if version.values})
    begun = pa.concat_tables([_times(kind, base), changes.select(["_ts", "_lsn"])]).take(rows)
    ends = pa.array([version.end for version in kept], pa.int64())
    ended = changes.select(["_ts", "_lsn"]).take(ends)
    if kind == "scd2":
        history = [begun["_ts"], ended["_ts"], pc.is_null(ends), begun["_lsn"], ended["_lsn"]]
    else:
        before = pa.concat_tables([base.select(["_deleted"]), pa.table({"_deleted": pa.array([False] * changes.num_rows, pa.bool_())})])
        is_ended = pc.is_valid(ends)
        last = [pc.if_else(is_ended, ended[name], begun[name]) for name in ("_lsn", "_ts")]
        history = [pc.or_(is_ended, before["_deleted"].take(rows)), *last]
    return pa.table([*history, *taken.columns], names=base.schema.names)


def _times(kind: HistoryKind, base: pa.Table) -> pa.Table:
    return base.select(["_valid_from" if kind == "scd2" else "_ts", "_lsn"]).rename_columns(["_ts", "_lsn"])
