"""Triggers of the target that fire for the rows which a reconciliation deletes and writes.

Those are ENABLE REPLICA or ENABLE ALWAYS, and not the ones of foreign keys. A row that is only updated is deleted and stored again, so they
would see a deletion that the publisher has not made.
"""

from __future__ import annotations

from subscriber.errors import RelationError
from subscriber.interfaces import TableName
from subscriber.sinks.postgres.session.catalog_reader import Execute
from subscriber.sinks.postgres.session.firing import FIRING
from subscriber.sinks.postgres.tables.relation_mapping import TargetTable

__all__ = ["firing_trigger"]


async def firing_trigger(fetch: Execute, table: TargetTable) -> RelationError | None:
    """Return the error for the first such trigger of a table or of one of its partitions; None: it has none.

    Args:
        fetch: runs a query.
        table: the table.

    Raises:
        TargetError: or a subclass.
    """
    for namespace, relation, trigger, quoted, alter, enabled in await fetch(FIRING.format("SELECT %s::int8::oid"), table.oid):
        return RelationError(
            f'trigger "{trigger}" of table "{TableName(namespace, relation)}" fires for the rows that are deleted and written while table'
            f' "{table.name}" is reconciled',
            sqlstate="55000",
            hint=f"{alter} DISABLE TRIGGER {quoted}; afterwards {alter} ENABLE {enabled} TRIGGER {quoted}",
        )
    return None
