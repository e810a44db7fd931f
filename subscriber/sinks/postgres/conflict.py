"""Conflicts: what stands in a change's way in the target, told as PostgreSQL 18 tells it, but without any value.

=============================  =======================================  ===================================
 conflict                       when                                     then
=============================  =======================================  ===================================
 ``insert_exists``              the new row violates a unique index      error; the transaction is retried
 ``update_exists``              so does an updated row                   the same
 ``multiple_unique_conflicts``  either violates several at once          the same
 ``update_origin_differs``      another origin changed the row last      updated, logged
 ``delete_origin_differs``      the same                                 deleted, logged
 ``update_missing``             there is no such row                     passed over, logged
 ``delete_missing``             the same                                 passed over, logged
=============================  =======================================  ===================================

Native looks into all unique indexes before it inserts. We learn of a violation from the server, which stops at the first one; only
then, with everything rolled back, the row is looked for in all of them. So a row that stood in the way only within the same transaction
is not found again: then the one index that the server named is all there is to tell.

Source: PostgreSQL manual, Logical Replication, Conflicts; conflict.c.
"""

# names are quoted, values are parameters
# ruff: noqa: S608

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from psycopg.pq.abc import PGresult

from subscriber.errors import TargetError, TargetUnavailable
from subscriber.sinks.postgres.pipeline import StatementFailed
from subscriber.sinks.postgres.relation import qualified_name
from subscriber.sinks.postgres.session import ApplySession
from subscriber.sinks.postgres.statement import Statement, Written
from subscriber.sinks.postgres.statements import control, set_role

__all__ = ["UNIQUE_VIOLATION", "Collision", "Existing", "find_collisions", "unique_conflict"]

UNIQUE_VIOLATION: Final = "23505"

_BEGIN: Final = control("BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY")
_ROLLBACK: Final = control("ROLLBACK")

# the unique indexes that are checked at once, as native; a key column is a column or an expression, compared with its index' operator
_INDEXES: Final = """
SELECT ic.relname::text, pg_catalog.pg_get_expr(i.indpred, i.indrelid),
       ARRAY(SELECT pg_catalog.pg_get_indexdef(i.indexrelid, k, false) FROM pg_catalog.generate_series(1, i.indnkeyatts) AS k ORDER BY k),
       ARRAY(SELECT pg_catalog.format('OPERATOR(%%I.%%s)', n.nspname, op.oprname)
             FROM pg_catalog.generate_series(1, i.indnkeyatts) AS k
             JOIN pg_catalog.pg_opclass AS oc ON oc.oid = i.indclass[k - 1]
             JOIN pg_catalog.pg_amop AS m ON m.amopfamily = oc.opcfamily AND m.amopstrategy = 3
                  AND m.amoplefttype = oc.opcintype AND m.amoprighttype = oc.opcintype
             JOIN pg_catalog.pg_operator AS op ON op.oid = m.amopopr
             JOIN pg_catalog.pg_namespace AS n ON n.oid = op.oprnamespace ORDER BY k)
FROM pg_catalog.pg_index AS i JOIN pg_catalog.pg_class AS ic ON ic.oid = i.indexrelid
WHERE i.indrelid = pg_catalog.to_regclass(%s) AND i.indisunique AND i.indimmediate AND i.indisready
ORDER BY ic.oid
"""


_TIMES: Final[dict[bool, str]] = {
    False: "NULL, NULL",
    True: "(SELECT c.timestamp::pg_catalog.text FROM pg_catalog.pg_xact_commit_timestamp_origin(o.m) AS c),"
    " (SELECT CASE WHEN c.roident <> 0 THEN coalesce((SELECT n.roname FROM pg_catalog.pg_replication_origin AS n"
    " WHERE n.roident = c.roident), '') END FROM pg_catalog.pg_xact_commit_timestamp_origin(o.m) AS c)",
}


