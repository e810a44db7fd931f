"""Sessions that read the target in one snapshot.

The databases of this sink export no snapshots. So every session begins its own one, while no transaction of the subscription is applied.
SQLite, MariaDB and MySQL have such snapshots. Of other databases that is not known: there each query is a transaction of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, Self

from sqlalchemy import Select, and_, or_, select, type_coerce
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.types import NullType

from subscriber.errors import RelationError
from subscriber.interfaces import PublishedTable
from subscriber.sinks.sqlalchemy.schema.converters import Family, family_of
from subscriber.sinks.sqlalchemy.schema.target_table import TargetTable, in_range, load_target_table
from subscriber.sinks.sqlalchemy.session.database import Database
from subscriber.sinks.sqlalchemy.session.database_errors import translated
from subscriber.sinks.sqlalchemy.session.session import Session
from subscriber.types.codec import READ_ERRORS

__all__ = ["SnapshotSessions", "SnapshotTable"]

_FETCH_ROWS: Final = 2000
_BEGIN: Final = {
    # the snapshot is that of the first query
    "sqlite": ("SELECT count(*) FROM sqlite_schema",),
    "mysql": ("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ", "START TRANSACTION WITH CONSISTENT SNAPSHOT"),
}
_BEGIN["mariadb"] = _BEGIN["mysql"]


class SnapshotSessions:
    """The sessions. :meth:`open` connects them.

    Args:
        database: the target.
        sessions: with it.
        stack: ends the snapshots.
    """

    def __init__(self, database: Database, sessions: Sequence[Session], stack: contextlib.AsyncExitStack) -> None:
        self._database = database
        self._sessions = sessions
        self._stack = stack
        self._free = list(sessions)
        self._turns = asyncio.Semaphore(len(sessions))

    @property
    def has_snapshots(self) -> bool:
        """Whether :meth:`begin` takes snapshots. Otherwise each query sees what was committed before it."""
        return self._database.dialect_name in _BEGIN

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, url: str, jobs: int) -> AsyncIterator[Self]:
        """Connect.

        Raises:
            TargetUnavailable, TargetError
        """
        async with Database(url, create=False) as database, contextlib.AsyncExitStack() as stack:
            sessions = []
            for _ in range(jobs):
                session = await database.connect()
                stack.push_async_callback(session.close)
                sessions.append(session)
            yield cls(database, sessions, stack)

    async def begin(self) -> None:
        """Take the snapshots. Nothing may be applied meanwhile.

        Raises:
            TargetUnavailable, TargetError
        """
        for session in self._sessions if self.has_snapshots else ():
            connection = await self._stack.enter_async_context(session.snapshot())
            with translated():
                for statement in _BEGIN[self._database.dialect_name]:
                    await connection.exec_driver_sql(statement)

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[AsyncConnection]:
        """Use a free session."""
        async with self._turns:
            session = self._free.pop()
            try:
                async with contextlib.nullcontext(session.connection) if session.busy else session.snapshot() as connection:
                    with translated():
                        yield connection
            finally:
                self._free.append(session)

    async def table(self, published: PublishedTable, key: Sequence[str]) -> SnapshotTable:
        """Find a published table.

        Args:
            published: the table.
            key: the columns by which :meth:`SnapshotTable.rows_by_key` finds rows.

        Raises:
            RelationError: the target does not have it, or lacks a column.
        """
        async with self.connection() as connection:
            target = await load_target_table(connection, published)
        target.require_complete()
        return SnapshotTable(self, target, [published.columns.index(name) for name in key], self._database.dialect_name)


class SnapshotTable:
    """See :class:`subscriber.interfaces.RowSource`.

    Args:
        sessions: read it.
        target: the table.
        key: numbers of the columns by which rows are found.
        dialect: the kind of database.
    """

    def __init__(self, sessions: SnapshotSessions, target: TargetTable, key: Sequence[int], dialect: str) -> None:
        self._sessions = sessions
        self._target = target
        self._key = key
        self._dialect = dialect

    def is_integer(self, number: int) -> bool:
        """Whether a column holds integers, which are sorted as in PostgreSQL."""
        column = self._target.columns[number].column
        return column is not None and family_of(column.type, self._dialect) is Family.INTEGER

    def _query(self) -> Select[Any]:
        # NullType: SQLAlchemy converts nothing
        columns: list[Any] = [type_coerce(plan.column, NullType()) for plan in self._target.columns]
        query: Select[Any] = select(*columns)
        return query.select_from(self._target.table)

    async def rows(self, column: str | None, low: int | None, high: int | None) -> AsyncIterator[Sequence[Sequence[object]]]:
        query = self._query()
        if column is not None:
            query = query.where(in_range(self._target.table.c[column], low, high))
        async with self._sessions.connection() as connection:
            result = await connection.stream(query)
            async for part in result.partitions(_FETCH_ROWS):
                yield part

    async def rows_by_key(self, keys: Sequence[Sequence[str]]) -> Sequence[Sequence[object]]:
        conditions, parameters = [], {}
        for count, key in enumerate(keys):
            each = []
            for number, value in zip(self._key, key, strict=True):
                name = f"k{count}_{number}"
                try:
                    parameters[name] = self._target.columns[number].text(value.encode())
                except READ_ERRORS as error:
                    raise RelationError(f"a key cannot be a value of the target's column: {type(error).__name__}") from None
                each.append(self._target.columns[number].matches(name))
            conditions.append(and_(*each))
        async with self._sessions.connection() as connection:
            result = await connection.execute(self._query().where(or_(*conditions)), parameters)
            return [tuple(row) for row in result]
