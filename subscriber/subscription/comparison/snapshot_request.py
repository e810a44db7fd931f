"""Ask the process that runs a subscription for snapshots of both sides at one LSN, or for a repair there.

:mod:`subscriber.subscription.run.snapshot_service` answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from subscriber.catalog.snapshot_requests import (
    Requests,
    RequestState,
    SnapshotRequest,
    answered_error,
)
from subscriber.errors import SubscriberError, TargetError, TargetUnavailable
from subscriber.protocol.lsn import Lsn
from subscriber.walreceiver.copying.snapshot import SnapshotReader

__all__ = ["Asker", "PublisherSide", "Waiting", "publisher_sessions"]

_POLL: Final = 0.02
_NOT_RUNNING_SECONDS: Final = 5.0
"""A worker that is between two connections has no lock for a moment."""
_NOTICE_SECONDS: Final = 10.0
_HELD_SECONDS: Final = 10.0
"""Time limit for the answer that says how long apply was held. It normally comes at once."""


class Waiting(Protocol):
    """Is told about long waits."""

    def waiting(self, what: str) -> None:
        """The request waits for something."""
        ...


@dataclass(frozen=True, slots=True)
class PublisherSide:
    """An exported snapshot of the publisher.

    Attributes:
        lsn: the target has exactly the transactions up to here.
        name: of the snapshot.
        xmin: all transactions below have ended before it.
    """

    lsn: Lsn
    name: str
    xmin: int

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> PublisherSide:
        """Read the answer to a request."""
        return cls(Lsn.parse(answer["lsn"]), str(answer["publisher_snapshot"]), int(answer["publisher_xmin"]))


class Asker:
    """Makes requests for one subscription. While it is entered, no other process can make one.

    Args:
        requests: where they are made.
        name: of the subscription.
        waiting: is told about long waits.
    """

    def __init__(self, requests: Requests, name: str, waiting: Waiting) -> None:
        self.requests = requests
        self._name = name
        self._waiting = waiting

    async def __aenter__(self) -> Asker:
        await self.requests.take_lock()
        return self

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(TargetUnavailable):
            await self.requests.release_lock()

    @contextlib.asynccontextmanager
    async def ask(self, payload: Mapping[str, Any]) -> AsyncIterator[SnapshotRequest]:
        """Make a request and wait for the answer. The request exists until the block ends.

        Raises:
            TargetError: no process runs the subscription, or the process could not do it.
            PublisherError: the process could not do it because of the publisher.
        """
        number = str(uuid.uuid4())
        request: SnapshotRequest | None = None
        await self.requests.put(number, payload)
        try:
            request = await self._answer(number)
            yield request
        except SubscriberError:
            # it may follow from an error of the process
            with contextlib.suppress(SubscriberError):
                request = await self.requests.read()
            if request is not None and request.number == number and request.state is RequestState.FAILED:
                raise answered_error(request.answer) from None
            raise
        finally:
            with contextlib.suppress(TargetUnavailable):
                await self.requests.remove(number)

    async def _answer(self, number: str) -> SnapshotRequest:
        now = asyncio.get_running_loop().time
        seen = noticed = now()
        while True:
            request = await self.requests.read()
            if request is None or request.number != number:
                raise TargetError("the request for snapshots was removed from the target's catalog", hint="try again")
            if request.state is RequestState.FAILED:
                raise answered_error(request.answer)
            if request.state is not RequestState.REQUESTED:
                return request
            if await self.requests.has_worker():
                seen = now()
            elif now() - seen > _NOT_RUNNING_SECONDS:
                raise TargetError(
                    f'subscription "{self._name}" is not running: its target cannot be brought to one position',
                    hint="start it with `subscriber run`, and try again",
                )
            if now() - noticed > _NOTICE_SECONDS:
                noticed = now()
                self._waiting.waiting("the target has not applied what the publisher has committed so far")
            await asyncio.sleep(_POLL)

    async def say(self, request: SnapshotRequest, *, only_from: RequestState, to: RequestState) -> None:
        """Say how far this process is with its request.

        Raises:
            TargetUnavailable: it came too late; the snapshots may be of different moments.
        """
        if not await self.requests.change(request.number, only_from=only_from, to=to):
            raise TargetUnavailable("the snapshots were not opened in time", hint="try again when the servers are less busy")

    async def held_seconds(self, number: str) -> float:
        """How long apply was held for a request whose snapshots are open.

        Raises:
            TargetUnavailable: the process that held it has ended; the snapshots may be of different moments.
        """
        now = asyncio.get_running_loop().time
        until = now() + _HELD_SECONDS
        while (request := await self.requests.read()) is not None and request.number == number:
            if "held_seconds" in request.answer:
                return float(request.answer["held_seconds"])
            if request.state is RequestState.FAILED:
                raise answered_error(request.answer)
            if now() > until:
                raise TargetUnavailable("the process that runs the subscription ended while apply was held", hint="try again")
            await asyncio.sleep(_POLL)
        return 0.0


@contextlib.asynccontextmanager
async def publisher_sessions(
    conninfo: str, snapshot_name: str, jobs: int, *, application_name: str
) -> AsyncIterator[Sequence[SnapshotReader]]:
    """Open sessions with the publisher that share a snapshot.

    Raises:
        PublisherError: the publisher cannot be reached, or has no such snapshot.
    """
    async with contextlib.AsyncExitStack() as stack:
        found: list[SnapshotReader] = []
        for _ in range(jobs):
            reader = await SnapshotReader.open(conninfo, snapshot_name, application_name=application_name)
            stack.push_async_callback(reader.close)
            found.append(reader)
        yield found
