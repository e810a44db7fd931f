"""Serves the requests of other processes for snapshots of both sides at one LSN, and for repairs there.

:mod:`subscriber.catalog.snapshot_requests` describes how they ask, and :mod:`subscriber.apply.hold` how the LSN is found. Everything that
takes time (connecting to both sides) is done before apply is held, and what the requester does with the snapshots comes afterwards.

A requester that ends leaves nothing behind: its lock is free then, and the snapshots are closed. Apply is never held for a requester beyond
the limits of this module.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from subscriber.apply.all_changes import require_all_changes
from subscriber.apply.hold import Hold, PublisherSnapshot
from subscriber.apply.row_filters import copied_rows
from subscriber.catalog.snapshot_requests import RequestedSink, Requests, RequestState, SnapshotRequest, error_answer, not_ready
from subscriber.errors import ConfigurationError, PublisherUnavailable, RelationError, SubscriberError, TargetUnavailable
from subscriber.interfaces import ExportingSink, ExportSnapshot, OpenedSink, RepairingSink, TableName
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.session_name import session_name
from subscriber.subscription.run.run_state import RunState
from subscriber.subscription.target_session import TargetSession
from subscriber.walreceiver.copying.exported_snapshots import SnapshotExporter, TakenSnapshot
from subscriber.walreceiver.copying.rows_by_key import rows_by_key
from subscriber.walreceiver.publication import published_tables

__all__ = ["SnapshotService"]

_log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.25
_ALIVE_SECONDS: Final = 1.0
"""How often the requester's lock is looked at."""
_HOLD_SECONDS: Final = 2.0
_ACT_SECONDS: Final = 5.0
"""How long apply may wait for the target's snapshot, or for the requester that opens it."""
_ANSWER_SECONDS: Final = 3.0
_KEEP_SECONDS: Final = 60.0
"""How long a requester may take to open the snapshots. In a target without locks it is not known whether it still runs."""
_POLL: Final = 0.005

T = TypeVar("T")

_Act = Callable[[PublisherSnapshot, Lsn], Awaitable[None]]


