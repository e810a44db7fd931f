"""A subscription, as a program sees it: run it, wait for it, stop it, look at it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from subscriber.apply.progress import CopyProgress, Quiet
from subscriber.catalog import Definition
from subscriber.config import NO_SLOT, Settings, SubscriptionOptions
from subscriber.errors import SubscriberError
from subscriber.interfaces import Retry, Sink
from subscriber.log_fields import log_fields
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.session_name import session_name
from subscriber.subscription.run.run import Run
from subscriber.subscription.run.run_state import RunState
from subscriber.subscription.run.status_reports import KnownProgress
from subscriber.subscription.run_status import Status, TableCopy, Until
from subscriber.subscription.spec import RunSpec
from subscriber.walreceiver.slot_status import SlotObservation, observe_slot

__all__ = ["Subscription"]


class Subscription:
    """A replica of the published tables, kept by :meth:`run`.

    Args:
        name: name of the subscription. It is also the slot's name unless ``options.slot_name`` is given.
        connection: connection string of the publisher: any conninfo or URL that libpq accepts.
        publications: at least one.
        target: URL or conninfo of the target, or your own sink.
        options: the parameters of CREATE SUBSCRIPTION.
        settings: the settings that a server has in postgresql.conf.
        progress: is told about table copies.

    Raises:
        ConfigurationError: arguments cannot be combined, or no sink supports the target.

    Example::

        subscription = Subscription("replica", connection="host=db1 dbname=app", publications=["app"], target="postgresql:///copy")
        running = asyncio.create_task(subscription.run())
        await subscription.wait_for(lsn)      # everything up to lsn is in the target, durably
        subscription.stop()
        await running
    """

    def __init__(
        self,
        name: str,
        *,
        connection: str,
        publications: Sequence[str],
        target: str | Sink,
        options: SubscriptionOptions | None = None,
        settings: Settings | None = None,
        progress: CopyProgress | None = None,
    ) -> None:
        spec = RunSpec.of_arguments(
            name, connection=connection, publications=publications, target=target, options=options, settings=settings
        )
        self._set(spec, progress)

    @classmethod
    def of_definition(cls, definition: Definition, target: str, settings: Settings, progress: CopyProgress | None = None) -> Self:
        """Take a subscription that the target's catalog defines, as the launcher does.

        Raises:
            ConfigurationError: no sink supports the target, or the definition is not valid for a run.
        """
        options = replace(definition.options, slot_name=definition.slot_name or NO_SLOT, create_slot=False)
        made = cls.__new__(cls)
        made._set(RunSpec.of_definition(definition, target, options, settings), progress)  # noqa: SLF001 (its own)
        return made

    def _set(self, spec: RunSpec, progress: CopyProgress | None) -> None:
        self.name = spec.name
        self._spec = spec
        self._progress = KnownProgress(progress or Quiet())
        self._state = RunState()
        self.set_limits(spec.options)

    async def run(self, until: Until | None = None) -> None:
        """Copy the tables that are not copied yet, and follow the changes. Return after :meth:`stop`, or when ``until`` is reached.

        Any error ends the first attempt, except that it waits for a server that is starting up. Later, the run waits for a server that
        cannot be reached, and retries every ``wal_retrieve_retry_interval`` after an error that the user must fix, unless ``until`` is
        given. With ``on_error = disable`` any error ends the run, as in a native subscription, including a connection to the publisher that
        is lost while changes arrive. A subscription that was just created also ends if none of its tables can be copied.

        Cancelling it is safe at any moment and loses nothing. After :meth:`stop`, the publisher has less to send again.

        Raises:
            SubscriberError: see :mod:`subscriber.errors` for what to do about each.
            RuntimeError: the subscription is already running.
        """
        state = self._state
        state.begin()
        try:
            with log_fields(subscription=self.name):
                await Run(self._spec, state, self._progress, until).run()
        except SubscriberError as error:
            state.last_error = error
            raise
        finally:
            state.end()

    def stop(self) -> None:
        """End :meth:`run` cleanly: the current batch becomes durable and is acknowledged, and the slot stays.

        If the target does not accept that batch within five seconds, the run ends without it, and the publisher sends it again at the
        next start. If the target does not answer at all, the end takes some seconds more.

        A call before ``run`` ends the next run at once. Call it in the thread of the event loop, for example in a signal handler.
        """
        self._state.stop.set()
        self._state.wake()

    def note_retry(self, retry: Retry) -> None:
        """Show in the status that the run failed, and that :meth:`run` will be called again."""
        self._state.failed = retry

    def set_limits(self, options: SubscriptionOptions) -> None:
        """Change ``max_copy_rate``, ``max_apply_rate`` and ``copy_window`` of a subscription, also while it runs.

        Args:
            options: have the new limits; others are ignored.
        """
        state = self._state
        state.copy_rate.limit, state.apply_rate.limit = options.max_copy_rate, options.max_apply_rate
        state.window = options.window

    async def wait_for(self, lsn: Lsn, timeout: float | None = None) -> None:
        """Wait until all tables are synchronized and everything up to ``lsn`` is durable in the target. Parked tables do not count.

        A table may be ahead of the others directly after its copy; on return none is. Any number of tasks may wait, from the moment at
        which :meth:`run` is scheduled.

        Args:
            lsn: for example from ``SELECT pg_current_wal_flush_lsn()`` on the publisher, read after the commit to wait for.
            timeout: seconds; None: no limit.

        Raises:
            TimeoutError: ``lsn`` was not reached in time.
            SubscriberError: the run ended before. Its error is the cause.
        """
        state = self._state
        state.awaited.append(lsn)
        try:
            async with asyncio.timeout(timeout):
                await asyncio.sleep(0)  # a run that was scheduled just now begins
                state.wake()
                await state.watchers.wait(lambda: state.reached(lsn) or state.ended)
        finally:
            state.awaited.remove(lsn)
        if not state.reached(lsn):
            raise SubscriberError(f"the subscription ended before it reached {lsn}") from state.last_error

    @property
    def status(self) -> Status:
        """The current status."""
        state = self._state
        return Status(
            received=state.received,
            applied=state.tracker.applied,
            flushed=state.tracker.flushed,
            state=state.state,
            retry=state.retry,
            publisher_lsn=state.publisher_lsn,
            streaming=state.from_publisher is not None,
            tables=dict(state.states.entries()),
            copies={
                table: TableCopy(rows, estimated, table in self._progress.copied, state.reconciled.get(table))
                for table, (rows, estimated) in list(self._progress.copying.items())
            },
            copying=state.is_copying,
            copies_begin=state.states.copies_begin,
            table_retries=dict(state.states.retries),
            left_out=dict(state.states.left_out),
            last_error=state.last_error,
            latest_error=state.latest_error,
            last_error_time=state.last_error_time,
            limited=state.apply_rate.holds,
            lag_seconds=state.lag_seconds,
            times=state.applied.times,
            relay_log=state.relay.details if state.relay is not None else None,
            verifications=dict(state.verifications),
            statistics=self._spec.sink.statistics,
            last_message=state.from_publisher.receiver.received_at if state.from_publisher is not None else None,
        )

    async def observe_slot(self) -> SlotObservation:
        """Ask the publisher for the state of the slot, on a session of its own. Any event loop may do this.

        Raises:
            ConfigurationError, PublisherUnavailable, PublisherError: the query failed, or the slot does not exist.
        """
        application_name = session_name(self.name, "status")
        return await observe_slot(self._spec.conninfo, self._spec.slot_name, application_name=application_name)

    @property
    def disabled_by(self) -> SubscriberError | None:
        """The error that ended :meth:`run` because of ``on_error = disable``. None: another reason, or it is still running."""
        return self._state.disabled_by
