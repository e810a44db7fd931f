"""Replace rows of a table by those of the publisher: see :meth:`subscriber.interfaces.ReconcilingTableSink.replace`.

Rows that are named by their keys are repaired (:mod:`subscriber.sinks.sqlalchemy.repair`): they keep the values of columns that only the
target has. The rows of a range are deleted and stored again, without such values.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from sqlalchemy import Column, Delete, delete, or_
from sqlalchemy.ext.asyncio import AsyncConnection

from subscriber.errors import RelationError
from subscriber.interfaces import CopyFormat, PublishedTable, ReplacedKeys, ReplacedRange, Replacement
from subscriber.sinks.sqlalchemy.apply.binding import bind_columns, copy_binds, picked
from subscriber.sinks.sqlalchemy.apply.multi_row import insert_rows
from subscriber.sinks.sqlalchemy.apply.statements import insert_row
from subscriber.sinks.sqlalchemy.repair import repair_rows
from subscriber.sinks.sqlalchemy.schema.converters import Family, family_of
from subscriber.sinks.sqlalchemy.schema.target_table import TargetTable, in_range
from subscriber.sinks.sqlalchemy.session.database_errors import passing_values, translated
from subscriber.sinks.sqlalchemy.session.statement_size import BINARY_GROWS, limit_of
from subscriber.types import copy_decoder

__all__ = ["replace_rows"]


async def replace_rows(
    connection: AsyncConnection, table: PublishedTable, target: TargetTable, replacements: Sequence[Replacement], copy_format: CopyFormat
) -> None:
    """Replace rows, in the open transaction.

    Args:
        connection: in a transaction of the subscription's writer.
        table: as published.
        target: the target's table.
        replacements: what to delete and to store.
        copy_format: of the rows of a range.

    Raises:
        ApplyError: a value does not fit into its column, or a constraint rejects a row.
        RelationError: the target's table does not fit.
    """
    for name in (name for each in replacements if isinstance(each, ReplacedKeys) for name in each.key):
        if family_of(_column(target, name).type, connection.dialect.name) is Family.BYTES:
            # its rows are named by the text of bytes, which is not the publisher's text
            raise RelationError(
                f'table "{table.name}" cannot be reconciled: column "{name}" of its key stores bytes',
                sqlstate="55000",
                hint="make it a text column, or use `subscriber alter NAME --resync SCHEMA.TABLE --by copy`",
            )
    with translated():
        alone = len(replacements) == 1
        for each in replacements:
            if isinstance(each, ReplacedRange):
                await connection.execute(_of_range(target, each))
                continue
            if any(None in key for key in each.keys):
                await connection.execute(delete(target.table).where(or_(*(_column(target, name).is_(None) for name in each.key))))
            if not alone:
                await repair_rows(connection, table, key=each.key, keys=_whole(each), rows=())
        for each in replacements:
            if isinstance(each, ReplacedRange):
                async with each.rows() as data:
                    await _store(connection, table, target, data, binary=copy_format is CopyFormat.BINARY)
            elif keys := _whole(each):
                await repair_rows(connection, table, key=each.key, keys=keys if alone else (), rows=await each.rows())


def _whole(replaced: ReplacedKeys) -> list[list[str]]:
    return [[value for value in key if value is not None] for key in replaced.keys if None not in key]


def _column(target: TargetTable, name: str) -> Column[Any]:
    found: Column[Any] = target.table.c[name]
    return found


def _of_range(target: TargetTable, replaced: ReplacedRange) -> Delete:
    found = delete(target.table)
    if replaced.column is None:
        return found
    # ranges are those of integers here
    low, high = (None if bound is None else int(bound) for bound in (replaced.low, replaced.high))
    return found.where(in_range(_column(target, replaced.column), low, high))


async def _store(
    connection: AsyncConnection, table: PublishedTable, target: TargetTable, data: AsyncIterator[bytes], *, binary: bool
) -> None:
    statement = insert_row(target, connection.dialect)
    binds = copy_binds(target.columns, binary=binary)
    decoder = copy_decoder(len(table.columns), binary=binary)
    async for chunk in data:
        count, columns = decoder.columns(chunk)
        rows = list(picked(bind_columns(binds, target.columns, columns), statement.pick, count))
        with passing_values():
            for piece in limit_of(connection).pieces(statement.sql, rows, len(chunk) * (BINARY_GROWS if binary else 1)):
                await insert_rows(connection, statement.sql, statement.many, piece)
    decoder.finish()
