"""Conflicts between a change and the rows of the target, reported as PostgreSQL 18 reports them, but without values.

=============================  =======================================  ===================================
 conflict                       when                                     result
=============================  =======================================  ===================================
 ``insert_exists``              the new row violates a unique index      error; the transaction is retried
 ``update_exists``              an updated row violates one              the same
 ``multiple_unique_conflicts``  either violates several at once          the same
 ``update_origin_differs``      another origin changed the row last      updated, logged
 ``delete_origin_differs``      the same                                 deleted, logged
 ``update_missing``             there is no such row                     skipped, logged
 ``delete_missing``             the same                                 skipped, logged
=============================  =======================================  ===================================

PostgreSQL's apply worker searches all unique indexes before it inserts. This sink learns of a violation from the server, which stops at
the first violated index. After the rollback, the sink searches all unique indexes for the key. A conflicting row that existed only in the
rolled back transaction is not found again. Then the report has only the index that the server named.

Source: PostgreSQL manual, Logical Replication, Conflicts; conflict.c.
"""

# names are quoted, values are parameters
# ruff: noqa: S608

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from psycopg.pq.abc import PGresult

from subscriber.errors import TargetError, TargetUnavailable
from subscriber.sinks.postgres.apply.change_sql import control, set_role
from subscriber.sinks.postgres.session.apply_session import ApplySession
from subscriber.sinks.postgres.session.pipeline import StatementFailed
from subscriber.sinks.postgres.session.statement import Statement, Written
from subscriber.sinks.postgres.tables.relation_mapping import UniqueIndex, qualified_name
from subscriber.sinks.postgres.tables.unique_indexes import UNIQUE_INDEXES

__all__ = ["UNIQUE_VIOLATION", "Collision", "Existing", "find_collisions", "unique_conflict"]

UNIQUE_VIOLATION: Final = "23505"

_BEGIN: Final = control("BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY")
_ROLLBACK: Final = control("ROLLBACK")

_TIMES: Final[dict[bool, str]] = {
    False: "NULL, NULL",
    True: "(SELECT c.timestamp::pg_catalog.text FROM pg_catalog.pg_xact_commit_timestamp_origin(o.m) AS c),"
    " (SELECT CASE WHEN c.roident <> 0 THEN coalesce((SELECT n.roname FROM pg_catalog.pg_replication_origin AS n"
    " WHERE n.roident = c.roident), '') END FROM pg_catalog.pg_xact_commit_timestamp_origin(o.m) AS c)",
}


@dataclass(frozen=True, slots=True)
class Existing:
    """The last change of a row in the target.

    Attributes:
        xid: its transaction.
        at: commit time of the transaction, as the server writes it; None: the server does not keep commit timestamps.
        origin: name of its replication origin; None: a local change; empty: the origin was dropped since.
    """

    xid: str
    at: str | None
    origin: str | None

    @classmethod
    def of(cls, result: PGresult, first: int, row: int = 0) -> Existing | None:
        """Read it from three columns of a row of a result; None if they are NULL."""
        xid, at, origin = ((found.decode() if (found := result.get_value(row, first + i)) is not None else None) for i in range(3))
        return None if xid is None else cls(xid, at, origin)

    def modified(self, by: str = "by origin") -> str:
        """PostgreSQL's words for it. ``by``: the words before the origin's name."""
        if self.at is None:
            return f"modified in transaction {self.xid}"
        known = f'{by} "{self.origin}"' if self.origin else "by a non-existent origin"
        return f"modified {'locally' if self.origin is None else known} in transaction {self.xid} at {self.at}"


@dataclass(frozen=True, slots=True)
class Collision:
    """A unique index in which another row has the new row's key.

    Attributes:
        index: name of the index.
        key: columns or expressions of the index.
        existing: the last change of the other row.
    """

    index: str
    key: tuple[str, ...]
    existing: Existing

    def __str__(self) -> str:
        return f'Key already exists in unique index "{self.index}", {self.existing.modified()}: key ({", ".join(self.key)}).'


def unique_conflict(statement: Statement, collisions: list[Collision]) -> str:
    """The name of the conflict after a unique violation."""
    if len(collisions) > 1:
        return "multiple_unique_conflicts"
    return "insert_exists" if statement.message_type == "INSERT" else "update_exists"


async def find_collisions(session: ApplySession, failure: StatementFailed) -> list[Collision]:
    """Find the unique indexes that have the key of the rejected row. Call it after the rollback.

    Returns:
        The collisions; empty if the conflicting row is gone, or the search fails.

    Raises:
        TargetUnavailable: the connection was lost.
    """
    statement = failure.statement
    written, table = statement.written, statement.table
    if written is None or table is None:
        return []
    try:
        # a row of a partitioned table is in a partition: as in PostgreSQL, the report names the partition and its indexes
        leaf = failure.diagnostics.relation or table
        scanned = written.scanned if leaf == table else f"ONLY {qualified_name(leaf)}"
        rows = await session.fetch(UNIQUE_INDEXES.format("%s"), qualified_name(leaf))
        looks = {_look(session, statement, written, scanned, index): index for index in (UniqueIndex(*row) for row in rows)}
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


def _look(session: ApplySession, statement: Statement, written: Written, scanned: str, index: UniqueIndex) -> Statement:
    """A query for the last change of the row that has the new row's key in one index."""
    columns = ", ".join(f"{key} AS k{number}" for number, key in enumerate(index.keys))
    predicate = index.predicate or "true"
    # the updated row does not conflict with itself
    another = f"({written.own}) IS NOT TRUE" if written.own else "true"
    others = f"SELECT x.xmin AS m, {columns} FROM {scanned} AS x WHERE ({predicate}) AND {another}"
    row = f"SELECT {columns} FROM ({written.row}) AS x WHERE {predicate}"
    equal = " AND ".join(f"o.k{number} {operator} r.k{number}" for number, operator in enumerate(index.operators))
    sql = f"SELECT o.m::pg_catalog.text, {_TIMES[session.commit_timestamps]} FROM ({others}) AS o, ({row}) AS r WHERE {equal} LIMIT 1"
    return Statement(sql.encode("utf-8", "surrogateescape"), statement.parameter_types)
