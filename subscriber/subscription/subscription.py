"""Runs one subscription. It wires walreceiver, apply and sink together.

A run begins with a setup (``setup/setup.py``). Then two things run in parallel until the end: the table synchronizations, each on its own
connections, and the attempts to follow the slot, one after another (``run/slot_follower.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Final

from subscriber.abc import GroupingSink, Retry, Sink, TableName, TableState
from subscriber.apply.progress import CopyProgress, Quiet
from subscriber.apply.retry import Backoff, disables, is_coming_up, policy
from subscriber.apply.spool import SpoolDirectory
from subscriber.apply.table_groups import GroupSynchronization
from subscriber.apply.table_sync import TableSynchronization
from subscriber.apply.table_sync_launcher import SyncLauncher
from subscriber.apply.tasks import task_group
from subscriber.config import Settings, SubscriptionOptions
from subscriber.errors import ConfigurationError, SubscriberError
from subscriber.protocol.lsn import Lsn
from subscriber.stream_session import FollowedSlot
from subscriber.subscription.run.copy_source import PublisherSource, copy_format
from subscriber.subscription.run.group_copy_source import PublisherGroupSource
from subscriber.subscription.run.left_out_tables import LeftOutTables
from subscriber.subscription.run.run_state import Running, Stopped
from subscriber.subscription.run.run_status import Status, TableCopy, Until
from subscriber.subscription.run.slot_follower import Following
from subscriber.subscription.run.status_reports import KnownProgress, Reporting
from subscriber.subscription.run.watchdog import Watchdog
from subscriber.subscription.setup.setup import Prepared, Setup
from subscriber.subscription.targets import open_target
from subscriber.transaction.feedback import FlushTracker

__all__ = ["Subscription"]

_log = logging.getLogger(__name__)

_STOP_SECONDS: Final = 5.0
"""How long a target may take for the current batch when the run is to stop. A lock of another session could block it without limit."""
_REPORT_SECONDS: Final = 2.0
"""Time limit of the status report at the end of a run."""
_LEAVE_SECONDS: Final = 3.0
"""How long the end of a run waits for the slots of synchronized tables to be dropped."""


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
        generation: for a subscription that the target's catalog defines (:func:`subscriber.create_subscription`): the generation of the
            definition that the other arguments come from. None: the arguments are the definition.

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
        generation: int | None = None,
    ) -> None:
        if isinstance(publications, str):
            raise ConfigurationError("publications is a string", hint='give a list, as in publications=["app"]')
        self.name = name
        self._conninfo = connection
        self._publications = tuple(publications)
        self._options = options or SubscriptionOptions()
        self._settings = settings or Settings()
        self._progress = KnownProgress(progress or Quiet())
        defined = generation is not None
        self._sink = open_target(target, self._options, self._settings, defined=defined) if isinstance(target, str) else target
        self._setup = Setup(
            name,
            conninfo=connection,
            publications=self._publications,
            options=self._options,
            settings=self._settings,
            sink=self._sink,
            generation=generation,
        )
        self._running = Running()
        self._is_running = self._ended = False

    # --- for the caller

    async def run(self, until: Until | None = None) -> None:
        """Copy the tables that are not copied yet, and follow the changes. Return after :meth:`stop`, or when ``until`` is reached.

        Any error ends the first attempt, except that it waits for a server that is starting up. Later, the run waits for a server that
        cannot be reached, and retries every ``wal_retrieve_retry_interval`` after an error that the user must fix, unless ``until`` is
        given. With ``disable_on_error`` any error ends the run, as in a native subscription, including a connection to the publisher that
        is lost while changes arrive. A subscription that was just created also ends if none of its tables can be copied.

        Cancelling it is safe at any moment and loses nothing. After :meth:`stop`, the publisher has less to send again.

        Raises:
            SubscriberError: see :mod:`subscriber.errors` for what to do about each.
            RuntimeError: the subscription is already running.
        """
        if self._is_running:
            raise RuntimeError("the subscription is running already")
        self._is_running, self._ended = True, False
        self._running.begin()
        try:
            await self._running.unless_stopped(self._run(until), grace=_STOP_SECONDS)
        except Stopped:
            _log.warning("the target did not finish the current changes within %.0f s: the next start receives them again", _STOP_SECONDS)
        except SubscriberError as error:
            self._running.last_error = error
            raise
        finally:
            self._is_running, self._ended = False, True
            self._running.end()

    def stop(self) -> None:
        """End :meth:`run` cleanly: the current batch becomes durable and is acknowledged, and the slot stays.

        If the target does not accept that batch within five seconds, the run ends without it, and the publisher sends it again at the
        next start. If the target does not answer at all, the end takes some seconds more.

        A call before ``run`` ends the next run at once. Call it in the thread of the event loop, for example in a signal handler.
        """
        self._running.stop.set()
        self._running.wake()

    async def wait_for(self, lsn: Lsn, timeout: float | None = None) -> None:
        """Wait until all tables are synchronized and everything up to ``lsn`` is durable in the target.

        A table may be ahead of the others directly after its copy; on return none is. Any number of tasks may wait, from the moment at
        which :meth:`run` is scheduled.

        Args:
            lsn: for example from ``SELECT pg_current_wal_flush_lsn()`` on the publisher, read after the commit to wait for.
            timeout: seconds; None: no limit.

        Raises:
            TimeoutError: ``lsn`` was not reached in time.
            SubscriberError: the run ended before. Its error is the cause.
        """
        running = self._running
        running.awaited.append(lsn)
        try:
            async with asyncio.timeout(timeout):
                await asyncio.sleep(0)  # a run that was scheduled just now begins
                running.wake()
                await running.watchers.wait(lambda: running.reached(lsn) or self._ended)
        finally:
            running.awaited.remove(lsn)
        if not running.reached(lsn):
            raise SubscriberError(f"the subscription ended before it reached {lsn}") from running.last_error

    @property
    def status(self) -> Status:
        """The current status."""
        running = self._running
        return Status(
            received=running.tracker.received,
            applied=running.tracker.applied,
            flushed=running.tracker.flushed,
            state=running.state,
            retry=running.retry,
            publisher_lsn=running.publisher_lsn,
            streaming=running.session is not None,
            tables=dict(running.states.entries()),
            copies={
                table: TableCopy(rows, estimated, table in self._progress.copied)
                for table, (rows, estimated) in list(self._progress.copying.items())
            },
            left_out=dict(running.states.left_out),
            last_error=running.last_error,
            statistics=self._sink.statistics,
            last_message=running.session.receiver.received_at if running.session is not None else None,
        )

    @property
    def disabled_by(self) -> SubscriberError | None:
        """The error that ended :meth:`run` because ``disable_on_error`` is set. None: another reason, or it is still running."""
        return self._running.disabled_by

    # --- the workers

    async def _run(self, until: Until | None) -> None:
        running = self._running
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(contextlib.suppress(Stopped))
            stack.push_async_callback(self._sink.close)
            watchdog = Watchdog(self.name, running, self._sink, self._settings.watchdog_timeout)
            await stack.enter_async_context(watchdog.watching())
            prepared = await self._prepare(until)
            if until is not None:
                running.until = until.lsn or prepared.publisher_lsn
            running.tracker = FlushTracker(prepared.position.lsn)
            running.states.load(prepared.tables, max(prepared.position.lsn, prepared.state.taken))
            left_out = LeftOutTables(self.name, self._conninfo, self._publications, running.states)
            left_out.compare(prepared.published, prepared.left_out)
            running.prepared, running.failed = True, None
            running.watchers.notify()
            await self._sweep_spools(prepared)
            complete = until is not None and not until.allow_missing_tables
            # with until and disable_on_error, an error that the user must fix is reported at once
            patient = until is None and not self._options.disable_on_error

            def goes_on(failed: Collection[TableName]) -> bool:
                # at the first start of a subscription, the user must learn at once that no table can be copied
                first = prepared.first and not running.states.any_synchronized
                return patient and not (first and set(running.states.unsynchronized).issubset(failed))

            launcher = self._make_launcher(prepared, goes_on, watchdog)
            reporting = Reporting(running, self._sink, self._progress)
            following = Following(
                self._slot(prepared),
                prepared,
                self._sink,
                self._settings,
                running,
                patient=patient,
                reporting=reporting,
                watchdog=watchdog,
            )
            async with task_group() as group:
                beside = [group.create_task(work) for work in (launcher.run(), reporting.run(), left_out.run())]
                try:
                    await following.run()
                    if complete:
                        await running.unless_stopped(left_out.look())
                finally:
                    # report the last error before the sink is closed; the time limit is for a target that does not answer
                    running.end_retries()
                    await reporting.report(_REPORT_SECONDS)
                await launcher.leave(_LEAVE_SECONDS)
                for task in beside:
                    task.cancel()
            if complete and not running.stop.is_set():
                left_out.require_none()

    async def _prepare(self, until: Until | None) -> Prepared:
        """Run the setup, once both servers have started up."""
        running, backoff = self._running, Backoff(self._settings)
        while True:
            try:
                return await running.unless_stopped(self._setup.prepare(running.durable, until))
            except SubscriberError as error:
                if not is_coming_up(error):
                    raise
                running.last_error = error
                pause = backoff.pause(policy(error))
                running.failed = Retry(error.one_line(), running.failed.attempt + 1 if running.failed else 1, time.time() + pause)
                _log.warning('subscription "%s": %s; next attempt in %.1f s', self.name, error.one_line(), pause)
            await running.unless_stopped(asyncio.sleep(pause))

    def _slot(self, prepared: Prepared) -> FollowedSlot:
        return FollowedSlot(
            conninfo=self._conninfo,
            name=prepared.position.slot_name,
            temporary=False,
            publications=self._publications,
            options=self._options,
            settings=self._settings,
            application_name=self.name,
            spool_key=_spool_key(prepared),
        )

    def _table_spool(self, prepared: Prepared, table: TableName) -> SpoolDirectory:
        return SpoolDirectory(self._settings.spool_directory, f"{_spool_key(prepared)} table {table}")

    async def _sweep_spools(self, prepared: Prepared) -> None:
        """Delete spools that are not used any more: a process that was killed right after synchronizing a table left its rows there."""
        for table, entry in prepared.tables.items():
            spool = self._table_spool(prepared, table)
            if entry.state in {TableState.SYNCDONE, TableState.READY} and spool.is_left():
                await spool.sweep()

    def _make_launcher(self, prepared: Prepared, patient: Callable[[Collection[TableName]], bool], watchdog: Watchdog) -> SyncLauncher:
        state, position = prepared.state, prepared.position
        source = PublisherSource(self._conninfo, self._publications, self._options, self._settings, position)

        def make(table: TableName) -> TableSynchronization:
            return TableSynchronization(
                oid=state.oid,
                target_identifier=state.target_identifier,
                position=position,
                table=table,
                sink=self._sink.open_table(table),
                source=source,
                states=self._running.states,
                spool=self._table_spool(prepared, table),
                settings=self._settings,
                copy_format=copy_format(prepared.capabilities, self._options),
                progress=self._progress,
            )

        groups = None
        if isinstance(self._sink, GroupingSink):
            groups = GroupSynchronization(
                oid=state.oid,
                target_identifier=state.target_identifier,
                open_group=self._sink.open_group,
                source=PublisherGroupSource(source),
                states=self._running.states,
                settings=self._settings,
                copy_format=copy_format(prepared.capabilities, self._options),
                progress=self._progress,
            )
        return SyncLauncher(
            self._running.states,
            self._settings,
            make,
            self._synchronization_ended,
            groups=groups,
            patient=patient,
            disable_on_error=self._options.disable_on_error,
            watched=partial(watchdog.watched, tables=True),
        )

    def _synchronization_ended(self, _: TableName, error: SubscriberError | None) -> None:
        if error is not None:
            self._running.last_error = error
            if self._options.disable_on_error and disables(error):
                self._running.disabled_by = error
            self._sink.statistics.sync_error_count += 1
        self._running.wake()


def _spool_key(prepared: Prepared) -> str:
    return f"target {prepared.state.target_identifier} subscription {prepared.state.oid}"
