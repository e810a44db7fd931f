"""A PostgreSQL server as the publisher of a case."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

from psycopg import sql

from subscriber.testing.crash_points.child import NAME
from subscriber.testing.crash_points.publisher import WAIT
from tests.support.database import Database

__all__ = ["PostgresCrashPublisher"]

_CONFIRMED: Final = f"SELECT COALESCE(max(confirmed_flush_lsn), '0/0') >= '{{lsn}}' FROM pg_replication_slots WHERE slot_name = '{NAME}'"
_RECEIVED: Final = f"""
SELECT COALESCE(max(r.write_lsn), '0/0') >= '{{lsn}}'
FROM pg_stat_replication AS r JOIN pg_replication_slots AS s ON s.active_pid = r.pid WHERE s.slot_name = '{NAME}'
"""


class PostgresCrashPublisher:
    """A :class:`subscriber.testing.crash_points.publisher.CrashPublisher`.

    Args:
        database: empty.
    """

    copied_rows = 800

    def __init__(self, database: Database) -> None:
        self._database = database
        database.execute(f"ALTER DATABASE {database.name} SET logical_decoding_work_mem = '64kB'")
        self._sessions = contextlib.ExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /) -> None:
        self._sessions.close()

    def dsn(self) -> str:
        return self._database.dsn

    def create_table(self, name: str, columns: Mapping[str, str], *, key: Sequence[str] = ()) -> None:
        described = [f"{column} {kind}" for column, kind in columns.items()]
        described += [f"PRIMARY KEY ({', '.join(key)})"] if key else []
        self._database.execute(f"CREATE TABLE {name} ({', '.join(described)})")
        for column in (column for column, kind in columns.items() if kind == "text"):
            # in the table itself, and not compressed, so that the large table is large
            self._database.execute(f"ALTER TABLE {name} ALTER {column} SET STORAGE PLAIN")

    def create_publication(self, name: str, *tables: str) -> None:
        self._database.execute(f"CREATE PUBLICATION {name} FOR TABLE {', '.join(tables)}")

    def transaction(self) -> PostgresTransaction:
        return PostgresTransaction(self._database, self._sessions)

    def rows(self, table: str) -> list[dict[str, str | None]]:
        columns = [
            name
            for (name,) in self._database.fetch(f"SELECT attname FROM pg_attribute WHERE attrelid = '{table}'::regclass AND attnum > 0")
        ]
        found = self._database.fetch(f"SELECT {', '.join(f'{name}::text' for name in columns)} FROM {table}")
        return [dict(zip(columns, row, strict=True)) for row in found]

    def slot_names(self) -> Collection[str]:
        return [name for (name,) in self._database.fetch("SELECT slot_name FROM pg_replication_slots WHERE database = current_database()")]

    def lose_aborts(self) -> None:
        """A server decides itself."""

    async def until_table_slot(self) -> None:
        slots = f"SELECT FROM pg_replication_slots WHERE database = current_database() AND NOT temporary AND slot_name <> '{NAME}'"
        await self._until(f"SELECT EXISTS ({slots})")

    async def until_two_phase(self) -> None:
        await self._until(f"SELECT EXISTS (SELECT FROM pg_replication_slots WHERE two_phase AND slot_name = '{NAME}')")

    async def until_received(self) -> None:
        # its commit flushes the WAL of open transactions
        self._database.execute("SELECT pg_logical_emit_message(true, '', '')")
        await self._until(_RECEIVED.format(lsn=self._database.current_lsn()))

    async def until_all_confirmed(self) -> None:
        await self._until(_CONFIRMED.format(lsn=self._database.current_lsn()))

    async def _until(self, query: str) -> None:
        await asyncio.to_thread(self._database.wait, query, True, WAIT)

    def cut(self) -> None:
        raise NotImplementedError("its targets run in processes of their own")


class PostgresTransaction:
    """A transaction in a session of its own. The block commits it."""

    def __init__(self, database: Database, sessions: contextlib.ExitStack) -> None:
        self._database = database
        self._session = sessions.enter_context(database.connect())
        self._session.execute("BEGIN")
        self._gid = ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /) -> None:
        if error is None:
            self.commit()
        else:
            self.rollback()

    def insert(self, table: str, rows: Sequence[Mapping[str, Any]] | None = None, /, **values: Any) -> None:
        given = [values] if rows is None else rows
        columns = list(given[0])
        places = sql.SQL(", ").join(sql.Placeholder(name) for name in columns)
        names = sql.SQL(", ").join(map(sql.Identifier, columns))
        query = sql.SQL("INSERT INTO {} ({}) VALUES ({})").format(sql.Identifier(table), names, places)
        with self._session.cursor() as cursor:
            cursor.executemany(query, given)

    def update(self, table: str, where: Mapping[str, Any], /, **values: Any) -> None:
        query = sql.SQL("UPDATE {} SET {} WHERE {}").format(sql.Identifier(table), _pairs(values, ", "), _pairs(where, " AND "))
        self._session.execute(query, {**values, **where})

    def delete(self, table: str, where: Mapping[str, Any], /) -> None:
        query = sql.SQL("DELETE FROM {} WHERE {}").format(sql.Identifier(table), _pairs(where, " AND "))
        self._session.execute(query, where)

    @contextlib.contextmanager
    def savepoint(self) -> Iterator[None]:
        self._session.execute("SAVEPOINT s")
        yield
        self._session.execute("RELEASE SAVEPOINT s")

    def rollback_savepoint(self) -> None:
        self._session.execute("ROLLBACK TO SAVEPOINT s")

    def commit(self) -> None:
        self._session.execute("COMMIT")
        self._session.close()

    def rollback(self) -> None:
        self._session.execute("ROLLBACK")
        self._session.close()

    def prepare(self, gid: str) -> None:
        # other databases of the server have prepared transactions too
        self._gid = f"{gid} of {self._database.name}"
        self._session.execute(sql.SQL("PREPARE TRANSACTION {}").format(self._gid))

    def commit_prepared(self) -> None:
        self._session.execute(sql.SQL("COMMIT PREPARED {}").format(self._gid))

    def rollback_prepared(self) -> None:
        self._session.execute(sql.SQL("ROLLBACK PREPARED {}").format(self._gid))


def _pairs(values: Mapping[str, Any], between: str) -> sql.Composed:
    return sql.SQL(between).join(sql.SQL("{} = {}").format(sql.Identifier(name), sql.Placeholder(name)) for name in values)
