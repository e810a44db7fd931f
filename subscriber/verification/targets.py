"""A target in a snapshot, as the comparison sees it: a plan for each table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from subscriber.abc import PublishedTable
from subscriber.verification.changed import ChangedRows
from subscriber.verification.model import VerificationLimits
from subscriber.verification.parts import TableSide
from subscriber.verification.postgres_table import PostgresTable
from subscriber.verification.sides import Side
from subscriber.verification.tables import Blocks, KeyRanges, describe, divide, pair, stored_anew_query

__all__ = ["PlannedTable", "PostgresTarget", "TargetSnapshot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTable:
    """One table, ready to be compared.

    Attributes:
        publisher: the table there.
        target: the table there.
        key: the columns that identify a row.
        columns: the compared columns.
        plan: how the table is divided.
        changed: looks only at rows that changed since an earlier verification; None: this kind of target does not know them.
    """

    publisher: TableSide
    target: TableSide
    key: Sequence[str]
    columns: Sequence[str]
    plan: KeyRanges | Blocks
    changed: ChangedRows | None = None


class TargetSnapshot(Protocol):
    """A snapshot of the target."""

    async def plan(self, table: PublishedTable, publisher: Side, limits: VerificationLimits) -> PlannedTable | str:
        """Plan the comparison of a table. A text says why it cannot be compared."""
        ...

    async def is_intact(self, table: PublishedTable) -> bool:
        """Whether the table's rows can still be read as of the snapshot. Asked after they were read."""
        ...


class PostgresTarget:
    """A :class:`TargetSnapshot` of PostgreSQL.

    Args:
        side: the sessions.
    """

    def __init__(self, side: Side) -> None:
        self._side = side

    async def plan(self, table: PublishedTable, publisher: Side, limits: VerificationLimits) -> PlannedTable | str:
        """Plan the comparison of a table."""
        here, there = await describe(publisher.run, table.name), await describe(self._side.run, table.name)
        if here is None or there is None:
            return f"it does not exist {'in the target' if here is not None else 'on the publisher'}"
        planned = pair(table, here, there)
        if isinstance(planned, str):
            return planned
        key = planned.publisher.key
        sample = limits.sample if key else None
        plan = await divide(publisher.run, planned, limits.jobs)
        if isinstance(plan, KeyRanges) and len(plan.parts) > 1:
            # some of the ranges are left out
            sample = None
        newer = (
            ChangedRows((planned.publisher, planned.target), (publisher, self._side)) if key and here.is_heap and there.is_heap else None
        )
        return PlannedTable(
            publisher=PostgresTable(planned.publisher, publisher, sample),
            target=PostgresTable(planned.target, self._side, sample),
            key=key,
            columns=table.columns,
            plan=plan,
            changed=newer,
        )

    async def is_intact(self, table: PublishedTable) -> bool:
        """Whether no other session has stored the table anew."""
        ((anew,),) = await self._side.run(stored_anew_query(table.name))
        return anew != "true"
