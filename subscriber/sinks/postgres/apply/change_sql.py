"""The SQL of each change, with the semantics of PostgreSQL's apply worker.

Every parameter has the type of its column. So a text is read by the type's input function, and a binary value by its receive function,
exactly once, as in PostgreSQL's apply worker. Values never become literals.

In INSERT and UPDATE, parameters 1 to n are the new row's values in the order of the remote columns. The values that find the row follow. An
unchanged value (TOAST) is an unused parameter.

If the target's key is known, it finds the row. Otherwise (REPLICA IDENTITY FULL) all columns of the old row are compared. NULLs are
compared with IS NULL, so that an index can be used. Of several equal rows exactly one is changed: the statement first finds and locks a
row, and then changes it by its ctid. Columns of types without an equality operator (json, xml, point …) are compared as texts. Columns that
the publisher does not send are not compared. (PostgreSQL compares the target's extra columns with NULL, and then does not find the row.)

A BEFORE ROW trigger that returns NULL skips a row that exists. Then the command's row count is 0, but this is no conflict. So if a table
has BEFORE ROW triggers that fire for replicated changes, the row is also first found and then changed by its ctid, and the found rows are
counted.

If the target keeps commit timestamps, UPDATE and DELETE also report whether the row's last change came from another replication origin:
PostgreSQL's conflicts ``update_origin_differs`` and ``delete_origin_differs``. These statements, too, first find the row and then change it
by its ctid.
"""

# names are quoted, values are parameters
# ruff: noqa: S608

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from subscriber.interfaces import TableName
from subscriber.protocol.quoting import quote_identifier
from subscriber.sinks.postgres.session.origins import PARALLEL
from subscriber.sinks.postgres.session.statement import Statement, Truncated, Written
from subscriber.sinks.postgres.tables.relation_mapping import RelationMapping, TargetColumn, qualified_name

__all__ = [
    "OWN_ROLE",
    "SWITCH_ROLE",
    "Search",
    "control",
    "delete",
    "idle_assignment",
    "insert",
    "other_origin",
    "set_role",
    "truncate",
    "update",
    "values_of",
    "written_row",
]

_PARTITION: Final = {
    True: "(SELECT n.nspname::pg_catalog.text FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace"
    " WHERE c.oid = found.t),"
    " (SELECT c.relname::pg_catalog.text FROM pg_catalog.pg_class AS c WHERE c.oid = found.t)",
    False: "NULL, NULL",
}
_DIFFERS: Final = (
    "o.timestamp IS NOT NULL AND o.roident <> {origin} AND NOT EXISTS (SELECT FROM pg_catalog.pg_replication_origin AS own"
    f" WHERE own.roident = {{origin}} AND pg_catalog.starts_with(r.roname, own.roname || '{PARALLEL}'))"
)
"""Whether a row's last change has another origin: o is its time and origin, r the row of that origin."""
_FOUND: Final = "found.t = x.tableoid AND found.c = x.ctid"


def control(sql: str, parameter_types: tuple[int, ...] = (), *, ends: bool = False, reused: bool = False) -> Statement:
    """A statement that changes no replicated row: BEGIN, COMMIT, the position."""
    return Statement(sql.encode(), parameter_types, ends=ends, reused=reused)


SWITCH_ROLE: Final = b"SET LOCAL ROLE "
OWN_ROLE: Final = "SET LOCAL role TO DEFAULT"
"""Not NONE: ``options=-c role=…`` or ALTER ROLE … SET role may have given the session a role."""


def set_role(role: str | None, table: TableName | None = None) -> Statement:
    """Switch to ``role`` for the rest of the transaction; None: back to the session's own role, which may have a default.

    ``table``: the table that it is for, so that an error is this table's.
    """
    return Statement((f"{SWITCH_ROLE.decode()}{quote_identifier(role)}" if role else OWN_ROLE).encode(), (), table=table)


def _statement(
    mapping: RelationMapping,
    message_type: str,
    sql: str,
    searched: Sequence[TargetColumn],
    *,
    row: bool,
    finds: bool,
    written: Written | None = None,
) -> Statement:
    columns = (*(mapping.columns if row else ()), *searched)
    key = mapping.key or ()
    return Statement(
        sql.encode("utf-8", "surrogateescape"),
        tuple(column.type_oid for column in columns),
        tuple(column.name for column in columns),
        message_type,
        mapping.table.name,
        reused=True,
        finds=finds,
        identity=tuple(mapping.columns[index].name for index, _ in key),
        written=written,
    )


