"""One run of a subscription.

It begins with the setup (``setup/setup.py``). Then these run side by side until the end: the table synchronizations, each on its own
connections; the attempts to follow the slot, one after another (``slot_follower.py``); the status reports; the search for published tables
that are left out, and their addition; the service that gives snapshots to other processes; the continuous verification; and the watchdog.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Final

from subscriber.apply.retry import Backoff, is_coming_up, policy
from subscriber.apply.tables.parking import RESYNC_HINT, Parking
from subscriber.apply.tables.table_state import TableStates
from subscriber.apply.tasks import Stopped, task_group
from subscriber.errors import RelationError, SubscriberError, raise_all
from subscriber.interfaces import FinishingSink, ParkingSink, Retry, TwoPhaseState
from subscriber.log_fields import error_fields
from subscriber.repeated_errors import RepeatedErrors
from subscriber.subscription.run.run_state import RunState
from subscriber.subscription.run.slot_follower import SlotFollower
from subscriber.subscription.run.snapshot_service import SnapshotService
from subscriber.subscription.run.status_reports import KnownProgress, StatusReports
from subscriber.subscription.run.tables.left_out_tables import LeftOutTables
from subscriber.subscription.run.tables.table_synchronizations import TableSynchronizations
from subscriber.subscription.run.watchdog import Watchdog
from subscriber.subscription.run_status import Until
from subscriber.subscription.setup.relay_position import RelayPosition
from subscriber.subscription.setup.setup import Prepared, Setup
from subscriber.subscription.spec import RunSpec
from subscriber.subscription.target_session import TargetSession
from subscriber.transaction.feedback import FlushTracker
from subscriber.waits import unwatched

if TYPE_CHECKING:
    from subscriber.subscription.run.relay import Relay

__all__ = ["Run"]

_log = logging.getLogger(__name__)

_STOP_SECONDS: Final = 5.0
"""How long a target may take for the current batch when the run is to stop. A lock of another session could block it without limit."""
_REPORT_SECONDS: Final = 2.0
"""Time limit of the status report at the end of a run."""
_LEAVE_SECONDS: Final = 3.0
"""How long the end of a run waits for the slots of synchronized tables to be dropped."""


class Run:
    """Owns the workers of one run.

    Args:
        spec: the subscription.
        state: of the run. It belongs to the caller, who watches it and may stop the run with it.
        progress: is told about table copies.
        until: where the run ends. None: when it is stopped.
    """

    def __init__(self, spec: RunSpec, state: RunState, progress: KnownProgress, until: Until | None) -> None:
        self._spec = spec
        self._state = state
        self._progress = progress
        self._until = until
        self._watchdog = Watchdog(spec, state)
        self._target = TargetSession(spec)
        self._reports = StatusReports(self._target, state, progress)
        self._left_out = LeftOutTables(spec, state.states)
        self._relay = RelayPosition(spec.settings)

    async def run(self) -> None:
        """Run to the end. If the run is to stop, the current batch becomes durable first, unless the target takes too long.

        Raises:
            SubscriberError: an error that is not retried.
        """
        try:
            await self._state.unless_stopped(self._run(), grace=_STOP_SECONDS, abort=self._target.abort)
        except Stopped:
            _log.warning("the target did not finish the current changes within %.0f s: the next start receives them again", _STOP_SECONDS)

    async def _run(self) -> None:
        spec, state = self._spec, self._state
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(contextlib.suppress(Stopped))
            stack.push_async_callback(self._target.close)
            stack.push_async_callback(self._relay.close)
            await stack.enter_async_context(self._watchdog.watching())
            prepared = await self._prepare()
            # with until and on_error = disable, an error that the user must fix is reported at once
            state.patient = self._until is None and spec.options.on_error != "disable"
            if self._until is not None:
                state.until = self._until.lsn or prepared.publisher_lsn
            state.tracker = FlushTracker(prepared.position.lsn)
            state.states.load(prepared.tables, max(prepared.position.lsn, prepared.state.taken))
            state.states.adds_new = spec.settings.new_tables == "copy"
            # those that are to be added have no other reason yet
            reasons = {} if state.states.adds_new else prepared.left_out
            self._left_out.compare(prepared.published, reasons, prepared.lost_partitions)
            state.prepared, state.failed = True, None
            state.watchers.notify()
            await self._work(prepared)

    async def _prepare(self) -> Prepared:
        """Run the setup, once both servers have started up."""
        state, setup, backoff = self._state, Setup(self._target, self._relay), Backoff(self._spec.settings)
        errors = RepeatedErrors(_log)
        while True:
            try:
                return await state.unless_stopped(setup.prepare(state.durable, self._until))
            except SubscriberError as error:
                if not is_coming_up(error):
                    raise
                state.last_error = error
                pause = backoff.pause(policy(error))
                state.failed = Retry(error.one_line(), state.failed.attempt + 1 if state.failed else 1, time.time() + pause)
                text = error.one_line()
                fields = error_fields(error, attempt=state.failed.attempt)
                errors.tell(logging.WARNING, text, f'subscription "{self._spec.name}": {text}; next attempt in {pause:.1f} s', fields)
            await state.unless_stopped(asyncio.sleep(pause))

    async def _work(self, prepared: Prepared) -> None:
        spec, state, reports, left_out = self._spec, self._state, self._reports, self._left_out
        parking = self._make_parking()
        synchronizations = TableSynchronizations(self._target, prepared, state, self._progress, self._watchdog, parking=parking)
        await synchronizations.sweep_spools()
        launcher = synchronizations.launcher
        relay = self._make_relay(prepared)
        follower = SlotFollower(self._target, prepared, state, reports, self._watchdog, parking=parking, relay=relay)
        service = SnapshotService(self._target, state)
        complete = self._until is not None and not self._until.allow_missing_tables
        async with task_group() as group:
            tasks = [group.create_task(work) for work in (launcher.run(), reports.run(), left_out.run(), service.run())]
            if relay is not None:
                # what is received does not show that anything is applied
                tasks.append(group.create_task(relay.run(), context=unwatched()))
            if state.states.adds_new:
                from subscriber.subscription.run.tables.new_tables import NewTables  # noqa: PLC0415 -- most runs do not need it

                tasks.append(group.create_task(NewTables(spec, state, prepared, left_out).run(), context=unwatched()))
            if self._until is None and spec.settings.verify_interval:
                from subscriber.subscription.run.continuous_verification import ContinuousVerification  # noqa: PLC0415 -- as above

                tasks.append(group.create_task(ContinuousVerification(spec, state).run(), context=unwatched()))
            try:
                await follower.run()
                if complete:
                    await state.unless_stopped(left_out.look())
            finally:
                # report the last error before the sink is closed; the time limit is for a target that does not answer
                state.end_retries()
                await reports.report(_REPORT_SECONDS)
            await launcher.leave(_LEAVE_SECONDS)
            for task in tasks:
                task.cancel()
        if relay is not None and self._target.is_open:
            await relay.settle(self._target.opened)
        if self._until is not None and not state.stop.is_set() and isinstance(sink := self._target.opened, FinishingSink):
            await sink.finish()
        if self._until is not None and not state.stop.is_set():
            _require_none_parked(state.states)
        if complete and not state.stop.is_set():
            left_out.require_none()

    def _make_parking(self) -> Parking:
        options, states = self._spec.options, self._state.states
        if options.on_error != "park":
            return Parking(states)
        if not isinstance(self._target.opened, ParkingSink):
            # a lake's applier parks tables by itself
            if not isinstance(self._target.opened, FinishingSink):
                _log.warning("this kind of target cannot park tables: errors are retried")
            return Parking(states)
        return Parking(states, after=options.park_after, retry=options.park_retry, patient=self._state.patient)

    def _make_relay(self, prepared: Prepared) -> Relay | None:
        if self._relay.log is None:
            return None
        from subscriber.subscription.run.relay import Relay  # noqa: PLC0415 -- as above

        enabled = prepared.state.two_phase is TwoPhaseState.ENABLED
        self._state.relay = Relay(self._spec, self._state, self._relay.log, two_phase=enabled, spool_key=prepared.spool_key)
        return self._state.relay


def _require_none_parked(states: TableStates) -> None:
    raise_all(
        [
            RelationError(f'table "{table}" is parked since {entry.lsn}: {entry.error}', hint=RESYNC_HINT)
            for table, entry in states.parked.items()
        ]
    )
