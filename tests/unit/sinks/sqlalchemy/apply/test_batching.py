"""Which changes may be gathered, and which must stay in order."""

from __future__ import annotations

from subscriber.abc import TableName
from subscriber.sinks.sqlalchemy.apply.batching import Batching
from subscriber.sinks.sqlalchemy.apply.relation_plan import Operation
from subscriber.sinks.sqlalchemy.apply.statements import Kind, Statement

T, U = TableName("public", "t"), TableName("public", "u")


def _statement(kind: Kind, table: TableName = T) -> Statement:
    return Statement(kind, kind, table, (), tuple)


INSERT, UPDATE, DELETE, OTHER = _statement("INSERT"), _statement("UPDATE"), _statement("DELETE"), _statement("INSERT", U)


def _groups(*changes: tuple[Statement, tuple[int, ...]]) -> list[tuple[str, list[object]]]:
    batching = Batching()
    for number, (statement, keys) in enumerate(changes):
        batching.add(Operation(statement, (number,), keys))
    assert batching.count == len(changes)
    found = [(group.statement.sql, [vector[0] for vector in group.vectors]) for group in batching.take()]
    assert batching.count == 0
    assert batching.take() == []
    return found


def test_changes_of_other_rows_are_overtaken() -> None:
    found = _groups((INSERT, (1,)), (UPDATE, (2,)), (INSERT, (3,)), (DELETE, (4,)), (UPDATE, (5,)), (INSERT, (6,)))
    assert found == [("INSERT", [0, 2, 5]), ("UPDATE", [1, 4]), ("DELETE", [3])]


def test_changes_of_one_row_stay_in_order() -> None:
    found = _groups((INSERT, (1,)), (DELETE, (1,)), (INSERT, (1,)), (INSERT, (2,)), (DELETE, (1,)))
    assert found == [("INSERT", [0]), ("DELETE", [1]), ("INSERT", [2, 3]), ("DELETE", [4])]


def test_a_key_that_moves_is_of_two_rows() -> None:
    found = _groups((DELETE, (2,)), (UPDATE, (1, 2)), (DELETE, (3,)), (DELETE, (2,)), (DELETE, (1,)))
    assert found == [("DELETE", [0, 2]), ("UPDATE", [1]), ("DELETE", [3, 4])]


def test_without_keys_only_neighbours_are_gathered() -> None:
    found = _groups((INSERT, ()), (INSERT, ()), (UPDATE, ()), (INSERT, ()), (DELETE, ()), (INSERT, ()))
    assert found == [("INSERT", [0, 1]), ("UPDATE", [2]), ("INSERT", [3]), ("DELETE", [4]), ("INSERT", [5])]


def test_tables_do_not_wait_for_each_other() -> None:
    found = _groups((INSERT, ()), (OTHER, ()), (INSERT, ()), (OTHER, ()))
    assert found == [("INSERT", [0, 2]), ("INSERT", [1, 3])]


def test_not_too_many_groups_are_looked_at() -> None:
    statements = [_statement("UPDATE") for _ in range(20)]
    found = _groups((INSERT, (0,)), *((statement, (number,)) for number, statement in enumerate(statements, 1)), (INSERT, (99,)))
    assert len(found) == 22
