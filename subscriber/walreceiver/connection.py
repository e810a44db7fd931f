"""A walsender connection to the publisher: replication commands, and SQL queries.

Source: PostgreSQL manual, Streaming Replication Protocol; pg_replication_slots.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from psycopg import pq

from subscriber.errors import PublisherError
from subscriber.protocol import commands
from subscriber.protocol.capabilities import StreamOptions
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.quoting import quote_literal
from subscriber.waits import WAIT_COLUMNS, logged_wait, wait_text, waits_query
from subscriber.walreceiver.session import Session
from subscriber.walreceiver.stream import WalSenderStream

__all__ = ["CreatedSlot", "SlotInfo", "SystemIdentity", "TimelineSwitch", "WalReceiverConnection"]

_log = logging.getLogger(__name__)

_UNDEFINED_OBJECT = "42704"
_HISTORY_LINE = re.compile(r"\s*(\d+)\s+([0-9A-Fa-f]+/[0-9A-Fa-f]+)")


@dataclass(frozen=True, slots=True)
class SystemIdentity:
    """The result of IDENTIFY_SYSTEM. ``xlogpos`` is how far WAL is flushed."""

    system_identifier: str
    timeline: int
    xlogpos: Lsn
    dbname: str | None


@dataclass(frozen=True, slots=True)
class TimelineSwitch:
    """A line of a timeline history: ``timeline`` ended at ``switchpoint``."""

    timeline: int
    switchpoint: Lsn


@dataclass(frozen=True, slots=True)
class CreatedSlot:
    """The result of CREATE_REPLICATION_SLOT. An exported snapshot exists until the connection's next command."""

    slot_name: str
    consistent_point: Lsn
    snapshot_name: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotInfo:
    """A row of pg_replication_slots. Columns that the publisher's version does not have are None or False."""

    slot_name: str
    plugin: str | None
    database: str | None
    temporary: bool
    active: bool
    active_pid: int | None
    restart_lsn: Lsn | None
    confirmed_flush_lsn: Lsn | None
    wal_status: str | None
    two_phase: bool
    failover: bool
    conflicting: bool
    invalidation_reason: str | None

    @property
    def lost(self) -> bool:
        """Whether it can never be used again."""
        return self.wal_status == "lost" or self.conflicting or self.invalidation_reason is not None

    @property
    def lost_because(self) -> str:
        """Why it is lost, as ``invalidation_reason`` names it, which publishers before 17 do not have."""
        return self.invalidation_reason or ("rows_removed" if self.conflicting else "wal_removed")

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        """Build from the row's columns by name."""
        return cls(
            slot_name=row["slot_name"],
            plugin=row["plugin"],
            database=row["database"],
            temporary=row["temporary"],
            active=row["active"],
            active_pid=row["active_pid"],
            restart_lsn=_optional_lsn(row["restart_lsn"]),
            confirmed_flush_lsn=_optional_lsn(row["confirmed_flush_lsn"]),
            wal_status=row.get("wal_status"),
            two_phase=bool(row.get("two_phase")),
            failover=bool(row.get("failover")),
            conflicting=bool(row.get("conflicting")),
            invalidation_reason=row.get("invalidation_reason"),
        )


def _optional_lsn(text: str | None) -> Lsn | None:
    return None if text is None else Lsn.parse(text)


