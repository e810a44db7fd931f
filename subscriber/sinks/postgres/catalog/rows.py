"""The catalog's rows in one session: a :class:`subscriber.catalog.store.Rows`.

SQL contains the names of the model; values are parameters.
"""

# ruff: noqa: S608

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from subscriber.catalog.model import PG_SUBSCRIPTION, WORKER, Column, Kind, Table, known_values
from subscriber.catalog.store import FiringTrigger, Plus, Row, SharedTable
from subscriber.errors import RelationError
from subscriber.interfaces import TableName
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.postgres.catalog.target_identity import TARGET
from subscriber.sinks.postgres.session.catalog_reader import Execute
from subscriber.sinks.postgres.session.firing import first_firing
from subscriber.sinks.postgres.session.locks import table_key, writer_number

__all__ = ["PostgresRows"]

_log = logging.getLogger(__name__)

_ROWS_PER_INSERT: Final = 1000

# casts of a parameter, in order: to its own type, then to the column's type
_CASTS: Final[Mapping[Kind, Sequence[str]]] = {
    Kind.OID: ("int8", "oid"),
    Kind.INTEGER: ("int8",),
    Kind.REAL: ("float8",),
    Kind.TIME: ("timestamptz",),
    Kind.BOOLEAN: ("boolean",),
    Kind.CODE: ("text", '"char"'),
    Kind.NAME: ("text", "name"),
    Kind.TEXT: ("text",),
    Kind.LONG_TEXT: ("text",),
    Kind.NAMES: ("text[]",),
    Kind.LSN: ("text", "pg_lsn"),
}
_READ_AS: Final = {Kind.OID: "int8", Kind.CODE: "text", Kind.NAME: "text", Kind.LSN: "text"}

_OWN_COLUMNS: Final = {
    "subtarget": f"({TARGET})",
    "subowner": "current_user",
}

_FIND: Final = """
SELECT n.nspname::text, c.relname::text, c.oid::int8, c.relkind::text
FROM ROWS FROM (pg_catalog.unnest({}::text[]::name[]), pg_catalog.unnest({}::text[]::name[])) AS wanted(nspname, relname)
JOIN pg_catalog.pg_namespace n ON n.nspname = wanted.nspname
JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = wanted.relname
"""

_SHARING: Final = """
WITH RECURSIVE wanted AS (
    SELECT c.oid AS root, n.nspname, c.relname
    FROM ROWS FROM (pg_catalog.unnest({}::text[]::name[]), pg_catalog.unnest({}::text[]::name[])) AS named(nspname, relname)
    JOIN pg_catalog.pg_namespace n ON n.nspname = named.nspname
    JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = named.relname
), ancestor AS (
    SELECT root, root AS oid FROM wanted
    UNION SELECT below.root, i.inhparent FROM ancestor AS below JOIN pg_catalog.pg_inherits i ON i.inhrelid = below.oid
), descendant AS (
    SELECT root, root AS oid FROM wanted
    UNION SELECT above.root, i.inhrelid FROM descendant AS above JOIN pg_catalog.pg_inherits i ON i.inhparent = above.oid
), related AS (
    SELECT root, oid FROM ancestor UNION SELECT root, oid FROM descendant
)
SELECT n.nspname::text, c.relname::text, c.oid::int8, wanted.nspname::text, wanted.relname::text, {}
FROM related JOIN wanted ON wanted.root = related.root
JOIN pg_catalog.pg_class c ON c.oid = related.oid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
"""

# the name is not in pg_subscription_rel, and pg_subscription is not readable by all
_NATIVE: Final = """(
    SELECT COALESCE((SELECT s.subname::text FROM pg_catalog.pg_stat_subscription s WHERE s.subid = r.srsubid LIMIT 1), r.srsubid::text)
    FROM pg_catalog.pg_subscription_rel r WHERE r.srrelid = c.oid LIMIT 1
)"""
_NATIVE_IS_READABLE: Final = "SELECT pg_catalog.has_table_privilege('pg_catalog.pg_subscription_rel', 'SELECT')"


