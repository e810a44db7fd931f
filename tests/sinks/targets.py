"""The targets that the compliance suite runs over: each creates tables and reads rows by its own driver, never through the sink."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from psycopg import sql

from subscriber.config import Settings, SubscriptionOptions
from subscriber.interfaces import Sink
from subscriber.sinks.memory import MemoryColumn, MemorySink, MemoryTarget
from subscriber.sinks.postgres.sink import PostgresSink
from subscriber.sinks.sqlalchemy.sink import SqlAlchemySink
from subscriber.testing.compliance import ColumnDefinition, Row, Table, Traits, TypeName
from subscriber.testing.compliance.sample_messages import TYPE_OIDS
from subscriber.types import TypeRegistry, Value, codec
from tests.support.database import Database
from tests.support.mariadb_database import MariaDatabase

OPTIONS: Final = SubscriptionOptions(synchronous_commit="local")

_SQLITE_TYPES: Final[Mapping[TypeName, str]] = {
    "bool": "BOOLEAN",
    "int2": "SMALLINT",
    "int4": "INTEGER",
    "int8": "BIGINT",
    "float8": "DOUBLE PRECISION",
    "bytea": "BLOB",
}
_MARIADB_TYPES: Final[Mapping[TypeName, str]] = {
    "bool": "BOOLEAN",
    "int2": "SMALLINT",
    "int4": "INTEGER",
    "int8": "BIGINT",
    "float8": "DOUBLE",
    "bytea": "LONGBLOB",
    "date": "DATE",
    "timestamp": "DATETIME(6)",
    "timestamptz": "DATETIME(6)",
}


def _values(table: Table, rows: Sequence[Row]) -> list[list[object]]:
    """Rows of texts as what a driver takes."""
    registry = TypeRegistry()
    codecs = [codec(registry.resolve(TYPE_OIDS[column.type])) for column in table.columns]
    return [
        [None if value is None else reading.value(str(value).encode(), binary=False) for reading, value in zip(codecs, row, strict=True)]
        for row in rows
    ]


class PostgresTarget:
    """The PostgreSQL sink."""

    traits = Traits()

    def __init__(self, database: Database) -> None:
        self._database = database
        database.execute("SET timezone = 'UTC'; SET datestyle = ISO; SET extra_float_digits = 3; SET bytea_output = hex")

    def new_sink(self) -> Sink:
        return self.new_sink_with_workers(1)

    def new_sink_with_workers(self, workers: int) -> Sink:
        return PostgresSink(self._database.dsn, options=OPTIONS, settings=Settings(apply_workers=workers))

    async def create_table(self, table: Table) -> None:
        columns = [
            sql.SQL("{} {}{}{}").format(
                sql.Identifier(column.name),
                sql.SQL(column.type),
                sql.SQL("") if column.default is None else sql.SQL(" DEFAULT {}").format(column.default),
                sql.SQL(" NOT NULL" if column.not_null else ""),
            )
            for column in table.columns
        ]
        for kind, key in (("PRIMARY KEY", _key(table)), ("UNIQUE", _unique(table))):
            if key:
                columns.append(sql.SQL(kind) + sql.SQL(" ({})").format(sql.SQL(", ").join(map(sql.Identifier, key))))
        self._execute(sql.SQL("CREATE TABLE {} ({})").format(_pg_name(table), sql.SQL(", ").join(columns)))

    def _execute(self, query: sql.Composed, values: Sequence[object] | None = None) -> list[tuple[Any, ...]]:
        found = self._database._connection.execute(query, values)
        result = found.pgresult
        assert result is not None
        # as the server wrote them
        rows = [[result.get_value(row, column) for column in range(result.nfields)] for row in range(result.ntuples)]
        return [tuple(None if value is None else value.decode() for value in row) for row in rows]

    async def rows(self, table: Table) -> list[Row]:
        columns = sql.SQL(", ").join(sql.Identifier(column.name) for column in table.columns)
        return list(self._execute(sql.SQL("SELECT {} FROM {}").format(columns, _pg_name(table))))

    async def insert(self, table: Table, rows: Sequence[Row]) -> None:
        places = sql.SQL(", ").join(sql.SQL("%s::{}").format(sql.SQL(column.type)) for column in table.columns)
        columns = sql.SQL(", ").join(sql.Identifier(column.name) for column in table.columns)
        for row in rows:
            self._execute(sql.SQL("INSERT INTO {} ({}) VALUES ({})").format(_pg_name(table), columns, places), row)

    async def clear(self, table: Table) -> None:
        self._execute(sql.SQL("DELETE FROM {}").format(_pg_name(table)))


def _key(table: Table) -> list[str]:
    return [column.name for column in table.columns if column.key]


def _unique(table: Table) -> list[str]:
    return [column.name for column in table.columns if column.unique]


def _pg_name(table: Table) -> sql.Identifier:
    return sql.Identifier(table.name.namespace, table.name.name)


class SqliteTarget:
    """The SQLAlchemy sink on SQLite."""

    traits = Traits(any_key=True)

    def __init__(self, path: Path) -> None:
        self._path = path

    def new_sink(self) -> Sink:
        return self.new_sink_with(Settings(create_tables=False))

    def new_sink_with(self, settings: Settings) -> Sink:
        return SqlAlchemySink(f"sqlite:///{self._path}", options=OPTIONS, settings=settings)

    def _execute(self, query: str, values: Sequence[object] = ()) -> list[Row]:
        connection = sqlite3.connect(self._path, timeout=30)
        try:
            with connection:
                return connection.execute(query, values).fetchall()
        finally:
            connection.close()

    async def create_table(self, table: Table) -> None:
        self._execute(_create_table(table, _SQLITE_TYPES, "TEXT"))

    async def rows(self, table: Table) -> list[Row]:
        return self._execute(f"SELECT {_columns(table)} FROM {_quoted(table.name.name)}")

    async def insert(self, table: Table, rows: Sequence[Row]) -> None:
        places = ", ".join("?" for _ in table.columns)
        for row in _values(table, rows):
            self._execute(f"INSERT INTO {_quoted(table.name.name)} ({_columns(table)}) VALUES ({places})", row)

    async def clear(self, table: Table) -> None:
        self._execute(f"DELETE FROM {_quoted(table.name.name)}")


class MariaDBTarget:
    """The SQLAlchemy sink on MariaDB."""

    traits = Traits(any_key=True)

    def __init__(self, database: MariaDatabase) -> None:
        self._database = database

    def new_sink(self) -> Sink:
        return self.new_sink_with(Settings())

    def new_sink_with(self, settings: Settings) -> Sink:
        return SqlAlchemySink(self._database.url, options=OPTIONS, settings=settings)

    async def create_table(self, table: Table) -> None:
        self._database.execute(_create_table(table, _MARIADB_TYPES, "LONGTEXT", "`") + " ENGINE=InnoDB")

    async def rows(self, table: Table) -> list[Row]:
        return list(self._database.fetch(f"SELECT {_columns(table, '`')} FROM {_quoted(table.name.name, '`')}"))

    async def insert(self, table: Table, rows: Sequence[Row]) -> None:
        places = ", ".join("%s" for _ in table.columns)
        columns = _columns(table, "`").replace("%", "%%")
        for row in _values(table, rows):
            self._database.execute(f"INSERT INTO {_quoted(table.name.name, '`')} ({columns}) VALUES ({places})", row)

    async def clear(self, table: Table) -> None:
        self._database.execute(f"DELETE FROM {_quoted(table.name.name, '`')}")


class MemoryAdapter:
    """The memory sink."""

    traits = Traits()

    def __init__(self) -> None:
        self._target = MemoryTarget(create_tables=False)

    def new_sink(self) -> Sink:
        return MemorySink(self._target)

    def new_sink_with(self, settings: Settings) -> Sink:
        self._target.create_tables = bool(settings.create_tables)
        assert settings.schema_change != "follow"
        self._target.schema_change = settings.schema_change
        return self.new_sink()

    async def create_table(self, table: Table) -> None:
        columns = [MemoryColumn(column.name, not_null=column.not_null, default=_default(column)) for column in table.columns]
        self._target.create_table(table.name, columns, _key(table))

    async def rows(self, table: Table) -> list[Row]:
        return [tuple(row[column.name] for column in table.columns) for row in self._target.rows(table.name)]

    async def insert(self, table: Table, rows: Sequence[Row]) -> None:
        for row in _values(table, rows):
            values: dict[str, Any] = {column.name: value for column, value in zip(table.columns, row, strict=True)}
            self._target.table(table.name).insert(values)

    async def clear(self, table: Table) -> None:
        self._target.table(table.name).clear()


def _default(column: ColumnDefinition) -> Value | None:
    if column.default is None:
        return None
    return codec(TypeRegistry().resolve(TYPE_OIDS[column.type])).value(column.default.encode(), binary=False)


def _quoted(name: str, quote: str = '"') -> str:
    return f"{quote}{name.replace(quote, quote * 2)}{quote}"


def _columns(table: Table, quote: str = '"') -> str:
    return ", ".join(_quoted(column.name, quote) for column in table.columns)


def _create_table(table: Table, types: Mapping[TypeName, str], text: str, quote: str = '"') -> str:
    parts = []
    for column in table.columns:
        kind = types.get(column.type, text)
        if column.key and kind == "LONGTEXT":
            # no blank is added to what is compared
            kind = "VARCHAR(191) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin"
        default = "" if column.default is None else f" DEFAULT '{column.default}'"
        parts.append(f"{_quoted(column.name, quote)} {kind}{default}{' NOT NULL' if column.not_null else ''}")
    for constraint, key in (("PRIMARY KEY", _key(table)), ("UNIQUE", _unique(table))):
        if key:
            parts.append(f"{constraint} ({', '.join(_quoted(name, quote) for name in key)})")
    return f"CREATE TABLE {_quoted(table.name.name, quote)} ({', '.join(parts)})"
