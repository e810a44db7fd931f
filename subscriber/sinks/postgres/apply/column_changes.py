"""``schema_change = follow``: change the columns of a table in the transaction of the row that needs it.

The statements are sent in the pipeline, between the changes before and after the Relation message. They, the known columns and the position
are committed together. So a crash leaves nothing half done, and a transaction that comes again finds the columns as they were before it.
The catalogs of the target are read in the same session, because no other one sees the columns before the commit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from psycopg.adapt import PyFormat, Transformer

from subscriber.catalog.model import PG_SUBSCRIPTION_REL, known_values
from subscriber.errors import RelationError
from subscriber.interfaces import AddColumn, ChangeType, ColumnPlan, ColumnPlanner, TableName
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Relation
from subscriber.protocol.quoting import quote_identifier, quote_literal
from subscriber.sinks.postgres.apply.change_sql import control
from subscriber.sinks.postgres.session.catalog_reader import CatalogQueries
from subscriber.sinks.postgres.session.pipeline import Pipeline
from subscriber.sinks.postgres.session.statement import Statement
from subscriber.sinks.postgres.tables.relation_map import RelationMap
from subscriber.sinks.postgres.tables.relation_mapping import STREAM_HINT, TargetColumn, TargetTable, qualified_name
from subscriber.sinks.postgres.tables.table_reader import read_table
from subscriber.transaction.column_history import KnownColumns
from subscriber.transaction.type_changes import is_exact, keeps_values

__all__ = ["ColumnChange", "alteration", "column_changes", "plan_columns", "queries_of", "read_again", "remember_columns", "with_target"]

_OID: Final = 26
_TEXT: Final = 25
_LOCK_SECONDS: Final = 5
"""How long other sessions may keep the table locked. Meanwhile, those that come later wait behind ALTER TABLE."""

_KNOWN: Final = """
SELECT srcolumns FROM subscriber.pg_subscription_rel WHERE srsubid = $1::int8::oid AND srrelid = $2::int8::oid
"""
_REMEMBER: Final = control(
    "UPDATE subscriber.pg_subscription_rel SET srcolumns = $1 WHERE srsubid = $2 AND srrelid = $3", (_TEXT, _OID, _OID)
)
_ROOT: Final = """
SELECT n.nspname::text AS namespace, c.relname::text AS name, pg_catalog.current_setting('lock_timeout') AS timeout
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = $1::int8::oid
"""
_OTHERS: Final = """
SELECT 1 FROM (SELECT $1::int8::oid AS relid UNION SELECT relid FROM pg_catalog.pg_partition_tree($1::int8::oid)) AS tree
 WHERE EXISTS (SELECT 1 FROM subscriber.pg_subscription_rel AS s WHERE s.srrelid = tree.relid AND s.srsubid <> $2::int8::oid)
    OR EXISTS (SELECT 1 FROM pg_catalog.pg_subscription_rel AS s WHERE s.srrelid = tree.relid)
"""
_NEEDED_BY: Final = """
SELECT DISTINCT CASE WHEN i.oid IS NOT NULL THEN pg_catalog.format('DROP INDEX %s', i.oid::pg_catalog.regclass)
                     WHEN n.oid IS NOT NULL THEN pg_catalog.format('ALTER TABLE %s DROP CONSTRAINT %I',
                                                                   n.conrelid::pg_catalog.regclass, n.conname)
                     ELSE pg_catalog.format('DROP %s %s', CASE v.relkind WHEN 'm' THEN 'MATERIALIZED VIEW' ELSE 'VIEW' END,
                                            v.oid::pg_catalog.regclass) END AS statement
  FROM (SELECT $1::int8::oid AS relid UNION SELECT relid FROM pg_catalog.pg_partition_tree($1::int8::oid)) AS tree
  JOIN pg_catalog.pg_attribute AS a ON a.attrelid = tree.relid AND a.attname = $2::text AND NOT a.attisdropped
  JOIN pg_catalog.pg_depend AS d ON d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass
                                AND d.refobjid = a.attrelid AND d.refobjsubid = a.attnum
  LEFT JOIN pg_catalog.pg_class AS i ON d.classid = d.refclassid AND i.oid = d.objid AND i.relkind IN ('i', 'I') AND NOT i.relispartition
  LEFT JOIN pg_catalog.pg_constraint AS n ON d.classid = 'pg_catalog.pg_constraint'::pg_catalog.regclass AND n.oid = d.objid
                                         AND n.contype <> 'n' AND n.coninhcount = 0 AND n.conparentid = 0
  LEFT JOIN pg_catalog.pg_rewrite AS r ON d.classid = 'pg_catalog.pg_rewrite'::pg_catalog.regclass AND r.oid = d.objid
  LEFT JOIN pg_catalog.pg_class AS v ON v.oid = r.ev_class AND v.relkind IN ('v', 'm')
 WHERE COALESCE(i.oid, n.oid, v.oid) IS NOT NULL
 ORDER BY 1
