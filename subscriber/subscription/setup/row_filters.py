"""Check a subscription's row filters against the publisher's tables."""

from __future__ import annotations

from collections.abc import Sequence

from subscriber.apply.row_filters import filter_expressions
from subscriber.config import SubscriptionOptions
from subscriber.errors import ConfigurationError
from subscriber.interfaces import Finding, PublishedTable, TableName
from subscriber.protocol.messages import Column, Relation, ReplicaIdentity
from subscriber.types import TypeRegistry

__all__ = ["find_filter_problems"]


def find_filter_problems(options: SubscriptionOptions, tables: Sequence[PublishedTable]) -> list[Finding]:
    """Return a finding for each filter that does not fit its table, or whose table is not published.

    Raises:
        ConfigurationError: a filter is refused whatever its table is.
    """
    published = {table.name: table for table in tables}
    findings: list[Finding] = []
    for (schema, name), expression in filter_expressions(options).items():
        table = published.get(TableName(schema, name))
        what = f"row filter of table {schema}.{name}"
        if table is None:
            findings.append(Finding("warning", f"{what}: the table is not published", "correct its name, or add it to the publication"))
            continue
        registry = TypeRegistry()
        registry.add(table.types)
        relation = _relation(table)
        try:
            bound = expression.bind(relation, registry)
            if table.changes:
                bound.check_identity(relation, "update")
        except ConfigurationError as error:
            hint = error.hint or "change the filter; REPLICA IDENTITY FULL on the publisher allows all columns"
            findings.append(Finding("error", f"{what}: {_text(error)}", hint, table.name))
    return findings


def _text(error: ConfigurationError) -> str:
    return ": ".join([str(error), *(note.removeprefix("DETAIL: ") for note in getattr(error, "__notes__", ()))])


def _relation(table: PublishedTable) -> Relation:
    """Describe the table as its Relation message does."""
    identity: ReplicaIdentity = "f" if table.replica_identity == "f" else "d"
    types = zip(table.columns, table.column_types, table.column_modifiers, strict=True)
    columns = tuple(Column(name, oid, modifier, name in table.key_columns) for name, oid, modifier in types)
    return Relation(table.relation_id, table.name.namespace, table.name.name, identity, columns)
