"""Reads the error reports of SQLite, MariaDB and MySQL: the kind of error and the names in it, never a value.

Sources: SQLite's Result and Error Codes; MariaDB's Error Codes and MySQL's Server Error Message Reference.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["APPLY_HINT", "Kind", "Refusal", "mysql_refusal", "sqlite_refusal"]

Kind = Literal["unavailable", "relation", "apply", "target"]

APPLY_HINT: Final = "compare the column's type in the target with the publisher's"
_CONSTRAINT_HINT: Final = "fix the target's rows, or change its constraint"
_UNIQUE_HINT: Final = "change or delete the target's row, or drop its constraint; the transaction is retried"
_IO_HINT: Final = "check the disk for free space and errors"
_DISK_HINT: Final = "make room on the target's disk"
_READ_ONLY_HINT: Final = "use a target and a user that may write"
_LOCKED_HINT: Final = "another program locks the target: end it or its transaction; the statement is retried"


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error report of a database.

    Attributes:
        kind: determines the class of the error, and so what the caller must do.
        text: one line, without any value.
        sqlstate: PostgreSQL's SQLSTATE for this error.
        column: the target's column, if the report names it.
        hint: what to do; None: the default hint for its kind.
    """

    kind: Kind
    text: str
    sqlstate: str
    column: str | None = None
    hint: str | None = None


# --- SQLite

_SQLITE_FAILED = re.compile(r"\A[A-Z ]+ constraint failed: (?P<what>.+)\Z", re.DOTALL)
_SQLITE_DATATYPE = re.compile(r"cannot store \w+ value in (?P<type>\w+) column (?P<column>.+)\Z")


def sqlite_refusal(name: str, message: str) -> Refusal | None:
    """Read the name of SQLite's extended result code, and its message. None: the error is unknown."""
    text = _one_line(message)
    if name.startswith("SQLITE_CONSTRAINT"):
        return _sqlite_constraint(name, message)
    for start, refusal in (
        ("SQLITE_BUSY", Refusal("unavailable", "the SQLite file is locked by another program", "55P03", hint=_LOCKED_HINT)),
        ("SQLITE_LOCKED", Refusal("unavailable", "a table of the SQLite file is locked", "55P03", hint=_LOCKED_HINT)),
        ("SQLITE_FULL", Refusal("target", "no room is left for the SQLite file", "53100", hint=_DISK_HINT)),
        ("SQLITE_IOERR", Refusal("target", f"the SQLite file cannot be read or written ({name})", "58030", hint=_IO_HINT)),
        ("SQLITE_READONLY", Refusal("target", "the SQLite file is read-only", "25006", hint=_READ_ONLY_HINT)),
        (
            "SQLITE_CANTOPEN",
            Refusal("target", "the SQLite file cannot be opened", "58030", hint="check that its directory exists and is writable"),
        ),
        (
            "SQLITE_CORRUPT",
            Refusal("target", "the SQLite file is damaged", "XX001", hint="restore it from a backup, or start over with a new file"),
        ),
        ("SQLITE_NOTADB", Refusal("target", "the file is not an SQLite database", "XX001", hint="use another file")),
        ("SQLITE_TOOBIG", Refusal("apply", "a row or value is larger than SQLite allows (1 GB)", "54000")),
        ("SQLITE_MISMATCH", Refusal("apply", "a value has a type that its column does not accept", "42804")),
        ("SQLITE_INTERRUPT", Refusal("unavailable", "a statement was interrupted", "57014")),
    ):
        if name.startswith(start):
            return refusal
    if text.startswith(("no such table", "no such column", "table ", "near ")) or "has no column named" in text:
        return Refusal("relation", text, "42P01" if "table" in text else "42703")
    return None


def _sqlite_constraint(name: str, message: str) -> Refusal:
    found = _SQLITE_FAILED.match(message)
    what = _one_line(found["what"]) if found else ""
    match name:
        case "SQLITE_CONSTRAINT_UNIQUE" | "SQLITE_CONSTRAINT_PRIMARYKEY" | "SQLITE_CONSTRAINT_ROWID":
            return Refusal("apply", f'duplicate key value violates unique constraint "{what}"', "23505", hint=_UNIQUE_HINT)
        case "SQLITE_CONSTRAINT_NOTNULL":
            table, _, column = what.rpartition(".")
            text = f'null value in column "{column}" of relation "{table}" violates not-null constraint'
            return Refusal("apply", text, "23502", column or None, _CONSTRAINT_HINT)
        case "SQLITE_CONSTRAINT_CHECK":
            return Refusal("apply", f'new row violates check constraint "{what}"', "23514", hint=_CONSTRAINT_HINT)
        case "SQLITE_CONSTRAINT_FOREIGNKEY":
            return Refusal("apply", "row violates a foreign key constraint", "23503", hint=_CONSTRAINT_HINT)
        case "SQLITE_CONSTRAINT_TRIGGER":
            return Refusal("apply", "a trigger rejected the change", "P0001", hint="SQLite's triggers fire for replicated changes too")
        case "SQLITE_CONSTRAINT_DATATYPE":
            typed = _SQLITE_DATATYPE.search(message)
            named = typed["column"].rpartition(".")[2] if typed else None
            return Refusal("apply", "a value has a type that its column does not accept", "42804", named)
        case _:
            return Refusal("apply", f"a constraint rejected the change ({name})", "23000", hint=_CONSTRAINT_HINT)


