"""What was counted while applying, and what an error there was about, in the words of native's context lines. Never a value.

Conflicts that change nothing else are counted and logged once they are committed: a batch that is rolled back and applied again has
them once, a prepared transaction that is rolled back has none. (One that was rolled back before the publisher decoded it may come without
some of its changes, and what is left of it finds no rows.) Of one that is prepared, the log alone tells, should this process end before the
COMMIT PREPARED. Those that are errors are counted each time they are met, as natively.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final, Self

from subscriber.abc import ApplyStatistics, TableName
from subscriber.protocol.lsn import Lsn

__all__ = ["ChangeContext", "Counted", "Tally", "count", "describe"]

_log = logging.getLogger(__name__)

_DONE: Final = {"UPDATE": "updated", "DELETE": "deleted"}
_LOG_INTERVAL: Final = 1.0


@dataclass(frozen=True, slots=True)
class ChangeContext:
    """The remote transaction that a statement carries out a change of.

    Attributes:
        origin: native's name of what is followed.
        xid: of the transaction on the publisher.
        final_lsn: where it finished there.
        ending: native's name of the message that ends it, for what is not about one of its changes.
    """

    origin: str
    xid: int
    final_lsn: Lsn
    ending: str = "COMMIT"


def describe(context: ChangeContext, message_type: str = "", table: TableName | None = None, column: str | None = None) -> str:
    """Native's apply_error_callback: without a relation it is about a message that has none."""
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
    """Conflicts of one kind on one table are logged together."""

    table: TableName | None
    kind: str


class Counted:
    """What was done in one attempt. It counts only if that is committed.

    Attributes:
        statistics: all of it but conflicts.
        conflicts: how many there were of each kind.
        explanations: of the first one of each kind.
        failed: the conflict that the attempt failed with, by its name; it counts at once.
    """

    def __init__(self) -> None:
        self.failed: str | None = None
        self.statistics = ApplyStatistics()
        self.conflicts: Counter[_Conflict] = Counter()
        self.explanations: dict[_Conflict, tuple[str, str]] = {}

    def copy(self) -> Self:
        """As it is now, to go back to."""
        found = type(self)()
        found.statistics = replace(self.statistics, skipped_tables=set(self.statistics.skipped_tables))
        found.conflicts = Counter(self.conflicts)
        found.explanations = dict(self.explanations)
        return found

    def changes(self, kind: str, table: TableName | None, identity: Sequence[str], sent: int, found: int) -> None:
        """Count changes of one kind that were made, or the conflicts where there was no row to make them to.

        Args:
            kind: INSERT, UPDATE, DELETE or TRUNCATE; anything else is no change.
            table: whose.
            identity: the columns that find a row; empty: all of them.
            sent: how many changes there were.
            found: how many rows they found.
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
        if kind in _DONE and found < sent:
            self.conflict(kind, table, identity, "missing", f"Could not find the row to be {_DONE[kind]}", times=sent - found)

    def conflict(self, kind: str, table: TableName | None, identity: Sequence[str], what: str, explanation: str, *, times: int = 1) -> None:
        """Count conflicts of one kind, to be logged together with others like them."""
        conflict = _Conflict(table, f"{kind.lower()}_{what}")
        self.conflicts[conflict] += times
        if conflict not in self.explanations:
            self.explanations[conflict] = explanation, f"Replica identity {_identity(identity)}."


def _identity(columns: Sequence[str]) -> str:
    return f"({', '.join(columns)})" if columns else "full"


def count(statistics: ApplyStatistics, kind: str, times: int = 1) -> None:
    """Count conflicts, under their name in pg_stat_subscription_stats."""
    name = f"confl_{kind}"
    setattr(statistics, name, getattr(statistics, name) + times)


def _text(table: TableName | None, conflicts: Counter[_Conflict], explanations: Mapping[_Conflict, tuple[str, str]]) -> str:
    """What there was on one relation."""
    texts = []
    for conflict, times in conflicts.items():
        if conflict.table == table:
            explanation, key = explanations[conflict]
            texts.append(f"conflict={conflict.kind}: {explanation}{f' ({times} rows)' if times > 1 else ''}. {key}")
    return " ".join(texts)


class Tally:
    """Adds up what was committed, and logs the conflicts in it.

    The first conflict of a kind on a relation is logged at once, before the position behind it is confirmed: one that is not logged by then
    is lost with this process. More of the same kind are logged once a second, together.

    Args:
        statistics: added to.
    """

    def __init__(self, statistics: ApplyStatistics) -> None:
        self.statistics = statistics
        self._conflicts: Counter[_Conflict] = Counter()
        self._explanations: dict[_Conflict, tuple[str, str]] = {}
        self._timers: dict[_Conflict, asyncio.TimerHandle] = {}
        self._written: Counter[str] = Counter()
        self._prepared: dict[int, Counted] = {}

    def unwritten(self, name: str) -> int:
        """By how much a counter grew since :meth:`wrote`."""
        return int(getattr(self.statistics, name)) - self._written[name]

    def wrote(self, counted: Mapping[str, int]) -> None:
        """So much is in the catalog now."""
        self._written.update(counted)

    def add(self, counted: Counted, prepared: int | None = None) -> None:
        """An attempt was committed; or prepared, as this transaction: then its conflicts wait for :meth:`ended`."""
        mine, more = self.statistics, counted.statistics
        for field in fields(more):
            added = getattr(more, field.name)
            if isinstance(added, int):
                setattr(mine, field.name, getattr(mine, field.name) + added)
        mine.skipped_tables |= more.skipped_tables
        if prepared is None:
            self._add_conflicts(counted)
        elif counted.conflicts:
            self._prepared[prepared] = counted
            for table in {conflict.table for conflict in counted.conflicts}:
                # not lost with this process, as the counts are
                text = _text(table, counted.conflicts, counted.explanations)
                _log.info('conflict on relation "%s" in transaction %d, which is prepared: %s', table, prepared, text)
        else:
            self._prepared.pop(prepared, None)

    def ended(self, prepared: int, *, committed: bool) -> None:
        """COMMIT PREPARED or ROLLBACK PREPARED."""
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
        """Log what has waited. Idempotent; it may be used again."""
        for table in {conflict.table for conflict in self._conflicts}:
            self._log_conflicts(table)
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
