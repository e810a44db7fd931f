"""A subscription's status as JSON. Names are PostgreSQL's where it has them. LSNs are strings, times are ISO 8601, unknown is null."""

from __future__ import annotations

import math
from collections import Counter
from datetime import UTC, datetime
from typing import Any

from subscriber.catalog import ApplierObservation, TableObservation
from subscriber.catalog.verifications import TableVerification
from subscriber.interfaces import RelayLogDetails, Retry, WorkerActivity
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.subscription.management.status import SubscriptionStatus

__all__ = ["status_as_json"]


def status_as_json(status: SubscriptionStatus) -> dict[str, Any]:
    """Convert the status to types that JSON has. The connection string is left out, so the result has no password."""
    found, definition, slot = status.observation, status.observation.definition, status.slot
    worker = found.worker
    return {
        "name": definition.name,
        "oid": definition.oid,
        "state": status.state.value,
        "retry": _retry(status.retry),
        "enabled": definition.enabled,
        "pid": found.pid,
        "publications": list(definition.publications),
        "conflict_rules": dict(definition.options.given_conflict_rules),
        "mapping": {name: values for name, values in definition.options.mapping_texts.items() if values},
        "slot_name": definition.slot_name,
        "two_phase_state": definition.two_phase.value,
        "skip_lsn": None if definition.skip_lsn == INVALID_LSN else str(definition.skip_lsn),
        "position": _lsn(definition.position),
        "received_lsn": _lsn(worker and worker.received),
        "applied_lsn": _lsn(worker and worker.applied),
        "flushed_lsn": _lsn(worker and worker.flushed),
        "latest_end_lsn": _lsn(worker and worker.latest_end),
        "last_msg_send_time": _seconds(worker and worker.sent_at),
        "last_msg_receipt_time": _seconds(worker and worker.received_at),
        "latest_end_time": _seconds(worker and worker.reported_at),
        "lag_bytes": status.lag_bytes,
        "lag_seconds": _number(status.lag_seconds),
        "limited": found.details.limited if worker is not None else None,
        "relay_log": None if worker is None or found.details.relay_log is None else _relay_log(found.details.relay_log),
        "copies_begin": None if worker is None or found.details.copies_begin is None else _seconds(found.details.copies_begin),
        "transactions": worker and worker.transactions,
        "changes": worker and worker.changes,
        "transactions_per_second": _number(worker and worker.transactions_per_second),
        "changes_per_second": _number(worker and worker.changes_per_second),
        "publisher": None
        if slot is None
        else {
            "lsn": str(slot.publisher_lsn),
            "slot_active": slot.active,
            "wal_status": slot.wal_status,
            "confirmed_flush_lsn": _lsn(slot.confirmed_flush_lsn),
            "retained_wal_bytes": slot.retained_bytes,
        },
        "publisher_error": _text(status.publisher_error),
        "last_error": _text(found.last_error),
        "last_error_time": _time(found.last_error_time),
        "applier": None if found.applier is None else _applier(found.applier),
        "counters": dict(found.counters),
        "stats_reset": _time(found.stats_reset),
        "tables": [_table(table) for table in found.tables],
        "tables_by_state": Counter(table.entry.state.value for table in found.tables),
        "tables_left_out": [
            {"schema": _text(table.namespace), "name": _text(table.name), "reason": _text(reason)}
            for table, reason in found.left_out.items()
        ],
    }


def _relay_log(log: RelayLogDetails) -> dict[str, Any]:
    return {
        "received_lsn": str(log.received),
        "flushed_lsn": str(log.flushed),
        "bytes": log.size,
        "limit_bytes": log.limit,
        "paused": log.paused,
        "retry": _retry(log.retry),
        "failure": log.failure and _text(log.failure),
    }


def _applier(applier: ApplierObservation) -> dict[str, Any]:
    return {
        "pid": applier.pid,
        "host": applier.host,
        "last_report": _time(applier.last_report),
        "engine": applier.engine,
        "published_lsn": _lsn(applier.lsn),
        "waiting_batches": applier.waiting_batches,
        "waiting_bytes": applier.waiting_bytes,
        "waiting_copies": applier.waiting_copies,
        "waiting_since": _seconds(applier.waiting_since),
        "freshness": None if applier.freshness is None else dict(applier.freshness),
        "landed_bytes": applier.landed_bytes,
        "written_bytes": applier.written_bytes,
        "progress": [dict(event) for event in applier.progress],
        "stopped": [{"name": _text(name), "reason": _text(error)} for name, error in applier.stopped.items()],
        "last_error": _text(applier.last_error),
        "last_error_time": _time(applier.last_error_time),
    }


def _table(table: TableObservation) -> dict[str, Any]:
    return {
        "schema": _text(table.table.namespace),
        "name": _text(table.table.name),
        "state": table.entry.state.value,
        "lsn": _lsn(table.entry.lsn),
        "copied_rows": table.worker and table.worker.copied_rows,
        "estimated_rows": table.worker and table.worker.estimated_rows,
        "retry": _retry(table.retry),
        "parked": None if table.parked is None else {"error": _text(table.entry.error), "since": _seconds(table.entry.since)},
        "verification": None if table.verification is None else _verification(table.verification),
    }


def _verification(found: TableVerification) -> dict[str, Any]:
    return {
        "lsn": str(found.lsn),
        "whole_lsn": str(found.whole_lsn),
        "verified_at": _seconds(found.verified_at),
        "equal": found.equal,
        "row_count": found.row_count,
        "differences": found.differences,
        "more_differences": found.more,
        "seconds": round(found.seconds, 3),
    }


def _retry(retry: Retry | None) -> dict[str, Any] | None:
    if retry is None:
        return None
    return {"error": _text(retry.error), "attempt": retry.attempt, "next_attempt": _seconds(retry.next_attempt)}


def _lsn(lsn: Lsn | WorkerActivity | None) -> str | None:
    return None if lsn is None else str(lsn)


def _text(text: str | None) -> str | None:
    """Escape what is not valid Unicode, because JSON has no bytes."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode()


def _number(value: float | WorkerActivity | None) -> float | None:
    return round(value, 3) if isinstance(value, int | float) and math.isfinite(value) else None


def _seconds(seconds: float | WorkerActivity | None) -> str | None:
    return datetime.fromtimestamp(seconds, UTC).isoformat() if isinstance(seconds, int | float) else None


def _time(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()
