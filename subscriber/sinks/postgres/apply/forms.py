"""The forms of changes for PostgreSQL: which statement makes one change, and which one makes a set of changes.

Two kinds of forms exist. Changes of a *plain* form are read as runs and may be sent as sets: INSERT, UPDATE that does not change the key,
and DELETE, if the target's key finds the row. All other changes are decoded one by one: an UPDATE of the key, changes of a table without a
key (NULLs in the old row need another statement), and UPDATEs of a table with a column that is GENERATED ALWAYS AS IDENTITY.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Self

from subscriber.protocol.messages import BINARY, UNCHANGED, Delete, Insert, Tag, TupleData, Update
from subscriber.protocol.tuples import read_rows, records_alike
from subscriber.sinks import runs
from subscriber.sinks.postgres.apply.arrays import AS_TEXT, CONVERTED, column_arrays, column_values, text_array
from subscriber.sinks.postgres.apply.change_sql import delete, insert, update
from subscriber.sinks.postgres.apply.resolving_sql import delete_resolving, insert_resolving, insert_set_resolving, update_resolving
from subscriber.sinks.postgres.apply.set_sql import can_be_element, delete_set, insert_set, update_set
from subscriber.sinks.postgres.session.statement import Statement
from subscriber.sinks.postgres.tables.relation_mapping import RelationMapping, TargetColumn
from subscriber.sinks.runs import Part, Row, is_plain, old_and_new, parts_of

__all__ = ["MOST_BYTES", "Form", "Forms", "has_exact_key"]

MOST_BYTES: Final = 512 * 1024
"""The largest size of a set of rows. A larger row is read and sent alone."""

# a pattern is the key of a statement: rows with different patterns need different statements
_UNCHANGED: Final = bytes(code if code == UNCHANGED else ord(".") for code in range(256))
_NULLS: Final = bytes(code if code in b"nu" else ord(".") for code in range(256))

_NO_LIMIT: Final = 2**62
_TEXT_TYPE: Final = 25
_TEXT_ARRAY: Final = 1009
_TEXTS: Final = frozenset({_TEXT_TYPE, 1042, 1043})
"""Types whose binary format is their text: text, character, character varying."""

_EQUALS: Final = "OPERATOR(pg_catalog.=)"
_EXACT: Final = {
    16: "boolean",
    17: "bytea",
    20: "bigint",
    21: "smallint",
    23: "integer",
    25: "text",
    26: "oid",
    1043: "character varying",
    1082: "date",
    1114: "timestamp without time zone",
    1184: "timestamp with time zone",
    2950: "uuid",
}
"""Types of which the publisher sends equal values as equal bytes. None has a modifier, with which different values could become equal."""
_ACCEPTED: Final = frozenset(_EXACT) | {700, 701, 1042, 1083, 1266, 1700}
"""Types (further: real, double precision, character, time, numeric) whose values the target accepts if its column has the same modifier."""
_INSERT_CONFLICTS: Final = ("insert_exists", "multiple_unique_conflicts")
_UPDATE_CONFLICTS: Final = ("update_missing", "update_origin_differs", "update_exists", "multiple_unique_conflicts")
_DELETE_CONFLICTS: Final = ("delete_missing", "delete_origin_differs")
_MOST_OMITTED: Final = 1500
"""The largest row that can be omitted: it fits into a page and into an index."""


@dataclass(slots=True, eq=False, kw_only=True)
class Form(runs.Form):
    """See the module's docstring. Rows of a plain form are the messages themselves, and those of another form are its parameters.

    Attributes:
        offset: where the messages continue after tag and xid.
        mapping: the relation and its target.
        single: makes one change.
        formats: the format of each parameter of ``single``; None: all are texts.
        picked: the indexes of the columns that are these parameters; None: all of them.
        together: makes the changes of a set; None: they are made one by one.
        arrays: the columns whose arrays ``together`` needs, as :func:`column_arrays` takes them.
        find: returns the keys that find the rows; None: no row is searched.
        not_null: for an UPDATE that need not be made if a later change overwrites it: the columns that reject NULL. See :meth:`accepts`.
    """

    offset: int = 1
    mapping: RelationMapping
    single: Statement
    formats: tuple[int, ...] | None
    picked: tuple[int, ...] | None = None
    together: Statement | None = None
    arrays: tuple[tuple[int, int, bool], ...] = ()
    find: Callable[[list[Any]], Sequence[object]] | None = None
    not_null: tuple[int, ...] | None = None

    def read(self, records: Sequence[bytes], places: range, offset: int) -> tuple[Self, list[Any]]:
        if self.large is not None and len(records[places.start]) > self.most:
            return self.large.read(records, places, offset)
        rows = records_alike(records, places, tag=self.tag, offset=offset, parts=self.parts, size=self.most)
        if self.same and len(self.parts) > 1:
            # a whole old row: the key must not change
            old, new = (column_values(rows, offset, self.parts, self.same, first=first) for first in (True, False))
            if old != new:
                del rows[next(place for place, key in enumerate(old) if key != new[place]) :]
        return self, rows

    def values(self, rows: Sequence[Any]) -> Sequence[Row]:
        """The values of rows: all columns of the new row, or of the old one if there is none."""
        if not self.parts:
            return rows
        found = read_rows(rows, range(len(rows)), tag=self.tag, offset=self.offset, parts=self.parts, size=_NO_LIMIT)
        skipped = len(self.parts[0][1]) if len(self.parts) > 1 else 0
        return [row[skipped:] for row in found] if skipped else found

    def parameters(self, rows: Sequence[Any]) -> Sequence[Sequence[bytes | None]]:
        """The parameters of ``single`` for each row."""
        values = self.values(rows)
        return values if self.picked is None else [[row[index] for index in self.picked] for row in values]

    def overwrites(self, other: Form) -> bool:
        """Whether a change of a row leaves nothing of an earlier UPDATE with this other form."""
        if self is other or self.tag == Tag.DELETE:
            return True
        mine = {index for index, _, _ in self.arrays}
        return self.tag == Tag.UPDATE and mine.issuperset(index for index, _, _ in other.arrays)

    def accepts(self, row: Any) -> bool:
        """Whether it is known without the target that an UPDATE with this row succeeds if it finds its row."""
        (new,) = self.values([row])
        if self.not_null is None or any(new[index] is None for index in self.not_null):
            return False
        values = [value for value in new if value is not None]
        joined = b"\0".join(values)
        # a publisher with the encoding SQL_ASCII sends any bytes
        return len(joined) <= _MOST_OMITTED and (joined.isascii() or _is_text(joined)) and joined.count(0) < len(values)

    def set_of(self, rows: list[Any]) -> tuple[list[bytes | None], list[int]]:
        """The parameters of ``together``, and their formats."""
        arrays = column_arrays(rows, self.offset, self.parts, self.arrays)
        formats = [int(array is not None) for array in arrays]
        if None in arrays:
            values = list(zip(*self.values(rows), strict=True))
            for place, (index, _, _) in enumerate(self.arrays):
                if arrays[place] is None:
                    arrays[place] = text_array(values[index], self.mapping.columns[index].delimiter.encode())
        if self.find is not None:
            arrays.append(b"%d" % len(rows))
            formats.append(0)
        return arrays, formats


class Forms:
    """The forms of the changes of one batch. ``origin``: see :func:`~subscriber.sinks.postgres.apply.change_sql.update`."""

    def __init__(self, origin: int | None) -> None:
        self._origin = origin
        self._forms: dict[object, Form] = {}

    def of(self, message: Insert | Update | Delete, mapping: RelationMapping, offset: int) -> tuple[Form, Row | None]:
        """The form of a change. If it is not plain, also its parameters. ``offset``: where the message continues after tag and xid.

        Raises:
            ProtocolError: a row has another number of columns than the relation, or a DELETE has no old row.
        """
        old, new = old_and_new(message, len(mapping.columns), mapping.table.name)
        key = None if mapping.key is None else [index for index, _ in mapping.key]
        if is_plain(message, key) and (mapping.identity is None or not isinstance(message, Update)):
            parts = parts_of(message)
            known: dict[Hashable, Form] = mapping.forms
            form = known.get((self._origin, type(message), offset, parts))
            if form is None:
                form = known[self._origin, type(message), offset, parts] = self._plain(message, mapping, offset, parts)
            return form, None
        searched = TupleData(b"", []) if old is None else _searched(mapping, old)
        values = (*(() if new is None else new.values), *searched.values)
        kinds = (b"" if new is None else new.kinds) + searched.kinds
        single = self._single(message, mapping, old)
        formats = _formats(kinds)
        form = self._forms.get((single, formats))
        if form is None:
            tag, table = Tag[single.message_type], mapping.table
            form = Form(tag=tag, parts=(), table=table.tree, ordered=table.watched, mapping=mapping, single=single, formats=formats)
            self._forms[single, formats] = form
        return form, values

    def _single(self, message: Insert | Update | Delete, mapping: RelationMapping, old: TupleData | None) -> Statement:
        """The statement that makes one change. ``old``: the row that finds the target's row; None: the new row finds it."""
        origin = self._origin
        match message:
            case Insert():
                return mapping.statement("INSERT", lambda: _insert(mapping, origin))
            case Update(new=new):
                unchanged = new.kinds.translate(_UNCHANGED)
                nulls = b"" if mapping.key is not None else (old or new).kinds.translate(_NULLS)
                own, replace = old is not None, _identity_changes(message, mapping)
                return mapping.statement(
                    ("UPDATE", unchanged, nulls, own, replace),
                    lambda: _update(mapping, unchanged, nulls, old=own, replace=replace, origin=origin),
                )
            case Delete():
                gone = b"" if mapping.key is not None or old is None else old.kinds.translate(_NULLS)
                return mapping.statement(("DELETE", gone), lambda: _delete(mapping, gone, origin))

    def _plain(self, message: Insert | Update | Delete, mapping: RelationMapping, offset: int, parts: tuple[Part, ...]) -> Form:
        table = mapping.table
        kinds = parts[-1][1]
        tag = {Insert: Tag.INSERT, Update: Tag.UPDATE, Delete: Tag.DELETE}[type(message)]
        keyed = tuple(index for index, _ in mapping.key or ())
        # a DELETE needs the key only
        picked = keyed if tag == Tag.DELETE else None
        arrays = tuple(index for index, kind in enumerate(kinds) if kind != UNCHANGED) if picked is None else tuple(sorted(picked))
        together = _together(mapping, tag, kinds, arrays, self._origin)
        key = partial(column_values, offset=offset, parts=parts, columns=keyed) if keyed else None
        exact = has_exact_key(mapping) and all(kinds[index] != UNCHANGED for index in keyed)
        form = Form(
            tag=tag,
            parts=parts,
            offset=offset,
            same=keyed,
            most=MOST_BYTES,
            table=table.tree,
            keys=key if exact else None,
            key_space=(mapping, bytes(kinds[index] for index in keyed)),
            ordered=table.watched,
            mapping=mapping,
            single=self._single(message, mapping, message.key or message.old if isinstance(message, Delete) else None),
            formats=_formats(kinds if picked is None else bytes(kinds[index] for index in picked)),
            picked=picked,
            together=together,
            arrays=tuple((index, *_element(mapping.columns[index], kinds[index])) for index in arrays),
            find=None if tag == Tag.INSERT else key,
            not_null=_not_null(mapping, arrays) if tag == Tag.UPDATE and BINARY not in kinds and together is not None else None,
        )
        form.large = replace(form, together=None, keys=None, not_null=None)
        return form


