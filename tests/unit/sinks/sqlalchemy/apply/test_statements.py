"""The exact SQL for each kind of change, by dialect, and the parameters that it takes from the values of a change."""

from __future__ import annotations

from typing import Final

import pytest
from sqlalchemy import Column, Dialect, Integer, MetaData, Table, Text
from sqlalchemy.dialects import mysql, sqlite

from subscriber.errors import RelationError
from subscriber.protocol.messages import Column as RemoteColumn
from subscriber.protocol.messages import Relation
from subscriber.sinks.sqlalchemy.apply.statements import Statement, delete_all, delete_row, insert_row, update_row
from subscriber.sinks.sqlalchemy.schema.reflection import ReflectedTable
from subscriber.sinks.sqlalchemy.schema.target_table import TargetTable, plan_target_table

DIALECTS: Final[dict[str, Dialect]] = {"sqlite": sqlite.dialect(paramstyle="qmark"), "mysql": mysql.dialect(paramstyle="format")}
INT4, TEXT = 23, 25
VECTOR = ["new id", "new order", "old id", "old order"]
NO_NULLS: Final = frozenset[int]()


def target(dialect: Dialect, *, key: bool = True, text: bool = False) -> TargetTable:
    """Columns ``id`` (an integer, or text), which may be the key, and ``order``."""
    table = Table("t", MetaData(), Column("id", Text() if text else Integer()), Column("order", Text()))
    columns = (RemoteColumn("id", TEXT if text else INT4, -1, key), RemoteColumn("order", TEXT, -1, False))
    found = ReflectedTable(
        table,
        not_null=frozenset({"id"}),
        keys=(("id",),) if key else (),
        autoincrement=True,
        inexact=frozenset({"id", "order"} if text else {"order"}) if dialect.name == "mysql" else frozenset(),
    )
    return plan_target_table(found, Relation(1, "public", "t", "d" if key else "f", columns), None, dialect.name)


def text_of(statement: Statement) -> tuple[str, object]:
    return " ".join(statement.sql.split()), statement.pick(VECTOR)


SAME_ID = {
    "sqlite": 't.id = ? AND t."order" = (? COLLATE "BINARY")',
    "mysql": "t.id = %s AND CAST(convert(t.`order` USING utf8mb4) AS BINARY) = CAST(%s AS BINARY)",
}


@pytest.mark.parametrize(
    ("name", "insert", "upsert"),
    [
        (
            "sqlite",
            'INSERT INTO t (id, "order") VALUES (?, ?)',
            ' ON CONFLICT (id) DO UPDATE SET "order" = excluded."order"',
        ),
        ("mysql", "INSERT INTO t (id, `order`) VALUES (%s, %s)", " ON DUPLICATE KEY UPDATE `order` = VALUES(`order`)"),
    ],
)
def test_insert_and_upsert(name: str, insert: str, upsert: str) -> None:
    table = target(DIALECTS[name])
    assert text_of(insert_row(table, DIALECTS[name])) == (insert, ("new id", "new order"))
    assert text_of(insert_row(table, DIALECTS[name], "upsert")) == (insert + upsert, ("new id", "new order"))


@pytest.mark.parametrize("name", DIALECTS)
def test_upsert_without_a_key(name: str) -> None:
    with pytest.raises(RelationError, match="has no key for insert_conflict = upsert"):
        insert_row(target(DIALECTS[name], key=False), DIALECTS[name], "upsert")


