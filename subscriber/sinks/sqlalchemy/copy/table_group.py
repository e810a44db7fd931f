"""Several tables that are copied through one session: each by one transaction, from INIT straight to SYNCDONE.

The rows of a table are kept in memory until :meth:`SqlAlchemyTableGroup.finish`. While the publisher sends them, the target has no open
transaction, and SQLite's write lock is free. A table that is too large for that, or has rows already, leaves the group.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import literal, select
from sqlalchemy.ext.asyncio import AsyncConnection

from subscriber.catalog.subscription_rows import SubscriptionRows
from subscriber.errors import TargetError, TargetUnavailable
from subscriber.interfaces import CopyFormat, PublishedTable, TableEntry, TableName, TableState
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.sqlalchemy.apply.binding import bind_columns, copy_binds, picked
from subscriber.sinks.sqlalchemy.apply.multi_row import insert_rows
from subscriber.sinks.sqlalchemy.apply.statements import Statement, insert_row
from subscriber.sinks.sqlalchemy.catalog.rows import subscription_rows
from subscriber.sinks.sqlalchemy.schema.reflection import ReflectedTable, reflect_all
from subscriber.sinks.sqlalchemy.schema.target_table import TargetTable, plan_target_table
from subscriber.sinks.sqlalchemy.session.database import Database
from subscriber.sinks.sqlalchemy.session.database_errors import passing_values, translated
from subscriber.sinks.sqlalchemy.session.fence import Fence
from subscriber.sinks.sqlalchemy.session.session import Session
from subscriber.sinks.sqlalchemy.session.settings import short_waits
from subscriber.sinks.sqlalchemy.session.statement_size import BINARY_GROWS, limit_of
from subscriber.types import copy_decoder

__all__ = ["SqlAlchemyTableGroup"]

_MOST_BYTES: Final = 8 * 1024**2
"""How much of a table waits here; the publisher's own files of a group's table are half of it at most."""
_PIECE_ROWS: Final = 10_000


@dataclass(slots=True)
class _Copied:
    """A table whose rows wait for :meth:`SqlAlchemyTableGroup.finish`."""

    target: TargetTable
    statement: Statement
    rows: list[Any] = field(default_factory=list)
    size: int = 0


class SqlAlchemyTableGroup:
    """A :class:`subscriber.interfaces.TableGroup`.

    Args:
        database: the target.
        fence: of the sink.
        is_current: whether the sink is still open as it was then.
    """

    def __init__(self, database: Database, fence: Fence, is_current: Callable[[], bool]) -> None:
        self.at_once = 1
        self._database = database
        self._fence = fence
        self._is_current = is_current
        self._session: Session | None = None
        self._relids: dict[TableName, int] = {}
        self._tables: Mapping[TableName, ReflectedTable] = {}
        self._copied: _Copied | None = None

    @property
    def usable(self) -> bool:
        return self._session is not None and self._session.usable and self._is_current()

    @property
    def _usable_session(self) -> Session:
        if self._session is None or not self.usable:
            raise TargetUnavailable("the session of a group of tables was lost", hint="it is retried")
        return self._session

    def _rows(self, connection: AsyncConnection) -> SubscriptionRows:
        return subscription_rows(connection, self._fence.oid)

    async def begin(self, tables: Sequence[TableName]) -> Mapping[TableName, int]:
        self._session = await self._database.connect()
        async with self._session.snapshot() as connection:
            for statement in short_waits(connection.dialect.name):
                await connection.exec_driver_sql(statement)
            known = dict(await self._rows(connection).tables())
            waiting = [name for name in tables if name in known and known[name].entry.state is TableState.INIT]
            self._tables = await reflect_all(connection, waiting)
        self._relids = {name: known[name].relid for name in waiting if name in self._tables}
        return self._relids

    async def copy(self, table: PublishedTable, copy_format: CopyFormat, data: AsyncIterator[bytes]) -> None:
        dialect = self._usable_session.connection.dialect
        target = plan_target_table(self._tables[table.name], table, table, dialect.name)
        # columns are added, or left out, by the table's own synchronization
        target.require_complete()
        copied = _Copied(target, insert_row(target, dialect))
        binary = copy_format is CopyFormat.BINARY
        binds = copy_binds(target.columns, binary=binary)
        decoder = copy_decoder(len(table.columns), binary=binary)
        async for chunk in data:
            copied.size += len(chunk)
            if copied.size > _MOST_BYTES:
                raise TargetError(f'table "{table.name}" is too large to be copied with others')
            count, columns = decoder.columns(chunk)
            copied.rows += picked(bind_columns(binds, target.columns, columns), copied.statement.pick, count)
        decoder.finish()
        copied.size *= BINARY_GROWS if binary else 1
        self._copied = copied

    async def finish(self, tables: Mapping[TableName, Lsn]) -> None:
        copied, self._copied = self._copied, None
        if copied is None:
            raise TargetError("no table was copied that could be finished")
        name = copied.target.name
        try:
            async with self._usable_session.transaction() as connection:
                await self._fence.hold(connection)
                await self._store(connection, copied)
                entry = TableEntry(TableState.SYNCDONE, tables[name])
                stored = await self._rows(connection).set_entry(self._relids[name], entry, only_from=TableState.INIT, srcopy=None)
                if not stored or not self._is_current():
                    raise TargetError(f'table "{name}" is not in state INIT any more')
        except TargetError as error:
            error.add_note(f'while finishing the copy of table "{name}"')
            raise

    async def _store(self, connection: AsyncConnection, copied: _Copied) -> None:
        table = copied.target.table
        if (await connection.execute(select(literal(1)).select_from(table).limit(1))).first() is not None:
            raise TargetError(f'table "{copied.target.name}" has rows already')
        if not copied.rows:
            return
        statement = copied.statement
        with translated(), passing_values():
            for start in range(0, len(copied.rows), _PIECE_ROWS):
                rows = copied.rows[start : start + _PIECE_ROWS]
                for piece in limit_of(connection).pieces(statement.sql, rows, copied.size):
                    await insert_rows(connection, statement.sql, statement.many, piece)

    async def roll_back(self, table: TableName) -> None:
        """Nothing of the table stays: nothing was stored. Idempotent."""
        self._copied = None

    async def close(self) -> None:
        self._copied = None
        session, self._session = self._session, None
        if session is not None:
            await session.close()