def written_row(mapping: RelationMapping, values: dict[str, str], own: str = "", *, missing: bool = False) -> str:
    """A query for the row that a change writes, with all columns of the target's table.

    Args:
        mapping: the relation and its target.
        values: the values that the change sets, by column.
        own: the predicate (over alias x) that finds the row to update; empty for an INSERT.
        missing: return the row also if there is none to update.
    """
    columns = (
        (column, values.get(column.name) or (f"x.{quote_identifier(column.name)}" if own else f"NULL::{column.type_name}"))
        for column in mapping.table.columns
    )
    row = "SELECT " + ", ".join(f"{value} AS {quote_identifier(column.name)}" for column, value in columns)
    if not own:
        return row
    if missing:
        return f"{row} FROM (SELECT 1) AS one LEFT JOIN (SELECT * FROM {mapping.table.scanned} AS x WHERE {own} LIMIT 1) AS x ON true"
    return f"{row} FROM {mapping.table.scanned} AS x WHERE {own} LIMIT 1"


def _written(mapping: RelationMapping, values: dict[str, str], own: str = "") -> Written:
    return Written(mapping.table.scanned, written_row(mapping, values, own), own, mapping.table.role)


def values_of(mapping: RelationMapping, unchanged: bytes = b"", *, replace: bool = True) -> dict[str, str]:
    """The parameters that are a new row's values, by column. ``unchanged``, ``replace``: see :func:`update`."""
    return {
        column.name: f"${index + 1}"
        for index, column in enumerate(mapping.columns)
        if unchanged[index : index + 1] != b"u" and (replace or not column.identity_always)
    }


def insert(mapping: RelationMapping) -> Statement:
    """Insert one row. Columns that the publisher does not have get their defaults; identity columns get the publisher's values."""
    if mapping.columns:
        names = ", ".join(quote_identifier(column.name) for column in mapping.columns)
        values = ", ".join(f"${number}" for number in range(1, len(mapping.columns) + 1))
        rest = f"({names}) OVERRIDING SYSTEM VALUE VALUES ({values})"
    else:
        rest = "DEFAULT VALUES"
    sql = f"INSERT INTO {qualified_name(mapping.table.name)} {rest}"
    written = _written(mapping, values_of(mapping))
    return _statement(mapping, "INSERT", sql, (), row=True, finds=False, written=written)


def _comparison(column: TargetColumn, equals: str | None, number: int) -> str:
    name = f"x.{quote_identifier(column.name)}"
    if equals is None:
        return f"{name}::pg_catalog.text OPERATOR(pg_catalog.=) ${number}::pg_catalog.text"
    return f"{name} {equals} ${number}"


class Search:
    """The predicate that finds the row, and the columns of its additional parameters.

    Args:
        nulls: one kind per remote column, as in TupleData: ``n`` is compared with IS NULL, ``u`` is not compared. Only used without a key.
        own: the predicate has its own parameters after those of the new row; False: it uses the new row's parameters.
        origin: report a row whose last change came from another replication origin than this one; None: do not report it.

    Attributes:
        values: the columns that are compared, with their values.
    """

    def __init__(self, mapping: RelationMapping, nulls: bytes, *, own: bool, first: int, origin: int | None) -> None:
        self.origin = origin
        self.scanned = mapping.table.scanned
        self.partitioned = mapping.table.kind == "p"
        self.parameters: list[TargetColumn] = []
        self.values: list[tuple[str, str]] = []
        columns = mapping.columns
        terms = []
        compared = mapping.key if mapping.key is not None else tuple((i, columns[i].equals) for i in range(len(columns)))
        for index, equals in compared:
            if mapping.key is None and nulls[index : index + 1] == b"u":
                continue
            if mapping.key is None and nulls[index : index + 1] == b"n":
                terms.append(f"x.{quote_identifier(columns[index].name)} IS NULL")
                self.values.append((columns[index].name, "NULL"))
                continue
            number = index + 1
            if own:
                self.parameters.append(columns[index])
                number = first + len(self.parameters)
            terms.append(_comparison(columns[index], equals, number))
            self.values.append((columns[index].name, f"${number}"))
        self.predicate = " AND ".join(terms) or "true"
        table = mapping.table
        self.one_of_many = mapping.unique_key is None or table.triggered or origin is not None

    @property
    def found(self) -> str:
        """The CTE that finds and locks one row."""
        columns = "x.tableoid AS t, x.ctid AS c" + (", x.xmin AS m" if self.origin is not None else "")
        return f"found AS (SELECT {columns} FROM {self.scanned} AS x WHERE {self.predicate} LIMIT 1 FOR UPDATE)"

    @property
    def count(self) -> str:
        """The query for the number of rows found, and for their other origin if ``origin`` is given."""
        return _count(self.scanned) if self.origin is None else _count_and_origin(self.scanned, self.origin, partitioned=self.partitioned)


