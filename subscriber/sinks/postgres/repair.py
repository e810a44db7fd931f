"""Replace rows of the target by those of the publisher: see :meth:`subscriber.interfaces.RepairingSink.repair`.

It runs in the apply session, between two batches. So no other session of the subscription changes the rows meanwhile, and triggers and
foreign keys do not fire.

A prepared transaction, or one that is applied while it is streamed, may have locked the rows. It ends only when apply continues. So repair
waits for a lock for one second only. Then it fails, and changes nothing.

A row is updated if it exists, so that columns that only the target has keep their values; else it is inserted. If a unique constraint does
not allow that row by row, because two rows have exchanged values, all the rows are deleted and inserted.
"""

# ruff: noqa: S608

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from subscriber.errors import ApplyError, RelationError, TargetUnavailable
from subscriber.interfaces import PublishedTable
from subscriber.protocol.quoting import quote_identifier
from subscriber.sinks.postgres.session.apply_session import ApplySession
from subscriber.sinks.postgres.session.catalog_reader import CatalogReader
from subscriber.sinks.postgres.tables.table_reader import read_table

__all__ = ["repair_rows"]

_UNIQUE: Final = frozenset({"23505", "23P01"})
_LOCKED: Final = "55P03"
_LOCK_TIMEOUT: Final = "1s"

Row = Sequence[str | None]


async def repair_rows(
    session: ApplySession,
    reader: CatalogReader,
    table: PublishedTable,
    *,
    key: Sequence[str],
    keys: Sequence[Row],
    rows: Sequence[Row],
    as_owner: bool,
) -> None:
    """Replace rows in one transaction.

    Args:
        session: applies; no transaction is open.
        reader: reads the catalogs.
        table: as published.
        key: columns that identify a row.
        keys: values of these columns.
        rows: the publisher's rows with these keys.
        as_owner: whether changes are made as the table's owner.

    Raises:
        ApplyError, RelationError, TargetError, TargetUnavailable
    """
    try:
        await _repair_rows(session, reader, table, key=key, keys=keys, rows=rows, as_owner=as_owner)
    except TargetUnavailable as error:
        if error.sqlstate != _LOCKED:
            raise
        raise TargetUnavailable(
            f'rows of table "{table.name}" that must be repaired are locked in the target',
            hint="try again when the transaction that changes them has ended; it may be a prepared or a streamed one of the publisher",
        ) from error


async def _repair_rows(
    session: ApplySession,
    reader: CatalogReader,
    table: PublishedTable,
    *,
    key: Sequence[str],
    keys: Sequence[Row],
    rows: Sequence[Row],
    as_owner: bool,
) -> None:
    target = await read_table(reader, table.name, as_owner=as_owner)
    known = {column.name: column for column in target.columns}
    for name in table.columns:
        if name not in known:
            raise RelationError(f'the target\'s table "{table.name}" has no column "{name}"', hint="add the column")
    columns = [name for name in table.columns if not known[name].generated]
    statements = _Statements(table, key, columns, always={name for name in columns if known[name].identity_always})
    places = [table.columns.index(name) for name in columns]
    of_key = [table.columns.index(name) for name in key]
    found = {tuple(row[place] for place in of_key): [row[place] for place in places] for row in rows}
    async with session.transaction():
        await session.fetch(f"SET LOCAL lock_timeout = '{_LOCK_TIMEOUT}'")
        if target.role is not None:
            await session.fetch(f"SET LOCAL ROLE {quote_identifier(target.role)}")
        for each in keys:
            if tuple(each) not in found:
                await session.fetch(statements.delete, *each)
        await session.fetch("SAVEPOINT one_by_one")
        try:
            for each, row in found.items():
                await _put(session, statements, each, row)
        except ApplyError as error:
            if error.sqlstate not in _UNIQUE:
                raise
            await session.fetch("ROLLBACK TO SAVEPOINT one_by_one")
            for each in found:
                await session.fetch(statements.delete, *each)
            for row in found.values():
                await session.fetch(statements.insert, *row)


async def _put(session: ApplySession, statements: _Statements, key: Row, row: Row) -> None:
    updated = await session.fetch(statements.update, *statements.updated(row, key))
    if len(updated) != 1:
        # there is none, or one with another identity value, or duplicates in a target without the key
        await session.fetch(statements.delete, *key)
        await session.fetch(statements.insert, *row)


class _Statements:
    def __init__(self, table: PublishedTable, key: Sequence[str], columns: Sequence[str], *, always: Collection[str]) -> None:
        relation = f"{_name(table.name.namespace)}.{_name(table.name.name)}"
        where = " AND ".join(f"{_name(name)} = %s" for name in key)
        # GENERATED ALWAYS AS IDENTITY: an UPDATE cannot set them
        self._always = [place for place, name in enumerate(columns) if name in always and name not in key]
        self._rest = [place for place, name in enumerate(columns) if name not in key and name not in always]
        same = "".join(f" AND {_name(columns[place])} = %s" for place in self._always)
        assignments = ", ".join(f"{_name(columns[place])} = %s" for place in self._rest)
        names, values = ", ".join(map(_name, columns)), ", ".join("%s" for _ in columns)
        overriding = " OVERRIDING SYSTEM VALUE" if always else ""
        self.delete = f"DELETE FROM {relation} WHERE {where}"
        self.update = (
            f"UPDATE {relation} SET {assignments} WHERE {where}{same} RETURNING 1"
            if assignments
            else f"SELECT 1 FROM {relation} WHERE {where}{same}"
        )
        self.insert = f"INSERT INTO {relation} ({names}){overriding} VALUES ({values})"

    def updated(self, row: Row, key: Row) -> list[str | None]:
        """The parameters of ``update``."""
        return [*(row[place] for place in self._rest), *key, *(row[place] for place in self._always)]


def _name(name: str) -> str:
    # a percent sign begins a placeholder
    return quote_identifier(name).replace("%", "%%")