"""
"""Statements that remove what needs a column. DROP COLUMN itself would silently drop indexes and constraints of the table."""


class _Queries:
    """Queries in a pipeline: they see what its statements have done. See ``CatalogQueries``."""

    def __init__(self, pipeline: Pipeline, owner: str | None) -> None:
        self._pipeline = pipeline
        self.owner = owner

    async def fetch(self, query: str, *parameters: object) -> list[dict[str, Any]]:
        values = Transformer()
        dumped = values.dump_sequence(parameters, [PyFormat.TEXT] * len(parameters))
        result = await self._pipeline.ask(Statement(query.encode(), values.types or ()), _raw(dumped), None)
        values.set_pgresult(result)
        names = [(result.fname(place) or b"").decode() for place in range(result.nfields)]
        return [dict(zip(names, row, strict=True)) for row in values.load_rows(0, result.ntuples, tuple)]


def _raw(dumped: Sequence[Any]) -> list[bytes | None]:
    return [None if value is None else bytes(value) for value in dumped]


@dataclass(frozen=True, slots=True)
class ColumnChange:
    """A part of ALTER TABLE.

    Attributes:
        action: what follows the table's name.
        quietly: if it is rejected, only a warning in the server's log tells.
        drops: the column that it drops, or None.
    """

    action: str
    quietly: bool = False
    drops: str | None = None

    def sql(self, root: TableName) -> str:
        """The statement. ``root``: the root of the table's partitions, or the table itself."""
        sql = f"ALTER TABLE {qualified_name(root)} {self.action}"
        if self.quietly:
            warned = f"BEGIN EXECUTE {quote_literal(sql)}; EXCEPTION WHEN OTHERS THEN RAISE WARNING '%', SQLERRM; END"
            return f"DO {quote_literal(warned)}"
        return sql


async def plan_columns(
    planner: ColumnPlanner, relation: Relation, final_lsn: Lsn, pipeline: Pipeline, relations: RelationMap
) -> tuple[TargetTable, ColumnPlan]:
    """Read the target's table and its known columns, and ask what to change.

    Raises:
        RelationError: there is no such table, or it is not certain what to change.
        PublisherError, TargetError: also of an earlier statement of the pipeline.
    """
    queries = _Queries(pipeline, relations.owner)
    name = TableName(relation.namespace, relation.name)
    table = await read_table(queries, name, as_owner=relations.as_owner, hint=STREAM_HINT)
    if relations.subscription is None:
        return table, ColumnPlan()
    known = None
    for row in await queries.fetch(_KNOWN, relations.subscription, table.oid):
        if row["srcolumns"] is not None:
            with known_values(PG_SUBSCRIPTION_REL):
                known = KnownColumns.parse(row["srcolumns"])
    if known is not None and known.relation_id != relation.relation_id:
        known = None
    plan = await planner(relation, final_lsn, known)
    if plan.drop and plan.dropped and await queries.fetch(_OTHERS, table.tree, relations.subscription):
        # another subscription may still have values for it
        plan = replace(plan, drop=False)
    return table, plan