def _count(scanned: str, more: str = "") -> str:
    """The query for the number of rows found.

    If another session changed the row while this statement waited for its lock, the statement finds a row version that its snapshot does
    not see, and so does not change it. That must be an error (division by zero), because COMMIT is already sent. See
    :func:`~subscriber.sinks.postgres.apply.error_reports.apply_error`.
    """
    seen = f"SELECT pg_catalog.count(*) AS n FROM {scanned} AS x, found WHERE {_FOUND}"
    return (
        f"SELECT CASE f.n WHEN s.n THEN f.n ELSE 1 / (f.n - f.n) END{more and ', d.*'}"
        f" FROM (SELECT pg_catalog.count(*) AS n FROM found) AS f, ({seen}) AS s{more}"
    )


def _count_and_origin(scanned: str, origin: int, *, partitioned: bool) -> str:
    """The query of :func:`_count`, with the last change of a row if it came from another origin.

    The additional columns are transaction, time and origin of that change (NULL: local; '': the origin was dropped), and schema and name of
    the partition that has the row.

    A row that our own transaction changed before is not reported, because it has no commit time yet.
    """
    other = (
        "SELECT found.m::pg_catalog.text AS xid, o.timestamp::pg_catalog.text AS at,"
        f" CASE WHEN o.roident <> 0 THEN coalesce(r.roname, '') END AS origin, {_PARTITION[partitioned]}"
        " FROM found CROSS JOIN LATERAL pg_catalog.pg_xact_commit_timestamp_origin(found.m) AS o"
        " LEFT JOIN pg_catalog.pg_replication_origin AS r ON r.roident = o.roident"
        f" WHERE {_DIFFERS.format(origin=origin)}"
    )
    return _count(scanned, f" LEFT JOIN ({other}) AS d ON true")


def other_origin(xid: str, origin: int) -> str:
    """Whether a transaction of the target has another replication origin than ``origin``."""
    return (
        f"EXISTS (SELECT FROM pg_catalog.pg_xact_commit_timestamp_origin({xid}) AS o"
        f" LEFT JOIN pg_catalog.pg_replication_origin AS r ON r.roident = o.roident WHERE {_DIFFERS.format(origin=origin)})"
    )


def delete(mapping: RelationMapping, nulls: bytes, *, origin: int | None) -> Statement:
    """Delete one row, found by the old tuple. ``origin``: see :class:`Search`."""
    search = Search(mapping, nulls, own=True, first=0, origin=origin)
    scanned = mapping.table.scanned
    if search.one_of_many:
        changed = f"changed AS (DELETE FROM {scanned} AS x USING found WHERE {_FOUND} RETURNING 1)"
        sql = f"WITH {search.found}, {changed} {search.count}"
    else:
        sql = f"DELETE FROM {scanned} AS x WHERE {search.predicate}"
    return _statement(mapping, "DELETE", sql, search.parameters, row=False, finds=search.one_of_many)


