"""The targets of the crash points. A pickled copy of each makes the sinks in the processes; it reads no rows."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest

from subscriber.config import Settings, SubscriptionOptions
from subscriber.interfaces import Sink
from subscriber.sinks.postgres.sink import PostgresSink
from subscriber.sinks.spark.files.storage import TEMPORARY
from subscriber.sinks.spark.pipeline.applier_settings import ApplierSettings
from subscriber.sinks.spark.pipeline.engines.local_engine import LocalEngine
from subscriber.sinks.spark.pipeline.program import start
from subscriber.sinks.spark.sink import SparkSink
from subscriber.sinks.sqlalchemy.sink import SqlAlchemySink
from subscriber.testing.compliance import Table
from subscriber.testing.crash_points import CrashTarget
from tests.sinks.lakes import LakeTarget
from tests.sinks.targets import MariaDBTarget, MemoryAdapter, PostgresTarget, SqliteTarget
from tests.support.database import Database
from tests.support.mariadb_database import MariaDatabase

OPTIONS = SubscriptionOptions(synchronous_commit="on")


class CrashSqlite(SqliteTarget):
    """SQLite."""

    def left_behind(self) -> list[str]:
        return _of_catalog(lambda query: [row[0] for row in self._execute(query)])


class CrashMariaDB(MariaDBTarget):
    """MariaDB."""

    def __init__(self, database: MariaDatabase) -> None:
        super().__init__(database)
        self._url = database.url

    def __getstate__(self) -> dict[str, object]:
        return {"_url": self._url}

    def new_sink(self) -> Sink:
        return SqlAlchemySink(self._url, options=OPTIONS, settings=Settings(create_tables=False))

    def left_behind(self) -> list[str]:
        return _of_catalog(lambda query: [row[0] for row in self._database.fetch(query)])


def _of_catalog(fetch: Callable[[str], list[Any]]) -> list[str]:
    tables = ("subscriber_prepared_transaction", "subscriber_prepared_transaction_chunk", "subscriber_received_prepare")
    return [f"rows are left in {table}" for table in tables if fetch(f"SELECT count(*) FROM {table}") != [0]]


_DISK: Final = """
CREATE TABLE disk (is_full bool); INSERT INTO disk VALUES (false);
CREATE FUNCTION require_room() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF (SELECT is_full FROM public.disk) THEN
        RAISE EXCEPTION 'could not extend file "base/1/1": No space left on device' USING ERRCODE = 'disk_full';
    END IF;
    RETURN NULL;
END $$
"""
"""A full disk would stop the server, so its tables answer in place of it."""
_NEEDS_ROOM: Final = """
CREATE TRIGGER needs_room BEFORE INSERT OR UPDATE OR DELETE ON {0} FOR EACH STATEMENT EXECUTE FUNCTION require_room();
ALTER TABLE {0} ENABLE ALWAYS TRIGGER needs_room
"""


class CrashPostgres(PostgresTarget):
    """PostgreSQL."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._dsn = database.dsn
        database.execute(_DISK)

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

    def _set_disk(self, *, full: bool) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            connection.execute("UPDATE disk SET is_full = %s", [full])

    def fill_disk(self) -> None:
        self._set_disk(full=True)

    def free_disk(self) -> None:
        self._set_disk(full=False)


class CrashFullPostgres(CrashPostgres):
    """PostgreSQL, for cases with a full disk. Triggers change how rows are applied, so other cases have none."""

    async def create_table(self, table: Table) -> None:
        await super().create_table(table)
        self._database.execute(_NEEDS_ROOM.format(table.name.name))


class CrashLake(LakeTarget):
    """A lake, whose applier runs in the process of the sink."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, LocalEngine)

    def __getstate__(self) -> dict[str, object]:
        return {"_path": self._path}

    def new_sink(self) -> Sink:
        # so that landed files are soon removed
        vars(start)["ApplierSettings"] = functools.partial(ApplierSettings, log_files=1)
        url = f"spark://{self._path}?batch_delay=0&apply=local&freshness=100ms&target_rows=400"
        return SparkSink(url, options=SubscriptionOptions(), settings=Settings())

    def left_behind(self) -> list[str]:
        unfinished = [file for directory in ("landing", "copy") for file in (self._path / directory).rglob(f"{TEMPORARY}*")]
        prepared = list((self._path / "prepared").glob("*"))
        received = json.loads((self._path / "position.json").read_text())["document"]["received"]
        return [f"left behind: {path}" for path in (*(path.relative_to(self._path) for path in (*unfinished, *prepared)), *received)]


class CrashMemory(MemoryAdapter):
    """Memory: in the process of the test."""

    def cut(self) -> None:
        self._target.sever()


_MAKERS: Final[Mapping[str, Callable[[pytest.FixtureRequest], CrashTarget]]] = {
    "lake": lambda request: CrashLake(_directory(request) / "lake"),
    "mariadb": lambda request: CrashMariaDB(request.getfixturevalue("mariadb_db")),
    "memory": lambda _: CrashMemory(),
    "postgres_full": lambda request: CrashFullPostgres(request.getfixturevalue("target_db")),
    "postgres": lambda request: CrashPostgres(request.getfixturevalue("target_db")),
    "sqlite": lambda request: CrashSqlite(_directory(request) / "replica.db"),
}


def _directory(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue("tmp_path")
    return found


def make_target(sink: str, request: pytest.FixtureRequest) -> CrashTarget:
    """A new, empty target of this kind."""
    return _MAKERS[sink](request)