async def alteration(table: TargetTable, changes: Sequence[ColumnChange], pipeline: Pipeline) -> tuple[list[Statement], list[Statement]]:
    """Statements that lock a table with all tables of its partition tree, and statements that change its columns.

    ALTER TABLE names the root of the tree.

    Raises:
        RelationError: an index, a constraint or a view needs a column that is to be dropped.
    """
    queries = _Queries(pipeline, None)
    (row,) = await queries.fetch(_ROOT, table.tree)
    root = TableName(row["namespace"], row["name"])
    for column in (each.drops for each in changes if each.drops is not None):
        if needed := await queries.fetch(_NEEDED_BY, table.tree, column):
            raise _needed(table, column, [each["statement"] for each in needed])
    texts = [each.sql(root) for each in changes]
    hint = "let the target accept this, or execute it there as the owner of the table: " + "; ".join(texts)
    locks = [
        control(f"SET LOCAL lock_timeout = '{_LOCK_SECONDS}s'"),
        Statement(f"LOCK TABLE {qualified_name(root)} IN ACCESS EXCLUSIVE MODE".encode(), table=table.name, hint=hint),
        control(f"SET LOCAL lock_timeout = {quote_literal(row['timeout'])}"),
    ]
    return locks, [Statement(text.encode(), table=table.name, hint=hint) for text in texts]


def queries_of(pipeline: Pipeline, relations: RelationMap) -> CatalogQueries:
    """Reads the catalogs in the pipeline, so that it sees what was changed there."""
    return _Queries(pipeline, relations.owner)


async def read_again(table: TargetTable, pipeline: Pipeline, relations: RelationMap) -> TargetTable:
    """Read a table whose columns were changed in the pipeline."""
    return await read_table(_Queries(pipeline, relations.owner), table.name, as_owner=relations.as_owner)


def with_target(known: KnownColumns, table: TargetTable, *, learned: bool = False) -> KnownColumns:
    """The known columns with those of the target. ``learned``: for the first time.

    A number is never used twice. So it tells which column of the target belongs to a column of the publisher, even if both were renamed.
    """
    names, numbers = {each.name for each in known.columns}, dict(known.target)
    found = ((each.number, each.name) for each in table.columns if learned or each.name in names or each.number in numbers)
    return replace(known, target=tuple(found))


def remember_columns(subscription: int, table: TargetTable, known: KnownColumns) -> tuple[Statement, None, list[bytes | None]]:
    """The arguments of :meth:`Pipeline.send` that store the known columns."""
    return _REMEMBER, None, [with_target(known, table).text().encode(), b"%d" % subscription, b"%d" % table.oid]


def column_changes(table: TargetTable, plan: ColumnPlan, known: KnownColumns) -> Iterator[ColumnChange]:
    """The changes that the table lacks. Some may have been made already: by hand, or for the rows of another partition.

    Args:
        table: of the target.
        plan: what changed on the publisher.
        known: the known columns, after these changes.

    Raises:
        RelationError: another column has the name that one is to get, or a type cannot be changed without loss of exactness.
    """
    here = {column.name: column for column in table.columns}
    numbers = {column.number: column for column in table.columns}
    then = {name: numbers[number] for number, name in known.target if number in numbers}
    older = {column.number for column in then.values()}

    for dropped in [then[name] for name in plan.dropped if name in then]:
        if plan.drop:
            yield ColumnChange(f"DROP COLUMN {quote_identifier(dropped.name)}", drops=dropped.name)
            del here[dropped.name]
        elif dropped.not_null and not dropped.identity:
            yield ColumnChange(f"ALTER COLUMN {quote_identifier(dropped.name)} DROP NOT NULL")
    renamed = {old: new for old, new in (plan.renamed or {}).items() if old in then and then[old].name == old}
    for new in renamed.values():
        if new in here and new not in renamed:
            raise _blocked(table, new)
    taken = {old: f"subscriber_renamed_{number}" for number, old in enumerate(renamed) if old in renamed.values()}
    for old, aside in taken.items():
        yield ColumnChange(f"RENAME COLUMN {quote_identifier(old)} TO {aside}")
    for old, new in renamed.items():
        yield ColumnChange(f"RENAME COLUMN {quote_identifier(taken.get(old, old))} TO {quote_identifier(new)}")
    now = {renamed.get(name, name): column for name, column in here.items()}
    before = {new: old for old, new in (plan.renamed or {}).items()}
    added_names = {added.name for added in plan.added}
    recorded = {name for _, name in known.target}
    for name in (each.name for each in known.columns if each.name not in added_names):
        belongs, found = then.get(before.get(name, name)), now.get(name)
        if belongs is not None and found is not None and belongs is not found and found.number in older:
            raise _swapped(table, name, belongs.name)
        if found is None and before.get(name, name) in recorded:
            raise _lost(table, name)
    for change in plan.retyped:
        column = now.get(change.name)
        if column is None or column.type_name == change.new:
            continue
        if column.type_name == change.old:
            if not is_exact(change.old, change.new):
                raise _inexact(table, column, change)
            yield ColumnChange(_new_type(change))
        elif not keeps_values(change.old, change.new):
            raise _inexact(table, column, change)
    for added in plan.added:
        if added.name not in now:
            if added.unknown is not None:
                raise added.unknown
            yield from map(ColumnChange, _definition(added))
            if added.default is not None:
                yield ColumnChange(f"ALTER COLUMN {quote_identifier(added.name)} SET DEFAULT {added.default}", quietly=True)
        elif now[added.name].number in older:
            raise _blocked(table, added.name)


