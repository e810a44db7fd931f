"""Requests to the process that runs a subscription: to do something while the target has exactly the transactions up to one LSN.

A verb writes a request into the target's catalog, and the process answers there. A subscription has at most one request. While the verb
works, it holds a lock. If the lock is free, the verb has ended, and the process withdraws what it has prepared for it.

===========  =============================================================  ===========================
state        meaning                                                        next states
===========  =============================================================  ===========================
REQUESTED    the verb has written the request                               HELD, OPENED, DONE, FAILED
HELD         apply waits for the verb, which must open its own snapshot     OPENED, EXPIRED
OPENED       the snapshot of the target is open, and apply has continued    DONE
DONE         the verb needs nothing more; or a repair is done               none
EXPIRED      apply has waited too long, and has continued                   FAILED
FAILED       the answer says why nothing was done                           none
===========  =============================================================  ===========================

Each change names the state that it expects, so that of a verb that says OPENED and a process that says EXPIRED only one succeeds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Protocol, runtime_checkable

from subscriber.catalog.model import SNAPSHOT_REQUEST, known_values
from subscriber.catalog.store import Store
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

__all__ = [
    "RequestState",
    "SnapshotRequest",
    "StoringSink",
    "answered_error",
    "change_request",
    "error_answer",
    "put_request",
    "read_request",
    "remove_request",
    "request_key",
]


def request_key(oid: int) -> str:
    """Key of the lock that a verb holds from its request until it has the answer."""
    return f"snapshot-{oid}"


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


@runtime_checkable
class StoringSink(Protocol):
    """An opened sink whose catalog can be reached while it applies."""

    @property
    def request_store(self) -> Store:
        """The catalog, on a session of its own. Calls may overlap with all others."""
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


async def read_request(store: Store, oid: int) -> SnapshotRequest | None:
    """Return the request of a subscription, if there is one.

    Raises:
        TargetUnavailable, TargetError
    """
    async with store.reading() as rows:
        found = await rows.select(SNAPSHOT_REQUEST, {"subid": oid})
    for row in found:
        with known_values(SNAPSHOT_REQUEST):
            return SnapshotRequest(
                row["request"], RequestState(row["state"]), json.loads(row["payload"] or "{}"), json.loads(row["answer"] or "{}")
            )
    return None


async def put_request(store: Store, oid: int, number: str, payload: Mapping[str, Any]) -> None:
    """Write a request, in place of one that an earlier verb has left. Call it under the lock.

    Raises:
        TargetUnavailable, TargetError
    """
    row = {"subid": oid, "request": number, "state": RequestState.REQUESTED.value, "payload": json.dumps(payload), "answer": None}
    async with store.transaction() as rows:
        await rows.delete(SNAPSHOT_REQUEST, {"subid": oid})
        await rows.insert(SNAPSHOT_REQUEST, [row])
    await store.notify()


async def change_request(
    store: Store, oid: int, number: str, *, only_from: RequestState, to: RequestState, answer: Mapping[str, Any] | None = None
) -> bool:
    """Change the state of a request. Return False if it is not in the state ``only_from``: then nothing was changed.

    Raises:
        TargetUnavailable, TargetError
    """
    values: dict[str, Any] = {"state": to.value}
    if answer is not None:
        values["answer"] = json.dumps(answer)
    async with store.transaction() as rows:
        return await rows.update(SNAPSHOT_REQUEST, {"subid": oid, "request": number, "state": only_from.value}, values) == 1


async def remove_request(store: Store, oid: int, number: str) -> None:
    """Remove a request.

    Raises:
        TargetUnavailable, TargetError
    """
    async with store.transaction() as rows:
        await rows.delete(SNAPSHOT_REQUEST, {"subid": oid, "request": number})
