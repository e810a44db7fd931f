"""The states of the subscription's tables, and the handover of a table from its synchronization to the apply worker.

The stored states are PostgreSQL's: ``i`` init, ``d`` copying, ``f`` copied, ``s`` synchronized up to an LSN, ``r`` ready. While a table is
in ``i``, ``d`` or ``f``, the apply worker skips its changes, and the table's own synchronization applies them. It copies the table under
a snapshot. From that snapshot on it then follows a slot of its own, and applies the changes of this table only.

The handover must find an LSN ``S`` such that the synchronization has applied exactly the table's transactions that end at or before
``S``, and the apply worker applies exactly the others. Let ``handed`` be the end LSN of the last transaction that the apply worker passed
to the sink (with the gate closed for this table).

* The synchronization may stop at its position ``S`` only if ``S >= handed``: then it has applied what the apply worker skipped.
* From that moment until ``s`` at ``S`` is durable, the apply worker must not pass anything that ends beyond ``S`` to the sink. Otherwise
  it would apply or skip a transaction according to a state that a crash could still revert.

Both workers run in one event loop. So comparing with ``handed`` and marking the handover is one uninterrupted step
(:meth:`TableStates.try_handover`), and passing a batch is another one (:meth:`TableStates.hand`).

PostgreSQL's apply worker stops at *its* position (state ``c``) and waits until the synchronization has caught up from the snapshot. Here
the synchronization first catches up while the apply worker continues. It asks the apply worker to wait
(:meth:`TableStates.request_handover`, PostgreSQL's ``w``) only when it has reached the position that the apply worker had at the end of
the copy. So the wait is short even after a copy of hours, and it ends even if the apply worker is just as fast.

A copy needs no stream if the apply worker received no change of the table since the snapshot. Then the synchronization is already at the
apply worker's position (:meth:`TableStates.covered`), and the handover is the same. ``table_groups.py`` relies on that.

A table that the target rejects can be *parked*: state ``p``, which PostgreSQL does not have. The apply worker leaves out its changes. It
stores the state before it applies the transaction again, so that it is in no transaction that was applied before, and in none after. From
``p`` it goes back to ``i``, to be reconciled.

Rejected: set ``s`` at the snapshot's LSN and let the apply worker hold everything back. This would stop all tables while one is being
copied, or keep all their changes in a spool.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from subscriber.errors import RelationError
from subscriber.interfaces import CATALOG_SCHEMA, PublishedTable, Retry, SyncMode, TableEntry, TableName, TableState
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.messages import Relation
from subscriber.transaction.model import Transaction
from subscriber.transaction.relations import changed_relations

__all__ = ["TO_BE_ADDED", "Addition", "TableStates", "Watchers"]

_log = logging.getLogger(__name__)

NOT_IN_SUBSCRIPTION: Final = "published since the tables were listed (hint: refresh the subscription, or start the run again, to add it)"
"""The reason why a published table is left out, if no other one is known."""
TO_BE_ADDED: Final = "published since the tables were listed, and not yet created and added (new_tables = copy)"

_OWN_SYNC = frozenset({TableState.INIT, TableState.DATASYNC, TableState.FINISHEDCOPY})


class Watchers:
    """Lets tasks wait until a condition that other tasks change becomes true."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    def notify(self) -> None:
        """Check the conditions again, because something changed."""
        for predicate, future in self._waiting:
            if not future.done() and predicate():
                future.set_result(None)

    async def wait(self, predicate: Callable[[], bool]) -> None:
        """Return once ``predicate()`` is true. It is called again after every :meth:`notify`."""
        if predicate():
            return
        entry = (predicate, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        try:
            await entry[1]
        finally:
            self._waiting.remove(entry)


@dataclass(frozen=True, slots=True)
class Addition:
    """Tables that the apply worker is to add to the subscription, between two calls to the sink.

    Attributes:
        tables: as published.
        entry: their first state.
        result: gets the errors of those that could not be added.
    """

    tables: Sequence[PublishedTable]
    entry: TableEntry
    result: asyncio.Future[Mapping[TableName, RelationError]]


class TableStates:
    """The table states that both kinds of worker share. See the module's docstring for the handover.

    Attributes:
        left_out: published tables that the subscription does not replicate, each with the reason.
        dropped: oids and names of tables that the publisher has dropped and the target lacks. Their changes are left out.
        retries: tables whose latest synchronization failed.
        additions: tables that are to be added.
        adds_new: whether published tables that the target lacks are created and added. Until then, their changes are left out.
        parking: tables that the apply worker parks before it applies anything more, with their entries.
        replicated: oids of the subscription's tables on the publisher, as far as known. A table keeps its own when it is renamed.
    """

    def __init__(self, handed: Lsn = INVALID_LSN) -> None:
        self._entries: dict[TableName, TableEntry] = {}
        # sets of the tables that are not ready, because they are queried after every batch, with thousands of tables
        self._own: set[TableName] = set()
        self._ahead: set[TableName] = set()
        self._parked: set[TableName] = set()
        self._handed = handed
        self._handover: dict[TableName, Lsn] = {}
        self._storing: set[TableName] = set()
        # for each relation id, end LSN of the last transaction that changed it; and of the last one with unknown relations
        self._changed: dict[int, Lsn] = {}
        self._changed_some = INVALID_LSN
        # the changes of transactions up to here may not have been noted
        self._noted_from = handed
        self._requested: set[TableName] = set()
        self._unknown: dict[TableName, int] = {}
        self.left_out: dict[TableName, str] = {}
        self.dropped: set[tuple[int, str]] = set()
        self.retries: dict[TableName, Retry] = {}
        self.additions = deque[Addition]()
        self.adds_new = False
        self.parking: dict[TableName, TableEntry] = {}
        self.replicated = set[int]()
        self.copies_begin: float | None = None
        self.changed = Watchers()

    def load(self, entries: Mapping[TableName, TableEntry], position: Lsn) -> None:
        """Load the states from the catalog. ``position`` is where the apply workers of earlier runs have passed everything to the sink.

        The states of known tables are kept: they were set after they became durable, and may be newer than what was read.
        """
        known = self._entries
        self._entries, self._own, self._ahead, self._parked = {}, set(), set(), set()
        for table, entry in entries.items():
            self._put(table, known.get(table, entry))
        for forgotten in (self._handover.keys() | self._requested) - self._entries.keys():
            self.abandon_handover(forgotten)
        self._handed = max(self._handed, position)
        self._noted_from = max(self._noted_from, position)
        self.changed.notify()

    def entries(self) -> Mapping[TableName, TableEntry]:
        """A copy of the current states."""
        return dict(self._entries)

    def state(self, table: TableName) -> TableState | None:
        """The table's state; None if it is not part of the subscription."""
        entry = self._entries.get(table)
        return None if entry is None else entry.state

    def needs_copy(self, table: TableName) -> bool:
        """Whether the table's rows are still to be copied or reconciled, or this is being done."""
        return self.state(table) in {TableState.INIT, TableState.DATASYNC}

    def may_join_group(self, table: TableName) -> bool:
        """Whether the table is in INIT, and its rows are copied or reconciled, but not replaced."""
        entry = self._entries.get(table)
        return entry is not None and entry.state is TableState.INIT and entry.mode is not SyncMode.REPLACE

    def mode(self, table: TableName) -> SyncMode:
        """What the synchronization of the table does with rows that the target has."""
        entry = self._entries.get(table)
        return SyncMode.COPY if entry is None else entry.mode

    def set(self, table: TableName, entry: TableEntry) -> None:
        """Note a state that was stored durably."""
        self.update({table: entry})

    def update(self, entries: Mapping[TableName, TableEntry]) -> None:
        """Note states of several tables that were stored durably."""
        for table, entry in entries.items():
            self._put(table, entry)
        if entries:
            self.changed.notify()

    def _put(self, table: TableName, entry: TableEntry) -> None:
        self._entries[table] = entry
        for members, is_member in (
            (self._own, entry.state in _OWN_SYNC),
            (self._ahead, entry.state is TableState.SYNCDONE),
            (self._parked, entry.state is TableState.PARKED),
        ):
            if is_member:
                members.add(table)
            else:
                members.discard(table)

    def remove(self, table: TableName) -> None:
        """Remove a table that is no longer part of the subscription."""
        self._entries.pop(table, None)
        self.retries.pop(table, None)
        self._own.discard(table)
        self._ahead.discard(table)
        self._parked.discard(table)
        self.parking.pop(table, None)
        self._storing.discard(table)
        self.abandon_handover(table)

    @property
    def unsynchronized(self) -> list[TableName]:
        """Tables that are still being synchronized."""
        return sorted(self._own)

    def is_unsynchronized(self, table: TableName) -> bool:
        """Whether the table is still being synchronized."""
        return table in self._own

    def any_unsynchronized(self, condition: Callable[[TableName], bool]) -> bool:
        """Whether the condition is true for a table that is still being synchronized. Asked after each change of a state: not sorted."""
        return any(map(condition, self._own))

    @property
    def storing_tables(self) -> Sequence[TableName]:
        """Tables of which it is unknown whether SYNCDONE was stored (:meth:`is_storing`)."""
        return sorted(self._storing)

    @property
    def all_synchronized(self) -> bool:
        """Whether no table needs to be synchronized any more."""
        return not self._own

    @property
    def synchronized_to(self) -> Lsn:
        """The position of the table that is furthest ahead of the apply worker; INVALID_LSN: none is ahead."""
        return max((self._entries[table].lsn or INVALID_LSN for table in self._ahead), default=INVALID_LSN)

    @property
    def any_synchronized(self) -> bool:
        return len(self._own) < len(self._entries)

    @property
    def all_ready(self) -> bool:
        """Whether the apply worker has taken over all tables, except those that are parked."""
        return not self._own and not self._ahead

    @property
    def any_parked(self) -> bool:
        """Whether a table is parked, or is to be."""
        return bool(self._parked or self.parking)

    @property
    def parked(self) -> Mapping[TableName, TableEntry]:
        """The tables whose changes are left out, with the reasons."""
        return {table: self._entries[table] for table in sorted(self._parked)}

    @property
    def may_prepare(self) -> bool:
        """Whether ``two_phase`` may be enabled: all tables are ready, and none has to be synchronized again."""
        return bool(self._entries) and self.all_ready and not self._parked

    @property
    def handed(self) -> Lsn:
        """End LSN of the last transaction that the apply worker passed to the sink."""
        return self._handed

    # --- for the apply worker

    def gate(self, relation: Relation, final_lsn: Lsn) -> bool | None:
        """Whether the apply worker applies the relation's changes of a transaction (PostgreSQL: should_apply_changes_for_rel)."""
        table = TableName(relation.namespace, relation.name)
        if self.dropped and (relation.relation_id, str(table)) in self.dropped:
            return None
        entry = self._entries.get(table)
        if entry is None:
            if table not in self.left_out and table.namespace != CATALOG_SCHEMA:
                self._unknown[table] = relation.relation_id
            return False
        if entry.state is TableState.SYNCDONE:
            return entry.lsn is None or final_lsn >= entry.lsn
        return None if entry.state is TableState.PARKED else entry.state is TableState.READY

    def note_dropped(self, relation_id: int, name: str) -> None:
        """Leave out the changes of a table that the publisher has dropped and the target lacks."""
        self.dropped.add((relation_id, name))
        self._unknown = {table: oid for table, oid in self._unknown.items() if str(table) != name}

    def awaits(self, relation_id: int, name: str) -> bool:
        """Whether a table that the target lacks is to be created and added, so that its changes are left out until then."""
        return self.adds_new and relation_id not in self.replicated and all(str(table) != name for table in self._entries)

    def added(self, addition: Addition, failed: Mapping[TableName, RelationError]) -> None:
        """Note that tables were added, except those that failed."""
        names = [table.name for table in addition.tables if table.name not in failed]
        self.dropped -= {each for each in self.dropped if each[1] in set(map(str, names))}
        self.replicated |= {table.relation_id for table in addition.tables if table.name not in failed}
        for name in names:
            self.left_out.pop(name, None)
        self.update(dict.fromkeys(names, addition.entry))
        if not addition.result.done():
            addition.result.set_result(failed)

    @property
    def new_reason(self) -> str:
        """Why a table that joined the publications is left out."""
        return TO_BE_ADDED if self.adds_new else NOT_IN_SUBSCRIPTION

    def tell_unknown(self, left_out: Container[str]) -> None:
        """Warn, once for each, about tables that the gate did not know and whose changes the sink left out.

        The sink can identify a table that was renamed on both sides; the gate knows tables only by name.
        """
        for table in sorted(self._unknown):
            if str(table) in left_out:
                if not self.adds_new:
                    _log.warning(
                        'table "%s" is published, but not part of the subscription: its changes are left out'
                        " (hint: refresh the subscription, or start the run again, to add it)",
                        table,
                    )
                self.left_out[table] = self.new_reason
                # a target that needs no table for this does not know that it was renamed
                self.replicated.discard(self._unknown[table])
        self._unknown.clear()

    async def hand(self, end_lsn: Lsn, give_up: Callable[[], bool], transactions: Sequence[Transaction] = ()) -> bool:
        """Wait until the apply worker may pass transactions up to ``end_lsn`` to the sink. Then note that it does, and their relations.

        False if ``give_up()`` became true before; it is called after every ``changed.notify()``. Then nothing may be passed.
        """

        def clear() -> bool:
            return not self._requested and all(lsn >= end_lsn for lsn in self._handover.values())

        while not clear():
            if give_up():
                return False
            # in a loop, because another table may have started a handover between the notification and this task's turn
            await self.changed.wait(lambda: clear() or give_up())
        self._handed = max(self._handed, end_lsn)
        if self._own:
            self._note(transactions)
        else:
            self._noted_from = self._handed
        return True

    def _note(self, transactions: Sequence[Transaction]) -> None:
        for transaction in transactions:
            relations = changed_relations(transaction)
            # transactions may come again after an error
            if relations is None:
                self._changed_some = max(self._changed_some, transaction.end_lsn)
            else:
                for relation_id in relations:
                    self._changed[relation_id] = max(self._changed.get(relation_id, INVALID_LSN), transaction.end_lsn)

    @property
    def handing_over(self) -> list[TableName]:
        """Tables for whose handover the apply worker may have to wait."""
        return sorted(self._requested | self._handover.keys())

    def passed(self, position: Lsn) -> dict[TableName, Lsn]:
        """Tables in ``s`` whose LSN the apply worker's durable position has reached. They can become ``r``."""
        found = {table: self._entries[table].lsn for table in sorted(self._ahead)}
        return {table: lsn for table, lsn in found.items() if lsn is not None and lsn <= position}

    # --- for the synchronization

    def request_handover(self, table: TableName) -> None:
        """Ask the apply worker to pass nothing more until this table is handed over or the request is abandoned."""
        self._requested.add(table)

    def covered(self, relation_id: int, lsn: Lsn) -> Lsn:
        """Return the LSN up to which a copy of the table as of ``lsn``, made in this run, is complete.

        It is the apply worker's position, if the apply worker has skipped no change of the table since ``lsn``: it received every
        transaction. Relations are identified by their ids on the publisher. Transactions before this run, or from before a table was
        waiting, were not examined. So a copy from before them, as from a standby that lags behind, is complete only up to ``lsn``.
        """
        changed = max(self._changed.get(relation_id, INVALID_LSN), self._changed_some, self._noted_from)
        return lsn if changed > lsn else max(lsn, self._handed)

    def try_handover(self, table: TableName, lsn: Lsn) -> bool:
        """Fix the handover at the synchronization's position, unless that is behind the apply worker's.

        After True the caller stores SYNCDONE at ``lsn`` and calls :meth:`complete_handover`, or :meth:`abandon_handover` on failure.
        """
        if lsn < self._handed:
            return False
        self._handover[table] = lsn
        self._requested.discard(table)
        self.changed.notify()
        return True

    def storing(self, table: TableName) -> None:
        """Note that SYNCDONE is about to be stored. Until :meth:`complete_handover` or :meth:`known`, it is unknown whether it was."""
        self._storing.add(table)

    def is_storing(self, table: TableName) -> bool:
        """Whether this is unknown. If no task is storing it any more, the apply worker waits until the state is read."""
        return table in self._storing

    def known(self, table: TableName) -> None:
        """Note that the stored state was read, or that the target reported that nothing was stored."""
        self._storing.discard(table)

    def complete_handover(self, table: TableName) -> None:
        """Note that SYNCDONE is durable."""
        lsn = self._handover.pop(table)
        self._storing.discard(table)
        self.set(table, TableEntry(TableState.SYNCDONE, lsn))

    def abandon_handover(self, table: TableName) -> None:
        """Release the apply worker after the synchronization failed. Idempotent.

        Does nothing while it is unknown whether SYNCDONE was stored: the apply worker might skip changes that were not applied.
        """
        if table in self._storing:
            return
        self._handover.pop(table, None)
        self._requested.discard(table)
        self.changed.notify()
