"""Copy or reconcile several tables through one session: each table in one transaction, from INIT straight to SYNCDONE.

The COMMIT of a table stores its rows and its state together, so the next process has nothing to undo. A COMMIT of a process that died or
was replaced must not take effect after the next process has read the states. This is prevented as for the sessions of parallel apply
(:mod:`subscriber.sinks.postgres.parallel.sessions`): a transaction holds ``parallel(oid)`` shared, and checks the fence before its
COMMIT. It also holds the table's own lock, so a synchronization of the table alone waits for it, and sees how it ended.

The session has one replication origin: ``subscriber_<oid>_<relid>_0``, with the oid of the group's first table.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import asyncpg
import psycopg

from subscriber import crash_points
from subscriber.catalog.subscription_rows import SubscriptionRows
from subscriber.config import SynchronousCommit
from subscriber.errors import SubscriberError, TargetError, TargetUnavailable
from subscriber.interfaces import CopyFormat, PublishedTable, Replacement, SyncMode, TableName, TargetRows
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.session_settings import READING
from subscriber.sinks.postgres.apply.change_sql import OWN_ROLE, set_role
from subscriber.sinks.postgres.catalog.rows import PostgresRows
from subscriber.sinks.postgres.copy.copy_in import CopyIn
from subscriber.sinks.postgres.copy.replaced_rows import ReplacedRows
from subscriber.sinks.postgres.session.catalog_reader import CatalogReader
from subscriber.sinks.postgres.session.firing import first_firing
from subscriber.sinks.postgres.session.locks import parallel_key, table_key
from subscriber.sinks.postgres.session.origins import Origins, catalog_run, drop_origins, origin_name
from subscriber.sinks.postgres.session.postgres_errors import translated
from subscriber.sinks.postgres.session.queries import become, fetch_rows, run_query
from subscriber.sinks.postgres.session.settings import ANSWER_SECONDS, apply_settings, durable_commit
from subscriber.sinks.postgres.session.target import Target
from subscriber.sinks.postgres.tables.fingerprint import FINGERPRINT
from subscriber.sinks.postgres.tables.relation_mapping import TargetTable, described_relation, map_relation
from subscriber.sinks.postgres.tables.table_reader import read_tables

__all__ = ["PostgresTableGroup"]

_IN_INIT: Final = """
SELECT r.srrelid::int8 AS relid FROM subscriber.pg_subscription_rel r WHERE r.srsubid = $1::int8::oid AND r.srsubstate::text = 'i'
"""
# 1 / 0 if another session holds the table's lock
_BEGIN: Final = """
BEGIN; SET LOCAL lock_timeout = '1s'; SELECT pg_catalog.pg_advisory_xact_lock_shared({parallel});
SELECT 1 / pg_catalog.pg_try_advisory_xact_lock({table})::int; {role}
"""
# 1 / 0 if the table is in another state, or was altered since it was read
_FINISH: Final = f"""
{OWN_ROLE};
WITH done AS (
    UPDATE subscriber.pg_subscription_rel AS r
    SET srsubstate = 's', srsublsn = '{{lsn}}', srmode = '{SyncMode.COPY.value}', srerrortime = NULL,
        srsyncxid = pg_catalog.pg_current_xact_id()::text::int8
    WHERE r.srsubid = {{oid}}::oid AND r.srrelid = {{relid}}::oid AND r.srsubstate::text = 'i'
      AND EXISTS (SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
                  WHERE c.oid = {{relid}}::oid AND {FINGERPRINT} = {{fingerprint}})
    RETURNING 1
) SELECT 1 / pg_catalog.count(*) FROM done;
{{fence}};
COMMIT
"""  # noqa: S608 (numbers of ours)


class PostgresTableGroup:
    """A :class:`subscriber.interfaces.TableGroup`.

    Args:
        oid: oid of the subscription.
        application_name: application name of the session.
        as_owner: change tables as their owners.
        origins: the replication origins of the sink.
        fenced: the query that checks the fence of the open sink.
        is_current: whether the sink is still open with that fence.
    """

    def __init__(
        self,
        target: Target,
        *,
        oid: int,
        application_name: str,
        synchronous_commit: SynchronousCommit,
        as_owner: bool,
        origins: Origins,
        fenced: str,
        is_current: Callable[[], bool],
    ) -> None:
        self._target = target
        self._oid = oid
        self._application_name = application_name
        self._synchronous_commit = durable_commit(synchronous_commit)
        self._as_owner = as_owner
        self._origins = origins
        self._fenced = fenced
        self._is_current = is_current
        self.at_once = 1
        self._reader: CatalogReader | None = None
        self._compares: psycopg.AsyncConnection[tuple[Any, ...]] | None = None
        self._alone = False
        self._replaced: tuple[CopyIn, ReplacedRows] | None = None
        self._tables: Mapping[TableName, TargetTable] = {}
        self._copied: TargetTable | None = None
        self._origin_of: int | None = None

    @property
    def usable(self) -> bool:
        return self._reader is not None and not self._reader.connection.is_closed() and self._is_current()

    @property
    def _connection(self) -> asyncpg.Connection[Any]:
        if self._reader is None or not self.usable:
            raise TargetUnavailable("the session of a group of tables was lost", hint="it is retried")
        assert isinstance(self._reader.connection, asyncpg.Connection)
        return self._reader.connection

    async def begin(self, tables: Sequence[TableName]) -> Mapping[TableName, int]:
        self._reader = reader = await self._connect()
        await reader.read_owner(self._oid)
        waiting = {row["relid"] for row in await reader.fetch(_IN_INIT, self._oid)}
        found = await read_tables(reader, tables, as_owner=self._as_owner)
        self._tables = {name: table for name, table in found.items() if table.oid in waiting}
        relation_ids = {name: self._tables[name].oid for name in tables if name in self._tables}
        if relation_ids:
            self._origin_of = next(iter(relation_ids.values()))
            await self._origins.set_up(catalog_run(reader.connection), origin_name(self._oid, self._origin_of, 0))
        return relation_ids

    async def _connect(self) -> CatalogReader:
        like = await self._target.connect(self._application_name)
        try:
            settings = apply_settings(self._synchronous_commit)
            return CatalogReader(await self._target.connect_asyncpg(like, self._application_name, settings))
        finally:
            await like.close()

    async def copy(self, table: PublishedTable, copy_format: CopyFormat, data: AsyncIterator[bytes]) -> None:
        async with self._begun(table) as copying:
            await copying.copy(copy_format, data)

    @contextlib.asynccontextmanager
    async def _begun(self, table: PublishedTable) -> AsyncIterator[CopyIn]:
        """Begin the transaction of a table. It stays open unless the block fails."""
        target, connection = self._tables[table.name], self._connection
        target.require_usable()
        begin = _BEGIN.format(
            parallel=parallel_key(self._oid), table=table_key(self._oid, target.oid), role=set_role(target.role).sql.decode()
        )
        try:
            with CopyIn(connection, table.name, table.columns) as copying:
                await connection.execute(begin)
                yield copying
        except SubscriberError:
            await self.roll_back(table.name)
            raise
        self._copied = target

    async def compared(self, table: PublishedTable) -> TargetRows:
        """Begin to reconcile a table. See :meth:`subscriber.interfaces.ReconcilingTableGroup.compared`."""
        target = self._tables[table.name]
        if self._compares is None:
            # the settings of READING: both servers must write the same texts
            self._compares = await self._target.connect(self._application_name, READING)
        connection = self._compares
        query, fetch = partial(run_query, connection), partial(fetch_rows, connection)
        map_relation(described_relation(table), target)
        await become(connection, None)
        if not self._alone:
            # of all tables at once. If one of them is shared, each is synchronized alone
            await SubscriptionRows(PostgresRows(fetch, lambda _: "%s"), self._oid).require_alone(list(self._tables))
            self._alone = True
        fires = await first_firing(fetch, [target.name], lambda _: "%s")
        async with self._begun(table) as copying:
            await become(connection, target.role)
            if fires is not None and await query(f"SELECT 1 FROM {target.scanned} LIMIT 1"):  # noqa: S608
                raise fires.fires_for_replaced(target.name)
        self._replaced = copying, ReplacedRows(self._connection, copying, target, table.columns, kept="")
        return TargetRows([query])

    async def replace(self, replacements: Sequence[Replacement], columns: Sequence[str], copy_format: CopyFormat) -> None:
        """Replace rows in the table's transaction. See :meth:`subscriber.interfaces.ReplacingSink.replace`."""
        if self._replaced is None:
            raise TargetError("no table was compared whose rows could be replaced")
        copying, rows = self._replaced
        with copying:
            await rows.replace(replacements, copy_format)
            crash_points.reached("reconcile.rows_written")

    async def finish(self, tables: Mapping[TableName, Lsn]) -> None:
        copied, connection = self._copied, self._connection
        if copied is None:
            raise TargetError("no table was copied that could be finished")
        lsn = tables[copied.name]
        oid, fingerprint, _ = copied.fingerprint
        finish = _FINISH.format(lsn=lsn, oid=self._oid, relid=oid, fingerprint=fingerprint, fence=self._fenced)
        try:
            with translated():
                await connection.execute(finish)
        except asyncio.CancelledError:
            connection.terminate()
            raise
        except TargetError as error:
            error.add_note(f'while finishing the copy of table "{copied.name}"')
            await self.roll_back(copied.name)
            raise
        self._copied = self._replaced = None

    async def roll_back(self, table: TableName) -> None:
        """Roll back the table's transaction. Idempotent. A session that does not answer is terminated."""
        self._copied = self._replaced = None
        reader = self._reader
        if reader is None or reader.connection.is_closed():
            return
        try:
            with translated():
                await reader.connection.execute("ROLLBACK")
        except TargetError:
            reader.connection.terminate()

    async def close(self) -> None:
        """Roll back, drop the origin, disconnect. Idempotent."""
        reader, self._reader = self._reader, None
        try:
            if reader is not None and not reader.connection.is_closed() and self._origin_of is not None:
                # if this fails, the next start drops the origin
                with contextlib.suppress(TargetError, TimeoutError, asyncpg.InterfaceError):
                    async with asyncio.timeout(ANSWER_SECONDS):
                        run = catalog_run(reader.connection)
                        await run("ROLLBACK")
                        await run("SELECT pg_catalog.pg_replication_origin_session_reset()")
                        await drop_origins(run, self._oid, self._origin_of, parts_only=True, wait=False)
        finally:
            # also after a cancellation
            if reader is not None:
                reader.connection.terminate()
            if self._compares is not None:
                await self._compares.close()
