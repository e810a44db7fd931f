"""The states of the subscription's tables, and how a table is handed from its synchronization to the apply worker.

Persisted states are native's: ``i`` init, ``d`` copying, ``f`` copied, ``s`` synchronized up to an LSN, ``r`` ready. While a table is
in ``i``, ``d`` or ``f``, the apply worker skips its changes and the table's own synchronization is responsible for them: it copies
under a snapshot, then follows a slot of its own from that snapshot on, applying this table's changes only.

The handover has to find an LSN ``S`` such that the synchronization has applied exactly the table's transactions that end at or before
``S``, and the apply worker applies exactly the others. Let ``handed`` be the end LSN of the last transaction that the apply worker gave
to the sink (with the table gated off).

* The synchronization may stop at its position ``S`` only if ``S >= handed``: what the apply worker already passed over is then covered.
* From that moment until ``s`` at ``S`` is durable, the apply worker may give the sink nothing that ends beyond ``S``: such a
  transaction would have to be applied or skipped by a state that a crash could still take back.

Both workers live in one event loop, so that comparing with ``handed`` and marking the handover is one step that nothing can interrupt
(:meth:`TableStates.try_handover`), and giving a batch is another one (:meth:`TableStates.hand`).

Native's apply worker stops at *its* position (state ``c``) and waits until the synchronization has caught up from the snapshot. Here the
synchronization first catches up while the apply worker goes on, and asks it to wait (:meth:`TableStates.request_handover`, native's ``w``)
only when it has reached the position that the apply worker had when the copy ended: the wait is short even after a copy of hours,
and the chase still ends when the apply worker is just as fast.

A copy need not follow a stream at all if the apply worker saw nothing of the table since the snapshot: then the synchronization is where
the apply worker is (:meth:`TableStates.covered`), and the handover is the same. ``groups.py`` lives of that.

Why not a table-less handover (set ``s`` at the snapshot's LSN and let the apply worker hold everything back)? It would stop all tables
while one is being copied, or keep all their changes in a spool.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Final

from subscriber.abc import CATALOG_SCHEMA, Retry, TableEntry, TableName, TableState
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.messages import Relation
from subscriber.transaction.model import Transaction
from subscriber.transaction.relations import changed_relations

__all__ = ["NOT_IN_SUBSCRIPTION", "TableStates", "Watchers"]

_log = logging.getLogger(__name__)

NOT_IN_SUBSCRIPTION: Final = "published since the tables were listed (hint: refresh the subscription, or start the run again, to add it)"
"""Why a published table is left out, if no other reason is known."""

_OWN_SYNC = frozenset({TableState.INIT, TableState.DATASYNC, TableState.FINISHEDCOPY})


class Watchers:
    """Lets tasks wait until something that others change becomes true."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    def notify(self) -> None:
        """Look again: something changed."""
        for predicate, future in self._waiting:
            if not future.done() and predicate():
                future.set_result(None)

    async def wait(self, predicate: Callable[[], bool]) -> None:
        """Return once ``predicate()`` is true; it is called again at every :meth:`notify`."""
        if predicate():
            return
        entry = (predicate, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        try:
            await entry[1]
        finally:
            self._waiting.remove(entry)


class TableStates:
    """What both kinds of worker know of the tables. See the module's text for the handover.

    Attributes:
        left_out: published tables that the subscription does not replicate, each with the reason.
        retries: of tables whose latest synchronization failed.
    """

    def __init__(self, handed: Lsn = INVALID_LSN) -> None:
        self._entries: dict[TableName, TableEntry] = {}
        # of them, those that are not ready, by what they wait for: asked after every batch, of thousands of tables
        self._own: set[TableName] = set()
        self._ahead: set[TableName] = set()
        self._handed = handed
        self._handover: dict[TableName, Lsn] = {}
        self._storing: set[TableName] = set()
        # end LSNs of the last transactions given that changed a relation, by its id; and of the last whose relations are not known
        self._changed: dict[int, Lsn] = {}
        self._changed_some = INVALID_LSN
        # up to here transactions may have been given of which it is not noted what they changed
        self._noted_from = handed
        self._requested: set[TableName] = set()
        self._unknown: set[TableName] = set()
        self.left_out: dict[TableName, str] = {}
        self.retries: dict[TableName, Retry] = {}
        self.changed = Watchers()

    def load(self, entries: Mapping[TableName, TableEntry], position: Lsn) -> None:
        """Take over what the catalog holds; ``position`` is up to where the apply worker gave everything to the sink, in former lives.

        Of tables known already the entry here is kept: it was set after it became durable, and may be newer than what was read.
        """
        known = self._entries
        self._entries, self._own, self._ahead = {}, set(), set()
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
        """The table's state; None if it is not of the subscription."""
        entry = self._entries.get(table)
        return None if entry is None else entry.state

    def set(self, table: TableName, entry: TableEntry) -> None:
        """Note what was stored durably."""
        self.update({table: entry})

    def update(self, entries: Mapping[TableName, TableEntry]) -> None:
        """Note what was stored durably, of several tables."""
        for table, entry in entries.items():
            self._put(table, entry)
        if entries:
            self.changed.notify()

    def _put(self, table: TableName, entry: TableEntry) -> None:
        self._entries[table] = entry
        for members, is_member in ((self._own, entry.state in _OWN_SYNC), (self._ahead, entry.state is TableState.SYNCDONE)):
            if is_member:
                members.add(table)
            else:
                members.discard(table)

    def remove(self, table: TableName) -> None:
        """The table is no longer of the subscription."""
        self._entries.pop(table, None)
        self.retries.pop(table, None)
        self._own.discard(table)
        self._ahead.discard(table)
        self._storing.discard(table)
        self.abandon_handover(table)

    @property
    def unsynchronized(self) -> list[TableName]:
        """Tables whose own synchronization still has work."""
        return sorted(self._own)

    @property
    def all_synchronized(self) -> bool:
        """Whether no table's own synchronization has work left."""
        return not self._own

    @property
    def synchronized_to(self) -> Lsn:
        """Up to where the table is that is furthest ahead of the apply worker; INVALID_LSN: none is."""
        return max((self._entries[table].lsn or INVALID_LSN for table in self._ahead), default=INVALID_LSN)

    @property
    def any_synchronized(self) -> bool:
        """Whether some table's synchronization is done."""
        return len(self._own) < len(self._entries)

    @property
    def all_ready(self) -> bool:
        """Whether all tables are in the apply worker's hands."""
        return not self._own and not self._ahead

    @property
    def handed(self) -> Lsn:
        """End LSN of the last transaction that the apply worker gave to the sink."""
        return self._handed

    # --- the apply worker's side

    def gate(self, relation: Relation, final_lsn: Lsn) -> bool:
        """Whether the apply worker applies the relation's changes of a transaction (native: should_apply_changes_for_rel)."""
        table = TableName(relation.namespace, relation.name)
        entry = self._entries.get(table)
        if entry is None:
            if table not in self.left_out and table.namespace != CATALOG_SCHEMA:
                self._unknown.add(table)
            return False
        if entry.state is TableState.SYNCDONE:
            return entry.lsn is None or final_lsn >= entry.lsn
        return entry.state is TableState.READY

    def tell_unknown(self, left_out: Container[str]) -> None:
        """Warn, once each, of tables that the gate did not know and whose changes the sink left out.

        It knows tables better than by name: one that was renamed on both sides is followed.
        """
        for table in sorted(self._unknown):
            if str(table) in left_out:
                _log.warning(
                    'table "%s" is published, but not of the subscription: its changes are left out'
                    " (hint: refresh the subscription, or start the run again, to add it)",
                    table,
                )
                self.left_out[table] = NOT_IN_SUBSCRIPTION
        self._unknown.clear()

    async def hand(self, end_lsn: Lsn, give_up: Callable[[], bool], transactions: Sequence[Transaction] = ()) -> bool:
        """Wait until the apply worker may give the sink what ends at ``end_lsn``, and note that it does, and what that changes.

        False if ``give_up()`` became true before (it is asked at every ``changed.notify()``): then nothing may be given.
        """

        def clear() -> bool:
            return not self._requested and all(lsn >= end_lsn for lsn in self._handover.values())

        while not clear():
            if give_up():
                return False
            # again, because between a notification and this task's turn another table may have come in the way
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
            # after an error, transactions come again
            if relations is None:
                self._changed_some = max(self._changed_some, transaction.end_lsn)
            else:
                for relation_id in relations:
                    self._changed[relation_id] = max(self._changed.get(relation_id, INVALID_LSN), transaction.end_lsn)

    @property
    def handing_over(self) -> list[TableName]:
        """Tables for whose synchronizations the apply worker may have to wait."""
        return sorted(self._requested | self._handover.keys())

    def passed(self, position: Lsn) -> dict[TableName, Lsn]:
        """Tables in ``s`` whose LSN the apply worker's durable position has reached: they become ``r``."""
        found = {table: self._entries[table].lsn for table in sorted(self._ahead)}
        return {table: lsn for table, lsn in found.items() if lsn is not None and lsn <= position}

    # --- the synchronization's side

    def request_handover(self, table: TableName) -> None:
        """Ask the apply worker to give nothing more until this table is handed over or the request is abandoned."""
        self._requested.add(table)

    def covered(self, relation_id: int, lsn: Lsn) -> Lsn:
        """Up to where a copy of a table is complete, which was made as of ``lsn`` in this run.

        That is where the apply worker is, if it has passed over no change of the table on its way from ``lsn``: it was given every
        transaction. Relations are known by their ids at the publisher. What was given before this run, or before a table waited, was not
        looked at: a copy as of then, which a standby that lags behind may give, is complete up to ``lsn`` only.
        """
        changed = max(self._changed.get(relation_id, INVALID_LSN), self._changed_some, self._noted_from)
        return lsn if changed > lsn else max(lsn, self._handed)

    def try_handover(self, table: TableName, lsn: Lsn) -> bool:
        """Fix the handover at the synchronization's position, if that is not behind the apply worker's.

        After True the caller stores SYNCDONE at ``lsn`` and calls :meth:`complete_handover`, or :meth:`abandon_handover` on failure.
        """
        if lsn < self._handed:
            return False
        self._handover[table] = lsn
        self._requested.discard(table)
        self.changed.notify()
        return True

    def storing(self, table: TableName) -> None:
        """SYNCDONE is about to be stored: until :meth:`complete_handover` or :meth:`known`, it is not known whether it is stored."""
        self._storing.add(table)

    def is_storing(self, table: TableName) -> bool:
        """Whether that is so: when no task stores it any more, the apply worker waits until its state is read."""
        return table in self._storing

    def known(self, table: TableName) -> None:
        """What is stored of the table was read, or the target said that it stored nothing."""
        self._storing.discard(table)

    def complete_handover(self, table: TableName) -> None:
        """SYNCDONE is durable."""
        lsn = self._handover.pop(table)
        self._storing.discard(table)
        self.set(table, TableEntry(TableState.SYNCDONE, lsn))

    def abandon_handover(self, table: TableName) -> None:
        """The synchronization failed; the apply worker need not wait for it. Idempotent.

        Does nothing while it is unknown whether SYNCDONE was stored: the apply worker would pass over changes that nobody applied.
        """
        if table in self._storing:
            return
        self._handover.pop(table, None)
        self._requested.discard(table)
        self.changed.notify()
