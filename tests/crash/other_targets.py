"""What the crash tests of targets that are no PostgreSQL share: a look into the catalog there, and the proof at the end."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import pymysql

from subscriber.interfaces import TableName
from subscriber.sinks.sqlalchemy.catalog.inspection import TargetInspection
from subscriber.testing.comparison import compare, published_tables
from subscriber.testing.load.tables import SPECIMEN_NAMES, create_tables
from tests.crash.kills import SMALL
from tests.crash.process import QUICK, RunProcess
from tests.crash.scenario import ROWS
from tests.support.database import Database
from tests.support.mariadb_database import MariaDatabase


class TargetReader(Protocol):
    """Reads a target on its own session."""

    url: str

    def value(self, query: str) -> Any:
        """The first column of the first row; None where there is no row or no table, or where the target does not answer."""
        ...


class SqliteReader:
    """A file."""

    def __init__(self, path: Path) -> None:
        self.url = f"sqlite:///{path}"
        self._path = path

    def value(self, query: str) -> Any:
        if not self._path.exists():
            return None
        connection = sqlite3.connect(self._path, timeout=30)
        try:
            row = connection.execute(query).fetchone()
        except sqlite3.OperationalError as error:
            if "no such table" not in str(error):
                raise
            return None
        finally:
            connection.close()
        return None if row is None else row[0]


class MariaDBReader:
    """A database of MariaDB, whose server may be away."""

    def __init__(self, database: MariaDatabase) -> None:
        self.url = database.url
        self._database = database

    def value(self, query: str) -> Any:
        try:
            rows = self._database.fetch(query)
        except (pymysql.err.OperationalError, pymysql.err.InterfaceError):
            self._database.close()
            return None
        except pymysql.err.ProgrammingError as error:
            if error.args[0] != pymysql.constants.ER.NO_SUCH_TABLE:
                raise
            return None
        return rows[0][0] if rows else None


class OtherProcess(RunProcess):
    """One whose target is no PostgreSQL, and made by it: tables are created from the publication."""

    def __init__(self, publisher: Database, reader: TargetReader, directory: Path, settings: Sequence[str] = SMALL) -> None:
        super().__init__(publisher, reader.url, directory, ("two_phase=true",), (*QUICK, *settings, "create_tables=on"))
        self.reader = reader

    def has_catalog(self) -> bool:
        return self.reader.value("SELECT count(*) FROM subscriber_pg_subscription") is not None

    def states(self) -> str:
        found = self.reader.value("SELECT group_concat(srsubstate) FROM subscriber_pg_subscription_rel")
        return found or ""

    def holds_prepared(self) -> bool:
        return bool(self.reader.value("SELECT count(*) FROM subscriber_prepared_transaction"))

    def is_ready(self) -> bool:
        states = self.states()
        return (
            bool(states)
            and set(states) <= {"r", ","}
            and self.reader.value("SELECT subtwophasestate FROM subscriber_pg_subscription") == "e"
        )


async def make_publisher_tables(publisher: Database) -> None:
    """The load's tables, ``history`` and ``tags`` among them, which have no key and would show a row that came twice."""
    await create_tables(publisher.dsn, rows=ROWS)
    publisher.execute("CREATE PUBLICATION pub FOR TABLES IN SCHEMA load")


async def make_specimens_of_text(target_url: str) -> None:
    """``specimens`` has infinities, for which MariaDB's own types have no place: text columns are the documented remedy."""
    inspection = TargetInspection(target_url)
    try:
        await inspection.make_text_table(TableName("load", "specimens"), "id", SPECIMEN_NAMES.split(", "))
    finally:
        await inspection.close()


async def assert_same(process: OtherProcess) -> None:
    """The rows of all tables value by value, what is prepared, and that nothing temporary is left."""
    publisher = process.publisher
    found = await compare(publisher.dsn, process.target_url, await published_tables(publisher.dsn, ["pub"]))
    inspection = TargetInspection(process.target_url)
    try:
        prepared = await inspection.prepared_transactions()
    finally:
        await inspection.close()
    assert [table for table in found if not table.equal] == [], process.log()
    assert min(table.publisher_rows for table in found if table.table.name in {"accounts", "history"}) > 0
    expected = publisher.fetch("SELECT transaction::text::int8 FROM pg_prepared_xacts WHERE database = current_database()")
    assert prepared == {xid for (xid,) in expected}
    assert publisher.fetch("SELECT slot_name FROM pg_replication_slots WHERE database = current_database()") == [(process.name,)]
    assert process.reader.value("SELECT count(*) FROM subscriber_position WHERE srrelid <> 0") == 0
    if not expected:
        assert process.reader.value("SELECT count(*) FROM subscriber_prepared_transaction_chunk") == 0
    assert list(process.spool.iterdir()) == []
    assert process.conflicts() == []