class SnapshotService:
    """Serves one request after another while :meth:`run` runs.

    Args:
        target: nothing is served while it is closed.
        state: of the run.
    """

    def __init__(self, target: TargetSession, state: RunState) -> None:
        self._target = target
        self._spec = target.spec
        self._state = state
        self._failed: str | None = None

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if not self._target.is_open:
                continue
            opened = self._target.opened
            requests = opened.requests if isinstance(opened, RequestedSink) else None
            if requests is None:
                return
            try:
                request = await _answered(requests.read())
                if request is not None and request.state is RequestState.REQUESTED:
                    await self._serve(opened, requests, request)
                self._failed = None
            except SubscriberError as error:
                # of the target; the apply worker says more about a lost session
                if self._failed != error.one_line():
                    self._failed = error.one_line()
                    _log.info("could not serve a request for snapshots: %s", self._failed)

    async def _serve(self, opened: OpenedSink, requests: Requests, request: SnapshotRequest) -> None:
        _log.info("another process asks for %s at one LSN", request.payload.get("kind"))
        async with contextlib.AsyncExitStack() as stack:
            try:
                await self._answer(stack, opened, requests, request)
            except SubscriberError as error:
                # before the snapshots are closed, which gives the requester another error
                answer = error_answer(error)
                for state in (RequestState.REQUESTED, RequestState.HELD, RequestState.EXPIRED, RequestState.OPENED):
                    await requests.change(request.number, only_from=state, to=RequestState.FAILED, answer=answer)

    async def _answer(self, stack: contextlib.AsyncExitStack, opened: OpenedSink, requests: Requests, request: SnapshotRequest) -> None:
        number = request.number
        name = session_name(self._spec.name, "snapshot")
        exporter = await stack.enter_async_context(SnapshotExporter.open(self._spec.conninfo, application_name=name))
        taken: TakenSnapshot | None = None
        answer: dict[str, Any] = {}

        async def take() -> TakenSnapshot:
            nonlocal taken
            taken = await exporter.take()
            return taken

        def describe(lsn: Lsn) -> dict[str, Any]:
            assert taken is not None
            return {"lsn": str(lsn), "publisher_snapshot": taken.name, "publisher_xmin": taken.xids.xmin}

        async def exported(export: ExportSnapshot, lsn: Lsn) -> None:
            async with asyncio.timeout(_ACT_SECONDS):
                snapshot, xmin = await export()
            answer.update(describe(lsn), target_snapshot=snapshot, target_xmin=xmin)

        async def held(lsn: Lsn) -> None:
            now = asyncio.get_running_loop().time
            answer.update(describe(lsn))
            until = now() + _ACT_SECONDS
            if not await requests.change(number, only_from=RequestState.REQUESTED, to=RequestState.HELD, answer=answer):
                return
            while now() < until:
                found = await requests.read()
                if found is None or found.number != number or found.state is not RequestState.HELD:
                    return
                await asyncio.sleep(_POLL)
            if await requests.change(number, only_from=RequestState.HELD, to=RequestState.EXPIRED):
                raise TargetUnavailable(f"the requester did not open its snapshots within {_ACT_SECONDS:g} s", hint="try again")

        act: _Act
        if request.payload.get("kind") == "repair":
            repair = await self._repair(opened, requests, exporter, request)
            act = lambda _, lsn: repair(answer, lsn)  # noqa: E731
        elif isinstance(opened, ExportingSink):
            export = await stack.enter_async_context(opened.exporting())
            act = lambda _, lsn: _limited(exported(export, lsn))  # noqa: E731
        else:
            act = lambda _, lsn: held(lsn)  # noqa: E731
        hold = Hold(take, act, _HOLD_SECONDS)
        await self._hold(hold, requests)
        if hold.error is not None:
            raise hold.error
        answer["held_seconds"] = round(hold.seconds, 6)
        _log.info("apply was held for %.1f ms at %s", hold.seconds * 1000, answer.get("lsn"))
        to = RequestState.DONE if "repaired" in answer else RequestState.OPENED
        # the requester that has opened its own snapshots says OPENED itself
        state = RequestState.REQUESTED if "target_snapshot" in answer or "repaired" in answer else RequestState.OPENED
        if await requests.change(number, only_from=state, to=to, answer=answer):
            await self._keep(requests, number)

    async def _hold(self, hold: Hold, requests: Requests) -> None:
        """Hold apply, unless the requester ends before."""
        self._state.hold = hold
        self._state.wake()
        try:
            while not hold.ended.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_ALIVE_SECONDS):
                        await hold.ended.wait()
                if not hold.ended.is_set() and not await _answered(requests.has_verb()):
                    hold.abandon("the process that asked for the snapshots has ended")
        finally:
            hold.abandon("the run has ended")
            self._state.hold = None

    async def _keep(self, requests: Requests, number: str) -> None:
        """Keep the snapshots until the requester has opened them, or has ended."""
        until = asyncio.get_running_loop().time() + _KEEP_SECONDS
        while asyncio.get_running_loop().time() < until and await _answered(requests.has_verb()):
            found = await _answered(requests.read())
            if found is None or found.number != number or found.state is not RequestState.OPENED:
                return
            await asyncio.sleep(_LOOK_SECONDS)

    async def _repair(
        self, opened: OpenedSink, requests: Requests, exporter: SnapshotExporter, request: SnapshotRequest
    ) -> Callable[[dict[str, Any], Lsn], Awaitable[None]]:
        """Return what repairs rows while apply is held."""
        if not isinstance(opened, RepairingSink):
            raise ConfigurationError("this kind of target cannot be repaired", hint="`subscriber alter NAME --resync SCHEMA.TABLE`")
        name, key, keys = TableName(*request.payload["table"]), request.payload["key"], request.payload["keys"]
        found = await published_tables(exporter.session, self._spec.publications, name, mapping=self._spec.options.mapping)
        if not found:
            raise RelationError(f'table "{name}" is not published any more', hint="verify again")
        table = copied_rows(found[0], self._spec.options)
        require_all_changes([table])
        by_text = bool(request.payload["by_text"])
        if not by_text and isinstance(opened, ExportingSink):
            # PostgreSQL, which deletes a row only by the text of its key
            raise RelationError(
                f'table "{name}" has a key whose text is another one in the target: its rows cannot be repaired one by one',
                hint="reconcile it as a whole: `subscriber alter NAME --resync SCHEMA.TABLE`",
            )

        from subscriber.verification.tables import was_rewritten_query  # noqa: PLC0415 -- most runs do not need it

        async def repair(answer: dict[str, Any], lsn: Lsn) -> None:
            # a copy may have begun since the verification
            if (reason := not_ready(await requests.entries(), [name], lsn).get(name)) is not None:
                raise RelationError(f'table "{name}" cannot be repaired: {reason}', hint="verify again when it is ready")
            try:
                async with asyncio.timeout(_ACT_SECONDS):
                    rows = await rows_by_key(exporter.session, table, key, keys, by_text=by_text)
                    ((rewritten,),) = await exporter.session.execute(was_rewritten_query(table.publisher_name))
            except TimeoutError:
                raise PublisherUnavailable(f"the rows were not read within {_ACT_SECONDS:g} s", hint="try again") from None
            if rewritten == "true":
                # the snapshot does not see its rows any more, although they exist
                raise RelationError(f'table "{table.name}" was truncated or rewritten while it was repaired', hint="verify again")
            # not cancelled: the sink's session must stay usable
            await opened.repair(table, key, keys, rows)
            answer.update(lsn=str(lsn), repaired=len(keys))

        return repair


async def _answered(work: Awaitable[T]) -> T:
    """Wait for a limited time: a session of a lost connection may never answer."""
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            return await work
    except TimeoutError:
        raise TargetUnavailable(f"the target did not answer within {_ANSWER_SECONDS:g} s", hint="check the network connection") from None


async def _limited(work: Awaitable[None]) -> None:
    try:
        await work
    except TimeoutError:
        raise TargetUnavailable(f"the target's snapshot was not ready within {_ACT_SECONDS:g} s", hint="try again") from None
