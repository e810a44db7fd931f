"""The publisher's relations, as Relation messages describe them, and their tables in the target.

A Relation message is valid for all later changes in the stream, and the publisher does not send it again. If its transaction is rolled
back, its description is discarded, and the transaction will bring it again. If its transaction is skipped, its description is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from sqlalchemy import Connection, Table, inspect, text
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.types import TypeEngine

from subscriber.catalog.model import PG_SUBSCRIPTION_REL
from subscriber.catalog.subscription_rows import SubscriptionRows
from subscriber.config import ConflictRules, SchemaChange, Settings
from subscriber.errors import RelationError, TargetError
from subscriber.interfaces import ColumnPlanner, NewColumnValues, PublishedTable, TableName
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Relation
from subscriber.sinks.described_relations import DescribedRelations
from subscriber.sinks.sqlalchemy.apply.relation_plan import RelationPlan
from subscriber.sinks.sqlalchemy.conflict_log import ConflictLog
from subscriber.sinks.sqlalchemy.schema.altered_columns import created_type
from subscriber.sinks.sqlalchemy.schema.column_steps import AddColumns, Step, steps, with_target
from subscriber.sinks.sqlalchemy.schema.reflection import reflect
from subscriber.sinks.sqlalchemy.schema.target_table import TargetTable, load_target_table
from subscriber.waits import moved

__all__ = ["RelationMap", "SchemaBehind", "has_triggers", "schema_change"]

_PREREQUISITE: Final = "55000"
_MYSQL: Final = frozenset({"mysql", "mariadb"})


class SchemaBehind(TargetError):
    """The columns of a target's table must be changed first. Never leaves this package.

    Attributes:
        relation: the relation of the table.
        published: the publisher's description of the table, or None.
        steps: what to do.
        final_lsn: of the transaction that needs it.
    """

    def __init__(self, relation: Relation, published: PublishedTable | None, steps: Sequence[Step], final_lsn: Lsn) -> None:
        said = ", ".join(map(str, steps))
        super().__init__(f'table "{relation.namespace}.{relation.name}" of the target does not have the columns of the publisher: {said}')
        self.relation = relation
        self.published = published
        self.steps = steps
        self.final_lsn = final_lsn


class RelationMap(DescribedRelations):
    """The publisher's relations by id, and their plans.

    Args:
        published: the latest descriptions from the publisher's catalog; shared with the sink, which updates it.
        settings: ``schema_change``.
        rules: what to do about conflicts.
        log: of conflicts, or None.

    Attributes:
        new_values: says what existing rows have in columns that are added; None: NULL.
    """

    def __init__(
        self, published: Mapping[TableName, PublishedTable], settings: Settings, rules: ConflictRules, log: ConflictLog | None
    ) -> None:
        super().__init__()
        self.log = log
        self._rules = rules
        self._published = published
        self._settings = settings
        self._plans: dict[int, RelationPlan] = {}
        self.new_values: NewColumnValues | None = None
        self._planner: ColumnPlanner | None = None
        self._rows: Callable[[AsyncConnection], SubscriptionRows] | None = None

    def follow(self, planner: ColumnPlanner, rows: Callable[[AsyncConnection], SubscriptionRows]) -> None:
        """Let the columns of the target follow the publisher's. ``rows``: of the subscription, in the open transaction."""
        self._planner, self._rows, self.follows = planner, rows, True

    def forget_targets(self) -> None:
        """Discard all plans, so that the target's tables are read again when they are needed."""
        self._plans.clear()

    def _forget_target(self, relation_id: int) -> None:
        self._plans.pop(relation_id, None)

    async def plan(self, connection: AsyncConnection, relation: Relation, final_lsn: Lsn) -> RelationPlan:
        """Return the relation's plan. Read the target's table if there is no plan yet.

        Args:
            connection: with an open transaction.
            relation: the relation.
            final_lsn: of the publisher's transaction.

        Raises:
            RelationError: the target's table does not fit, or it is not certain what the publisher changed.
            SchemaBehind: columns must be changed first.
            TargetUnavailable: the connection was lost.
            PublisherError: its catalog cannot be read.
        """
        found = self._plans.get(relation.relation_id)
        if found is None:
            await self._follow(connection, relation, final_lsn)
            found = self._plans[relation.relation_id] = await self._load(connection, relation, final_lsn)
            moved()
        return found

    async def _follow(self, connection: AsyncConnection, relation: Relation, final_lsn: Lsn) -> None:
        """Compare the columns with the publisher's catalog, and store those that are known now."""
        if self._planner is None or self._rows is None:
            return
        name, rows = TableName(relation.namespace, relation.name), self._rows(connection)
        known = await rows.known_columns(name)
        if known is None or known.relation_id != relation.relation_id:
            return
        plan = await self._planner(relation, final_lsn, known)
        if plan.drop and plan.dropped:
            found = await rows.rows.select(PG_SUBSCRIPTION_REL, {"srnspname": name.namespace, "srrelname": name.name})
            # another subscription may still have values for it
            plan = replace(plan, drop=all(row["srsubid"] == rows.oid for row in found))
        table = await reflect(connection, name)
        if plan.known is None or table is None:
            return
        published, dialect = self._published.get(name), connection.dialect
        keys = {column for key in table.keys for column in key}

        def created(column: str) -> TypeEngine[Any]:
            return created_type(dialect, relation, published, column, key=column in keys)

        left = list(steps(known, plan, name, table, dialect=dialect.name, created=created))
        if left:
            raise SchemaBehind(relation, published, left, final_lsn)
        await rows.store_columns(name, with_target(plan.known, table))

    async def _load(self, connection: AsyncConnection, relation: Relation, final_lsn: Lsn) -> RelationPlan:
        name = TableName(relation.namespace, relation.name)
        published = self._published.get(name)
        target = await load_target_table(connection, relation, published)
        if target.missing:
            match schema_change(self._settings, name, target.missing):
                case "add":
                    target.require_addable()
                    values = dict.fromkeys(target.missing)
                    if self.new_values is not None:
                        values |= await self.new_values(relation, target.missing)
                    raise SchemaBehind(relation, published, [AddColumns(values)], final_lsn)
                case "error":
                    target.require_complete()
                case "ignore":
                    pass
        ordered, unique = await connection.run_sync(_facts, target)
        key = {target.columns[number].name for number in target.key or ()}
        keyed = target.key is not None and all(columns == key for columns in unique) and not ordered
        rules = self._rules.of(name.namespace, name.name)
        if not any(columns <= key for columns in unique):
            # no row conflicts
            rules = replace(rules, insert_exists="error")
        return RelationPlan(
            relation,
            target,
            connection.dialect,
            keyed=keyed,
            ordered=ordered,
            problem=_problem(relation, target, unique),
            rules=rules,
        )


