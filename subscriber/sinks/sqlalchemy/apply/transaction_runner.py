"""Executes the records of transactions as changes of the target, in one target transaction: one by one, or in groups."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from struct import Struct
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncConnection

from subscriber.abc import RelationGate, TableName
from subscriber.errors import ProtocolError, TargetError
from subscriber.protocol.decoder import decode
from subscriber.protocol.messages import Delete, Insert, Relation, Tag, Truncate, TruncateOption, Update
from subscriber.sinks.apply_counters import ChangeContext, Counted, describe
from subscriber.sinks.sqlalchemy.apply.batching import Batching, Group
from subscriber.sinks.sqlalchemy.apply.bulk import BulkTables, Uncounted
from subscriber.sinks.sqlalchemy.apply.multi_row import insert_rows
from subscriber.sinks.sqlalchemy.apply.relation_map import RelationMap, SchemaBehind, has_triggers
from subscriber.sinks.sqlalchemy.apply.relation_plan import Operation, RelationPlan
from subscriber.sinks.sqlalchemy.apply.runs import RunReader
from subscriber.sinks.sqlalchemy.apply.statements import Statement, delete_all
from subscriber.sinks.sqlalchemy.session.errors import UNIQUE_VIOLATION, passing_values, translated
from subscriber.sinks.sqlalchemy.session.statement_size import BINARY_GROWS, limit_of
from subscriber.transaction.model import Transaction

__all__ = ["TransactionRunner"]

_ROWS: Final = frozenset({Tag.INSERT, Tag.UPDATE, Tag.DELETE})
_SILENT: Final = frozenset({Tag.TYPE, Tag.MESSAGE, Tag.ORIGIN})
_RELATION_ID: Final = Struct(">I").unpack_from
_NAMES: Final = {Tag.INSERT: "INSERT", Tag.UPDATE: "UPDATE", Tag.DELETE: "DELETE", Tag.TRUNCATE: "TRUNCATE"}

_FLUSH_CHANGES: Final = 50_000
_FLUSH_BYTES: Final = 8 * 1024**2


class TransactionRunner:
    """Makes the changes of transactions, in order.

    Args:
        connection: with an open transaction.
        relations: the publisher's relations and their tables in the target.
        gate: tells which relations' changes to apply.
        origin: the name that the replication origin would have in PostgreSQL, for messages.
        counted: receives the counts.
        bulk_tables: the session's, to make changes in groups; None: one by one, so that every error names its change.
    """

    def __init__(
        self,
        connection: AsyncConnection,
        relations: RelationMap,
        gate: RelationGate,
        origin: str,
        counted: Counted,
        *,
        bulk_tables: BulkTables | None,
    ) -> None:
        self._connection = connection
        self._relations = relations
        self._gate = gate
        self._origin = origin
        self._counted = counted
        self._batching = None if bulk_tables is None else Batching()
        self._bulk_tables = bulk_tables or BulkTables()
        self._counts_many = connection.dialect.supports_sane_multi_rowcount
        self._bytes = self._largest = 0
        self._open: dict[int, RelationPlan | None] = {}
        self._readers: dict[RelationPlan, RunReader] = {}

    async def run(self, transaction: Transaction) -> None:
        """Make all changes of one transaction that the gate allows. Some may remain in groups: :meth:`flush` makes them.

        Raises:
            ApplyError, RelationError: the target rejected a change, or its table does not fit.
            ProtocolError: a record is invalid.
            TargetUnavailable, SpoolError, SchemaBehind
        """
        context = ChangeContext(self._origin, transaction.xid, transaction.final_lsn)
        self._open = {}
        offset = 5 if transaction.prefixed else 1
        async for chunk in transaction.chunks():
            place, stop = 0, len(chunk)
            while place < stop:
                record = chunk[place]
                tag = record[0] if record else 0
                if tag in _ROWS and len(record) >= offset + 4:
                    relation_id = _RELATION_ID(record, offset)[0]
                    plan = self._open.get(relation_id)
                    if plan is None and relation_id not in self._open:
                        plan = await self._plan(relation_id, tag, transaction, context)
                    if plan is None:
                        pass
                    elif self._batching is None or plan.ordered:
                        await self._row(record, tag, plan, transaction, context)
                    else:
                        run = self._runs(plan).read(chunk, place, stop, tag, offset)
                        if run is not None:
                            self._batching.extend(run)
                            sizes = list(map(len, chunk[place : place + len(run.vectors)]))
                            self._bytes += sum(sizes)
                            self._largest = max(self._largest, *sizes)
                            place += len(run.vectors) - 1
                            del run
                        else:
                            self._batching.add(_operation(record, plan, prefixed=transaction.prefixed))
                            self._bytes += len(record)
                            self._largest = max(self._largest, len(record))
                        if self._batching.count >= _FLUSH_CHANGES or self._bytes >= _FLUSH_BYTES:
                            del record
                            if chunk is not transaction.records and isinstance(chunk, list):
                                # read from the spool for us alone: a large record is not kept beside its values
                                chunk[: place + 1] = [b""] * (place + 1)
                            await self.flush()
                elif tag not in _SILENT:
                    await self._other(record, transaction, context)
                place += 1
        self._counted.statistics.transactions += 1

    async def _other(self, record: bytes, transaction: Transaction, context: ChangeContext) -> None:
        message = decode(record, in_stream=transaction.prefixed)
        match message:
            case Relation():
                if self._relations.define(message):
                    # the grouped changes belong to the earlier description
                    await self.flush()
                    self._open.pop(message.relation_id, None)
            case Truncate():
                await self.flush()
                await self._truncate(message, transaction, context)
            case _:
                raise ProtocolError(f"a {type(message).__name__} message among the changes of a transaction")

    async def _plan(self, relation_id: int, tag: int, transaction: Transaction, context: ChangeContext) -> RelationPlan | None:
        relation = self._relations.remote(relation_id)
        if not self._gate(relation, transaction.final_lsn):
            self._counted.statistics.skipped_tables.add(f"{relation.namespace}.{relation.name}")
            self._open[relation_id] = None
            return None
        plan = self._relations.planned(relation_id)
        if plan is None:
            with _naming(TableName(relation.namespace, relation.name), tag, context):
                plan = await self._relations.plan(self._connection, relation)
        self._open[relation_id] = plan
        return plan

    def _runs(self, plan: RelationPlan) -> RunReader:
        found = self._readers.get(plan)
        if found is None:
            found = self._readers[plan] = RunReader(plan)
        return found

    async def _row(self, record: bytes, tag: int, plan: RelationPlan, transaction: Transaction, context: ChangeContext) -> None:
        """Make one change of a row at once."""
        with _naming(plan.name, tag, context, count=self._counted if self._batching is None else None):
            await self.flush()
            operation = _operation(record, plan, prefixed=transaction.prefixed)
            await self._execute(operation.statement, operation)

    async def _execute(self, statement: Statement, operation: Operation) -> None:
        with translated(), passing_values():
            row = statement.pick(operation.vector)
            limit_of(self._connection).require(statement.sql, row)
            result = await self._connection.exec_driver_sql(statement.sql, row)
            found = 1 if statement.kind == "INSERT" else _found(result.rowcount)
            if not found and statement.search is not None:
                # a trigger may have skipped an existing row: that is no conflict
                query, pick = statement.search.query
                if (await self._connection.exec_driver_sql(query, pick(operation.vector))).first() is not None:
                    found = 1
        self._counted.changes(statement.kind, statement.table, statement.identity, 1, found)

    async def flush(self) -> None:
        """Make the grouped changes.

        Raises:
            ApplyError, RelationError, TargetUnavailable
        """
        if self._batching is None or not self._batching.count:
            return
        groups = self._batching.take()
        self._bytes = 0
        with translated(), passing_values():
            for group in groups:
                found = await self._execute_many(group)
                statement = group.statement
                missing = statement.search if found < len(group.vectors) else None
                if missing is not None and await self._connection.run_sync(has_triggers, missing.table):
                    # the trigger was created after the plan read the table
                    raise Uncounted("a trigger may have passed over rows that exist")
                self._counted.changes(statement.kind, statement.table, statement.identity, len(group.vectors), found)
        self._largest = 0

    async def _execute_many(self, group: Group) -> int:
        """Execute a group; return how many of its changes found their row."""
        statement, vectors, largest = group.statement, group.vectors, self._largest * BINARY_GROWS
        if group.bulky and statement.order is not None:
            vectors = _by_key(vectors, statement.order)
        how = statement.bulk
        if how is not None and group.bulky and self._bulk_tables.takes(how, len(vectors)):
            found = await self._bulk_tables.execute(
                self._connection, how, [how.pick(vector) for vector in vectors], deletes=statement.kind == "DELETE", largest=largest
            )
            if found is not None:
                return found
        rows = statement.picked(vectors)
        pieces = limit_of(self._connection).pieces(statement.sql, rows, largest)
        if statement.kind == "INSERT":
            for piece in pieces:
                await insert_rows(self._connection, statement.sql, statement.many, piece)
            return len(rows)
        for _ in pieces:
            # each row is sent on its own: this only checks their sizes
            pass
        if self._counts_many:
            return _found((await self._connection.exec_driver_sql(statement.sql, rows)).rowcount, len(rows))
        # the driver does not report how many rows an executemany found
        return sum([_found((await self._connection.exec_driver_sql(statement.sql, row)).rowcount) for row in rows])

    async def _truncate(self, message: Truncate, transaction: Transaction, context: ChangeContext) -> None:
        restart = TruncateOption.RESTART_IDENTITY in message.options
        truncated: TableName | None = None
        for relation_id in message.relation_ids:
            if relation_id in self._open:
                plan = self._open[relation_id]
            else:
                plan = await self._plan(relation_id, Tag.TRUNCATE, transaction, context)
            if plan is None:
                continue
            with _naming(plan.name, Tag.TRUNCATE, context), translated():
                for sql in delete_all(plan.target, self._connection.dialect, restart_identity=restart):
                    await self._connection.exec_driver_sql(sql)
            truncated = plan.name
        if truncated is not None:
            self._counted.changes("TRUNCATE", truncated, (), 1, 1)


def _found(rowcount: int, sent: int = 1) -> int:
    """Return how many of ``sent`` changes found their row. If the driver does not know (a negative number), assume all of them."""
    return sent if rowcount < 0 else min(rowcount, sent)


def _by_key(vectors: list[tuple[object, ...]], order: Callable[[Sequence[object]], Any]) -> list[tuple[object, ...]]:
    """Sort changes by the keys of their rows, so that the database finds and writes adjacent rows together.

    Changes of the same row keep their order. If a key has a NULL, the changes are not sorted: a NULL cannot be compared, and no row has
    such a key.
    """
    keys = list(map(order, vectors))
    parts: Iterable[object] = chain.from_iterable(keys) if isinstance(keys[0], tuple) else keys
    return vectors if None in parts else sorted(vectors, key=order)


def _operation(record: bytes, plan: RelationPlan, *, prefixed: bool) -> Operation:
    message = decode(record, in_stream=prefixed)
    match message:
        case Insert():
            return plan.insert(message.new)
        case Update():
            plan.require_updatable()
            return plan.update(message)
        case Delete():
            plan.require_updatable()
            return plan.delete(message)
    raise ProtocolError(f"a {type(message).__name__} message where a row was expected")


@contextlib.contextmanager
def _naming(table: TableName, tag: int, context: ChangeContext, *, count: Counted | None = None) -> Iterator[None]:
    """Add to an error which change it is about. ``count``: receives a conflict that is an error; None: the change will be retried."""
    kind = _NAMES[Tag(tag)]
    try:
        yield
    except SchemaBehind:
        raise
    except TargetError as error:
        if error.sqlstate == UNIQUE_VIOLATION and count is not None:
            conflict = "insert_exists" if kind == "INSERT" else "update_exists"
            error.add_note(f'conflict detected on relation "{table}": conflict={conflict}')
            count.failed = conflict
        _describe(error, describe(context, kind, table, getattr(error, "column", None)))
        raise


def _describe(error: TargetError, text: str) -> None:
    # keep the note of the innermost block: it is the most precise
    if not any(note.startswith("processing remote data") for note in getattr(error, "__notes__", ())):
        error.add_note(text)