@dataclass(frozen=True, slots=True)
class Existing:
    """Who changed a row of the target last.

    Attributes:
        xid: the transaction.
        at: when it was committed, as the server writes it; None: the server does not keep that.
        origin: the name of its replication origin; None: it was a local one; empty: the origin was dropped since.
    """

    xid: str
    at: str | None
    origin: str | None

    @classmethod
    def of(cls, result: PGresult, first: int) -> Existing | None:
        """From three columns of a result, or None if they are NULL."""
        xid, at, origin = ((found.decode() if (found := result.get_value(0, first + i)) is not None else None) for i in range(3))
        return None if xid is None else cls(xid, at, origin)

    def modified(self, by: str = "by origin") -> str:
        """Native's words for it. ``by``: how the name of an origin is led up to."""
        if self.at is None:
            return f"modified in transaction {self.xid}"
        known = f'{by} "{self.origin}"' if self.origin else "by a non-existent origin"
        return f"modified {'locally' if self.origin is None else known} in transaction {self.xid} at {self.at}"


@dataclass(frozen=True, slots=True)
class _Index:
    """A unique index: name, predicate if it is partial, key columns or expressions, and their equality operators."""

    name: str
    predicate: str | None
    keys: list[str]
    operators: list[str]


@dataclass(frozen=True, slots=True)
class Collision:
    """A unique index that has the new row's key already.

    Attributes:
        index: its name.
        key: its columns or expressions.
        existing: of the row that has the key.
    """

    index: str
    key: tuple[str, ...]
    existing: Existing

    def __str__(self) -> str:
        return f'Key already exists in unique index "{self.index}", {self.existing.modified()}: key ({", ".join(self.key)}).'


def unique_conflict(statement: Statement, collisions: list[Collision]) -> str:
    """The name of the conflict when the server refused a row for a unique index."""
    if len(collisions) > 1:
        return "multiple_unique_conflicts"
    return "insert_exists" if statement.message_type == "INSERT" else "update_exists"


async def find_collisions(session: ApplySession, failure: StatementFailed) -> list[Collision]:
    """Look which unique indexes have the key of the row that was refused. To be called after the rollback.

    Returns:
        What was found: nothing if the row in the way is gone, or cannot be looked for.

    Raises:
        TargetUnavailable: the connection was lost.
    """
    statement = failure.statement
    written, table = statement.written, statement.table
    if written is None or table is None:
        return []
    try:
        # of a partitioned table it is a partition that has the row: natively, too, that one and its indexes are named
        leaf = failure.diagnostics.relation or table
        scanned = written.scanned if leaf == table else f"ONLY {qualified_name(leaf)}"
        rows = await session.fetch(_INDEXES, qualified_name(leaf))
        looks = {_look(session, statement, written, scanned, index): index for index in (_Index(*row) for row in rows)}
        found: dict[Statement, Existing] = {}

        def completed(look: Statement, _: object, result: PGresult) -> None:
            if look in looks and result.ntuples and (existing := Existing.of(result, 0)) is not None:
                found[look] = existing

        async with session.pipeline(completed) as pipeline:
            pipeline.send(_BEGIN, None)
            pipeline.send(set_role(written.role), None)
            for look in looks:
                pipeline.send(look, None, failure.values, failure.formats)
            pipeline.send(_ROLLBACK, None)
    except TargetUnavailable:
        raise
    except (TargetError, StatementFailed):
        return []
    return [Collision(looks[look].name, tuple(looks[look].keys), existing) for look, existing in found.items()]


def _look(session: ApplySession, statement: Statement, written: Written, scanned: str, index: _Index) -> Statement:
    """A query for who changed the row that has the new row's key in one index."""
    columns = ", ".join(f"{key} AS k{number}" for number, key in enumerate(index.keys))
    predicate = index.predicate or "true"
    # the row that is updated is not in its own way
    another = f"({written.own}) IS NOT TRUE" if written.own else "true"
    others = f"SELECT x.xmin AS m, {columns} FROM {scanned} AS x WHERE ({predicate}) AND {another}"
    row = f"SELECT {columns} FROM ({written.row}) AS x WHERE {predicate}"
    equal = " AND ".join(f"o.k{number} {operator} r.k{number}" for number, operator in enumerate(index.operators))
    sql = f"SELECT o.m::pg_catalog.text, {_TIMES[session.commit_timestamps]} FROM ({others}) AS o, ({row}) AS r WHERE {equal} LIMIT 1"
    return Statement(sql.encode("utf-8", "surrogateescape"), statement.parameter_types)
