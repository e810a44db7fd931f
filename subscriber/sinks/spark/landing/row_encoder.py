"""Encode transactions as rows of landing files. This is the hot path of landing.

An UPDATE that changes the key becomes two rows: a ``d`` with the old key, and a ``u`` that is marked as moved from it. A TOASTed value that
the UPDATE did not send is that of the old row. Under REPLICA IDENTITY FULL, every UPDATE becomes such a pair, with whole rows. Values that
the new row lacks are taken from the old one: a whole row has all of them, an old key has the TOASTed values of the key. PostgreSQL sends
the old key with every UPDATE of a row whose key has a TOASTed value, even if the key did not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from subscriber.abc import ApplyStatistics, RelationGate
from subscriber.errors import ConfigurationError, ProtocolError, RelationError
from subscriber.protocol import messages
from subscriber.protocol.decoder import decode
from subscriber.protocol.messages import Delete, Insert, Relation, Truncate, TupleData, Update
from subscriber.sinks.spark.landing.row_buffer import RowBuffer
from subscriber.sinks.spark.schema.table_schema import TableSchema
from subscriber.transaction.model import Transaction

__all__ = ["DescribedRelations", "TransactionEncoder"]

_ROW_OVERHEAD: Final = 100
"""Approximate size in bytes of a row without its values."""


class DescribedRelations:
    """The relations that the stream has described, by oid, with their schemas. It lives as long as the stream."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Relation, TableSchema]] = {}

    def define(self, relation: Relation) -> None:
        """Store a Relation message."""
        known = self._known.get(relation.relation_id)
        schema = TableSchema.of_relation(relation)
        # an equal schema keeps the old object: a new schema object starts a new file
        self._known[relation.relation_id] = relation, known[1] if known is not None and known[1] == schema else schema

    def get(self, relation_id: int) -> tuple[Relation, TableSchema]:
        """Return the relation and its schema.

        Raises:
            ProtocolError: the relation was never described.
        """
        try:
            return self._known[relation_id]
        except KeyError:
            raise ProtocolError(f"no relation map entry for remote relation ID {relation_id}") from None

    async def learn(self, transaction: Transaction) -> None:
        """Store the relations that a transaction describes, and ignore its changes."""
        async for chunk in transaction.chunks():
            for record in chunk:
                if record[0] == messages.Tag.RELATION and isinstance(message := decode(record, in_stream=transaction.prefixed), Relation):
                    self.define(message)


class TransactionEncoder:
    """Encodes one transaction, chunk by chunk.

    Args:
        transaction: the transaction of the records.
        described: the relations of the stream.
        gate: tells which relations are wanted.
        buffer: gives the buffer of a relation under a schema. None: the lake has no such table.
        statistics: updated with the counts.
    """

    def __init__(
        self,
        transaction: Transaction,
        described: DescribedRelations,
        gate: RelationGate,
        buffer: Callable[[Relation, TableSchema], RowBuffer | None],
        statistics: ApplyStatistics,
    ) -> None:
        self._transaction = transaction
        self._described = described
        self._gate = gate
        self._find = buffer
        self._statistics = statistics
        self._buffers: dict[int, RowBuffer | None] = {}
        self._seq = 0

    def add(self, records: Sequence[bytes]) -> None:
        """Encode the next records.

        Raises:
            ProtocolError: a record cannot be decoded, or its relation was not described.
            ConfigurationError: values in binary format.
            RelationError: an UPDATE or DELETE of a table without replica identity.
        """
        prefixed = self._transaction.prefixed
        for record in records:
            match decode(record, in_stream=prefixed):
                case Insert() as insert:
                    if (buffer := self._buffer(insert.relation_id)) is not None:
                        self._append(buffer, "i", insert.new)
                        self._statistics.inserts += 1
                case Update() as update:
                    if (buffer := self._buffer(update.relation_id)) is not None:
                        _require_identity(buffer.schema)
                        self._update(buffer, update)
                        self._statistics.updates += 1
                case Delete() as delete:
                    if (buffer := self._buffer(delete.relation_id)) is not None:
                        _require_identity(buffer.schema)
                        old = delete.old or delete.key
                        assert old is not None
                        self._append(buffer, "d", old)
                        self._statistics.deletes += 1
                case Truncate() as truncate:
                    buffers = [buffer for relation_id in truncate.relation_ids if (buffer := self._buffer(relation_id)) is not None]
                    for buffer in buffers:
                        buffer.append("t", self._transaction, self._next(), [None] * len(buffer.schema.columns))
                    self._statistics.truncates += bool(buffers)
                case Relation() as relation:
                    self._described.define(relation)
                    self._buffers.pop(relation.relation_id, None)
                case _:
                    pass

    def _next(self) -> int:
        self._seq += 1
        return self._seq - 1

    def _buffer(self, relation_id: int) -> RowBuffer | None:
        if relation_id in self._buffers:
            return self._buffers[relation_id]
        relation, schema = self._described.get(relation_id)
        found: RowBuffer | None = None
        if self._gate(relation, self._transaction.final_lsn):
            found = self._find(relation, schema)
        else:
            self._statistics.skipped_tables.add(str(schema.table))
        self._buffers[relation_id] = found
        return found

    def _append(self, buffer: RowBuffer, op: str, data: TupleData, *, moved: bool = False) -> None:
        columns, kinds = buffer.schema.columns, data.kinds
        _require_width(buffer.schema, data)
        unchanged = None
        if messages.BINARY in kinds:
            raise ConfigurationError("a lake can only receive values in text format", hint="use binary = false")
        if messages.UNCHANGED in kinds:
            unchanged = [column.field for column, kind in zip(columns, kinds, strict=True) if kind == messages.UNCHANGED]
        buffer.append(op, self._transaction, self._next(), data.values, moved=moved, unchanged=unchanged)
        buffer.size += _ROW_OVERHEAD + sum(map(len, filter(None, data.values)))

    def _update(self, buffer: RowBuffer, update: Update) -> None:
        old = update.old or update.key
        if old is None:
            self._append(buffer, "u", update.new)
            return
        for data in (old, update.new):
            _require_width(buffer.schema, data)
        new = _completed(update.new, old)
        moved = update.old is not None or any(
            column.key and before != after for column, before, after in zip(buffer.schema.columns, old.values, new.values, strict=True)
        )
        if moved:
            self._append(buffer, "d", old)
        self._append(buffer, "u", new, moved=moved)


def _completed(new: TupleData, old: TupleData) -> TupleData:
    """The new row, with values that were not sent taken from the old row."""
    if messages.UNCHANGED not in new.kinds:
        return new
    kinds, values = bytearray(new.kinds), list(new.values)
    for position, (kind, value) in enumerate(zip(old.kinds, old.values, strict=True)):
        if kinds[position] == messages.UNCHANGED and value is not None:
            kinds[position], values[position] = kind, value
    return TupleData(bytes(kinds), values)


def _require_width(schema: TableSchema, data: TupleData) -> None:
    if len(data.kinds) != len(schema.columns):
        raise ProtocolError(
            f"a row of {len(data.kinds)} columns for relation {schema.table}, which was described with {len(schema.columns)}"
        )


def _require_identity(schema: TableSchema) -> None:
    if not schema.keys:
        raise RelationError(
            f'publisher did not send a replica identity of table "{schema.table}": the changed row cannot be identified',
            hint="give the table a primary key, or ALTER TABLE … REPLICA IDENTITY FULL",
            sqlstate="55000",
        )
