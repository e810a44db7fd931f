"""Copy rows of unlogged tables, and large objects, from one database to another. Publications cannot have them. Writers are stopped.

Unlogged tables are emptied and filled in one transaction. Large objects keep their numbers, because rows refer to them: those of the other
database are replaced. They are moved in many transactions, because each one that is deleted needs a lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from subscriber.interfaces import CATALOG_SCHEMA, TableName
from subscriber.protocol.quoting import quote_identifier, quote_literal
from subscriber.sinks.postgres.session.postgres_errors import translated
from subscriber.sinks.postgres.session.target import Target

__all__ = ["Unreplicated", "find_unreplicated", "move_large_objects", "move_unlogged_rows"]

_APPLICATION: Final = "subscriber cutover"
_SETTINGS: Final = {"synchronous_commit": "on"}
_PART: Final = 1 << 18
"""Bytes of a large object that are moved at once."""
_OBJECTS: Final = 64
"""Large objects that are moved at once."""
_UNLOGGED: Final = f"""
SELECT n.nspname::text, c.relname::text, pg_catalog.pg_table_size(c.oid)::int8,
       ARRAY(SELECT a.attname::text FROM pg_catalog.pg_attribute AS a
              WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = '' ORDER BY a.attnum)
  FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
 WHERE c.relkind = 'r' AND c.relpersistence = 'u' AND n.nspname <> {quote_literal(CATALOG_SCHEMA)} AND NOT EXISTS (
    SELECT FROM pg_catalog.pg_depend AS d
     WHERE d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.objid = c.oid AND d.deptype = 'e')
 ORDER BY 1, 2
"""  # noqa: S608
_READABLE: Final = """
SELECT count(*), count(*) FILTER (WHERE NOT pg_catalog.pg_has_role(lomowner, 'USAGE') AND NOT EXISTS (
    SELECT FROM pg_catalog.aclexplode(lomacl) AS a WHERE a.privilege_type = 'SELECT'
       AND (a.grantee = 0 OR pg_catalog.pg_has_role(a.grantee, 'USAGE'))))
  FROM pg_catalog.pg_largeobject_metadata
"""
_OWNERS: Final = """
SELECT l.oid::int8, r.rolname::text, COALESCE((
    SELECT pg_catalog.json_agg(pg_catalog.json_build_array(a.privilege_type, COALESCE(g.rolname::text, '')))
      FROM pg_catalog.aclexplode(l.lomacl) AS a LEFT JOIN pg_catalog.pg_roles AS g ON g.oid = a.grantee
     WHERE a.grantee <> l.lomowner), '[]')
  FROM pg_catalog.pg_largeobject_metadata AS l JOIN pg_catalog.pg_roles AS r ON r.oid = l.lomowner ORDER BY 1
