"""The table in which conflicts are logged (:mod:`subscriber.sinks.conflict_log`). Times are in UTC, by the clock of this process."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from sqlalchemy import BigInteger, Boolean, Column, DateTime, Index, MetaData, String, Table, Text, delete, insert, inspect, select, text
from sqlalchemy.dialects import mysql
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.schema import CreateIndex, CreateTable

from subscriber.catalog.store import CATALOG_KEY
from subscriber.errors import ConfigurationError, TargetError
from subscriber.interfaces import TableName
from subscriber.sinks.conflict_log import COLUMNS, LoggedConflict, Retention, other_columns
from subscriber.sinks.sqlalchemy.schema.names import target_name
from subscriber.sinks.sqlalchemy.session.database import Database
from subscriber.sinks.sqlalchemy.session.database_errors import translated
from subscriber.sinks.sqlalchemy.session.locks import Locks

__all__ = ["ConflictLog", "as_json"]

_TIME: Final = DateTime().with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
_JSON: Final = Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
_NAME: Final = String(63)
_TYPES: Final[Mapping[str, Any]] = {
    "logged_at": _TIME,
    "conflict": String(40),
    "rule": String(40),
    "applied": Boolean(),
    "xid": BigInteger(),
    "lsn": String(17),
    "commit_time": _TIME,
    "key": _JSON,
    "local_row": _JSON,
    "remote_row": _JSON,
}
_ENGINE: Final = text("SELECT engine FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = :name")
_SINCE: Final = datetime(2000, 1, 1)  # noqa: DTZ001 -- all times are in UTC


class ConflictLog:
    """The table.

    Args:
        table: its name in the options.
        rows: whether it also gets the rows.
        retention: how long its rows are kept, in seconds; 0: for ever.

    Attributes:
        name: of the table in the target.
        rows: as given.
    """

    def __init__(self, table: TableName, *, rows: bool, retention: float) -> None:
        name = target_name(table)
        self.name = str(name)
        columns = [Column(column, _TYPES.get(column, _NAME), nullable=column != "logged_at") for column in COLUMNS]
        self._table = Table(name, MetaData(), *columns, mysql_charset="utf8mb4", mariadb_charset="utf8mb4")
        self._index = Index(f"{name}_logged_at", self._table.c.subscription, self._table.c.logged_at)
        self.rows = rows
        self._retention = Retention(retention)
        self._subscription = ""

    async def refused(self, connection: AsyncConnection) -> ConfigurationError | None:
        """Return why the table cannot be used, or None. It may be missing.

        Raises:
            TargetError: or a subclass.
        """
        found = await connection.run_sync(_columns, self._table.name)
        wrong = [] if found is None else sorted({*COLUMNS} ^ {*found})
        quote = connection.dialect.identifier_preparer.quote
        rename = f"ALTER TABLE {quote(self._table.name)} RENAME TO {quote(f'{self._table.name}_other')}"
        if wrong:
            return other_columns(self.name, wrong, rename)
        if found is not None and connection.dialect.name in {"mysql", "mariadb"}:
            engine = str((await connection.execute(_ENGINE, {"name": self.name})).scalar() or "").lower()
            if engine != "innodb":
                # a row would stay there if its transaction is rolled back
                return ConfigurationError(
                    f'table "{self.name}" of the target, the log of conflicts, has storage engine {engine}, which has no transactions',
                    hint=f"ALTER TABLE {quote(self._table.name)} ENGINE = InnoDB",
                )
        return None

    async def open(self, database: Database, subscription: str) -> None:
        """Create the table if it does not exist.

        Raises:
            ConfigurationError: it cannot be used.
            TargetError: it cannot be created.
        """
        self._subscription = subscription
        async with database.reading() as connection:
            if (refused := await self.refused(connection)) is not None:
                raise refused
            if await connection.run_sync(_columns, self._table.name) is not None:
                return
        locks = Locks(database)
        try:
            await locks.take(CATALOG_KEY, "the log of conflicts")
            async with database.writing() as connection:
                if await connection.run_sync(_columns, self._table.name) is None:
                    await connection.execute(CreateTable(self._table))
                    await connection.execute(CreateIndex(self._index))
        finally:
            await locks.close()

    async def write(self, connection: AsyncConnection, conflicts: Sequence[LoggedConflict]) -> None:
        """Write conflicts in the open transaction, and remove some old rows.

        Raises:
            TargetError: or a subclass.
        """
        try:
            with translated():
                await self._write(connection, conflicts)
        except TargetError as error:
            error.add_note(f'while writing into table "{self.name}" of the target, the log of conflicts')
            raise

    async def _write(self, connection: AsyncConnection, conflicts: Sequence[LoggedConflict]) -> None:
        now, log = datetime.now(UTC).replace(tzinfo=None), self._table.c
        if most := self._retention.most(len(conflicts)):
            old = (log.subscription == self._subscription, log.logged_at < now - timedelta(seconds=self._retention.seconds))
            last = select(log.logged_at).where(*old).order_by(log.logged_at).limit(1).offset(most)
            until = (await connection.execute(last)).scalar()
            some = () if until is None else (log.logged_at <= until,)
            await connection.execute(delete(self._table).where(*old, *some))
        await connection.execute(insert(self._table), [self._values(each, now) for each in conflicts])

    def _values(self, each: LoggedConflict, now: datetime) -> dict[str, object]:
        values = (
            now,
            self._subscription,
            each.table and each.table.namespace,
            each.table and each.table.name,
            each.conflict,
            each.rule,
            each.applied,
            each.xid,
            None if each.lsn is None else str(each.lsn),
            None if each.commit_time is None else _SINCE + timedelta(microseconds=each.commit_time),
            *(None if found is None else found.decode() for found in (each.key, each.local_row, each.remote_row)),
        )
        return dict(zip(COLUMNS, values, strict=True))


def _columns(connection: Connection, table: str) -> list[str] | None:
    inspector = inspect(connection)
    return [column["name"] for column in inspector.get_columns(table)] if inspector.has_table(table) else None


def as_json(values: Iterable[tuple[str, object]]) -> bytes:
    """Columns as a JSON object. What JSON does not have is a text."""
    return json.dumps({name: _plain(value) for name, value in values}, ensure_ascii=False).encode(errors="replace")


def _plain(value: object) -> object:
    if isinstance(value, bytes | bytearray | memoryview):
        return "\\x" + bytes(value).hex()
    return value if value is None or isinstance(value, bool | int | str) else str(value)
