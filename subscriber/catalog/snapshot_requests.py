"""Requests to the process that runs a subscription: to do something while the target has exactly the transactions up to one LSN.

A verb writes a request into the target's catalog, and the process answers there. A subscription has at most one request. While the verb
works, it holds a lock. If the lock is free, the verb has ended, and the process withdraws what it has prepared for it.

===========  =============================================================  ===========================
state        meaning                                                        next states
===========  =============================================================  ===========================
REQUESTED    the verb has written the request                               HELD, OPENED, DONE, FAILED
HELD         apply waits for the verb, which must open its own snapshot     OPENED, EXPIRED
OPENED       the snapshot of the target is open, and apply has continued    DONE, FAILED
DONE         the verb needs nothing more; or a repair is done               none
EXPIRED      apply has waited too long, and has continued                   FAILED
FAILED       the answer says why nothing was done                           none
===========  =============================================================  ===========================

Each change names the state that it expects, so that of a verb that says OPENED and a process that says EXPIRED only one succeeds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Protocol, runtime_checkable

from subscriber.catalog.model import PG_SUBSCRIPTION_REL, SNAPSHOT_REQUEST, known_values
from subscriber.catalog.store import Store, writer_key
from subscriber.catalog.subscription_rows import entry_of
from subscriber.errors import (
    ApplyError,
    ConfigurationError,
    PublisherError,
    PublisherUnavailable,
    RelationError,
    SubscriberError,
    TargetError,
    TargetUnavailable,
)
from subscriber.interfaces import TableEntry, TableName, TableState
from subscriber.protocol.lsn import Lsn

__all__ = [
    "RequestState",
    "RequestedSink",
    "Requests",
    "SnapshotRequest",
    "StoredRequests",
    "answered_error",
    "error_answer",
    "not_ready",
]


class RequestState(StrEnum):
    """See the module."""

    REQUESTED = "r"
    HELD = "h"
    OPENED = "o"
    DONE = "d"
    EXPIRED = "e"
    FAILED = "f"


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """One request.

    Attributes:
        number: identifies it.
        state: see the module.
        payload: what the verb wants.
        answer: what the process says.
    """

    number: str
    state: RequestState
    payload: Mapping[str, Any]
    answer: Mapping[str, Any]


class Requests(Protocol):
    """The requests of one subscription, as both sides see them. All methods raise TargetUnavailable or TargetError."""

    async def read(self) -> SnapshotRequest | None:
        """Return the request, if there is one."""
        ...

    async def put(self, number: str, payload: Mapping[str, Any]) -> None:
        """Write a request, in place of one that an earlier verb has left. Call it under the lock."""
        ...

    async def change(self, number: str, *, only_from: RequestState, to: RequestState, answer: Mapping[str, Any] | None = None) -> bool:
        """Change the state of a request. Return False if it is not in the state ``only_from``: then nothing was changed."""
        ...

    async def remove(self, number: str) -> None:
        """Remove a request."""
        ...

    async def take_lock(self) -> None:
        """Take the lock that a verb holds from its request until it has the answer.

        Raises:
            SubscriptionInUse: another verb still has it after ten seconds.
        """
        ...

    async def release_lock(self) -> None:
        """Release that lock."""
        ...

    async def has_verb(self) -> bool:
        """Whether a verb has that lock."""
        ...

    async def has_worker(self) -> bool:
        """Whether a process runs the subscription."""
        ...

    async def entries(self) -> Mapping[TableName, TableEntry]:
        """The states of the subscription's tables."""
        ...


@runtime_checkable
class RequestedSink(Protocol):
    """An opened sink that can be asked by other processes."""

    @property
    def requests(self) -> Requests | None:
        """The requests, on a session of their own: calls may overlap with all others. None: this target has none."""
        ...


_ERRORS: Final = {
    each.__name__: each
    for each in (ApplyError, ConfigurationError, PublisherError, PublisherUnavailable, RelationError, TargetError, TargetUnavailable)
}


