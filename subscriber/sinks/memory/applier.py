"""Make the changes of one transaction: all of them, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from subscriber.errors import ApplyError, ProtocolError, RelationError, TargetError
from subscriber.interfaces import ApplyStatistics, TableName
from subscriber.protocol.messages import BINARY, UNCHANGED, Delete, Insert, Relation, Truncate, TupleData, Update
from subscriber.sinks.memory.accepted_changes import Change
from subscriber.sinks.memory.table import MemoryTable, Undo, Values
from subscriber.sinks.memory.target import MemoryTarget
from subscriber.transaction.model import Transaction
from subscriber.types import Codec, TypeRegistry, Value, ValueRefused, codec

__all__ = ["Applier", "missing_columns", "read_value"]

_REFUSED: Final = "22P02"
_DUPLICATE: Final = "23505"
_PREREQUISITE: Final = "55000"


class Applier:
    """Changes the tables of a target.

    Args:
        target: the target that has the tables.
        types: types of the publisher.
        statistics: counters of the sink.
        origin: name of the replication origin in errors.
    """

    def __init__(self, target: MemoryTarget, types: TypeRegistry, statistics: ApplyStatistics, origin: str) -> None:
        self._target = target
        self._types = types
        self._statistics = statistics
        self._origin = origin
        self._undo: list[Undo] = []

    def apply(self, transaction: Transaction, changes: Sequence[Change]) -> None:
        """Make all changes, or none.

        Raises:
            ApplyError: the target rejects a change.
            RelationError: a relation does not fit its table.
            ProtocolError: a change does not fit its relation.
        """
        counted = ApplyStatistics()
        self._undo = []
        for change in changes:
            try:
                self._change(change, counted)
            except BaseException as error:
                for undo in reversed(self._undo):
                    undo()
                if isinstance(error, TargetError):
                    self._explain(error, change, transaction)
                raise
        self._undo = []
        mine = self._statistics
        mine.transactions += 1
        mine.inserts += counted.inserts
        mine.updates += counted.updates
        mine.deletes += counted.deletes
        mine.truncates += counted.truncates
        mine.confl_update_missing += counted.confl_update_missing
        mine.confl_delete_missing += counted.confl_delete_missing

    def _explain(self, error: TargetError, change: Change, transaction: Transaction) -> None:
        kind = type(change.message).__name__.upper()
        table = f"{change.relations[0].namespace}.{change.relations[0].name}"
        if error.sqlstate == _DUPLICATE:
            conflict = f"{kind.lower()}_exists"
            name = f"confl_{conflict}"
            setattr(self._statistics, name, getattr(self._statistics, name) + 1)
            error.add_note(f'conflict detected on relation "{table}": conflict={conflict}')
            error.hint = "change or delete the target's row; the transaction is retried"
        error.add_note(
            f'processing remote data for replication origin "{self._origin}" during message type "{kind}"'
            f' for replication target relation "{table}" in transaction {transaction.xid}, finished at {transaction.final_lsn}'
        )

    def _change(self, change: Change, counted: ApplyStatistics) -> None:
        match change.message:
            case Insert(_, new):
                relation, table = self._table(change.relations[0])
                values = self._values(relation, table, new, unsent_as_null=True)
                self._undo.append(table.insert(values)[1])
                counted.inserts += 1
            case Update() as message:
                relation, table = self._table(change.relations[0])
                number = table.find(self._search(relation, table, message.old or message.key or message.new))
                if number is None:
                    counted.confl_update_missing += 1
                else:
                    self._undo.append(table.update(number, self._values(relation, table, message.new)))
                    counted.updates += 1
            case Delete() as message:
                relation, table = self._table(change.relations[0])
                old = message.old or message.key
                if old is None:
                    raise ProtocolError("a Delete message without an old row")
                number = table.find(self._search(relation, table, old))
                if number is None:
                    counted.confl_delete_missing += 1
                else:
                    self._undo.append(table.delete(number))
                    counted.deletes += 1
            case Truncate():
                self._undo += [self._table(relation)[1].clear() for relation in change.relations]
                counted.truncates += 1

    def _table(self, relation: Relation) -> tuple[Relation, MemoryTable]:
        table = self._target.table(TableName(relation.namespace, relation.name))
        self._target.follow(table, [column.name for column in relation.columns])
        return relation, table

    def _search(self, relation: Relation, table: MemoryTable, row: TupleData) -> Values:
        """The values that find the row: those of the target's key if the publisher sent it. Without a key, the whole row."""
        identity = {column.name for column in relation.columns if column.key}
        if table.key and identity.issuperset(table.key):
            return {name: value for name, value in self._values(relation, table, row, only=set(table.key)).items() if name in table.key}
        if table.key:
            raise RelationError(
                f'publisher did not send replica identity column expected by the logical replication target relation "{table.name}"',
                sqlstate=_PREREQUISITE,
                hint="make the target's primary key a part of the publisher's replica identity",
            )
        if relation.replica_identity != "f":
            raise RelationError(
                f'logical replication target relation "{table.name}" has no primary key'
                " and published relation does not have REPLICA IDENTITY FULL",
                sqlstate=_PREREQUISITE,
                hint="add a primary key to the target's table, or ALTER TABLE ... REPLICA IDENTITY FULL on the publisher",
            )
        return self._values(relation, table, row)

    def _values(
        self, relation: Relation, table: MemoryTable, row: TupleData, *, unsent_as_null: bool = False, only: set[str] | None = None
    ) -> Values:
        columns = relation.columns
        if len(row.kinds) != len(columns):
            name = f"{relation.namespace}.{relation.name}"
            raise ProtocolError(f'a row of relation "{name}" has {len(row.kinds)} columns where its Relation message has {len(columns)}')
        found: Values = {}
        for column, kind, data in zip(columns, row.kinds, row.values, strict=True):
            if (only is not None and column.name not in only) or column.name not in table.columns:
                continue
            if data is None:
                if kind != UNCHANGED or unsent_as_null:
                    found[column.name] = None
                continue
            found[column.name] = read_value(self.codec(column.type_oid, column.type_modifier), column.name, data, binary=kind == BINARY)
        return found

    def codec(self, type_oid: int, modifier: int) -> Codec:
        """The codec that reads values of a type."""
        return codec(self._types.resolve(type_oid, modifier))


def read_value(reading: Codec, column: str, data: bytes, *, binary: bool) -> Value:
    """Decode a value into a Python object.

    Raises:
        ApplyError: the value is invalid for the type.
    """
    try:
        return reading.value(data, binary=binary)
    except ValueRefused as refused:
        error = ApplyError(str(refused), sqlstate=_REFUSED, hint=refused.hint)
        error.add_note(f'column "{column}"')
        raise error from None


def missing_columns(table: MemoryTable, names: Sequence[str]) -> list[str]:
    return [name for name in names if name not in table.columns]
