"""The schema of tables as one plain model, for PostgreSQL on both sides and for other targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from subscriber.interfaces.values import TableName

__all__ = ["ColumnSchema", "ConstraintSchema", "DatabaseSchema", "IndexSchema", "SchemaDifference", "SequenceSchema", "TableSchema"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSchema:
    """One column.

    Attributes:
        name: its name.
        type: as ``format_type`` writes it.
        not_null: whether it is NOT NULL.
        default: the expression of its default, or of a generated column; None: it has none.
        identity: ``pg_attribute.attidentity``: ``a``, ``d``, or empty.
        generated: ``pg_attribute.attgenerated``: ``s``, ``v``, or empty.
        collation: quoted name; None: the default of its type.
        labels: of an enum, in their order; empty for other types.
        comment: its comment, or None.
    """

    name: str
    type: str
    not_null: bool
    default: str | None = None
    identity: str = ""
    generated: str = ""
    collation: str | None = None
    labels: tuple[str, ...] = ()
    comment: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstraintSchema:
    """One constraint.

    Attributes:
        name: its name.
        kind: ``pg_constraint.contype``: ``p``, ``u``, ``f``, ``c`` or ``x``.
        definition: as ``pg_get_constraintdef`` writes it.
        columns: the columns that it constrains, in its order.
        references: the table that a foreign key refers to.
        referenced_columns: the columns there.
        on_delete, on_update: ``pg_constraint.confdeltype`` and ``confupdtype`` of a foreign key.
    """

    name: str
    kind: str
    definition: str
    columns: tuple[str, ...]
    references: TableName | None = None
    referenced_columns: tuple[str, ...] = ()
    on_delete: str = ""
    on_update: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSchema:
    """One index that belongs to no constraint.

    Attributes:
        name: its name.
        definition: CREATE INDEX without the index's name.
        unique: whether it is unique.
        columns: its key columns; empty if it has expressions or a condition, or is no B-tree.
        valid: False: an interrupted CREATE INDEX CONCURRENTLY has left it.
    """

    name: str
    definition: str
    unique: bool
    columns: tuple[str, ...] = ()
    valid: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSchema:
    """One sequence.

    Attributes:
        name: its name.
        options: type, start, increment, minimum, maximum, cache and cycle, as ALTER SEQUENCE takes them.
        owner: the column that owns it, with its table; None: no column.
    """

    name: TableName
    options: str
    owner: tuple[TableName, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSchema:
    """One table.

    Attributes:
        name: its name.
        columns: in their order.
        constraints, indexes: sorted by name. Those of a partition that belong to its table are left out.
        replica_identity: ``pg_class.relreplident``.
        comment: its comment, or None.
    """

    name: TableName
    columns: tuple[ColumnSchema, ...] = ()
    constraints: tuple[ConstraintSchema, ...] = ()
    indexes: tuple[IndexSchema, ...] = ()
    replica_identity: str = "d"
    comment: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseSchema:
    """Tables and sequences of a database."""

    tables: Mapping[TableName, TableSchema]
    sequences: tuple[SequenceSchema, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaDifference:
    """One difference between the publisher and the target.

    Attributes:
        kind: ``table``, ``column``, ``type``, ``nullability``, ``default``, ``key``, ``index``, ``constraint``, ``sequence``,
            ``owner`` (of a sequence), ``identity`` (of a replica), ``comment``, ``encoding`` or ``database``.
        name: the table, the sequence, or the database, without a schema.
        message: what differs, one line.
        ddl: statements that remove it from the target. One that would delete data is a comment. Empty: ``schema copy`` removes it.
        extra: the target has something that the publisher lacks.
    """

    kind: str
    name: TableName
    message: str
    ddl: tuple[str, ...] = ()
    extra: bool = False
