"""How a relation of the publisher maps to a table of the target.

Columns are matched by name. An UPDATE or DELETE finds its row by the *target's* replica identity index, or else by its primary key. If the
target has neither, the whole old row is compared, if the publisher sends it (REPLICA IDENTITY FULL).
The texts of errors are those of PostgreSQL's ``relation.c`` and ``worker.c``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from subscriber.config import TableRules
from subscriber.errors import MissingColumns, RelationError
from subscriber.interfaces import PublishedTable, TableName
from subscriber.protocol.messages import Column, Relation, ReplicaIdentity
from subscriber.protocol.quoting import quote_identifier
from subscriber.sinks.postgres.session.statement import Statement
from subscriber.sinks.postgres.tables.fingerprint import Fingerprint

__all__ = [
    "RelationMapping",
    "Resolving",
    "TargetColumn",
    "TargetTable",
    "UniqueIndex",
    "described_relation",
    "map_relation",
    "qualified_name",
]

_PREREQUISITE: Final = "55000"
_WRONG_OBJECT: Final = "42809"

_KINDS: Final = {
    "v": "views",
    "m": "materialized views",
    "f": "foreign tables",
    "i": "indexes",
    "I": "partitioned indexes",
    "S": "sequences",
    "c": "composite types",
    "t": "TOAST tables",
}


def qualified_name(table: TableName) -> str:
    """The table's qualified name, quoted for SQL."""
    return f"{quote_identifier(table.namespace)}.{quote_identifier(table.name)}"


@dataclass(frozen=True, slots=True)
class TargetColumn:
    """One column of a target table.

    Attributes:
        type_oid: the column's type. Parameters have this type, so values are read by its own input or receive function.
        generated: the target computes its values.
        identity_always: ``GENERATED ALWAYS AS IDENTITY``: an UPDATE cannot set it.
        equals: the equality operator as SQL; None: the type has none, and values are compared as texts.
        array: the type of arrays of such values; 0: there is none, or its elements are not read as single values are.
        delimiter: separates the elements of such an array.
        cast: if ``array`` is ``text[]``: the type to which an element is cast. The cast calls the input function.
        deterministic: values are equal only if their bytes are, as far as the collation decides it.
        modifier: ``pg_attribute.atttypmod``.
        not_null: the column rejects NULL.
        identity: the target has a value for rows that are inserted without one.
        number: ``pg_attribute.attnum``.
    """

    name: str
    type_oid: int
    type_name: str
    generated: bool
    identity_always: bool
    equals: str | None
    array: int = 0
    delimiter: str = ","
    cast: str | None = None
    deterministic: bool = False
    modifier: int = -1
    not_null: bool = True
    identity: bool = False
    number: int = 0


