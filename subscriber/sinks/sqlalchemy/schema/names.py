"""The names of the publisher's tables in the target.

The schema becomes a part of the name, but ``public`` does not: ``public.t`` is ``t``, ``s.t`` is ``s__t``. The names of two tables may
collide (``s.t`` and ``public.s__t``; ``t`` and ``T`` if the database ignores case). A name may also become too long, or equal the name of
a table of this program. All such names are rejected before anything is created, with a hint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from string import ascii_uppercase
from types import MappingProxyType
from typing import Final

from sqlalchemy import Dialect
from sqlalchemy.sql import quoted_name

from subscriber.interfaces import Finding, TableName
from subscriber.sinks.sqlalchemy.catalog_tables import METADATA, PREFIX

__all__ = ["folded_column", "identifier", "impossible_name", "longest_name", "name_findings", "target_name"]

_DEFAULT_SCHEMA: Final = "public"
_SEPARATOR: Final = "__"
_LONGEST: Final = MappingProxyType({"mysql": 64, "mariadb": 64})
_MYSQL: Final = frozenset({"mysql", "mariadb"})
_ASCII_LOWER: Final = {ord(letter): letter.lower() for letter in ascii_uppercase}
_SQLITES_OWN: Final = "sqlite_"
_BASIC_PLANE: Final = 0xFFFF
_CASELESS: Final = frozenset({"sqlite"})
"""Databases that always ignore the case of names. On MySQL this depends on the server (``lower_case_table_names``)."""


def longest_name(dialect: Dialect) -> int:
    """How many characters the name of a table or column may have. On MySQL, SQLAlchemy's ``max_identifier_length`` is that of aliases."""
    return _LONGEST.get(dialect.name) or dialect.max_identifier_length


def identifier(name: str) -> quoted_name:
    """Return a name that SQLAlchemy always quotes, because it does not know every keyword of every database (SQLite's NOTHING)."""
    return quoted_name(name, quote=True)


def target_name(table: TableName) -> quoted_name:
    """Return the name of the publisher's table in the target. SQLAlchemy quotes it."""
    if table.namespace == _DEFAULT_SCHEMA:
        return identifier(table.name)
    return identifier(f"{table.namespace}{_SEPARATOR}{table.name}")


def folded_column(name: str, dialect_name: str) -> str:
    """Return a text that is equal for names of columns that the target does not distinguish."""
    # accents are distinguished, also by MariaDB and MySQL
    return str(name).translate(_ASCII_LOWER) if dialect_name == "sqlite" else str(name).lower()


def impossible_name(name: str, dialect: Dialect) -> str | None:
    """Return why a table or column cannot have this name in the target, or None."""
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
    """Return the problems of the names that these tables would have.

    Args:
        tables: all published tables. If the names of two collide, the later table is reported.
        dialect: the target's.
        caseless: whether the target ignores the case of names; None: as the dialect always does.
    """
    ignore_case = dialect.name in _CASELESS if caseless is None else caseless
    findings = []
    taken: dict[str, TableName] = {}
    for table in tables:
        found = []
        # a plain str: lower() does not change a quoted_name
        name = str(target_name(table))
        other = taken.setdefault(name.lower() if ignore_case else name, table)
        if other != table:
            message = f'tables "{other}" and "{table}" would both be table "{name}" in the target'
            found.append((message, "rename one of them on the publisher, or subscribe to it into another database"))
        problem = impossible_name(name, dialect)
        if problem is None and dialect.name == "sqlite" and name.lower().startswith(_SQLITES_OWN):
            problem = f"names that begin with {_SQLITES_OWN} are SQLite's own"
        if problem is not None:
            message = f'table "{table}" would be table "{name}" in the target, where {problem}'
            found.append((message, "rename the table or its schema on the publisher"))
        if _is_ours(name):
            message = f'table "{table}" would be table "{name}" in the target, a name that subscriber reserves for its own tables'
            found.append((message, "leave it out of the publication, or rename it on the publisher"))
        findings += [Finding("error", message, hint, table, alone=True) for message, hint in found]
    return findings


def _is_ours(name: str) -> bool:
    # ignore case: whether MySQL does depends on the server
    own = name.lower()
    return own in _OWN_TABLES or _OWN_NUMBERED.fullmatch(own) is not None


_OWN_TABLES: Final = frozenset(METADATA.tables)
_OWN_NUMBERED: Final = re.compile(rf"{PREFIX}(copy|bulk)_[0-9]+")
"""Names of staging tables and of temporary tables for bulk statements. The sink drops existing tables of such names without a check."""
