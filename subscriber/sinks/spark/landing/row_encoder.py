"""Encode transactions as rows of landing files. This is the hot path of landing.

An UPDATE that changes the key becomes two rows: a ``d`` with the old key, and a ``u`` that is marked as moved from it. A TOASTed value that
the UPDATE did not send is that of the old row. Under REPLICA IDENTITY FULL, every UPDATE becomes such a pair, with whole rows. Values that
the new row lacks are taken from the old one: a whole row has all of them, an old key has the TOASTed values of the key. PostgreSQL sends
the old key with every UPDATE of a row whose key has a TOASTed value, even if the key did not change.

Changes that differ from the latest one of their relation only in their values are read in runs (:mod:`subscriber.sinks.runs`). Rows keep
their order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from subscriber.errors import ConfigurationError, RelationError
from subscriber.interfaces import RelationGate
from subscriber.protocol import messages
from subscriber.protocol.decoder import decode
from subscriber.protocol.messages import Delete, Insert, Relation, Truncate, TupleData, Update
from subscriber.sinks import described_relations, runs
from subscriber.sinks.runs import LatestForms, Row, old_and_new, parts_of
from subscriber.sinks.spark.landing.row_buffer import RowBuffer, Stamp
from subscriber.sinks.spark.landing.zone import OpenBatch
from subscriber.sinks.spark.schema.table_schema import TableSchema
from subscriber.transaction.model import Transaction

__all__ = ["DescribedRelations", "TransactionEncoder"]

TableIds = Callable[[Relation], int | None]
"""Gives the lake's number of a relation's table, or None."""
_ROW_OVERHEAD: Final = 100
"""Approximate size in bytes of a row without its values."""
_TAGS: Final = {"i": messages.Tag.INSERT, "u": messages.Tag.UPDATE, "d": messages.Tag.DELETE}
_COUNTERS: Final = {"i": "inserts", "u": "updates", "d": "deletes"}


@dataclass(slots=True, eq=False, kw_only=True)
class Form(runs.Form):
    """What changes of a run have in common, with what is landed of them: operation, and the fields of unchanged columns."""

    relation_id: int
    op: str
    unchanged: list[str] | None


class DescribedRelations(described_relations.DescribedRelations):
    """The relations that the stream has described, by oid, with their schemas and the latest forms of changes."""

    def __init__(self) -> None:
        super().__init__()
        self.forms: LatestForms[Form] = LatestForms()
        self._schemas: dict[int, TableSchema] = {}

    def forget_targets(self) -> None:
        """Nothing: a lake takes any relation."""

    def _forget_target(self, relation_id: int) -> None:
        schema = TableSchema.of_relation(self._remote[relation_id])
        # an equal schema keeps the old object: a new schema object starts a new file
        if self._schemas.get(relation_id) != schema:
            self._schemas[relation_id] = schema
        self.forms.clear()

    def schema(self, relation_id: int) -> TableSchema:
        """The schema of a relation that the stream has described."""
        return self._schemas[relation_id]


class TransactionEncoder:
    """Encodes transactions into a batch, chunk by chunk. Call :meth:`begin` for each. ``counts`` has the names of the statistics."""

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
        offset = 5 if self._prefixed else 1
        place, count = 0, len(records)
        while place < count:
            found = forms.read(records, range(place, count), offset)
            if found is None:
                self._add(records[place])
                place += 1
            else:
                form, rows = found
                end = place + len(rows)
                self._append_run(form, rows, sum(map(len, records[place:end])))
                place = end

    def _append_run(self, form: Form, rows: Sequence[Row], size: int) -> None:
        buffer = self._buffer(form.relation_id)
        if buffer is None:
            return
        count = len(rows)
        if len(form.parts) > 1:
            width, each = len(buffer.schema.columns), size // count // 2 + _ROW_OVERHEAD
            for row in rows:
                buffer.append("d", self.stamp, self._next(), [row[:width]], each)
                buffer.append("u", self.stamp, self._next(), [row[width:]], each, moved=True)
        else:
            buffer.append(form.op, self.stamp, self._seq, rows, size + _ROW_OVERHEAD * count, unchanged=form.unchanged)
            self._seq += count
        self.counts[_COUNTERS[form.op]] += count

    def _add(self, record: bytes) -> None:
        match decode(record, in_stream=self._prefixed):
            case (Insert() | Update() | Delete()) as change:
                if (buffer := self._buffer(change.relation_id)) is not None:
                    self._change(buffer, change)
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

    def _change(self, buffer: RowBuffer, change: Insert | Update | Delete) -> None:
        """Add the rows of a change, and store its form for the following ones."""
        schema = buffer.schema
        old, new = old_and_new(change, len(schema.columns), schema.table)
        op = "i" if isinstance(change, Insert) else "d" if new is None else "u"
        if op != "i":
            _require_identity(schema)
        parts = parts_of(change)
        if any(messages.BINARY in kinds for _, kinds in parts):
            raise ConfigurationError("a lake can only receive values in text format", hint="use binary = false")
        if old is not None and new is not None:
            whole = isinstance(change, Update) and change.old is not None
            found = _completed(new, old)
            moved = whole or any(
                column.key and before != after for column, before, after in zip(schema.columns, old.values, found.values, strict=True)
            )
            if moved:
                self._append(buffer, "d", old)
            self._append(buffer, op, found, moved=moved)
            alike = whole and not any(messages.UNCHANGED in kinds for _, kinds in parts)
        else:
            alike, found = True, new or old or TupleData(b"", [])
            self._append(buffer, op, found)
        if alike:
            self._described.forms.add(
                Form(tag=_TAGS[op], parts=parts, relation_id=change.relation_id, op=op, unchanged=_unchanged(schema, found))
            )
        self.counts[_COUNTERS[op]] += 1

    def _next(self) -> int:
        self._seq += 1
        return self._seq - 1

    def _buffer(self, relation_id: int) -> RowBuffer | None:
        if relation_id in self._buffers:
            return self._buffers[relation_id]
        relation = self._described.remote(relation_id)
        schema = self._described.schema(relation_id)
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
        size = _ROW_OVERHEAD + sum(map(len, filter(None, data.values)))
        buffer.append(op, self.stamp, self._next(), [data.values], size, moved=moved, unchanged=_unchanged(buffer.schema, data))


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


def _require_identity(schema: TableSchema) -> None:
    if not schema.keys:
        raise RelationError(
            f'publisher did not send a replica identity of table "{schema.table}": the changed row cannot be identified',
            hint="give the table a primary key, or ALTER TABLE … REPLICA IDENTITY FULL",
            sqlstate="55000",
        )
