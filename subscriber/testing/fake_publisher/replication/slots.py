"""Replication slots of the fake publisher."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from subscriber.protocol.capabilities import Capabilities
from subscriber.protocol.lsn import Lsn
from subscriber.testing.fake_publisher.replication.decoding import DecodingStatistics
from subscriber.testing.fake_publisher.server_errors import ServerError

__all__ = ["Slot", "check_slot_name", "slot_row"]

_NAME_LETTERS: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_")


@dataclass(slots=True, eq=False)
class Slot:
    """A logical slot.

    Attributes:
        name, plugin, database: its own.
        temporary: dropped at the end of the session that created it.
        restart_lsn: decoding starts here.
        confirmed_flush_lsn: what ended before it was confirmed by the client.
        two_phase, two_phase_at: whether prepared transactions are decoded at PREPARE, and from where on.
        failover: synchronized to standbys.
        active_pid: the session that uses it, or None.
        owner_pid: of a temporary slot.
        invalidation_reason: ``wal_removed``, ``rows_removed``, ``wal_level_insufficient``, ``idle_timeout``; None: usable.
        statistics: of decoding.
    """

    name: str
    plugin: str
    database: str
    restart_lsn: Lsn
    confirmed_flush_lsn: Lsn
    temporary: bool = False
    two_phase: bool = False
    two_phase_at: Lsn | None = None
    failover: bool = False
    active_pid: int | None = None
    owner_pid: int = 0
    invalidation_reason: str | None = None
    statistics: DecodingStatistics = field(default_factory=DecodingStatistics)

    def acquire(self, pid: int, *, caps: Capabilities) -> None:
        """Use the slot.

        Raises:
            ServerError: another session uses it, or it was invalidated.
        """
        if self.active_pid is not None and self.active_pid != pid:
            raise ServerError("55006", f'replication slot "{self.name}" is active for PID {self.active_pid}')
        if self.invalidation_reason is not None:
            if caps.at_least(18):
                detail = f'This replication slot has been invalidated due to "{self.invalidation_reason}".'
                raise ServerError("55000", f'can no longer access replication slot "{self.name}"', detail=detail)
            raise ServerError(
                "55000",
                f'can no longer get changes from replication slot "{self.name}"',
                detail="This slot has been invalidated because it exceeded the maximum reserved size."
                if self.invalidation_reason == "wal_removed"
                else "This slot has been invalidated because it was conflicting with recovery.",
            )
        self.active_pid = pid

    @property
    def wal_status(self) -> str:
        """``pg_replication_slots.wal_status``."""
        return "lost" if self.invalidation_reason is not None else "reserved"


def slot_row(slot: Slot, caps: Capabilities) -> dict[str, Any]:
    """The row of ``pg_replication_slots``, with the columns that the version has, in their order."""
    lost = slot.invalidation_reason == "wal_removed"
    row: dict[str, Any] = {
        "slot_name": slot.name,
        "plugin": slot.plugin,
        "slot_type": "logical",
        "datoid": "16384",
        "database": slot.database,
        "temporary": slot.temporary,
        "active": slot.active_pid is not None,
        "active_pid": slot.active_pid,
        "xmin": None,
        "catalog_xmin": "700",
        "restart_lsn": None if lost else str(slot.restart_lsn),
        "confirmed_flush_lsn": str(slot.confirmed_flush_lsn),
        "wal_status": slot.wal_status,
        "safe_wal_size": None,
    }
    if caps.at_least(14):
        row["two_phase"] = slot.two_phase
    if caps.at_least(18):
        row["two_phase_at"] = None if slot.two_phase_at is None else str(slot.two_phase_at)
    if caps.at_least(17):
        row["inactive_since"] = None
    if caps.conflicting:
        row["conflicting"] = slot.invalidation_reason in {"rows_removed", "wal_level_insufficient"}
    if caps.invalidation_reason:
        row["invalidation_reason"] = slot.invalidation_reason
    if caps.failover_slots:
        row["failover"] = slot.failover
        row["synced"] = False
    if caps.at_least(19):
        row["slotsync_skip_reason"] = None
    return row


def check_slot_name(name: str) -> None:
    """Check the name of a slot.

    Raises:
        ServerError: it is not valid.
    """
    if not name:
        raise ServerError("42602", f'replication slot name "{name}" is too short')
    if len(name) > 63:
        raise ServerError("42622", f'replication slot name "{name}" is too long')
    if not set(name) <= _NAME_LETTERS:
        hint = "Replication slot names may only contain lower case letters, numbers, and the underscore character."
        raise ServerError("42602", f'replication slot name "{name}" contains invalid character', hint=hint)
