"""Replace rows of the target by those of the publisher: see :meth:`subscriber.interfaces.RepairingSink.repair`.

A row is updated if it exists, so that columns that only the target has keep their values; else it is inserted. If a unique key does not
allow that row by row, because two rows have exchanged values, all the rows are deleted and inserted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import and_, delete, insert, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from subscriber.errors import ApplyError
from subscriber.interfaces import PublishedTable
from subscriber.sinks.sqlalchemy.schema.target_table import ColumnPlan, TargetTable, load_target_table
from subscriber.types.codec import READ_ERRORS

__all__ = ["repair_rows"]

_NEW: Final = "subscriber_n"
_OLD: Final = "subscriber_o"

Row = Sequence[str | None]


async def repair_rows(
    connection: AsyncConnection, table: PublishedTable, *, key: Sequence[str], keys: Sequence[Row], rows: Sequence[Row]
) -> None:
    """Replace rows, in the open transaction.

    Args:
        connection: in a transaction of the subscription's writer.
        table: as published.
        key: columns that identify a row.
        keys: values of these columns.
        rows: the publisher's rows with these keys.

    Raises:
        ApplyError: a value does not fit into its column.
        RelationError: the target's table does not fit.
    """
    target = await load_target_table(connection, table)
    target.require_complete()
    statements = _Statements(target, [table.columns.index(name) for name in key])
    found = {tuple(row[place] for place in statements.key): row for row in rows}
    gone = [statements.found(each) for each in keys if tuple(each) not in found]
    for parameters in gone:
        await connection.execute(statements.delete, parameters)
    try:
        async with connection.begin_nested():
            for each, row in found.items():
                await _put(connection, statements, each, row)
    except IntegrityError:
        for each in found:
            await connection.execute(statements.delete, statements.found(each))
        for row in found.values():
            await connection.execute(statements.insert, statements.written(row))


async def _put(connection: AsyncConnection, statements: _Statements, key: Row, row: Row) -> None:
    parameters = {**statements.written(row), **statements.found(key)}
    updated = (await connection.execute(statements.update, parameters)).rowcount
    if updated > 1:
        # duplicates, in a target without the key
        await connection.execute(statements.delete, statements.found(key))
    if updated != 1:
        await connection.execute(statements.insert, statements.written(row))


class _Statements:
    def __init__(self, target: TargetTable, key: Sequence[int]) -> None:
        self.key = key
        self._columns = target.columns
        predicate = and_(*(target.columns[place].matches(f"{_OLD}{place}") for place in key))
        values: dict[Any, Any] = {target.table.c[plan.name]: plan.parameter(f"{_NEW}{place}") for place, plan in enumerate(target.columns)}
        self.delete = delete(target.table).where(predicate)
        self.update = update(target.table).where(predicate).values(values)
        self.insert = insert(target.table).inline().values(values)

    def found(self, key: Row) -> dict[str, object]:
        """The parameters that find a row."""
        return {f"{_OLD}{place}": _bound(self._columns[place], value) for place, value in zip(self.key, key, strict=True)}

    def written(self, row: Row) -> dict[str, object]:
        """The parameters of its new values."""
        return {f"{_NEW}{place}": _bound(plan, value) for place, (plan, value) in enumerate(zip(self._columns, row, strict=True))}


def _bound(plan: ColumnPlan, value: str | None) -> object:
    try:
        return None if value is None else plan.text(value.encode())
    except READ_ERRORS:
        raise ApplyError(
            f'a value does not fit into column "{plan.name}" of the target', sqlstate="22000", hint="make it a text column"
        ) from None
