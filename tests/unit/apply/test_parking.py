"""When a table is parked, and when it is reconciled."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import cast

from subscriber.apply.tables.parking import Parking
from subscriber.apply.tables.table_state import TableStates
from subscriber.errors import ApplyError, RelationError, SubscriberError, TargetError, TargetUnavailable
from subscriber.interfaces import OpenedSink, SyncMode, TableEntry, TableName, TableState
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Relation

T, U = TableName("public", "t"), TableName("public", "u")
READY = TableEntry(TableState.READY)


class _Target:
    def __init__(self) -> None:
        self.error: TargetError | None = None
        self.parked: list[Mapping[TableName, TableEntry]] = []
        self.reconciled: list[Sequence[TableName]] = []
        self.shared: TableName | None = None

    async def park(self, tables: Mapping[TableName, TableEntry]) -> Mapping[TableName, TableEntry]:
        if self.error is not None:
            raise self.error
        self.parked.append(tables)
        return {table: entry for table, entry in tables.items() if table != U}

    async def reconcile(self, tables: Sequence[TableName]) -> Mapping[TableName, TableEntry]:
        self.reconciled.append(tables)
        if self.shared in tables:
            raise RelationError("it also belongs to another subscription")
        return {table: TableEntry(TableState.INIT, mode=SyncMode.RECONCILE) for table in tables}


def states(**entries: TableEntry) -> TableStates:
    found = TableStates()
    found.load({TableName("public", name): entry for name, entry in entries.items()}, Lsn(100))
    return found


def rejected(table: TableName | None = T, lsn: int = 200, kind: type[TargetError] = ApplyError) -> TargetError:
    error = kind("rejected")
    error.of_table, error.finish_lsn = None if table is None else (table.namespace, table.name), lsn
    return error


async def change(parking: Parking, target: _Target) -> None:
    await parking.change(cast("OpenedSink", target), Lsn(150))


def relation(name: str) -> Relation:
    return Relation(1, "public", name, "d", ())


async def test_after_so_many_attempts_with_the_same_error() -> None:
    found = states(t=READY, u=READY)
    parking, target = Parking(found, after=3), _Target()
    assert [parking.refused(rejected()) for _ in range(2)] == [False, False]
    # another transaction: the attempts are counted from one again
    assert [parking.refused(rejected(lsn=300)) for _ in range(2)] == [False, False]
    # each table has its own
    assert not parking.refused(rejected(U, lsn=300))
    assert parking.refused(rejected(lsn=300))
    assert found.gate(relation("t"), Lsn(300)) is True
    await change(parking, target)
    assert (found.gate(relation("t"), Lsn(300)), found.gate(relation("u"), Lsn(300))) == (None, True)
    assert found.parked.keys() == {T}
    # nothing before this is left out; what is left out may begin before the change that was rejected
    assert found.parked[T].lsn == 150
    assert found.all_ready
    assert not found.may_prepare
    assert (found.any_parked, found.parking) == (True, {})
    await change(parking, target)
    assert len(target.parked) == 1


async def test_what_is_not_parked() -> None:
    found = states(t=READY, u=READY)
    parking, target = Parking(found, after=1), _Target()
    errors: list[SubscriberError] = [rejected(None), rejected(kind=TargetUnavailable), rejected(kind=TargetError), SubscriberError("ours")]
    assert [parking.takes(error) for error in (*errors, rejected())] == [False, False, False, False, True]
    assert not Parking(found).takes(rejected())
    # the target does not know it; or refuses to park it
    assert parking.refused(rejected(U))
    await change(parking, target)
    target.error = RelationError("a trigger reads it")
    assert parking.refused(rejected(T))
    await change(parking, target)
    assert (found.parked, found.any_parked) == ({}, False)
    assert found.gate(relation("t"), Lsn(300)) is True
    assert parking.takes(rejected())
    # with until, it is reported instead of being retried for ever
    parking = Parking(found, after=1, patient=False)
    assert parking.takes(rejected())
    assert parking.refused(rejected())
    await change(parking, target)
    assert (parking.takes(rejected()), parking.takes(rejected(None), copying=T), parking.takes(rejected(U))) == (False, False, True)


async def test_what_is_rejected_because_of_a_parked_table() -> None:
    """The report of a deferred foreign key names the referencing table, also if a row of the other one was deleted."""
    found = states(t=TableEntry(TableState.PARKED, Lsn(100), error="e", since=1.0), u=READY)
    parking = Parking(found, after=1)
    assert (parking.takes(rejected()), parking.takes(rejected(U))) == (False, True)


async def test_a_copy() -> None:
    found = states(t=TableEntry(TableState.DATASYNC), u=READY)
    parking, target = Parking(found, after=2), _Target()
    assert parking.takes(rejected(None), copying=T)
    parking.copy_failed(T, rejected(None))
    assert not found.parking
    parking.copied(T)
    parking.copy_failed(T, rejected(None))
    assert not found.parking
    found.storing(T)
    parking.copy_failed(T, rejected(None))
    assert not found.parking
    found.known(T)
    parking.copy_failed(T, rejected(None))
    parking.copy_failed(T, rejected(None))
    await change(parking, target)
    assert (found.unsynchronized, found.parked[T].lsn) == ([], 150)


async def test_reconciled_after_a_while() -> None:
    now = time.time()
    old, recent = (TableEntry(TableState.PARKED, Lsn(100), error="e", since=now - seconds) for seconds in (100, 1))
    found = states(t=old, u=recent)
    parking, target = Parking(found, after=1, retry=60), _Target()
    parking.two_phase = True
    await change(parking, target)
    assert target.reconciled == []
    parking.two_phase = False
    await change(parking, target)
    await change(parking, target)
    assert target.reconciled == [[T]]
    assert (found.unsynchronized, list(found.parked)) == ([T], [U])
    assert found.gate(relation("t"), Lsn(300)) is False


async def test_one_that_cannot_be_reconciled_does_not_keep_the_others() -> None:
    old = TableEntry(TableState.PARKED, Lsn(100), error="e", since=1.0)
    found = states(t=old, u=old)
    parking, target = Parking(found, after=1, retry=60), _Target()
    target.shared = T
    await change(parking, target)
    assert (found.unsynchronized, list(found.parked)) == ([U], [T])
