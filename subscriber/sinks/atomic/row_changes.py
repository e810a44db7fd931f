"""The changes that a target stores, and how they are read from transactions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from subscriber.errors import ConfigurationError, RelationError
from subscriber.interfaces import ApplyStatistics, Batch, TableName
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Relation
from subscriber.transaction.changes import UNCHANGED, ChangeReader, DeleteChange, InsertChange, TruncateChange, UpdateChange
from subscriber.transaction.changes import Row as SentRow

__all__ = ["TEXT_ONLY", "ClearTable", "DeleteRow", "InsertRow", "Row", "RowChange", "UpdateRow", "read_batch", "text_only"]

Row = dict[str, str | None]
"""Values by column, in PostgreSQL's text format. None is NULL."""

TEXT_ONLY: Final = ("the target accepts only values in the text format", "set binary to false")
"""A message and its hint."""


@dataclass(frozen=True, slots=True)
class InsertRow:
    """Add a row."""

    table: TableName
    row: Row = field(repr=False)


@dataclass(frozen=True, slots=True)
class UpdateRow:
    """Set the values of ``row`` in one row that has the values of ``key``. Other columns keep their values."""

    table: TableName
    key: Row = field(repr=False)
    row: Row = field(repr=False)


@dataclass(frozen=True, slots=True)
class DeleteRow:
    """Delete one row that has the values of ``key``."""

    table: TableName
    key: Row = field(repr=False)


@dataclass(frozen=True, slots=True)
class ClearTable:
    """Delete all rows."""

    table: TableName


RowChange = InsertRow | UpdateRow | DeleteRow | ClearTable


async def read_batch(batch: Batch, relations: dict[int, Relation], after: Lsn, counted: ApplyStatistics) -> list[RowChange]:
    """Read the changes of all transactions that end after an LSN.

    Args:
        batch: the transactions. The gate selects the changes.
        relations: the known relations by id. Those that the batch describes are added.
        after: see above.
        counted: the transactions and changes are added.

    Raises:
        RelationError: an UPDATE or DELETE without identity of the row.
        ConfigurationError: values in the binary format.
        ProtocolError, SpoolError: the changes cannot be read.
    """
    changes: list[RowChange] = []
    for transaction in batch.transactions:
        reader = ChangeReader(relations, prefixed=transaction.prefixed)
        counted.transactions += 1
        async for chunk in transaction.chunks():
            for record in chunk:
                if transaction.end_lsn <= after:
                    reader.skim(record)
                    continue
                change = reader.read(record)
                match change:
                    case TruncateChange(relations=truncated):
                        cleared = [ClearTable(_name(each)) for each in truncated if batch.gate(each, transaction.final_lsn)]
                        counted.truncates += bool(cleared)
                        changes += cleared
                    case InsertChange() | UpdateChange() | DeleteChange():
                        if batch.gate(change.relation, transaction.final_lsn):
                            changes.append(_row_change(change, counted))
                        else:
                            counted.skipped_tables.add(str(_name(change.relation)))
        relations |= reader.described
    return changes


def _row_change(change: InsertChange | UpdateChange | DeleteChange, counted: ApplyStatistics) -> RowChange:
    relation = change.relation
    match change:
        case InsertChange():
            counted.inserts += 1
            return InsertRow(_name(relation), dict.fromkeys(change.new) | _texts(change.new))
        case UpdateChange():
            counted.updates += 1
            return UpdateRow(_name(relation), _identity(relation, change.old or change.key or change.new), _texts(change.new))
        case DeleteChange():
            counted.deletes += 1
            return DeleteRow(_name(relation), _identity(relation, change.old or change.key or {}))


def _identity(relation: Relation, row: SentRow) -> Row:
    columns = {column.name for column in relation.columns if column.key or relation.replica_identity == "f"}
    if not columns:
        raise RelationError(
            f'relation "{_name(relation)}" has no replica identity, so its rows cannot be updated or deleted',
            sqlstate="55000",
            hint="add a primary key on the publisher, or ALTER TABLE ... REPLICA IDENTITY FULL",
        )
    return {name: value for name, value in _texts(row).items() if name in columns}


def _texts(row: SentRow) -> Row:
    found: Row = {}
    for name, value in row.items():
        if isinstance(value, bytes):
            raise text_only()
        if value is not UNCHANGED:
            found[name] = value
    return found


def text_only() -> ConfigurationError:
    message, hint = TEXT_ONLY
    return ConfigurationError(message, hint=hint)


def _name(relation: Relation) -> TableName:
    return TableName(relation.namespace, relation.name)
