"""One subscription's rows in the catalog, through the session that holds the writer's or the table's lock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from subscriber.catalog.model import Column, Kind, Table
from subscriber.catalog.subscription_rows import SubscriptionRows
from subscriber.errors import RelationError, TargetError
from subscriber.interfaces import TableName
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.postgres.catalog.rows import PostgresRows
from subscriber.sinks.postgres.session.apply_session import ApplySession

__all__ = ["COPY_PART", "SessionRows"]

COPY_PART: Final = Table("copy_part", Column("srsubid", Kind.OID), Column("srrelid", Kind.OID), subscription="srsubid")

_READY: Final = """
UPDATE subscriber.pg_subscription_rel AS r SET srsubstate = 'r', srsublsn = passed.lsn::pg_lsn
FROM ROWS FROM (pg_catalog.unnest(%s::int8[]), pg_catalog.unnest(%s::text[])) AS passed(relid, lsn)
WHERE r.srsubid = %s::int8::oid AND r.srrelid = passed.relid::oid AND r.srsubstate::text = 's'
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

    async def set_ready(self, tables: Mapping[int, Lsn]) -> None:
        """Change the state of many tables from SYNCDONE to READY in one statement."""
        await self._session.fetch(_READY, list(tables), [str(lsn) for lsn in tables.values()], self.oid)

    async def remove_table(self, relid: int) -> None:
        """Remove a table, with its position and its rows in ``copy_part``."""
        await super().remove_table(relid)
        await self.rows.delete(COPY_PART, {"srsubid": self.oid, "srrelid": relid})
