"""Tables and messages of the scenarios, in terms that say nothing of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, cast

from subscriber.abc import PublishedTable, TableName
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

__all__ = ["SQL_NAMES", "TYPE_OIDS", "UNSENT", "Binary", "ColumnDefinition", "Table", "TypeName", "row", "truncate"]

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
"""``pg_type.oid`` of the types used."""

SQL_NAMES: Final[dict[TypeName, str]] = {
    "bool": "boolean",
    "int2": "smallint",
    "int4": "integer",
    "int8": "bigint",
    "float8": "double precision",
    "timestamp": "timestamp without time zone",
    "timestamptz": "timestamp with time zone",
}
"""What ``format_type`` calls them, where that is something else."""

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
        type: of PostgreSQL.
        key: of the primary key (in the target) and of the replica identity (at the publisher).
        not_null: has the constraint; columns of the key always have it.
        default: an integer or text that the target puts where none is given, or None.
        local: only the target has it.
        unique: of a unique constraint of the target, over all such columns.
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
        columns: each ``name`` or ``name type``, text without. A ``*`` before the name puts it into the key, a ``!`` makes it NOT NULL, a
            ``^`` puts it into the target's unique constraint, a ``+`` says that only the target has it, and ``=…`` behind the type is its
            default.
        full: REPLICA IDENTITY FULL.
        nothing: REPLICA IDENTITY NOTHING.
        relation_id: at the publisher; any number.
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
        """As the publisher describes it."""
        columns = tuple(Column(column.name, TYPE_OIDS[column.type], -1, key=self._identifies(column)) for column in self.sent)
        return Relation(self.relation_id, self.name.namespace, self.name.name, self._identity, columns)

    def _identifies(self, column: ColumnDefinition) -> bool:
        return self.full or (column.key and self._identity == "d")

    @property
    def published(self) -> PublishedTable:
        """As the publisher's catalog describes it."""
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
        """One row; see :func:`row`."""
        return Insert(self.relation_id, row(*values))

    def update(self, *values: object, old: Sequence[object] | None = None) -> Update:
        """One row; ``old`` is the whole row before (full), or its key with None elsewhere, if that changed."""
        before = None if old is None else row(*old)
        return Update(self.relation_id, None if self.full else before, before if self.full else None, row(*values))

    def delete(self, *old: object) -> Delete:
        """One row: the whole of it (full), or its key with None elsewhere."""
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
    """A row: None is NULL, :data:`UNSENT` not sent, :class:`Binary` in binary format, anything else text."""
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
    """Tables truncated together."""
    options = TruncateOption.RESTART_IDENTITY if restart_identity else TruncateOption(0)
    return Truncate(options, tuple(table.relation_id for table in tables))