class _Parameters:
    """The parameters of one query.

    Args:
        placeholder: returns the placeholder of the parameter with this number.
        storable: converts a text into one that the database's encoding can store.
    """

    def __init__(self, placeholder: Callable[[int], str], storable: Callable[[str], str]) -> None:
        self.values: list[object] = []
        self._placeholder = placeholder
        self._storable = storable

    def add(self, value: Any, column: Column, suffix: str = "") -> str:
        """Add a value for a column, and return its SQL expression. ``suffix``: ``[]`` for a list of values."""
        self.values.append([self._to(each, column.kind) for each in value] if suffix else self._to(value, column.kind))
        return self._placeholder(len(self.values)) + "".join(f"::{name}{suffix}" for name in _CASTS[column.kind])

    def _to(self, value: Any, kind: Kind) -> object:
        if value is None:
            return None
        match kind:
            case Kind.LSN:
                return str(value)
            case Kind.NAMES:
                return list(value)
            case Kind.TIME:
                return datetime.fromtimestamp(value, UTC)
            case Kind.TEXT | Kind.LONG_TEXT:
                return self._storable(value)
            case _:
                return value


class PostgresRows:
    """See :class:`subscriber.catalog.store.Rows`.

    Args:
        execute: runs queries in the session.
        placeholder: returns the placeholder of the parameter with this number.
        storable: converts a text into one that the database's encoding can store.
        hidden: columns that the session's role may not read.
    """

    def __init__(
        self,
        execute: Execute,
        placeholder: Callable[[int], str],
        storable: Callable[[str], str] = str,
        hidden: frozenset[str] = frozenset(),
    ) -> None:
        self.execute = execute
        self._placeholder = placeholder
        self._storable = storable
        self._hidden = hidden

    @property
    def hidden(self) -> frozenset[str]:
        return self._hidden

    def _parameters(self) -> _Parameters:
        return _Parameters(self._placeholder, self._storable)

    async def select(self, table: Table, where: Row, *, lock: bool = False) -> Sequence[Row]:
        parameters = self._parameters()
        query = (
            f"SELECT {', '.join(self._read(column) for column in table.columns.values())} FROM {_name(table)} AS t"
            f"{_where(table, where, parameters)}{' FOR UPDATE OF t' if lock else ''}"
        )
        found = await self.execute(query, *parameters.values)
        with known_values(table):
            return [
                {column.name: _from(value, column.kind) for column, value in zip(table.columns.values(), row, strict=True)} for row in found
            ]

    def _read(self, column: Column) -> str:
        if column.name in self._hidden:
            return "NULL"
        return f"t.{column.name}::{_READ_AS[column.kind]}" if column.kind in _READ_AS else f"t.{column.name}"

    async def insert(self, table: Table, rows: Sequence[Row]) -> None:
        """Add rows. Rows of ``pg_subscription`` also get their target and owner, rows of ``worker`` the key of their lock."""
        own = _OWN_COLUMNS if table is PG_SUBSCRIPTION else {}
        for begin in range(0, len(rows), _ROWS_PER_INSERT):
            parameters = self._parameters()
            some = [_stored(table, row) for row in rows[begin : begin + _ROWS_PER_INSERT]]
            values = [
                ", ".join([*(parameters.add(value, _column(table, name)) for name, value in row.items()), *own.values()]) for row in some
            ]
            await self.execute(
                f"INSERT INTO {_name(table)} ({', '.join([*some[0], *own])}) VALUES {', '.join(f'({row})' for row in values)}",
                *parameters.values,
            )

    async def update(self, table: Table, where: Row, values: Row) -> int:
        parameters = self._parameters()
        assignments = []
        for name, value in values.items():
            column = _column(table, name)
            if isinstance(value, Plus):
                assignments.append(f"{name} = t.{name} + {parameters.add(value.number, column)}")
            else:
                assignments.append(f"{name} = {parameters.add(value, column)}")
        query = f"UPDATE {_name(table)} AS t SET {', '.join(assignments)}{_where(table, where, parameters)} RETURNING 1"
        return len(await self.execute(query, *parameters.values))

    async def delete(self, table: Table, where: Row) -> None:
        parameters = self._parameters()
        await self.execute(f"DELETE FROM {_name(table)} AS t{_where(table, where, parameters)}", *parameters.values)

    async def new_oid(self) -> int:
        """Take an oid from the cluster's counter."""
        # in SQL, an oid of that counter can be had by creating a large object
        ((oid,),) = await self.execute("SELECT pg_catalog.lo_create(0)::int8")
        await self.execute(f"SELECT pg_catalog.lo_unlink({self._placeholder(1)}::int8::oid)", oid)
        return int(oid)

    async def relids(self, tables: Sequence[TableName]) -> Mapping[TableName, int | RelationError]:
        query = _FIND.format(self._placeholder(1), self._placeholder(2))
        rows = await self.execute(query, [table.namespace for table in tables], [table.name for table in tables])
        known = {TableName(namespace, name): (relid, kind) for namespace, name, relid, kind in rows}
        return {table: _usable(table, *known.get(table, (0, ""))) for table in tables}

    async def sharing(self, tables: Sequence[TableName]) -> Sequence[SharedTable]:
        ((readable,),) = await self.execute(_NATIVE_IS_READABLE)
        if not readable:
            _log.warning(
                "pg_catalog.pg_subscription_rel cannot be read: not checked whether PostgreSQL's own subscriptions write the same tables"
            )
        query = _SHARING.format(self._placeholder(1), self._placeholder(2), _NATIVE if readable else "NULL")
        rows = await self.execute(query, [table.namespace for table in tables], [table.name for table in tables])
        return [
            SharedTable(TableName(namespace, name), relid, TableName(of_namespace, of_name), native)
            for namespace, name, relid, of_namespace, of_name, native in rows
        ]

    async def firing_trigger(self, tables: Sequence[TableName]) -> FiringTrigger | None:
        """A trigger that is ENABLE REPLICA or ENABLE ALWAYS, and not one of a foreign key."""
        return await first_firing(self.execute, tables, self._placeholder)

    async def target_identifier(self) -> str:
        """The server's system identifier."""
        ((identifier,),) = await self.execute("SELECT system_identifier::text FROM pg_catalog.pg_control_system()")
        return str(identifier)