def update(mapping: RelationMapping, unchanged: bytes, nulls: bytes, *, old: bool, replace: bool, origin: int | None) -> Statement:
    """Update one row.

    Args:
        mapping: the relation and its target.
        unchanged: one byte per remote column: ``u`` if the target's value is kept.
        nulls: for the tuple that finds the row, see :class:`Search`.
        old: the publisher sent an old tuple, which finds the row; else the new row's values find it.
        replace: the UPDATE changes the identity column, which UPDATE cannot set. The row is deleted, and inserted with its other values.
        origin: see :class:`Search`.
    """
    search = Search(mapping, nulls, own=old, first=len(mapping.columns), origin=origin)
    scanned = mapping.table.scanned
    values = values_of(mapping, unchanged, replace=replace)
    if replace:
        sql = _replacement(mapping, search, values)
    else:
        assignments = ", ".join(f"{quote_identifier(name)} = {value}" for name, value in values.items()) or idle_assignment(mapping)
        sql = _update(search, scanned, assignments)
    written = _written(mapping, values, search.predicate)
    return _statement(mapping, "UPDATE", sql, search.parameters, row=True, finds=search.one_of_many, written=written)


def idle_assignment(mapping: RelationMapping) -> str | None:
    """An assignment that changes nothing. An UPDATE without changed values must still be executed, for its triggers and row count."""
    for column in mapping.table.columns:
        if not column.generated and not column.identity_always:
            return f"{quote_identifier(column.name)} = x.{quote_identifier(column.name)}"
    return None


def _update(search: Search, scanned: str, assignments: str | None) -> str:
    if assignments is None:
        if search.one_of_many:
            return f"WITH {search.found}, changed AS (SELECT FROM found) {search.count}"
        return f"SELECT FROM {scanned} AS x WHERE {search.predicate} FOR UPDATE"
    if search.one_of_many:
        changed = f"changed AS (UPDATE {scanned} AS x SET {assignments} FROM found WHERE {_FOUND} RETURNING 1)"
        return f"WITH {search.found}, {changed} {search.count}"
    return f"UPDATE {scanned} AS x SET {assignments} WHERE {search.predicate}"


def _replacement(mapping: RelationMapping, search: Search, values: dict[str, str]) -> str:
    kept = [column.name for column in mapping.table.columns if not column.generated]
    names = ", ".join(quote_identifier(name) for name in kept)
    row = ", ".join(values.get(name, f"gone.{quote_identifier(name)}") for name in kept)
    scanned = mapping.table.scanned
    where = f"USING found WHERE {_FOUND}" if search.one_of_many else f"WHERE {search.predicate}"
    gone = f"gone AS (DELETE FROM {scanned} AS x {where} RETURNING x.*)"
    added = f"INSERT INTO {qualified_name(mapping.table.name)} ({names}) OVERRIDING SYSTEM VALUE SELECT {row} FROM gone"
    if search.one_of_many:
        return f"WITH {search.found}, {gone}, changed AS ({added} RETURNING 1) {search.count}"
    return f"WITH {gone} {added}"


def truncate(mappings: Iterable[RelationMapping], *, restart_identity: bool) -> Statement:
    """Truncate several tables. Always RESTRICT, as in PostgreSQL: a table that is not replicated must not be truncated by CASCADE."""
    tables = {mapping.table.scanned: mapping.table for mapping in mappings}
    truncated = tuple(Truncated(table.name, scanned, table.role, table.referenced_by) for scanned, table in tables.items())
    identity = "RESTART" if restart_identity else "CONTINUE"
    sql = f"TRUNCATE {', '.join(tables)} {identity} IDENTITY RESTRICT".encode("utf-8", "surrogateescape")
    return Statement(sql, message_type="TRUNCATE", truncated=truncated)


def delete_all(mapping: RelationMapping) -> Statement:
    """Empty one table of a TRUNCATE while the others are kept. Foreign keys do not prevent DELETE, because their triggers are off."""
    sql = f"DELETE FROM {mapping.table.scanned}"
    return Statement(sql.encode("utf-8", "surrogateescape"), message_type="TRUNCATE", table=mapping.table.name)


def restart_sequences(mapping: RelationMapping) -> Statement:
    """Restart the table's sequences, as RESTART IDENTITY does."""
    return Statement(
        b"SELECT pg_catalog.setval(s.seqrelid::pg_catalog.regclass, s.seqstart, false) FROM pg_catalog.pg_sequence AS s"
        b" JOIN pg_catalog.pg_depend AS d ON d.objid = s.seqrelid AND d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass"
        b" WHERE d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.refobjid = %d AND d.deptype IN ('a', 'i')"
        % mapping.table.oid,
        table=mapping.table.name,
    )