@dataclass(frozen=True, slots=True)
class TargetTable:
    """One table of the target.

    Attributes:
        fingerprint: changes if the table is altered.
        kind: ``pg_class.relkind``.
        role: the role that changes the table (SET ROLE), or None: the session's own role.
        rls_user: the role for which row-level security would be in force, or None.
        key: column names of the replica identity index or primary key, with the equality operators of that index; empty: the table has
            neither.
        key_unique: the key is unique in the whole table, not only in each partition.
        referenced_by: other tables whose foreign keys reference it.
        rule: a rule that is ENABLE ALWAYS or REPLICA, or None.
        barred: the subscription's owner, if that role cannot become the table's owner; else None.
        triggered: a BEFORE ROW trigger is ENABLE ALWAYS or REPLICA. It may skip a row that exists.
        watched: a trigger, or a function of a default, a CHECK constraint or a domain, may see which rows are already changed. Or a
            partition is a foreign table.
        other_unique: it or a partition has a unique index or an exclusion constraint besides the key.
        tree: oid of the root of its partition tree; of itself if it is no partition.
        unchecked: only the types of its columns and NOT NULL can reject a row: there is no CHECK constraint, no generated column, no
            partition, and no index that computes an expression or has an operator class of an extension. The target's encoding is UTF8.
    """

    name: TableName
    oid: int
    fingerprint: Fingerprint
    kind: str
    role: str | None
    rls_user: str | None
    columns: tuple[TargetColumn, ...]
    key: tuple[tuple[str, str | None], ...]
    key_unique: bool = True
    referenced_by: frozenset[TableName] = frozenset()
    rule: str | None = None
    barred: str | None = None
    triggered: bool = False
    watched: bool = True
    other_unique: bool = True
    tree: int = 0
    unchecked: bool = False

    @property
    def scanned(self) -> str:
        """The table in FROM, UPDATE, DELETE, TRUNCATE. As in PostgreSQL, children of an ordinary table are excluded (ONLY)."""
        return qualified_name(self.name) if self.kind == "p" else f"ONLY {qualified_name(self.name)}"

    @property
    def is_table(self) -> bool:
        """Whether it is a table or a partitioned table. Other relations cannot be added to a subscription."""
        return self.kind in {"r", "p"}

    def require_usable(self) -> None:
        """Reject a relation that cannot be a target.

        Raises:
            RelationError: as in PostgreSQL, the relation is no table, or row-level security is in force for the role. Also if the
                subscription's owner cannot become the table's owner, or a rule would rewrite our statements. PostgreSQL's apply worker can
                ignore such a rule, because it executes no SQL.
        """
        if not self.is_table:
            raise RelationError(
                f'cannot use relation "{self.name}" as logical replication target',
                sqlstate=_WRONG_OBJECT,
                hint=f"This operation is not supported for {_KINDS.get(self.kind, 'such relations')}.",
            )
        if self.barred is not None:
            raise RelationError(
                f'role "{self.barred}", the owner of the subscription, cannot SET ROLE to the owner of relation "{self.name}"',
                sqlstate="42501",
                hint="grant it that role, or set run_as_owner = true",
            )
        if self.rls_user is not None:
            raise RelationError(
                f'user "{self.rls_user}" cannot replicate into relation with row-level security enabled: "{self.name.name}"',
                sqlstate="0A000",
                hint="give the role BYPASSRLS, disable row-level security on the table, or do not force it on the owner",
            )
        if self.rule is not None:
            raise RelationError(
                f'rule "{self.rule}" of logical replication target relation "{self.name}" applies to replicated changes',
                sqlstate=_PREREQUISITE,
                hint="ALTER TABLE ... ENABLE RULE or DISABLE RULE: ordinary rules do not apply to them",
            )


@dataclass(frozen=True, slots=True)
class UniqueIndex:
    """A unique index: name, predicate if it is partial, key columns or expressions, and their equality operators."""

    name: str
    predicate: str | None
    keys: tuple[str, ...]
    operators: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Resolving:
    """What a table's conflicts are resolved by.

    Attributes:
        rules: its rules.
        indexes: its unique indexes, the one of the key first.
        horizon: the transaction of the target that ended the table's synchronization, or None. Its rows from before count as the
            subscription's own.
        logged: whether conflicts are written into a table.
        log_rows: whether the rows are written there too.
    """

    rules: TableRules
    indexes: tuple[UniqueIndex, ...]
    horizon: int | None = None
    logged: bool = False
    log_rows: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class RelationMapping:
    """A publisher's relation and the target's table together.

    Attributes:
        columns: the target's columns in the order of the remote columns.
        key: indexes of the remote columns that find the row, with the operators of the key; None: the whole old row is compared.
        problem: why UPDATE and DELETE are impossible, or None.
        identity: index of the column that is GENERATED ALWAYS AS IDENTITY, if it is replicated.
        resolving: what conflicts are resolved by; None: as in a native subscription.
        forms: the plain forms of its changes that were made (:mod:`subscriber.sinks.postgres.apply.forms`), for the batches after it.
    """

    remote: Relation
    table: TargetTable
    columns: tuple[TargetColumn, ...]
    key: tuple[tuple[int, str | None], ...] | None
    problem: RelationError | None
    identity: int | None
    resolving: Resolving | None = None
    forms: dict[Hashable, Any] = field(default_factory=dict)
    _statements: dict[Hashable, Statement] = field(default_factory=dict)

    @property
    def unique_key(self) -> tuple[tuple[int, str | None], ...] | None:
        """The key, if it finds one row at most. None: rows may be equal, or have an equal key in different partitions."""
        return self.key if self.table.key_unique else None

    def statement(self, pattern: Hashable, make: Callable[[], Statement]) -> Statement:
        """The statement for changes with a pattern. It is made once."""
        found = self._statements.get(pattern)
        if found is None:
            found = self._statements[pattern] = make()
        return found

    def require_updatable(self) -> None:
        """Reject UPDATE and DELETE if the row cannot be identified.

        Raises:
            RelationError: with PostgreSQL's message.
        """
        if self.problem is not None:
            raise RelationError(str(self.problem), sqlstate=self.problem.sqlstate, hint=self.problem.hint)


