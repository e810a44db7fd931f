"""What an error says of the transaction in which a temporary table was to be made."""

from __future__ import annotations

from typing import Any, cast

import pytest
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection

from subscriber.sinks.sqlalchemy.apply.bulk import Bulk, BulkTables

HOW = Bulk("CREATE TEMPORARY TABLE \0stage\0", "INSERT", "DELETE", tuple, 1, False)


class Refusing:
    """A connection whose server answers everything with one error."""

    def __init__(self, *arguments: object) -> None:
        self._arguments = arguments

    async def exec_driver_sql(self, statement: str) -> Any:
        raise OperationalError(statement, None, Exception(*self._arguments))


async def _execute(tables: BulkTables, *arguments: object) -> int | None:
    connection = cast("AsyncConnection", Refusing(*arguments))
    return await tables.execute(connection, HOW, [(1,)], deletes=True)


@pytest.mark.parametrize("code", [1044, 1142, 1227, 1786, 1787])
async def test_changes_are_made_one_by_one_if_temporary_tables_are_not_allowed(code: int) -> None:
    tables = BulkTables()
    assert await _execute(tables, code, "denied") is None
    assert not tables.takes(HOW, 100)


@pytest.mark.parametrize("arguments", [(1213, "Deadlock found"), (1205, "Lock wait timeout exceeded"), (2013, "Lost connection"), ()])
async def test_any_other_error_stops_the_batch(arguments: tuple[object, ...]) -> None:
    tables = BulkTables()
    with pytest.raises(DBAPIError):
        await _execute(tables, *arguments)
    assert tables.takes(HOW, 100), "another transaction may have them"


def test_keys_are_listed_in_pieces() -> None:
    how = Bulk("", "", "UPDATE t JOIN \0stage\0 WHERE k IN (\0keys\0)", tuple, 1, True)
    changes = how.changes("stage", range(2000))
    assert [change[: change.index("(")] for change in changes] == ["UPDATE t JOIN stage WHERE k IN "] * 3
    assert [int(key) for change in changes for key in change[change.index("(") + 1 : -1].split(",")] == list(range(2000))
