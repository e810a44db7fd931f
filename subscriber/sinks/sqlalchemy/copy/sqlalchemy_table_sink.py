"""The synchronization of one table.

The states are ``i`` INIT, ``d`` DATASYNC, ``f`` FINISHEDCOPY and ``s`` SYNCDONE. Each arrow is one commit::

    i ──start_copy──▶ d ──copy, copy, …──▶ d ──finish_copy──▶ f ──apply, …──▶ f ──finish_sync──▶ s
    ▲                 │
    └──────begin──────┘

``i → d``
    If the target's table is empty, rows are copied into it directly. The state is stored together with this decision (``srcopy``). If the
    table is not empty, rows are copied into a staging table, which is created before the state is stored: without state ``d``, a staging
    table has no meaning.
``d``
    Rows are committed in pieces of limited size, so that a copy never holds SQLite's write lock for long, and never has a transaction of
    gigabytes open. A table that is reconciled is in this state while its rows are compared and replaced, and nothing is undone.
    After a crash :meth:`SqlAlchemyTableSink.begin_again` keeps rows that were copied directly, :meth:`SqlAlchemyTableSink.begin` undoes
    the copy. One commit sets state ``i`` and, if rows were copied directly, deletes all rows of the table. Then the staging table is
    dropped. The deletion includes rows that other programs have written into the empty table: they must not use a table before it is
    copied.
``d → f``
    One commit stores the state and the table's own position and, if there is a staging table, moves its rows. Only now the copy counts.
``f``
    Changes are applied and the table's own position is moved, in the same way as by the apply worker:
    :mod:`subscriber.sinks.sqlalchemy.apply.applier`.
``f → s``
    One commit stores the state and deletes the table's own position.

Each transaction holds the fence, so an earlier process cannot write after a later one has opened the sink. It then locks the table's row
and checks its state, so an earlier attempt of this process cannot write after :meth:`SqlAlchemyTableSink.begin`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from sqlalchemy import Table, delete, literal, select
from sqlalchemy.ext.asyncio import AsyncConnection

from subscriber import crash_points
from subscriber.catalog.subscription_rows import SubscriptionRows, TableRow
from subscriber.config import Settings
from subscriber.errors import RelationError, TargetError, TargetUnavailable
from subscriber.interfaces import Batch, CopyFormat, Position, PublishedTable, Replacement, SyncMode, TableEntry, TableName, TableState
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.apply_counters import Tally
from subscriber.sinks.catalog_sink import Owner
from subscriber.sinks.sqlalchemy.apply.applier import Applier
from subscriber.sinks.sqlalchemy.apply.binding import bind_columns, copy_binds, picked
from subscriber.sinks.sqlalchemy.apply.multi_row import insert_columns, insert_rows
from subscriber.sinks.sqlalchemy.apply.relation_map import RelationMap, schema_change
from subscriber.sinks.sqlalchemy.apply.statements import Statement, insert_row
from subscriber.sinks.sqlalchemy.catalog.rows import subscription_rows
from subscriber.sinks.sqlalchemy.copy.replaced_rows import replace_rows
from subscriber.sinks.sqlalchemy.copy.staging import Staging
from subscriber.sinks.sqlalchemy.schema.altered_columns import add_columns
from subscriber.sinks.sqlalchemy.schema.reflection import reflect
from subscriber.sinks.sqlalchemy.schema.target_table import TargetTable, load_target_table
from subscriber.sinks.sqlalchemy.schema.triggers import first_firing
from subscriber.sinks.sqlalchemy.session.database import Database
from subscriber.sinks.sqlalchemy.session.database_errors import passing_values, translated
from subscriber.sinks.sqlalchemy.session.fence import Fence
from subscriber.sinks.sqlalchemy.session.session import Session
from subscriber.sinks.sqlalchemy.session.statement_size import BINARY_GROWS, limit_of
from subscriber.sinks.sqlalchemy.snapshots import SnapshotSessions
from subscriber.types import copy_decoder

__all__ = ["SqlAlchemyTableSink"]

_DIRECT: Final = "d"
_STAGED: Final = "s"
_PIECE_ROWS: Final = 10_000
_PIECE_BYTES: Final = 4 * 1024**2


class SqlAlchemyTableSink:
    """A :class:`subscriber.interfaces.TableSink`.

    Args:
        database: the target.
        fence: the sink's fence.
        table: the publisher's table.
        published: the latest descriptions from the publisher's catalog.
        settings: ``schema_change``.
        make_relations: creates an empty map of relations.
        tally: receives the counts.
    """

    def __init__(
        self,
        database: Database,
        fence: Fence,
        table: TableName,
        *,
        published: Mapping[TableName, PublishedTable],
        settings: Settings,
        make_relations: Callable[[], RelationMap],
        tally: Tally,
    ) -> None:
        self._database = database
        self._fence = fence
        self._table = table
        self._published = published
        self._settings = settings
        self._make_relations = make_relations
        self._tally = tally
        self._session: Session | None = None
        self._relid: int | None = None
        self._described: PublishedTable | None = None
        self._applier: Applier | None = None
        self._turn = asyncio.Lock()
        self._mode = SyncMode.COPY
        self._comparing: list[Session] = []

    @property
    def relation_id(self) -> int:
        if self._relid is None:
            raise TargetError(f'the synchronization of table "{self._table}" was not begun', hint="report this")
        return self._relid

    async def begin(self) -> TableEntry:
        """Return the stored entry, after undoing an unfinished copy.

        Raises:
            RelationError: the subscription does not have the table.
            SubscriptionInUse, TargetUnavailable, TargetError
        """
        return await self._begin(resumes=False)

    async def begin_again(self) -> TableEntry:
        """As :meth:`begin`, but rows that an unfinished copy has stored in the table itself stay. Those of a staging table do not.

        Raises: as :meth:`begin`.
        """
        return await self._begin(resumes=True)

    async def _begin(self, *, resumes: bool) -> TableEntry:
        await self.close()
        self._session = await self._database.connect()
        self._applier = None
        async with self._locked() as (connection, rows, row):
            self._relid = row.relid
            entry = row.entry
            self._mode = entry.mode
            if entry.state is TableState.DATASYNC and not (resumes and row.row["srcopy"] == _DIRECT):
                await self._undo(connection, rows, row)
                entry = replace(entry, state=TableState.INIT)
        if entry.state in {TableState.INIT, TableState.FINISHEDCOPY}:
            async with self._locked() as (connection, _, _):
                await self._staging.drop(connection)
        return entry

    async def _undo(self, connection: AsyncConnection, rows: SubscriptionRows, row: TableRow) -> None:
        if row.row["srcopy"] == _DIRECT and self._mode is SyncMode.COPY:
            found = await reflect(connection, self._table)
            if found is not None:
                await connection.execute(delete(found.table))
        await self._change(rows, TableEntry(TableState.INIT, mode=self._mode), TableState.DATASYNC)

    async def undo_copy(self) -> None:
        """See :meth:`subscriber.interfaces.ReconcilingTableSink.undo_copy`."""
        async with self._locked(TableState.DATASYNC) as (connection, rows, row):
            await self._undo(connection, rows, row)
            await self._change(rows, TableEntry(TableState.DATASYNC, mode=self._mode), TableState.INIT, _DIRECT)

    async def compared(self, sessions: int) -> SnapshotSessions:
        """See :meth:`subscriber.interfaces.ReconcilingTableSink.compared`.

        Raises:
            RelationError: rows of the table belong to another subscription, too, or a trigger fires for them.
            TargetUnavailable, TargetError
        """
        async with self._locked(TableState.DATASYNC) as (connection, rows, _):
            found = await reflect(connection, self._table)
            fires = await first_firing(connection, [self._table])
            if self._mode is not SyncMode.COPY:
                await rows.require_alone([self._table])
            if found is not None and fires is not None and await _has_rows(connection, found.table):
                raise fires.fires_for_replaced(self._table)
        for _ in range(sessions):
            self._comparing.append(await self._database.connect())
        return SnapshotSessions(self._database, list(self._comparing), contextlib.AsyncExitStack())

    async def replace(self, replacements: Sequence[Replacement], columns: Sequence[str], copy_format: CopyFormat) -> None:
        """Replace rows in one transaction. See :meth:`subscriber.interfaces.ReconcilingTableSink.replace`.

        Raises:
            ApplyError: the target rejected a row.
            RelationError: the target's table does not fit.
            TargetError, TargetUnavailable
        """
        described = self._columns(columns)
        async with self._turn, self._locked(TableState.DATASYNC) as (connection, _, _):
            target = await self._target(connection, described)
            await replace_rows(connection, described, target, replacements, copy_format)
            crash_points.reached("reconcile.rows_written")

    @property
    def _staging(self) -> Staging:
        return Staging(self.relation_id)

    @contextlib.asynccontextmanager
    async def _locked(self, state: TableState | None = None) -> AsyncIterator[tuple[AsyncConnection, SubscriptionRows, TableRow]]:
        """Open a transaction that holds the fence and the lock on the table's row. ``state``: the state in which the table must be."""
        if self._session is None:
            raise TargetUnavailable(f'the synchronization of table "{self._table}" is closed', hint="it is retried")
        async with self._session.transaction() as connection:
            await self._fence.hold(connection)
            rows = subscription_rows(connection, self._fence.oid)
            row = await rows.table(self._table, lock=True)
            if row is None:
                raise RelationError(f'table "{self._table}" is no longer part of the subscription', hint="refresh the subscription")
            if state is not None and row.entry.state is not state:
                raise TargetError(f'table "{self._table}" is not in state {state.name}', hint="start the run again")
            yield connection, rows, row

    async def _change(self, rows: SubscriptionRows, entry: TableEntry, only_from: TableState, copy: str | None = None) -> None:
        if not await rows.set_entry(self.relation_id, entry, only_from=only_from, srcopy=copy):
            raise TargetError(f'table "{self._table}" is not in state {only_from.name}', hint="start the run again")

    async def start_copy(self) -> None:
        """Store DATASYNC, and whether the rows are staged. First add columns to the target's table, if they are to be added.

        Raises:
            RelationError: the target has no such table.
            TargetError: the table is not in INIT.
        """
        async with self._locked() as (_, _, row):
            if row.entry.state is TableState.DATASYNC:
                # what is left of a copy is compared
                return
        await self._add_columns()
        async with self._locked(TableState.INIT) as (connection, rows, _):
            found = await reflect(connection, self._table)
            if found is None:
                raise RelationError(
                    f'logical replication target relation "{self._table}" does not exist',
                    sqlstate="55000",
                    hint="create the table in the target, or run with --create-tables",
                )
            occupied = self._mode is SyncMode.COPY and await _has_rows(connection, found.table)
            if occupied:
                # some databases commit here implicitly and release the lock on the row: the state is checked again below
                await self._staging.make(connection, found)
            else:
                await self._change(rows, TableEntry(TableState.DATASYNC, mode=self._mode), TableState.INIT, _DIRECT)
        if occupied:
            async with self._locked(TableState.INIT) as (_, rows, _):
                await self._change(rows, TableEntry(TableState.DATASYNC), TableState.INIT, _STAGED)

    async def _add_columns(self) -> None:
        # before the staging table is created; by the latest description, which a later attempt corrects
        known = self._described or self._published.get(self._table)
        if known is None or self._settings.schema_change in ("error", "ignore"):
            return
        async with self._locked(TableState.INIT) as (connection, _, _):
            target = await load_target_table(connection, known, known)
            if target.missing and schema_change(self._settings, self._table, target.missing) == "add":
                # some databases commit here implicitly
                await add_columns(connection, known, known)

    async def describe(self, table: PublishedTable) -> None:
        self._described = table

    async def copy(self, columns: Sequence[str], copy_format: CopyFormat, data: AsyncIterator[bytes]) -> None:
        """Store the rows of one COPY stream, in pieces. See :meth:`subscriber.interfaces.TableSink.copy`.

        Raises:
            ApplyError: the target rejected a row; the error names the column if that is known.
            RelationError: the target's table does not fit.
            ProtocolError: the data is not in COPY format.
            TargetError, TargetUnavailable
        """
        described = self._columns(columns)
        async with self._turn:
            try:
                await self._copy(described, binary=copy_format is CopyFormat.BINARY, data=data)
            except TargetError as error:
                column = getattr(error, "column", None)
                error.add_note(f'while copying table "{self._table}"' + (f' column "{column}"' if column else ""))
                raise

    def _columns(self, columns: Sequence[str]) -> PublishedTable:
        """Return the publisher's description of the table, reduced to these columns."""
        known = self._described or self._published.get(self._table)
        if known is None or not set(columns) <= set(known.columns):
            raise TargetError(f'the columns of table "{self._table}" are not known', hint="report this")
        if tuple(columns) == known.columns:
            return known
        places = [known.columns.index(column) for column in columns]
        return replace(
            known,
            columns=tuple(columns),
            column_types=tuple(known.column_types[place] for place in places),
            column_modifiers=tuple(known.column_modifiers[place] for place in places) if known.column_modifiers else (),
        )

    async def _copy(self, described: PublishedTable, *, binary: bool, data: AsyncIterator[bytes]) -> None:
        async with self._locked(TableState.DATASYNC) as (connection, _, row):
            target = await self._target(connection, described)
            into = self._staging.like(target) if row.row["srcopy"] == _STAGED else None
            statement = insert_row(target, connection.dialect, into=into)
        binds = copy_binds(target.columns, binary=binary)
        decoder = copy_decoder(len(described.columns), binary=binary)
        waiting: list[list[object]] = [[] for _ in binds]
        rows = size = 0
        storing: asyncio.Task[None] | None = None
        try:
            async for chunk in data:
                size += len(chunk)
                count, columns = decoder.columns(chunk)
                del chunk  # not kept while its rows are stored
                rows += count
                _extend(waiting, bind_columns(binds, target.columns, columns))
                del columns
                if rows >= _PIECE_ROWS or size >= _PIECE_BYTES:
                    if storing is not None:
                        await storing
                    piece = self._store(statement, waiting, rows, size * BINARY_GROWS if binary else size)
                    large = size >= _PIECE_BYTES
                    waiting, rows, size = [[] for _ in binds], 0, 0
                    # the next rows are read meanwhile, but no two pieces of large rows are in memory
                    storing = asyncio.create_task(piece)
                    del piece
                    if large:
                        await storing
            decoder.finish()
            if storing is not None:
                await storing
        finally:
            if storing is not None:
                storing.cancel()
                await asyncio.gather(storing, return_exceptions=True)
        if rows:
            await self._store(statement, waiting, rows, size * BINARY_GROWS if binary else size)

    async def _target(self, connection: AsyncConnection, described: PublishedTable) -> TargetTable:
        target = await load_target_table(connection, described, described)
        if target.missing and schema_change(self._settings, self._table, target.missing) != "ignore":
            target.require_complete()
        return target

    async def _store(self, statement: Statement, columns: Sequence[Sequence[object]], count: int, size: int) -> None:
        async with self._locked(TableState.DATASYNC) as (connection, _, _):
            with translated(), passing_values():
                if statement.many is not None:
                    await insert_columns(connection, statement.sql, statement.many, statement.pick(columns))
                else:
                    rows = list(picked(columns, statement.pick, count))
                    for piece in limit_of(connection).pieces(statement.sql, rows, size):
                        await insert_rows(connection, statement.sql, None, piece)
            crash_points.reached("sqlalchemy.rows_copied")

    async def finish_copy(self, position: Position) -> None:
        """Store FINISHEDCOPY and the position, and move staged rows. See :meth:`subscriber.interfaces.TableSink.finish_copy`.

        Raises:
            ApplyError: copied rows conflict with rows that the table had before.
            TargetError: the table is not in DATASYNC.
        """
        async with self._locked(TableState.DATASYNC) as (connection, rows, row):
            staged = row.row["srcopy"] == _STAGED
            if staged:
                known = self._described or self._published[self._table]
                await self._staging.move(connection, await self._target(connection, known))
            await rows.save_position(self.relation_id, position)
            await self._change(rows, TableEntry(TableState.FINISHEDCOPY), TableState.DATASYNC)
            crash_points.reached("sqlalchemy.copy_stored")
        if staged:
            # the staging table has no meaning any more; if this fails, the next begin drops it
            with contextlib.suppress(TargetError):
                async with self._locked() as (connection, _, _):
                    await self._staging.drop(connection)

    async def position(self) -> Position:
        async with self._locked() as (_, rows, row):
            found = await rows.position(row.relid)
        if found is None:
            raise TargetError(f'table "{self._table}" has no position of its own', hint="start the run again")
        return found

    async def apply(self, batch: Batch) -> None:
        if self._applier is None:
            position = (await self.position()).lsn
            if self._session is None:
                raise TargetUnavailable(f'the synchronization of table "{self._table}" is closed', hint="it is retried")
            self._applier = Applier(
                self._session,
                self._fence,
                self._make_relations(),
                Owner(self._fence.oid, self.relation_id),
                position=position,
                tally=self._tally,
                committed=_durable_already,
            )
        await self._applier.apply(batch)

    async def finish_sync(self, lsn: Lsn) -> None:
        async with self._locked(TableState.FINISHEDCOPY) as (_, rows, row):
            await rows.forget_position(row.relid)
            await self._change(rows, TableEntry(TableState.SYNCDONE, lsn), TableState.FINISHEDCOPY)
        self._applier = None

    async def close(self) -> None:
        """Disconnect. Idempotent; :meth:`begin` connects again."""
        session, self._session = self._session, None
        self._applier = None
        async with contextlib.AsyncExitStack() as closing:
            # each session is closed even if the close of another one is cancelled
            for each in (session, *self._comparing):
                if each is not None:
                    closing.push_async_callback(each.close)
            self._comparing.clear()


async def _has_rows(connection: AsyncConnection, table: Table) -> bool:
    return (await connection.execute(select(literal(1)).select_from(table).limit(1))).first() is not None


def _extend(columns: Sequence[list[object]], rows: Sequence[Sequence[object]]) -> None:
    """Add rows, given as columns."""
    for column, values in zip(columns, rows, strict=True):
        column.extend(values)


def _durable_already(_lsn: Lsn) -> None:
    """Do nothing: a table's commits are durable when they return, and there is no caller to notify of each."""