def error_answer(error: SubscriberError) -> Mapping[str, Any]:
    """The answer to a request that failed."""
    name = next((each.__name__ for each in type(error).__mro__ if each.__name__ in _ERRORS), "TargetError")
    return {"class": name, "error": str(error), "hint": error.hint, "sqlstate": error.sqlstate}


def answered_error(answer: Mapping[str, Any]) -> SubscriberError:
    """The error of a failed request."""
    found = _ERRORS.get(str(answer.get("class")), TargetError)
    return found(str(answer.get("error")), hint=answer.get("hint"), sqlstate=answer.get("sqlstate"))


class StoredRequests:
    """Requests in a catalog of rows.

    Args:
        store: the target's catalog.
        oid: the subscription's.
        name: its name.
    """

    def __init__(self, store: Store, oid: int, name: str) -> None:
        self._store = store
        self._oid = oid
        self._name = name

    async def read(self) -> SnapshotRequest | None:
        """Return the request, if there is one."""
        async with self._store.reading() as rows:
            found = await rows.select(SNAPSHOT_REQUEST, {"subid": self._oid})
        for row in found:
            with known_values(SNAPSHOT_REQUEST):
                return SnapshotRequest(
                    row["request"], RequestState(row["state"]), json.loads(row["payload"] or "{}"), json.loads(row["answer"] or "{}")
                )
        return None

    async def put(self, number: str, payload: Mapping[str, Any]) -> None:
        """Write a request."""
        state = RequestState.REQUESTED.value
        row = {"subid": self._oid, "request": number, "state": state, "payload": json.dumps(payload), "answer": None}
        async with self._store.transaction() as rows:
            await rows.delete(SNAPSHOT_REQUEST, {"subid": self._oid})
            await rows.insert(SNAPSHOT_REQUEST, [row])
        await self._store.notify()

    async def change(self, number: str, *, only_from: RequestState, to: RequestState, answer: Mapping[str, Any] | None = None) -> bool:
        """Change the state of a request."""
        values: dict[str, Any] = {"state": to.value}
        if answer is not None:
            values["answer"] = json.dumps(answer)
        async with self._store.transaction() as rows:
            where = {"subid": self._oid, "request": number, "state": only_from.value}
            return await rows.update(SNAPSHOT_REQUEST, where, values) == 1

    async def remove(self, number: str) -> None:
        """Remove a request."""
        async with self._store.transaction() as rows:
            await rows.delete(SNAPSHOT_REQUEST, {"subid": self._oid, "request": number})

    async def take_lock(self) -> None:
        """Take the lock of the verb."""
        await self._store.take_lock(self._key, f'verification of subscription "{self._name}"')

    async def release_lock(self) -> None:
        """Release it."""
        await self._store.release_lock(self._key)

    async def has_verb(self) -> bool:
        """Whether a verb has it. A target without locks does not know."""
        return not self._store.has_locks or bool(await self._store.held_locks([self._key]))

    async def has_worker(self) -> bool:
        """Whether a process runs the subscription. A target without locks does not know."""
        return not self._store.has_locks or bool(await self._store.held_locks([writer_key(self._oid)]))

    @property
    def _key(self) -> str:
        return f"snapshot-{self._oid}"

    async def entries(self) -> Mapping[TableName, TableEntry]:
        """The states of the tables."""
        async with self._store.reading() as rows:
            found = await rows.select(PG_SUBSCRIPTION_REL, {"srsubid": self._oid})
        return {TableName(row["srnspname"], row["srrelname"]): entry_of(row) for row in found}


def not_ready(entries: Mapping[TableName, TableEntry], tables: Iterable[TableName], lsn: Lsn) -> dict[TableName, str]:
    """Return the tables that have not exactly the transactions up to an LSN to which the target was brought, each with the reason."""
    reasons: dict[TableName, str] = {}
    for table in tables:
        entry = entries.get(table)
        if entry is None:
            reasons[table] = "it is not part of the subscription"
        elif entry.state is TableState.PARKED:
            reasons[table] = f"it is parked since {entry.lsn}: {entry.error}"
        elif not entry.is_synchronized or (entry.lsn is not None and entry.lsn > lsn):
            reasons[table] = "it is still being synchronized"
    return reasons
