"""A subscription's status as text."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from subscriber.catalog import ApplierObservation
from subscriber.catalog.verifications import TableVerification
from subscriber.interfaces import RelayLogDetails, Retry, TableState
from subscriber.printable import counted, printable
from subscriber.protocol.lsn import INVALID_LSN
from subscriber.subscription.management.status import State, SubscriptionStatus

__all__ = ["STATES", "describe", "size"]

STATES = {
    TableState.INIT: "waiting",
    TableState.DATASYNC: "copying",
    TableState.FINISHEDCOPY: "catching up",
    TableState.SYNCDONE: "synchronized",
    TableState.READY: "ready",
    TableState.PARKED: "parked",
}


def describe(statuses: Sequence[SubscriptionStatus]) -> str:
    """Describe each subscription in some lines."""
    if not statuses:
        return "no subscriptions"
    # each line stays one line, even if a name contains control characters
    return "\n\n".join("\n".join(map(printable, _lines(status))) for status in statuses)


def _lines(status: SubscriptionStatus) -> list[str]:
    found, definition, slot, worker = status.observation, status.observation.definition, status.slot, status.observation.worker
    pid = f", PID {found.pid}" if found.pid else ""
    lines = [f"{definition.name}: {status.state.words}{pid}"]
    if status.retry is not None:
        lines.append(f"  retrying      {retrying(status.retry)}")
    lines.append(f"  publications  {', '.join(definition.publications)}")
    if definition.options.conflict:
        rules = definition.options.given_conflict_rules
        lines.append(f"  conflicts     {', '.join(f'{kind} = {rule}' for kind, rule in rules.items())}")
    for name, values in definition.options.mapping_texts.items():
        lines += [f"  {name:<13} {'; '.join(f'{table}={value}' if value else table for table, value in values.items())}"] if values else []
    if slot is not None:
        word = "active" if slot.active else "inactive"
        lines.append(f"  slot          {definition.slot_name} ({word}, {slot.wal_status}), retains {size(slot.retained_bytes)} of WAL")
    elif definition.slot_name is not None:
        lines.append(f"  slot          {definition.slot_name}")
    if worker is not None:
        lines.append(f"  received      {worker.received}   applied {worker.applied}   flushed {worker.flushed}")
        if found.details.relay_log is not None:
            lines += _relay_log(found.details.relay_log)
        limited = ", limited by max_apply_rate" if found.details.limited else ""
        rates = f"{worker.transactions_per_second:.1f} transactions/s   {worker.changes_per_second:.0f} changes/s"
        lines.append(f"  rates         {rates}{limited}")
    elif definition.position is not None:
        lines.append(f"  position      {definition.position}")
    if status.lag_bytes is not None:
        seconds = "" if status.lag_seconds is None else f", {status.lag_seconds:.1f} s"
        lines.append(f"  lag           {size(status.lag_bytes)}{seconds}")
    lines += _tables(status)
    if found.applier is not None:
        lines += _applier(found.applier)
    counts = {name: count for name, count in found.counters.items() if count}
    if counts:
        lines.append("  counters      " + ", ".join(f"{name} {count}" for name, count in counts.items()))
    if definition.skip_lsn != INVALID_LSN:
        lines.append(f"  will skip     {definition.skip_lsn}")
    if status.publisher_error:
        lines.append(f"  publisher     {status.publisher_error}")
    if found.last_error and status.state is not State.CREATING:
        when = f"{found.last_error_time:%Y-%m-%d %H:%M:%S%z} " if found.last_error_time else ""
        lines.append(f"  last error    {when}{found.last_error}")
    return lines


def _relay_log(log: RelayLogDetails) -> list[str]:
    full = ", full: receiving pauses" if log.paused else ""
    lines = [f"  relay log     received {log.received}   flushed {log.flushed}, {size(log.size)} of {size(log.limit)}{full}"]
    if log.retry is not None:
        lines.append(f"    receiving   {retrying(log.retry)}")
    if log.failure is not None:
        lines.append(f"    receiving   has ended: {log.failure}")
    return lines


def _applier(applier: ApplierObservation) -> list[str]:
    runs = f"{applier.engine or 'unknown engine'}, PID {applier.pid}" if applier.pid else "not running"
    if applier.last_report is not None:
        runs += f" on {applier.host} (last report {applier.last_report:%Y-%m-%d %H:%M:%S%z})"
    waits = [f"{applier.waiting_batches} batches, {size(applier.waiting_bytes)}"] if applier.waiting_batches else []
    waits += [f"{applier.waiting_copies} {'copy' if applier.waiting_copies == 1 else 'copies'}"] if applier.waiting_copies else []
    lines = [f"  applier       {runs}, published {applier.lsn or 'nothing'}, {' and '.join(waits) or 'nothing'} waiting"]
    if applier.freshness is not None and applier.freshness.get("last") is not None:
        lines.append(f"    freshness   {_freshness(applier)}")
    lines += [f"    {name}: stopped: {error}" for name, error in applier.stopped.items()]
    if applier.last_error:
        when = f"{applier.last_error_time:%Y-%m-%d %H:%M:%S%z} " if applier.last_error_time else ""
        lines.append(f"    last error  {when}{applier.last_error}")
    return lines


def _freshness(applier: ApplierObservation) -> str:
    assert applier.freshness is not None
    last, target, late = applier.freshness["last"], applier.freshness["target"], applier.freshness["late"]
    text = f"{last:.1f} s, target {target:g} s"
    if last > target:
        text += ", missed because of --max-write-rate" if applier.freshness["held"] else ", missed"
    if late:
        text += f"; {late} of {applier.freshness['rounds']} rounds were late"
    if applier.landed_bytes and applier.written_bytes is not None:
        text += f"; {size(applier.written_bytes)} written, {applier.written_bytes / applier.landed_bytes:.1f} for each landed byte"
    return text


def _tables(status: SubscriptionStatus) -> list[str]:
    found, tables = status.observation, status.observation.tables
    counts = [(word, sum(table.entry.state is state for table in tables)) for state, word in STATES.items()]
    counts.append(("left out", len(status.observation.left_out)))
    lines = ["  tables        " + (", ".join(f"{count} {word}" for word, count in counts if count) or "none")]
    if found.copies_wait is not None:
        lines.append(f"    {found.copies_wait}")
    for table in tables:
        if table.retry is not None:
            lines.append(f"    {table.table}: {retrying(table.retry)}")
        elif table.entry.state is TableState.DATASYNC and table.worker is not None:
            of = f" of about {table.worker.estimated_rows}" if table.worker.estimated_rows else ""
            lines.append(f"    {table.table}: {table.worker.copied_rows} rows{of}")
    lines += [f"    {table.table}: parked {table.parked}" for table in tables if table.parked]
    lines += [f"    {table}: left out: {reason}" for table, reason in status.observation.left_out.items()]
    return lines + _verifications([table.verification for table in tables if table.verification is not None], len(tables))


def _verifications(found: Sequence[TableVerification], tables: int) -> list[str]:
    if not found:
        return []
    equal = sum(each.equal for each in found)
    oldest = min(found, key=lambda each: each.verified_at)
    when = datetime.fromtimestamp(oldest.verified_at, UTC).astimezone()
    missing = f", {tables - len(found)} not verified" if len(found) < tables else ""
    which = f"{equal} of {counted(len(found), 'table')} equal{missing}"
    lines = [f"  verified      {which}, the oldest as of {oldest.lsn} ({when:%Y-%m-%d %H:%M:%S%z})"]
    return lines + [f"    {each.table}: {_differing(each)}" for each in found if not each.equal]


def _differing(found: TableVerification) -> str:
    least = "at least " if found.more else ""
    return f"not equal to the publisher's as of {found.lsn}: {least}{counted(found.differences, 'row')}"


def retrying(retry: Retry) -> str:
    """Describe a failed attempt and the time of the next one."""
    following = datetime.fromtimestamp(retry.next_attempt, UTC).astimezone()
    return f"attempt {retry.attempt} failed, next at {following:%H:%M:%S%z}: {retry.error}"


def size(count: int) -> str:
    """Format a number of bytes as pg_size_pretty does."""
    value, units = float(count), ["bytes", "kB", "MB", "GB", "TB"]
    while abs(value) >= 10240 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}"
