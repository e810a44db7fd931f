"""The forms of changes for PostgreSQL: which statement makes one change, and which one makes a set of changes.

Two kinds of forms exist. Changes of a *plain* form are read as runs and may be sent as sets: INSERT, UPDATE that does not change the key,
and DELETE, if the target's key finds the row. All other changes are decoded one by one: an UPDATE of the key, changes of a table without a
key (NULLs in the old row need another statement), and UPDATEs of a table with a column that is GENERATED ALWAYS AS IDENTITY.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Final

from subscriber.protocol.messages import BINARY, TEXT, UNCHANGED, Delete, Insert, Tag, TupleData, Update
from subscriber.protocol.tuples import BINARY_FIELD, TEXT_FIELD
from subscriber.sinks import runs
from subscriber.sinks.postgres.apply.arrays import CONVERTED, converted_array, field_array, text_array
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

_FIELDS: Final = (TEXT_FIELD, BINARY_FIELD)

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
    """See the module's docstring.

    Attributes:
        mapping: the relation and its target.
        single: makes one change.
        formats: the format of each parameter of ``single``; None: all are texts.
        picked: the indexes of a row's values that are these parameters; None: all of them.
        kinds: the kind of each value of a row. What is an element of a binary array is read with its length.
        together: makes the changes of a set; None: they are made one by one.
        arrays: the indexes of the columns whose arrays ``together`` needs.
        find: returns the key that finds the row; None: no row is searched.
        not_null: for an UPDATE that need not be made if a later change overwrites it: the columns that reject NULL. See :meth:`accepts`.
    """

    mapping: RelationMapping
    single: Statement
    formats: tuple[int, ...] | None
    picked: tuple[int, ...] | None = None
    kinds: bytes = b""
    together: Statement | None = None
    arrays: tuple[int, ...] = ()
    find: Callable[[Row], object] | None = None
    not_null: tuple[int, ...] | None = None
    _starts: list[int] | None = field(init=False)

    def __post_init__(self) -> None:
        kinds = self.kinds if self.picked is None else [self.kinds[index] for index in self.picked]
        self._starts = [4 if kind in _FIELDS else 0 for kind in kinds] if any(kind in _FIELDS for kind in kinds) else None

    def parameters(self, row: Row) -> Sequence[bytes | None]:
        """The parameters of ``single``."""
        values = row if self.picked is None else [row[index] for index in self.picked]
        if self._starts is None:
            return values
        return [None if value is None else value[start:] for value, start in zip(values, self._starts, strict=True)]

    def overwrites(self, other: Form) -> bool:
        """Whether a change of a row leaves nothing of an earlier UPDATE with this other form."""
        return self is other or self.tag == Tag.DELETE or (self.tag == Tag.UPDATE and set(self.arrays).issuperset(other.arrays))

    def accepts(self, row: Row) -> bool:
        """Whether it is known without the target that an UPDATE with this row succeeds if it finds its row."""
        if self.not_null is None or any(row[index] is None for index in self.not_null):
            return False
        values = [value for value in self.parameters(row) if value is not None]
        joined = b"\0".join(values)
        # a publisher with the encoding SQL_ASCII sends any bytes
        return len(joined) <= _MOST_OMITTED and (joined.isascii() or _is_text(joined)) and joined.count(0) < len(values)

    def set_of(self, rows: Sequence[Row]) -> tuple[list[bytes | None], list[int]]:
        """The parameters of ``together``, and their formats."""
        columns = list(zip(*rows, strict=True))
        arrays: list[bytes | None] = []
        formats: list[int] = []
        for index in self.arrays:
            column, values = self.mapping.columns[index], columns[index]
            array: bytes | None = None
            if self.kinds[index] in _FIELDS:
                array = field_array(values, _TEXT_TYPE if column.cast else column.type_oid)
            elif column.type_oid in CONVERTED:
                array = converted_array(values, column.type_oid)
            formats.append(int(array is not None))
            arrays.append(text_array(values, column.delimiter.encode()) if array is None else array)
        if self.find is not None:
            arrays.append(b"%d" % len(rows))
            formats.append(0)
        return arrays, formats


class Forms:
    """The forms of the changes of one batch. ``origin``: see :func:`~subscriber.sinks.postgres.apply.change_sql.update`."""

    def __init__(self, origin: int | None) -> None:
        self._origin = origin
        self._forms: dict[object, Form] = {}

    def of(self, message: Insert | Update | Delete, mapping: RelationMapping) -> tuple[Form, Row | None]:
        """The form of a change. If it is not plain, also the values of the change.

        Raises:
            ProtocolError: a row has another number of columns than the relation, or a DELETE has no old row.
        """
        old, new = old_and_new(message, len(mapping.columns), mapping.table.name)
        key = None if mapping.key is None else [index for index, _ in mapping.key]
        if is_plain(message, key) and (mapping.identity is None or not isinstance(message, Update)):
            parts = parts_of(message)
            known: dict[Hashable, Form] = mapping.forms
            form = known.get((self._origin, type(message), parts))
            if form is None:
                form = known[self._origin, type(message), parts] = self._plain(message, mapping, parts)
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

    def _plain(self, message: Insert | Update | Delete, mapping: RelationMapping, parts: tuple[Part, ...]) -> Form:
        table = mapping.table
        kinds = parts[-1][1]
        tag = {Insert: Tag.INSERT, Update: Tag.UPDATE, Delete: Tag.DELETE}[type(message)]
        keyed = tuple(index for index, _ in mapping.key or ())
        # a DELETE needs the key only
        picked = keyed if tag == Tag.DELETE else None
        arrays = tuple(index for index, kind in enumerate(kinds) if kind != UNCHANGED) if picked is None else picked
        together = _together(mapping, tag, kinds, arrays, self._origin)
        fields = tuple((header, _read_kinds(mapping, each)) for header, each in parts)
        exact = has_exact_key(mapping) and all(kinds[index] != UNCHANGED for index in keyed)
        form = Form(
            tag=tag,
            parts=fields,
            same=keyed,
            most=MOST_BYTES,
            table=table.tree,
            keys=partial(map, itemgetter(*keyed)) if exact else None,
            key_space=(mapping, bytes(kinds[index] for index in keyed)),
            ordered=table.watched,
            mapping=mapping,
            single=self._single(message, mapping, message.key or message.old if isinstance(message, Delete) else None),
            formats=_formats(kinds if picked is None else bytes(kinds[index] for index in picked)),
            picked=picked,
            kinds=fields[-1][1],
            together=together,
            arrays=arrays,
            find=itemgetter(*keyed) if keyed and tag != Tag.INSERT else None,
            not_null=_not_null(mapping, arrays) if tag == Tag.UPDATE and BINARY not in kinds and together is not None else None,
        )
        # its values are not copied to remove their lengths: they would be in memory once more
        form.large = replace(form, parts=parts, kinds=kinds, together=None, keys=None, not_null=None)
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


def _read_kinds(mapping: RelationMapping, kinds: bytes) -> bytes:
    return bytes(_read_kind(column, kind) for column, kind in zip(mapping.columns, kinds, strict=True))


def _read_kind(column: TargetColumn, kind: int) -> int:
    """The kind by which to read values of a column: with their lengths, if that is what a binary array holds."""
    if kind == BINARY:
        return BINARY_FIELD
    return TEXT_FIELD if kind == TEXT and (column.type_oid in _TEXTS or column.array == _TEXT_ARRAY) else kind


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
