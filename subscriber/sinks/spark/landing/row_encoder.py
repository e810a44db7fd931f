"""Encode transactions as rows of landing files. This is the hot path of landing.

An UPDATE that changes the key becomes two rows: a ``d`` with the old key, and a ``u`` that is marked as moved from it. A TOASTed value that
the UPDATE did not send is that of the old row. Under REPLICA IDENTITY FULL, every UPDATE becomes such a pair, with whole rows. Values that
the new row lacks are taken from the old one: a whole row has all of them, an old key has the TOASTed values of the key. PostgreSQL sends
the old key with every UPDATE of a row whose key has a TOASTed value, even if the key did not change.

Changes that differ from an earlier one of their relation only in their values are read in runs, without a message object for each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from subscriber.abc import RelationGate
from subscriber.errors import ConfigurationError, ProtocolError, RelationError
from subscriber.protocol import messages
from subscriber.protocol.decoder import decode
from subscriber.protocol.messages import Delete, Insert, Relation, Truncate, TupleData, Update
from subscriber.protocol.tuples import read_rows
from subscriber.sinks.spark.landing.row_buffer import RowBuffer, Stamp
from subscriber.sinks.spark.landing.zone import OpenBatch
from subscriber.sinks.spark.schema.table_schema import TableSchema
from subscriber.transaction.model import Transaction

__all__ = ["DescribedRelations", "TransactionEncoder"]

TableIds = Callable[[Relation], int | None]
"""Gives the lake's number of a relation's table, or None."""
_ROW_OVERHEAD: Final = 100
"""Approximate size in bytes of a row without its values."""
_HEADER: Final = 7
"""Length of a row's relation, tuple marker, and number of columns."""
_NO_LIMIT: Final = 2**62
_COUNTERS: Final = {"i": "inserts", "u": "updates", "d": "deletes"}


@dataclass(frozen=True, slots=True)
class Form:
    """What changes of a run have in common: tag, header and kinds for :func:`read_rows`, then what is landed of them."""

    relation_id: int
    tag: int
    header: bytes
    kinds: bytes
    op: str
    unchanged: list[str] | None


