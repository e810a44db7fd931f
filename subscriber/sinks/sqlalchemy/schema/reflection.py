"""Tables of the target as they are."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from sqlalchemy import Column, Connection, Inspector, MetaData, Table, bindparam, inspect, text
from sqlalchemy.exc import NoSuchTableError, SAWarning
from sqlalchemy.ext.asyncio import AsyncConnection

from subscriber.interfaces import TableName
from subscriber.sinks.sqlalchemy.schema.names import identifier, target_name
from subscriber.sinks.sqlalchemy.schema.sqlite_reflection import SqliteTable, sqlite_tables

__all__ = ["ReflectedTable", "reflect", "reflect_all"]

_ALL_CHARACTERS: Final = frozenset({"utf8mb4", "utf16", "utf16le", "utf32", "gb18030", "binary"})
_EXACT_COLLATIONS: Final = ("_nopad_bin", "_0900_bin")


@dataclass(frozen=True, slots=True, eq=False)
class ReflectedTable:
    """The definition of a table, from the target's system catalog.

    Attributes:
        table: columns with their types; no keys.
        generated: names of generated columns.
        not_null: names of NOT NULL columns.
        required: names of NOT NULL columns without a default, for which an INSERT must have a value.
        keys: column names of the primary key, first, and of unique constraints and indexes over NOT NULL columns. (SQLite's primary key may
            hold NULL.)
        autoincrement: whether a column gets numbers from a counter of the table.
        inexact: names of text columns whose collation makes different texts equal; on SQLite only columns of unique indexes with another
            collation than BINARY.
        engine: MySQL's storage engine, in lower case; None for other databases.
        character_sets: the character sets of MySQL's text columns that lack some characters, by column.
    """

    table: Table
    generated: frozenset[str] = frozenset()
    not_null: frozenset[str] = frozenset()
    required: frozenset[str] = frozenset()
    keys: tuple[tuple[str, ...], ...] = ()
    autoincrement: bool = False
    inexact: frozenset[str] = field(default=frozenset())
    engine: str | None = None
    character_sets: Mapping[str, str] = field(default_factory=dict)


async def reflect(connection: AsyncConnection, name: TableName) -> ReflectedTable | None:
    """Look the table up that a publisher's table goes to; None if it is not there. Reads only."""
    return (await reflect_all(connection, [name])).get(name)


async def reflect_all(connection: AsyncConnection, names: Collection[TableName]) -> dict[TableName, ReflectedTable]:
    """Those of the tables that are there. The target is asked about all of them at once, except by MySQL's SHOW CREATE TABLE."""
    places = {name: target_name(name) for name in names}
    if connection.dialect.name == "sqlite":
        return await connection.run_sync(_sqlite, places)
    return await connection.run_sync(_inspected, places)


Places = Mapping[TableName, str]
"""The name of each table in the target."""


def _sqlite(connection: Connection, places: Places) -> dict[TableName, ReflectedTable]:
    there = sqlite_tables(connection, set(places.values()))
    # a quoted_name stays as it is when it is asked for in lower case
    found = {name: (table, there.get(str(table).lower())) for name, table in places.items()}
    return {name: _of_sqlite(table, facts) for name, (table, facts) in found.items() if facts is not None}


def _of_sqlite(name: str, found: SqliteTable) -> ReflectedTable:
    not_null = frozenset(found.not_null)
    if not found.primary_key_indexed:
        # any other primary key of SQLite takes NULL, unless it is NOT NULL, as it is in a STRICT table and in one WITHOUT ROWID
        not_null |= frozenset(found.primary_key)
    keys = _keys(found.primary_key, found.unique, not_null)
    return ReflectedTable(
        Table(name, MetaData(), *(Column(identifier(column), kind) for column, kind in found.types.items())),
        frozenset(found.generated),
        not_null,
        frozenset(found.required),
        keys,
        autoincrement="AUTOINCREMENT" in found.sql.upper(),
        inexact=frozenset(found.inexact),
    )


