"""What databases report, read: names are taken out of it, values never."""

from __future__ import annotations

import pytest

from subscriber.sinks.sqlalchemy.session.error_codes import mysql_refusal, sqlite_refusal

SECRET = "53CRET"


@pytest.mark.parametrize(
    ("code", "message", "kind", "sqlstate", "column"),
    [
        (1062, f"Duplicate entry '{SECRET}' for key 't.PRIMARY'", "apply", "23505", None),
        (1062, f"Duplicate entry '{SECRET} for key 'x'' for key 'PRIMARY'", "apply", "23505", None),
        (1048, "Column 'v' cannot be null", "apply", "23502", "v"),
        (1264, "Out of range value for column 'n' at row 1", "apply", "22003", "n"),
        (1406, "Data too long for column 'v' at row 3", "apply", "22001", "v"),
        (1366, f"Incorrect integer value: '{SECRET}' for column `d`.`t`.`n` at row 1", "apply", "22P02", "n"),
        (1366, f"Incorrect string value: '{SECRET} for column `a`.`b`.`c`' for column `d`.`t`.`v` at row 1", "apply", "22P02", "v"),
        (1292, f"Truncated incorrect DOUBLE value: '{SECRET} column `x`'", "apply", "22007", None),
        (1205, "Lock wait timeout exceeded; try restarting transaction", "unavailable", "55P03", None),
        (1213, "Deadlock found when trying to get lock; try restarting transaction", "unavailable", "40P01", None),
        (1114, "The table 't' is full", "target", "53100", None),
        (1030, 'Got error 28 "No space left on device" from storage engine InnoDB', "target", "53100", None),
        (1030, 'Got error 168 "Unknown (generic) error from engine" from storage engine InnoDB', "target", "58000", None),
        (1026, "Error writing file './d/t.ibd' (Errcode: 28 \"No space left on device\")", "target", "53100", None),
        (1290, "The MariaDB server is running with the --read-only option", "target", "25006", None),
        (1146, "Table 'd.t' doesn't exist", "relation", "42P01", None),
        (2013, "Lost connection to MySQL server during query", "unavailable", "08006", None),
        (1526, f"Table has no partition for value {SECRET}", "apply", "23514", None),
        (31337, f"something with {SECRET}", "target", "XX000", None),
    ],
)
def test_mysql(code: int, message: str, kind: str, sqlstate: str, column: str | None) -> None:
    found = mysql_refusal(code, message)
    assert found is not None
    assert (found.kind, found.sqlstate, found.column) == (kind, sqlstate, column)
    assert SECRET not in f"{found.text} {found.hint}"


def test_an_error_without_values_is_the_servers_own_sentence() -> None:
    said = "The SELECT would examine more than MAX_JOIN_SIZE rows; check your WHERE and use SET SQL_BIG_SELECTS=1"
    found = mysql_refusal(1104, said)
    assert found is not None
    assert found.text == f"the target rejected a statement (error 1104): {said}"


def test_the_key_is_named() -> None:
    found = mysql_refusal(1062, f"Duplicate entry '{SECRET}' for key 'code_unique'")
    assert found is not None
    assert found.text == 'duplicate key value violates unique constraint "code_unique"'


@pytest.mark.parametrize(
    ("name", "message", "kind", "sqlstate", "column"),
    [
        ("SQLITE_CONSTRAINT_PRIMARYKEY", "UNIQUE constraint failed: t.id", "apply", "23505", None),
        ("SQLITE_CONSTRAINT_UNIQUE", "UNIQUE constraint failed: t.a, t.b", "apply", "23505", None),
        ("SQLITE_CONSTRAINT_NOTNULL", "NOT NULL constraint failed: t.v", "apply", "23502", "v"),
        ("SQLITE_CONSTRAINT_CHECK", "CHECK constraint failed: positive", "apply", "23514", None),
        ("SQLITE_CONSTRAINT_TRIGGER", f"no {SECRET} here", "apply", "P0001", None),
        ("SQLITE_CONSTRAINT_DATATYPE", "cannot store TEXT value in INTEGER column t.n", "apply", "42804", "n"),
        ("SQLITE_BUSY", "database is locked", "unavailable", "55P03", None),
        ("SQLITE_BUSY_SNAPSHOT", "database is locked", "unavailable", "55P03", None),
        ("SQLITE_FULL", "database or disk is full", "target", "53100", None),
        ("SQLITE_READONLY_DBMOVED", "attempt to write a readonly database", "target", "25006", None),
        ("SQLITE_NOTADB", "file is not a database", "target", "XX001", None),
        ("SQLITE_ERROR", "no such table: t", "relation", "42P01", None),
        ("SQLITE_ERROR", "table t has no column named w", "relation", "42P01", None),
    ],
)
def test_sqlite(name: str, message: str, kind: str, sqlstate: str, column: str | None) -> None:
    found = sqlite_refusal(name, message)
    assert found is not None
    assert (found.kind, found.sqlstate, found.column) == (kind, sqlstate, column)
    assert SECRET not in f"{found.text} {found.hint}"
