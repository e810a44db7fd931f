"""Executes the records of transactions as changes of the target, in one target transaction: in runs, or one by one.

In which order, :mod:`subscriber.sinks.runs` says. Two keys may differ in Python and be equal in the database (a collation, trailing
blanks). They can only collide with an error, because rows are found by comparisons that match only the identical value
(:meth:`ColumnPlan.matches`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final

from sqlalchemy import CursorResult
from sqlalchemy.ext.asyncio import AsyncConnection

from subscriber.errors import ApplyError, ProtocolError, TargetError
from subscriber.interfaces import RelationGate, TableName
from subscriber.protocol.decoder import decode
from subscriber.protocol.messages import Delete, Insert, Relation, Tag, Truncate, TruncateOption, Update
from subscriber.sinks import conflict_log
from subscriber.sinks.apply_counters import ChangeContext, Counted, describe
from subscriber.sinks.conflict_log import LoggedConflict
from subscriber.sinks.runs import CHANGES, IGNORED, LatestForms, Row, Run, Runs
from subscriber.sinks.sqlalchemy.apply.binding import picked
from subscriber.sinks.sqlalchemy.apply.bulk import BulkTables, Uncounted
from subscriber.sinks.sqlalchemy.apply.multi_row import insert_rows
from subscriber.sinks.sqlalchemy.apply.relation_map import RelationMap, SchemaBehind, has_triggers
from subscriber.sinks.sqlalchemy.apply.relation_plan import Form, RelationPlan, Vector
from subscriber.sinks.sqlalchemy.apply.statements import Statement, delete_all
from subscriber.sinks.sqlalchemy.conflict_log import as_json
from subscriber.sinks.sqlalchemy.session.database_errors import UNIQUE_VIOLATION, passing_values, translated
from subscriber.sinks.sqlalchemy.session.statement_size import BINARY_GROWS, limit_of
from subscriber.transaction.model import Transaction

__all__ = ["TransactionRunner"]


_MOST_ROWS: Final = 500
"""The largest number of changes that are read together, so that their size is checked in between."""
_NO_DATA: Final = "P0002"
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
        alter: changes columns in the open transaction; None: the database commits then, so this is left to the caller.
        bulk_tables: the session's, to make changes in runs; None: one by one, so that every error names its change.
    """

    def __init__(
        self,
        connection: AsyncConnection,
        relations: RelationMap,
        gate: RelationGate,
        origin: str,
        counted: Counted,
        *,
        alter: Callable[[AsyncConnection, SchemaBehind], Awaitable[None]] | None,
        bulk_tables: BulkTables | None,
    ) -> None:
        self._connection = connection
        self._relations = relations
        self._gate = gate
        self._origin = origin
        self._counted = counted
        self._alter = alter
        self._exact = bulk_tables is None
        self._bulk_tables = bulk_tables or BulkTables()
        self._counts_many = connection.dialect.supports_sane_multi_rowcount
        self._runs: Runs[Form] = Runs()
        self._latest: LatestForms[Form] = LatestForms()
        self._largest = 0
        self._plans: dict[int, RelationPlan] = {}
        # the transaction that a relation is left out of: it may be ready at the next one, and then it stays so
        self._left_out: dict[int, ChangeContext] = {}

    async def run(self, transaction: Transaction) -> None:
        """Make all changes of one transaction that the gate allows. Some may remain in runs: :meth:`flush` makes them.

        Raises:
            ApplyError, RelationError: the target rejected a change, or its table does not fit.
            ProtocolError: a record is invalid.
            TargetUnavailable, SpoolError, SchemaBehind
        """
        context = ChangeContext(self._origin, transaction.xid, transaction.final_lsn, commit_time=transaction.commit_time)
        offset = 5 if transaction.prefixed else 1
        most = 1 if self._exact else _MOST_ROWS
        async for chunk in transaction.chunks():
            place, stop = 0, len(chunk)
            while place < stop:
                places = range(place, min(place + most, stop))
                found = self._latest.read(chunk, places, offset) or await self._decoded(chunk, places, transaction, context)
                if found is None:
                    place += 1
                    continue
                form, rows = found
                sizes = list(map(len, chunk[place : place + len(rows)]))
                place += len(rows)
                in_order = self._exact or form.ordered
                if in_order:
                    await self.flush()
                self._runs.add(form, rows, [context] * len(rows), sum(sizes))
                self._largest = max(self._largest, *sizes)
                del found, rows
                if in_order or self._runs.count >= _FLUSH_CHANGES or self._runs.size >= _FLUSH_BYTES:
                    if chunk is not transaction.records and isinstance(chunk, list):
                        # read from the spool for us alone: a large record is not kept beside its values
                        chunk[:place] = [b""] * place
                    await self.flush()
        self._counted.statistics.transactions += 1

    async def _decoded(
        self, records: Sequence[bytes], places: range, transaction: Transaction, context: ChangeContext
    ) -> tuple[Form, Sequence[Row]] | None:
        """Decode a record. Returns its form, and the values of the records that have it. None: it is no change of a row, or is left out."""
        record, prefixed = records[places.start], transaction.prefixed
        tag = record[0] if record else 0
        offset = 5 if prefixed else 1
        if tag not in CHANGES or len(record) < offset + 4:
            if tag not in IGNORED:
                await self._other(record, transaction, context)
            return None
        plan = await self._plan(int.from_bytes(record[offset : offset + 4]), tag, context)
        if plan is None:
            return None
        with _naming(plan.name, tag, context):
            if tag != Tag.INSERT:
                plan.require_updatable()
            message = decode(record, in_stream=prefixed)
            assert isinstance(message, Insert | Update | Delete)
            form, row = plan.form(message)
        if row is not None:
            return form, [row]
        self._latest.add(form)
        return form.read(records, places, offset)

    async def _other(self, record: bytes, transaction: Transaction, context: ChangeContext) -> None:
        message = decode(record, in_stream=transaction.prefixed)
        match message:
            case Relation():
                if self._relations.define(message):
                    # the waiting changes belong to the earlier description
                    await self.flush()
                    self._plans.pop(message.relation_id, None)
                    self._left_out.pop(message.relation_id, None)
                    self._latest.clear()
            case Truncate():
                await self.flush()
                await self._truncate(message, context)
            case _:
                raise ProtocolError(f"a {type(message).__name__} message among the changes of a transaction")

    async def _plan(self, relation_id: int, tag: int, context: ChangeContext) -> RelationPlan | None:
        """The relation with its table; None: its changes are left out."""
        plan = self._plans.get(relation_id)
        if plan is not None or self._left_out.get(relation_id) is context:
            return plan
        relation = self._relations.remote(relation_id)
        if not self._gate(relation, context.final_lsn):
            self._counted.statistics.skipped_tables.add(f"{relation.namespace}.{relation.name}")
            self._left_out[relation_id] = context
            return None
        name = TableName(relation.namespace, relation.name)
        try:
            with _naming(name, tag, context):
                plan = await self._relations.plan(self._connection, relation, context.final_lsn)
        except SchemaBehind as behind:
            if self._alter is None:
                raise
            # the waiting changes belong to the earlier columns
            await self.flush()
            with _naming(name, tag, context):
                await self._alter(self._connection, behind)
                plan = await self._relations.plan(self._connection, relation, context.final_lsn)
        self._plans[relation_id] = plan
        return plan

    async def flush(self) -> None:
        """Make the changes that wait.

        Raises:
            ApplyError, RelationError, TargetUnavailable
        """
        if not self._runs.count:
            return
        for runs in self._runs.take():
            for run in runs:
                self._counted.sent(run.form.statement.table, run.size)
                if self._exact or run.form.ordered:
                    await self._make_each(run)
                else:
                    await self._make_together(run)
        self._largest = 0

    async def _make_each(self, run: Run[Form]) -> None:
        """Make changes one by one."""
        form, statement = run.form, run.form.statement
        rows, run.rows = run.rows[::-1], []
        for context in run.contexts:
            with _naming(statement.table, form.tag, context, count=self._counted if self._exact else None), translated(), passing_values():
                # a large value is not kept beside its parameter
                vector = form.bound([rows.pop()])
                if form.tag == Tag.INSERT and await self._resolved(form.plan, statement, vector, context):
                    continue
                result = await self._execute(statement, vector)
                found = 1 if statement.kind == "INSERT" else _found(result.rowcount)
                if not found and statement.search is not None:
                    # a trigger may have skipped an existing row: that is no conflict
                    query, pick = statement.search.query
                    (parameters,) = picked(vector, pick, 1)
                    found = int((await self._connection.exec_driver_sql(query, parameters)).first() is not None)
                if not found and await self._missed(form, statement, vector, context):
                    continue
            self._counted.changes(statement.kind, statement.table, statement.identity, 1, found)

    async def _execute(self, statement: Statement, vector: Vector) -> CursorResult[Any]:
        """Make one change."""
        (parameters,) = picked(vector, statement.pick, 1)
        limit_of(self._connection).require(statement.sql, parameters)
        return await self._connection.exec_driver_sql(statement.sql, parameters)

    async def _resolved(self, plan: RelationPlan, statement: Statement, vector: Vector, context: ChangeContext) -> bool:
        """Resolve the conflict of an INSERT whose key exists, by its rule. False: there is none, or it is an error."""
        rule, overwrites = plan.rules.insert_exists, plan.overwrites if plan.rules.insert_exists != "error" else None
        if overwrites is None or overwrites.search is None:
            return False
        both = [*vector, *vector]
        query, pick = overwrites.search.query
        (parameters,) = picked(both, pick, 1)
        if (await self._connection.exec_driver_sql(query, parameters)).first() is None:
            return False
        await self._log_conflict("insert_exists", plan, overwrites, both, context, exists=True)
        if rule == "apply_remote":
            await self._execute(overwrites, both)
            self._counted.changes("INSERT", statement.table, (), 1, 1)
        self._note("insert_exists", overwrites, "Key already exists", rule)
        return True

    async def _missed(self, form: Form, statement: Statement, vector: Vector, context: ChangeContext) -> bool:
        """Resolve the conflict of a change that found no row, by its rule. False: it is skipped.

        Raises:
            ApplyError: the conflict is an error, or the row to insert was not sent as a whole.
        """
        conflict = f"{statement.kind.lower()}_missing"
        rule = getattr(form.plan.rules, conflict)
        if rule == "skip":
            await self._log_conflict(conflict, form.plan, statement, vector, context, unsent=form.unsent)
            return False
        message = f'could not find the row of relation "{statement.table}" to be {statement.kind.lower()}d'
        hint = "correct the row in the target, or change the rule; the transaction is retried"
        new = form.plan.width
        if rule == "insert":
            if len(form.unsent) == 0:
                await self._execute(form.plan.inserts, vector[:new])
                await self._log_conflict(conflict, form.plan, statement, vector, context)
                self._counted.changes("UPDATE", statement.table, (), 1, 1)
                self._note(conflict, statement, "Could not find the row to be updated", rule)
                return True
            columns = ", ".join(f'"{name}"' for name in form.unsent)
            message += f", and it cannot be inserted: the publisher did not send the unchanged values of {columns}"
            hint = "reconcile the table (`subscriber alter NAME --resync TABLE`), or change the rule; the transaction is retried"
        error = ApplyError(message, sqlstate=_NO_DATA, hint=hint)
        error.add_note(f'conflict detected on relation "{statement.table}": conflict={conflict}, rule={rule}')
        if self._exact:
            self._counted.failed = conflict
        raise error

    def _note(self, conflict: str, statement: Statement, explanation: str, rule: str) -> None:
        self._counted.conflict("", statement.table, statement.identity, conflict, explanation, resolution=rule)

    async def _log_conflict(
        self,
        conflict: str,
        plan: RelationPlan,
        statement: Statement,
        vector: Vector,
        context: ChangeContext,
        *,
        exists: bool = False,
        unsent: Sequence[str] = (),
    ) -> None:
        """Take note of a conflict for the log, if there is one.

        Args:
            conflict: its name.
            plan: of the table.
            statement: finds the row.
            vector: the values of the change.
            context: its transaction.
            exists: whether there is such a row.
            unsent: columns of the new row that were not sent.
        """
        if (log := self._relations.log) is None:
            return
        columns, width = plan.target.columns, plan.width
        key = [(columns[n].name, vector[width + n][0]) for n in plan.target.key or range(len(vector) - width)]
        new = [(each.name, vector[n][0]) for n, each in enumerate(columns) if each.column is not None and each.name not in unsent]
        local = None
        if log.rows and exists and statement.search is not None:
            query, pick = statement.search.whole
            (parameters,) = picked(vector, pick, 1)
            row = (await self._connection.exec_driver_sql(query, parameters)).first()
            local = row and as_json(zip(plan.target.table.c.keys(), row, strict=True))
        rule = getattr(plan.rules, conflict)
        self._counted.resolved.append(
            LoggedConflict(
                statement.table,
                conflict,
                rule,
                rule in {"apply_remote", "insert"},
                context.xid,
                context.final_lsn,
                context.commit_time,
                as_json(key),
                local,
                as_json(new) if log.rows and statement.kind != "DELETE" else None,
            )
        )
        if len(self._counted.resolved) >= conflict_log.MOST:
            await self.write_log()

    async def write_log(self) -> None:
        """Write the conflicts that were noted into their log, if there is one.

        Raises:
            TargetError: or a subclass.
        """
        if self._relations.log is not None and self._counted.resolved:
            await self._relations.log.write(self._connection, self._counted.resolved)
            self._counted.resolved.clear()

    async def _make_together(self, run: Run[Form]) -> None:
        """Make changes by ``executemany``, or by bulk statements."""
        statement, sent = run.form.statement, len(run.rows)
        with translated(), passing_values():
            found = await self._execute_many(run.form, run.rows)
            missing = statement.search if found < sent else None
            if missing is not None and await self._connection.run_sync(has_triggers, missing.table):
                # the trigger was created after the plan read the table
                raise Uncounted("a trigger may have passed over rows that exist")
            rule = getattr(run.form.plan.rules, f"{statement.kind.lower()}_missing", "skip")
            if found < sent and (rule != "skip" or self._relations.log is not None):
                raise Uncounted("each row that is missing is a conflict")
        self._counted.changes(statement.kind, statement.table, statement.identity, sent, found)

    async def _execute_many(self, form: Form, rows: list[Row]) -> int:
        """Make changes of one form; return how many of them found their row. The list is emptied."""
        statement, sent, largest = form.statement, len(rows), self._largest * BINARY_GROWS
        if form.keys is not None and statement.sortable:
            _sort_by_key(rows, list(form.keys(rows)))
        how = statement.bulk if form.keys is not None else None
        if how is not None and self._bulk_tables.takes(how, sent):
            staged = form.parameters(rows.copy(), how.pick)
            found = await self._bulk_tables.execute(self._connection, how, staged, deletes=statement.kind == "DELETE", largest=largest)
            if found is not None:
                return found
        parameters = form.parameters(rows, statement.pick)
        pieces = limit_of(self._connection).pieces(statement.sql, parameters, largest)
        if statement.kind == "INSERT":
            for piece in pieces:
                await insert_rows(self._connection, statement.sql, statement.many, piece)
            return sent
        for _ in pieces:
            # each row is sent on its own: this only checks their sizes
            pass
        if self._counts_many:
            return _found((await self._connection.exec_driver_sql(statement.sql, parameters)).rowcount, sent)
        # the driver does not report how many rows an executemany found
        return sum([_found((await self._connection.exec_driver_sql(statement.sql, row)).rowcount) for row in parameters])

    async def _truncate(self, message: Truncate, context: ChangeContext) -> None:
        restart = TruncateOption.RESTART_IDENTITY in message.options
        truncated: TableName | None = None
        for relation_id in message.relation_ids:
            plan = await self._plan(relation_id, Tag.TRUNCATE, context)
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