CREATE_HINT: Final = "create the table in the target with the publisher's columns"
STREAM_HINT: Final = (
    "if the table was renamed on the publisher, rename it in the target; if it is new, create it in the target, then start the run again"
    " (or `subscriber alter NAME --refresh`): that adds and copies it"
)
"""Hint for a change of a table that the target does not have."""


def missing_table(table: TableName, hint: str = CREATE_HINT) -> RelationError:
    """PostgreSQL's error for a missing target table."""
    return RelationError(
        f'logical replication target relation "{table}" does not exist',
        sqlstate=_PREREQUISITE,
        hint=hint,
    )


def described_relation(published: PublishedTable) -> Relation:
    """The Relation message that the publisher will send for a table, made from its catalog's description."""
    types = published.column_types or (0,) * len(published.columns)
    columns = tuple(
        Column(name, type_oid, -1, key=published.replica_identity == "f" or name in published.key_columns)
        for name, type_oid in zip(published.columns, types, strict=True)
    )
    identity = cast("ReplicaIdentity", published.replica_identity)
    return Relation(published.relation_id, published.name.namespace, published.name.name, identity, columns)


def map_relation(remote: Relation, table: TargetTable) -> RelationMapping:
    """Match the columns, and choose the key that finds rows.

    Raises:
        RelationError: a replicated column is missing or generated in the target, or the target cannot be used
            (:meth:`TargetTable.require_usable`).
    """
    table.require_usable()
    local = {column.name: column for column in table.columns}
    try:
        _require_columns(table.name, [column.name for column in remote.columns], local)
    except RelationError as error:
        if lacking := tuple((each.name, each.type_oid, each.type_modifier) for each in remote.columns if each.name not in local):
            present = tuple((each.name, each.type_oid) for each in table.columns if not each.generated)
            error.missing_columns = MissingColumns(remote.relation_id, table.name.namespace, table.name.name, lacking, present)
        raise
    columns = tuple(local[column.name] for column in remote.columns)
    key, problem = _key(remote, table)
    identity = next((index for index, column in enumerate(columns) if column.identity_always), None)
    return RelationMapping(remote, table, columns, key, problem, identity)


def _require_columns(table: TableName, names: Sequence[str], local: dict[str, TargetColumn]) -> None:
    def refuse(what: str, found: list[str], hint: str) -> None:
        if found:
            quoted = ", ".join(f'"{name}"' for name in found)
            message = f'logical replication target relation "{table}" {what} column{"s" if len(found) > 1 else ""}: {quoted}'
            raise RelationError(message, sqlstate=_PREREQUISITE, hint=hint)

    refuse(
        "is missing replicated",
        [name for name in names if name not in local],
        "add the column to the target's table, or leave it out of the publication",
    )
    refuse(
        "has incompatible generated",
        [name for name in names if local[name].generated],
        "make it an ordinary column of the target's table, or leave it out of the publication",
    )


def _key(remote: Relation, table: TargetTable) -> tuple[tuple[tuple[int, str | None], ...] | None, RelationError | None]:
    identity = {column.name: index for index, column in enumerate(remote.columns) if column.key}
    if table.key:
        if all(name in identity for name, _ in table.key):
            return tuple((identity[name], operator) for name, operator in table.key), None
        message = f'publisher did not send replica identity column expected by the logical replication target relation "{table.name}"'
        hint = "make the target's replica identity or primary key a part of the publisher's replica identity"
    elif remote.replica_identity == "f":
        return None, None
    else:
        message = (
            f'logical replication target relation "{table.name}" has neither REPLICA IDENTITY index nor PRIMARY KEY column '
            "and published relation does not have REPLICA IDENTITY FULL"
        )
        hint = "add a primary key to the target's table, or ALTER TABLE ... REPLICA IDENTITY FULL on the publisher"
    return None, RelationError(message, sqlstate=_PREREQUISITE, hint=hint)
