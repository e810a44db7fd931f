"""Find the table because of which the target rejected a statement that is about several.

* The end of a transaction, where constraints that were deferred are checked: the catalog names the tables of the foreign key.
* A TRUNCATE of several tables: each is truncated alone, and rolled back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from subscriber.errors import TargetError, TargetUnavailable
from subscriber.interfaces import TableName
from subscriber.sinks.postgres.apply.change_sql import set_role
from subscriber.sinks.postgres.session.apply_session import ApplySession
from subscriber.sinks.postgres.session.postgres_errors import Diagnostics
from subscriber.sinks.postgres.session.statement import Truncated

__all__ = ["FOREIGN_KEY_VIOLATION", "find_refused", "find_violating"]

FOREIGN_KEY_VIOLATION: Final = "23503"
_NOT_SUPPORTED: Final = "0A000"

# both tables of the foreign key, the referencing one first, each with those that it is a partition of
_TABLES: Final = """
SELECT n.nspname::text, c.relname::text
FROM pg_catalog.pg_constraint k
JOIN pg_catalog.pg_class r ON r.oid = k.conrelid JOIN pg_catalog.pg_namespace rn ON rn.oid = r.relnamespace
CROSS JOIN LATERAL (VALUES (1, k.conrelid), (2, k.confrelid)) AS side(place, oid)
CROSS JOIN LATERAL (
    SELECT a.relid::pg_catalog.oid AS oid FROM pg_catalog.pg_partition_ancestors(side.oid) AS a UNION SELECT side.oid
) AS tree
JOIN pg_catalog.pg_class c ON c.oid = tree.oid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE k.contype::text = 'f' AND k.conname = %s AND r.relname = %s AND rn.nspname = %s
ORDER BY side.place
"""


async def find_violating(session: ApplySession, diagnostics: Diagnostics, changed: Collection[TableName]) -> TableName | None:
    """Return the table whose changes violate a foreign key; None: not known.

    The report names the referencing table, also if the transaction deleted a row that is referenced.

    Args:
        session: usable.
        diagnostics: the report.
        changed: the tables that the transaction changed.

    Raises:
        TargetUnavailable
    """
    relation = diagnostics.relation
    if relation is None:
        return None
    tables = await session.fetch(_TABLES, diagnostics.constraint, relation.name, relation.namespace)
    return next((table for row in tables if (table := TableName(*row)) in changed), None)


class _TruncatedError(Exception):
    """Rolls the transaction back."""


async def find_refused(session: ApplySession, tables: Iterable[Truncated]) -> TableName | None:
    """Return the first table that cannot be truncated alone; None: each one can.

    Raises:
        TargetUnavailable
    """
    for table in tables:
        try:
            async with session.transaction():
                await session.fetch(set_role(table.role).sql.decode("utf-8", "surrogateescape"))
                await session.fetch(f"TRUNCATE {table.scanned}")
                raise _TruncatedError
        except _TruncatedError:
            pass
        except TargetUnavailable:
            raise
        except TargetError as error:
            # that another table references it does not matter if both are truncated together
            if error.sqlstate != _NOT_SUPPORTED:
                return table.name
    return None
