"""The table synchronizations of one run: what each is made of, and what an error of one means for the run."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Collection

from subscriber.apply.progress import CopyProgress
from subscriber.apply.receiving.spool import SpoolDirectory
from subscriber.apply.retry import disables
from subscriber.apply.tables.parking import Parking
from subscriber.apply.tables.table_groups import GroupSynchronization
from subscriber.apply.tables.table_sync_launcher import SyncLauncher
from subscriber.apply.tables.table_synchronization import SyncRun, TableSynchronization
from subscriber.errors import RelationError, SubscriberError, TargetUnavailable
from subscriber.interfaces import GroupingSink, TableName, TableState
from subscriber.subscription.run.run_state import RunState
from subscriber.subscription.run.tables.added_columns import add_columns, adds_columns
from subscriber.subscription.run.tables.copy_source import PublisherSource, copy_format
from subscriber.subscription.run.watchdog import Watchdog
from subscriber.subscription.setup.setup import Prepared
from subscriber.subscription.target_session import TargetSession

__all__ = ["TableSynchronizations"]


class TableSynchronizations:
    """A :class:`subscriber.apply.tables.table_sync_launcher.SyncOwner`.

    Args:
        target: open.
        prepared: where the run starts.
        state: shared with the rest of the run.
        progress: is told about copies.
        watchdog: ends a synchronization that makes no progress.
        parking: parks tables.

    Attributes:
        launcher: runs the synchronizations.
    """

    def __init__(
        self,
        target: TargetSession,
        prepared: Prepared,
        state: RunState,
        progress: CopyProgress,
        watchdog: Watchdog,
        *,
        parking: Parking,
    ) -> None:
        spec = self._spec = target.spec
        self._target = target
        self._prepared = prepared
        self._state = state
        self._watchdog = watchdog
        source = PublisherSource(spec, prepared.position, state.copy_rate)
        self._run = SyncRun(
            oid=prepared.state.oid,
            target_identifier=prepared.state.target_identifier,
            position=prepared.position,
            source=source,
            states=state.states,
            settings=spec.settings,
            copy_format=copy_format(prepared.capabilities, spec.options),
            progress=progress,
            reconciled=state.reconciled,
            apply_rate=state.apply_rate,
        )
        grouping = isinstance(target.opened, GroupingSink)
        groups = GroupSynchronization(self._run, target, source) if grouping else None
        disable = spec.options.on_error == "disable"
        self.launcher = SyncLauncher(
            state.states,
            spec.settings,
            self,
            disable_on_error=disable,
            parking=parking,
            groups=groups,
            sizes=prepared.sizes,
            opens=state.window_opens,
        )

    async def sweep_spools(self) -> None:
        """Delete spools that are not used any more: a process that was killed right after synchronizing a table left its rows there."""
        for table, entry in self._prepared.tables.items():
            spool = self._spool(table)
            if entry.is_synchronized and spool.is_left():
                await spool.sweep()

    def _spool(self, table: TableName) -> SpoolDirectory:
        return SpoolDirectory(self._spec.settings.spool_directory, f"{self._prepared.spool_key} table {table}")

    # --- for the launcher

    def make(self, table: TableName) -> TableSynchronization:
        """Make a table's synchronization."""
        return TableSynchronization(self._run, table, self._target.opened.open_table(table), self._spool(table))

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Let the watchdog watch a synchronization. If the target lacks columns, add them, for the next attempt."""
        try:
            async with self._watchdog.watched(tables=True):
                yield
        except RelationError as error:
            if error.missing_columns is None or not adds_columns(self._spec):
                raise
            name = TableName(error.missing_columns.namespace, error.missing_columns.name)
            copied = self._state.states.state(name) is TableState.FINISHEDCOPY
            await add_columns(self._spec, error.missing_columns, synchronized=copied)
            raise TargetUnavailable("columns were added in the target: the table is synchronized with them") from None

    def ended(self, _: TableName, error: SubscriberError | None) -> None:
        """Note the error of an attempt."""
        if error is not None:
            self._state.last_error = error
            if self._spec.options.on_error == "disable" and disables(error):
                self._state.disabled_by = error
            self._spec.sink.statistics.sync_error_count += 1
        self._state.wake()

    def is_patient(self, failed: Collection[TableName]) -> bool:
        """Whether to retry after an error that the user must fix.

        If no table can be copied at the first start of a subscription, the user must learn it at once.
        """
        states = self._state.states
        first = self._prepared.first and not states.any_synchronized
        return self._state.patient and not (first and set(states.unsynchronized).issubset(failed))
