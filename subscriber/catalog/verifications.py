"""The last verification of each table, as the target's catalog stores it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from subscriber.catalog.model import POSITION, VERIFICATION
from subscriber.catalog.store import Row, Rows, Store
from subscriber.interfaces import TableEntry, TableName
from subscriber.protocol.lsn import Lsn

__all__ = ["StoredVerifications", "Systems", "TableVerification", "Verifications", "since_synchronized", "verification_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableVerification:
    """The last verification of one table.

    Attributes:
        table: its name.
        lsn: both sides were compared as of this position of the publisher.
        whole_lsn: the latest position at which all its rows were compared; older than ``lsn`` if only changed rows were read since.
        verified_at: when it ended, in seconds since 1970.
        row_count: how many rows the publisher had.
        differences: how many rows were found to differ; 0: both sides are equal.
        more: whether there are more than ``differences``.
        seconds: how long it took.
        compared: identifies the columns and rows that were compared.
        publisher_xmin, target_xmin: all transactions below had ended before the snapshots of both sides; 0: unknown.
    """

    table: TableName
    lsn: Lsn
    whole_lsn: Lsn
    verified_at: float
    row_count: int
    differences: int
    more: bool
    seconds: float
    compared: str
    publisher_xmin: int
    target_xmin: int

    @property
    def equal(self) -> bool:
        """Whether no difference was found."""
        return not self.differences and not self.more


_COLUMNS = tuple(name for name in TableVerification.__slots__ if name != "table")


@dataclass(frozen=True, slots=True)
class Systems:
    """Which servers were compared.

    Attributes:
        publisher: its system identifier, as ``IDENTIFY_SYSTEM`` and ``pg_control_system()`` give it; empty: unknown.
        target: identifies the target among all others.
    """

    publisher: str
    target: str


class Verifications(Protocol):
    """The stored verifications of one subscription. All methods raise TargetUnavailable or TargetError."""

    async def systems(self) -> Systems:
        """Return which servers the subscription connects."""
        ...

    async def read(self) -> Mapping[TableName, TableVerification]:
        """Return the last verification of each table that has one."""
        ...

    async def save(self, found: Collection[TableVerification]) -> None:
        """Store verifications, in place of earlier ones of the same tables."""
        ...


class StoredVerifications:
    """Verifications in a catalog of rows. Those of another publisher or in another target are not returned: a backup may contain them.

    Args:
        store: the target's catalog.
        oid: the subscription's.
    """

    def __init__(self, store: Store, oid: int) -> None:
        self._store = store
        self._oid = oid

    async def systems(self) -> Systems:
        """Return which servers the subscription connects."""
        async with self._store.reading() as rows:
            return await self._systems(rows)

    async def read(self) -> Mapping[TableName, TableVerification]:
        """Return the last verification of each table that has one."""
        async with self._store.reading() as rows:
            found = await rows.select(VERIFICATION, {"subid": self._oid, **_columns_of(await self._systems(rows))})
        return {each.table: each for each in map(verification_of, found)}

    async def save(self, found: Collection[TableVerification]) -> None:
        """Store verifications."""
        async with self._store.transaction() as rows:
            systems = _columns_of(await self._systems(rows))
            for each in found:
                key = {"subid": self._oid, "nspname": each.table.namespace, "relname": each.table.name}
                await rows.delete(VERIFICATION, key)
                await rows.insert(VERIFICATION, [{**key, **{name: getattr(each, name) for name in _COLUMNS}, **systems}])

    async def _systems(self, rows: Rows) -> Systems:
        positions = await rows.select(POSITION, {"srsubid": self._oid, "srrelid": 0})
        return Systems(positions[0]["system_identifier"] if positions else "", await rows.target_identifier())


def _columns_of(systems: Systems) -> Row:
    return {"publisher_system": systems.publisher, "target_system": systems.target}


def verification_of(row: Row) -> TableVerification:
    """Return the verification in a row of ``verification``."""
    return TableVerification(table=TableName(row["nspname"], row["relname"]), **{name: row[name] for name in _COLUMNS})


def since_synchronized(entry: TableEntry, found: TableVerification | None) -> TableVerification | None:
    """Return the last verification of a table, unless the table was synchronized again since."""
    if found is None or not entry.is_synchronized or (entry.lsn is not None and found.lsn < entry.lsn):
        return None
    return found
