"""Replace rows of a table by those of the publisher: see :meth:`subscriber.interfaces.ReconcilingTableSink.replace`.

All rows are deleted first, and then stored by COPY. So rows that exchange unique values need no order. A row keeps the values of columns
that the publisher does not have: they are set aside before the deletion, and the new rows are joined with them.

A row is deleted only if the text of its key is the one that the comparison read. The operator of the column's type stands beside it, so
that an index is used. Alone it would find too many rows, if different texts are equal (``citext``, nondeterministic collations).
"""

# names are quoted or ours, values are parameters
# ruff: noqa: S608

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from subscriber.errors import RelationError
from subscriber.interfaces import CopyFormat, ReplacedKeys, ReplacedRange, Replacement, TableName
from subscriber.protocol.quoting import quote_identifier
from subscriber.protocol.session_settings import READING
from subscriber.sinks.postgres.tables.relation_mapping import TargetTable, qualified_name

__all__ = ["ReplacedRows"]

_NEW: Final = TableName("pg_temp", "subscriber_new")
_ASIDE: Final = TableName("pg_temp", "subscriber_aside")
_INTEGERS: Final = frozenset({20, 21, 23})
# with -1, the name is never that of a shorter type
_TYPES: Final = "SELECT pg_catalog.format_type(t, -1) FROM pg_catalog.unnest($1::oid[]) WITH ORDINALITY AS given(t, place) ORDER BY place"


