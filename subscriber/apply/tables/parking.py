"""Park tables that the target rejects, and let them be reconciled later (``on_error = park``).

An error that belongs to one table ends the attempt, as any error does. After some attempts with the same error, the next one begins with
parking: the table's state is stored, before anything more is applied. From then on the gate leaves out its changes
(:meth:`TableStates.gate`). So the transaction comes again without them, however it is applied: as a set, in parallel, or prepared. A crash
in between loses nothing: either the state is stored, or the transaction is attempted again with all its changes.

The apply worker stores the state, because it is the one caller of the sink. That is also so for a table whose synchronization failed.

A parked table goes back to INIT with mode RECONCILE: by ``alter --resync``, or after ``park_retry`` by the apply worker. While two_phase is
enabled, no table can be synchronized, as in PostgreSQL.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Final

from subscriber import crash_points
from subscriber.apply.retry import is_of_a_table
from subscriber.apply.tables.table_state import TableStates
from subscriber.errors import RelationError, SubscriberError, TargetError
from subscriber.interfaces import OpenedSink, ParkingSink, TableEntry, TableName, TableState
from subscriber.protocol.lsn import Lsn

__all__ = ["RESYNC_HINT", "Parking"]

_log = logging.getLogger(__name__)

RESYNC_HINT: Final = "fix the cause, then `subscriber alter NAME --resync SCHEMA.TABLE`"


class Parking:
    """Decides which tables are parked in one run, and when they are reconciled.

    Args:
        states: of the subscription's tables.
        after: so many failed attempts park a table; 0: none does.
        retry: so many seconds after it was parked, a table is reconciled; 0: never.
        patient: whether an error of a table that cannot be parked is retried. False: such an error is not taken a second time.

    Attributes:
        two_phase: whether prepared transactions are received. Then no table is reconciled.
    """

    def __init__(self, states: TableStates, *, after: int = 0, retry: float = 0.0, patient: bool = True) -> None:
        self._states = states
        self._patient = patient
        self._after = after
        self._retry = retry
        # the transaction of the latest failed attempts (None: copies), and how many there were
        self._attempts: dict[TableName, tuple[int | None, int]] = {}
        self._tried: dict[TableName, float] = {}
        self._unparkable: set[TableName] = set()
        self.two_phase = False

    def takes(self, error: SubscriberError, *, copying: TableName | None = None) -> bool:
        """Whether an error is of one table, which is parked after some attempts.

        Args:
            error: of an attempt.
            copying: the table whose synchronization it is of; None: it is of the stream.
        """
        table = copying
        if table is None and isinstance(error, TargetError) and error.of_table is not None:
            table = TableName(*error.of_table)
        if not self._after or table is None or not is_of_a_table(error):
            return False
        # its changes are left out already, so another table's are rejected because of it: which one, the report does not say
        return self._states.state(table) is not TableState.PARKED and (self._patient or table not in self._unparkable)

    def refused(self, error: SubscriberError) -> bool:
        """Count a failed attempt to apply a transaction. True: the next attempt begins with parking the table."""
        assert isinstance(error, TargetError)
        assert error.of_table is not None
        return self._failed(TableName(*error.of_table), error, error.finish_lsn)

    def copy_failed(self, table: TableName, error: SubscriberError) -> None:
        """Count a failed attempt to synchronize a table. It is not tried again before it is parked."""
        self._failed(table, error, None)

    def copied(self, table: TableName) -> None:
        """Note that a table was synchronized: attempts are counted from one again."""
        self._attempts.pop(table, None)

    def _failed(self, table: TableName, error: SubscriberError, lsn: int | None) -> bool:
        before, count = self._attempts.get(table, (lsn, 0))
        count = count + 1 if before == lsn else 1
        self._attempts[table] = lsn, count
        if count % self._after or (lsn is None and self._states.is_storing(table)):
            return False
        # retrying ends here, and so does the error's own hint
        self._states.parking[table] = TableEntry(TableState.PARKED, error=error.one_line(hint=False), since=time.time())
        return True

    async def change(self, sink: OpenedSink, lsn: Lsn) -> None:
        """Park the tables that are to be parked, and reconcile those that have been parked for long enough.

        Args:
            sink: of the apply worker, which calls this.
            lsn: everything up to there is applied, and nothing after it.

        Raises:
            TargetError: or a subclass. It is not known what is stored.
        """
        assert isinstance(sink, ParkingSink)
        if self._states.parking:
            await self._store(sink, lsn)
        now = time.time()
        parked = self._states.parked if self._retry and not self.two_phase else {}
        due = [table for table, entry in parked.items() if now - max(entry.since or 0.0, self._tried.get(table, 0.0)) >= self._retry]
        for table in due:
            self._tried[table] = now
            await self._reconcile(sink, table)

    async def _store(self, sink: ParkingSink, lsn: Lsn) -> None:
        wanted = {table: replace(entry, lsn=lsn) for table, entry in self._states.parking.items()}
        try:
            stored = await sink.park(wanted)
        except RelationError as error:
            _log.error("%s cannot be parked: %s", ", ".join(f'table "{table}"' for table in wanted), error.one_line())
            stored = {}
        else:
            # one that was renamed is stored by its earlier name
            for table in wanted.keys() - stored.keys() if len(stored) < len(wanted) else ():
                _log.error('table "%s" cannot be parked: it is not part of the subscription', table)
        self._unparkable |= wanted.keys() - stored.keys()
        crash_points.reached("park.stored")
        self._states.parking.clear()
        for table, entry in stored.items():
            self._states.retries.pop(table, None)
            self._tried[table] = time.time()
            _log.error(
                'table "%s" is parked: its changes from %s on are left out: %s (hint: %s)', table, entry.lsn, entry.error, RESYNC_HINT
            )
        self._states.update(stored)
        self._states.changed.notify()

    async def _reconcile(self, sink: ParkingSink, table: TableName) -> None:
        try:
            begun = await sink.reconcile([table])
        except RelationError as error:
            _log.error('parked table "%s" cannot be reconciled: %s', table, error.one_line())
            return
        crash_points.reached("park.left")
        self._states.update(begun)
        if begun:
            _log.info('table "%s" was parked, and is reconciled now', table)
