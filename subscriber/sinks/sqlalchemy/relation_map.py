"""What is known of the publisher's relations, and of their tables in the target.

Relation messages describe relations for all that follows in the stream. So they count from the transaction that carries them on, once that
is applied or passed over; what a transaction that was rolled back described comes again with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import Connection, Table, inspect, text
from sqlalchemy.ext.asyncio import AsyncConnection

from subscriber.abc import PublishedTable, TableName
from subscriber.config import SchemaChange, Settings
from subscriber.errors import RelationError, TargetError
from subscriber.protocol.messages import Relation
from subscriber.sinks.described import DescribedRelations
from subscriber.sinks.sqlalchemy.columns import TargetTable, load_target_table
from subscriber.sinks.sqlalchemy.relation_plan import RelationPlan

__all__ = ["RelationMap", "SchemaBehind", "has_triggers", "schema_change"]

_PREREQUISITE: Final = "55000"
_MYSQL: Final = frozenset({"mysql", "mariadb"})


class SchemaBehind(TargetError):
    """The target's table lacks columns that are to be added first. Never leaves this package.

    Attributes:
        relation: whose.
        published: what the publisher's catalog said of it.
    """

    def __init__(self, relation: Relation, published: PublishedTable | None) -> None:
        super().__init__(f'table "{relation.namespace}.{relation.name}" of the target lacks columns of the publisher')
        self.relation = relation
        self.published = published


class RelationMap(DescribedRelations):
    """Remote relations by id, and the plans made of them.

    Args:
        published: what the publisher's catalog said of tables last; shared with the sink, which keeps it up to date.
        settings: ``schema_change``, ``insert_conflict``.
    """

    def __init__(self, published: Mapping[TableName, PublishedTable], settings: Settings) -> None:
        super().__init__()
        self._published = published
        self._settings = settings
        self._plans: dict[int, RelationPlan] = {}

    def forget_targets(self) -> None:
        """Read the target's tables again when they are needed next."""
        self._plans.clear()

    def _forget_target(self, relation_id: int) -> None:
        self._plans.pop(relation_id, None)

    def planned(self, relation_id: int) -> RelationPlan | None:
        """The relation with its target, if that was read already."""
        return self._plans.get(relation_id)

    async def plan(self, connection: AsyncConnection, relation: Relation) -> RelationPlan:
        """The relation with its target.

        Raises:
            RelationError: they do not fit.
            SchemaBehind: columns are to be added first, in a transaction apart.
            TargetUnavailable: the connection was lost.
        """
        found = self._plans.get(relation.relation_id)
        if found is None:
            found = self._plans[relation.relation_id] = await self._load(connection, relation)
        return found

    async def _load(self, connection: AsyncConnection, relation: Relation) -> RelationPlan:
        name = TableName(relation.namespace, relation.name)
        published = self._published.get(name)
        target = await load_target_table(connection, relation, published)
        if target.missing:
            match schema_change(self._settings, name, target.missing):
                case "add":
                    target.require_addable()
                    raise SchemaBehind(relation, published)
                case "error":
                    target.require_complete()
                case "ignore":
                    pass
        ordered, unique = await connection.run_sync(_facts, target)
        key = {target.columns[number].name for number in target.key or ()}
        keyed = target.key is not None and all(columns == key for columns in unique) and not ordered
        if self._settings.insert_conflict == "upsert":
            # where another key is equal in the target, an INSERT finds its row
            keyed = keyed and all(target.columns[number].exact for number in target.key or ())
        return RelationPlan(
            relation,
            target,
            connection.dialect,
            self._settings.insert_conflict,
            keyed=keyed,
            ordered=ordered,
            problem=_problem(relation, target, unique),
        )


def schema_change(settings: Settings, table: TableName, missing: tuple[str, ...]) -> SchemaChange:
    """What the user wants with columns that a table of the target has not."""
    choice = settings.schema_change
    return choice if isinstance(choice, str) else choice(table.namespace, table.name, missing)


def _facts(connection: Connection, target: TargetTable) -> tuple[bool, list[set[str]]]:
    """Whether triggers fire for our changes; and what makes rows unique: columns of each key."""
    table = target.table
    inspector = inspect(connection)
    unique: list[Any] = [inspector.get_pk_constraint(table.name, schema=table.schema)["constrained_columns"]]
    unique += [found["column_names"] for found in inspector.get_unique_constraints(table.name, schema=table.schema)]
    unique += [found["column_names"] for found in inspector.get_indexes(table.name, schema=table.schema) if found["unique"]]
    return has_triggers(connection, table), [set(columns) for columns in unique if columns]


def _problem(relation: Relation, target: TargetTable, unique: list[set[str]]) -> RelationError | None:
    """Why UPDATE and DELETE are impossible, in native's words. Unlike native's, any key of the target will do."""
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
    """Whether triggers see changes as they are applied, row by row or before and behind a statement; they may pass over a row.

    So may an ON CONFLICT IGNORE in a constraint of SQLite, and a rule of PostgreSQL.
    """
    dialect = connection.dialect
    names = {"name": table.name}
    if dialect.name == "sqlite":
        query = _SQLITE_TRIGGERS
    elif dialect.name in _MYSQL:
        query = "SELECT 1 FROM information_schema.triggers WHERE event_object_schema = DATABASE() AND event_object_table = :name LIMIT 1"
    elif dialect.name == "postgresql":
        query = _POSTGRESQL_TRIGGERS
        names = {"name": dialect.identifier_preparer.format_table(table)}
    else:
        return False
    return connection.execute(text(query), names).scalar() is not None


_SQLITE_TRIGGERS: Final = """
SELECT 1 FROM sqlite_master
WHERE lower(tbl_name) = lower(:name) AND (type = 'trigger' OR type = 'table' AND sql LIKE '%ON%CONFLICT%IGNORE%') LIMIT 1
"""
# Under session_replication_role = replica only those fire that ask for it; of a partitioned table, those of its partitions too.
_POSTGRESQL_TRIGGERS: Final = """
WITH RECURSIVE tree (oid) AS (
    SELECT pg_catalog.to_regclass(:name)::oid
    UNION ALL
    SELECT i.inhrelid FROM tree JOIN pg_catalog.pg_inherits AS i ON i.inhparent = tree.oid
      JOIN pg_catalog.pg_class AS c ON c.oid = i.inhrelid AND c.relispartition
)
SELECT 1 FROM tree
 WHERE EXISTS (SELECT FROM pg_catalog.pg_trigger AS t WHERE t.tgrelid = tree.oid AND NOT t.tgisinternal AND t.tgenabled IN ('A', 'R'))
    OR EXISTS (SELECT FROM pg_catalog.pg_rewrite AS r WHERE r.ev_class = tree.oid AND r.ev_enabled IN ('A', 'R'))
 LIMIT 1
"""
