"""One subscription's rows, through the session that holds the lock on what is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from subscriber.abc import TableName
from subscriber.catalog.model import Column, Kind, Table
from subscriber.catalog.states import SubscriptionRows
from subscriber.errors import RelationError, TargetError
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.postgres.rows import PostgresRows
from subscriber.sinks.postgres.session import ApplySession

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
    """The rows of a subscription. What changes several of them is to be called in a transaction of the session."""

    def __init__(self, session: ApplySession, oid: int) -> None:
        super().__init__(PostgresRows(session.fetch, lambda _: "%s"), oid)
        self._session = session

    async def move_position(self, lsn: Lsn) -> None:
        """Move the subscription's position forward, in the transaction that is open if one is.

        Raises:
            TargetError: there is none.
        """
        if not await self._session.fetch(_MOVE_POSITION, str(lsn), self.oid):
            raise TargetError(
                f"the target has no position of subscription {self.oid}", hint="was the subscription dropped? start it with a new name"
            )

    async def touch(self) -> None:
        """Write something, so that the COMMIT waits for everything before it."""
        await self._session.fetch("UPDATE subscriber.pg_subscription SET subname = subname WHERE oid = %s::int8::oid", self.oid)

    async def find_table(self, table: TableName) -> int:
        """The oid of a table of the target that may be subscribed to.

        Raises:
            RelationError: native's words.
        """
        found = (await self.rows.relids([table]))[table]
        if isinstance(found, RelationError):
            raise found
        return found

    async def set_ready(self, tables: Mapping[int, Lsn]) -> None:
        """SYNCDONE to READY, of many tables by one statement."""
        await self._session.fetch(_READY, list(tables), [str(lsn) for lsn in tables.values()], self.oid)

    async def remove_table(self, relid: int) -> None:
        """Remove a table, with its position and what a copy noted."""
        await super().remove_table(relid)
        await self.rows.delete(COPY_PART, {"srsubid": self.oid, "srrelid": relid})