"""

_Connection = psycopg.AsyncConnection[tuple[Any, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreplicated:
    """What a database has that no publication can have.

    Attributes:
        tables: unlogged tables, with their columns.
        size: bytes of these tables.
        large_objects: how many there are.
        unreadable: how many of them the role may not read.
    """

    tables: dict[TableName, list[str]]
    size: int
    large_objects: int
    unreadable: int


async def find_unreplicated(conninfo: str) -> Unreplicated:
    """Look for unlogged tables and large objects.

    Raises:
        TargetUnavailable, TargetError: the database cannot be read.
    """
    connection = await Target(conninfo).connect(_APPLICATION, _SETTINGS)
    try:
        tables = await _rows(connection, _UNLOGGED)
        ((number, unreadable),) = await _rows(connection, _READABLE)
    finally:
        await connection.close()
    return Unreplicated(
        tables={TableName(row[0], row[1]): row[3] for row in tables},
        size=sum(row[2] for row in tables),
        large_objects=number,
        unreadable=unreadable,
    )


async def move_unlogged_rows(source: str, destination: str) -> int:
    """Replace the rows of the destination's unlogged tables by those of the source. Return how many tables there are.

    Raises:
        TargetUnavailable, TargetError: one of the databases rejects it, or a table does not exist in the destination.
    """
    tables = (await find_unreplicated(source)).tables
    if not tables:
        return 0
    reader, writer = await Target(source).connect(_APPLICATION, _SETTINGS), await Target(destination).connect(_APPLICATION, _SETTINGS)
    try:
        with translated():
            # as for replicated rows: the source's triggers have done their work, and tables may refer to each other
            await writer.execute("SET session_replication_role = replica")
            await writer.execute("BEGIN")
            await writer.execute(f"TRUNCATE {', '.join(table.quoted for table in tables)}".encode())
            for table, columns in tables.items():
                what = table.quoted + (f" ({', '.join(map(quote_identifier, columns))})" if columns else "")
                async with (
                    reader.cursor() as out,
                    writer.cursor() as into,
                    out.copy(f"COPY {what} TO STDOUT".encode()) as rows,
                    into.copy(f"COPY {what} FROM STDIN".encode()) as copy,
                ):
                    async for part in rows:
                        await copy.write(part)
            await writer.execute("COMMIT")
    finally:
        await reader.close()
        await writer.close()
    return len(tables)


async def move_large_objects(source: str, destination: str) -> int:
    """Replace the large objects of the destination by those of the source. Return how many there are.

    Owners and privileges are those of the source, where the destination has such roles, and the role may act for them.

    Raises:
        TargetUnavailable, TargetError: one of the databases rejects it.
    """
    reader, writer = await Target(source).connect(_APPLICATION, _SETTINGS), await Target(destination).connect(_APPLICATION, _SETTINGS)
    try:
        for batch in _batches([row[0] for row in await _rows(writer, "SELECT oid::int8 FROM pg_catalog.pg_largeobject_metadata")]):
            await _rows(writer, "SELECT pg_catalog.lo_unlink(o::oid) FROM pg_catalog.unnest(%s::int8[]) AS o", batch)
        objects = {row[0]: row[1:] for row in await _rows(reader, _OWNERS)}
        for batch in _batches(list(objects)):
            await _move(reader, writer, batch)
        roles = {row[0] for row in await _rows(writer, "SELECT rolname::text FROM pg_catalog.pg_roles WHERE pg_has_role(oid, 'MEMBER')")}
        known = {row[0] for row in await _rows(writer, "SELECT rolname::text FROM pg_catalog.pg_roles")} | {""}
        for oid, (owner, grants) in objects.items():
            statements = [
                f"GRANT {privilege} ON LARGE OBJECT {oid} TO {quote_identifier(role) if role else 'PUBLIC'}"
                for privilege, role in grants
                if role in known
            ]
            statements += [f"ALTER LARGE OBJECT {oid} OWNER TO {quote_identifier(owner)}"] if owner in roles else []
            with translated():
                await writer.execute("; ".join(statements).encode())
    finally:
        await reader.close()
        await writer.close()
    return len(objects)


async def _move(reader: _Connection, writer: _Connection, oids: Sequence[int]) -> None:
    offset, left = 0, list(oids)
    while left:
        parts = await _rows(
            reader, "SELECT o, pg_catalog.lo_get(o::oid, %s::int8, %s::int4) FROM pg_catalog.unnest(%s::int8[]) AS o", offset, _PART, left
        )
        create = "pg_catalog.lo_from_bytea(o::oid, b)" if not offset else "pg_catalog.lo_put(o::oid, %s::int8, b)"
        given = ([row[0] for row in parts], [row[1] for row in parts])
        query = f"SELECT {create} FROM ROWS FROM (pg_catalog.unnest(%s::int8[]), pg_catalog.unnest(%s::bytea[])) AS m (o, b)"  # noqa: S608
        await _rows(writer, query, *(() if not offset else (offset,)), *given)
        left = [oid for oid, part in parts if len(part) == _PART]
        offset += _PART


def _batches(oids: list[int]) -> list[list[int]]:
    return [oids[first : first + _OBJECTS] for first in range(0, len(oids), _OBJECTS)]


async def _rows(connection: _Connection, query: str, *values: object) -> list[tuple[Any, ...]]:
    with translated():
        return await (await connection.execute(query.encode(), values or None)).fetchall()
