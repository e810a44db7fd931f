"""One subscription's rows in the catalog, through the session that holds the writer's or the table's lock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from subscriber.catalog.model import Column, Kind, Table
from subscriber.catalog.subscription_rows import SubscriptionRows
from subscriber.errors import RelationError, TargetError
from subscriber.interfaces import TableEntry, TableName
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.postgres.catalog.rows import PostgresRows
from subscriber.sinks.postgres.catalog.target_identity import REBIND_TABLES

if TYPE_CHECKING:
    from subscriber.sinks.postgres.session.apply_session import ApplySession

__all__ = ["COPY_PART", "SessionRows"]

COPY_PART: Final = Table("copy_part", Column("srsubid", Kind.OID), Column("srrelid", Kind.OID), subscription="srsubid")

_READY: Final = """
UPDATE subscriber.pg_subscription_rel AS r SET srsubstate = 'r', srsublsn = passed.lsn::pg_lsn
FROM ROWS FROM (pg_catalog.unnest(%s::int8[]), pg_catalog.unnest(%s::text[])) AS passed(relid, lsn)
WHERE r.srsubid = %s::int8::oid AND r.srrelid = passed.relid::oid AND r.srsubstate::text = 's'
"""

_OF_TREE: Final = """
WITH RECURSIVE tree(oid) AS (
    SELECT c.oid FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
     WHERE n.nspname = %s::text::name AND c.relname = %s::text::name
  UNION ALL SELECT h.inhparent FROM tree AS t JOIN pg_catalog.pg_inherits AS h ON h.inhrelid = t.oid
)
SELECT r.srnspname::text, r.srrelname::text, r.srrelid::int8 FROM tree AS t
  JOIN subscriber.pg_subscription_rel r ON r.srsubid = %s::int8::oid AND r.srrelid = t.oid LIMIT 1
"""

_MOVE_POSITION: Final = """
UPDATE subscriber."position" SET remote_lsn = greatest(remote_lsn, %s::pg_lsn) WHERE srsubid = %s::int8::oid AND srrelid = 0 RETURNING 1
"""


class SessionRows(SubscriptionRows):
    """The rows of a subscription. Call methods that change several rows in a transaction of the session."""

    def __init__(self, session: ApplySession, oid: int) -> None:
        super().__init__(PostgresRows(session.fetch, lambda _: "%s"), oid)
        self._session = session

    async def move_position(self, lsn: Lsn) -> None:
        """Move the subscription's position forward, in the open transaction if there is one.

        Raises:
            TargetError: the subscription has no position.
        """
        if not await self._session.fetch(_MOVE_POSITION, str(lsn), self.oid):
            raise TargetError(
                f"the target has no position of subscription {self.oid}", hint="was the subscription dropped? start it with a new name"
            )

    async def touch(self) -> None:
        """Write a row without a change, so that the COMMIT waits until all earlier commits are on disk."""
        await self._session.fetch("UPDATE subscriber.pg_subscription SET subname = subname WHERE oid = %s::int8::oid", self.oid)

    async def find_table(self, table: TableName) -> int:
        """The oid of a table in the target.

        Raises:
            RelationError: the table does not exist or is no table, with PostgreSQL's message.
        """
        found = (await self.rows.relids([table]))[table]
        if isinstance(found, RelationError):
            raise found
        return found

    async def find(self, name: TableName) -> tuple[TableName, int] | None:
        """Find a table of the subscription, also one that was renamed, or whose partition has that name."""
        found = await super().find(name)
        if found is None:
            for namespace, relation, relid in await self._session.fetch(_OF_TREE, name.namespace, name.name, self.oid):
                return TableName(namespace, relation), relid
        return found

    async def park(self, tables: Mapping[TableName, TableEntry]) -> Mapping[TableName, TableEntry]:
        """Park tables, and forget the parts of their copies."""
        parked = await super().park(tables)
        for name in parked:
            row = await self.table(name)
            assert row is not None
            await self.rows.delete(COPY_PART, {"srsubid": self.oid, "srrelid": row.relid})
        return parked

    async def reconcile(self, tables: Sequence[TableName]) -> Mapping[TableName, TableEntry]:
        """Let parked tables be reconciled. One that was dropped is replaced by a new one with its name."""
        await self._session.fetch(REBIND_TABLES.format("%s"), self.oid)
        return await super().reconcile(tables)

    async def set_ready(self, tables: Mapping[int, Lsn]) -> None:
        """Change the state of many tables from SYNCDONE to READY in one statement."""
        await self._session.fetch(_READY, list(tables), [str(lsn) for lsn in tables.values()], self.oid)

    async def remove_table(self, relid: int) -> None:
        """Remove a table, with its position and its rows in ``copy_part``."""
        await super().remove_table(relid)
        await self.rows.delete(COPY_PART, {"srsubid": self.oid, "srrelid": relid})
