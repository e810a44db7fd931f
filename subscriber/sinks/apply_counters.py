"""Counters of apply, and the context of its errors in the words of PostgreSQL's context lines. They never contain values.

A conflict that is no error is counted and logged after the commit. So a batch that is rolled back and applied again counts it once, and a
prepared transaction that is rolled back does not count it. (If a prepared transaction was rolled back before the publisher decoded it, some
of its changes may be missing, so the others find no rows.) If this process ends between PREPARE and COMMIT PREPARED, the conflicts of the
prepared transaction are in the log only. A conflict that is an error is counted each time it occurs, as in PostgreSQL.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

from subscriber.interfaces import ApplyStatistics, TableName
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.conflict_log import LoggedConflict

__all__ = ["ChangeContext", "Counted", "Tally", "count", "describe"]

_log = logging.getLogger(__name__)

_DONE: Final = {"UPDATE": "updated", "DELETE": "deleted"}
_LOG_INTERVAL: Final = 1.0


@dataclass(slots=True, eq=False)
class ChangeContext:
    """The remote transaction of a statement. It is not frozen because there is one per transaction.

    Attributes:
        origin: PostgreSQL's name of the replication origin.
        xid: xid of the transaction on the publisher.
        final_lsn: LSN of its end on the publisher.
        ending: PostgreSQL's name of the message that ends it, for a statement that makes none of its changes.
        commit_time: its commit time on the publisher, in microseconds since 2000; None: it is not known yet.
    """

    origin: str
    xid: int
    final_lsn: Lsn
    ending: str = "COMMIT"
    commit_time: int | None = None


def describe(context: ChangeContext, message_type: str = "", table: TableName | None = None, column: str | None = None) -> str:
    """The context line of PostgreSQL's apply_error_callback. ``table`` is None for a message without a relation."""
    text = f'processing remote data for replication origin "{context.origin}"'
    if message_type:
        text += f' during message type "{message_type}"'
    if table is not None:
        text += f' for replication target relation "{table}"'
        if column is not None:
            text += f' column "{column}"'
    return f"{text} in transaction {context.xid}, finished at {context.final_lsn}"


@dataclass(frozen=True, slots=True)
class _Conflict:
    """A table, a kind of conflict, and how it was resolved. Conflicts that are equal in all of them are logged together."""

    table: TableName | None
    kind: str
    resolution: str = ""


class Counted:
    """The counters of one attempt. They count only if the attempt is committed.

    Attributes:
        statistics: all counters without those of conflicts.
        conflicts: number of conflicts of each kind.
        explanations: explanation and key of the first conflict of each kind.
        failed: name of the conflict with which the attempt failed; it is counted at once.
        resolved: the conflicts that were resolved by rules, for their log.
    """

    def __init__(self) -> None:
        self.resolved: list[LoggedConflict] = []
        self.failed: str | None = None
        self.statistics = ApplyStatistics()
        self.conflicts: Counter[_Conflict] = Counter()
        self.explanations: dict[_Conflict, tuple[str, str]] = {}

    def copy(self) -> Self:
        """A copy, to restore the counters later."""
        found = type(self)()
        mine = self.statistics
        found.statistics = replace(
            mine, skipped_tables=set(mine.skipped_tables), tables=dict(mine.tables), table_bytes=dict(mine.table_bytes)
        )
        found.conflicts = Counter(self.conflicts)
        found.explanations = dict(self.explanations)
        found.resolved = list(self.resolved)
        return found

    def changes(self, kind: str, table: TableName | None, identity: Sequence[str], sent: int, found: int) -> None:
        """Count changes of one kind, and the conflicts of those that found no row.

        Args:
            kind: INSERT, UPDATE, DELETE or TRUNCATE. Other kinds are not counted.
            table: the table of the changes.
            identity: the columns that find a row; empty: all columns.
            sent: number of changes.
            found: number of rows that they found.
        """
        statistics = self.statistics
        match kind:
            case "INSERT":
                statistics.inserts += sent
            case "TRUNCATE":
                statistics.truncates += sent
            case "UPDATE":
                statistics.updates += found
            case "DELETE":
                statistics.deletes += found
            case _:
                return
        if table is not None and kind != "TRUNCATE":
            tables = statistics.tables
            tables[table] = tables.get(table, 0) + (sent if kind == "INSERT" else found)
        if kind in _DONE and found < sent:
            self.conflict(kind, table, identity, "missing", f"Could not find the row to be {_DONE[kind]}", times=sent - found)

    def sent(self, table: TableName | None, size: int) -> None:
        """Count the bytes of the messages of a run."""
        if table is not None:
            sizes = self.statistics.table_bytes
            sizes[table] = sizes.get(table, 0) + size

    def conflict(
        self,
        kind: str,
        table: TableName | None,
        identity: Sequence[str],
        what: str,
        explanation: str | Callable[[], str],
        *,
        times: int = 1,
        resolution: str = "",
    ) -> None:
        """Count conflicts of one kind. They are logged together with others of the same kind.

        Args:
            kind: INSERT, UPDATE or DELETE; empty: ``what`` is the name of the conflict.
            table: the table of the row.
            identity: the columns that find a row; empty: all columns.
            what: the rest of the conflict's name.
            explanation: what was found, or a function that returns it: it is needed once for conflicts that are logged together.
            times: the number of conflicts.
            resolution: what a rule did; empty: what a native subscription does.
        """
        conflict = _Conflict(table, f"{kind.lower()}_{what}" if kind else what, resolution)
        self.conflicts[conflict] += times
        if conflict not in self.explanations:
            text = explanation if isinstance(explanation, str) else explanation()
            self.explanations[conflict] = text, f"Replica identity {_identity(identity)}."