def _resolves(mapping: RelationMapping, *kinds: str) -> bool:
    """Whether a rule for one of these conflicts is not the default, or they are logged. An error is not logged."""
    resolving = mapping.resolving
    return resolving is not None and (resolving.logged or not set(resolving.rules.changed).isdisjoint(kinds))


def _resolves_inserts(mapping: RelationMapping) -> bool:
    return mapping.resolving is not None and not set(mapping.resolving.rules.changed).isdisjoint(_INSERT_CONFLICTS)


def _insert(mapping: RelationMapping, origin: int | None) -> Statement:
    statement = insert(mapping)
    if not mapping.columns or not _resolves_inserts(mapping):
        return statement
    return insert_resolving(mapping, statement, tracked=origin is not None)


def _update(mapping: RelationMapping, unchanged: bytes, nulls: bytes, *, old: bool, replace: bool, origin: int | None) -> Statement:
    statement = update(mapping, unchanged, nulls, old=old, replace=replace, origin=origin)
    if not _resolves(mapping, *_UPDATE_CONFLICTS):
        return statement
    return update_resolving(mapping, unchanged, nulls, old=old, replace=replace, origin=origin, base=statement)


def _delete(mapping: RelationMapping, nulls: bytes, origin: int | None) -> Statement:
    statement = delete(mapping, nulls, origin=origin)
    return delete_resolving(mapping, nulls, origin=origin, base=statement) if _resolves(mapping, *_DELETE_CONFLICTS) else statement