# --- MariaDB and MySQL

_KEY = re.compile(r"for key '(?P<key>[^']+)'\s*\Z")
_COLUMN = re.compile(r"(?:[Cc]olumn|[Ff]ield) [`'](?P<name>[^`']+)[`']")
_QUALIFIED_COLUMN = re.compile(r"for column (?:`[^`]*`\.)*`(?P<name>[^`]+)`")
_CONSTRAINT = re.compile(r"(?:CONSTRAINT|[Cc]heck constraint) [`'](?P<name>[^`']+)[`']")

_MYSQL_UNAVAILABLE: Final = {
    1020: ("a row of the target was changed by another session", "40001", None),
    1040: ("too many connections", "53300", "increase max_connections of the target, or end other sessions"),
    1053: ("the target is shutting down", "57P01", None),
    1077: ("the target is shutting down", "57P01", None),
    1079: ("the target is shutting down", "57P01", None),
    1152: ("the connection to the target was aborted", "08006", None),
    1158: ("the connection to the target was lost", "08006", None),
    1159: ("the connection to the target timed out", "08006", None),
    1160: ("the connection to the target was lost", "08006", None),
    1161: ("the connection to the target timed out", "08006", None),
    1184: ("the connection to the target was aborted", "08006", None),
    1205: ("timeout while waiting for a lock in the target", "55P03", _LOCKED_HINT),
    1213: ("deadlock detected", "40P01", None),
    1317: ("a statement was interrupted", "57014", None),
    1412: ("a table was altered in the meantime", "55006", None),
    1615: ("a statement has to be prepared again", "26000", None),
    1927: ("the connection to the target was killed", "57P01", None),
    1969: ("a statement was interrupted", "57014", None),
    2002: ("could not connect to the target", "08001", "check that the target runs, and host and port"),
    2003: ("could not connect to the target", "08001", "check that the target runs, and host and port"),
    2005: ("the target's host name could not be resolved", "08001", "check the host name"),
    2006: ("the connection to the target was lost", "08006", None),
    2013: ("the connection to the target was lost", "08006", None),
    2014: ("lost synchronization with the target", "08P01", None),
    2027: ("lost synchronization with the target", "08P01", None),
    2055: ("the connection to the target was lost", "08006", None),
    4031: ("the connection to the target was idle for too long", "08006", None),
}
_MYSQL_TARGET: Final = {
    1021: ("no room is left on the target's disk", "53100", _DISK_HINT),
    1030: ("the target's storage engine failed", "58000", None),
    1036: ("a table of the target is read-only", "25006", _READ_ONLY_HINT),
    1041: ("the target is out of memory", "53200", None),
    1044: ("access to the target's database is denied", "42501", "grant the target's user its privileges"),
    1045: ("password authentication failed", "28P01", "check user and password in the URL"),
    1049: ("the target's database does not exist", "3D000", "create it, or use another one"),
    1114: ("a table of the target is full", "53100", _DISK_HINT),
    1142: ("permission denied for a table of the target", "42501", "grant the target's user its privileges"),
    1153: ("a statement is larger than max_allowed_packet of the target", "54000", "increase max_allowed_packet of the target"),
    1227: ("permission denied in the target", "42501", "grant the target's user its privileges"),
    1290: ("the target is read-only", "25006", _READ_ONLY_HINT),
    1665: ("the target's binlog_format = STATEMENT does not work with READ COMMITTED", "0A000", "set binlog_format to ROW or MIXED"),
    1698: ("authentication failed", "28000", "check user and password in the URL"),
    1792: ("the target's transaction is read-only", "25006", _READ_ONLY_HINT),
    1836: ("the target is read-only", "25006", _READ_ONLY_HINT),
    2061: ("authentication failed", "28000", "check user and password in the URL"),
}
# errors whose sentence is the server's own and can hold no value: a limit, a privilege, a setting, the name of an object
_MYSQL_SAID: Final = frozenset(
    {1037, 1038, 1104, 1126, 1143, 1180, 1181, 1193, 1203, 1226, 1235, 1238, 1286, 1305, 1370, 1390, 1419, 1436, 1461, 1701, 1785, 1874}
    | {1878, 3024, 3098, 3100, 3101, 3750}
)
# errors of files; the message holds the operating system's error number
_MYSQL_FILES: Final = frozenset({3, 11, 20, 1004, 1005, 1016, 1026, 1030})
_NO_SPACE: Final = re.compile(r"(?:[Ee]rror|Errcode:|errno:) 28\b")
_MYSQL_VALUE: Final = {
    1048: ("null value violates not-null constraint", "23502", _CONSTRAINT_HINT),
    1062: ("duplicate key value violates unique constraint", "23505", _UNIQUE_HINT),
    1169: ("duplicate key value violates unique constraint", "23505", _UNIQUE_HINT),
    1586: ("duplicate key value violates unique constraint", "23505", _UNIQUE_HINT),
    1216: ("row violates foreign key constraint", "23503", _CONSTRAINT_HINT),
    1217: ("row violates foreign key constraint", "23503", _CONSTRAINT_HINT),
    1451: ("row violates foreign key constraint", "23503", _CONSTRAINT_HINT),
    1452: ("row violates foreign key constraint", "23503", _CONSTRAINT_HINT),
    3819: ("new row violates check constraint", "23514", _CONSTRAINT_HINT),
    4025: ("new row violates check constraint", "23514", _CONSTRAINT_HINT),
    1526: ("no partition of the table found for row", "23514", _CONSTRAINT_HINT),
    1263: ("null value violates not-null constraint", "23502", _CONSTRAINT_HINT),
    1264: ("a value is out of the column's range", "22003", "widen the column, or make it text"),
    1265: ("a value does not fit the column", "22000", "make the column text; or add the publisher's new value to an ENUM"),
    1292: ("a value cannot be read as the column's type", "22007", "make the column text"),
    1366: ("a value cannot be read as the column's type", "22P02", "make the column text, of character set utf8mb4"),
    1364: ("a column that is not replicated has no default value", "23502", "give the column a default value"),
    1367: ("a value cannot be read as the column's type", "22P02", "make the column text"),
    1406: ("a value is too long for the column", "22001", "widen the column"),
    1411: ("a value cannot be read as the column's type", "22007", "make the column text"),
    1416: ("a value cannot be read as the column's type", "22P02", "make the column text"),
    1690: ("a value is out of range", "22003", "widen the column, or make it text"),
    3140: ("a value is not valid JSON", "22P02", "make the column text"),
    1644: ("a trigger rejected the change", "P0001", "the target's triggers fire for replicated changes too"),
}
_MYSQL_RELATION: Final = {
    1054: ("a column of the target's table does not exist", "42703"),
    1146: ("a table of the target does not exist", "42P01"),
    1347: ("a relation of the target is not a table", "42809"),
    1288: ("a relation of the target cannot be changed", "42809"),
    1906: ("a generated column of the target cannot be written", "428C9"),
    3105: ("a generated column of the target cannot be written", "428C9"),
    1118: ("a row is larger than the target's storage engine allows", "54000"),
    1071: ("a key is longer than the target's storage engine allows", "54000"),
    1059: ("an identifier is too long for the target", "42622"),
    1170: ("a text column of the target cannot be a key without a length", "42P16"),
}


