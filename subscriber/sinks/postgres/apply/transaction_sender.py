"""Turn the records of a transaction into statements in the pipeline."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from struct import Struct
from typing import Final

from subscriber.abc import RelationGate, TableName
from subscriber.errors import ProtocolError, RelationError, SubscriberError
from subscriber.protocol.decoder import decode
from subscriber.protocol.messages import BINARY, Delete, Insert, Relation, Tag, Truncate, TruncateOption, TupleData, Update
from subscriber.sinks.apply_counters import ChangeContext, describe
from subscriber.sinks.postgres.apply.change_sql import delete, delete_all, restart_sequences, truncate, update
from subscriber.sinks.postgres.apply.forms import Forms, require_width
from subscriber.sinks.postgres.apply.local_settings import LocalSettings
from subscriber.sinks.postgres.apply.runs import MOST_ROWS, Runs
from subscriber.sinks.postgres.session.pipeline import Pipeline
from subscriber.sinks.postgres.tables.fingerprint import Fingerprint
from subscriber.sinks.postgres.tables.relation_map import RelationMap
from subscriber.sinks.postgres.tables.relation_mapping import RelationMapping
from subscriber.transaction.model import Transaction

__all__ = ["TransactionSender"]

_ROWS: Final = frozenset({Tag.INSERT, Tag.UPDATE, Tag.DELETE})
_RELATION_ID: Final = Struct(">I")
_NAMES: Final = {Tag.INSERT: "INSERT", Tag.UPDATE: "UPDATE", Tag.DELETE: "DELETE", Tag.TRUNCATE: "TRUNCATE"}

# a pattern is the key of a statement: rows with different patterns need different statements
_UNCHANGED: Final = bytes(code if code == ord("u") else ord(".") for code in range(256))
_NULLS: Final = bytes(code if code in b"nu" else ord(".") for code in range(256))


class TransactionSender:
    """Sends the changes of transactions into one pipeline, in order, within one transaction of the target.

    Args:
        relations: the known relations and their target tables.
        pipeline: the pipeline to send through.
        gate: decides which relations' changes are applied.
        origin: PostgreSQL's name of the subscription's replication origin, for messages.
        skipped: names of relations that are left out are added to this set.
        apart: tables whose changes are sent one by one, and not in sets; None: those of all tables.
        differs: id of our replication origin (0: we have none), to report rows that another origin changed last. None: do not report them.

    Attributes:
        targets: fingerprints of the changed tables, as read when the statements were made.
    """

    def __init__(
        self,
        relations: RelationMap,
        pipeline: Pipeline,
        gate: RelationGate,
        origin: str,
        skipped: set[str],
        *,
        apart: Collection[TableName] | None,
        differs: int | None,
    ) -> None:
        self._relations = relations
        self._pipeline = pipeline
        self._gate = gate
        self._origin = origin
        self._skipped = skipped
        self._differs = differs
        self.targets: set[Fingerprint] = set()
        self._forms = Forms(differs)
        self._settings = LocalSettings(pipeline)
        self._runs = Runs(pipeline, self._settings, apart)
        self._open: dict[int, bool] = {}
        self._resolved: dict[int, RelationMapping | None] = {}
        self._left_out: set[int] = set()

    async def send(self, transaction: Transaction) -> None:
        """Send all changes of one transaction that the gate lets through. The last ones may wait for :meth:`finish`.

        Raises:
            RelationError: a relation does not map to its target.
            StatementFailed: the server rejected an earlier statement.
            ProtocolError: an invalid record.
            TargetUnavailable, SpoolError
        """
        context = ChangeContext(self._origin, transaction.xid, transaction.final_lsn)
        if self._left_out:
            # a table may become ready at this transaction; one that is ready stays so
            for relation_id in self._left_out:
                self._open.pop(relation_id, None)
                self._resolved.pop(relation_id, None)
            self._left_out.clear()
        try:
            if not transaction.spilled:
                await self._send(transaction.records, transaction, context)
                return
            async for chunk in transaction.chunks():
                await self._send(chunk, transaction, context)
                del chunk  # do not keep it while the next one is read
        except SubscriberError:
            # the server may reject an earlier change, and that error comes first
            await self._runs.flush()
            raise

    async def _send(self, records: Sequence[bytes], transaction: Transaction, context: ChangeContext) -> None:
        place = 0
        while place < len(records):
            place += await self._next(records, place, transaction, context)

    async def finish(self) -> None:
        """Send what is left, and return to the session's own settings, to write the catalog.

        Raises:
            StatementFailed: the server rejected an earlier statement.
            TargetUnavailable
        """
        await self._runs.flush()
        self._settings.reset()

    async def _next(self, records: Sequence[bytes], place: int, transaction: Transaction, context: ChangeContext) -> int:
        """Send the record at ``place``, and those after it that have the same form. Returns how many there were."""
        record = records[place]
        tag = record[0] if record else 0
        offset = 5 if transaction.prefixed else 1
        if tag not in _ROWS or len(record) < offset + 4:
            if tag not in {Tag.TYPE, Tag.MESSAGE, Tag.ORIGIN}:
                await self._other(record, transaction, context)
            return 1
        relation_id = _RELATION_ID.unpack_from(record, offset)[0]
        if relation_id not in self._resolved:
            await self._resolve(relation_id, tag, transaction, context)
        mapping = self._resolved[relation_id]
        if mapping is None:
            return 1
        places = range(place, min(place + MOST_ROWS, len(records)))
        form = self._forms.latest(mapping, tag)
        rows = form.read(records, places, offset) if form is not None else []
        if not rows:
            message = self._decoded(record, tag, transaction, context, mapping)
            form = self._forms.of(message, mapping)
            if form is None:
                await (self._runs.flush() if mapping.table.watched else self._runs.flush_table(mapping))
                self._row(message, context, mapping, len(record))
                await self._pipeline.throttle()
                return 1
            del message  # a second copy of its values, which may be large
            rows = form.read(records, places, offset)
        if form is not None:
            await self._runs.add(form, rows, context, list(map(len, records[place : place + len(rows)])))
        return len(rows)

    async def _other(self, record: bytes, transaction: Transaction, context: ChangeContext) -> None:
        message = decode(record, in_stream=transaction.prefixed)
        match message:
            case Relation():
                self._relations.define(message)
                self._open.pop(message.relation_id, None)
                self._resolved.pop(message.relation_id, None)
            case Truncate():
                await self._runs.flush()
                await self._truncate(message, transaction, context)
                await self._pipeline.throttle()
            case _:
                raise ProtocolError(f"a {type(message).__name__} message among the changes of a transaction")

    async def _resolve(self, relation_id: int, tag: int, transaction: Transaction, context: ChangeContext) -> None:
        relation = self._relations.remote(relation_id)
        wanted = await self._wanted(relation, tag, transaction, context)
        self._resolved[relation_id] = await self._mapping(relation, tag, context) if wanted else None

    async def _wanted(self, relation: Relation, tag: int, transaction: Transaction, context: ChangeContext) -> bool:
        wanted = self._open.get(relation.relation_id)
        if wanted is None:
            by_name = self._gate(relation, transaction.final_lsn)
            with _naming(relation, tag, context):
                wanted = await self._relations.is_wanted(relation, transaction.final_lsn, by_name=by_name)
            if not wanted:
                self._skipped.add(f"{relation.namespace}.{relation.name}")
                self._left_out.add(relation.relation_id)
            self._open[relation.relation_id] = wanted
        return wanted

    async def _mapping(self, relation: Relation, tag: int, context: ChangeContext) -> RelationMapping:
        with _naming(relation, tag, context):
            mapping = await self._relations.mapping(relation)
        self.targets.add(mapping.table.fingerprint)
        return mapping

    def _decoded(
        self, record: bytes, tag: int, transaction: Transaction, context: ChangeContext, mapping: RelationMapping
    ) -> Insert | Update | Delete:
        if tag != Tag.INSERT:
            with _naming(mapping.remote, tag, context):
                mapping.require_updatable()
        message = decode(record, in_stream=transaction.prefixed)
        if not isinstance(message, Insert | Update | Delete):
            raise ProtocolError("a message that is no change of a row")
        return message

    def _row(self, message: Insert | Update | Delete, context: ChangeContext, mapping: RelationMapping, size: int) -> None:
        """Send a change that has no form."""
        self._settings.change(mapping.table)
        match message:
            case Update():
                self._update(message, mapping, context, size)
            case Delete() if (old := message.key or message.old) is not None:
                require_width(mapping, old)
                nulls = b"" if mapping.key is not None else old.kinds.translate(_NULLS)
                pattern = ("DELETE", nulls)
                statement = mapping.statements.get(pattern)
                if statement is None:
                    statement = mapping.statements[pattern] = delete(mapping, nulls, origin=self._differs)
                values, kinds = _search_values(mapping, old)
                self._pipeline.send(statement, context, values, _formats(kinds), size)
            case _:
                raise ProtocolError("a Delete message without an old row")

    def _update(self, message: Update, mapping: RelationMapping, context: ChangeContext, size: int) -> None:
        new, old = message.new, message.key or message.old
        require_width(mapping, new)
        unchanged = new.kinds.translate(_UNCHANGED)
        nulls = b"" if mapping.key is not None else (old or new).kinds.translate(_NULLS)
        replace = _identity_changes(message, mapping)
        pattern = (unchanged, nulls, old is not None, replace)
        statement = mapping.statements.get(pattern)
        if statement is None:
            statement = mapping.statements[pattern] = update(
                mapping, unchanged, nulls, old=old is not None, replace=replace, origin=self._differs
            )
        values, kinds = new.values, new.kinds
        if old is not None:
            require_width(mapping, old)
            more, more_kinds = _search_values(mapping, old)
            values, kinds = values + more, kinds + more_kinds
        self._pipeline.send(statement, context, values, _formats(kinds), size)

    async def _truncate(self, message: Truncate, transaction: Transaction, context: ChangeContext) -> None:
        relations = [self._relations.remote(relation_id) for relation_id in message.relation_ids]
        wanted = [relation for relation in relations if await self._wanted(relation, Tag.TRUNCATE, transaction, context)]
        mappings = [await self._mapping(relation, Tag.TRUNCATE, context) for relation in wanted]
        if not mappings:
            return
        restart = TruncateOption.RESTART_IDENTITY in message.options
        others = {TableName(relation.namespace, relation.name) for relation in relations if relation not in wanted}
        if any(not mapping.table.referenced_by.isdisjoint(others) for mapping in mappings):
            # during table synchronization, each table gets its share of the message at its own time; TRUNCATE rejects such a table alone
            self._empty(mappings, context, restart_identity=restart)
            return
        self._settings.change(*(mapping.table for mapping in mappings))
        self._pipeline.send(truncate(mappings, restart_identity=restart), context)

    def _empty(self, mappings: list[RelationMapping], context: ChangeContext, *, restart_identity: bool) -> None:
        for mapping in mappings:
            self._settings.change(mapping.table)
            self._pipeline.send(delete_all(mapping), context)
            if restart_identity:
                self._pipeline.send(restart_sequences(mapping), context)


@contextlib.contextmanager
def _naming(relation: Relation, tag: int, context: ChangeContext) -> Iterator[None]:
    """Add the change to an error about its relation."""
    try:
        yield
    except RelationError as error:
        error.add_note(describe(context, _NAMES[Tag(tag)], TableName(relation.namespace, relation.name)))
        raise


def _formats(kinds: bytes) -> list[int] | None:
    """Format codes of libpq: 1 for binary; None if all values are texts."""
    return [int(kind == BINARY) for kind in kinds] if BINARY in kinds else None


def _search_values(mapping: RelationMapping, old: TupleData) -> tuple[list[bytes | None], bytes]:
    """The parameters of the predicate, in the order of the statement."""
    if mapping.key is not None:
        indexes = [index for index, _ in mapping.key]
    else:
        indexes = [index for index, value in enumerate(old.values) if value is not None]
    return [old.values[index] for index in indexes], bytes(old.kinds[index] for index in indexes)


def _identity_changes(message: Update, mapping: RelationMapping) -> bool:
    """Whether the UPDATE may give a GENERATED ALWAYS AS IDENTITY column another value. Unknown counts as yes."""
    index = mapping.identity
    if index is None or message.new.values[index] is None:
        return False
    flagged = mapping.remote.columns[index].key
    old = message.old or (message.key if flagged else None)
    if old is None:
        return not (flagged and message.key is None)
    return old.values[index] != message.new.values[index] or old.kinds[index] != message.new.kinds[index]