def schema_change(settings: Settings, table: TableName, missing: tuple[str, ...]) -> SchemaChange:
    """Return what to do about columns that a table of the target lacks, by the user's setting."""
    choice = settings.schema_change
    if choice == "follow":
        # of a table whose columns are not known yet
        return "add"
    return choice if isinstance(choice, str) else choice(table.namespace, table.name, missing)


def _facts(connection: Connection, target: TargetTable) -> tuple[bool, list[set[str]]]:
    """Return whether triggers fire for replicated changes, and the columns of each unique key."""
    table = target.table
    inspector = inspect(connection)
    unique: list[Any] = [inspector.get_pk_constraint(table.name, schema=table.schema)["constrained_columns"]]
    unique += [found["column_names"] for found in inspector.get_unique_constraints(table.name, schema=table.schema)]
    unique += [found["column_names"] for found in inspector.get_indexes(table.name, schema=table.schema) if found["unique"]]
    return has_triggers(connection, table), [set(columns) for columns in unique if columns]


def _problem(relation: Relation, target: TargetTable, unique: list[set[str]]) -> RelationError | None:
    """Return why UPDATE and DELETE are impossible, in PostgreSQL's words, or None. Unlike there, any key of the target is enough."""
    identity = {column.name for column in relation.columns if column.key}
    if relation.replica_identity == "f" or any(columns <= identity for columns in unique):
        return None
    if unique and identity:
        return RelationError(
            f'publisher did not send replica identity column expected by the logical replication target relation "{target.name}"',
            sqlstate=_PREREQUISITE,
            hint="make a key of the target's table a part of the publisher's replica identity",
        )
    return RelationError(
        f'logical replication target relation "{target.name}" has neither REPLICA IDENTITY index nor PRIMARY KEY column '
        "and published relation does not have REPLICA IDENTITY FULL",
        sqlstate=_PREREQUISITE,
        hint="add a primary key to the target's table, or ALTER TABLE ... REPLICA IDENTITY FULL on the publisher",
    )


def has_triggers(connection: Connection, table: Table) -> bool:
    """Whether triggers fire for replicated changes, for each row or before or after a statement. They may skip a row.

    An ON CONFLICT IGNORE in a constraint of SQLite may skip a row too: it counts as a trigger here.
    """
    dialect = connection.dialect
    names = {"name": table.name}
    if dialect.name == "sqlite":
        query = _SQLITE_TRIGGERS
    elif dialect.name in _MYSQL:
        query = "SELECT 1 FROM information_schema.triggers WHERE event_object_schema = DATABASE() AND event_object_table = :name LIMIT 1"
    else:
        return False
    return connection.execute(text(query), names).scalar() is not None


_SQLITE_TRIGGERS: Final = """
SELECT 1 FROM sqlite_master
WHERE lower(tbl_name) = lower(:name) AND (type = 'trigger' OR type = 'table' AND sql LIKE '%ON%CONFLICT%IGNORE%') LIMIT 1
"""