@pytest.mark.parametrize(
    ("name", "update", "unchanged", "delete"),
    [
        ("sqlite", 'UPDATE t SET "order"=? WHERE t.id = ?', "UPDATE t SET id=t.id WHERE t.id = ?", "DELETE FROM t WHERE t.id = ?"),
        ("mysql", "UPDATE t SET `order`=%s WHERE t.id = %s", "UPDATE t SET id=t.id WHERE t.id = %s", "DELETE FROM t WHERE t.id = %s"),
    ],
)
def test_row_is_found_by_its_key(name: str, update: str, unchanged: str, delete: str) -> None:
    dialect = DIALECTS[name]
    table = target(dialect)
    updating = update_row(table, dialect, [1], NO_NULLS)
    assert text_of(updating) == (update, ("new order", "old id"))
    assert text_of(update_row(table, dialect, [], NO_NULLS)) == (unchanged, ("old id",))
    assert text_of(delete_row(table, dialect, NO_NULLS)) == (delete, ("old id",))
    assert updating.identity == ("id",)
    assert updating.search is not None
    sql, pick = updating.search.query
    assert " ".join(sql.split()) == f"SELECT 1 FROM t WHERE {delete.partition(' WHERE ')[2]} LIMIT 1"
    assert pick(VECTOR) == ("old id",)


@pytest.mark.parametrize(
    ("name", "condition"),
    [
        ("sqlite", 't.id = ? AND t.id = (? COLLATE "BINARY")'),
        ("mysql", "t.id = %s AND CAST(convert(t.id USING utf8mb4) AS BINARY) = CAST(%s AS BINARY)"),
    ],
)
def test_key_of_text_is_compared_byte_by_byte(name: str, condition: str) -> None:
    found = text_of(delete_row(target(DIALECTS[name], text=True), DIALECTS[name], NO_NULLS))
    assert found == (f"DELETE FROM t WHERE {condition}", ("old id", "old id"))


@pytest.mark.parametrize(
    ("name", "update", "delete"),
    [
        (
            "sqlite",
            f'UPDATE t SET "order"=? WHERE rowid = (SELECT rowid FROM t WHERE {SAME_ID["sqlite"]} LIMIT 1 )',
            'DELETE FROM t WHERE rowid = (SELECT rowid FROM t WHERE t.id = ? AND t."order" IS NULL LIMIT 1 )',
        ),
        (
            "mysql",
            f"UPDATE t SET `order`=%s WHERE {SAME_ID['mysql']} LIMIT 1",
            "DELETE FROM t WHERE t.id = %s AND t.`order` IS NULL LIMIT 1",
        ),
    ],
)
def test_one_of_equal_rows_without_a_key(name: str, update: str, delete: str) -> None:
    dialect = DIALECTS[name]
    table = target(dialect, key=False)
    assert text_of(update_row(table, dialect, [1], NO_NULLS)) == (update, ("new order", "old id", "old order"))
    assert text_of(delete_row(table, dialect, frozenset({1}))) == (delete, ("old id",))


def test_many_updates_and_deletes_in_one_statement() -> None:
    dialect = DIALECTS["mysql"]
    update = update_row(target(dialect), dialect, [1], NO_NULLS).bulk
    delete = delete_row(target(dialect, text=True), dialect, NO_NULLS).bulk
    assert update is not None
    assert delete is not None
    assert update.changes("s1", [1, 2]) == ["UPDATE t AS t STRAIGHT_JOIN s1 AS s ON t.id = s.k0 SET t.`order` = s.n0 WHERE t.id IN (1, 2)"]
    assert update.pick(VECTOR) == ("old id", "new order")
    assert delete.changes("s1", ["a"]) == [
        "DELETE t FROM s1 AS s STRAIGHT_JOIN t AS t ON t.id = s.k0"
        " AND CAST(CONVERT(t.id USING utf8mb4) AS BINARY) = CAST(CONVERT(s.k0 USING utf8mb4) AS BINARY)"
    ]
    assert delete_row(target(DIALECTS["sqlite"]), DIALECTS["sqlite"], NO_NULLS).bulk is None


@pytest.mark.parametrize(
    ("name", "restarted"), [("sqlite", ["DELETE FROM t", "DELETE FROM sqlite_sequence WHERE name = 't'"]), ("mysql", ["DELETE FROM t"])]
)
def test_truncate(name: str, restarted: list[str]) -> None:
    table = target(DIALECTS[name])
    assert delete_all(table, DIALECTS[name], restart_identity=False) == ["DELETE FROM t"]
    assert delete_all(table, DIALECTS[name], restart_identity=True) == restarted
