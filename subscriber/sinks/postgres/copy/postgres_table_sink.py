"""The synchronization of one table.

The control session holds the table's lock and changes the table's state. It also applies the changes until the table has caught up. Each
part of a copy has a separate session, which commits the rows together with their transaction id in ``subscriber.copy_part``. So a copy in
one part and a copy in parallel parts work in the same way. :meth:`PostgresTableSink.finish_copy` deletes these transaction ids and stores
state ``f`` with the position, in one transaction. Then the copied rows are final.

After a crash in state ``d``, the rows of the copy are those whose xmin is one of the stored transaction ids. The table may have had other
rows before. A part that was not committed left neither rows nor a transaction id. :meth:`PostgresTableSink.begin` undoes the copy: it
deletes these rows. :meth:`PostgresTableSink.begin_again` keeps them. Then the caller compares them with the publisher's, range by range,
and replaces those that differ, as further parts. The ``copying`` lock
(:mod:`subscriber.sinks.postgres.session.locks`) and the attempt's number prevent that a dead process commits a part meanwhile.

In another mode than COPY, all rows of the table are compared and replaced in this way. They are not stored as parts: nothing is undone.

The control session and the session of each part have their own replication origins. The undo is marked with an origin too: a subscriber of
the target with ``origin = none`` did not receive the copied rows, so it must not receive their deletion. The origins are dropped when they
are no longer needed.

Known limits: if another session updates a row during the copy, the row has another xmin, and the undo keeps it. If a row was inserted
exactly 2^32 transactions before a part, it has the same xmin, and the undo deletes it.
"""

# names are quoted or ours, values are parameters
# ruff: noqa: S608

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import asyncpg
import psycopg

from subscriber import crash_points
from subscriber.config import ConflictRules, SynchronousCommit
from subscriber.errors import RelationError, SubscriptionInUse, TargetError, TargetUnavailable
from subscriber.interfaces import (
    Batch,
    CopyFormat,
    Position,
    PublishedTable,
    Replacement,
    SyncMode,
    TableEntry,
    TableName,
    TableState,
    TargetRows,
)
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.session_settings import READING
from subscriber.sinks.apply_counters import Tally
from subscriber.sinks.catalog_sink import Owner
from subscriber.sinks.postgres.apply.applier import Applier
from subscriber.sinks.postgres.apply.change_sql import set_role
from subscriber.sinks.postgres.catalog.session_rows import COPY_PART, SessionRows
from subscriber.sinks.postgres.copy.copy_in import CopyIn
from subscriber.sinks.postgres.copy.replaced_rows import ReplacedRows
from subscriber.sinks.postgres.session.apply_session import ApplySession
from subscriber.sinks.postgres.session.catalog_reader import CatalogReader
from subscriber.sinks.postgres.session.firing import first_firing
from subscriber.sinks.postgres.session.locks import copying_key, table_key, take
from subscriber.sinks.postgres.session.origins import Origins, catalog_run, drop_origins, origin_name
from subscriber.sinks.postgres.session.queries import become, run_query
from subscriber.sinks.postgres.session.settings import ANSWER_SECONDS, apply_settings, durable_commit
from subscriber.sinks.postgres.session.target import Target
from subscriber.sinks.postgres.tables.conflict_log import ConflictLog
from subscriber.sinks.postgres.tables.relation_map import RelationMap
from subscriber.sinks.postgres.tables.relation_mapping import TargetTable, described_relation, map_relation
from subscriber.sinks.postgres.tables.table_reader import read_table

__all__ = ["PostgresTableSink"]

