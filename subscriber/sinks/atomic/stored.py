"""What the target stores about one subscription, and the lock under which it is written."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from subscriber.errors import TargetError, TargetUnavailable
from subscriber.interfaces import Position, TableEntry, TableName, TableState, TwoPhaseState
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.atomic.row_changes import RowChange

__all__ = ["Stored", "SubscriptionRecord", "TableRecord", "Target"]


class Target(Protocol):
    """See :class:`subscriber.sinks.atomic.AtomicSink`."""

    def lock(self, name: str) -> AbstractAsyncContextManager[None]: ...
    async def load(self, name: str) -> str | None: ...
    async def store(self, name: str, state: str, changes: Sequence[RowChange]) -> None: ...


@dataclass(slots=True)
class TableRecord:
    """One table. ``position`` is its own position while it catches up."""

    number: int
    entry: TableEntry
    position: Position | None = None


@dataclass(slots=True)
class SubscriptionRecord:
    """One subscription."""

    oid: int = field(default_factory=lambda: secrets.randbelow(2**31 - 16_384) + 16_384)
    identifier: str = field(default_factory=lambda: secrets.token_hex(16))
    slot_name: str | None = None
    publications: tuple[str, ...] = ()
    two_phase: TwoPhaseState = TwoPhaseState.DISABLED
    position: Position | None = None
    where: str = ""
    tables: dict[TableName, TableRecord] = field(default_factory=dict)
    last_number: int = 16_384

    def table(self, name: TableName) -> TableRecord:
        if name not in self.tables:
            raise TargetError(f'table "{name}" is not part of the subscription', hint="start the run again")
        return self.tables[name]

    def to_json(self) -> str:
        tables = [[name.namespace, name.name, asdict(table)] for name, table in self.tables.items()]
        return json.dumps(asdict(replace(self, tables={})) | {"tables": tables})

    @classmethod
    def from_json(cls, text: str) -> SubscriptionRecord:
        values = json.loads(text)
        tables = values.pop("tables")
        record = cls(**values)
        record.publications = tuple(record.publications)
        record.two_phase = TwoPhaseState(record.two_phase)
        record.position = _position(record.position)
        record.tables = {TableName(namespace, name): _table(**table) for namespace, name, table in tables}
        return record


def _position(values: Any) -> Position | None:
    return None if values is None else Position(**{**values, "lsn": Lsn(values["lsn"])})


def _table(number: int, entry: Any, position: Any) -> TableRecord:
    lsn = None if entry["lsn"] is None else Lsn(entry["lsn"])
    return TableRecord(number, TableEntry(TableState(entry["state"]), lsn), _position(position))


class Stored:
    """One subscription of a target. The lock is held while an opened sink or a table synchronization uses it.

    Args:
        target: the target.
        name: name of the subscription.
    """

    def __init__(self, target: Target, name: str) -> None:
        self._target = target
        self._name = name
        self._users: set[object] = set()
        self._lock = AsyncExitStack()
        self._mutex = asyncio.Lock()
        self._record: SubscriptionRecord | None = None

    async def acquire(self, user: object) -> None:
        """Take the lock, unless another user of this process has it."""
        async with self._mutex:
            if not self._users:
                await self._lock.enter_async_context(self._target.lock(self._name))
                self._record = None
            self._users.add(user)

    async def release(self, user: object) -> None:
        """Release the lock after its last user. Idempotent."""
        async with self._mutex:
            if user in self._users:
                self._users.remove(user)
                if not self._users:
                    await self._lock.aclose()

    async def record(self, user: object) -> SubscriptionRecord:
        """Return what is stored. The caller must not change it.

        Raises:
            TargetUnavailable: ``user`` does not hold the lock.
        """
        if user not in self._users:
            raise TargetUnavailable("the sink is not open", hint="the connection is retried")
        if self._record is None:
            text = await self._target.load(self._name)
            self._record = SubscriptionRecord() if text is None else SubscriptionRecord.from_json(text)
        return self._record

    @asynccontextmanager
    async def changing(self, user: object) -> AsyncIterator[tuple[SubscriptionRecord, list[RowChange]]]:
        """Yield a copy of the record, and a list for changes of rows. Both are stored together when the block ends."""
        async with self._mutex:
            record, changes = deepcopy(await self.record(user)), list[RowChange]()
            yield record, changes
            # after an error it is not known what was stored: it is loaded again
            self._record = None
            await self._target.store(self._name, record.to_json(), changes)
            self._record = record