def _name(table: Table) -> str:
    return f'subscriber."{table.name}"'


_LOCK_KEY: Final = Column("lock_key", Kind.INTEGER)


def _column(table: Table, name: str) -> Column:
    return _LOCK_KEY if name == _LOCK_KEY.name else table.columns[name]


def _stored(table: Table, row: Row) -> Row:
    if table is WORKER:
        oid, relid = row["subid"], row["relid"]
        return {**row, _LOCK_KEY.name: table_key(oid, relid) if relid else writer_number(oid)}
    return row


def _where(table: Table, where: Row, parameters: _Parameters) -> str:
    conditions = []
    for name, value in where.items():
        column = table.columns[name]
        if value is None:
            conditions.append(f"t.{name} IS NULL")
        elif isinstance(value, list):
            conditions.append(f"t.{name} = ANY ({parameters.add(value, column, '[]')})")
        else:
            conditions.append(f"t.{name} = {parameters.add(value, column)}")
    return f" WHERE {' AND '.join(conditions)}" if conditions else ""


def _from(value: Any, kind: Kind) -> Any:
    if value is None:
        return () if kind is Kind.NAMES else None
    match kind:
        case Kind.LSN:
            return Lsn.parse(value)
        case Kind.NAMES:
            return tuple(value)
        case Kind.TIME:
            return value.timestamp()
        case _:
            return value


def _usable(table: TableName, relid: int, kind: str) -> int | RelationError:
    if not relid:
        hint = "create the table in the target with the publisher's columns"
        return RelationError(f'relation "{table}" does not exist', sqlstate="42P01", hint=hint)
    if kind not in {"r", "p"}:
        hint = "only tables and partitioned tables can be targets"
        return RelationError(f'cannot use relation "{table}" as logical replication target', sqlstate="42809", hint=hint)
    return relid
