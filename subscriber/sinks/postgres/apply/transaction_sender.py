"""Turn the records of a transaction into statements in the pipeline."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

from subscriber.abc import RelationGate, TableName
from subscriber.errors import ProtocolError, RelationError, SubscriberError
from subscriber.protocol.decoder import decode
from subscriber.protocol.messages import BINARY, Delete, Insert, Message, Relation, Tag, Truncate, TruncateOption, TupleData, Update
from subscriber.protocol.tuples import places_by_relation
from subscriber.sinks.apply_counters import ChangeContext, describe
from subscriber.sinks.postgres.apply.change_sql import delete, delete_all, restart_sequences, truncate, update
from subscriber.sinks.postgres.apply.forms import Form, Forms, require_width
from subscriber.sinks.postgres.apply.local_settings import LocalSettings
from subscriber.sinks.postgres.apply.runs import MOST_ROWS, Runs
from subscriber.sinks.postgres.session.pipeline import Pipeline
from subscriber.sinks.postgres.tables.fingerprint import Fingerprint
from subscriber.sinks.postgres.tables.relation_map import RelationMap
from subscriber.sinks.postgres.tables.relation_mapping import RelationMapping
from subscriber.transaction.model import Transaction

__all__ = ["TransactionSender"]

_ROWS: Final = frozenset({Tag.INSERT, Tag.UPDATE, Tag.DELETE})
_IGNORED: Final = frozenset({Tag.TYPE, Tag.MESSAGE, Tag.ORIGIN})
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
        # the form of the latest change of a relation with a tag, by the bytes of both
        self._latest: dict[bytes, Form] = {}
        self._resolved: dict[int, RelationMapping] = {}
        # the transaction that a relation is left out of: it may be ready at the next one, and then it stays so
        self._left_out: dict[int, ChangeContext] = {}

    async def send(self, transactions: Iterable[Transaction]) -> None:
        """Send all changes of transactions that the gate lets through. The last ones may wait for :meth:`finish`.

        Raises:
            RelationError: a relation does not map to its target.
            StatementFailed: the server rejected an earlier statement.
            ProtocolError: an invalid record.
            TargetUnavailable, SpoolError
        """
        records: list[bytes] = []
        contexts: list[ChangeContext] = []
        try:
            for transaction in transactions:
                context = ChangeContext(self._origin, transaction.xid, transaction.final_lsn)
                alone = transaction.spilled or transaction.prefixed or len(transaction.records) >= MOST_ROWS
                if not alone:
                    records += transaction.records
                    contexts += [context] * len(transaction.records)
                if alone or len(records) >= MOST_ROWS:
                    await self._send(records, contexts, prefixed=False)
                    records, contexts = [], []
                if alone:
                    async for chunk in transaction.chunks():
                        await self._send(chunk, [context] * len(chunk), prefixed=transaction.prefixed)
                        del chunk  # do not keep it while the next one is read
            await self._send(records, contexts, prefixed=False)
        except SubscriberError:
            # the server may reject an earlier change, and that error comes first
            self._runs.flush()
            raise

    async def _send(self, records: Sequence[bytes], contexts: Sequence[ChangeContext], *, prefixed: bool) -> None:
        """Send records. Consecutive changes are sent table by table if that is allowed. ``contexts``: the transaction of each record."""
        place, count = 0, len(records)
        while place < count:
            groups, stop = places_by_relation(records, place, 5 if prefixed else 1)
            stop = max(stop, place + 1)
            if len(groups) > 1 and await self._any_order(groups, records, contexts):
                for places in groups.values():
                    some = [records[each] for each in places]
                    await self._send_in_order(some, [contexts[each] for each in places], 0, len(some), prefixed=prefixed)
            else:
                await self._send_in_order(records, contexts, place, stop, prefixed=prefixed)
            place = stop

    async def _any_order(self, groups: Mapping[bytes, Sequence[int]], records: Sequence[bytes], contexts: Sequence[ChangeContext]) -> bool:
        """Whether the changes of these relations may be sent in any order, see :class:`Runs`. ``groups``: the places of each one's."""
        if not self._runs.has_sets:
            return False
        trees: set[int] = set()
        for relation_id, places in groups.items():
            try:
                mapping = await self._resolve(int.from_bytes(relation_id), records[places[0]][0], contexts[places[0]])
            except (RelationError, ProtocolError):
                # it is reported in order: an error of an earlier change comes first
                return False
            if mapping is None or mapping.table.watched:
                return False
            trees.add(mapping.table.tree)
        return len(trees) == len(groups)

    async def _send_in_order(
        self, records: Sequence[bytes], contexts: Sequence[ChangeContext], place: int, count: int, *, prefixed: bool
    ) -> None:
        """Send the records from ``place`` to ``count``: each one with those after it that have the same form."""
        offset = 5 if prefixed else 1
        latest, runs, pipeline = self._latest, self._runs, self._pipeline
        while place < count:
            record = records[place]
            places = range(place, min(place + MOST_ROWS, count))
            relation = record[:1] + record[5:9] if prefixed else record[:5]
            form = latest.get(relation)
            rows = form.read(records, places, offset) if form is not None else None
            if not rows:
                form = await self._new_form(record, contexts[place], prefixed=prefixed)
                if form is not None:
                    latest[relation] = form
                    rows = form.read(records, places, offset)
            if form is None or rows is None:
                place += 1
            else:
                stop = place + len(rows)
                sizes = list(map(len, records[place:stop]))
                runs.add(form, rows, contexts[place:stop], sum(sizes), sizes[-1])
                place = stop
            if pipeline.full:
                await pipeline.throttle()

    def finish(self) -> None:
        """Send what is left, and return to the session's own settings, to write the catalog."""
        self._runs.flush()
        self._settings.reset()

    async def _new_form(self, record: bytes, context: ChangeContext, *, prefixed: bool) -> Form | None:
        """The form of a change. None: it has none, or it is no change of a row; everything is done for it."""
        tag = record[0] if record else 0
        start = 5 if prefixed else 1
        if tag not in _ROWS or len(record) < start + 4:
            if tag not in _IGNORED:
                await self._other(decode(record, in_stream=prefixed), context)
            return None
        mapping = await self._resolve(int.from_bytes(record[start : start + 4]), tag, context)
        if mapping is None:
            return None
        if tag != Tag.INSERT:
            with _naming(mapping.remote, tag, context):
                mapping.require_updatable()
        message = decode(record, in_stream=prefixed)
        if not isinstance(message, Insert | Update | Delete):
            raise ProtocolError("a message that is no change of a row")
        form = self._forms.of(message, mapping)
        if form is None:
            if mapping.table.watched:
                self._runs.flush()
            else:
                self._runs.flush_table(mapping)
            self._row(message, context, mapping, len(record))
        return form

    async def _other(self, message: Message, context: ChangeContext) -> None:
        match message:
            case Relation():
                if self._relations.define(message):
                    self._resolved.pop(message.relation_id, None)
                    self._left_out.pop(message.relation_id, None)
                    self._latest.clear()
            case Truncate():
                self._runs.flush()
                await self._truncate(message, context)
            case _:
                raise ProtocolError(f"a {type(message).__name__} message among the changes of a transaction")

    async def _resolve(self, relation_id: int, tag: int, context: ChangeContext) -> RelationMapping | None:
        """The relation with its target; None: its changes are left out."""
        mapping = self._resolved.get(relation_id)
        if mapping is not None or self._left_out.get(relation_id) is context:
            return mapping
        relation = self._relations.remote(relation_id)
        by_name = self._gate(relation, context.final_lsn)
        with _naming(relation, tag, context):
            if not await self._relations.is_wanted(relation, context.final_lsn, by_name=by_name):
                self._skipped.add(f"{relation.namespace}.{relation.name}")
                self._left_out[relation_id] = context
                return None
            mapping = self._resolved[relation_id] = await self._relations.mapping(relation)
        self.targets.add(mapping.table.fingerprint)
        return mapping

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

    async def _truncate(self, message: Truncate, context: ChangeContext) -> None:
        mappings: list[RelationMapping] = []
        others: set[TableName] = set()
        for relation in map(self._relations.remote, message.relation_ids):
            mapping = await self._resolve(relation.relation_id, Tag.TRUNCATE, context)
            if mapping is None:
                others.add(TableName(relation.namespace, relation.name))
            else:
                mappings.append(mapping)
        if not mappings:
            return
        restart = TruncateOption.RESTART_IDENTITY in message.options
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