def _formats(kinds: bytes) -> tuple[int, ...] | None:
    """Format codes of libpq: 1 for binary; None if all values are texts."""
    return tuple(int(kind == BINARY) for kind in kinds) if BINARY in kinds else None


def _searched(mapping: RelationMapping, old: TupleData) -> TupleData:
    """The values of the old row that the predicate needs, in the order of its parameters."""
    if mapping.key is not None:
        indexes = [index for index, _ in mapping.key]
    else:
        indexes = [index for index, value in enumerate(old.values) if value is not None]
    return TupleData(bytes(old.kinds[index] for index in indexes), [old.values[index] for index in indexes])


def _identity_changes(message: Update, mapping: RelationMapping) -> bool:
    """Whether the UPDATE may give a GENERATED ALWAYS AS IDENTITY column another value. Unknown counts as yes."""
    index = mapping.identity
    if index is None or message.new.values[index] is None:
        return False
    flagged = mapping.remote.columns[index].key
    old = message.old or (message.key if flagged else None)
    if old is None:
        return not (flagged and message.key is None)
    return old.values[index] != message.new.values[index] or old.kinds[index] != message.new.kinds[index]


def _element(column: TargetColumn, kind: int) -> tuple[int, bool]:
    """The type of a column's elements in a binary array, or AS_TEXT; and whether the values are in binary format already."""
    if kind == BINARY or column.type_oid in _TEXTS or column.array == _TEXT_ARRAY:
        return _TEXT_TYPE if column.cast else column.type_oid, True
    return column.type_oid if column.type_oid in CONVERTED else AS_TEXT, False


