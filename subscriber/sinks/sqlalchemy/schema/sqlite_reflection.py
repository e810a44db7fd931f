"""Tables of SQLite as they are: all that are asked for by three queries. SQLAlchemy's inspector makes about fifteen for each table."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import Connection, text

__all__ = ["SqliteTable", "sqlite_tables"]

_GENERATED: Final = frozenset({2, 3})
"""What ``hidden`` is of a generated column; 1: of a column of a virtual table that ``SELECT *`` does not show."""


@dataclass(slots=True)
class SqliteTable:
    """One table.

    Attributes:
        sql: what made it.
        types: of each column, by name: as it was declared, as SQLAlchemy knows it.
        primary_key: names of its columns.
        unique: columns of each unique index over columns only, and over all rows.
        primary_key_indexed: the primary key has an index: it is not the number of a row.
        inexact: names of columns in a unique index whose collation there is not BINARY.
    """

    sql: str
    types: dict[str, Any] = field(default_factory=dict)
    generated: set[str] = field(default_factory=set)
    not_null: set[str] = field(default_factory=set)
    required: set[str] = field(default_factory=set)
    primary_key: tuple[str, ...] = ()
    unique: list[tuple[str, ...]] = field(default_factory=list)
    primary_key_indexed: bool = False
    inexact: set[str] = field(default_factory=set)


_WANTED: Final = """
wanted AS MATERIALIZED (
    SELECT m.name, m.sql FROM sqlite_master AS m
     WHERE m.type IN ('table', 'view') AND lower(m.name) IN (SELECT lower(value) FROM json_each(:names))
)
"""
_TABLES: Final = f"WITH {_WANTED} SELECT name, sql FROM wanted"  # noqa: S608 (ours)
_COLUMNS: Final = f"""
WITH {_WANTED}
SELECT wanted.name, found.name, found.type, found."notnull", found.dflt_value IS NOT NULL, found.pk, found.hidden
  FROM wanted, pragma_table_xinfo(wanted.name) AS found WHERE found.hidden <> 1 ORDER BY found.cid
"""  # noqa: S608
_INDEXES: Final = f"""
WITH {_WANTED}
SELECT wanted.name, found.name, found.origin, found.partial, part.cid, part.name, upper(part.coll)
  FROM wanted, pragma_index_list(wanted.name) AS found, pragma_index_xinfo(found.name) AS part
 WHERE found."unique" AND part."key" ORDER BY wanted.name, found.seq, part.seqno
"""  # noqa: S608


def sqlite_tables(connection: Connection, names: Iterable[str]) -> Mapping[str, SqliteTable]:
    """Those of the tables that are there, by their names in lower case (as :func:`str.lower` makes it of ASCII)."""
    wanted = {"names": json.dumps(list(map(str, names)))}
    found = {name: SqliteTable(str(sql)) for name, sql in connection.execute(text(_TABLES), wanted)}
    keys: dict[str, list[tuple[int, str]]] = defaultdict(list)
    dialect: Any = connection.dialect
    for name, column, declared, not_null, has_default, place, hidden in connection.execute(text(_COLUMNS), wanted):
        table = found[name]
        table.types[column] = dialect._resolve_type_affinity(str(declared).upper())  # noqa: SLF001 (as get_columns() does)
        if hidden in _GENERATED:
            table.generated.add(column)
        if not_null:
            table.not_null.add(column)
            if not has_default and hidden not in _GENERATED:
                table.required.add(column)
        if place:
            keys[name].append((place, column))
    for name, places in keys.items():
        found[name].primary_key = tuple(column for _, column in sorted(places))
    indexes: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for row in connection.execute(text(_INDEXES), wanted):
        indexes[row[0], row[1]].append(row)
    for (name, _), parts in indexes.items():
        _add_index(found[name], parts)
    return {name.lower(): table for name, table in found.items()}


def _add_index(table: SqliteTable, parts: list[Any]) -> None:
    table.inexact.update(column for _, _, _, _, cid, column, collation in parts if cid >= 0 and collation != "BINARY")
    _, _, origin, partial, *_ = parts[0]
    if origin == "pk":
        table.primary_key_indexed = True
    elif not partial and all(part[4] >= 0 for part in parts):
        table.unique.append(tuple(part[5] for part in parts))
