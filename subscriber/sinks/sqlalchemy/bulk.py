"""Many UPDATEs or DELETEs at once, where a database takes a round trip for each: MariaDB and MySQL.

The rows go into a temporary table of the very columns' types by one INSERT, and from there into the table by one statement. Rows are
joined in the order in which they came (STRAIGHT_JOIN), each by the key. That is exact only for changes that leave the key as it is; of
several changes of one row the last one counts, as all of them set the same columns.

A table that is not the first one of a join is changed in a second pass, by notes of the first. Where the key is one integer, the table
comes first: its rows are looked up by lists of keys, in their order, and changed on the way. That takes the server half the time.

A temporary table belongs to its session, and making one commits nothing.
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
from subscriber.sinks.sqlalchemy.columns import Comparison, TargetTable
from subscriber.sinks.sqlalchemy.statement_size import limit_of

__all__ = ["Bulk", "BulkTables", "bulk", "uses_bulk"]

_DIALECTS: Final = frozenset({"mysql", "mariadb"})
_LEAST: Final = 16
_TABLES: Final = 32
_STAGE: Final = "\0stage\0"
_KEYS: Final = "\0keys\0"
_LISTED: Final = 900
"""Keys in a list. From 1000 on MariaDB makes a table of it."""
_NOT_ALLOWED: Final = frozenset({1044, 1142, 1227, 1786, 1787})
"""A privilege is missing, or the server's GTIDs do not go with temporary tables: only the statement is refused. After any other error (a
deadlock) the transaction may be gone, and all that was in it."""


def uses_bulk(dialect: Dialect) -> bool:
    """Whether this is the way there."""
    return dialect.name in _DIALECTS


@dataclass(frozen=True, slots=True, eq=False)
class Bulk:
    """The statements for one kind of change. Where the temporary table's name belongs there is a placeholder.

    Attributes:
        make, fill, change: what they do.
        pick: from a vector to the temporary table's columns, the key first.
        width: how many columns the key has.
        listed: it is one integer, and ``change`` has a placeholder for a list of such.
    """

    make: str
    fill: str
    change: str
    pick: Callable[[Sequence[object]], tuple[Any, ...]]
    width: int
    listed: bool

    def changes(self, stage: str, keys: Sequence[object]) -> list[str]:
        """The statements that make the changes of these keys, which are in order."""
        change = self.change.replace(_STAGE, stage)
        if not self.listed:
            return [change]
        lists = (keys[place : place + _LISTED] for place in range(0, len(keys), _LISTED))
        return [change.replace(_KEYS, ", ".join(map(str, some))) for some in lists]


def bulk(target: TargetTable, dialect: Dialect, changed: Sequence[int] | None) -> Bulk | None:
    """Build it.

    Args:
        target: the table and its columns.
        dialect: the target's.
        changed: which columns an UPDATE sets; None: DELETE.

    Returns:
        None if rows have no key, or there is nothing to set.
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
    """It cannot be told how many changes found no row: they are to be made one by one. Never leaves this package."""


class BulkTables:
    """The temporary tables of one session."""

    def __init__(self) -> None:
        self._names: dict[Bulk, str] = {}
        self._made = 0
        self._refused = False

    def takes(self, how: Bulk | None, rows: int) -> bool:
        """Whether so many changes are to be made this way."""
        return how is not None and rows >= _LEAST and not self._refused

    async def execute(
        self, connection: AsyncConnection, how: Bulk, rows: Sequence[tuple[Any, ...]], *, deletes: bool, largest: int | None = None
    ) -> int | None:
        """Make changes, in the transaction that is open.

        Args:
            connection: the session's.
            how: their kind.
            rows: as :attr:`Bulk.pick` gives them; by their keys, so that the table is gone through once.
            deletes: a row that was deleted is not found again.
            largest: as for :meth:`StatementLimit.pieces`.

        Returns:
            How many of them found their row; None: nothing was done, as temporary tables are refused.

        Raises:
            Uncounted: that cannot be told.
            sqlalchemy.exc.SQLAlchemyError: nothing may be left of the transaction.
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
