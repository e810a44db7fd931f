"""The publisher's tables under the names that they have in the target (:mod:`subscriber.config.mapping`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from subscriber.config.mapping import TableMapping, two_onto_one
from subscriber.interfaces import PublishedTable, TableName

__all__ = ["mapped_names", "mapped_tables"]


def mapped_names(names: Iterable[TableName], mapping: TableMapping) -> dict[TableName, TableName]:
    """Return the publisher's names by those of the target, without tables that are left out.

    Raises:
        ConfigurationError: two tables have one name in the target.
    """
    found: dict[TableName, TableName] = {}
    for name in names:
        if mapping.excludes(name.pair):
            continue
        target = TableName(*mapping.target_alone(name.pair))
        if target in found:
            raise two_onto_one(found[target].pair, name.pair, target.pair)
        found[target] = name
    return found


def mapped_tables(tables: Iterable[PublishedTable], mapping: TableMapping) -> list[PublishedTable]:
    """Return the tables with the names that they have in the target, without those that are left out, sorted by name.

    Raises:
        ConfigurationError: two tables have one name in the target, or a table does not have a column that the mapping names.
    """
    named = {table.name: table for table in tables}
    return sorted((_mapped(named[name], mapping) for name in mapped_names(named, mapping).values()), key=lambda table: table.name)


def _mapped(table: PublishedTable, mapping: TableMapping) -> PublishedTable:
    own = table.name.pair
    name = TableName(*mapping.target(own))
    mapped = table if name == table.name else replace(table, name=name, own_name=table.name)
    if not mapping.changes_columns(own):
        return mapped
    mapping.require_columns(own, table.columns)
    kept = mapping.kept(own, table.columns)
    places = [table.columns.index(column) for column in kept]

    def named(columns: Iterable[str]) -> tuple[str, ...]:
        return tuple(mapping.column(own, column) for column in columns if column in kept)

    columns = named(kept)
    return replace(
        mapped,
        columns=columns,
        own_columns=tuple(kept) if tuple(kept) != columns else (),
        key_columns=named(table.key_columns),
        generated=named(table.generated),
        column_types=tuple(table.column_types[place] for place in places),
        column_modifiers=tuple(table.column_modifiers[place] for place in places),
        not_null=frozenset(named(table.not_null)),
        primary_key=named(table.primary_key) if set(table.primary_key) <= set(kept) else (),
    )
