"""The launcher: runs every enabled subscription of a target's catalog, and follows changes of the catalog.

It compares the running subscriptions with the catalog at each notification and at least once a second. If a definition changed, or if a
verb claims the subscription, the launcher stops it cleanly and starts it again once it is free. A worker that ends with an error is
restarted: almost at once if the error is transient, else after ``wal_retrieve_retry_interval``, as PostgreSQL's launcher does.

If the target is lost, the session with the catalog is lost too. The workers handle that themselves. The launcher reconnects to the
catalog as soon as it can, and must then again be the only launcher.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Final

from subscriber.apply.progress import CopyProgress
from subscriber.apply.retry import Backoff, is_coming_up, policy
from subscriber.apply.tasks import Stopped, task_group, unless_set
from subscriber.catalog import Catalog, Definition
from subscriber.config import Settings
from subscriber.errors import (
    ConfigurationError,
    SubscriberError,
    SubscriptionInUse,
    TargetError,
)
from subscriber.interfaces import Retry, TableName
from subscriber.subscription.kept import details_of, keep_running, wait
from subscriber.subscription.subscription import Subscription
from subscriber.subscription.targets import open_catalog, opened_catalog

__all__ = ["Launcher"]

_log = logging.getLogger(__name__)

_TICK: Final = 1.0


class _Worker:
    """One running subscription."""

    def __init__(self, definition: Definition, subscription: Subscription) -> None:
        self.definition = definition
        self.subscription = subscription
        self.stopping = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.retry: Retry | None = None

    @property
    def done(self) -> bool:
        """Whether the worker has ended."""
        return self.task is not None and self.task.done()

    def stop(self) -> None:
        """Stop the worker cleanly."""
        self.stopping.set()
        self.subscription.stop()


class Launcher:
    """Runs the subscriptions of a target's catalog.

    Args:
        target: URL or conninfo of the target.
        names: names of the subscriptions to run. Empty: all subscriptions that are enabled now or later.
        settings: for all subscriptions.
        progress: is told about table copies.

    Attributes:
        paused: names of subscriptions that do not run although they are enabled. Any thread may change it; it is followed within a second.
    """

    def __init__(
        self,
        target: str,
        names: Sequence[str] = (),
        *,
        settings: Settings | None = None,
        progress: CopyProgress | None = None,
    ) -> None:
        self._target = target
        self._names = frozenset(names)
        self._settings = settings or Settings()
        self._progress = progress
        self.paused: set[str] = set()
        self._workers: dict[int, _Worker] = {}
        self._refused: dict[int, Definition] = {}
        self._errors: dict[int, tuple[str, str | None]] = {}
        self._noted = asyncio.Event()
        self._stop = asyncio.Event()
        self._said_idle = False
        self._session: int | None = None

    @property
    def subscriptions(self) -> dict[str, Subscription]:
        """The running subscriptions, by name."""
        # copied in one step, because metrics read it from another thread
        return {worker.definition.name: worker.subscription for worker in list(self._workers.values())}

    def stop(self) -> None:
        """End :meth:`run` soon and cleanly, like :meth:`Subscription.stop`."""
        self._stop.set()

    async def run(self) -> None:
        """Run until :meth:`stop`.

        Raises:
            SubscriptionInUse: the target already has a launcher.
            TargetError, ConfigurationError: the target cannot be used, or a subscription in ``names`` does not exist. Only at the start:
                later the launcher waits for the target. It waits for a target that is starting up from the beginning.
        """
        with contextlib.suppress(Stopped):
            await self._run()

    async def _run(self) -> None:
        try:
            catalog = await unless_set(self._stop, self._open())
        except TargetError as error:
            if not is_coming_up(error):
                raise
            catalog = await self._reopen()
        try:
            await unless_set(self._stop, self._require_names(catalog))
            async with task_group() as group:
                try:
                    while not self._stop.is_set():
                        try:
                            with contextlib.suppress(Stopped):
                                await unless_set(self._stop, self._follow(catalog, group))
                        except TargetError as error:
                            if isinstance(error, SubscriptionInUse):
                                raise
                            _log.warning("could not read the target's catalog: %s", error.one_line())
                            await catalog.close()
                            with contextlib.suppress(Stopped):
                                catalog = await self._reopen()
                finally:
                    for worker in self._workers.values():
                        worker.stop()
        finally:
            await catalog.close()

    async def _open(self) -> Catalog:
        catalog = await open_catalog(self._target, "subscriber launcher")
        try:
            self._session = await catalog.become_launcher(self._session)
        except BaseException:
            await catalog.close()
            raise
        return catalog

    async def _reopen(self) -> Catalog:
        """Open the catalog, and retry until it succeeds. Raises Stopped."""
        backoff = Backoff(self._settings)
        logged = ""
        while True:
            try:
                return await unless_set(self._stop, self._open())
            except TargetError as error:
                if isinstance(error, SubscriptionInUse):
                    raise
                if error.one_line() != logged:
                    # log each reason once: a different reason may need a different remedy
                    logged = error.one_line()
                    _log.warning("could not open the target's catalog: %s", logged)
                await wait(self._stop, backoff.pause(policy(error)))

    async def _require_names(self, catalog: Catalog) -> None:
        found = {definition.name: definition for definition in await catalog.subscriptions()}
        for name in sorted(self._names):
            if name not in found:
                raise TargetError(f'subscription "{name}" does not exist', sqlstate="42704", hint="create it with `subscriber create`")
            if found[name].made and found[name].conninfo is None:
                raise ConfigurationError(
                    f'subscription "{name}" is defined by its command line, not in the target\'s catalog',
                    hint=f'run it with "subscriber run --connection ... --publication ... --target ... --name {name}";'
                    f' or define it in the catalog with "subscriber alter {name} --target ... --connection ..."',
                )

    async def _follow(self, catalog: Catalog, group: asyncio.TaskGroup) -> None:
        """Compare the workers with the catalog once, then wait for the next change."""
        self._noted.clear()
        for worker in self._workers.values():
            # while the sink of a run is not open yet, the run cannot report that it waits
            status = worker.subscription.status
            if status.retry not in {None, worker.retry} and status.last_error is not None and not status.tables:
                worker.retry = status.retry
                self._note(worker.definition, status.last_error, worker)
        while self._errors:
            oid, news = next(iter(self._errors.items()))
            await catalog.note_error(oid, *news)
            if self._errors.get(oid) == news:
                del self._errors[oid]
        defined = await catalog.subscriptions()
        wanted = {found.oid: found for found in defined if self._is_wanted(found)}
        self._tell_idle(defined)
        for oid, worker in list(self._workers.items()):
            if worker.done:
                del self._workers[oid]
            elif oid not in wanted or _essence(wanted[oid]) != _essence(worker.definition):
                worker.stop()
            else:
                worker.subscription.set_limits(wanted[oid].options)
        for oid, definition in wanted.items():
            if oid not in self._workers:
                self._start(definition, group)
        waiting = {asyncio.ensure_future(work) for work in (catalog.wait(_TICK), self._stop.wait(), self._noted.wait())}
        ending = {worker.task for worker in self._workers.values() if worker.task is not None and worker.stopping.is_set()}
        try:
            done, _ = await asyncio.wait({*waiting, *ending}, return_when=asyncio.FIRST_COMPLETED)
            for future in done & waiting:
                future.result()
        finally:
            for future in waiting:
                future.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    def _tell_idle(self, defined: Sequence[Definition]) -> None:
        """Log once that there is nothing to run, and why, unless something was run before."""
        found = [each for each in defined if each.conninfo is not None and (not self._names or each.name in self._names)]
        if self._said_idle or any(each.enabled for each in found):
            return
        self._said_idle = True
        if found:
            reason, hint = "no subscription is enabled", "enable one with `subscriber alter NAME --enable`; `subscriber status` lists them"
        elif defined:
            reason, hint = (
                "the subscriptions of this target are defined by their command lines",
                "run each with its own command line, or define one with `subscriber create`",
            )
        else:
            reason, hint = "the target's catalog has no subscription", "create one with `subscriber create`"
        _log.warning("nothing to run: %s; waiting until a subscription is enabled (hint: %s)", reason, hint)

    def _is_wanted(self, found: Definition) -> bool:
        if found.name in self.paused or (self._names and found.name not in self._names):
            return False
        return found.enabled and found.made and not found.claimed and found.conninfo is not None and found.slot_name is not None

    def _start(self, definition: Definition, group: asyncio.TaskGroup) -> None:
        if self._refused.get(definition.oid) == definition:
            return
        try:
            progress = self._progress and _Named(self._progress, definition.name)
            subscription = Subscription.of_definition(definition, self._target, self._settings, progress)
        except ConfigurationError as error:
            # the catalog was edited by hand: that must not end the other subscriptions
            self._refused[definition.oid] = definition
            self._note(definition, error)
            _log.error('subscription "%s" cannot run: %s', definition.name, error.one_line())
            return
        _log.info('starting subscription "%s"', definition.name)
        worker = self._workers[definition.oid] = _Worker(definition, subscription)
        self._said_idle = True
        worker.task = group.create_task(self._keep(worker), name=f"subscription {definition.name}")

    def _note(self, definition: Definition, error: SubscriberError, worker: _Worker | None = None) -> None:
        """Record an error of a run whose sink may not be able to report it. :meth:`_follow` writes it. ``worker``: the run is retried."""
        details = details_of(worker.subscription, worker.retry) if worker is not None and worker.retry is not None else None
        self._errors[definition.oid] = error.one_line(), details
        self._noted.set()

    async def _keep(self, worker: _Worker) -> None:
        """Run one subscription until it is stopped. The launcher starts a new generation as soon as the subscription is free."""
        definition = worker.definition

        async def failed(error: SubscriberError, retry: Retry | None) -> None:
            if retry is not None:
                worker.retry = retry
            self._note(definition, error, worker if retry is not None else None)

        error = await keep_running(worker.subscription, self._settings, worker.stopping, failed)
        if error is not None and worker.subscription.disabled_by is not None:
            await self._disable(definition, error)

    async def _disable(self, definition: Definition, error: SubscriberError) -> None:
        _log.error('subscription "%s": %s', definition.name, error.one_line())
        backoff = Backoff(self._settings)
        while not self._stop.is_set():
            try:
                async with opened_catalog(self._target, "subscriber launcher") as catalog:
                    await catalog.update(definition.oid, {"enabled": False})
            except TargetError as failure:
                await wait(self._stop, backoff.pause(policy(failure)))
            else:
                _log.error('subscription "%s" has been disabled because of an error', definition.name)
                return


def _essence(definition: Definition) -> tuple[object, ...]:
    """The parts of a definition whose change restarts the worker. The worker itself changes ``skip_lsn`` and ``two_phase``."""
    options = definition.options.without_limits
    return definition.generation, definition.name, definition.conninfo, definition.slot_name, definition.publications, options


class _Named:
    """Progress of one of several subscriptions. Adds its name to the table names."""

    def __init__(self, other: CopyProgress, name: str) -> None:
        self._other = other
        self._name = name

    def _table(self, table: TableName) -> TableName:
        return TableName(f"{self._name}: {table.namespace}", table.name)

    def started(self, table: TableName, estimated_rows: int | None) -> None:
        self._other.started(self._table(table), estimated_rows)

    def advanced(self, table: TableName, rows: int) -> None:
        self._other.advanced(self._table(table), rows)

    def finished(self, table: TableName) -> None:
        self._other.finished(self._table(table))
