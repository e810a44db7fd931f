"""One line for one message of the protocol, as ``subscriber decode`` prints it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Final

from subscriber.interfaces import TableName
from subscriber.protocol.messages import (
    Column,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    Relation,
    Truncate,
    TruncateOption,
    TupleData,
    Update,
)
from subscriber.sinks.output_lines import Line, LineValue, message_line, moment, without_none
from subscriber.transaction.changes import Row, value_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["control_line", "wire_line"]

_WORDS: Final = re.compile(r"(?<!^)(?=[A-Z])")


def wire_line(message: Message, relations: Mapping[int, Relation]) -> Line:
    """Convert a message to a line with all its fields.

    Args:
        message: decoded.
        relations: relations described so far, by oid. Columns of an unknown relation are named by their numbers, from 1.
    """
    match message:
        case Insert():
            return _row_line("insert", message, relations, {"new": message.new})
        case Update():
            return _row_line("update", message, relations, {"key": message.key, "old": message.old, "new": message.new})
        case Delete():
            return _row_line("delete", message, relations, {"key": message.key, "old": message.old})
        case Truncate():
            known = [relations[relation_id] for relation_id in message.relation_ids if relation_id in relations]
            complete = len(known) == len(message.relation_ids)
            return without_none(
                {
                    "kind": "truncate",
                    "xid": message.xid,
                    "relation_ids": list(message.relation_ids),
                    "relations": [_name(relation) for relation in known] if complete else None,
                    "cascade": TruncateOption.CASCADE in message.options,
                    "restart_identity": TruncateOption.RESTART_IDENTITY in message.options,
                }
            )
        case LogicalMessage():
            line = message_line(message.lsn, message.prefix, message.content, transactional=message.transactional)
            return without_none(line | {"xid": message.xid})
        case Relation():
            return without_none(
                {
                    "kind": "relation",
                    "xid": message.xid,
                    "relation_id": message.relation_id,
                    "relation": _name(message),
                    "replica_identity": message.replica_identity,
                    "columns": [_column(column) for column in message.columns],
                }
            )
        case _:
            return control_line(message)


def control_line(message: DataclassInstance) -> Line:
    """Convert a message without rows to a line, field by field."""
    line: Line = {"kind": _kind(message)}
    # a dataclass of numbers, LSNs, times and names: Begin, Commit, Origin, Type, …, or a frame without a message
    for field in fields(message):
        value = getattr(message, field.name)
        line[field.name] = moment(value) if field.name.endswith("_time") and value is not None else value
    return without_none(line)


def _column(column: Column) -> dict[str, str | int | bool]:
    return {"name": column.name, "type_oid": column.type_oid, "type_modifier": column.type_modifier, "key": column.key}


def _kind(message: object) -> str:
    return _WORDS.sub(" ", type(message).__name__).lower()


def _row_line(
    kind: str, message: Insert | Update | Delete, relations: Mapping[int, Relation], rows: Mapping[str, TupleData | None]
) -> Line:
    relation = relations.get(message.relation_id)
    line: Line = {
        "kind": kind,
        "xid": message.xid,
        "relation_id": message.relation_id,
        "relation": _name(relation) if relation else None,
    }
    columns: Mapping[str, LineValue] = {
        name: None if data is None else _named(data, relation, key_only=name == "key") for name, data in rows.items()
    }
    return without_none({**line, **columns})


def _named(data: TupleData, relation: Relation | None, *, key_only: bool) -> Row:
    """Name the columns. Data that does not fit the description is shown with column numbers."""
    names = [column.name for column in relation.columns] if relation else []
    wanted = [column.key or not key_only for column in relation.columns] if relation else []
    if len(names) != len(data.kinds) or len(set(names)) != len(names):
        names = [str(number) for number in range(1, len(data.kinds) + 1)]
        wanted = [True] * len(names)
    return {name: value_of(kind, value) for name, kind, value, wants in zip(names, data.kinds, data.values, wanted, strict=True) if wants}


def _name(relation: Relation) -> TableName:
    return TableName(relation.namespace, relation.name)
