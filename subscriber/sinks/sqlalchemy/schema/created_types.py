"""Chooses the column type for a published column in a table that this sink creates. docs/reference/types-sql.md has the table for users.

SQLite
    Integers and bytes are stored as such. Floats are stored in a column without a declared type, because REAL affinity loses the sign of
    zero. All other types are stored as PostgreSQL's text.
MySQL and MariaDB
    Their own types, if these hold every ordinary value; text if they would change a value. Text in keys has a length. All text has a
    binary collation without padding, so that two keys are equal exactly if they are equal in PostgreSQL.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import types as sql
from sqlalchemy.dialects import mysql

from subscriber.sinks.sqlalchemy.schema.converters import INTEGERS
from subscriber.types import PgType

__all__ = ["CreatedTypes", "Untyped"]

_KEY_BYTES: Final = 3000
"""Bytes of text in a key. An index of InnoDB holds 3072; the rest is for columns of other types."""
_ROW_BYTES: Final = 32_768
"""Bytes of all VARCHAR columns together; a row of MySQL has at most 65535."""
_INLINE: Final = 255
"""A VARCHAR of more bytes may be stored outside of its row's page. A row may fill half a page: 8126 bytes."""
_INLINE_BYTES: Final = 4_096
_BYTES_A_CHARACTER: Final = 4
_VARCHAR: Final = 255
_MAX_PRECISION: Final = 65
_MAX_SCALE: Final = 30
_FIXED_TEXTS: Final = {
    "uuid": 36,
    "macaddr": 17,
    "macaddr8": 23,
    "inet": 43,
    "cidr": 43,
    "timetz": 24,
    "interval": 100,
    "pg_lsn": 17,
    "name": 63,
}
"""The largest length of the texts of these types, in characters."""


class Untyped(sql.UserDefinedType[Any]):
    """No declared type: SQLite stores every value in the storage class of the parameter."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        """Return the type in SQL: an empty text."""
        return ""


class CreatedTypes:
    """The column types of one table to be created.

    Args:
        dialect_name: the target's.
        is_mariadb: whether a target of a MySQL dialect is MariaDB.
        keys: how many text columns share the key.
    """

    def __init__(self, dialect_name: str, *, is_mariadb: bool = False, keys: int = 1) -> None:
        self._dialect = dialect_name
        self._collation = "utf8mb4_nopad_bin" if is_mariadb else "utf8mb4_0900_bin"
        self._keys = max(keys, 1)
        self._row = self._inline = 0

    def of(self, source: PgType, *, key: bool) -> sql.TypeEngine[Any]:
        """Return the type of a column. Call it once for each column, because it counts the bytes of a row.

        Args:
            source: on the publisher.
            key: whether it is part of the key.
        """
        if self._dialect == "sqlite":
            return self._sqlite(source)
        if self._dialect in {"mysql", "mariadb"}:
            return self._mysql(source, key=key)
        return _elsewhere(source)

    def _sqlite(self, source: PgType) -> sql.TypeEngine[Any]:
        name = source.builtin
        if name == "bool":
            return sql.BOOLEAN()
        if name in INTEGERS and name != "xid8":
            # an INTEGER PRIMARY KEY is the rowid: it needs no separate index
            return sql.INTEGER()
        if name in {"float4", "float8"}:
            return Untyped()
        return sql.BLOB() if name == "bytea" else sql.TEXT()

    def _mysql(self, source: PgType, *, key: bool) -> sql.TypeEngine[Any]:
        name = source.builtin
        simple = _MYSQL.get(name or "")
        if simple is not None:
            return simple
        if name == "numeric":
            precision, scale = source.precision_and_scale or (0, -1)
            if 0 < precision <= _MAX_PRECISION and 0 <= scale <= min(_MAX_SCALE, precision):
                return mysql.DECIMAL(precision, scale)
        if name == "bytea":
            return mysql.VARBINARY(_KEY_BYTES // self._keys) if key else mysql.LONGBLOB()
        length = _FIXED_TEXTS.get(name or "") or source.length
        if key:
            most = _KEY_BYTES // _BYTES_A_CHARACTER // self._keys
            return mysql.VARCHAR(min(length or most, most), collation=self._collation)
        size = (length or 0) * _BYTES_A_CHARACTER
        inline = size if size <= _INLINE else 0
        if length is not None and length <= _VARCHAR and self._row + size <= _ROW_BYTES and self._inline + inline <= _INLINE_BYTES:
            self._row += size
            self._inline += inline
            return mysql.VARCHAR(max(length, 1), collation=self._collation)
        return mysql.LONGTEXT(collation=self._collation)


def _elsewhere(source: PgType) -> sql.TypeEngine[Any]:
    """Choose a type for another kind of database: one that every database has."""
    match source.builtin:
        case "int2" | "int4":
            return sql.Integer()
        case "int8" | "oid" | "xid" | "cid":
            return sql.BigInteger()
        case "float4" | "float8":
            return sql.Double()
        case "bytea":
            return sql.LargeBinary()
    length = source.length
    return sql.Text() if length is None else sql.Unicode(length)


_MYSQL: Final[dict[str, sql.TypeEngine[Any]]] = {
    "bool": mysql.TINYINT(display_width=1),
    "int2": mysql.SMALLINT(),
    "int4": mysql.INTEGER(),
    "int8": mysql.BIGINT(),
    "oid": mysql.INTEGER(unsigned=True),
    "xid": mysql.INTEGER(unsigned=True),
    "cid": mysql.INTEGER(unsigned=True),
    "xid8": mysql.BIGINT(unsigned=True),
    # MySQL shows a FLOAT with only six digits
    "float4": mysql.DOUBLE(),
    "float8": mysql.DOUBLE(),
    "date": mysql.DATE(),
    "time": mysql.TIME(fsp=6),
    "timestamp": mysql.DATETIME(fsp=6),
    "timestamptz": mysql.DATETIME(fsp=6),
}