def _identity(columns: Sequence[str]) -> str:
    return f"({', '.join(columns)})" if columns else "full"


def count(statistics: ApplyStatistics, kind: str, times: int = 1) -> None:
    """Add conflicts to the counter that has their name in pg_stat_subscription_stats."""
    name = f"confl_{kind}"
    setattr(statistics, name, getattr(statistics, name) + times)


def _text(table: TableName | None, conflicts: Counter[_Conflict], explanations: Mapping[_Conflict, tuple[str, str]]) -> str:
    """The log text for the conflicts on one relation."""
    texts = []
    for conflict, times in conflicts.items():
        if conflict.table == table:
            explanation, key = explanations[conflict]
            kind = f"{conflict.kind}, resolution={conflict.resolution}" if conflict.resolution else conflict.kind
            texts.append(f"conflict={kind}: {explanation}{f' ({times} rows)' if times > 1 else ''}. {key}")
    return " ".join(texts)


class Tally:
    """Adds up the counters of committed transactions, and logs their conflicts.

    The first conflict of a kind on a relation is logged at once, before the position after it is confirmed. A conflict that is not logged
    by then is lost if this process ends. Further conflicts of the same kind are logged together, once a second.

    Args:
        statistics: the counters to which committed transactions are added.
    """

    def __init__(self, statistics: ApplyStatistics) -> None:
        self.statistics = statistics
        self._conflicts: Counter[_Conflict] = Counter()
        self._explanations: dict[_Conflict, tuple[str, str]] = {}
        self._timers: dict[_Conflict, asyncio.TimerHandle] = {}
        self._written: Counter[str] = Counter()
        self._prepared: dict[int, Counted] = {}

    def unwritten(self, name: str) -> int:
        """The growth of a counter since :meth:`wrote`."""
        return int(getattr(self.statistics, name)) - self._written[name]

    def wrote(self, counted: Mapping[str, int]) -> None:
        """Note the counts that were added to the catalog."""
        self._written.update(counted)

    def add(self, counted: Counted, prepared: int | None = None) -> None:
        """Add an attempt that was committed, or prepared as transaction ``prepared``: then its conflicts wait for :meth:`ended`."""
        self.statistics.add(counted.statistics)
        if prepared is None:
            self._add_conflicts(counted)
        elif counted.conflicts:
            self._prepared[prepared] = counted
            for table in {conflict.table for conflict in counted.conflicts}:
                # logged now, because the counts are lost if this process ends
                text = _text(table, counted.conflicts, counted.explanations)
                _log.info('conflict on relation "%s" in transaction %d, which is prepared: %s', table, prepared, text)
        else:
            self._prepared.pop(prepared, None)

    def ended(self, prepared: int, *, committed: bool) -> None:
        """Count the conflicts of a prepared transaction after COMMIT PREPARED; drop them after ROLLBACK PREPARED."""
        counted = self._prepared.pop(prepared, None)
        if counted is not None and committed:
            self._add_conflicts(counted)

    def _add_conflicts(self, counted: Counted) -> None:
        for conflict, times in counted.conflicts.items():
            count(self.statistics, conflict.kind, times)
        self._conflicts.update(counted.conflicts)
        self._explanations = counted.explanations | self._explanations
        for table in {conflict.table for conflict in counted.conflicts.keys() - self._timers.keys()}:
            self._log_conflicts(table)

    def _log_conflicts(self, table: TableName | None) -> None:
        waiting = [conflict for conflict in self._conflicts if conflict.table == table]
        _log.warning('conflict detected on relation "%s": %s', table, _text(table, self._conflicts, self._explanations))
        for conflict in waiting:
            del self._conflicts[conflict]
            del self._explanations[conflict]
            timer = self._timers.pop(conflict, None)
            if timer is not None:
                timer.cancel()
            self._timers[conflict] = asyncio.get_running_loop().call_later(_LOG_INTERVAL, self._due, conflict)

    def _due(self, conflict: _Conflict) -> None:
        del self._timers[conflict]
        if conflict in self._conflicts:
            self._log_conflicts(conflict.table)

    def close(self) -> None:
        """Log the waiting conflicts. Idempotent. The object may be used again."""
        for table in {conflict.table for conflict in self._conflicts}:
            self._log_conflicts(table)
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
