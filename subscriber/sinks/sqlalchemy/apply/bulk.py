"""Many UPDATEs or DELETEs in one statement, for databases that need a round trip for each: MariaDB and MySQL.

One INSERT stores the rows in a temporary table with the types of the table's columns. One statement then applies them to the table. It
joins the rows by the key, in their order (STRAIGHT_JOIN). This is exact only for changes that do not change the key. If a row is changed
several times, only the last change is kept, because all of them set the same columns.

If the table is not the first one of a join, the server changes it in a second pass, from a list that the first pass wrote. If the key is
one integer, the table comes first: the server finds its rows by lists of keys, in their order, and changes them at once. That takes the
server half the time.

A temporary table belongs to its session. Creating one does not commit the transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final

from sqlalchemy import Dialect, Integer
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from subscriber.errors import TargetError
from subscriber.sinks.sqlalchemy.schema.target_table import Comparison, TargetTable
from subscriber.sinks.sqlalchemy.session.statement_size import limit_of

__all__ = ["Bulk", "BulkTables", "bulk", "uses_bulk"]

_DIALECTS: Final = frozenset({"mysql", "mariadb"})
_LEAST: Final = 16
_TABLES: Final = 32
_STAGE: Final = "\0stage\0"
_KEYS: Final = "\0keys\0"
_LISTED: Final = 900
"""Keys in a list. MariaDB converts a list of 1000 or more to a table."""
_NOT_ALLOWED: Final = frozenset({1044, 1142, 1227, 1786, 1787})
"""Error numbers: a privilege is missing, or the server's GTID mode does not allow temporary tables. Only the statement is rejected. After
any other error (a deadlock) the server may have rolled back the whole transaction."""


def uses_bulk(dialect: Dialect) -> bool:
    """Whether this database uses bulk statements."""
    return dialect.name in _DIALECTS


@dataclass(frozen=True, slots=True, eq=False)
class Bulk:
    """The statements for one kind of change. They have a placeholder for the temporary table's name.

    Attributes:
        make, fill, change: the statements that create the temporary table, fill it, and change the table.
        pick: picks the temporary table's columns from a vector, the key first.
        width: the number of columns of the key.
        listed: the key is one integer, and ``change`` has a placeholder for a list of keys.
    """

    make: str
    fill: str
    change: str
    pick: Callable[[Sequence[object]], tuple[Any, ...]]
    width: int
    listed: bool

    def changes(self, stage: str, keys: Sequence[object]) -> list[str]:
        """Return the statements that change the table.

        Args:
            stage: the name of the temporary table.
            keys: the first key column of its rows, in order; used only if ``listed``.
        """
        change = self.change.replace(_STAGE, stage)
        if not self.listed:
            return [change]
        lists = (keys[place : place + _LISTED] for place in range(0, len(keys), _LISTED))
        return [change.replace(_KEYS, ", ".join(map(str, some))) for some in lists]


def bulk(target: TargetTable, dialect: Dialect, changed: Sequence[int] | None) -> Bulk | None:
    """Build the statements for one kind of change.

    Args:
        target: the table and its columns.
        dialect: the target's.
        changed: the columns that an UPDATE sets; None: DELETE.

    Returns:
        None if this database uses no bulk statements, rows have no key, or there is nothing to set.
    """
    key = target.key
    if not uses_bulk(dialect) or key is None or (changed is not None and not changed):
        return None
    prepare = dialect.identifier_preparer
    table = prepare.format_table(target.table)

    def name(number: int) -> str:
        return prepare.quote(target.columns[number].name)

    def equal(place: int, number: int) -> str:
        plain = f"t.{name(number)} = s.k{place}"
        if target.columns[number].comparison is Comparison.PLAIN:
            return plain
        return f"{plain} AND {_bytes(f't.{name(number)}')} = {_bytes(f's.k{place}')}"

    sets = list(enumerate(changed or ()))
    columns = [f"k{place}" for place in range(len(key))] + [f"n{place}" for place, _ in sets]
    sources = [f"t.{name(number)} AS k{place}" for place, number in enumerate(key)]
    sources += [f"t.{name(number)} AS n{place}" for place, number in sets]
    listed = _is_integer(target, key)
    tables = f"{table} AS t STRAIGHT_JOIN {_STAGE} AS s" if listed else f"{_STAGE} AS s STRAIGHT_JOIN {table} AS t"
    joined = f"{tables} ON {' AND '.join(equal(place, number) for place, number in enumerate(key))}"
    if changed is None:
        change = f"DELETE t FROM {joined}"
    else:
        change = f"UPDATE {joined} SET {', '.join(f't.{name(number)} = s.n{place}' for place, number in sets)}"  # noqa: S608 (quoted)
    if listed:
        change += f" WHERE t.{name(key[0])} IN ({_KEYS})"
    index = "(PRIMARY KEY (k0)) " if listed else ""
    positions = [len(target.columns) + number for number in key] + [number for _, number in sets]
    return Bulk(
        f"CREATE TEMPORARY TABLE {_STAGE} {index}ENGINE=InnoDB AS SELECT {', '.join(sources)} FROM {table} AS t WHERE 1 = 0",  # noqa: S608
        f"INSERT INTO {_STAGE} ({', '.join(columns)}) VALUES ({', '.join(['%s'] * len(columns))})",  # noqa: S608
        change,
        itemgetter(*positions) if len(positions) > 1 else lambda vector: (vector[positions[0]],),
        len(key),
        listed,
    )


def _is_integer(target: TargetTable, key: Sequence[int]) -> bool:
    column = target.columns[key[0]].column
    return len(key) == 1 and column is not None and isinstance(column.type, Integer)


def _bytes(text: str) -> str:
    return f"CAST(CONVERT({text} USING utf8mb4) AS BINARY)"


class Uncounted(TargetError):
    """It is not known how many changes found no row: they must be made one by one. Never leaves this package."""


class BulkTables:
    """The temporary tables of one session."""

    def __init__(self) -> None:
        self._names: dict[Bulk, str] = {}
        self._made = 0
        self._refused = False

    def takes(self, how: Bulk | None, rows: int) -> bool:
        """Whether to make this number of changes by bulk statements."""
        return how is not None and rows >= _LEAST and not self._refused

    async def execute(
        self, connection: AsyncConnection, how: Bulk, rows: Sequence[tuple[Any, ...]], *, deletes: bool, largest: int | None = None
    ) -> int | None:
        """Make changes, in the open transaction.

        Args:
            connection: the session's.
            how: the statements.
            rows: as :attr:`Bulk.pick` gives them, sorted by their keys, so that the server scans the table once.
            deletes: whether these are DELETEs: a deleted row is not found a second time.
            largest: as for :meth:`StatementLimit.pieces`.

        Returns:
            How many changes found their row; None: nothing was done, because the server rejects temporary tables.

        Raises:
            Uncounted: that number is not known.
            sqlalchemy.exc.SQLAlchemyError: the transaction may be rolled back.
        """
        name = await self._table(connection, how)
        if name is None:
            return None
        last = {row[: how.width]: row for row in rows}
        staged = list(last.values())
        await connection.exec_driver_sql(f"DELETE FROM {name}")  # noqa: S608 (ours)
        fill = how.fill.replace(_STAGE, name)
        for piece in limit_of(connection).pieces(fill, staged, largest):
            await connection.exec_driver_sql(fill, piece)
        found = 0
        for change in how.changes(name, [row[0] for row in staged]):
            found += int((await connection.exec_driver_sql(change)).rowcount)
        if deletes or len(last) == len(rows):
            return found
        if found == len(last):
            return len(rows)
        raise Uncounted("several changes of a row that is missing")

    async def _table(self, connection: AsyncConnection, how: Bulk) -> str | None:
        name = self._names.get(how)
        if name is not None:
            return name
        if len(self._names) >= _TABLES:
            for old in self._names.values():
                await connection.exec_driver_sql(f"DROP TEMPORARY TABLE IF EXISTS {old}")
            self._names.clear()
        self._made += 1
        name = f"subscriber_bulk_{self._made}"
        try:
            await connection.exec_driver_sql(how.make.replace(_STAGE, name))
        except DBAPIError as error:
            original = error.orig
            if original is None or not original.args or original.args[0] not in _NOT_ALLOWED:
                raise
            self._refused = True
            return None
        self._names[how] = name
        return name
