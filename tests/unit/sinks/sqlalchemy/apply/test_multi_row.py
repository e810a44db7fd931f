"""One INSERT of many rows keeps what as many INSERTs keep."""

from __future__ import annotations

import sqlite3
from decimal import Decimal

import pytest
from sqlalchemy.dialects import mysql, sqlite

from subscriber.sinks.sqlalchemy.apply.multi_row import multi_row

VALUES = [None, 0, -1, 2**63 - 1, 0.5, 1.0, 1e300, float("inf"), "", "7", "7.0", "1e3", " 7", "x", "2026-11-21", b"", b"7", b"\0x"]
TYPES = ["", "BLOB", "TEXT", "INTEGER", "BIGINT", "REAL", "NUMERIC", "DECIMAL(10,2)", "DATE", "BOOLEAN"]


@pytest.mark.parametrize("declared", TYPES)
def test_a_value_is_kept_as_it_is_by_one_row(declared: str) -> None:
    found = []
    for together in (False, True):
        connection = sqlite3.connect(":memory:")
        connection.execute(f"CREATE TABLE t (id INTEGER PRIMARY KEY, v {declared}, w {declared} DEFAULT 7)")
        sql = "INSERT INTO t (id, v) VALUES (?, ?)"
        many = multi_row(sql, 2, sqlite.dialect())
        assert many is not None
        rows = [(number, VALUES[number % len(VALUES)]) for number in range(2 * many.rows)]
        if together:
            connection.executemany(many.sql, many.parameters(rows, 0))
        else:
            connection.executemany(sql, rows)
        found.append(connection.execute("SELECT id, typeof(v), v, typeof(w), w FROM t ORDER BY id").fetchall())
        connection.close()
    assert found[0] == found[1]
    assert len(found[0]) > 2 * len(VALUES)


def test_rows_from_a_number_on_in_whole_statements() -> None:
    many = multi_row("INSERT INTO t (a, b) VALUES (?, ?)", 2, sqlite.dialect())
    assert many is not None
    assert many.sql.count("?") == many.rows * 2 <= 999
    rows = [(number, Decimal(number)) for number in range(2 * many.rows + 3)]
    first, second = many.parameters(rows, 3)
    assert [*first, *second] == [value for row in rows[3:] for value in row]
    assert many.parameters_of(list(zip(*rows, strict=True)), 3) == [first, second]


@pytest.mark.parametrize(
    ("sql", "parameters"),
    [
        ("INSERT INTO t (a) VALUES (?) ON CONFLICT DO NOTHING", 1),
        ("INSERT INTO t DEFAULT VALUES", 0),
        ("INSERT INTO t VALUES (" + ", ".join("?" * 600) + ")", 600),
    ],
)
def test_others_are_made_row_by_row(sql: str, parameters: int) -> None:
    assert multi_row(sql, parameters, sqlite.dialect()) is None
    assert multi_row("INSERT INTO t (a) VALUES (?)", 1, mysql.dialect(paramstyle="qmark")) is None