_SET_ZONE: Final = "SELECT pg_catalog.set_config('timezone', $1, true)"
_LACKS_TEMP: Final = """
SELECT current_user::text, pg_catalog.current_database()::text
 WHERE NOT pg_catalog.has_database_privilege(pg_catalog.current_database(), 'TEMPORARY')
"""


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Rows ``x`` of the table: what they are joined with, a condition, and its parameters."""

    source: str
    condition: str
    parameters: Sequence[object] = ()


class Executing(Protocol):
    """A session in a transaction."""

    async def fetch(self, query: str, /, *values: object) -> Sequence[Any]:
        """Run a query with the parameters $1 and so on."""
        ...

    async def execute(self, query: str, /, *values: object) -> object:
        """Run a statement."""
        ...


class Copying(Protocol):
    """Copies rows into the table, in the same session."""

    async def copy(self, copy_format: CopyFormat, data: AsyncIterator[bytes], *, into: TableName | None = None) -> None:
        """Copy the data; ``into``: into another table."""
        ...


class ReplacedRows:
    """Replaces rows of one table, in one transaction.

    Args:
        connection: in a transaction, with the role that changes the table.
        copying: copies into the table.
        table: the target's.
        columns: the published columns.
        kept: SQL of the rows that may be deleted; empty: all.
    """

    def __init__(self, connection: Executing, copying: Copying, table: TargetTable, columns: Sequence[str], *, kept: str) -> None:
        self._connection = connection
        self._copying = copying
        self._table = table
        self._columns = columns
        self._known = {column.name: column for column in table.columns}
        self._own = [column.name for column in table.columns if column.name not in columns and not column.generated]
        self._kept = f" AND {kept}" if kept else ""
        self._prepared = False

    async def replace(self, replacements: Sequence[Replacement], copy_format: CopyFormat) -> None:
        """Delete rows, and store those of the publisher."""
        key = replacements[0].key
        found = await self._connection.fetch(_TYPES, [self._known[name].type_oid for name in key])
        types = {name: row[0] for name, row in zip(key, found, strict=True)}
        joins = bool(self._own and key)
        if joins and not self._prepared:
            await self._prepare(key)
            self._prepared = True
        # the texts of keys were read in this zone; times without zone are stored in that of the database
        ((zone,),) = await self._connection.fetch("SELECT pg_catalog.current_setting('timezone')")
        await self._connection.execute(_SET_ZONE, READING["timezone"])
        for each in replacements:
            for chosen in self._of_keys(each, types) if isinstance(each, ReplacedKeys) else self._of_range(each, types):
                if joins:
                    source = ", ".join(filter(None, (f"{self._table.scanned} AS x", chosen.source)))
                    names = _names((*key, *self._own), "x")
                    await self._execute(f"INSERT INTO {qualified_name(_ASIDE)} SELECT {names} FROM {source}", chosen)
                using = f" USING {chosen.source}" if chosen.source else ""
                await self._execute(f"DELETE FROM {self._table.scanned} AS x{using}", chosen)
        await self._connection.execute(_SET_ZONE, zone)
        into = _NEW if joins else None
        for each in replacements:
            if isinstance(each, ReplacedKeys):
                if rows := await each.rows():
                    await self._copying.copy(CopyFormat.TEXT, _copy_data(rows), into=into)
            else:
                async with each.rows() as data:
                    await self._copying.copy(copy_format, data, into=into)
        if joins:
            await self._join(key)

    async def _execute(self, query: str, chosen: _Chosen) -> None:
        await self._connection.execute(f"{query} WHERE {chosen.condition}{self._kept}", *chosen.parameters)

    # --- the rows that are deleted

    def _of_keys(self, replaced: ReplacedKeys, types: dict[str, str]) -> Iterator[_Chosen]:
        key = replaced.key
        whole = [each for each in replaced.keys if None not in each]
        if whole:
            values = [[each[place] for each in whole] for place in range(len(key))]
            arrays = ", ".join(f"pg_catalog.unnest(${place + 1}::text[])" for place in range(len(key)))
            names = ", ".join(f"k{place}" for place in range(len(key)))
            condition = " AND ".join(self._is_equal(name, f"k.k{place}::{types[name]}", f"k.k{place}") for place, name in enumerate(key))
            yield _Chosen(f"ROWS FROM ({arrays}) AS k({names})", condition, values)
        if len(whole) < len(replaced.keys):
            yield _Chosen("", f"({' OR '.join(f'x.{quote_identifier(name)} IS NULL' for name in key)})")

    def _of_range(self, replaced: ReplacedRange, types: dict[str, str]) -> Iterator[_Chosen]:
        conditions, parameters = [], []
        if replaced.column is not None:
            # a bound may be a value that only the publisher's type can hold
            typed = "pg_catalog.int8" if self._known[replaced.column].type_oid in _INTEGERS else types[replaced.column]
            column = f"x.{quote_identifier(replaced.column)}"
            for sign, value in ((">=", replaced.low), ("<", replaced.high)):
                if value is not None:
                    parameters.append(value)
                    conditions.append(f"{column} OPERATOR(pg_catalog.{sign}) ${len(parameters)}::text::{typed}")
            if replaced.low is not None and replaced.high is None:
                conditions = [f"({conditions[0]} OR {column} IS NULL)"]
        yield _Chosen("", " AND ".join(conditions) or "true", parameters)

    def _is_equal(self, name: str, value: str, text: str) -> str:
        column = f"x.{quote_identifier(name)}"
        same = f"""{column}::pg_catalog.text COLLATE pg_catalog."C" OPERATOR(pg_catalog.=) {text}"""
        operator = dict(self._table.key).get(name) or self._known[name].equals
        return f"{column} {operator} {value} AND {same}" if operator is not None else same

    # --- the columns that only the target has

    async def _prepare(self, key: Sequence[str]) -> None:
        for role, database in await self._connection.fetch(_LACKS_TEMP):
            raise RelationError(
                f'role "{role}" may not create temporary tables, which keep the values of columns of table "{self._table.name}" that'
                " only the target has",
                sqlstate="42501",
                hint=f"GRANT TEMPORARY ON DATABASE {quote_identifier(database)} TO {quote_identifier(role)}",
            )
        for table, columns in ((_ASIDE, (*key, *self._own)), (_NEW, self._columns)):
            await self._connection.execute(
                f"CREATE TEMP TABLE {quote_identifier(table.name)} ON COMMIT DROP AS"
                f" SELECT {_names(columns)} FROM {self._table.scanned} WITH NO DATA"
            )

    async def _join(self, key: Sequence[str]) -> None:
        new, aside = qualified_name(_NEW), qualified_name(_ASIDE)
        same = " AND ".join(
            f"""n.{quote_identifier(name)}::text COLLATE pg_catalog."C" OPERATOR(pg_catalog.=) x.{quote_identifier(name)}::text"""
            for name in key
        )
        # a target without the key may have had several rows
        texts = ", ".join(f'{quote_identifier(name)}::text COLLATE pg_catalog."C"' for name in key)
        once = f"(SELECT DISTINCT ON ({texts}) * FROM {aside}) AS x"
        own, columns = _names(self._own), _names(self._columns)
        insert = f"INSERT INTO {qualified_name(self._table.name)} ({columns}"
        rows = f"OVERRIDING SYSTEM VALUE SELECT {_names(self._columns, 'n')}"
        await self._connection.execute(f"{insert}, {own}) {rows}, {_names(self._own, 'x')} FROM {new} AS n JOIN {once} ON {same}")
        await self._connection.execute(f"{insert}) {rows} FROM {new} AS n WHERE NOT EXISTS (SELECT FROM {aside} AS x WHERE {same})")
        # there may be more replacements in this transaction
        await self._connection.execute(f"TRUNCATE {new}, {aside}")


def _names(columns: Sequence[str], table: str | None = None) -> str:
    return ", ".join(f"{table}.{quote_identifier(name)}" if table else quote_identifier(name) for name in columns)


async def _copy_data(rows: Sequence[Sequence[str | None]]) -> AsyncIterator[bytes]:
    """The rows in the text format of COPY."""
    lines = ["\t".join(["\\N" if value is None else _escaped(value) for value in row]) for row in rows]
    # at once: each piece is a message of its own
    yield "\n".join([*lines, ""]).encode(errors="surrogateescape")


def _escaped(value: str) -> str:
    # much faster than str.translate for large values
    return value.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")
