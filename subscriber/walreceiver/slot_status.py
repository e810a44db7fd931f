"""Observe a slot and its walsender on the publisher.

Source: PostgreSQL manual, pg_replication_slots, pg_stat_replication.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from subscriber.errors import PublisherError
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.quoting import quote_literal
from subscriber.walreceiver.publisher_errors import START_OVER, invalidation_remedy
from subscriber.walreceiver.session import Session

__all__ = ["SlotObservation", "observe_slot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotObservation:
    """A slot as the publisher reports it.

    Attributes:
        publisher_lsn: end of the publisher's WAL.
        active: whether a walsender uses it.
        wal_status: ``reserved``, ``extended``, ``unreserved`` or ``lost``.
        confirmed_flush_lsn: the acknowledged position, or None.
        retained_bytes: WAL that the publisher keeps for the slot.
        lag_seconds: how long recent commits took to become durable in the target; 0 if everything sent is durable. None: the slot is
            not active, or this role may not see it.
        safe_wal_size: WAL that can be written before the slot may be lost; None: there is no limit, or it is lost.
        invalidation_reason: of a slot that is lost; None before 17.
    """

    publisher_lsn: Lsn
    active: bool
    wal_status: str | None
    confirmed_flush_lsn: Lsn | None
    retained_bytes: int
    lag_seconds: float | None
    safe_wal_size: int | None = None
    invalidation_reason: str | None = None

    @property
    def danger(self) -> str | None:
        """Why the slot can no longer be used, or soon cannot."""
        if self.wal_status == "unreserved":
            return "the slot will lose WAL soon: raise max_slot_wal_keep_size if the publisher's disk has room"
        if self.wal_status != "lost":
            return None
        reason = self.invalidation_reason or "wal_removed"
        return f"the slot was invalidated ({reason}): {invalidation_remedy(reason)}; {START_OVER}"


async def observe_slot(conninfo: str, slot_name: str, *, application_name: str) -> SlotObservation:
    """Query the slot on an ordinary session.

    Raises:
        ConfigurationError, PublisherUnavailable, PublisherError: the query failed, or the slot does not exist.
    """
    session = await Session.connect(conninfo, application_name=application_name)
    try:
        rows = await session.execute(
            f"""
            SELECT pg_catalog.to_json(s), pg_catalog.pg_wal_lsn_diff(w.lsn, s.restart_lsn)::int8, w.lsn,
                   CASE WHEN r.pid IS NULL OR r.sent_lsn IS NULL THEN NULL
                        WHEN r.flush_lsn >= r.sent_lsn THEN 0
                        ELSE coalesce(extract(epoch FROM r.flush_lag), 0) END
              FROM pg_catalog.pg_replication_slots AS s
              CROSS JOIN (SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
                                      ELSE pg_catalog.pg_current_wal_flush_lsn() END AS lsn) AS w
              LEFT JOIN pg_catalog.pg_stat_replication AS r ON r.pid = s.active_pid
             WHERE s.slot_name = {quote_literal(slot_name)}"""  # noqa: S608 (quoted)
        )
    finally:
        await session.close()
    if not rows:
        raise PublisherError(
            f'replication slot "{slot_name}" does not exist', hint="changes since it was dropped are lost: `subscriber recover NAME`"
        )
    slot, retained, lsn, lag = rows[0]
    found: dict[str, Any] = json.loads(slot or "{}")
    confirmed = found.get("confirmed_flush_lsn")
    return SlotObservation(
        publisher_lsn=Lsn.parse(lsn or "0/0"),
        active=bool(found["active"]),
        wal_status=found.get("wal_status"),
        confirmed_flush_lsn=Lsn.parse(confirmed) if confirmed else None,
        retained_bytes=max(int(retained or 0), 0),
        lag_seconds=None if lag is None else float(lag),
        safe_wal_size=found.get("safe_wal_size"),
        invalidation_reason=found.get("invalidation_reason"),
    )