def _sort_by_key(rows: list[Row], keys: Sequence[Any]) -> None:
    """Sort changes by the keys of their rows, so that the database finds and writes adjacent rows together.

    Changes of the same row keep their order. If a key has a NULL, the changes are not sorted: a NULL cannot be compared, and no row has
    such a key.
    """
    parts: Iterable[object] = chain.from_iterable(keys) if isinstance(keys[0], tuple) else keys
    if None not in parts:
        rows[:] = [rows[place] for place in sorted(range(len(rows)), key=keys.__getitem__)]


@contextlib.contextmanager
def _naming(table: TableName, tag: int, context: ChangeContext, *, count: Counted | None = None) -> Iterator[None]:
    """Add to an error which change it is about. ``count``: receives a conflict that is an error; None: the change will be retried."""
    kind = Tag(tag).name
    try:
        yield
    except SchemaBehind:
        raise
    except TargetError as error:
        if error.sqlstate == UNIQUE_VIOLATION and count is not None:
            conflict = "insert_exists" if kind == "INSERT" else "update_exists"
            error.add_note(f'conflict detected on relation "{table}": conflict={conflict}')
            count.failed = conflict
        error.of_table, error.finish_lsn = (table.namespace, table.name), context.final_lsn
        _describe(error, describe(context, kind, table, getattr(error, "column", None)))
        raise


def _describe(error: TargetError, text: str) -> None:
    # keep the note of the innermost block: it is the most precise
    if not any(note.startswith("processing remote data") for note in getattr(error, "__notes__", ())):
        error.add_note(text)