class DescribedRelations:
    """The relations that the stream has described, by oid, with their schemas. It lives as long as the stream.

    Attributes:
        forms: the latest form of changes, by their tag and header.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Relation, TableSchema]] = {}
        self.forms: dict[bytes, Form] = {}

    def define(self, relation: Relation) -> bool:
        """Store a Relation message. Return whether it differs from the one that is known."""
        known = self._known.get(relation.relation_id)
        # with publish_via_partition_root, the root is described again for each partition that has a change
        if known is not None and (known[0] == relation or replace(known[0], xid=relation.xid) == relation):
            return False
        schema = TableSchema.of_relation(relation)
        # an equal schema keeps the old object: a new schema object starts a new file
        self._known[relation.relation_id] = relation, known[1] if known is not None and known[1] == schema else schema
        self.forms.clear()
        return True

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
    """Encodes transactions, chunk by chunk. Call :meth:`begin` for each.

    Attributes:
        batch: as given.
        stamp: of the transaction.
        counts: numbers of the transaction's changes, by the names of :class:`subscriber.abc.ApplyStatistics`.

    Args:
        batch: gets the rows.
        described: the relations of the stream.
        gate: whether a relation's changes are for this encoder.
        table_ids: gives the lake's number of a table.
        skipped_tables: gets the names of tables that the gate leaves out.
    """

    stamp: Stamp
    counts: Counter[str]

    def __init__(
        self,
        batch: OpenBatch,
        *,
        described: DescribedRelations,
        gate: RelationGate,
        table_ids: TableIds,
        skipped_tables: set[str],
    ) -> None:
        self.batch = batch
        self._described = described
        self._gate = gate
        self._table_ids = table_ids
        self._skipped_tables = skipped_tables
        # of all transactions, and of this one
        self._found: dict[int, RowBuffer | None] = {}
        self._buffers: dict[int, RowBuffer | None] = {}
        self._prefixed = False
        self._seq = 0

    def begin(self, transaction: Transaction) -> None:
        """Begin the next transaction."""
        self._prefixed = transaction.prefixed
        self.stamp = Stamp.of(transaction)
        self.counts = Counter()
        self._buffers = {}
        self._seq = 0

    def add(self, records: Sequence[bytes]) -> None:
        """Encode the next records.

        Raises:
            ProtocolError: a record cannot be decoded, or its relation was not described.
            ConfigurationError: values in binary format.
            RelationError: an UPDATE or DELETE of a table without replica identity.
        """
        forms = self._described.forms
        prefixed = self._prefixed
        offset = 5 if prefixed else 1
        stop = offset + _HEADER
        place, count = 0, len(records)
        while place < count:
            record = records[place]
            form = forms.get(record[:1] + record[offset:stop] if prefixed else record[:stop])
            if form is not None:
                parts = ((form.header, form.kinds),)
                rows = read_rows(records, range(place, count), tag=form.tag, offset=offset, parts=parts, size=_NO_LIMIT)
                if rows:
                    end = place + len(rows)
                    self._append_run(form, rows, sum([len(record) for record in records[place:end]]))
                    place = end
                    continue
            self._add(record)
            place += 1

    def _append_run(self, form: Form, rows: Sequence[tuple[bytes | None, ...]], size: int) -> None:
        buffer = self._buffer(form.relation_id)
        if buffer is None:
            return
        count = len(rows)
        buffer.append(form.op, self.stamp, self._seq, rows, size + _ROW_OVERHEAD * count, unchanged=form.unchanged)
        self._seq += count
        self.counts[_COUNTERS[form.op]] += count

    def _add(self, record: bytes) -> None:
        match decode(record, in_stream=self._prefixed):
            case Insert() as insert:
                if (buffer := self._buffer(insert.relation_id)) is not None:
                    self._append(buffer, "i", insert.new)
                    self.counts["inserts"] += 1
                    self._learn(record, insert.relation_id, "i", insert.new, buffer)
            case Update() as update:
                if (buffer := self._buffer(update.relation_id)) is not None:
                    _require_identity(buffer.schema)
                    self._update(buffer, update)
                    self.counts["updates"] += 1
                    if update.old is None and update.key is None:
                        self._learn(record, update.relation_id, "u", update.new, buffer)
            case Delete() as delete:
                if (buffer := self._buffer(delete.relation_id)) is not None:
                    _require_identity(buffer.schema)
                    old = delete.old or delete.key
                    assert old is not None
                    self._append(buffer, "d", old)
                    self.counts["deletes"] += 1
                    self._learn(record, delete.relation_id, "d", old, buffer)
            case Truncate() as truncate:
                buffers = [buffer for relation_id in truncate.relation_ids if (buffer := self._buffer(relation_id)) is not None]
                for buffer in buffers:
                    buffer.append("t", self.stamp, self._next(), [[None] * len(buffer.schema.columns)], 0)
                self.counts["truncates"] += bool(buffers)
            case Relation() as relation:
                if self._described.define(relation):
                    self._found.pop(relation.relation_id, None)
                    self._buffers.pop(relation.relation_id, None)
            case _:
                pass

    def _learn(self, record: bytes, relation_id: int, op: str, data: TupleData, buffer: RowBuffer) -> None:
        """Store the form of a change, for the following ones."""
        offset = 5 if self._prefixed else 1
        header = record[offset : offset + _HEADER]
        form = Form(relation_id, record[0], header, data.kinds.replace(b"n", b"t"), op, _unchanged(buffer.schema, data))
        self._described.forms[record[:1] + header] = form

    def _next(self) -> int:
        self._seq += 1
        return self._seq - 1

    def _buffer(self, relation_id: int) -> RowBuffer | None:
        if relation_id in self._buffers:
            return self._buffers[relation_id]
        relation, schema = self._described.get(relation_id)
        found: RowBuffer | None = None
        if not self._gate(relation, self.stamp.final_lsn):
            self._skipped_tables.add(str(schema.table))
        elif relation_id in self._found:
            found = self._found[relation_id]
        else:
            table_id = self._table_ids(relation)
            found = self._found[relation_id] = None if table_id is None else self.batch.buffer(table_id, schema)
        self._buffers[relation_id] = found
        return found

    def _append(self, buffer: RowBuffer, op: str, data: TupleData, *, moved: bool = False) -> None:
        _require_width(buffer.schema, data)
        if messages.BINARY in data.kinds:
            raise ConfigurationError("a lake can only receive values in text format", hint="use binary = false")
        size = _ROW_OVERHEAD + sum(map(len, filter(None, data.values)))
        buffer.append(op, self.stamp, self._next(), [data.values], size, moved=moved, unchanged=_unchanged(buffer.schema, data))

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


def _unchanged(schema: TableSchema, data: TupleData) -> list[str] | None:
    """Fields of columns that were not sent."""
    if messages.UNCHANGED not in data.kinds:
        return None
    return [column.field for column, kind in zip(schema.columns, data.kinds, strict=True) if kind == messages.UNCHANGED]


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
