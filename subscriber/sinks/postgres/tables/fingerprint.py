"""Detect that a target table was altered after the statements for it were made.

Statements name tables and columns, and declare their parameters with the columns' types. After ALTER TABLE they may still run, but with a
different result: a value is converted through the old type into the new one, or the name now belongs to another table. So a fingerprint is
read together with a table. After its last change, every batch checks with a new snapshot that all changed tables still have their
fingerprints. At that time the transaction holds locks on these tables, so they cannot be altered between the check and the commit.

The fingerprint does not contain ``pg_class.xmin``, because a TRUNCATE in the batch itself would change it.

The check is a part of every batch, and of a small one the largest part: to start a query costs time for each part of it, even if that part
is not executed. So most tables, which have neither rules nor partitions, are checked by a shorter query.
"""

from __future__ import annotations

from typing import Final

from subscriber.errors import TargetUnavailable
from subscriber.sinks.postgres.session.statement import Statement

__all__ = ["CHECKS", "FINGERPRINT", "PLAIN", "Fingerprint", "TargetsChanged", "check"]

_OID: Final = 26
_INT8: Final = 20

Fingerprint = tuple[int, int, bool]
"""A table's oid, a hash of the properties on which its statements depend, and whether it is :data:`PLAIN`."""

_TRIGGERS: Final = """
CASE WHEN {0}.relhastriggers THEN
    ARRAY(SELECT t.oid FROM pg_catalog.pg_trigger t WHERE t.tgrelid = {0}.oid AND t.tgenabled IN ('R', 'A') ORDER BY t.oid) END
"""

# A recursive query, because pg_partition_tree() takes locks. It is executed for partitioned tables only.
_PARTITIONS: Final = f"""
CASE WHEN c.relkind = 'p' THEN ARRAY(
    WITH RECURSIVE tree(oid) AS (
        SELECT h.inhrelid FROM pg_catalog.pg_inherits h WHERE h.inhparent = c.oid
      UNION ALL
        SELECT h.inhrelid FROM tree JOIN pg_catalog.pg_inherits h ON h.inhparent = tree.oid
    )
    SELECT ROW(p.oid, p.relkind, p.relchecks, {_TRIGGERS.format("p")})::text
    FROM tree JOIN pg_catalog.pg_class p ON p.oid = tree.oid ORDER BY p.oid
) END
"""  # noqa: S608 (a constant)

_HASH: Final = f"""
pg_catalog.hashtextextended(ROW(
    n.nspname, c.relname, c.relkind, c.relowner, c.relrowsecurity, c.relforcerowsecurity, c.relreplident, c.relchecks, c.relispartition,
    ARRAY(SELECT a.xmin FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 ORDER BY a.attnum),
    ARRAY(SELECT ROW(i.indexrelid, i.indisvalid, i.indisprimary, i.indisreplident)::text
          FROM pg_catalog.pg_index i WHERE i.indrelid = c.oid ORDER BY i.indexrelid),
    {_TRIGGERS.format("c")}{{}}
)::text COLLATE "C", 0)
"""  # noqa: S608 (a constant)
_RULES: Final = """
CASE WHEN c.relhasrules THEN ARRAY(SELECT r.ev_enabled FROM pg_catalog.pg_rewrite r WHERE r.ev_class = c.oid ORDER BY r.oid) END
"""
_OF_PLAIN: Final = _HASH.format("")
_OF_OTHERS: Final = _HASH.format(f", {_RULES}, {_PARTITIONS}")
PLAIN: Final = "(c.relkind = 'r' AND NOT c.relhasrules)"
"""SQL: whether a table has neither rules nor partitions."""
FINGERPRINT: Final = f"CASE WHEN {PLAIN} THEN {_OF_PLAIN} ELSE {_OF_OTHERS} END"
"""SQL over ``pg_class`` c and ``pg_namespace`` n."""


def _unchanged(condition: str) -> Statement:
    # Division by zero if the fingerprint differs or the table is gone: COMMIT is already sent and must not be executed then. One table per
    # statement: with arrays, the server would guess their lengths and plan the statement each time, five times the cost of all the rest.
    sql = f"""
SELECT 1 / pg_catalog.count(*)
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.oid = $1 AND {condition} = $2
"""  # noqa: S608 (a constant)
    return Statement(sql.encode(), (_OID, _INT8), reused=True)


_PLAIN_UNCHANGED: Final = _unchanged(f"{PLAIN} AND {_OF_PLAIN}")
_UNCHANGED: Final = _unchanged(_OF_OTHERS)
CHECKS: Final = (_PLAIN_UNCHANGED, _UNCHANGED)
"""The statements of :func:`check`."""


class TargetsChanged(TargetUnavailable):
    """A target table was altered since it was read. The batch is rolled back; it can be applied after the tables are read again."""

    def __init__(self) -> None:
        super().__init__("a table of the target was altered while a transaction was applied to it", hint="the transaction is retried")


def check(fingerprint: Fingerprint) -> tuple[Statement, None, list[bytes | None]]:
    """The arguments of :meth:`Pipeline.send` that check that a table still has its fingerprint."""
    oid, found, plain = fingerprint
    return _PLAIN_UNCHANGED if plain else _UNCHANGED, None, [b"%d" % oid, b"%d" % found]