class WalReceiverConnection(Session):
    """A logical walsender (``replication=database``). One call at a time. All errors are PublisherError or subclasses."""

    _wal_end = INVALID_LSN

    @classmethod
    async def connect(cls, conninfo: str, *, application_name: str, replication: bool = True) -> Self:
        """Connect as :meth:`Session.connect`, as a walsender."""
        return await super().connect(conninfo, application_name=application_name, replication=replication)

    @property
    def server_version(self) -> int:
        """``server_version_num``."""
        return self.pgconn.server_version

    async def identify_system(self) -> SystemIdentity:
        """Run IDENTIFY_SYSTEM."""
        ((identifier, timeline, position, dbname),) = await self.execute(commands.identify_system())
        assert identifier is not None
        assert timeline is not None
        assert position is not None
        self._wal_end = Lsn.parse(position)
        return SystemIdentity(identifier, int(timeline), self._wal_end, dbname)

    async def require_system(self, system_identifier: str) -> None:
        """Check the system identifier: if the connection string names several hosts, another cluster may answer.

        Raises:
            PublisherError: it is another one.
        """
        identity = await self.identify_system()
        if identity.system_identifier != system_identifier:
            raise PublisherError(
                f"connected to the publisher with system identifier {identity.system_identifier} instead of {system_identifier}",
                hint="list only servers of one replication cluster in the connection string",
            )

    async def timeline_history(self, timeline: int) -> list[TimelineSwitch]:
        """The ancestors of a timeline, oldest first. Timeline 1 has none."""
        if timeline == 1:
            return []
        ((_, content),) = await self.execute(commands.timeline_history(timeline))
        matches = (_HISTORY_LINE.match(line) for line in (content or "").splitlines())
        return [TimelineSwitch(int(found[1]), Lsn.parse(found[2])) for found in matches if found]

    async def show(self, name: str) -> str:
        """The value of a run-time parameter."""
        ((value,),) = await self.execute(commands.show(name))
        return value or ""

    async def create_slot(
        self,
        name: str,
        *,
        snapshot: commands.SnapshotAction = "nothing",
        two_phase: bool = False,
        failover: bool = False,
        temporary: bool = False,
    ) -> CreatedSlot:
        """Create a logical slot with pgoutput. The server waits for the end of transactions that are writing.

        For the arguments see :func:`subscriber.protocol.commands.create_replication_slot`.

        Raises:
            PublisherError: it exists (SQLSTATE 42710), all slots are in use (53400), a privilege is missing, or wal_level is too low.
        """
        command = commands.create_replication_slot(
            self.capabilities, name, snapshot=snapshot, two_phase=two_phase, failover=failover, temporary=temporary
        )
        async with logged_wait(_log, f'replication slot "{name}"', self._awaited_by_slot):
            ((slot_name, consistent_point, snapshot_name, _),) = await self.execute(command)
        return CreatedSlot(slot_name or name, Lsn.parse(consistent_point or "0/0"), snapshot_name)

    async def _awaited_by_slot(self) -> str:
        async with await self.sibling("waits") as session:
            rows = await session.execute(waits_query([self.pgconn.backend_pid]))
        named = (dict(zip(WAIT_COLUMNS, row, strict=True)) for row in rows)
        found = "; ".join(wait_text(row) for row in named) or "no lock was found that it waits for"
        return f"its creation waits for the end of transactions that were writing on the publisher: {found}"

    async def drop_slot(self, name: str, *, wait: bool = False, missing_ok: bool = False) -> None:
        """Drop a slot.

        Args:
            name: the slot.
            wait: wait until the slot is not in use.
            missing_ok: do nothing if the slot does not exist.

        Raises:
            SlotInUse: it is in use, and ``wait`` is False.
            PublisherError: it does not exist.
        """
        try:
            await self.execute(commands.drop_replication_slot(name, wait=wait))
        except PublisherError as error:
            if not (missing_ok and error.sqlstate == _UNDEFINED_OBJECT):
                raise

    async def slot(self, name: str) -> SlotInfo | None:
        """The slot of that name, of any kind and database."""
        found = await self._slots(f"slot_name = {quote_literal(name)}")
        return found[0] if found else None

    async def slots(self, prefix: str) -> list[SlotInfo]:
        """The slots whose names have this prefix."""
        return await self._slots(f"pg_catalog.starts_with(slot_name::text, {quote_literal(prefix)})")

    async def _slots(self, condition: str) -> list[SlotInfo]:
        # as JSON, because the columns depend on the server's version
        rows = await self.execute(
            f"SELECT pg_catalog.to_json(s) FROM pg_catalog.pg_replication_slots AS s WHERE {condition} ORDER BY slot_name"  # noqa: S608
        )
        return [SlotInfo.from_row(json.loads(row or "{}")) for (row,) in rows]

    async def start_replication(self, slot: str, lsn: Lsn, options: StreamOptions) -> WalSenderStream:
        """Start streaming. From then on the stream owns this connection, and closes it.

        Raises:
            SlotInUse: another walsender uses the slot.
            DataLossError: the slot was invalidated.
            PublisherError: the slot does not exist, or pgoutput rejects an option.
        """
        result = await self.query(commands.start_replication(slot, lsn, options))
        if result.status != pq.ExecStatus.COPY_BOTH:
            raise PublisherError("the publisher did not start streaming")
        return WalSenderStream(self, slot, self._wal_end)
