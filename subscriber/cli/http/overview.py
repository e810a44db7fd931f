"""What the page shows, as JSON. There are names, states, counts and error messages, but never values of rows or connection strings."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Final, TypeVar

from subscriber.cli.http.sampler import Point, Watched, to_copy
from subscriber.cli.status_text import STATES
from subscriber.errors import SubscriberError, TargetError
from subscriber.interfaces import RelayLogDetails, Retry, TableName, TableState
from subscriber.printable import printable
from subscriber.protocol.lsn import Lsn
from subscriber.subscription.run_status import Status
from subscriber.walreceiver.slot_status import SlotObservation

__all__ = ["describe", "error_of", "known", "table_rows"]

_Known = TypeVar("_Known")
_Shown = TypeVar("_Shown")

_POINTS: Final = 240
_RATE_SECONDS: Final = 120.0
_SHOWN: Final = 20


def describe(name: str, status: Status, watched: Watched) -> dict[str, Any]:
    """One running subscription."""
    counted, now = status.statistics, time.time()
    return {
        "name": printable(name),
        "running": True,
        "enabled": True,
        "state": status.state.value,
        "streaming": status.streaming,
        "lag_bytes": watched.lag_bytes(status),
        "lag_seconds": status.lag_seconds,
        "limited": status.limited,
        "silence": None if status.last_message is None else round(max(now - status.last_message, 0.0), 1),
        "lsn": {each: str(getattr(status, each)) for each in ("received", "applied", "flushed")},
        "publisher_lsn": str(watched.publisher_lsn(status)),
        "retry": known(_retry, status.retry),
        "error": known(error_of, status.latest_error),
        "error_time": status.last_error_time,
        "failing": status.retry is not None or not status.streaming,
        "slot": known(partial(_slot, seconds_until_lost=watched.seconds_until_lost), watched.slot),
        "slot_error": known(error_of, watched.slot_error),
        "tables": _states(status),
        "parked": [_parked(status, table) for table, entry in status.tables.items() if entry.state is TableState.PARKED][:_SHOWN],
        "left_out": [{"table": printable(str(table)), "reason": printable(why)} for table, why in list(status.left_out.items())[:_SHOWN]],
        "retrying": [{"table": printable(str(table)), **_retry(each)} for table, each in list(status.table_retries.items())[:_SHOWN]],
        "copies": _copies(status, watched.points, now),
        "conflicts": {
            each.removeprefix("confl_"): getattr(counted, each)
            for each in type(counted).__slots__
            if each.startswith("confl_") and getattr(counted, each)
        },
        "errors": {"apply": counted.apply_error_count, "sync": counted.sync_error_count},
        "transactions": counted.transactions,
        "changes": counted.changes,
        "relay_log": known(_relay_log, status.relay_log),
        "verified": _verified(status),
        "history": _history(watched.points),
    }


def error_of(error: SubscriberError) -> dict[str, Any]:
    """An error with its remedy, and the LSN of the transaction that could be skipped."""
    finish = error.finish_lsn if isinstance(error, TargetError) else None
    return {
        "text": printable("; ".join(" ".join(part.split()) for part in (str(error), *getattr(error, "__notes__", ())))),
        "remedy": None if error.hint is None else " ".join(printable(error.hint).split()),
        "sqlstate": error.sqlstate,
        "kind": type(error).__name__,
        "finish_lsn": None if finish is None else str(Lsn(finish)),
    }


def known(show: Callable[[_Known], _Shown], value: _Known | None) -> _Shown | None:
    """What is shown of a value; None if it is not known."""
    return None if value is None else show(value)


def _retry(retry: Retry) -> dict[str, Any]:
    return {"error": printable(retry.error), "attempt": retry.attempt, "next_attempt": retry.next_attempt}


def _slot(slot: SlotObservation, seconds_until_lost: float | None) -> dict[str, Any]:
    return {
        "active": slot.active,
        "wal_status": slot.wal_status,
        "retained": slot.retained_bytes,
        "safe": slot.safe_wal_size,
        "seconds_until_lost": seconds_until_lost,
        "danger": slot.danger,
    }


def _states(status: Status) -> dict[str, int]:
    states = [entry.state for entry in status.tables.values()]
    found = {word: states.count(state) for state, word in STATES.items()}
    return {word: count for word, count in (*found.items(), ("left out", len(status.left_out))) if count}


def _parked(status: Status, table: TableName) -> dict[str, Any]:
    entry = status.tables[table]
    text, _, hint = (entry.error or "").partition(" (hint: ")
    latest = status.latest_error
    if not hint and latest is not None and latest.hint and text.startswith(" ".join(str(latest).split())):
        hint = " ".join(latest.hint.split())
    return {
        "table": printable(str(table)),
        "error": printable(text),
        "remedy": printable(hint.removesuffix(")") or "fix the cause"),
        "since": entry.since,
        "lsn": str(entry.lsn),
    }


def _copies(status: Status, points: Sequence[Point], now: float) -> dict[str, Any] | None:
    unfinished = [copy for copy in status.copies.values() if not copy.done]
    waiting = to_copy(status)
    if not unfinished and not waiting:
        return None
    rows = sum(copy.rows for copy in status.copies.values())
    whole = sum(copy.rows if copy.done else max(copy.estimated_rows or 0, copy.rows) for copy in status.copies.values())
    before = next((point for point in list(points) if 0 < now - point.time <= _RATE_SECONDS and point.copied <= rows), None)
    complete = waiting <= len(unfinished) and all((copy.estimated_rows or 0) > copy.rows for copy in unfinished)
    rate, seconds_left = 0.0, None
    if before is not None:
        seconds, copied = now - before.time, rows - before.copied
        rate = copied / seconds
        # tables that wait have no estimate of their rows yet: then each counts the same
        done, left = (copied, whole - rows) if complete else (before.to_copy - waiting, waiting)
        seconds_left = left * seconds / done if done > 0 else None
    return {
        "tables": waiting,
        "rows": rows,
        "estimated_rows": whole,
        "rows_per_second": round(rate),
        "seconds_left": seconds_left,
        "complete": complete,
        "begin": status.copies_begin,
    }


def _relay_log(log: RelayLogDetails) -> dict[str, Any]:
    return {
        "size": log.size,
        "limit": log.limit,
        "paused": log.paused,
        "oldest": None if log.oldest is None else str(log.oldest),
        "retry": known(_retry, log.retry),
        "failure": known(printable, log.failure),
    }


def _verified(status: Status) -> dict[str, Any] | None:
    found = list(status.verifications.values())
    if not found:
        return None
    differing = [each for each in found if not each.equal]
    return {
        "tables": len(found),
        "oldest": min(each.verified_at for each in found),
        "differing": [{"table": printable(str(each.table)), "rows": max(each.differences, each.more)} for each in differing[:_SHOWN]],
    }


def _history(points: Sequence[Point]) -> list[list[float | None]]:
    """Time, lag in seconds, changes per second and retained WAL, of at most 240 moments."""
    known = list(points)
    known = known[:: -(-len(known) // _POINTS) or 1]
    found: list[list[float | None]] = []
    for before, point in pairwise(known):
        seconds = max(point.time - before.time, 0.001)
        rate = max(point.changes - before.changes, 0) / seconds
        found.append([round(point.time), point.lag_seconds, round(rate, 2), point.retained])
    return found


def table_rows(status: Status, *, search: str, problems: bool, offset: int, limit: int) -> Mapping[str, Any]:
    """Some tables of a subscription, those with a problem first.

    Args:
        status: of the subscription.
        search: only tables whose name has this text.
        problems: only tables with a problem.
        offset: how many to leave out.
        limit: how many to give.
    """
    wanted = search.casefold()
    rows = [_table(status, table) for table in status.tables if wanted in str(table).casefold()]
    rows += [
        {
            "table": printable(str(table)),
            "state": "left out",
            "problem": printable(why),
            "changes": 0,
            "bytes": 0,
            "rows": None,
            "estimated_rows": None,
        }
        for table, why in status.left_out.items()
        if wanted in str(table).casefold()
    ]
    found = sorted((row for row in rows if row["problem"] or not problems), key=lambda row: (not row["problem"], row["table"]))
    return {"total": len(found), "rows": found[offset : offset + limit]}


def _table(status: Status, table: TableName) -> dict[str, Any]:
    entry, copy, retry = status.tables[table], status.copies.get(table), status.table_retries.get(table)
    verification = status.verifications.get(table)
    problem = entry.error if entry.state is TableState.PARKED else retry.error if retry is not None else None
    if problem is None and verification is not None and not verification.equal:
        problem = f"{max(verification.differences, verification.more)} rows differ from the publisher's"
    return {
        "table": printable(str(table)),
        "state": STATES[entry.state],
        "problem": printable(problem) if problem else None,
        "changes": status.statistics.tables.get(table, 0),
        "bytes": status.statistics.table_bytes.get(table, 0),
        "copied_bytes": status.statistics.copied_bytes.get(table, 0),
        "rows": copy and copy.rows,
        "estimated_rows": copy and copy.estimated_rows,
        "verified": verification and verification.verified_at,
    }