def _definition(added: AddColumn) -> Iterator[str]:
    """Add a column. All existing rows get the value without being written."""
    collation = "" if added.collation is None else f" COLLATE {added.collation}"
    # NULL, even if a domain has a default
    value = "NULL" if added.missing is None else f"{quote_literal(added.missing)}::{added.type}"
    yield f"ADD COLUMN {quote_identifier(added.name)} {added.type}{collation} DEFAULT {value}"
    if added.default is None:
        # of varchar(9), NULL would be stored as a default
        yield f"ALTER COLUMN {quote_identifier(added.name)} DROP DEFAULT"


def _new_type(change: ChangeType) -> str:
    return f"ALTER COLUMN {quote_identifier(change.name)} TYPE {change.new}"


def _inexact(table: TargetTable, column: TargetColumn, change: ChangeType) -> RelationError:
    return RelationError(
        f'column "{change.name}" of table "{table.name}" has type {change.new} on the publisher and {column.type_name} in the target, and a'
        " cast may give other values than those of the publisher",
        hint=f"execute: ALTER TABLE {qualified_name(table.name)} {_new_type(change)} USING …; then compare the rows with"
        f" --resync {table.name}",
        sqlstate="55000",
    )


def _needed(table: TargetTable, name: str, statements: Sequence[str]) -> RelationError:
    return RelationError(
        f'column "{name}" of table "{table.name}" was dropped on the publisher, and indexes, constraints or views of the target need it',
        hint=f"execute there: {'; '.join(statements)}; or keep the column with dropped_columns = keep",
        sqlstate="2BP01",
    )


def _swapped(table: TargetTable, name: str, other: str) -> RelationError:
    return RelationError(
        f'column "{name}" of table "{table.name}" has been renamed to "{other}" in the target, where another column has its name now',
        hint=f"rename both back; or compare all rows with `subscriber alter NAME --resync {table.name}`",
        sqlstate="55000",
    )


def _lost(table: TargetTable, name: str) -> RelationError:
    return RelationError(
        f'column "{name}" of table "{table.name}" has been renamed or dropped in the target',
        hint=f"rename it back; or `subscriber alter NAME --resync {table.name}` adds the column and compares all rows",
        sqlstate="55000",
    )


def _blocked(table: TargetTable, name: str) -> RelationError:
    return RelationError(
        f'table "{table.name}" of the target has another column "{name}", whose name a column of the publisher has now',
        hint=f"rename it, or execute: ALTER TABLE {qualified_name(table.name)} DROP COLUMN {quote_identifier(name)};"
        f" or take it for the publisher's with `subscriber alter NAME --resync {table.name}`",
        sqlstate="42701",
    )
