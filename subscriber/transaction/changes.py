"""The changes of one transaction as objects with names and values, for programs that read them one by one.

The sinks do not use this module: they decode a whole batch at once. A value is as the publisher sent it. Text is ``str`` (bytes that are
not UTF-8 are kept with ``surrogateescape``), the binary format is ``bytes``, and NULL is ``None``. A large value that an UPDATE did not
change is not sent; it is :data:`UNCHANGED`.

Relation messages name the columns of a row. Each is sent only once: it applies to its transaction and to all later ones of the stream.
A caller that skips a transaction's rows must therefore still :meth:`ChangeReader.skim` it, and keep the relations that it described
(:attr:`ChangeReader.described`).

Source: PostgreSQL manual, Logical Replication Message Formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, Final, Literal

from subscriber.errors import ProtocolError
from subscriber.protocol import messages
from subscriber.protocol.decoder import decode
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Delete, Insert, LogicalMessage, Relation, Tag, Truncate, TruncateOption, TupleData, Type, Update

__all__ = [
    "UNCHANGED",
    "Change",
    "ChangeReader",
    "DeleteChange",
    "InsertChange",
    "MessageChange",
    "Row",
    "TruncateChange",
    "Unchanged",
    "UpdateChange",
    "Value",
    "row",
    "value_of",
]


class Unchanged(Enum):
    """The type of :data:`UNCHANGED`."""

    UNCHANGED = "unchanged"

    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Final = Unchanged.UNCHANGED
"""A TOASTed value that was not changed, and therefore not sent: the row keeps the value that it has."""

Value = str | bytes | None | Unchanged
"""The value of one column: text, binary format, NULL, or not sent."""
Row = dict[str, Value]
"""Column name to value, in the table's order."""


@dataclass(slots=True)
class InsertChange:
    """A row was inserted. The repr of a change never shows values, because it ends up in logs."""

    kind: ClassVar[Literal["insert"]] = "insert"
    relation: Relation
    new: Row = field(repr=False)


@dataclass(slots=True)
class UpdateChange:
    """A row was updated.

    Attributes:
        relation: its table.
        key: old values of the replica identity's columns, if any of them changed; else None.
        old: the whole old row, if the replica identity is FULL; else None.
        new: the new row.
    """

    kind: ClassVar[Literal["update"]] = "update"
    relation: Relation
    key: Row | None = field(repr=False)
    old: Row | None = field(repr=False)
    new: Row = field(repr=False)


@dataclass(slots=True)
class DeleteChange:
    """A row was deleted. Exactly one of ``key`` (columns of the replica identity) and ``old`` (whole row) is set."""

    kind: ClassVar[Literal["delete"]] = "delete"
    relation: Relation
    key: Row | None = field(repr=False)
    old: Row | None = field(repr=False)


@dataclass(slots=True)
class TruncateChange:
    """Tables were truncated together."""

    kind: ClassVar[Literal["truncate"]] = "truncate"
    relations: tuple[Relation, ...]
    cascade: bool
    restart_identity: bool


@dataclass(slots=True)
class MessageChange:
    """``pg_logical_emit_message`` was called in the transaction."""

    kind: ClassVar[Literal["message"]] = "message"
    lsn: Lsn
    prefix: str
    content: bytes = field(repr=False)


Change = InsertChange | UpdateChange | DeleteChange | TruncateChange | MessageChange


def row(relation: Relation, data: TupleData, *, key_only: bool = False) -> Row:
    """Combine the values with the names of their columns.

    Args:
        relation: its latest description.
        data: the row.
        key_only: give only the columns of the replica identity. The other columns of a key are placeholders.

    Raises:
        ProtocolError: the row and the relation have different numbers of columns.
    """
    columns = relation.columns
    if len(columns) != len(data.kinds):
        raise ProtocolError(
            f"a row of relation {relation.namespace}.{relation.name} has {len(data.kinds)} columns, its description has {len(columns)}"
        )
    return {
        column.name: value_of(kind, value)
        for column, kind, value in zip(columns, data.kinds, data.values, strict=True)
        if column.key or not key_only
    }


def value_of(kind: int, value: bytes | None) -> Value:
    """Return one column's value from its kind byte and raw bytes."""
    if value is None:
        return UNCHANGED if kind == messages.UNCHANGED else None
    return value.decode("utf-8", "surrogateescape") if kind == messages.TEXT else value


class ChangeReader:
    """Reads the records of one transaction in order.

    Args:
        known: relations described before this transaction, by their ids. It is not changed.
        prefixed: whether the records carry a (sub)transaction id (:attr:`subscriber.transaction.model.Transaction.prefixed`).

    Attributes:
        described: relations that this transaction described. Add them to ``known`` when the transaction is done.
        types: the Type messages of this transaction, by oid.
    """

    __slots__ = ("_known", "_prefixed", "described", "types")

    def __init__(self, known: Mapping[int, Relation], *, prefixed: bool) -> None:
        self._known = known
        self._prefixed = prefixed
        self.described: dict[int, Relation] = {}
        self.types: dict[int, Type] = {}

    def read(self, record: bytes) -> Change | None:
        """Read the next record. Return None for a record that is not a change but describes a relation or a type.

        Raises:
            ProtocolError: the record is not a message, or its relation was never described.
        """
        message = decode(record, in_stream=self._prefixed)
        match message:
            case Insert():
                relation = self._relation(message.relation_id)
                return InsertChange(relation, row(relation, message.new))
            case Update():
                relation = self._relation(message.relation_id)
                return UpdateChange(relation, _key(relation, message.key), _old(relation, message.old), row(relation, message.new))
            case Delete():
                relation = self._relation(message.relation_id)
                return DeleteChange(relation, _key(relation, message.key), _old(relation, message.old))
            case Truncate():
                options = message.options
                return TruncateChange(
                    tuple(map(self._relation, message.relation_ids)),
                    cascade=TruncateOption.CASCADE in options,
                    restart_identity=TruncateOption.RESTART_IDENTITY in options,
                )
            case LogicalMessage():
                return MessageChange(message.lsn, message.prefix, message.content)
            case Relation():
                self.described[message.relation_id] = message
            case Type():
                self.types[message.type_oid] = message
        return None

    def skim(self, record: bytes) -> None:
        """Note the relation that the record describes, if it does. Skip the record otherwise.

        Raises:
            ProtocolError: the record is a damaged Relation.
        """
        if record[0] == Tag.RELATION:
            self.read(record)

    def _relation(self, relation_id: int) -> Relation:
        relation = self.described.get(relation_id) or self._known.get(relation_id)
        if relation is None:
            raise ProtocolError(f"no relation map entry for remote relation ID {relation_id}")
        return relation


def _key(relation: Relation, data: TupleData | None) -> Row | None:
    return None if data is None else row(relation, data, key_only=True)


def _old(relation: Relation, data: TupleData | None) -> Row | None:
    return None if data is None else row(relation, data)
