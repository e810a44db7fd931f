"""Row filters of publications, evaluated by :mod:`subscriber.rowfilter`, and the checks of commands that depend on publications."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal

from subscriber.errors import ConfigurationError
from subscriber.protocol.messages import TEXT, Column, Relation, TupleData
from subscriber.rowfilter import PublicationFilter, RelationFilters, RowFilter, combine, parse_filter
from subscriber.testing.fake_publisher.publications import Publication
from subscriber.testing.fake_publisher.tables import RowValues, TableShape, Types

__all__ = ["bound_filter", "check_command", "relation_filters", "row_passes", "whole_relation", "whole_tuple"]

_NULL: Final = ord("n")


def whole_relation(shape: TableShape) -> Relation:
    """A description of all columns of a table."""
    flags = shape.key_flags
    columns = tuple(Column(column.name, column.type_oid, column.modifier, column.name in flags) for column in shape.columns)
    return Relation(shape.oid, shape.name.namespace, shape.name.name, shape.replica_identity, columns)


def whole_tuple(row: RowValues) -> TupleData:
    """All values of a row."""
    return TupleData(bytes(_NULL if value is None else TEXT for value in row), list(row))


def bound_filter(shape: TableShape, text: str, types: Types) -> RowFilter:
    """A filter for the rows of a table.

    Raises:
        RowFilterError: it is not valid.
    """
    return parse_filter(text).bind(whole_relation(shape), types.registry)


def row_passes(shape: TableShape, text: str, row: RowValues, types: Types) -> bool:
    """Whether a row passes a filter.

    Raises:
        RowFilterError: the filter is not valid, or fails for the row.
    """
    return bound_filter(shape, text, types).matches(whole_tuple(row))


def relation_filters(shape: TableShape, publications: Iterable[Publication], types: Types) -> RelationFilters | None:
    """The filters of all publications of a table, combined. None: every row passes.

    Raises:
        RowFilterError: a filter is not valid.
    """
    covered = [(publication, table) for publication in publications if (table := publication.covers(shape)) is not None]
    if not any(table.where for _, table in covered):
        return None
    names: Sequence[Literal["insert", "update", "delete"]] = ("insert", "update", "delete")
    return combine(
        PublicationFilter(
            None if table.where is None else bound_filter(shape, table.where, types),
            frozenset(operation for operation in names if operation in publication.publish),
        )
        for publication, table in covered
    )


def check_command(shape: TableShape, operation: Literal["update", "delete"], publications: Iterable[Publication], types: Types) -> None:
    """CheckCmdReplicaIdentity: whether the publications of a table allow an UPDATE or DELETE of it.

    Raises:
        ConfigurationError: they do not.
    """
    words = "update" if operation == "update" else "delete from"
    for publication in publications:
        covered = publication.covers(shape)
        if covered is None or operation not in publication.publish or shape.replica_identity == "f":
            continue
        identity = shape.identity_columns
        if not identity:
            raise ConfigurationError(
                f'cannot {words} table "{shape.name.name}" because it does not have a replica identity and publishes {operation}s',
                hint="give the table a key, or replica_identity='f'",
                sqlstate="55000",
            )
        if covered.columns is not None and not set(identity) <= set(covered.columns):
            raise ConfigurationError(
                f'cannot {words} table "{shape.name.name}": column list used by the publication does not cover the replica identity',
                hint="add the columns of the key to the column list",
                sqlstate="42P10",
            )
        if covered.where is not None:
            bound_filter(shape, covered.where, types).check_identity(whole_relation(shape), operation)