def mysql_refusal(code: int, message: str) -> Refusal | None:
    """Read the error number and message of a MariaDB or MySQL server, or of a driver (from 2000)."""
    if code in _MYSQL_UNAVAILABLE:
        text, sqlstate, hint = _MYSQL_UNAVAILABLE[code]
        return Refusal("unavailable", text, sqlstate, hint=hint)
    if code in _MYSQL_FILES and _NO_SPACE.search(message):
        code = 1021
    if code in _MYSQL_TARGET:
        text, sqlstate, hint = _MYSQL_TARGET[code]
        return Refusal("target", text, sqlstate, hint=hint)
    if code in _MYSQL_RELATION:
        text, sqlstate = _MYSQL_RELATION[code]
        return Refusal("relation", text, sqlstate)
    column = _mysql_column(message)
    if code in _MYSQL_VALUE:
        text, value_sqlstate, value_hint = _MYSQL_VALUE[code]
        name = _KEY.search(message) or _CONSTRAINT.search(message)
        if name is not None and value_sqlstate.startswith("23") and value_sqlstate != "23502":
            text = f'{text} "{name[1]}"'
        return Refusal("apply", text, value_sqlstate, column, value_hint)
    said = f": {_one_line(message)}" if code in _MYSQL_SAID else ""
    return Refusal("target", f"the target rejected a statement (error {code}){said}", "XX000", column)


def _mysql_column(message: str) -> str | None:
    # search after the value that the message shows: the value may look like a column
    tail = message[message.rfind("for column") :] if "for column" in message else message
    found = _QUALIFIED_COLUMN.search(tail) or (None if "value:" in tail else _COLUMN.search(tail))
    return found["name"] if found else None


def _one_line(text: str) -> str:
    return " ".join(text.split())
