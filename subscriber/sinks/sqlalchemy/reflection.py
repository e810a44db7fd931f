"""A table of the target as it is."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import Column, Connection, MetaData, Table, inspect, text
from sqlalchemy.exc import NoSuchTableError, SAWarning
from sqlalchemy.ext.asyncio import AsyncConnection

from subscriber.abc import TableName
from subscriber.sinks.sqlalchemy.named_type import MODIFIER, NamedType
from subscriber.sinks.sqlalchemy.names import identifier, target_name

__all__ = ["ReflectedTable", "reflect"]

_ALL_CHARACTERS: Final = frozenset({"utf8mb4", "utf16", "utf16le", "utf32", "gb18030", "binary"})
_EXACT_COLLATIONS: Final = ("_nopad_bin", "_0900_bin")


@dataclass(frozen=True, slots=True, eq=False)
class ReflectedTable:
    """What the target's catalog says of a table.

    Attributes:
        table: columns with their types; no keys.
        generated: names of columns that the target computes.
        not_null: names of columns that are NOT NULL.
        required: of those, the ones that an INSERT has to name: there is no default.
        keys: column names of the primary key, first, and of unique constraints and indexes over NOT NULL columns. (SQLite's primary key may
            hold NULL.)
        has_primary_key: whether the first of ``keys`` is the primary key.
        autoincrement: whether a column draws numbers from a sequence or counter of the table.
        inexact: names of text columns whose collation takes texts for equal that are not; of SQLite, those in a unique key that does.
        engine: MySQL's storage engine, in lower case; None elsewhere.
        character_sets: of text columns of MySQL whose character set does not have every character.
        otherwise_unique: whether rows may be equal under a unique key, of columns or expressions, and not under the first of ``keys``.
    """

    table: Table
    generated: frozenset[str] = frozenset()
    not_null: frozenset[str] = frozenset()
    required: frozenset[str] = frozenset()
    keys: tuple[tuple[str, ...], ...] = ()
    has_primary_key: bool = False
    autoincrement: bool = False
    inexact: frozenset[str] = field(default=frozenset())
    engine: str | None = None
    otherwise_unique: bool = False
    character_sets: Mapping[str, str] = field(default_factory=dict)


async def reflect(connection: AsyncConnection, name: TableName) -> ReflectedTable | None:
    """Look the table up that a publisher's table goes to; None if it is not there. Reads only."""
    schema, table_name = target_name(name, connection.dialect.name)
    if connection.dialect.name == "postgresql":
        return await _postgresql(connection, schema or "", table_name)
    return await connection.run_sync(_inspected, schema, table_name)


def _inspected(connection: Connection, schema: str | None, name: str) -> ReflectedTable | None:
    # a fresh inspector: nothing is remembered from before an ALTER TABLE
    inspector = inspect(connection)
    with warnings.catch_warnings():
        # "Did not recognize type": it becomes NullType, and is judged as such
        warnings.simplefilter("ignore", SAWarning)
        try:
            columns = inspector.get_columns(name, schema=schema)
        except NoSuchTableError:
            return None
        primary_key = tuple(inspector.get_pk_constraint(name, schema=schema)["constrained_columns"])
        unique = [tuple(found["column_names"]) for found in inspector.get_unique_constraints(name, schema=schema)]
        indexes = [found for found in inspector.get_indexes(name, schema=schema) if found["unique"]]
        unique += [tuple(column or "" for column in found["column_names"]) for found in indexes if not _partial(found)]
    table = Table(name, MetaData(), *(Column(identifier(found["name"]), found["type"]) for found in columns), schema=schema)
    generated = frozenset(found["name"] for found in columns if found.get("computed") is not None)
    not_null = frozenset(found["name"] for found in columns if not found["nullable"])
    if connection.dialect.name != "sqlite" or _is_rowid(connection, name):
        not_null |= frozenset(primary_key)
    counted = frozenset(found["name"] for found in columns if found.get("autoincrement") is True)
    required = frozenset(found["name"] for found in columns if not found["nullable"] and found.get("default") is None)
    keys = [primary_key] if primary_key else []
    keys += sorted({each for each in unique if each and not_null.issuperset(each)})
    inexact, engine, character_sets = _collations(connection, name)
    return ReflectedTable(
        table,
        generated,
        not_null,
        required - generated - counted,
        tuple(keys),
        has_primary_key=bool(primary_key),
        autoincrement=bool(counted) or _sqlite_autoincrement(connection, name),
        inexact=inexact,
        engine=engine,
        character_sets=character_sets,
        otherwise_unique=any(map(_partial, indexes)) or any(not set(keys[0]) <= set(each) for each in unique if keys),
    )


def _partial(index: Mapping[str, Any]) -> bool:
    return bool(index.get("dialect_options", {}).get("sqlite_where") is not None or index.get("expressions"))


