"""Turn the records of a transaction into statements in the pipeline."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, compress, islice
from typing import Any, Final

from subscriber import crash_points
from subscriber.errors import ProtocolError, RelationError, SubscriberError, TargetError
from subscriber.interfaces import ColumnPlanner, RelationGate, TableName
from subscriber.protocol.decoder import decode
from subscriber.protocol.messages import Delete, Insert, Message, Relation, Tag, Truncate, TruncateOption, Update
from subscriber.protocol.tuples import places_by_header
from subscriber.sinks import conflict_log
from subscriber.sinks.apply_counters import ChangeContext, Counted, describe
from subscriber.sinks.postgres.apply.change_sql import delete_all, restart_sequences, truncate
from subscriber.sinks.postgres.apply.column_changes import (
    alteration,
    column_changes,
    plan_columns,
    queries_of,
    read_again,
    remember_columns,
)
from subscriber.sinks.postgres.apply.forms import MOST_BYTES, Form, Forms, has_exact_key
from subscriber.sinks.postgres.apply.local_settings import LocalSettings
from subscriber.sinks.postgres.apply.set_sender import MOST_ROWS, SetSender
from subscriber.sinks.postgres.session.pipeline import Pipeline
from subscriber.sinks.postgres.tables.fingerprint import Fingerprint, check
from subscriber.sinks.postgres.tables.relation_map import RelationMap
from subscriber.sinks.postgres.tables.relation_mapping import RelationMapping
from subscriber.sinks.runs import CHANGES, IGNORED, LatestForms, keeps_order
from subscriber.transaction.model import Transaction

__all__ = ["TransactionSender"]

_TURNS: Final = (Tag.INSERT, Tag.UPDATE, Tag.DELETE)
_MOST_READ: Final = 4 * MOST_BYTES
"""The size of the changes whose values are in memory once more, in bytes, before they are sent form by form."""


class TransactionSender:
    """Sends the changes of transactions into one pipeline, in order, within one transaction of the target.

    Args:
        relations: the known relations and their target tables.
        pipeline: the pipeline to send through.
        gate: decides which relations' changes are applied.
        origin: PostgreSQL's name of the subscription's replication origin, for messages.
        counted: has the relations that are left out, the bytes of the others, and the conflicts that rules resolved. This object removes
            those that it writes into their log.
        without_sets: tables whose changes are sent one by one, and not in sets; None: those of all tables.
        differs: id of our replication origin (0: we have none), to report rows that another origin changed last. None: do not report them.
        prepared: whether the target's transaction will be prepared.

    Attributes:
        targets: fingerprints of the changed tables, as read when the statements were made.
    """

    def __init__(
        self,
        relations: RelationMap,
        pipeline: Pipeline,
        gate: RelationGate,
        origin: str,
        counted: Counted,
        *,
        without_sets: Collection[TableName] | None,
        differs: int | None,
        prepared: bool = False,
    ) -> None:
        self._conflicts = counted.resolved
        self._prepared = prepared
        relations.begin()
        self._relations = relations
        self._pipeline = pipeline
        self._gate = gate
        self._origin = origin
        self._skipped = counted.statistics.skipped_tables
        self.targets: set[Fingerprint] = set()
        self._trees: dict[Fingerprint, int] = {}
        self._forms = Forms(differs)
        self._settings = LocalSettings(pipeline)
        self._sets = SetSender(pipeline, self._settings, without_sets, counted)
        # by the offset of the messages: see Form.offset
        self._latest: Mapping[int, LatestForms[Form]] = {1: LatestForms(), 5: LatestForms()}
        self._resolved: dict[int, RelationMapping] = {}
        # the transaction that a relation is left out of: it may be ready at the next one, and then it stays so
        self._left_out: dict[int, ChangeContext] = {}

    async def send(self, transactions: Iterable[Transaction], chosen: Iterable[int] | None = None) -> None:
        """Send all changes of transactions that the gate lets through. The last ones may wait for :meth:`finish`.

        Args:
            transactions: the transactions.
            chosen: for each record of them, whether to send it; None: all. For transactions that are in memory.

        Raises:
            RelationError: a relation does not map to its target.
            StatementFailed: the server rejected an earlier statement.
            ProtocolError: an invalid record.
            TargetUnavailable, SpoolError
        """
        records: list[bytes] = []
        contexts: list[ChangeContext] = []
        left = None if chosen is None else iter(chosen)
        try:
            for transaction in transactions:
                lsn, found = transaction.final_lsn, transaction.records
                context = ChangeContext(self._origin, transaction.xid, lsn, "COMMIT", transaction.commit_time if lsn else None)
                alone = transaction.spilled or transaction.prefixed or len(found) >= MOST_ROWS
                if not alone:
                    records += found
                    contexts += [context] * len(found)
                if alone or len(records) >= MOST_ROWS:
                    await self._send(*_chosen(records, contexts, left), prefixed=False)
                    records, contexts = [], []
                if alone:
                    async for chunk in transaction.chunks():
                        await self._send(*_chosen(chunk, [context] * len(chunk), left), prefixed=transaction.prefixed)
                        del chunk  # do not keep it while the next one is read
            await self._send(*_chosen(records, contexts, left), prefixed=False)
        except SubscriberError:
            # the server may reject an earlier change, and that error comes first
            self._sets.flush()
            raise

    async def _send(self, records: Sequence[bytes], contexts: Sequence[ChangeContext], *, prefixed: bool) -> None:
        """Send records. Consecutive changes are sent table by table if that is allowed. ``contexts``: the transaction of each record."""
        place, count = 0, len(records)
        while place < count:
            end, offset = min(place + 2 * MOST_ROWS, count), 5 if prefixed else 1
            groups, stop = places_by_header(records, place, end, offset, _MOST_READ)
            stop = max(stop, place + 1)
            relations: dict[bytes, list[Sequence[int]]] = {}
            # INSERTs first, and DELETEs last
            for header in sorted(groups, key=lambda header: _TURNS.index(header[0])) if len(groups) > 1 else ():
                relations.setdefault(header[1:5], []).append(groups[header])
            if relations and await self._any_order(relations, records, contexts):
                for relation_id, kinds in relations.items():
                    keyed = len(kinds) > 1 and has_exact_key(self._resolved[int.from_bytes(relation_id)])
                    await self._send_relation(records, contexts, kinds, keyed=keyed, prefixed=prefixed)
            else:
                await self._send_in_order(records, contexts, place, stop, prefixed=prefixed)
            place = stop

    async def _send_relation(
        self, records: Sequence[bytes], contexts: Sequence[ChangeContext], kinds: Sequence[Sequence[int]], *, keyed: bool, prefixed: bool
    ) -> None:
        """Send changes of one relation, all of a form together if that is allowed.

        Args:
            records: of all relations.
            contexts: the transaction of each.
            kinds: the places of the relation's records that begin alike.
            keyed: whether there are several, and their forms may have keys.
            prefixed: see :attr:`Transaction.prefixed`.
        """
        parts = await self._read_forms(records, contexts, kinds, prefixed=prefixed) if keyed else None
        if parts is None or not keeps_order(parts):
            places = sorted(chain.from_iterable(kinds)) if len(kinds) > 1 else kinds[0]
            some = [records[each] for each in places]
            await self._send_in_order(some, [contexts[each] for each in places], 0, len(some), prefixed=prefixed)
            return
        for form, rows, places in parts:
            self._sets.add(form, rows, [contexts[each] for each in places], sum([len(records[each]) for each in places]))
            await self._make_room()

    async def _read_forms(
        self, records: Sequence[bytes], contexts: Sequence[ChangeContext], kinds: Sequence[Sequence[int]], *, prefixed: bool
    ) -> list[tuple[Form, list[Any], Sequence[int]]] | None:
        """Read changes form by form, each with its rows and their places. None: the changes of a form must keep their place."""
        offset = 5 if prefixed else 1
        found: list[tuple[Form, list[Any], Sequence[int]]] = []
        for places in kinds:
            some = [records[each] for each in places]
            place = 0
            while place < len(some):
                rest = range(place, len(some))
                try:
                    read = self._latest[offset].read(some, rest, offset) or await self._decoded(
                        some, rest, contexts[places[place]], prefixed=prefixed
                    )
                except (RelationError, ProtocolError):
                    # it is reported in order, as in _any_order
                    return None
                if read is None or read[0].keys is None:
                    return None
                found.append((*read, places[place : place + len(read[1])]))
                place += len(read[1])
        return found

    async def _any_order(
        self, relations: Mapping[bytes, Sequence[Sequence[int]]], records: Sequence[bytes], contexts: Sequence[ChangeContext]
    ) -> bool:
        """Whether the changes of these relations may be sent relation by relation. ``relations``: the places of each one's."""
        if self._sets.keeps_order:
            return False
        trees: set[int] = set()
        for relation_id, kinds in relations.items():
            first = min(places[0] for places in kinds)
            try:
                mapping = await self._resolve(int.from_bytes(relation_id), records[first][0], contexts[first])
            except (RelationError, ProtocolError):
                # it is reported in order: an error of an earlier change comes first
                return False
            if mapping is None or mapping.table.watched:
                return False
            trees.add(mapping.table.tree)
        return len(trees) == len(relations)

    async def _send_in_order(
        self, records: Sequence[bytes], contexts: Sequence[ChangeContext], place: int, count: int, *, prefixed: bool
    ) -> None:
        """Send the records from ``place`` to ``count``: each one with those after it that have the same form."""
        offset = 5 if prefixed else 1
        latest = self._latest[offset]
        while place < count:
            places = range(place, min(place + MOST_ROWS, count))
            found = latest.read(records, places, offset) or await self._decoded(records, places, contexts[place], prefixed=prefixed)
            if found is None:
                place += 1
            else:
                form, rows = found
                stop = place + len(rows)
                self._sets.add(form, rows, contexts[place:stop], sum(map(len, records[place:stop])))
                place = stop
            await self._make_room()

    async def _make_room(self) -> None:
        """Wait while too much is unanswered."""
        if self._pipeline.full:
            await self._pipeline.throttle()
            if len(self._conflicts) >= conflict_log.MOST:
                self.write_log()

    def write_log(self) -> None:
        """Write the conflicts that were resolved into their log, if there is one.

        Raises:
            TargetError: in a transaction before its end, there are too many to keep them.
        """
        if self._relations.log is not None and self._conflicts:
            if any(each.lsn is None for each in self._conflicts):
                raise TargetError("too many conflicts", hint="it is applied at its end")
            self._settings.reset()
            self._relations.log.send(self._pipeline, self._conflicts, prepared=self._prepared)
            self._conflicts.clear()

    @property
    def changed(self) -> Collection[TableName]:
        """The tables of the target that have changes."""
        return {mapping.table.name for mapping in self._resolved.values()}

    def finish(self) -> None:
        """Send what is left, and return to the session's own settings, to write the catalog."""
        self._sets.flush()
        self._settings.reset()

    async def _decoded(
        self, records: Sequence[bytes], places: range, context: ChangeContext, *, prefixed: bool
    ) -> tuple[Form, list[Any]] | None:
        """Decode a record. Returns its form, and the values of the records that have it. None: it is no change of a row, or is left out."""
        record = records[places.start]
        tag = record[0] if record else 0
        start = 5 if prefixed else 1
        if tag not in CHANGES or len(record) < start + 4:
            if tag not in IGNORED:
                await self._other(decode(record, in_stream=prefixed), context)
            return None
        mapping = await self._resolve(int.from_bytes(record[start : start + 4]), tag, context)
        if mapping is None:
            return None
        if tag != Tag.INSERT:
            with _naming(mapping.remote, tag, context):
                mapping.require_updatable()
        message = decode(record, in_stream=prefixed)
        assert isinstance(message, Insert | Update | Delete)
        form, row = self._forms.of(message, mapping, start)
        if row is not None:
            return form, [row]
        self._latest[start].add(form)
        return form.read(records, places, start)

    async def _other(self, message: Message, context: ChangeContext) -> None:
        match message:
            case Relation():
                if self._relations.define(message):
                    self._resolved.pop(message.relation_id, None)
                    self._left_out.pop(message.relation_id, None)
                    self._forget_forms()
            case Truncate():
                self._sets.flush()
                await self._truncate(message, context)
            case _:
                raise ProtocolError(f"a {type(message).__name__} message among the changes of a transaction")

    def _forget_forms(self) -> None:
        for latest in self._latest.values():
            latest.clear()

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
            if self._relations.planner is not None and not self._relations.is_mapped(relation_id):
                await self._follow(self._relations.planner, relation, context)
            if not self._relations.is_mapped(relation_id):
                self._settings.reset()
            mapping = self._resolved[relation_id] = await self._relations.mapping(relation, queries_of(self._pipeline, self._relations))
        self.targets.add(mapping.table.fingerprint)
        self._trees[mapping.table.fingerprint] = mapping.table.tree
        return mapping

    async def _follow(self, planner: ColumnPlanner, relation: Relation, context: ChangeContext) -> None:
        """Let the columns of the target follow those of a relation that was described."""
        self._settings.reset()
        table, plan = await plan_columns(planner, relation, context.final_lsn, self._pipeline, self._relations)
        if plan.known is None:
            return
        self._sets.flush()
        if changes := list(column_changes(table, plan, plan.known)):
            self._settings.change(table)
            locks, statements = await alteration(table, changes, self._pipeline)
            for statement in locks:
                self._pipeline.send(statement, None)
            # from now on no other session can alter the tables
            for fingerprint in [each for each in self.targets if self._trees[each] == table.tree]:
                self._pipeline.send(*check(fingerprint))
                self.targets.discard(fingerprint)
            for relation_id in self._relations.forget_tree(table.tree):
                self._resolved.pop(relation_id, None)
            self._forget_forms()
            for statement in statements:
                self._pipeline.send(statement, replace(context, ending="RELATION"))
        self._settings.reset()
        assert self._relations.subscription is not None
        if changes:
            table = await read_again(table, self._pipeline, self._relations)
            crash_points.reached("columns.changed")
        self._pipeline.send(*remember_columns(self._relations.subscription, table, plan.known))
        await self._relations.map_to(relation, table, queries_of(self._pipeline, self._relations))

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


def _chosen(
    records: Sequence[bytes], contexts: Sequence[ChangeContext], left: Iterator[int] | None
) -> tuple[Sequence[bytes], Sequence[ChangeContext]]:
    """Those of the records for which the next of ``left`` are true."""
    if left is None:
        return records, contexts
    chosen = list(islice(left, len(records)))
    return list(compress(records, chosen)), list(compress(contexts, chosen))


@contextlib.contextmanager
def _naming(relation: Relation, tag: int, context: ChangeContext) -> Iterator[None]:
    """Add the change to an error about its relation."""
    try:
        yield
    except RelationError as error:
        error.of_table, error.finish_lsn = (relation.namespace, relation.name), context.final_lsn
        error.add_note(describe(context, Tag(tag).name, TableName(relation.namespace, relation.name)))
        raise
