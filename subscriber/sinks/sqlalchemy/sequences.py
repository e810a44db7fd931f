"""Set the counters of tables (AUTO_INCREMENT) to the publisher's sequences.

MariaDB and MySQL
    ALTER TABLE … AUTO_INCREMENT. InnoDB never sets it below the highest value of the column.
SQLite
    A column INTEGER PRIMARY KEY AUTOINCREMENT has its counter in ``sqlite_sequence``. Without AUTOINCREMENT there is no counter: the next
    value is one more than the highest of the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from subscriber.errors import ConfigurationError, TargetError, TargetUnavailable
from subscriber.interfaces import TableName
from subscriber.interfaces.sequences import PublishedSequence, SequenceResult, SequenceState
from subscriber.sinks.sqlalchemy.schema.names import folded_column, target_name
from subscriber.sinks.sqlalchemy.schema.reflection import reflect
from subscriber.sinks.sqlalchemy.session.database import Database

__all__ = ["set_sequences"]

_MYSQL: Final = frozenset({"mysql", "mariadb"})
_MYSQL_COUNTER: Final = text("""
    SELECT t.auto_increment, c.column_name FROM information_schema.tables t
    JOIN information_schema.columns c ON c.table_schema = t.table_schema AND c.table_name = t.table_name
    WHERE t.table_schema = DATABASE() AND t.table_name = :name AND c.extra LIKE '%auto_increment%'
