"""Check a subscription's mapping against the publisher's tables."""

from __future__ import annotations

from collections.abc import Sequence

from subscriber.config.mapping import TableMapping
from subscriber.config.table_names import Name, written, written_name
from subscriber.errors import ConfigurationError
from subscriber.interfaces import Finding, PublishedTable
from subscriber.transaction.mapped_frames import key_left_out
from subscriber.walreceiver.mapped_tables import mapped_names

__all__ = ["find_mapping_problems"]


def find_mapping_problems(mapping: TableMapping, tables: Sequence[PublishedTable]) -> list[Finding]:
    """Return a finding for each part of the mapping that does not fit the published tables.

    Args:
        mapping: of the subscription.
        tables: as the publisher has them.
    """
    if not mapping:
        return []
    published = {table.name.pair: table for table in tables}
    try:
        mapped_names([table.name for table in tables], mapping)
    except ConfigurationError as error:
        return [Finding("error", str(error), error.hint or "")]
    named = [("map", name) for name in mapping.tables]
    named += [("columns", name) for name in mapping.columns] + [("rename", name) for name in mapping.renamed]
    findings = [_not_published(f"{option}.{written_name(name)}") for option, name in named if name not in published]
    unused = [pattern for pattern in mapping.excluded if not any(mapping.matches(pattern, name) for name in published)]
    findings += [_not_published(f"exclude_table {pattern}") for pattern in unused]
    schemas = {schema for schema, _ in published}
    findings += [_not_published(f"map.{written(schema)}.*") for schema in mapping.schemas if schema not in schemas]
    for name, table in published.items():
        if mapping.changes_columns(name) and not mapping.excludes(name):
            findings += _columns(mapping, name, table)
    return findings


def _not_published(what: str) -> Finding:
    hint = "correct the name, or add the table to the publication; without publish_via_partition_root, partitions have their own names"
    return Finding("warning", f"{what}: no such table is published", hint)


def _columns(mapping: TableMapping, name: Name, table: PublishedTable) -> list[Finding]:
    lacking = mapping.lacking(name, table.columns)
    findings = [Finding("error", message, "correct the name of the column", table.name) for message in lacking]
    kept = mapping.kept(name, table.columns)
    names = [mapping.column(name, column) for column in kept]
    findings += [
        Finding("error", f"two columns of table {written_name(name)} would have the name {written(column)}", "rename both", table.name)
        for column in sorted({column for column in names if names.count(column) > 1})
    ]
    key = [column for column in table.key_columns if column not in kept]
    if key and table.changes:
        error = key_left_out(name, key[0])
        findings.append(Finding("error", str(error), error.hint or "", table.name))
    return findings
