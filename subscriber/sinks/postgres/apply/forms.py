"""The form of a change: what all changes of a run have in common. It tells how to read them, and how to send them.

The form of a change is made from its decoded message. The following changes are read with it, without decoding them, as long as they differ
only in their values.

These changes have a form: INSERT, UPDATE that does not change the key, and DELETE, if the target's key finds the row. An UPDATE of a table
with a column that is GENERATED ALWAYS AS IDENTITY has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from struct import Struct
from typing import Final

from subscriber.errors import ProtocolError
from subscriber.protocol.messages import BINARY, NULL, TEXT, UNCHANGED, Delete, Insert, Tag, TupleData, Update
from subscriber.protocol.tuples import BINARY_FIELD, TEXT_FIELD, read_rows
from subscriber.sinks.postgres.apply.arrays import CONVERTED, converted_array, field_array, text_array
from subscriber.sinks.postgres.apply.change_sql import delete, insert, update
from subscriber.sinks.postgres.apply.set_sql import can_be_element, delete_set, insert_set, update_set
from subscriber.sinks.postgres.session.statement import Statement
from subscriber.sinks.postgres.tables.relation_mapping import RelationMapping, TargetColumn

__all__ = ["MOST_BYTES", "Form", "Forms", "Row", "require_width"]

_HEADER: Final = Struct(">IcH").pack
MOST_BYTES: Final = 512 * 1024
"""The largest size of a set of rows. A larger row is read and sent alone."""

# a pattern is the key of a statement: rows with different patterns need different statements
_UNCHANGED: Final = bytes(code if code == UNCHANGED else ord(".") for code in range(256))

Row = tuple[bytes | None, ...]
_Parts = tuple[tuple[bytes, bytes], ...]

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
_MOST_OMITTED: Final = 1500
"""The largest row that can be omitted: it fits into a page and into an index."""


@dataclass(slots=True, eq=False)
class Form:
    """See the module's docstring.

    Attributes:
        mapping: the relation and its target.
        tag: the tag of the messages.
        parts: how to read them, see :func:`read_rows`. After a whole old row, the new row has the same key.
        fields: as ``parts``, but what is an element of a binary array is read with its length. This is for changes of at most MOST_BYTES.
        kinds: the kind of each column's values: those of the last of ``fields``.
        picked: the indexes of the values that the statements need; None: all of them.
        formats: the format of each of these values; None: all are texts.
        single: makes one change.
        together: makes the changes of a set; None: they are made one by one.
        arrays: the indexes of the columns whose arrays ``together`` needs.
        key: returns the key that finds the row; None: no row is searched.
        ordered: the change must be made after all earlier changes, and before all later ones.
        row_key: returns the only key that the change touches, see :func:`_row_key`; None: the change must keep its place in its table.
        key_kinds: the kinds of the values of ``row_key``.
        not_null: for an UPDATE that need not be made if a later change overwrites it: the columns that reject NULL. See :meth:`accepts`.
    """

    mapping: RelationMapping
    tag: int
    parts: _Parts
    fields: _Parts
    kinds: bytes
    picked: tuple[int, ...] | None
    formats: list[int] | None
    single: Statement
    together: Statement | None
    arrays: tuple[int, ...]
    key: Callable[[Row], object] | None
    ordered: bool
    row_key: Callable[[Row], object] | None
    key_kinds: bytes
    not_null: tuple[int, ...] | None
    _starts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        indexes = range(len(self.kinds)) if self.picked is None else self.picked
        self._starts = [4 if self.kinds[index] in _FIELDS else 0 for index in indexes]

    def read(self, records: Sequence[bytes], places: range, offset: int) -> list[Row]:
        """Read the records from the first one on that have this form. ``offset``: where a record continues after tag and xid."""
        # a large value is not copied: it would be in memory once more
        parts = self.parts if len(records[places.start]) > MOST_BYTES else self.fields
        rows = read_rows(records, places, tag=self.tag, offset=offset, parts=parts, size=MOST_BYTES)
        if len(parts) == 1 or self.key is None:
            return rows
        width = len(self.kinds)
        same: list[Row] = []
        for row in rows:
            new = row[width:]
            if self.key(row) != self.key(new):
                break
            same.append(new)
        return same

    def values(self, row: Row, *, large: bool) -> Sequence[bytes | None]:
        """The parameters of ``single``. ``large``: the change has more than MOST_BYTES."""
        values = row if self.picked is None else [row[index] for index in self.picked]
        if large:
            return values
        return [None if value is None else value[start:] for value, start in zip(values, self._starts, strict=True)]

    def overwrites(self, other: Form) -> bool:
        """Whether a change of a row leaves nothing of an earlier UPDATE with this other form."""
        return self is other or self.tag == Tag.DELETE or (self.tag == Tag.UPDATE and set(self.arrays).issuperset(other.arrays))

    def accepts(self, row: Row) -> bool:
        """Whether it is known without the target that an UPDATE with this row succeeds if it finds its row."""
        if self.not_null is None or any(row[index] is None for index in self.not_null):
            return False
        values = [value for value in self.values(row, large=False) if value is not None]
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
        if self.key is not None:
            arrays.append(b"%d" % len(rows))
            formats.append(0)
        return arrays, formats


class Forms:
    """The forms of the changes of one batch. ``origin``: see :func:`~subscriber.sinks.postgres.apply.change_sql.update`."""

    def __init__(self, origin: int | None) -> None:
        self._origin = origin
        self._forms: dict[tuple[RelationMapping, int, _Parts], Form] = {}

    def of(self, message: Insert | Update | Delete, mapping: RelationMapping) -> Form | None:
        """The form of a change; None: it has none.

        Raises:
            ProtocolError: the row has another number of columns than the relation.
        """
        marker = b"N"
        old_kinds = b""
        picked = None
        match message:
            case Insert(new=row):
                tag = Tag.INSERT
            case Update(new=row, key=None, old=None) if mapping.key is not None and mapping.identity is None:
                tag = Tag.UPDATE
            case Update(new=row, key=None, old=TupleData() as old) if mapping.key is not None and mapping.identity is None:
                tag, marker = Tag.UPDATE, b"O"
                require_width(mapping, old)
                require_width(mapping, row)
                if UNCHANGED in old.kinds or any(old.values[i] != row.values[i] or old.kinds[i] != row.kinds[i] for i, _ in mapping.key):
                    return None
                old_kinds = old.kinds
            case Delete(key=key, old=old) if (found := key or old) is not None and mapping.key is not None:
                row = found
                tag, marker = Tag.DELETE, b"K" if key is not None else b"O"
                picked = tuple(index for index, _ in mapping.key)
            case _:
                return None
        require_width(mapping, row)
        usual = BINARY if BINARY in row.kinds else TEXT
        kinds, old_kinds = (each.replace(bytes([NULL]), bytes([usual])) for each in (row.kinds, old_kinds))
        header = _HEADER(message.relation_id, marker, len(kinds))
        parts = ((header, old_kinds), (b"N" + header[5:], kinds)) if old_kinds else ((header, kinds),)
        form = self._forms.get((mapping, tag, parts))
        if form is None:
            form = self._forms[mapping, tag, parts] = self._new(mapping, tag, parts, picked)
        return form

    def _new(self, mapping: RelationMapping, tag: int, parts: _Parts, picked: tuple[int, ...] | None) -> Form:
        kinds = parts[-1][1]
        formats = [int(kinds[index] == BINARY) for index in picked or range(len(kinds))] if BINARY in kinds else None
        single = _single(mapping, tag, kinds, self._origin)
        arrays = tuple(index for index, kind in enumerate(kinds) if kind != UNCHANGED) if picked is None else picked
        together = _together(mapping, tag, kinds, arrays, self._origin)
        key = itemgetter(*(index for index, _ in mapping.key)) if mapping.key and tag != Tag.INSERT else None
        key_kinds = bytes(kinds[index] for index, _ in mapping.key or ())
        row_key = _row_key(mapping, key_kinds)
        ordered = mapping.table.watched
        fields = tuple((header, _read_kinds(mapping, each)) for header, each in parts)
        not_null = _not_null(mapping, arrays) if tag == Tag.UPDATE and formats is None and together is not None else None
        kinds = fields[-1][1]
        return Form(
            mapping, tag, parts, fields, kinds, picked, formats, single, together, arrays, key, ordered, row_key, key_kinds, not_null
        )


def _read_kinds(mapping: RelationMapping, kinds: bytes) -> bytes:
    return bytes(_read_kind(column, kind) for column, kind in zip(mapping.columns, kinds, strict=True))


def _read_kind(column: TargetColumn, kind: int) -> int:
    """The kind by which to read values of a column: with their lengths, if that is what a binary array holds."""
    if kind == BINARY:
        return BINARY_FIELD
    return TEXT_FIELD if kind == TEXT and (column.type_oid in _TEXTS or column.array == _TEXT_ARRAY) else kind


def _row_key(mapping: RelationMapping, kinds: bytes) -> Callable[[Row], object] | None:
    """A function for the key of a row, if rows with different bytes in the key are different rows, and only the key makes rows unique."""
    table = mapping.table
    if not mapping.key or UNCHANGED in kinds or not table.key_unique or table.other_unique:
        return None
    for index, equals in mapping.key:
        remote, column = mapping.remote.columns[index], mapping.columns[index]
        if not column.deterministic or equals != _EQUALS:
            return None
        if remote.type_oid != column.type_oid or _EXACT.get(column.type_oid) != column.type_name:
            return None
    return itemgetter(*(index for index, _ in mapping.key))


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


def _single(mapping: RelationMapping, tag: int, kinds: bytes, origin: int | None) -> Statement:
    statements = mapping.statements
    unchanged = kinds.translate(_UNCHANGED) if tag == Tag.UPDATE else b""
    statement = statements.get((tag, unchanged))
    if statement is None:
        if tag == Tag.INSERT:
            statement = insert(mapping)
        elif tag == Tag.DELETE:
            statement = delete(mapping, b"", origin=origin)
        else:
            statement = update(mapping, unchanged, b"", old=False, replace=False, origin=origin)
        statements[tag, unchanged] = statement
    return statement


def _together(mapping: RelationMapping, tag: int, kinds: bytes, arrays: tuple[int, ...], origin: int | None) -> Statement | None:
    table = mapping.table
    if table.watched or not arrays or not all(can_be_element(mapping.columns[index], kinds[index]) for index in arrays):
        return None
    if tag == Tag.INSERT:
        make = insert_set
    elif origin is not None or not table.key_unique or not mapping.key or any(index not in arrays for index, _ in mapping.key):
        return None
    elif tag == Tag.DELETE:
        make = delete_set
    elif table.other_unique:
        return None
    else:
        make = update_set
    statement = mapping.statements.get((make, arrays))
    if statement is None:
        statement = mapping.statements[make, arrays] = make(mapping, arrays)
    return statement


def require_width(mapping: RelationMapping, row: TupleData) -> None:
    """Check that a row has the columns of its relation.

    Raises:
        ProtocolError: it has not.
    """
    if len(row.kinds) != len(mapping.columns):
        name = f"{mapping.remote.namespace}.{mapping.remote.name}"
        raise ProtocolError(
            f'a row of relation "{name}" has {len(row.kinds)} columns where its Relation message has {len(mapping.columns)}'
        )