def has_exact_key(mapping: RelationMapping) -> bool:
    """Whether rows with different bytes in the key are different rows, and only the key makes rows unique. Else no form has keys."""
    key = mapping.unique_key
    if key is None or mapping.table.other_unique:
        return False
    for index, equals in key:
        remote, column = mapping.remote.columns[index], mapping.columns[index]
        if not column.deterministic or equals != _EQUALS:
            return False
        if remote.type_oid != column.type_oid or _EXACT.get(column.type_oid) != column.type_name:
            return False
    return True


def _not_null(mapping: RelationMapping, arrays: tuple[int, ...]) -> tuple[int, ...] | None:
    """The columns that reject NULL, if the target accepts all other values that the publisher can have; else None."""
    table = mapping.table
    if not table.unchecked or len(table.columns) != len(mapping.columns):
        return None
    for index in arrays:
        remote, column = mapping.remote.columns[index], mapping.columns[index]
        if column.type_oid not in _ACCEPTED or (remote.type_oid, remote.type_modifier) != (column.type_oid, column.modifier):
            return None
    return tuple(index for index in arrays if mapping.columns[index].not_null)


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _together(mapping: RelationMapping, tag: int, kinds: bytes, arrays: tuple[int, ...], origin: int | None) -> Statement | None:
    table, key = mapping.table, mapping.unique_key
    if table.watched or not arrays or not all(can_be_element(mapping.columns[index], kinds[index]) for index in arrays):
        return None
    if tag == Tag.INSERT and _resolves_inserts(mapping):
        if table.other_unique or key is None or any(index not in arrays for index, _ in key):
            return None
        tracked = origin is not None
        return mapping.statement(
            (insert_set_resolving, arrays),
            lambda: insert_set_resolving(mapping, arrays, insert_set(mapping, arrays), tracked=tracked),
        )
    if tag == Tag.INSERT:
        make = insert_set
    elif origin is not None or key is None or any(index not in arrays for index, _ in key):
        return None
    elif tag == Tag.DELETE:
        make = delete_set
    elif table.other_unique:
        return None
    else:
        make = update_set
    return mapping.statement((make, arrays), lambda: make(mapping, arrays))
