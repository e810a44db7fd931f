"""Compare a publisher and a target while nothing writes, with the engine of ``verify`` (:mod:`subscriber.verification`).

No subscription is needed, and the tables need not be published.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import psycopg

from subscriber.errors import RelationError
from subscriber.interfaces import ComparedTables, PublishedTable, TableName
from subscriber.protocol.quoting import quote_literal
from subscriber.sinks.postgres.snapshots import read_snapshot
from subscriber.subscription.targets import is_postgres
from subscriber.verification.compare import TableComparison
from subscriber.verification.model import Quiet, TableReport, VerificationLimits
from subscriber.verification.sides import Rate, Side
from subscriber.verification.targets import OtherTarget, PostgresTarget, TargetSnapshot
from subscriber.walreceiver.publication import published_names
from subscriber.walreceiver.publication import published_tables as described_tables
from subscriber.walreceiver.session import Session

__all__ = ["PreparedComparison", "compare", "compare_prepared", "prepared_transactions", "published_tables"]

_NAME: Final = "subscriber comparison"
_PUBLICATION: Final = "subscriber_comparison"
_LIMITS: Final = VerificationLimits(jobs=1, max_differences=10_000)


async def compare(publisher_dsn: str, target: str | ComparedTables, tables: Iterable[TableName]) -> list[TableReport]:
    """Compare whole tables in their current state.

    Args:
        publisher_dsn: conninfo or URL of the publisher. Its role must own the tables.
        target: URL or conninfo of a database, or what reads the tables.
        tables: by their names on the publisher. A partitioned table includes all its partitions.

    Raises:
        PublisherError, TargetError: a side cannot be read.
    """
    async with (
        read_snapshot(publisher_dsn, None, 1, application_name=_NAME) as queries,
        _opened(target) as snapshot,
        await Session.connect(publisher_dsn, application_name=_NAME) as session,
    ):
        side = Side(queries)
        return [await _compare(await _described(session, table), table, side, snapshot) for table in tables]


async def published_tables(publisher_dsn: str, publications: Sequence[str]) -> list[TableName]:
    """The tables of publications, sorted: partitions or their root, according to ``publish_via_partition_root``."""
    async with await Session.connect(publisher_dsn, application_name=_NAME) as session:
        return sorted(await published_names(session, publications))


@contextlib.asynccontextmanager
async def _opened(target: str | ComparedTables) -> AsyncIterator[TargetSnapshot]:
    if not isinstance(target, str):
        yield OtherTarget(target)
    elif is_postgres(target):
        async with read_snapshot(target, None, 1, application_name=_NAME) as queries:
            yield PostgresTarget(Side(queries))
    else:
        from subscriber.sinks.sqlalchemy.snapshots import SnapshotSessions  # noqa: PLC0415 -- its drivers come with an extra

        async with SnapshotSessions.open(target, 1) as sessions:
            await sessions.begin()
            yield OtherTarget(sessions)


async def _described(session: Session, table: TableName) -> PublishedTable | None:
    """Describe a table as if it were published, by a publication that is rolled back."""
    name = table.quoted
    ((exists,),) = await session.execute(f"SELECT pg_catalog.to_regclass({quote_literal(name)}) IS NOT NULL")
    if exists != "t":
        return None
    await session.execute("BEGIN")
    try:
        await session.execute(f"CREATE PUBLICATION {_PUBLICATION} FOR TABLE ONLY {name} WITH (publish_via_partition_root = true)")
        (found,) = await described_tables(session, [_PUBLICATION])
    finally:
        await session.execute("ROLLBACK")
    return found


async def _compare(published: PublishedTable | None, table: TableName, publisher: Side, target: TargetSnapshot) -> TableReport:
    report = TableReport(table)
    try:
        planned = "it does not exist on the publisher" if published is None else await target.plan(published, publisher, _LIMITS)
    except RelationError as error:
        planned = error.one_line()
    if isinstance(planned, str):
        report.left_out = planned
        return report
    report.key = tuple(planned.key)
    comparison = TableComparison(
        planned.publisher,
        planned.target,
        key=planned.key,
        columns=planned.columns,
        limits=_LIMITS,
        rate=Rate(None),
        progress=Quiet(),
        report=report,
    )
    await comparison.run(planned.plan)
    return report


@dataclass(frozen=True, slots=True)
class PreparedComparison:
    """Transaction ids, on the publisher, of the transactions that are prepared on each side."""

    publisher: frozenset[int]
    target: frozenset[int]

    @property
    def equal(self) -> bool:
        """Whether the same transactions are prepared."""
        return self.publisher == self.target


async def compare_prepared(publisher_dsn: str, target_dsn: str) -> PreparedComparison:
    """Compare the prepared transactions of two PostgreSQL databases. On the target they are named ``pg_gid_<subscription>_<xid>``."""
    publisher = await prepared_transactions(publisher_dsn)
    target = await _numbers(
        target_dsn,
        "SELECT substring(gid FROM '^pg_gid_[0-9]+_([0-9]+)$')::bigint FROM pg_catalog.pg_prepared_xacts"
        " WHERE database = current_database() AND gid ~ '^pg_gid_[0-9]+_[0-9]+$'",
    )
    return PreparedComparison(publisher, target)


async def prepared_transactions(publisher_dsn: str) -> frozenset[int]:
    """The ids of the transactions that are prepared in a database."""
    query = "SELECT transaction::text::bigint FROM pg_catalog.pg_prepared_xacts WHERE database = current_database()"
    return await _numbers(publisher_dsn, query)


async def _numbers(dsn: str, query: str) -> frozenset[int]:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        rows: Sequence[tuple[int]] = await (await connection.execute(query.encode())).fetchall()
        return frozenset(number for (number,) in rows)
