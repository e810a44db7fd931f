"""Parallel apply of ordinary transactions (``apply_workers``): several sessions apply groups, and commit them in the publisher's order.

Purpose
    One session of the target is the limit of a subscription with many writers. The transactions that wait are cut into groups of whole
    transactions, in their order. Several sessions apply groups *before their turn*, each in one open transaction. A group's turn comes when
    everything before it is committed. Then it is committed, with the position in the same transaction.

Why the result is the same
    *Order.* Groups are committed in the publisher's order, each with its position, which is moved from the end of the group before it
    (:meth:`subscriber.sinks.postgres.apply.applier.Applier.send_commit`). So what other sessions see is always what the publisher had
    after some transaction, and the position tells which one it was. Nothing else is needed after a crash: a group that was not committed
    leaves nothing.

    *Failures before the turn are not believed.* If a group fails before its turn, or one of its changes does not find its row, it is rolled
    back. In its turn the apply session applies it, in the ordinary way: only then is an error an error, and only then is a conflict
    counted.

    *Success before the turn is believed, because of locks.* Let B be a group that was applied before its turn, and A one before it. A
    change of B that does not depend on A's changes has the same result in both orders. One that depends on them touches the same row, or
    the same key of a unique index, and the server locks both until the end of the transaction:

    * B made its change first. Then A's change waits for B, because B holds the lock. B waits for A's commit. This is found (below), and B
      is rolled back.
    * A made its change first, and is not committed. Then B's change waits for A and sees its result. Or it does not find the row that A has
      inserted or given another key, which is a failure. Or it finds a key that A has deleted, which is a failure too.

    So the locks of the target keep the result right, and the keys of a group (:mod:`subscriber.sinks.postgres.parallel.keys`) only avoid
    that groups are applied twice. A mistake in the keys takes time. What could see the order without such locks is applied in its turn:
    TRUNCATE, tables with triggers, functions or rules of conflicts, new descriptions of relations. Changes of a table without a key wait
    for earlier ones of the table.

Two parts
    If a group has keys in common with earlier ones, only the changes with these keys wait for its turn (the *late* part), if they are fewer
    than the others. In TPC-B, these are the few rows of branches and tellers, which each group changes. The order within the group may
    change thereby: between tables none is kept within a transaction of the target (:mod:`subscriber.sinks.runs`), and in a table, changes
    that have a key in common keep theirs. A change that needs a value which a late change of its own group removes from a unique index is
    rejected.

No deadlocks
    A lock for which the group in its turn waits may be held by a later group, which waits for its own turn. The server cannot see the
    second wait. So if a turn takes longer than :data:`PATIENCE`, the server is asked for the sessions that hold it up, directly or through
    others, and their groups are rolled back.

Limits
    All groups of one call are committed when it returns. So whatever happens between two batches (a prepared or a streamed transaction, the
    snapshot of ``verify``, the end of a run) needs nothing for them. At most two groups for each session are cut ahead. A batch that is too
    small for two groups is applied by the apply session, and nothing of this costs it anything. So are all batches, except a part of a few,
    as long as that is faster (:mod:`subscriber.sinks.postgres.parallel.pace`). If sessions cannot be opened, there are fewer, or none. If
    groups are often applied twice because of a table, its changes wait for all earlier ones of the table, for a minute.

Rejected
    To let the later group wait for the row lock of an earlier one, instead of comparing keys: a set of changes waits as a whole, and holds
    locks for which the earlier group waits. To commit in another order (as ``preserve_commit_order = off`` elsewhere): readers would see
    states that the publisher never had.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Final

from subscriber.errors import ProtocolError, TargetError, TargetUnavailable
from subscriber.interfaces import Batch, RelationGate
from subscriber.sinks.postgres.apply.applier import Applier
from subscriber.sinks.postgres.parallel.followed_tables import FollowedTables
from subscriber.sinks.postgres.parallel.group import GroupAttempt
from subscriber.sinks.postgres.parallel.keys import FollowedTable, GroupKeys, KeyReader, Meeting
from subscriber.sinks.postgres.parallel.pace import Pace, working_time
from subscriber.sinks.postgres.parallel.sessions import ParallelSessions
from subscriber.sinks.postgres.session.catalog_reader import CatalogReader
from subscriber.sinks.postgres.tables.relation_mapping import RelationMapping
from subscriber.sinks.runs import CHANGES
from subscriber.transaction.model import Transaction

__all__ = ["LEAST", "PATIENCE", "ParallelGroups"]

_log = logging.getLogger(__name__)

LEAST: Final = 500
"""The number of changes of the smallest group. A smaller one takes little longer than its commit."""
PATIENCE: Final = 0.1
"""Seconds that a turn may take before the server is asked what holds it up, and the interval of further checks."""
_AHEAD: Final = 2
"""How many groups are cut ahead for each session."""
_SHARE: Final = 3
"""At least one change of so many is in the early part; otherwise the whole group waits for its turn."""
_TIMES: Final = 3
_MINUTE: Final = 60.0
"""If a table was the reason for so many rollbacks in this time, its changes are late for the same time."""
_WAITED: Final = frozenset({"40P01", "55P03", "57014"})
"""Deadlock, lock_timeout, statement_timeout: an error that a lock of a later group can cause."""


class _Group:
    """Transactions that are applied together.

    Attributes:
        keys: None: they are applied alone.
        known: the tables that they change.
        met: earlier groups, and in what this one meets them.
        attempt: to apply them before their turn.
    """

    def __init__(self, transactions: Sequence[Transaction], keys: GroupKeys | None, known: _Known) -> None:
        self.transactions = transactions
        self.keys = keys
        self.known = known
        self.met: list[tuple[_Group, Meeting]] = []
        self.attempt: GroupAttempt | None = None


class _Known:
    """The tables of the target, as they were read last: what is followed, and the mapping that it was made for, by relation id."""

    def __init__(self) -> None:
        self.tables: dict[int, FollowedTable] = {}
        self.mappings: dict[int, RelationMapping] = {}
        self.keys = KeyReader(self.tables)


class ParallelGroups:
    """Applies batches, in groups if they are large. One call at a time.

    Args:
        sessions: the pool of further sessions.
        applier: of the apply session.
        reader: reads the target's catalogs.
        workers: the number of further sessions.
        pid: PID of the apply session.
    """

    def __init__(self, sessions: ParallelSessions, applier: Applier, reader: CatalogReader, *, workers: int, pid: int) -> None:
        self._sessions = sessions
        self._applier = applier
        self._followed = FollowedTables(reader)
        self._workers = workers
        self._own_pid = pid
        self._window: deque[_Group] = deque()
        self._turn = 0
        self._size = LEAST
        self._gate: RelationGate | None = None
        self._known = _Known()
        self._rollbacks: dict[int, list[float]] = {}
        self._late_until: dict[int, float] = {}
        self._opening: asyncio.Task[None] | None = None
        self._open_after = 0.0
        self._pace = Pace()

    @property
    def pid(self) -> int:
        """PID of the session whose turn it is."""
        attempt = self._window[0].attempt if self._window else None
        return attempt.pid if attempt is not None and attempt.failure is None else self._own_pid

    async def apply(self, batch: Batch) -> None:
        """Apply a batch: see :meth:`subscriber.interfaces.Stream.apply`.

        Raises:
            ApplyError, RelationError, TargetError, TargetUnavailable
        """
        if self._applier.alone or self._applier.relations.planner is not None:
            await self._applier.apply(batch)
            return
        count = _changes(batch.transactions)
        if count < 2 * LEAST:
            await self._applier.apply(batch)
            return
        clock = asyncio.get_running_loop().time
        rest = batch
        while rest.transactions:
            in_groups, share = self._pace.next_part(2 * LEAST / count)
            if in_groups and not self._has_sessions():
                in_groups, share = False, share if self._is_opening() else 1.0
            part, rest = _divided(rest, round(count * share))
            began, working, changes = clock(), working_time(), _changes(part.transactions)
            await (self._apply_groups(part) if in_groups else self._applier.apply(part))
            # what is smaller, such as empty transactions at the end of the batch, says nothing about the speed
            if changes >= LEAST:
                self._pace.note(clock() - began, working_time() - working, changes, in_groups=in_groups)

    async def _apply_groups(self, batch: Batch) -> None:
        waiting = deque(await self._applier.pending(batch))
        self._gate, self._known = batch.gate, _Known()
        self._size = max(LEAST, _changes(waiting) // (_AHEAD * 2 * self._workers))
        async with self._watched():
            while waiting or self._window:
                await self._fill(waiting)
                await self._take_turn(self._window[0])
                self._window.popleft()
                self._turn += 1

    # --- cut groups

    async def _fill(self, waiting: deque[Transaction]) -> None:
        """Cut the next groups, as long as there are sessions for them, and begin those that can be."""
        window = self._window
        await self._begin()
        while waiting and (not window or (window[-1].keys is not None and len(window) < _AHEAD * self._workers and self._sessions.idle)):
            group = await self._cut(waiting)
            if group.keys is not None:
                group.met = [(each, group.keys.meets(each.keys)) for each in window if each.keys is not None]
            window.append(group)
            await self._begin()
            # let it send its first changes, before the keys of the next one are read
            await asyncio.sleep(0)

    async def _cut(self, waiting: deque[Transaction]) -> _Group:
        transactions = [waiting.popleft()]
        if not _is_plain(transactions[0]):
            return _Group(transactions, None, self._known)
        count = transactions[0].count
        while waiting and count < self._size and _is_plain(waiting[0]):
            count += waiting[0].count
            transactions.append(waiting.popleft())
        records = [record for transaction in transactions for record in transaction.records]
        keys: GroupKeys | None = None
        if await self._follows(records, transactions[0]):
            with contextlib.suppress(ProtocolError):  # reported when it is applied
                keys = self._known.keys.read(records)
        return _Group(transactions, keys, self._known)

    async def _follows(self, records: Sequence[bytes], first: Transaction) -> bool:
        """Whether all relations that are changed map to tables that are followed. Their gate lets them through from ``first`` on."""
        assert self._gate is not None
        known = self._known
        ids = {int.from_bytes(each) for each in {record[1:5] for record in records if record[:1] and record[0] in CHANGES}}
        mappings = []
        for relation_id in ids - known.tables.keys():
            mapping = self._applier.relations.mapped(relation_id)
            if mapping is None or not self._gate(mapping.remote, first.final_lsn):
                return False
            mappings.append(mapping)
        if not mappings:
            return True
        found = await self._followed.read(mappings)
        now = asyncio.get_running_loop().time()
        for mapping in mappings:
            table = found.get(mapping.remote.relation_id)
            if table is None:
                return False
            if self._late_until.get(table.tree, 0.0) > now:
                table = replace(table, keys=None)
            known.tables[mapping.remote.relation_id] = table
            known.mappings[mapping.remote.relation_id] = mapping
        return True

    # --- apply groups

    async def _begin(self) -> None:
        """Begin the groups that can be applied before their turn, as far as there are sessions."""
        for group in list(self._window)[1:]:
            if group.attempt is not None or group.keys is None:
                continue
            if not self._sessions.idle:
                break
            late = group.keys.late([meeting for earlier, meeting in group.met if earlier in self._window])
            count = sum(group.keys.tables.values())
            if (count - len(late)) * _SHARE < count:
                continue
            session = await self._sessions.take_idle()
            if session is None:
                break
            assert self._gate is not None
            mappings = group.known.mappings
            group.attempt = GroupAttempt(
                self._sessions, session, self._applier, group.transactions, self._gate, mappings=mappings, late=late
            )
        self._open_sessions()

    async def _take_turn(self, group: _Group) -> None:
        """Commit a group; everything before it is committed."""
        attempt = group.attempt
        if attempt is not None:
            if await attempt.commit():
                return
            await attempt.roll_back()
            error = attempt.failure
            _log.info("transactions up to %s are applied again in their turn: %s", group.transactions[-1].end_lsn, error or "rolled back")
            trees = {each.table.tree for each in group.known.mappings.values() if each.table.name == attempt.table}
            self._note_rollback(trees, f'table "{attempt.table}"')
        assert self._gate is not None
        try:
            await self._applier.apply_group(group.transactions, self._gate)
        except TargetError as error:
            others = self._others()
            if error.sqlstate not in _WAITED or not others:
                raise
            await asyncio.gather(*[other.roll_back() for other in others])
            rest = [each for each in group.transactions if each.end_lsn > self._applier.position]
            await self._applier.apply_group(rest, self._gate)
        # a Relation message may have come again, and tables of the target may have been read again
        self._known = _Known()

    def _others(self) -> list[GroupAttempt]:
        """The attempts of groups whose turn it is not."""
        return [each.attempt for each in list(self._window)[1:] if each.attempt is not None and each.attempt.is_alive]

    def _note_rollback(self, trees: Collection[int], what: str) -> None:
        now = asyncio.get_running_loop().time()
        for tree in trees:
            times = [each for each in self._rollbacks.get(tree, ()) if each > now - _MINUTE]
            self._rollbacks[tree] = [*times, now]
            if len(times) + 1 >= _TIMES and self._late_until.get(tree, 0.0) <= now:
                _log.info("changes of %s wait for all earlier ones for a minute: groups were often applied twice because of them", what)
                self._late_until[tree] = now + _MINUTE

    # --- sessions

    def _has_sessions(self) -> bool:
        """Whether groups can be applied now. Sessions are opened when the first are wanted."""
        self._open_sessions()
        return bool(self._sessions.idle) and not self._is_opening()

    def _is_opening(self) -> bool:
        return self._opening is not None and not self._opening.done()

    def _open_sessions(self) -> None:
        """Open sessions that are missing, in the background."""
        now = asyncio.get_running_loop().time()
        if self._sessions.count < self._workers and now >= self._open_after and not self._is_opening():
            self._opening = asyncio.create_task(self._open(), name="sessions of parallel apply")

    async def _open(self) -> None:
        try:
            while self._sessions.count < self._workers:
                try:
                    await self._sessions.open_idle()
                except TargetUnavailable:
                    # it may have been lost while it was opened
                    await self._sessions.open_idle()
        except TargetError as error:
            self._open_after = asyncio.get_running_loop().time() + _MINUTE
            _log.warning(
                "apply_workers = %d: only %d of these sessions could be opened in the target, and more are tried in a minute: %s",
                self._workers,
                self._sessions.count,
                error.one_line(),
            )

    @contextlib.asynccontextmanager
    async def _watched(self) -> AsyncIterator[None]:
        """Roll back groups that hold up the others. At the end, roll back what is not committed."""
        watch = asyncio.create_task(self._watch(), name="locks of parallel apply")
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.wait({watch})
            if not watch.cancelled():
                watch.exception()  # retrieved, so that asyncio does not log it
            # together: each waits for the server
            await asyncio.gather(*[group.attempt.roll_back() for group in self._window if group.attempt is not None])
            self._window.clear()

    async def _watch(self) -> None:
        while True:
            turn = self._turn
            await asyncio.sleep(PATIENCE)
            if turn == self._turn and (others := self._others()):
                await self._free(turn, others)

    async def _free(self, turn: int, others: Sequence[GroupAttempt]) -> None:
        """Roll back the groups that hold up the one whose turn it is."""
        by_pid = {attempt.pid: attempt for attempt in others}
        try:
            found: Collection[int] = await self._sessions.holding_up(self.pid, by_pid.keys())
        except TargetError:
            found = by_pid.keys()  # the cause is unknown: roll back all
        for pid in found:
            if turn != self._turn:
                # it does not wait any more, and one of these may have its turn now
                return
            group = next((each for each in self._window if each.attempt is by_pid[pid]), None)
            keys, first = (None if group is None else group.keys), self._window[0].keys
            if keys is not None and first is not None:
                self._note_rollback(keys.tables.keys() & first.tables.keys(), "tables that groups of transactions change in common")
            await by_pid[pid].roll_back()

    async def close(self) -> None:
        """Stop opening sessions. Idempotent."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening})


def _changes(transactions: Iterable[Transaction]) -> int:
    return sum([each.count for each in transactions])


def _divided(batch: Batch, changes: int) -> tuple[Batch, Batch]:
    """The first transactions, with at least so many changes, and the others."""
    sums = accumulate([each.count for each in batch.transactions], initial=0)
    place = next((place for place, before in enumerate(sums) if before >= changes), len(batch.transactions))
    return replace(batch, transactions=batch.transactions[:place]), replace(batch, transactions=batch.transactions[place:])


def _is_plain(transaction: Transaction) -> bool:
    return not transaction.spilled and not transaction.prefixed
