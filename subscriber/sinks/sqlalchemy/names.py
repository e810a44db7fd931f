"""What a publisher's table is called in the target.

Where the database has schemas the way PostgreSQL has them, nothing changes: ``s.t`` is ``s.t``. Elsewhere the schema becomes a part of the
name, except for ``public``: ``public.t`` is ``t``, ``s.t`` is ``s__t``. So two tables may fall together (``s.t`` and ``public.s__t``; ``t``
and ``T`` where case does not count), a name may become too long, or be that of a table of our own: all that is refused before anything is
made, with the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from string import ascii_uppercase
from types import MappingProxyType
from typing import Final

from sqlalchemy import Dialect
from sqlalchemy.sql import quoted_name

from subscriber.abc import Finding, TableName
from subscriber.sinks.sqlalchemy.tables import CATALOG_SCHEMA_NAME, PREFIX, catalog_tables

__all__ = ["folded_column", "has_schemas", "identifier", "impossible_name", "longest_name", "name_findings", "target_name"]

_DEFAULT_SCHEMA: Final = "public"
_SEPARATOR: Final = "__"
_LONGEST: Final = MappingProxyType({"mysql": 64, "mariadb": 64, "postgresql": 63})
_MYSQL: Final = frozenset({"mysql", "mariadb"})
_ASCII_LOWER: Final = {ord(letter): letter.lower() for letter in ascii_uppercase}
_SQLITES_OWN: Final = "sqlite_"
_BASIC_PLANE: Final = 0xFFFF
_CASELESS: Final = frozenset({"sqlite"})
"""Databases that never tell names apart by case. On MySQL it depends on the server (``lower_case_table_names``)."""


def longest_name(dialect: Dialect) -> int:
    """How many characters the name of a table or column may have. SQLAlchemy's own number is that of aliases on MySQL."""
    return _LONGEST.get(dialect.name) or dialect.max_identifier_length


def has_schemas(dialect_name: str) -> bool:
    """Whether tables lie in schemas there as they do in PostgreSQL."""
    return dialect_name == "postgresql"


def identifier(name: str) -> quoted_name:
    """A name that SQLAlchemy always quotes: it does not know every keyword of every database (NOTHING, of SQLite)."""
    return quoted_name(name, quote=True)


def target_name(table: TableName, dialect_name: str) -> tuple[str | None, str]:
    """Schema (None: the database has none) and name of the table in a target of this dialect, to be quoted."""
    if has_schemas(dialect_name):
        return identifier(table.namespace), identifier(table.name)
    if table.namespace == _DEFAULT_SCHEMA:
        return None, identifier(table.name)
    return None, identifier(f"{table.namespace}{_SEPARATOR}{table.name}")


def folded_column(name: str, dialect_name: str) -> str:
    """The same for names of columns that the target does not distinguish."""
    match dialect_name:
        case "postgresql":
            return str(name)
        case "sqlite":
            return str(name).translate(_ASCII_LOWER)
        case _:
            # accents count, in MariaDB and MySQL too
            return str(name).lower()


def impossible_name(name: str, dialect: Dialect) -> str | None:
    """Why a table or column cannot have this name in the target, or None."""
    longest = longest_name(dialect)
    if len(name) > longest:
        return f"names have at most {longest} characters"
    if dialect.name in _MYSQL:
        if name[-1:].isspace():
            return "no name ends with a blank"
        if "\n" in name or "`" in name:
            # SQLAlchemy reads SHOW CREATE TABLE line by line, and takes a doubled backtick for two
            return "names with a line break or a backtick cannot be read back"
        if any(ord(character) > _BASIC_PLANE for character in name):
            return "names have no characters beyond U+FFFF"
    return None


def name_findings(tables: Iterable[TableName], dialect: Dialect, *, caseless: bool | None = None) -> list[Finding]:
    """What is wrong with the names that these tables would have.

    Args:
        tables: all that are published. Of two that collide, the later one is at fault.
        dialect: the target's.
        caseless: whether the target takes names for equal that differ in case only; None: as the dialect always does.
    """
    ignore_case = dialect.name in _CASELESS if caseless is None else caseless
    findings = []
    taken: dict[tuple[str | None, str], TableName] = {}
    for table in tables:
        found = []
        schema, quoted = target_name(table, dialect.name)
        # a quoted_name stays as it is when it is asked for in lower case
        name = str(quoted)
        other = taken.setdefault((schema, name.lower() if ignore_case else name), table)
        if other != table:
            message = f'tables "{other}" and "{table}" would both be table "{name}" in the target'
            found.append((message, "rename one of them at the publisher, or subscribe to it into another database"))
        problem = impossible_name(name, dialect)
        if problem is None and dialect.name == "sqlite" and name.lower().startswith(_SQLITES_OWN):
            problem = f"names that begin with {_SQLITES_OWN} are SQLite's own"
        if problem is not None:
            message = f'table "{table}" would be table "{name}" in the target, where {problem}'
            found.append((message, "rename the table or its schema at the publisher"))
        if _is_ours(table, name, dialect.name):
            placed = f"{schema}.{name}" if schema else name
            message = f'table "{table}" would be table "{placed}" in the target, a name that subscriber keeps for its own tables'
            found.append((message, f"leave it out of the publication, or rename {'its schema' if schema else 'it'} at the publisher"))
        findings += [Finding("error", message, hint, table, alone=True) for message, hint in found]
    return findings


def _is_ours(table: TableName, name: str, dialect_name: str) -> bool:
    if has_schemas(dialect_name):
        return table.namespace == CATALOG_SCHEMA_NAME
    # whether case counts on MySQL depends on the server
    own = name.lower()
    return own in _OWN_TABLES or _OWN_NUMBERED.fullmatch(own) is not None


_OWN_TABLES: Final = frozenset(catalog_tables("sqlite").metadata.tables)
_OWN_NUMBERED: Final = re.compile(rf"{PREFIX}(copy|bulk)_[0-9]+")
"""Tables that come and go: where a copy waits, and keys of many changes at once. They are dropped whatever they are."""
