"""The targets of the crash points. A pickled copy of each makes the sinks in the processes; it reads no rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from subscriber.abc import Sink
from subscriber.config import Settings, SubscriptionOptions
from subscriber.sinks.postgres.sink import PostgresSink
from subscriber.testing.crash_points import CrashTarget
from tests.sinks.targets import MemoryAdapter, PostgresTarget, SqliteTarget
from tests.support.database import Database

OPTIONS = SubscriptionOptions(synchronous_commit="on")


class CrashSqlite(SqliteTarget):
    """SQLite."""

    def left_behind(self) -> list[str]:
        return _of_catalog(lambda query: [row[0] for row in self._execute(query)])


def _of_catalog(fetch: Callable[[str], list[Any]]) -> list[str]:
    tables = ("subscriber_prepared_transaction", "subscriber_prepared_transaction_chunk")
    return [f"rows are left in {table}" for table in tables if fetch(f"SELECT count(*) FROM {table}") != [0]]


class CrashPostgres(PostgresTarget):
    """PostgreSQL."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._dsn = database.dsn

    def __getstate__(self) -> dict[str, object]:
        return {"_dsn": self._dsn}

    def new_sink(self) -> Sink:
        return PostgresSink(self._dsn, options=OPTIONS, settings=Settings())

    def left_behind(self) -> list[str]:
        found = []
        for what, query in {
            "prepared transactions": "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()",
            "rows of prepared transactions": "SELECT count(*) FROM subscriber.prepared_transaction",
            "parts of copies": "SELECT count(*) FROM subscriber.copy_part",
            "positions of tables": 'SELECT count(*) FROM subscriber."position" WHERE srrelid <> 0',
        }.items():
            if number := self._database.fetch(query)[0][0]:
                found.append(f"{what} are left: {number}")
        return found


class CrashMemory(MemoryAdapter):
    """Memory: in the process of the test."""

    def cut(self) -> None:
        self._target.sever()


_MAKERS: Final[Mapping[str, Callable[[pytest.FixtureRequest], CrashTarget]]] = {
    "memory": lambda _: CrashMemory(),
    "postgres": lambda request: CrashPostgres(request.getfixturevalue("target_db")),
    "sqlite": lambda request: CrashSqlite(_directory(request) / "replica.db"),
}
SINKS: Final = tuple(_MAKERS)


def _directory(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue("tmp_path")
    return found


def make_target(sink: str, request: pytest.FixtureRequest) -> CrashTarget:
    """A new, empty target of one of :data:`SINKS`."""
    return _MAKERS[sink](request)