def _is_rowid(connection: Connection, name: str) -> bool:
    # any other primary key of SQLite takes NULL, unless it is NOT NULL, as it is in a STRICT table and in one WITHOUT ROWID
    found = connection.execute(text("SELECT 1 FROM pragma_index_list(:name) WHERE origin = 'pk'"), {"name": name})
    return found.first() is None


def _sqlite_autoincrement(connection: Connection, name: str) -> bool:
    if connection.dialect.name != "sqlite":
        return False
    found = connection.execute(text("SELECT sql FROM sqlite_master WHERE type = 'table' AND name = :name"), {"name": name}).scalar()
    return "AUTOINCREMENT" in str(found).upper()


def _collations(connection: Connection, name: str) -> tuple[frozenset[str], str | None, Mapping[str, str]]:
    match connection.dialect.name:
        case "mysql" | "mariadb":
            return _mysql_facts(connection, name)
        case "sqlite":
            found = connection.execute(_SQLITE_INEXACT, {"name": name})
            return frozenset(str(column) for (column,) in found), None, {}
        case _:
            return frozenset(), None, {}


_SQLITE_INEXACT: Final = text("""
    SELECT part.name
      FROM pragma_index_list(:name) AS found, pragma_index_xinfo(found.name) AS part
     WHERE found."unique" AND part."key" AND part.cid >= 0 AND upper(part.coll) <> 'BINARY'
""")


def _mysql_facts(connection: Connection, name: str) -> tuple[frozenset[str], str | None, Mapping[str, str]]:
    found = connection.execute(
        text(
            "SELECT column_name, collation_name, character_set_name FROM information_schema.columns "
            "WHERE table_schema = DATABASE() AND table_name = :name AND collation_name IS NOT NULL"
        ),
        {"name": name},
    )
    columns = [tuple(map(str, row)) for row in found]
    inexact = frozenset(column for column, collation, _ in columns if not collation.endswith(_EXACT_COLLATIONS))
    narrow = {column: characters for column, _, characters in columns if characters not in _ALL_CHARACTERS}
    engine = connection.execute(
        text("SELECT engine FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = :name"), {"name": name}
    ).scalar()
    return inexact, None if engine is None else str(engine).lower(), narrow


_COLUMNS: Final = text("""
    SELECT a.attname::text, n.nspname::text, t.typname::text, a.attnotnull, a.attgenerated <> '', a.attidentity <> '',
           a.atthasdef OR a.attidentity <> '', a.atttypmod
      FROM pg_catalog.pg_class AS c
      JOIN pg_catalog.pg_namespace AS s ON s.oid = c.relnamespace
      JOIN pg_catalog.pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
      JOIN pg_catalog.pg_type AS t ON t.oid = a.atttypid
      JOIN pg_catalog.pg_namespace AS n ON n.oid = t.typnamespace
     WHERE s.nspname = CAST(:schema AS text) AND c.relname = CAST(:name AS text) AND c.relkind IN ('r', 'p')
     ORDER BY a.attnum
""")

_KEYS: Final = text("""
    SELECT i.indisprimary, ARRAY(SELECT a.attname::text
                                   FROM pg_catalog.unnest(i.indkey::int2[]) WITH ORDINALITY AS part (attnum, place)
                                   JOIN pg_catalog.pg_attribute AS a ON a.attrelid = c.oid AND a.attnum = part.attnum
                                  WHERE part.place <= i.indnkeyatts
                                  ORDER BY part.place)
      FROM pg_catalog.pg_class AS c
      JOIN pg_catalog.pg_namespace AS s ON s.oid = c.relnamespace
      JOIN pg_catalog.pg_index AS i ON i.indrelid = c.oid
     WHERE s.nspname = CAST(:schema AS text) AND c.relname = CAST(:name AS text)
       AND i.indisunique AND i.indisvalid AND i.indpred IS NULL AND i.indexprs IS NULL AND i.indimmediate
     ORDER BY i.indisprimary DESC, i.indexrelid
""")


async def _postgresql(connection: AsyncConnection, schema: str, name: str) -> ReflectedTable | None:
    parameters = {"schema": schema, "name": name}
    columns = (await connection.execute(_COLUMNS, parameters)).all()
    if not columns:
        return None
    keys = (await connection.execute(_KEYS, parameters)).all()
    # a CAST to a declared length would cut: the modifier is kept beside the type
    reflected = [Column(identifier(row[0]), NamedType(row[1], row[2]), info={MODIFIER: row[7]}) for row in columns]
    table = Table(name, MetaData(), *reflected, schema=schema)
    not_null = frozenset(row[0] for row in columns if row[3])
    return ReflectedTable(
        table,
        generated=frozenset(row[0] for row in columns if row[4]),
        not_null=not_null,
        required=frozenset(row[0] for row in columns if row[3] and not row[6]),
        keys=tuple(tuple(found) for _, found in keys if not_null.issuperset(found)),
        has_primary_key=bool(keys) and bool(keys[0][0]),
        autoincrement=any(row[5] for row in columns),
    )