_IS_MINE: Final = """
SELECT EXISTS (SELECT FROM subscriber.pg_subscription_rel
               WHERE srsubid = $1::int8::oid AND srrelid = $2::int8::oid AND srsubstate::text = 'd' AND srcopyattempt = $3)
"""
_NOTE_PART: Final = """
INSERT INTO subscriber.copy_part (srsubid, srrelid, xid) VALUES ($1::int8::oid, $2::int8::oid, pg_catalog.pg_current_xact_id()::xid)
"""
_START: Final = """
UPDATE subscriber.pg_subscription_rel SET srsubstate = 'd', srcopyattempt = srcopyattempt + 1
WHERE srsubid = %s::int8::oid AND srrelid = %s::int8::oid AND srsubstate::text IN ('i', 'd') RETURNING srcopyattempt
"""
_SYNCHRONIZED: Final = """
UPDATE subscriber.pg_subscription_rel SET srsyncxid = pg_catalog.pg_current_xact_id()::text::int8
WHERE srsubid = %s::int8::oid AND srrelid = %s::int8::oid
"""


class PostgresTableSink:
    """A :class:`subscriber.interfaces.TableSink`.

    Args:
        oid: oid of the subscription.
        application_name: application name of its sessions.
        as_owner: change the table as its owner.
        tally: counters of the sink.
        origins: the replication origins of the sink.
        rules: what to do about conflicts.
        log: the table in which they are logged, if there is one.
    """

    def __init__(
        self,
        target: Target,
        table: TableName,
        *,
        oid: int,
        application_name: str,
        synchronous_commit: SynchronousCommit,
        as_owner: bool,
        tally: Tally,
        origins: Origins,
        rules: ConflictRules,
        log: ConflictLog | None,
    ) -> None:
        self._log = log
        self._rules = rules
        self._target = target
        self._table = table
        self._oid = oid
        self._application_name = application_name
        # each call of a table's synchronization is durable on return
        self._synchronous_commit = durable_commit(synchronous_commit)
        self._as_owner = as_owner
        self._tally = tally
        self._origins = origins
        self._busy_parts: set[int] = set()
        self._free_parts: list[tuple[int, asyncpg.Connection[asyncpg.Record]]] = []
        self._synchronized = False
        self._session: ApplySession | None = None
        self._reader: CatalogReader | None = None
        self._applier: Applier | None = None
        self._relation_id: int | None = None
        self._attempt = 0
        self._mode = SyncMode.COPY
        self._kept = ""
        self._replaced: TargetTable | None = None
        self._comparing: list[psycopg.AsyncConnection[tuple[Any, ...]]] = []
        self._ended = False

    @property
    def relation_id(self) -> int:
        if self._relation_id is None:
            raise TargetError(f'the synchronization of table "{self._table}" has not begun')
        return self._relation_id

    @property
    def _control(self) -> ApplySession:
        if self._session is None:
            raise TargetUnavailable(f'the synchronization of table "{self._table}" is closed', hint="it is retried")
        return self._session

    @property
    def _rows(self) -> SessionRows:
        return SessionRows(self._control, self._oid)

    async def begin(self) -> TableEntry:
        """Connect, take the table's lock, undo an unfinished copy. See :meth:`subscriber.interfaces.TableSink.begin`.

        Raises: as :meth:`begin_again`.
        """
        entry = await self.begin_again()
        if entry.state is TableState.DATASYNC:
            # a reconciliation has stored no parts
            entry = replace(entry, state=TableState.INIT)
            await self._undo_copy(entry)
        return entry

    async def begin_again(self) -> TableEntry:
        """Connect, take the table's lock. See :meth:`subscriber.interfaces.ReconcilingTableSink.begin_again`.

        Raises:
            RelationError: the table was dropped, or does not belong to the subscription.
            SubscriptionInUse: another process synchronizes it.
            TargetError: or another subclass.
        """
        if self._session is not None and not self._session.usable:
            await self.close()
        if self._session is None:
            await self._open()
        self._applier = None
        entry = await self._rows.entry(self.relation_id)
        if entry is None:
            raise RelationError(f'table "{self._table}" is not part of the subscription', hint="start the run again")
        self._mode = entry.mode
        if self._ended:
            # the terminated session may have waited for a synchronous standby in COMMIT: this COMMIT waits for the standby too
            async with self._control.transaction():
                await self._rows.set_entry(self.relation_id, entry, only_from=entry.state)
            self._ended = False
        if entry.state in {TableState.INIT, TableState.DATASYNC, TableState.FINISHEDCOPY}:
            await self._control.carry_origin(self._origins, origin_name(self._oid, self.relation_id))
        return entry

    async def _open(self) -> None:
        session = await ApplySession.connect(
            self._target, application_name=self._application_name, synchronous_commit=self._synchronous_commit
        )
        self._session = session
        try:
            # of a table that was dropped, too: its slot is named after it
            stored = await self._rows.table(self._table)
            self._relation_id = stored.relid if stored is not None else None
            self._relation_id = await self._rows.find_table(self._table)
            what, lost = f'synchronization of table "{self._table}"', self._target.lost()
            self._ended = await take(session.fetch, table_key(self._oid, self.relation_id), what, lost=lost)
            self._reader = CatalogReader(await self._connect_asyncpg())
            await self._reader.read_owner(self._oid)
        except BaseException:
            await self.close()
            raise

    async def _connect_asyncpg(self) -> asyncpg.Connection[asyncpg.Record]:
        settings = apply_settings(self._synchronous_commit)
        return await self._target.connect_asyncpg(self._control.connection, self._application_name, settings)

    async def _read_table(self, *, has_columns: bool = True) -> TargetTable:
        if self._reader is None:
            raise TargetUnavailable(f'the synchronization of table "{self._table}" is closed', hint="it is retried")
        table = await read_table(self._reader, self._table, as_owner=self._as_owner, has_columns=has_columns)
        if table.oid != self.relation_id:
            raise RelationError(
                f'table "{self._table}" was replaced by another one during its synchronization',
                hint="start the run again: it adds the new table and copies it",
            )
        table.require_usable()
        return table

    async def _undo_copy(self, then: TableEntry) -> None:
        control, table = self._control, await self._read_table(has_columns=False)
        async with self._closed_if_in_use(), control.transaction():
            if kept := await self._parts():
                await control.fetch(set_role(table.role).sql.decode())
                await control.fetch(f"DELETE FROM {table.scanned} WHERE {_of(kept)}")
                await control.fetch(set_role(None).sql.decode())
                await self._forget_parts()
            await self._rows.set_entry(self.relation_id, then, only_from=TableState.DATASYNC)

    async def _parts(self) -> Sequence[str]:
        """The transaction ids of the committed parts, in an open transaction. No dead process can commit another one any more."""
        control, what = self._control, f'a copy into table "{self._table}"'
        await take(control.fetch, copying_key(self._oid, self.relation_id), what, in_transaction=True, of_the_dead=True)
        query = "SELECT xid::text FROM subscriber.copy_part WHERE srsubid = %s::int8::oid AND srrelid = %s::int8::oid"
        return [xid for (xid,) in await control.fetch(query, self._oid, self.relation_id)]

    @contextlib.asynccontextmanager
    async def _closed_if_in_use(self) -> AsyncIterator[None]:
        try:
            yield
        except SubscriptionInUse:
            await self.close()
            raise

    async def undo_copy(self) -> None:
        """Delete the rows of an unfinished copy. See :meth:`subscriber.interfaces.ReconcilingTableSink.undo_copy`."""
        await self._undo_copy(TableEntry(TableState.DATASYNC, mode=self._mode))
        self._kept = ""

    async def compared(self, sessions: int) -> TargetRows | None:
        """Open sessions that read the table. See :meth:`subscriber.interfaces.ReconcilingTableSink.compared`.

        Raises:
            RelationError: rows of the table belong to another subscription, too, or a trigger fires for them.
            TargetError: or another subclass.
        """
        table = self._replaced = await self._read_table()
        fires = await first_firing(self._control.fetch, [table.name], lambda _: "%s")
        async with self._closed_if_in_use(), self._control.transaction():
            # also if there are none: an earlier process can store nothing any more
            found = await self._parts()
            if self._mode is not SyncMode.COPY:
                await self._rows.require_alone([self._table])
            elif not found:
                return None
            else:
                self._kept = _of(found)
        queries = []
        for _ in range(sessions):
            # the settings of READING: both servers must write the same texts
            connection = await self._target.connect(self._application_name, READING)
            self._comparing.append(connection)
            await become(connection, table.role)
            queries.append(partial(run_query, connection))
        if fires is not None and await queries[0](f"SELECT 1 FROM {table.scanned} LIMIT 1"):
            raise fires.fires_for_replaced(table.name)
        return TargetRows(queries, self._kept)

    async def replace(self, replacements: Sequence[Replacement], columns: Sequence[str], copy_format: CopyFormat) -> None:
        """Replace rows in one transaction. See :meth:`subscriber.interfaces.ReconcilingTableSink.replace`.

        Raises:
            ApplyError: the server rejected a row.
            TargetError: or another subclass.
        """
        table = self._replaced or await self._read_table()
        async with self._part(table, columns) as (connection, copying):
            rows = ReplacedRows(connection, copying, table, columns, kept=self._kept)
            await rows.replace(replacements, copy_format)
            crash_points.reached("reconcile.rows_written")

    async def _forget_parts(self) -> None:
        await self._rows.rows.delete(COPY_PART, {"srsubid": self._oid, "srrelid": self.relation_id})

    async def start_copy(self) -> None:
        async with self._control.transaction():
            rows = await self._control.fetch(_START, self._oid, self.relation_id)
        if not rows:
            raise TargetError(f'table "{self._table}" is already copied', hint="start the run again")
        self._attempt = rows[0][0]

    async def describe(self, table: PublishedTable) -> None:
        """Check that the columns fit. See :meth:`subscriber.interfaces.TableSink.describe`.

        Raises:
            RelationError: a column is missing or generated, or the target's table cannot be used.
            TargetUnavailable
        """
        map_relation(described_relation(table), await self._read_table())

    async def copy(self, columns: Sequence[str], copy_format: CopyFormat, data: AsyncIterator[bytes]) -> None:
        """Store the rows of one COPY stream, and commit them with their transaction id. See :meth:`subscriber.interfaces.TableSink.copy`.

        Raises:
            ApplyError: the server rejected the rows; a note names the column if the server's report has it.
            TargetError: or another subclass.
        """
        table = await self._read_table(has_columns=False)
        async with self._part(table, columns) as (_, copying):
            await copying.copy(copy_format, data)
            crash_points.reached("postgres.part_copied")
        crash_points.reached("postgres.part_committed")

    @contextlib.asynccontextmanager
    async def _part(self, table: TargetTable, columns: Sequence[str]) -> AsyncIterator[tuple[asyncpg.Connection[asyncpg.Record], CopyIn]]:
        """A transaction of a copy, on a session of its own. In mode COPY it is stored as a part, which can be undone."""
        connection, number = await self._part_session()
        try:
            with CopyIn(connection, self._table, columns) as copying:
                # not asyncpg's transaction(): its rollback waits for ever if the target does not answer
                await connection.execute("BEGIN")
                await connection.execute("SELECT pg_catalog.pg_advisory_xact_lock_shared($1)", copying_key(self._oid, self.relation_id))
                if not await connection.fetchval(_IS_MINE, self._oid, self.relation_id, self._attempt):
                    raise TargetUnavailable(f'the copy of table "{self._table}" was begun again by another process', hint="it is retried")
                await connection.execute(set_role(table.role).sql.decode())
                yield connection, copying
                await connection.execute(set_role(None).sql.decode())
                if self._mode is SyncMode.COPY:
                    await connection.execute(_NOTE_PART, self._oid, self.relation_id)
                await connection.execute("COMMIT")
        except BaseException:
            try:
                # asyncpg cancels a running statement only if the session is used again
                await CatalogReader(connection).roll_back()
            finally:
                # no effect on a closed connection
                connection.terminate()
                self._busy_parts.discard(number)
            raise
        self._free_parts.append((number, connection))

    async def _part_session(self) -> tuple[asyncpg.Connection[asyncpg.Record], int]:
        if self._free_parts:
            number, connection = self._free_parts.pop()
            return connection, number
        connection = await self._connect_asyncpg()
        number = next(number for number in itertools.count(1) if number not in self._busy_parts)
        self._busy_parts.add(number)
        try:
            await self._origins.set_up(catalog_run(connection), origin_name(self._oid, self.relation_id, number))
        except BaseException:
            connection.terminate()
            self._busy_parts.discard(number)
            raise
        return connection, number

    async def _close_parts(self) -> None:
        """Disconnect the sessions that are not in use. Their origins are free then."""
        async with contextlib.AsyncExitStack() as closing:
            # each session is closed even if the close of another one is cancelled
            while self._free_parts:
                number, connection = self._free_parts.pop()
                self._busy_parts.discard(number)
                closing.push_async_callback(CatalogReader(connection).close)

    async def finish_copy(self, position: Position) -> None:
        async with self._control.transaction():
            await self._forget_parts()
            await self._rows.save_position(self.relation_id, position)
            await self._change_state(TableEntry(TableState.FINISHEDCOPY), TableState.DATASYNC)
        await self._close_parts()
        await self._drop_origins(parts_only=True)

    async def position(self) -> Position:
        found = await self._rows.position(self.relation_id)
        if found is None:
            raise TargetError(f'table "{self._table}" has no position of its own', hint="start the run again")
        return found

    async def apply(self, batch: Batch) -> None:
        if self._applier is None:
            position = (await self.position()).lsn
            if self._reader is None:
                raise TargetUnavailable(f'the synchronization of table "{self._table}" is closed', hint="it is retried")
            relations = RelationMap(self._reader, as_owner=self._as_owner, subscription=None, rules=self._rules, log=self._log)
            owner = Owner(self._oid, self.relation_id)
            self._applier = Applier(self._control, relations, owner, position=position, tally=self._tally, committed=_durable_already)
        await self._applier.apply(batch)

    async def finish_sync(self, lsn: Lsn) -> None:
        async with self._control.transaction():
            await self._rows.forget_position(self.relation_id)
            await self._change_state(TableEntry(TableState.SYNCDONE, lsn), TableState.FINISHEDCOPY)
            await self._control.fetch(_SYNCHRONIZED, self._oid, self.relation_id)
        self._applier = None
        self._synchronized = True

    async def _drop_origins(self, *, parts_only: bool) -> None:
        control = self._control
        if control.origin is None:
            return
        # the table's work is done; if this fails, the next start drops the origins
        with contextlib.suppress(TargetError, TimeoutError):
            async with asyncio.timeout(ANSWER_SECONDS):
                if not parts_only:
                    await control.leave_origin()
                await drop_origins(control.fetch, self._oid, self.relation_id, parts_only=parts_only, wait=False)

    async def _change_state(self, entry: TableEntry, only_from: TableState) -> None:
        if not await self._rows.set_entry(self.relation_id, entry, only_from=only_from):
            raise TargetError(f'table "{self._table}" is not in state {only_from.name}', hint="start the run again")

    async def close(self) -> None:
        """Disconnect. If the table is synchronized, its origins are dropped. Idempotent. :meth:`begin` connects again."""
        session, reader = self._session, self._reader
        try:
            while self._comparing:
                await self._comparing.pop().close()
            await self._close_parts()
            if self._synchronized and session is not None and session.usable:
                await self._drop_origins(parts_only=False)
        finally:
            self._synchronized = False
            self._session = self._reader = self._applier = self._replaced = None
            await self._disconnect(session, reader)

    async def _disconnect(self, session: ApplySession | None, reader: CatalogReader | None) -> None:
        try:
            if reader is not None:
                await reader.close()
        finally:
            # also after a cancellation
            if session is not None:
                await session.close()


def _of(parts: Sequence[str]) -> str:
    """SQL of whether a row was stored by one of these transactions."""
    return f"xmin = ANY ('{{{','.join(parts)}}}'::xid[])"


def _durable_already(_lsn: Lsn, _wal: Lsn | None) -> None:
    """Nothing to do: a table's commits are on disk when they return, and no caller waits for a single commit."""