""")


@dataclass(frozen=True, slots=True)
class _Counter:
    """The counter of a table.

    Attributes:
        column: its column.
        next_value: its next value.
        stored: whether it can be set.
    """

    column: str
    next_value: int
    stored: bool = True


async def set_sequences(url: str, sequences: Sequence[PublishedSequence], *, force: bool, dry_run: bool) -> list[SequenceResult]:
    """Set the counters of all columns that take values from the sequences.

    Raises:
        ConfigurationError: this kind of database is not supported.
        TargetUnavailable, TargetError: the target cannot be reached.
    """
    async with Database(url, create=False) as database:
        if database.dialect_name not in _MYSQL | {"sqlite"}:
            raise ConfigurationError(
                f'the sequences of a target of kind "{database.dialect_name}" cannot be set', hint="set them with a program of your own"
            )
        if database.dialect_name in _MYSQL:
            async with database.writing() as connection:
                # a lock of another session, and statistics that MySQL would otherwise take from its cache
                await connection.exec_driver_sql("SET SESSION lock_wait_timeout = 10")
                if not connection.dialect.is_mariadb:  # type: ignore[attr-defined]
                    await connection.exec_driver_sql("SET SESSION information_schema_stats_expiry = 0")
        return [result for wanted in sequences for result in await _set(database, wanted, force=force, dry_run=dry_run)]


async def _set(database: Database, wanted: PublishedSequence, *, force: bool, dry_run: bool) -> list[SequenceResult]:
    results = []
    for table, column in wanted.columns:
        try:
            async with database.writing() as connection:
                result = await _set_column(connection, wanted, table, column, force=force, dry_run=dry_run)
        except TargetUnavailable:
            raise
        except TargetError as error:
            # of this table: a missing privilege
            result = _left(wanted, table, column, error.one_line())
        if result is not None:
            results.append(result)
    if not results:
        reason = "the target has no table with a column that takes its values: it has only the counters of tables"
        results.append(SequenceResult(sequence=wanted.name, state=SequenceState.LEFT, reason=reason))
    return results


def _left(wanted: PublishedSequence, table: TableName, column: str, reason: str) -> SequenceResult:
    return SequenceResult(sequence=wanted.name, state=SequenceState.LEFT, place=_place(table, column), reason=reason)


def _place(table: TableName, column: str) -> str:
    return f"column {column} of table {target_name(table)}"


async def _set_column(
    connection: AsyncConnection, wanted: PublishedSequence, table: TableName, column: str, *, force: bool, dry_run: bool
) -> SequenceResult | None:
    """Set the counter of one column. None: the target does not have the table."""
    if await reflect(connection, table) is None:
        return None
    kind = connection.dialect.name
    read = _sqlite_counter if kind == "sqlite" else _mysql_counter
    counter = await read(connection, str(target_name(table)))
    if counter is None or folded_column(counter.column, kind) != folded_column(column, kind):
        return _left(wanted, table, column, "it has no AUTO_INCREMENT in the target: define it there")
    value = wanted.next_value
    if wanted.increment < 0 or value < 1:
        return _left(
            wanted,
            table,
            column,
            f"the publisher's next value is {value}, by {wanted.increment}: counters of this target only count up from 1",
        )
    place = _place(table, column)
    if counter.next_value == value or (counter.next_value > value and not counter.stored):
        return SequenceResult(sequence=wanted.name, state=SequenceState.EQUAL, place=place)
    if not counter.stored:
        return _left(
            wanted,
            table,
            column,
            f"the publisher's next value is {value}, and here it is {counter.next_value}: define the column with AUTOINCREMENT",
        )
    if counter.next_value > value and not force:
        values = f"whose next value is {value}, and here it is {counter.next_value}"
        reason = f"it is ahead of the publisher, {values} (`subscriber sequences --force` sets it back)"
        return _left(wanted, table, column, reason)
    if not dry_run:
        await _store(connection, table, value)
        stored = await read(connection, str(target_name(table)))
        if stored is not None and stored.next_value > value:
            return _left(wanted, table, column, f"the table has higher values, so its next value is {stored.next_value} and not {value}")
    return SequenceResult(sequence=wanted.name, state=SequenceState.SET, place=place, next_value=value)


async def _mysql_counter(connection: AsyncConnection, name: str) -> _Counter | None:
    found = (await connection.execute(_MYSQL_COUNTER, {"name": name})).first()
    return None if found is None else _Counter(str(found[1]), int(found[0] or 1))


async def _sqlite_counter(connection: AsyncConnection, name: str) -> _Counter | None:
    columns = (await connection.execute(text("SELECT name, type FROM pragma_table_info(:name) WHERE pk > 0"), {"name": name})).all()
    sql = (await connection.execute(text("SELECT sql FROM sqlite_schema WHERE lower(name) = lower(:name)"), {"name": name})).scalar_one()
    if len(columns) != 1 or str(columns[0][1]).upper() != "INTEGER" or "WITHOUT ROWID" in sql.upper():
        return None
    column = str(columns[0][0])
    quote = connection.dialect.identifier_preparer.quote_identifier
    highest = (await connection.exec_driver_sql(f"SELECT max({quote(column)}) FROM {quote(name)}")).scalar_one() or 0  # noqa: S608
    if "AUTOINCREMENT" not in sql.upper():
        return _Counter(column, int(highest) + 1, stored=False)
    stored = (await connection.execute(text("SELECT seq FROM sqlite_sequence WHERE lower(name) = lower(:name)"), {"name": name})).scalar()
    return _Counter(column, max(int(stored or 0), int(highest)) + 1)


async def _store(connection: AsyncConnection, table: TableName, value: int) -> None:
    name = str(target_name(table))
    if connection.dialect.name != "sqlite":
        quoted = connection.dialect.identifier_preparer.quote_identifier(name)
        await connection.exec_driver_sql(f"ALTER TABLE {quoted} AUTO_INCREMENT = {value}")
        return
    # the name as the table was created with
    await connection.execute(text("DELETE FROM sqlite_sequence WHERE lower(name) = lower(:name)"), {"name": name})
    await connection.execute(
        text(
            "INSERT INTO sqlite_sequence (name, seq)"
            " SELECT name, :seq FROM sqlite_schema WHERE type = 'table' AND lower(name) = lower(:name)"
        ),
        {"name": name, "seq": value - 1},
    )