def _keys(primary_key: tuple[str, ...], unique: Iterable[tuple[str, ...]], not_null: frozenset[str]) -> tuple[tuple[str, ...], ...]:
    first = [primary_key] if primary_key else []
    return (*first, *sorted({each for each in unique if each and not_null.issuperset(each)}))


def _inspected(connection: Connection, places: Places) -> dict[TableName, ReflectedTable]:
    # a fresh inspector: nothing is remembered from before an ALTER TABLE
    inspector = inspect(connection)
    facts = _mysql_facts(connection, list(places.values())) if connection.dialect.name in _MYSQL else {}
    found = {}
    with warnings.catch_warnings():
        # "Did not recognize type": the type becomes NullType, which callers handle
        warnings.simplefilter("ignore", SAWarning)
        for name, table in places.items():
            with contextlib.suppress(NoSuchTableError):
                found[name] = _by_inspector(inspector, table, facts.get(str(table), _Facts()))
    return found


@dataclass(slots=True)
class _Facts:
    """What only MySQL's information_schema says of a table."""

    inexact: set[str] = field(default_factory=set)
    character_sets: dict[str, str] = field(default_factory=dict)
    engine: str | None = None


def _by_inspector(inspector: Inspector, name: str, facts: _Facts) -> ReflectedTable:
    columns = inspector.get_columns(name)
    primary_key = tuple(inspector.get_pk_constraint(name)["constrained_columns"])
    unique = [tuple(found["column_names"]) for found in inspector.get_unique_constraints(name)]
    indexes = [found for found in inspector.get_indexes(name) if found["unique"]]
    unique += [tuple(column or "" for column in found["column_names"]) for found in indexes if not found.get("expressions")]
    generated = frozenset(found["name"] for found in columns if found.get("computed") is not None)
    not_null = frozenset(found["name"] for found in columns if not found["nullable"]) | frozenset(primary_key)
    counted = frozenset(found["name"] for found in columns if found.get("autoincrement") is True)
    required = frozenset(found["name"] for found in columns if not found["nullable"] and found.get("default") is None)
    keys = _keys(primary_key, unique, not_null)
    return ReflectedTable(
        Table(name, MetaData(), *(Column(identifier(found["name"]), found["type"]) for found in columns)),
        generated,
        not_null,
        required - generated - counted,
        keys,
        autoincrement=bool(counted),
        inexact=frozenset(facts.inexact),
        engine=facts.engine,
        character_sets=facts.character_sets,
    )


_MYSQL: Final = frozenset({"mysql", "mariadb"})
_MYSQL_COLUMNS: Final = text("""
    SELECT table_name, column_name, collation_name, character_set_name FROM information_schema.columns
     WHERE table_schema = DATABASE() AND table_name IN :names AND collation_name IS NOT NULL
""").bindparams(bindparam("names", expanding=True))
_MYSQL_ENGINES: Final = text("""
    SELECT table_name, engine FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name IN :names
""").bindparams(bindparam("names", expanding=True))


def _mysql_facts(connection: Connection, tables: Sequence[str]) -> dict[str, _Facts]:
    # by the names as they were asked for: the server may keep them in lower case
    names = [str(table) for table in tables]
    asked = {name.lower(): name for name in names} | {name: name for name in names}
    facts = {name: _Facts() for name in names}
    for table, column, collation, characters in connection.execute(_MYSQL_COLUMNS, {"names": names}):
        found = facts.get(asked.get(str(table), ""))
        if found is not None:
            if not str(collation).endswith(_EXACT_COLLATIONS):
                found.inexact.add(str(column))
            if str(characters) not in _ALL_CHARACTERS:
                found.character_sets[str(column)] = str(characters)
    for table, engine in connection.execute(_MYSQL_ENGINES, {"names": names}):
        if str(table) in asked and engine is not None:
            facts[asked[str(table)]].engine = str(engine).lower()
    return facts
