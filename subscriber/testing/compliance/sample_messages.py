"""Tables and messages of the scenarios, independent of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, cast

from subscriber.interfaces import PublishedTable, TableName
from subscriber.protocol.messages import (
    Column,
    Delete,
    Insert,
    Relation,
    ReplicaIdentity,
    Truncate,
    TruncateOption,
    TupleData,
    Update,
)

__all__ = ["TYPE_OIDS", "UNSENT", "Binary", "ColumnDefinition", "Table", "TypeName", "row", "truncate"]

TypeName = Literal[
    "bool", "bytea", "int8", "int2", "int4", "text", "float8", "date", "timestamp", "timestamptz", "numeric", "uuid", "jsonb"
]

TYPE_OIDS: Final[dict[TypeName, int]] = {
    "bool": 16,
    "bytea": 17,
    "int8": 20,
    "int2": 21,
    "int4": 23,
    "text": 25,
    "float8": 701,
    "date": 1082,
    "timestamp": 1114,
    "timestamptz": 1184,
    "numeric": 1700,
    "uuid": 2950,
    "jsonb": 3802,
}
"""``pg_type.oid`` of the types in use."""

_FLAGS: Final = "*!^+"

UNSENT: Final = object()
"""A value that was not sent: an unchanged TOASTed one."""


class Binary(bytes):
    """A value in binary format."""


@dataclass(frozen=True, slots=True)
class ColumnDefinition:
    """A column of a table.

    Attributes:
        name: its name.
        type: in PostgreSQL.
        key: whether it is part of the primary key (in the target) and of the replica identity (on the publisher).
        not_null: whether it has the constraint. Key columns always have it.
        default: an integer or text that the target uses as default, or None.
        local: whether only the target has it.
        unique: whether it is part of the target's unique constraint over all such columns.
    """

    name: str
    type: TypeName = "text"
    key: bool = False
    not_null: bool = False
    default: str | None = None
    local: bool = False
    unique: bool = False


class Table:
    """A table of the publisher and of the target.

    Args:
        name: unqualified; the schema is ``public``.
        columns: each ``name`` or ``name type``; the default type is text. Prefixes of the name: ``*`` for the key, ``!`` for NOT NULL,
            ``^`` for the target's unique constraint, ``+`` for a column that only the target has. ``=…`` after the type is its default.
        full: REPLICA IDENTITY FULL.
        nothing: REPLICA IDENTITY NOTHING.
        relation_id: on the publisher; any number.
    """

    def __init__(
        self, name: str, *columns: str, full: bool = False, nothing: bool = False, relation_id: int = 4711, namespace: str = "public"
    ) -> None:
        self.name = TableName(namespace, name)
        self.relation_id = relation_id
        self.full = full
        self._identity: ReplicaIdentity = "f" if full else "n" if nothing else "d"
        self.columns = tuple(map(_column, columns))
        self.sent = tuple(column for column in self.columns if not column.local)

    @property
    def relation(self) -> Relation:
        """The relation as the publisher describes it."""
        columns = tuple(Column(column.name, TYPE_OIDS[column.type], -1, key=self._identifies(column)) for column in self.sent)
        return Relation(self.relation_id, self.name.namespace, self.name.name, self._identity, columns)

    def _identifies(self, column: ColumnDefinition) -> bool:
        return self.full or (column.key and self._identity == "d")

    @property
    def published(self) -> PublishedTable:
        """The table as the publisher's catalog describes it."""
        return PublishedTable(
            name=self.name,
            relation_id=self.relation_id,
            kind="r",
            columns=tuple(column.name for column in self.sent),
            key_columns=tuple(column.name for column in self.sent if self._identifies(column)),
            replica_identity=self._identity,
            column_types=tuple(TYPE_OIDS[column.type] for column in self.sent),
            not_null=frozenset(column.name for column in self.sent if column.not_null),
        )

    def insert(self, *values: object) -> Insert:
        """Insert one row; see :func:`row`."""
        return Insert(self.relation_id, row(*values))

    def update(self, *values: object, old: Sequence[object] | None = None) -> Update:
        """Update one row. ``old`` is the whole old row (full), or the old key with None elsewhere, if the key changed."""
        before = None if old is None else row(*old)
        return Update(self.relation_id, None if self.full else before, before if self.full else None, row(*values))

    def delete(self, *old: object) -> Delete:
        """Delete one row, given as a whole (full), or as its key with None elsewhere."""
        before = row(*old)
        return Delete(self.relation_id, None if self.full else before, before if self.full else None)


def _column(text: str) -> ColumnDefinition:
    text, _, default = text.partition("=")
    name, _, type_name = text.rpartition(" ")
    if type_name not in TYPE_OIDS:
        name, type_name = text, "text"
    flags = name[: len(name) - len(name.lstrip(_FLAGS))]
    return ColumnDefinition(
        name.lstrip(_FLAGS),
        cast("TypeName", type_name),
        key="*" in flags,
        not_null="*" in flags or "!" in flags,
        default=default or None,
        local="+" in flags,
        unique="^" in flags,
    )


def row(*values: object) -> TupleData:
    """Make a row: None is NULL, :data:`UNSENT` not sent, :class:`Binary` in binary format, anything else text."""
    kinds, raw = bytearray(), list[bytes | None]()
    for value in values:
        if value is None or value is UNSENT:
            kinds += b"n" if value is None else b"u"
            raw.append(None)
        elif isinstance(value, Binary):
            kinds += b"b"
            raw.append(bytes(value))
        else:
            kinds += b"t"
            raw.append(value if isinstance(value, bytes) else str(value).encode())
    return TupleData(bytes(kinds), raw)


def truncate(*tables: Table, restart_identity: bool = False) -> Truncate:
    """Truncate tables together."""
    options = TruncateOption.RESTART_IDENTITY if restart_identity else TruncateOption(0)
    return Truncate(options, tuple(table.relation_id for table in tables))
