"""A target in a snapshot, as the comparison sees it: a plan for each table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from subscriber.interfaces import ComparedTables, PublishedTable, TableName
from subscriber.verification.changed import ChangedRows
from subscriber.verification.client_table import ClientTable
from subscriber.verification.model import VerificationLimits
from subscriber.verification.parts import WHOLE, TableSide
from subscriber.verification.postgres_table import PostgresTable
from subscriber.verification.row_sql import TableSql, client_column_sql
from subscriber.verification.sides import Side, together
from subscriber.verification.tables import (
    Blocks,
    KeyRanges,
    SideTable,
    block_ranges,
    bucket_mask,
    describe,
    divide,
    expected_rows,
    key_ranges,
    own_columns,
    pair,
    row_key,
    was_rewritten_query,
)

__all__ = ["OtherTarget", "PlannedTable", "PostgresTarget", "TargetSnapshot"]

_INTEGERS: Final = frozenset({"int2", "int4", "int8"})
_TEXTS: Final = frozenset({"text", "varchar", "uuid"})
"""Types whose values are stored as their text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTable:
    """One table, ready to be compared.

    Attributes:
        name: its name.
        publisher: the table there.
        target: the table there.
        key: the columns that identify a row.
        columns: the compared columns.
        plan: how the table is divided.
        ordered: the first column of the key, if both sides sort it in the same way.
        bound_type: the type of the bounds of its ranges, in pg_catalog.
        rows: the estimated number of rows.
        same_keys: see :attr:`subscriber.verification.tables.Pair.same_keys`.
        changed: looks only at rows that changed since an earlier verification; None: this kind of target does not know them.
    """

    name: TableName
    publisher: PostgresTable
    target: TableSide
    key: Sequence[str]
    columns: Sequence[str]
    plan: KeyRanges | Blocks
    ordered: str | None
    bound_type: str
    rows: int
    same_keys: bool
    changed: ChangedRows | None = None


class TargetSnapshot(Protocol):
    """A snapshot of the target."""

    async def describe(self, tables: Sequence[PublishedTable], publisher: Side) -> None:
        """Read the descriptions of tables that will be planned, all at once. A table that was not described costs :meth:`plan` more."""
        ...

    async def plan(self, table: PublishedTable, publisher: Side, limits: VerificationLimits) -> PlannedTable | str:
        """Plan the comparison of a table. A text says why it cannot be compared."""
        ...

    async def is_intact(self, table: PublishedTable) -> bool:
        """Whether the table's rows can still be read as of the snapshot. Asked after they were read."""
        ...


class _Descriptions:
    """Descriptions of tables, each read once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Side, TableName], SideTable | None] = {}

    async def read(self, side: Side, tables: Sequence[TableName]) -> None:
        found = await describe(side.run, tables)
        self._known |= {(side, table): found.get(table) for table in tables}

    async def of(self, side: Side, table: TableName) -> SideTable | None:
        if (side, table) not in self._known:
            await self.read(side, [table])
        return self._known[side, table]


class PostgresTarget:
    """A :class:`TargetSnapshot` of PostgreSQL.

    Args:
        side: the sessions.
        condition: SQL of the rows to compare; empty: all.
    """

    def __init__(self, side: Side, condition: str = "") -> None:
        self._side = side
        self._condition = condition
        self._descriptions = _Descriptions()

    async def describe(self, tables: Sequence[PublishedTable], publisher: Side) -> None:
        """Describe tables on both sides."""
        own = self._descriptions.read(publisher, [table.publisher_name for table in tables])
        await together([own, self._descriptions.read(self._side, [table.name for table in tables])])

    async def plan(self, table: PublishedTable, publisher: Side, limits: VerificationLimits) -> PlannedTable | str:
        """Plan the comparison of a table."""
        here, there = await self._descriptions.of(publisher, table.publisher_name), await self._descriptions.of(self._side, table.name)
        if here is None or there is None:
            return f"it does not exist {'in the target' if here is not None else 'on the publisher'}"
        planned = pair(table, here, there)
        if isinstance(planned, str):
            return planned
        key = planned.publisher.key
        plan = await divide(publisher.run, planned, limits.jobs)
        newer = (
            ChangedRows((planned.publisher, planned.target), (publisher, self._side)) if key and here.is_heap and there.is_heap else None
        )
        return PlannedTable(
            name=table.name,
            publisher=PostgresTable(planned.publisher, publisher),
            target=PostgresTable(planned.target, self._side, self._condition),
            key=key,
            columns=table.columns,
            plan=plan,
            ordered=planned.ordered,
            bound_type=planned.bound_type,
            rows=planned.rows,
            same_keys=planned.same_keys,
            changed=newer,
        )

    async def is_intact(self, table: PublishedTable) -> bool:
        """Whether no other session has truncated or rewritten the table."""
        ((rewritten,),) = await self._side.run(was_rewritten_query(table.name))
        return rewritten != "true"


class OtherTarget:
    """A :class:`TargetSnapshot` of a database whose rows are hashed in this process.

    Args:
        snapshot: reads the tables.
    """

    def __init__(self, snapshot: ComparedTables) -> None:
        self._snapshot = snapshot
        self._descriptions = _Descriptions()

    async def describe(self, tables: Sequence[PublishedTable], publisher: Side) -> None:
        """Describe tables of the publisher."""
        await self._descriptions.read(publisher, [table.publisher_name for table in tables])

    async def plan(self, table: PublishedTable, publisher: Side, limits: VerificationLimits) -> PlannedTable | str:
        """Plan the comparison of a table."""
        here = await self._descriptions.of(publisher, table.publisher_name)
        if here is None:
            return "it does not exist on the publisher"
        bases = {name: base for name, (base, _, _) in own_columns(table, here).items()}
        key = row_key(table)
        if any(bases[name] in {"float4", "float8"} for name in key):
            # a float has several texts
            key = ()
        source = await self._snapshot.table(table, key)
        columns = tuple(client_column_sql(name, base) for name, base in bases.items())
        sql = TableSql(table.publisher_name, here.kind == "r", columns, key, table.row_filters, fast=False, renamed=table.renamed)
        rows = expected_rows(table)
        integers = {name for name in key if bases[name] in _INTEGERS and source.is_integer(table.columns.index(name))}
        column = key[0] if key and key[0] in integers else None
        plan = await key_ranges(publisher.run, sql, column, "int8", rows)
        return PlannedTable(
            name=table.name,
            publisher=PostgresTable(sql, publisher),
            target=ClientTable(source, bases, key),
            key=key,
            columns=table.columns,
            plan=plan or Blocks(block_ranges(here, limits.jobs), (WHOLE,), bucket_mask(rows)),
            ordered=column,
            bound_type="int8",
            rows=rows,
            same_keys=all(name in integers or bases[name] in _TEXTS for name in key),
        )

    async def is_intact(self, table: PublishedTable) -> bool:
        """The database rejects a query if a table was altered since the snapshot, or lets the change wait."""
        return True
